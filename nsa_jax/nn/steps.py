"""Decoding with an attention layer: prompts and decode steps through a cache."""

import abc
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from nsa_jax import cache as decoding
from nsa_jax.array_checks import check_arrays
from nsa_jax.array_typing import Array, DType, Float, Int, Int32
from nsa_jax.cache import DenseCache, NSACache
from nsa_jax.cache.checks import check_layer_cache
from nsa_jax.cache.dense import check_dense_layer_cache
from nsa_jax.compression import Compress, Compression
from nsa_jax.config import Branch, NSAConfig
from nsa_jax.dispatch import Implementation
from nsa_jax.layout import Quantised, Run, Runs, positions_of, slots
from nsa_jax.layout.quantised import check_quantised, is_quantised, widened, zeros
from nsa_jax.nn.checks import check_inputs
from nsa_jax.nn.choosing import Choosing
from nsa_jax.nn.compressor import Compressor
from nsa_jax.nn.indexer import Indexer
from nsa_jax.nn.joined import is_joined
from nsa_jax.nn.parts import compress
from nsa_jax.nn.rotary import Rotary, turn
from nsa_jax.nn.selector import choose, kept_of


class CacheSteps[C: (NSACache, DenseCache)](nnx.Module):
    """The part of a layer that decodes through a cache of type `C`; the layer itself projects."""

    num_kv_heads: int
    in_features: int
    head_dim: int
    scale: float
    dtype: DType | None
    implementation: Implementation | None
    query_proj: nnx.LinearGeneral
    out_proj: nnx.LinearGeneral
    _prefill: ClassVar[Callable[..., Any]]  # of `nsa_jax.cache`, and the next one, too
    _decode_step: ClassVar[Callable[..., Any]]

    @property
    @abc.abstractmethod
    def input_projections(self) -> tuple[str, ...]:
        """Names of the projections of the layer input, that of queries first."""

    @property
    def _cache_dtype(self) -> DType:
        """The dtype of what it projects."""
        projection = getattr(self, "joined" if is_joined(self) else self.input_projections[0])
        return self.dtype or projection.kernel.dtype

    @abc.abstractmethod
    def _project(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> tuple[Any, ...]:
        """What these two take of new tokens: rotated queries, keys and values, and what else there is."""

    @abc.abstractmethod
    def _step_settings(self, cache: C, block_indices: Int[Array, "B T K R"] | None) -> dict[str, Any]:
        """Their options; `block_indices` are those of this call."""

    @abc.abstractmethod
    def check_cache(self, cache: C, batch: int) -> None:
        """Raises TypeError or ValueError unless a cache fits this layer and has `batch` rows."""

    def prefill(
        self,
        x: Float[Array, "B T D"],
        cache: C,
        *,
        num_tokens: Int[Array, " B"] | None = None,
        block_indices: Int[Array, "B T K R"] | None = None,
    ) -> tuple[Float[Array, "B T D"], C]:
        """Appends a prompt, or a chunk of one, to every row and attends from each of its tokens.

        See `nsa_jax.cache.prefill`, or `nsa_jax.cache.dense_prefill` for a dense or window layer, also for
        what else raises.

        Args:
          x: layer input of the new tokens.
          cache: the cache so far. Each row is one sequence; rotary positions count from its first token.
          num_tokens: how many of the `T` tokens of each row are real; the others are padding on the right.
            All are real by default.
          block_indices: a selection to use instead of choosing one, in the form that `inspect` returns; for
            an NSA layer only.

        Returns:
          The layer output of the new tokens, and the cache that holds them. For a padding token the output is
          0, or the bias of the output projection; an NSA layer gives NaN where the input of that token is.

        Raises:
          NotImplementedError: `block_indices` are given to another layer.
        """
        new = self._project_new(x, cache)
        cache, block_indices = self._select(x, new, cache, num_tokens, block_indices)
        settings = self._step_settings(cache, block_indices=block_indices)
        step = type(self)._prefill(cache, *new, num_tokens=num_tokens, **settings)
        return self.out_proj(step.out), step.cache

    def decode_step(
        self,
        x: Float[Array, "B T D"],
        cache: C,
        *,
        num_tokens: Int[Array, " B"] | None = None,
        block_indices: Int[Array, "B T K R"] | None = None,
    ) -> tuple[Float[Array, "B T D"], C]:
        """Appends a few tokens to every row and attends from each of them.

        See `nsa_jax.cache.decode_step`, or `nsa_jax.cache.dense_decode_step` for a dense or window layer,
        also for what else raises.

        Args:
          x: layer input of the new tokens. An NSA or window layer takes at most `step_capacity` tokens of a
            row.
          cache: the cache so far.
          num_tokens: how many of the `T` tokens of each row are real, see `prefill`.
          block_indices: a selection to use, see `prefill`.

        Returns:
          The layer output of the new tokens, with that of padding as in `prefill`, and the cache that holds
          them.

        Raises:
          NotImplementedError: `block_indices` are given to another layer.
        """
        new = self._project_new(x, cache)
        cache, block_indices = self._select(x, new, cache, num_tokens, block_indices)
        settings = self._step_settings(cache, block_indices=block_indices)
        step = type(self)._decode_step(cache, *new, num_tokens=num_tokens, **settings)
        return self.out_proj(step.out), step.cache

    def _project_new(self, x: Array, cache: C) -> tuple[Any, ...]:
        """`_project` at the positions that follow those in the cache."""
        check_inputs(x, self.in_features)
        self.check_cache(cache, x.shape[0])
        return self._project(x, _next_positions(x, cache))

    def _select(
        self,
        x: Float[Array, "B T D"],
        new: tuple[Any, ...],
        cache: C,
        num_tokens: Int[Array, " B"] | None,
        block_indices: Int[Array, "B T K R"] | None,
    ) -> tuple[C, Int[Array, "B T K R"] | None]:
        """The cache with what a selector keeps of the new tokens, and the blocks that it chooses for them.

        `new` is what `_project` returned for these tokens.
        """
        return cache, block_indices


def _next_positions(x: Float[Array, "B T D"], cache: NSACache | DenseCache) -> Int32[Array, "B T"]:
    return cache.lengths[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32)[None]


class NSACacheSteps(CacheSteps[NSACache], Choosing):
    """The part of `NSAAttention` that decodes; the class itself makes the parameters and projects."""

    value_dim: int
    share_keys_values: bool
    branches: tuple[Branch, ...]
    _prefill, _decode_step = staticmethod(decoding.prefill), staticmethod(decoding.decode_step)

    def init_cache(
        self, batch: int, max_length: int, *, dtype: DType | None = None, step_capacity: int = 8
    ) -> NSACache:
        """Makes an empty cache for `prefill` and `decode_step`, see `nsa_jax.cache.init_cache`.

        Args:
          batch: number of rows.
          max_length: most tokens that a row can hold, prompt and new tokens together.
          dtype: dtype of keys and values; by default the layer's `dtype`, or that of its parameters. A
            quantised cache has "int8" or "float8_e4m3fn": then what a selector keeps in floating-point arrays
            `[B, S, ..., D]` is rounded, too.
          step_capacity: most tokens that one `decode_step` can append to a row.

        Returns:
          A cache in which every row has length 0.
        """
        dtype = self._cache_dtype if dtype is None else dtype
        cache = decoding.init_cache(
            batch,
            max_length,
            num_kv_heads=self.num_kv_heads,
            key_dim=self.head_dim,
            value_dim=self.value_dim,
            config=self.config,
            dtype=dtype,
            raw_dtype=self._cache_dtype if is_quantised(dtype) else None,
            step_capacity=step_capacity,
            share_keys_values=self.share_keys_values,
            branches=self.branches,
        )
        if self.selects != "selector":
            return cache

        def empty(kept: jax.ShapeDtypeStruct) -> Array | Quantised:
            if not jnp.issubdtype(kept.dtype, jnp.floating):
                return jnp.zeros(kept.shape, kept.dtype)
            # A number of its own for each token would need a scale of its own.
            single = is_quantised(dtype) and len(kept.shape) == 2
            return zeros(kept.shape, kept.dtype if single else dtype)

        return cache._replace(kept=jax.tree.map(empty, self._kept(batch, max_length)))

    def _kept(self, batch: int, length: int) -> Any:
        """Shapes of what the selector keeps."""
        return kept_of(self._project_to_choose, self._tokens_to_choose(batch, 1, self._cache_dtype), length)

    def _select(
        self,
        x: Float[Array, "B T D"],
        new: tuple[Any, ...],
        cache: NSACache,
        num_tokens: Int[Array, " B"] | None,
        block_indices: Int[Array, "B T K R"] | None,
    ) -> tuple[NSACache, Int[Array, "B T K R"] | None]:
        if self.selects != "selector":
            if block_indices is None:
                self._check_selects()
            return cache, block_indices
        check_arrays(CacheSteps.prefill, x=x, num_tokens=num_tokens)
        query, tokens, _ = new
        queries, keys = self._project_to_choose(x, query, tokens.key_slc, _next_positions(x, cache))
        cache = decoding.keep(cache, keys, num_tokens=num_tokens)
        if block_indices is None:
            admitted = slots.admit(cache.lengths, cache.max_length, x.shape[1], num_tokens)
            runs = Runs((Run(x.shape[1], admitted.start),), num_queries=admitted.num_tokens)
            # An indexer reads what is rounded as it is; other selectors get it as floats.
            kept = cache.kept if type(self.selector) is Indexer else widened(cache.kept, self._cache_dtype)
            block_indices = choose(
                self.selector, queries, kept, positions_of(runs, x.shape[0]), self.num_kv_heads,
                config=self.config, query_positions=runs, segment_ids=None,
                implementation=self.implementation,
            )  # fmt: skip
        return cache, block_indices

    def check_cache(self, cache: NSACache, batch: int) -> None:
        """Checks that a cache fits this layer.

        Args:
          cache: the cache.
          batch: number of rows that it must have.

        Raises:
          TypeError: `cache` is not an `NSACache`, or one of its arrays is of another kind.
          ValueError: its arrays do not fit together, its sizes are not those of this layer, or it has another
            number of rows.
        """
        check_layer_cache(
            cache,
            batch=batch,
            num_kv_heads=self.num_kv_heads,
            key_dim=self.head_dim,
            value_dim=self.value_dim,
            config=self.config,
            branches=self.branches,
            share_keys_values=self.share_keys_values,
        )
        if self.selects != "selector":
            return
        for x in jax.tree.leaves(cache.kept, is_leaf=lambda x: isinstance(x, Quantised)):
            check_quantised(**{"cache.kept": x})
        expected, held = (
            jax.tree.map(lambda x: tuple(x.shape), tree, is_leaf=lambda x: isinstance(x, Quantised))
            for tree in (self._kept(batch, cache.max_length), cache.kept)
        )
        if held != expected:
            raise ValueError(
                f"a cache must have what its layer's selector keeps, {expected}, got {held}. Call init_cache "
                "of this layer."
            )

    def _step_settings(self, cache: NSACache, block_indices: Int[Array, "B T K R"] | None) -> dict[str, Any]:
        return dict(
            block_indices=block_indices,
            config=self.config,
            compress=None if cache.key_raw_ring is None else self._compression(cache.key_raw_ring.dtype),
            scale=self.scale,
            implementation=self.implementation,
        )

    def _compression(self, dtype: DType) -> Compress:
        """`_compress` for tokens of `dtype`, as data where possible, because GPU kernels can read data."""
        key, value = self.compressor_key, self.compressor_value
        if type(key) is not Compressor or type(value) is not Compressor or type(self.rotary) is not Rotary:
            return self._compress
        if not (key.is_data(dtype) and value.is_data(dtype)):
            return self._compress
        return Compression(key.weights(dtype), value.weights(dtype), self.rotary.rotation(self.head_dim))

    def _compress(
        self, key_windows: Array, value_windows: Array, first_positions: Int[Array, "B m"]
    ) -> tuple[Array, Array]:
        """Compressed keys, rotated at the position of their block's first token, and compressed values."""
        key_cmp = turn(self.rotary, compress(self.compressor_key, key_windows), first_positions)
        return key_cmp, compress(self.compressor_value, value_windows)


class DenseCacheSteps(CacheSteps[DenseCache]):
    """The part of `DenseAttention` that decodes; the class itself makes the parameters and projects."""

    window: NSAConfig | None
    _prefill, _decode_step = staticmethod(decoding.dense_prefill), staticmethod(decoding.dense_decode_step)

    def init_cache(
        self, batch: int, max_length: int, *, dtype: DType | None = None, step_capacity: int = 8
    ) -> DenseCache:
        """Makes an empty cache for `prefill` and `decode_step`, see `nsa_jax.cache.init_dense_cache`.

        Args:
          batch: number of rows.
          max_length: most tokens that a row can hold, prompt and new tokens together. It does not matter to a
            window layer if it is at least `window_size`.
          dtype: dtype of keys and values; by default the layer's `dtype`, or that of its parameters. A
            quantised cache has "int8" or "float8_e4m3fn".
          step_capacity: most tokens that one `decode_step` of a window layer can append to a row.

        Returns:
          A cache in which every row has length 0.
        """
        return decoding.init_dense_cache(
            batch,
            max_length,
            num_kv_heads=self.num_kv_heads,
            key_dim=self.head_dim,
            value_dim=self.head_dim,
            dtype=self._cache_dtype if dtype is None else dtype,
            window_size=self._window_size,
            step_capacity=step_capacity,
        )

    def check_cache(self, cache: DenseCache, batch: int) -> None:
        """Checks that a cache fits this layer.

        Args:
          cache: the cache.
          batch: number of rows that it must have.

        Raises:
          TypeError: `cache` is not a `DenseCache`, or one of its arrays is of another kind.
          ValueError: its arrays do not fit together, its sizes are not those of this layer, or it has another
            number of rows.
        """
        check_dense_layer_cache(
            cache,
            batch=batch,
            num_kv_heads=self.num_kv_heads,
            key_dim=self.head_dim,
            value_dim=self.head_dim,
        )

    @property
    def _window_size(self) -> int | None:
        return None if self.window is None else self.window.window_size

    def _step_settings(
        self, cache: DenseCache, block_indices: Int[Array, "B T K R"] | None
    ) -> dict[str, Any]:
        if block_indices is not None:
            raise NotImplementedError(
                f"block_indices need NSA layers, got {type(self).__name__}. Leave them out: there is no "
                "selection."
            )
        return dict(window_size=self._window_size, scale=self.scale, implementation=self.implementation)
