"""Inputs of the benchmarks: tensors by name, distributions of selections, and their measured overlap.

The speed of selected attention depends on how many blocks neighbouring tokens share, so every figure names
its distribution. In `random` tokens agree by chance only. In `coherent` what a token looks for drifts
smoothly: it is cosine-interpolated between random keyframes every `KEYFRAME_TOKENS` tokens, plus noise. In
`trained` it drifts, too, with just the noise at which neighbours agree as much as in a trained model.

Rows of `selected_attention` alone draw scores of the blocks. Rows in which the selection is computed (the
whole operation, `select_blocks`) draw queries and take the blocks that come out, never substituted ones.
Layers draw a random input.
"""

import argparse
import dataclasses
import functools
import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nsa_jax import attention, layout
from nsa_jax.array_typing import Array, DType, Float, Int, Int32
from nsa_jax.config import NSAConfig

DISTRIBUTIONS = ("random", "coherent", "trained")
MEASURED_BY_DEFAULT = DISTRIBUTIONS[:2]
# How far the share of neighbours is from chance (0) to agreement (1) in SmolLM2 135M at 8k tokens: the median
# over layers and KV heads (docs/results.md, models that people own). At 32k it is 0.71.
TRAINED_AGREEMENT = 0.75
KEYFRAME_TOKENS = 32
# Beyond this neighbours share almost all blocks, and the time would be better than any real one.
MAX_ADJACENT_SHARE = 0.93
MIN_MEAN_UNION_4 = 18.2
NOISES = tuple(0.04 * 1.25**step for step in range(16))  # 0.04 suits long rows, short ones need more
TOKENS_PER_DRAW = 2048  # bounds the memory of drawn scores, [B, 2048, K, M]

KEYS_VALUES = ("key_cmp", "value_cmp", "key_slc", "value_slc", "key_win", "value_win")
ARGUMENTS = {
    "native_sparse_attention": ("query", *KEYS_VALUES, "gates"),
    "compressed_attention": ("query", "key_cmp", "value_cmp"),
    "select_blocks": ("query", "key_cmp", "lse_cmp"),
    "selected_attention": ("query", "key_slc", "value_slc", "block_indices"),
    "window_attention": ("query", "key_win", "value_win"),
    "gated_sum": ("out_cmp", "out_slc", "out_win", "gates"),
    "dense_attention": ("query", "key_win", "value_win"),
}
OPERATIONS = tuple(ARGUMENTS)
# Layers by the operation that they are around; layers.py has their arguments.
LAYERS = {"layer": "native_sparse_attention", "dense_layer": "dense_attention"}
SELECTING = ("native_sparse_attention", "select_blocks", "selected_attention")

type Choose = Callable[[Array], Array]  # query -> block_indices


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of one measurement; queries and keys are equally long."""

    batch: int = 1
    length: int
    query_heads: int = 4
    kv_heads: int = 1
    key_dim: int = 64
    value_dim: int = 64
    model_dim: int | None = None  # of layers alone
    dtype: str = "float32"
    config: NSAConfig = dataclasses.field(default_factory=NSAConfig)


def shape_of(
    options: argparse.Namespace, length: int, config: NSAConfig, model_dim: int | None = None
) -> Shape:
    """The shape that a command asks for."""
    names = ("batch", "kv_heads", "key_dim", "value_dim", "dtype")
    sizes: dict[str, Any] = {name: getattr(options, name) for name in names}
    return Shape(length=length, query_heads=options.heads, config=config, model_dim=model_dim, **sizes)


@dataclasses.dataclass(frozen=True)
class Overlap:
    """How much neighbouring tokens share, over the whole sequence.

    Attributes:
      adjacent_share: mean share of a token's blocks that the token before it selected too.
      mean_union_4: mean number of different blocks of 4 adjacent tokens.
    """

    adjacent_share: Any
    mean_union_4: Any

    @property
    def counts_as_coherent(self) -> bool:
        """Whether neighbours differ enough for a fair figure."""
        return self.adjacent_share <= MAX_ADJACENT_SHARE and self.mean_union_4 >= MIN_MEAN_UNION_4


@dataclasses.dataclass(frozen=True, eq=False)
class Draw:
    """Queries of one distribution and, where a selection happens, the blocks and how much they overlap.

    For a layer `query` is its input.
    """

    distribution: str
    query: Float[Array, "B T N H"] | Float[Array, "B T D"]
    block_indices: Int32[Array, "B T K R"] | None = None
    overlap: Overlap = Overlap(None, None)
    noise: float | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """What a row says of it."""
        return {"distribution": self.distribution, "noise": self.noise} | vars(self.overlap)


class NotCoherent(ValueError):
    """The sequence is too short: its neighbours cannot differ as much as a coherent row must."""


def tensor_shape(name: str, shape: Shape) -> tuple[int, ...]:
    """Shape of the argument or result called `name`."""
    kind, _, branch = name.partition("_")
    length = shape.length
    if kind in ("key", "value") and branch == "cmp":
        length = layout.num_compression_blocks(length, shape.config)
    last: dict[str, tuple[Any, ...]] = {
        "x": (shape.model_dim,),
        "query": (shape.query_heads, shape.key_dim),
        "gates": (shape.query_heads, 3),
        "lse": (shape.query_heads,),
        "out": (shape.query_heads, shape.value_dim),
        "block": (shape.kv_heads, shape.config.num_selected_blocks),
        "key": (shape.kv_heads, shape.key_dim),
        "value": (shape.kv_heads, shape.value_dim),
    }
    return shape.batch, length, *last[kind]


def of_query(name: str) -> bool:
    """Whether the argument or result called `name` has a row for each query, not for each key."""
    return name in ("query", "gates", "lse") or name.startswith("out")


def tensor_dtype(name: str, shape: Shape) -> str:
    """Dtype of the argument or result called `name`; block indices and log-sum-exps have their own."""
    if name == "block_indices":
        return "int32"
    return "float32" if name.startswith("lse") else shape.dtype


def abstract_arguments(operation: str, shape: Shape) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes and dtypes of the positional arguments of `operation`."""
    return tuple(
        jax.ShapeDtypeStruct(tensor_shape(name, shape), tensor_dtype(name, shape))
        for name in ARGUMENTS[operation]
    )


def tensor(name: str, shape: Shape) -> Array:
    """Standard normal values, or uniform ones for gates; the same for one name and shape on one platform."""
    return _drawn(key(name), name == "gates", tensor_shape(name, shape), shape.dtype)


def normal(name: str, size: tuple[int, ...], dtype: DType) -> Array:
    """Standard normal values, the same for one name and size on one platform."""
    return _drawn(key(name), False, size, dtype)


# One program, in which the float32 numbers of a row of a million tokens never exist together.
@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _drawn(key: Array, uniform: bool, size: tuple[int, ...], dtype: DType) -> Array:
    draw = jax.random.uniform if uniform else jax.random.normal
    return draw(key, size, jnp.float32).astype(dtype)


def arguments(operation: str, draw: Draw, shape: Shape) -> tuple[Array, ...]:
    """The positional arguments of `operation`."""
    drawn = {"query": draw.query}
    if draw.block_indices is not None:
        drawn["block_indices"] = draw.block_indices
    if "lse_cmp" in ARGUMENTS[operation]:
        drawn["lse_cmp"] = _lse_cmp(draw.query, tensor("key_cmp", shape), shape.config)
    return tuple(drawn[name] if name in drawn else tensor(name, shape) for name in ARGUMENTS[operation])


@functools.partial(jax.jit, static_argnames=("config",))
def _lse_cmp(query: Array, key_cmp: Array, config: NSAConfig) -> Float[Array, "B T N"]:
    """The log-sum-exps of the compressed branch, which the selection need not compute again."""
    return attention.compressed_attention(query, key_cmp, key_cmp, config=config)[1]


def draw_queries(shape: Shape, distribution: str, choose: Choose | None) -> Draw:
    """Queries, with the blocks that `choose` selects for them (no selection if None).

    Raises:
      NotCoherent: no noise makes a coherent selection of this length that counts.
    """
    if choose is None:
        return Draw(distribution, tensor("query", shape))

    def attempt(noise: float | None) -> Draw:
        query = tensor("query", shape) if noise is None else _drifting(noise, shape=shape)
        blocks = choose(query)
        return Draw(distribution, query, blocks, overlap(blocks), noise)

    return _first_that_counts(attempt, distribution, shape)


def draw_blocks(shape: Shape, distribution: str) -> Draw:
    """Independent queries and drawn, not computed, blocks: for `selected_attention` alone.

    Raises:
      NotCoherent: as `draw_queries`.
    """

    def attempt(noise: float | None) -> Draw:
        blocks = _scored_blocks(key("scores"), noise, shape=shape)
        return Draw(distribution, tensor("query", shape), blocks, overlap(blocks), noise)

    return _first_that_counts(attempt, distribution, shape)


def overlap(block_indices: Int[Array, "B T K R"]) -> Overlap:
    """Measures a selection; unused slots (-1) do not count."""
    blocks = np.moveaxis(np.asarray(block_indices), 1, 2)  # [B, K, T, R]
    batch, kv_heads, length, _ = blocks.shape
    both = np.sort(np.concatenate([blocks[:, :, 1:], blocks[:, :, :-1]], axis=-1), axis=-1)
    shared = ((both[..., 1:] == both[..., :-1]) & (both[..., 1:] >= 0)).sum(-1)
    share = shared / np.maximum((blocks[:, :, 1:] >= 0).sum(-1), 1)
    fours = blocks[:, :, : length // 4 * 4].reshape(batch, kv_heads, length // 4, -1)
    fours = np.sort(fours, axis=-1)
    different = (np.diff(fours, axis=-1, prepend=-1) != 0).sum(-1)  # sorted: each step up is a new block
    return Overlap(float(share.mean()), float(different.mean()))


def _first_that_counts(attempt: Callable[[float | None], Draw], distribution: str, shape: Shape) -> Draw:
    if distribution == "random":
        return attempt(None)
    if distribution == "trained":
        return _that_agrees(attempt, TRAINED_AGREEMENT, shape)
    best = 0.0
    for noise in NOISES:
        draw = attempt(noise)
        if draw.overlap.counts_as_coherent:
            return draw
        best = max(best, draw.overlap.mean_union_4)
    raise NotCoherent(
        f"a coherent selection must have adjacent_share <= {MAX_ADJACENT_SHARE} and mean_union_4 >= "
        f"{MIN_MEAN_UNION_4}, got at most {best:.1f} at length {shape.length}. Measure a longer one."
    )


def _that_agrees(attempt: Callable[[float | None], Draw], agreement: float, shape: Shape) -> Draw:
    """The draw in which neighbours share `agreement` of the way from chance to all blocks, to a hundredth.

    Raises:
      NotCoherent: no noise gives that, or it is more than `MAX_ADJACENT_SHARE`: the row is too short.
    """
    chance = attempt(None).overlap.adjacent_share
    wanted = chance + agreement * (1 - chance)
    low, high = math.log(NOISES[0]) - 4, math.log(NOISES[-1]) + 4
    for _ in range(12):
        middle = (low + high) / 2
        draw = attempt(math.exp(middle))
        share = draw.overlap.adjacent_share
        if abs(share - wanted) < 0.01 and share <= MAX_ADJACENT_SHARE:
            return draw
        low, high = (middle, high) if share > wanted else (low, middle)
    raise NotCoherent(
        f"neighbours of a trained selection must share {wanted:.2f} of their blocks, and at most "
        f"{MAX_ADJACENT_SHARE}, got {share:.2f} at length {shape.length}. Measure a longer one."
    )


def key(name: str) -> Array:
    """A random key for each name and shape."""
    # The default generator takes seconds to compile for each new shape on a CPU.
    return jax.random.key(zlib.crc32(name.encode()), impl="rbg")


def _interpolate(keyframes: Float[Array, "B P *rest"], token: Int[Array, "T"]) -> Float[Array, "B T *rest"]:
    frame, phase = jnp.divmod(token, KEYFRAME_TOKENS)
    angle = (phase * (jnp.pi / 2 / KEYFRAME_TOKENS)).reshape(-1, *[1] * (keyframes.ndim - 2))
    return jnp.cos(angle) * keyframes[:, frame] + jnp.sin(angle) * keyframes[:, frame + 1]


# Compiled as one program: the float32 arrays in between have no room for a row of a million tokens.
@functools.partial(jax.jit, static_argnames="shape")
def _drifting(noise: float, *, shape: Shape) -> Float[Array, "B T N H"]:
    size = (shape.batch, -(-shape.length // KEYFRAME_TOKENS) + 1, shape.query_heads, shape.key_dim)
    smooth = _interpolate(jax.random.normal(key("query keyframes"), size), jnp.arange(shape.length))
    rough = jax.random.normal(key("query noise"), smooth.shape)
    return (smooth + noise * rough).astype(shape.dtype)


@functools.partial(jax.jit, static_argnames="shape")
def _scored_blocks(key: Array, noise: float | None, *, shape: Shape) -> Array:
    """The best `n` blocks by drawn scores, forced ones first; without noise the scores are independent."""
    config, num_blocks = shape.config, layout.num_selection_blocks(shape.length, shape.config)
    block = jnp.arange(num_blocks, dtype=jnp.int32)
    size = (shape.batch, -(-shape.length // KEYFRAME_TOKENS) + 1, shape.kv_heads, num_blocks)
    keyframes = jax.random.normal(key, size)

    def choose(first: Array) -> Array:
        token = first + jnp.arange(min(TOKENS_PER_DRAW, shape.length))
        drawn = (shape.batch, token.size, shape.kv_heads, num_blocks)
        scores = jax.random.normal(jax.random.fold_in(key, first + 1), drawn)
        if noise is not None:
            scores = _interpolate(keyframes, token) + scores * noise
        position = token[:, None, None]
        scores = jnp.where(layout.is_forced(block, position, config), jnp.inf, scores)
        scores = jnp.where(block * config.selection_block_size <= position, scores, -jnp.inf)
        value, chosen = jax.lax.top_k(scores, min(config.num_selected_blocks, num_blocks))
        return jnp.where(value > -jnp.inf, chosen, num_blocks)

    chunks = jax.lax.map(choose, jnp.arange(0, shape.length, TOKENS_PER_DRAW))
    chosen = jnp.sort(jnp.concatenate(list(chunks), axis=1)[:, : shape.length], axis=-1)
    chosen = jnp.where(chosen == num_blocks, -1, chosen).astype(jnp.int32)
    unused = config.num_selected_blocks - chosen.shape[-1]
    return jnp.pad(chosen, ((0, 0), (0, 0), (0, 0), (0, unused)), constant_values=-1)
