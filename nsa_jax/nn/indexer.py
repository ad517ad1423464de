"""A selector of its own parameters: index queries and keys whose products score the blocks."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from nsa_jax import attention, layout
from nsa_jax.array_typing import Array, DType, Float, Float32, Int, Int32
from nsa_jax.config import NSAConfig, check_config
from nsa_jax.nn.checks import check_inputs, check_parameters
from nsa_jax.nn.projections import Sharding, head_norm, projection
from nsa_jax.nn.rotary import DEFAULT_BASE, RotaryFunction, rotary_function, turn
from nsa_jax.option_checks import check_flag, check_int


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerConfig:
    """An `Indexer` as the option `selector` of a layer or of a `TransformerConfig`, which a checkpoint keeps.

    Attributes:
      num_heads: index heads of each KV head, `J`.
      dim: width of index queries and keys, `E`.
      weighted: whether a token's score is the sum over index heads of `weight * relu(q.k)`, with weights from
        the layer input, as in the lightning indexer of DeepSeek V3.2; by default it is the largest `q.k`, as
        in MSA (arXiv:2606.13392).
      normalize: whether index queries and keys pass an RMSNorm each before rotation.
      shared_key: whether one index key of a token serves all KV heads, as in MSA and the lightning indexer;
        else each KV head has its own.
      slow_pairs: whether index queries and keys are rotated as the slower half of the pairs of a head twice
        as wide. Over long distances faster pairs tell little, so that the heads of a dense model can be cut
        to half of their width, see `nsa_jax.pretrained.to_nsa`.

    Raises:
      TypeError: a number is not an int, or a switch not a bool.
      ValueError: a number is below 1, or `dim` is odd with `slow_pairs`.
    """

    num_heads: int = 1
    dim: int = 128
    weighted: bool = False
    normalize: bool = False
    shared_key: bool = True
    slow_pairs: bool = False

    def __post_init__(self):
        for name in ("num_heads", "dim"):
            check_int(low=1, **{name: getattr(self, name)})
            object.__setattr__(self, name, int(getattr(self, name)))
        for name in ("weighted", "normalize", "shared_key", "slow_pairs"):
            check_flag(**{name: getattr(self, name)})
        if self.slow_pairs and self.dim % 2:
            raise ValueError(f"dim must be even with slow_pairs, got {self.dim}. Choose an even one.")


class Indexer(nnx.Module):
    """Scores blocks by products of index queries and index keys, both projected from the layer input.

    Each KV head has `num_heads` index queries of a token, and an index key of its own unless one serves all.
    Both are rotated. The score of a block is the largest score of its tokens, see `nsa_jax.block_scores`, and
    `nsa_jax.select_by_index` chooses by it. No gradient flows through the choice: an indexer learns by a
    selection loss, see `NSAAttention`.

    Parameters: `query_proj`, `key_proj`, and `weight_proj` if the heads are weighted, each with a `kernel`;
    with `normalize` also `query_norm` and `key_norm`, each with a `scale`.

    Args:
      in_features: width of the layer input.
      num_kv_heads: number of KV heads of the layer.
      config: block structure.
      options: its heads, and how it scores.
      rotary: rotates index queries and keys; by default `rotate` with base 10000. A layer gives its own.
      dtype: dtype of the computation; by default the promoted dtype of inputs and parameters.
      param_dtype: dtype of the parameters.
      precision: precision of the projections, see `jax.lax.Precision`.
      kernel_init: initializer of the kernels.
      sharding: mesh axes of the dimensions "model" and "kv_heads", see `NSAAttention`.
      rngs: source of the initial parameters.

    Raises:
      TypeError, ValueError: as in `NSAAttention`.
    """

    def __init__(
        self,
        in_features: int,
        num_kv_heads: int,
        config: NSAConfig,
        options: IndexerConfig = IndexerConfig(),
        *,
        rotary: RotaryFunction | None = None,
        dtype: DType | None = None,
        param_dtype: DType = jnp.float32,
        precision: Any = None,
        kernel_init: nnx.Initializer = nnx.initializers.lecun_normal(),  # noqa: B008 (pure)
        sharding: Sharding | None = None,
        rngs: nnx.Rngs,
    ):
        if not isinstance(options, IndexerConfig):
            raise TypeError(
                f"options must be an IndexerConfig, got {type(options).__name__}. Build one with "
                "IndexerConfig(...)."
            )
        check_int(low=1, in_features=in_features, num_kv_heads=num_kv_heads)
        check_config(config)
        numbers: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype)
        check_parameters(**numbers, precision=precision, kernel_init=kernel_init, rngs=rngs)
        self.in_features, self.config, self.options = int(in_features), config, options
        self.rotary = rotary_function(DEFAULT_BASE, None, rotary)
        heads, dim = (int(num_kv_heads), options.num_heads), options.dim
        of_kernel: dict[str, Any] = dict(
            use_bias=False, precision=precision, kernel_init=kernel_init, sharding=sharding, rngs=rngs
        )
        into_heads = ("model", "kv_heads", None)
        self.query_proj = projection(
            in_features, (*heads, dim), dimensions=(*into_heads, None), **numbers, **of_kernel
        )
        key_heads, split = (1, None) if options.shared_key else (int(num_kv_heads), "kv_heads")
        self.key_proj = projection(
            in_features, (key_heads, dim), dimensions=("model", split, None), **numbers, **of_kernel
        )
        if options.weighted:
            self.weight_proj = projection(in_features, heads, dimensions=into_heads, **numbers, **of_kernel)
        self.query_norm = head_norm(options.normalize, dim, **numbers, rngs=rngs)
        self.key_norm = head_norm(options.normalize, dim, **numbers, rngs=rngs)

    def project(
        self,
        x: Float[Array, "B T D"],
        query: Float[Array, "B T N H"] | None,
        key_slc: Float[Array, "B T K H"] | None,
        positions: Int[Array, "B T"],
    ) -> tuple[tuple[Array, Array | None], Array]:
        """Projects and rotates the index queries and keys of tokens.

        Args:
          x: layer input.
          query: rotated queries of the layer; it does not read them.
          key_slc: rotated keys of the selected branch; it does not read them.
          positions: rotary position of each token.

        Returns:
          Index queries `[B, T, K, J, E]` with the weights of their heads `[B, T, K, J]` or None, and index
          keys `[B, T, I, E]`, where I is K, or 1 if all KV heads share them.
        """
        check_inputs(x, self.in_features)
        return self.turned({name: getattr(self, name)(x) for name in self.input_projections}, positions)

    @property
    def input_projections(self) -> tuple[str, ...]:
        """Names of the projections, all of which read the layer input."""
        return ("query_proj", "key_proj") + ("weight_proj",) * self.options.weighted

    def turned(
        self, products: Mapping[str, Array], positions: Int[Array, "B T"]
    ) -> tuple[tuple[Array, Array | None], Array]:
        """What `project` returns, given what the projections make of the input."""
        queries = self.query_norm(products["query_proj"])
        flat = queries.reshape(*queries.shape[:2], -1, queries.shape[-1])
        queries = self._turned(flat, positions).reshape(queries.shape)
        keys = self._turned(self.key_norm(products["key_proj"]), positions)
        weights = products["weight_proj"].astype(queries.dtype) if self.options.weighted else None
        return (queries, weights), keys.astype(queries.dtype)

    def _turned(
        self, heads: Float[Array, "B T N E"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T N E"]:
        """The rotated heads, or the slower pairs of heads twice as wide, of which the faster pairs are 0."""
        if not self.options.slow_pairs:
            return turn(self.rotary, heads, positions)
        half = heads.shape[-1] // 2
        pairs = heads.reshape(*heads.shape[:3], 2, half)
        whole = jnp.pad(pairs, ((0, 0),) * 4 + ((half, 0),))
        turned = turn(self.rotary, whole.reshape(*heads.shape[:3], 4 * half), positions)
        return turned.reshape(whole.shape)[..., half:].reshape(heads.shape)

    def choose(
        self, queries: tuple[Array, Array | None], keys: Float[Array, "B S I E"], at: Int32[Array, "B T"],
        **where: Any,
    ) -> Int32[Array, "B T K R"]:  # fmt: skip
        """Chooses the blocks with the best scores; arguments as in `Selector.choose`."""
        query, weights = queries
        return attention.select_by_index(query, keys, weights=weights, **where)

    def scores(
        self, queries: tuple[Array, Array | None], keys: Float[Array, "B S I E"], at: Int32[Array, "B T"],
        **where: Any,
    ) -> Float32[Array, "B T K M"]:  # fmt: skip
        """Scores the blocks, with a gradient; arguments as in `Selector.choose`."""
        query, weights = queries
        return attention.block_scores(query, keys, weights=weights, **where)

    def chosen_scores(
        self, queries: tuple[Array, Array | None], keys: Float[Array, "B S I E"], at: Int32[Array, "B T"],
        block_indices: Int[Array, "B T K R"], **where: Any,
    ) -> Float32[Array, "B T K R"]:  # fmt: skip
        """Scores the blocks in the slots alone, with a gradient; see `Selector`."""
        if type(self).scores is not Indexer.scores:  # a subclass scores in its own way
            return layout.of_slots(self.scores(queries, keys, at, **where), block_indices)
        return self.scores(queries, keys, at, block_indices=block_indices, **where)
