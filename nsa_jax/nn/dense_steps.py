"""Decoding with a dense or window layer: prompts and decode steps through a cache."""

import abc
from typing import Any

import jax.numpy as jnp
from flax import nnx

from nsa_jax import cache as decoding
from nsa_jax.array_typing import Array, DType, Float, Int
from nsa_jax.cache import DenseCache
from nsa_jax.cache.dense import check_dense_layer_cache
from nsa_jax.config import NSAConfig
from nsa_jax.dispatch import Implementation
from nsa_jax.nn.checks import check_inputs


class DenseCacheSteps(nnx.Module):
    """The part of `DenseAttention` that decodes; the class itself makes the parameters and projects."""

    num_kv_heads: int
    in_features: int
    head_dim: int
    window: NSAConfig | None
    scale: float
    dtype: DType | None
    implementation: Implementation | None
    query_proj: nnx.LinearGeneral
    out_proj: nnx.LinearGeneral

    @abc.abstractmethod
    def _project(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K V"]]:
        """Rotated queries, rotated keys, and values."""

    def init_cache(
        self, batch: int, max_length: int, *, dtype: DType | None = None, step_capacity: int = 8
    ) -> DenseCache:
        """Makes an empty cache for `prefill` and `decode_step`, see `nsa_jax.cache.init_dense_cache`.

        Args:
          batch: number of rows.
          max_length: most tokens that a row can hold, prompt and new tokens together. It does not matter to a
            window layer if it is at least `window_size`.
          dtype: dtype of keys and values; by default the layer's `dtype`, or that of its parameters.
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
            dtype=(self.dtype or self.query_proj.kernel.dtype) if dtype is None else dtype,
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

    def prefill(
        self, x: Float[Array, "B T D"], cache: DenseCache, *, num_tokens: Int[Array, " B"] | None = None
    ) -> tuple[Float[Array, "B T D"], DenseCache]:
        """Appends a prompt, or a chunk of one, to every row and attends from each of its tokens.

        See `nsa_jax.cache.dense_prefill`, also for what raises.

        Args:
          x: layer input of the new tokens.
          cache: the cache so far. Each row is one sequence; rotary positions count from its first token.
          num_tokens: how many of the `T` tokens of each row are real; the others are padding on the right.
            All are real by default.

        Returns:
          The layer output of the new tokens, and the cache that holds them.
        """
        operands = self._project_new(x, cache)
        step = decoding.dense_prefill(cache, *operands, num_tokens=num_tokens, **self._step_settings())
        return self.out_proj(step.out), step.cache

    def decode_step(
        self,
        x: Float[Array, "B T D"],
        cache: DenseCache,
        *,
        num_tokens: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B T D"], DenseCache]:
        """Appends a few tokens to every row and attends from each of them.

        See `nsa_jax.cache.dense_decode_step`, also for what raises.

        Args:
          x: layer input of the new tokens. A window layer takes at most `step_capacity` tokens of a row.
          cache: the cache so far.
          num_tokens: how many of the `T` tokens of each row are real, see `prefill`.

        Returns:
          The layer output of the new tokens, and the cache that holds them.
        """
        operands = self._project_new(x, cache)
        step = decoding.dense_decode_step(cache, *operands, num_tokens=num_tokens, **self._step_settings())
        return self.out_proj(step.out), step.cache

    @property
    def _window_size(self) -> int | None:
        return None if self.window is None else self.window.window_size

    def _step_settings(self) -> dict[str, Any]:
        return dict(window_size=self._window_size, scale=self.scale, implementation=self.implementation)

    def _project_new(self, x: Array, cache: DenseCache) -> tuple[Array, Array, Array]:
        """`_project` at the positions that follow those in the cache."""
        check_inputs(x, self.in_features)
        self.check_cache(cache, x.shape[0])
        return self._project(x, cache.lengths[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32)[None])
