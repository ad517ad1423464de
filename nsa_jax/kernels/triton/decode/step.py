"""A decode step in two kernels, first `first`, then `second`, for a layer of any branches.

XLA makes a CUDA graph of a compiled loop's body if it has five launches or more, and each launch in it waits
for the one before. So work that can run side by side is in one launch. The later pieces of work for a new
token and KV head need each other's results, and still are one launch: the programs of a team wait for each
other (`arrivals`). `hidden` runs before `first` if an MLP forms the new blocks.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton

from nsa_jax import layout
from nsa_jax.array_typing import Array, Float, Float32, Int, Int32
from nsa_jax.compression import Compression, ResidualMLP
from nsa_jax.config import NSAConfig
from nsa_jax.kernels.chip import num_processors
from nsa_jax.kernels.triton.decode.append import StepDims
from nsa_jax.kernels.triton.decode.compressed import Tiling
from nsa_jax.kernels.triton.decode.first import first_kernel
from nsa_jax.kernels.triton.decode.hidden import hidden_kernel
from nsa_jax.kernels.triton.decode.merge import PartDims
from nsa_jax.kernels.triton.decode.scores import Chunking
from nsa_jax.kernels.triton.decode.second import second_kernel
from nsa_jax.kernels.triton.decode.selected import SelectedDims
from nsa_jax.kernels.triton.decode.sizes import StepShape, StepSizes, hidden_depth, hidden_sizes, step_sizes
from nsa_jax.kernels.triton.decode.window import WindowDims
from nsa_jax.kernels.triton.dims import split_dim
from nsa_jax.kernels.triton.gpu import target
from nsa_jax.kernels.triton.launch import launch, like
from nsa_jax.kernels.triton.pieces import LOG2_E, Dim, precision
from nsa_jax.layout import NSACache, TokenKeysValues
from nsa_jax.sharding.manual import alike_in_shards

MERGED_AT_ONCE = 8192  # numbers of parts that a program holds: 64 in each of 128 threads, or one head's
_padded = triton.next_power_of_2


class StepResult(NamedTuple):
    """Output and cache of a step, and the blocks that each token attended to, in any order, -1 for none."""

    out: Float[Array, "B T N V"]
    cache: NSACache
    blocks: Int32[Array, "B T K R"]


class GivenBlocks(NamedTuple):
    """The blocks that a step may complete, formed outside of the kernels."""

    key: Float[Array, "B blocks K H"]
    value: Float[Array, "B blocks K V"]


class _Formed(NamedTuple):
    """The operands of `forming.Forming`: blocks; or hidden units, output layers and the rotation."""

    given_key: Float[Array, "B blocks K H"] | None = None
    given_value: Float[Array, "B blocks K V"] | None = None
    hidden: Float[Array, "B blocks K parts F"] | None = None
    key_bias_in: Float[Array, " F"] | None = None
    key_kernel_out: Float[Array, "F H"] | None = None
    key_bias_out: Float[Array, " H"] | None = None
    value_bias_in: Float[Array, " F"] | None = None
    value_kernel_out: Float[Array, "F V"] | None = None
    value_bias_out: Float[Array, " V"] | None = None
    ticks: Int32[Array, " pairs"] | None = None
    rest: Float32[Array, " pairs"] | None = None
    magnitude: Float[Array, " 1"] | None = None

    def constants(self) -> dict[str, Any]:
        """The sizes of these arrays, as constants of the kernel."""
        sizes = {"KEY_UNITS": self.key_bias_in, "VALUE_UNITS": self.value_bias_in, "PAIRS": self.rest}
        return {name: 0 if x is None else x.shape[0] for name, x in sizes.items()}


class _Parts(NamedTuple):
    """The parts of all branches, see `parts`."""

    out: Float[Array, "B K parts rows V"]
    sums: Float[Array, "B K parts 2 rows"]


class _Found(NamedTuple):
    """What else the first launch writes; see `compressed.Compressed` and `append.Appended`."""

    scores: Float[Array, "B K rows blocks"]
    tails: Float[Array, "B K rows tiles"]
    tops: Float[Array, "B K rows tiles"]
    placed: Int32[Array, "B 3"]
    block_key: Float[Array, "B blocks K H"]
    block_value: Float[Array, "B blocks K V"]
    block_logits: Float[Array, "B K rows blocks"]
    arrivals: Int32[Array, "B K T"]


def decode_step(
    cache: NSACache,
    query: Float[Array, "B T N H"],
    tokens: TokenKeysValues,
    gates: Float[Array, "B T N branches"] | None,
    num_tokens: Int[Array, " B"] | None,
    compress: Compression | GivenBlocks | None,
    config: NSAConfig,
    scale: float,
    *,
    block_indices: Int[Array, "B T K R"] | None = None,
    sizes: StepSizes | None = None,
) -> StepResult:
    """Appends the tokens and attends from each of them.

    Args:
      cache, query, tokens, gates, num_tokens: as in `nsa_jax.cache.decode_step`.
      compress: how the blocks that the step completes are formed, or these blocks; None without a compressed
        branch.
      config, scale: as there, but without defaults.
      block_indices: as there.
      sizes: used instead of those that `step_sizes` would take.
    """
    num_tokens = None if num_tokens is None else num_tokens.astype(jnp.int32)
    shapes = _Shapes.of(cache, query, gates, config, sizes)
    formed = _form(cache, tokens, num_tokens, compress, shapes)
    scored = block_indices is None
    block_indices = None if block_indices is None else block_indices.astype(jnp.int32)
    written, parts, found = _first(cache, query, tokens, num_tokens, formed, scored, scale, shapes)
    written, out, blocks = _second(written, query, gates, parts, found, block_indices, scale, shapes)
    written = alike_in_shards(written, cache, num_tokens, shapes.num_new, cache.max_length)
    return StepResult(out, written, blocks)


def sizes_of_step(cache: NSACache, query: Array, config: NSAConfig) -> StepSizes:
    """The sizes for the shapes of a step."""
    num_kv_heads, own = cache.key_slc.shape[2], config.selection_block_size // config.compression_stride
    if cache.key_cmp is None:  # nothing is scored
        own = 1
    return step_sizes(
        StepShape(
            gpu=target(),
            float_bytes=query.dtype.itemsize,
            kv_heads=query.shape[0] * num_kv_heads,
            num_new=query.shape[1],
            heads=query.shape[2] // num_kv_heads,
            dims=cache.key_slc.shape[3] + cache.value_slc.shape[3],
            own=own,
            blocks=1 if cache.key_cmp is None else -(-cache.key_cmp.shape[1] // own),
            slots=_padded(config.num_selected_blocks),
            block_size=max(_padded(config.selection_block_size), 16),
            quantised=cache.key_slc_scale is not None,
            processors=num_processors(),
        )
    )


@dataclasses.dataclass(frozen=True)
class _Shapes:
    """The sizes of a step's operands, how its work is divided, and what follows from both.

    Attributes:
      batch, num_new, kv_heads, heads: rows, new tokens, KV heads, and query heads of a KV head.
      key_dim, value_dim: widths of keys and values.
      max_length, max_blocks: tokens and compression blocks that the cache has room for.
      branches: branches of the layer.
      config: block structure.
      sizes: how the work is divided.
    """

    batch: int
    num_new: int
    kv_heads: int
    heads: int
    key_dim: int
    value_dim: int
    max_length: int
    max_blocks: int
    branches: tuple[str, ...]
    config: NSAConfig
    sizes: StepSizes

    @classmethod
    def of(
        cls, cache: NSACache, query: Array, gates: Array | None, config: NSAConfig, sizes: StepSizes | None
    ) -> "_Shapes":
        """Reads them from the operands; the sizes are those of `step_sizes` if None."""
        batch, num_new, num_heads, key_dim = query.shape
        kv_heads, value_dim = cache.value_slc.shape[2:]
        max_blocks = 0 if cache.key_cmp is None else cache.key_cmp.shape[1]
        return cls(
            batch, num_new, kv_heads, num_heads // kv_heads, key_dim, value_dim, cache.max_length, max_blocks,
            cache.branches(gates), config, sizes or sizes_of_step(cache, query, config),
        )  # fmt: skip

    @property
    def rows(self) -> int:
        """Query rows of a KV head."""
        return self.num_new * self.heads

    @property
    def blocks(self) -> int:
        """Compression blocks that the new tokens may complete."""
        return layout.blocks_of_step(self.num_new, self.config) if "cmp" in self.branches else 0

    @property
    def own(self) -> int:
        """Compressed keys of a selection block."""
        return self.config.selection_block_size // self.config.compression_stride

    @property
    def slots(self) -> int:
        """Length of a list of blocks."""
        return _padded(self.config.num_selected_blocks)

    @property
    def tile_blocks(self) -> int:
        """Selection blocks of a tile of compressed keys, each padded to a power of two of columns."""
        return max(self.sizes.keys // _padded(self.own), 1)

    @property
    def tiles(self) -> int:
        """Tiles of the cache."""
        return max(-(-self.max_blocks // (self.tile_blocks * self.own)), 1)

    @property
    def chunk_tiles(self) -> int:
        """Tiles of a chunk, whose best blocks form a list."""
        return self.sizes.list_blocks // self.tile_blocks

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return _padded(-(-self.tiles // self.chunk_tiles))

    @property
    def parts(self) -> dict[str, int]:
        """Parts of the branches, in this order. New blocks are one more part of the compressed branch."""
        parts = dict(cmp=self.sizes.cmp_parts + 1, win=self.sizes.win_parts, slc=self.sizes.shares)
        return {name.upper(): number if name in self.branches else 0 for name, number in parts.items()}

    @property
    def all_parts(self) -> int:
        """Parts of all branches."""
        return sum(self.parts.values())

    def floats(self, *shape: int) -> jax.ShapeDtypeStruct:
        """A float32 array with these axes for each batch row and KV head."""
        return jax.ShapeDtypeStruct((self.batch, self.kv_heads, *shape), jnp.float32)

    def of_tokens(self) -> dict[str, Any]:
        """The constants of `hidden` and of `StepDims`."""
        return dict(
            T=self.num_new, KV_HEADS=self.kv_heads, MAX_LENGTH=self.max_length, BLOCKS=self.blocks,
            SIZE=self.config.compression_block_size, STRIDE=self.config.compression_stride,
        )  # fmt: skip

    @property
    def key(self) -> Dim:
        """The key dim, cut into powers of two."""
        return Dim(*split_dim(self.key_dim))

    @property
    def value(self) -> Dim:
        """The same of values."""
        return Dim(*split_dim(self.value_dim))


def _form(
    cache: NSACache,
    tokens: TokenKeysValues,
    num_tokens: Int32[Array, " B"] | None,
    compress: Compression | GivenBlocks | None,
    shapes: _Shapes,
) -> _Formed:
    """What forms the new blocks from their tokens."""
    if compress is None:
        return _Formed()
    if isinstance(compress, GivenBlocks):
        return _Formed(*compress)
    key, value, rotation = compress.key, compress.value, compress.rotation
    formed = _Formed()
    if key is not None or value is not None:
        formed = formed._replace(hidden=_hidden(cache, tokens, num_tokens, key, value, shapes))
    if key is not None:
        formed = formed._replace(
            key_bias_in=key.bias_in, key_kernel_out=key.kernel_out, key_bias_out=key.bias_out
        )
    if value is not None:
        formed = formed._replace(
            value_bias_in=value.bias_in, value_kernel_out=value.kernel_out, value_bias_out=value.bias_out
        )
    if rotation is not None:
        magnitude = jnp.asarray(rotation.magnitude, jnp.float32).reshape(1)
        formed = formed._replace(
            ticks=jnp.asarray(rotation.ticks), rest=jnp.asarray(rotation.rest), magnitude=magnitude
        )
    return formed


def _hidden(
    cache: NSACache,
    tokens: TokenKeysValues,
    num_tokens: Int32[Array, " B"] | None,
    key: ResidualMLP | None,
    value: ResidualMLP | None,
    shapes: _Shapes,
) -> Float32[Array, "B blocks K parts F"]:
    """A launch before both, for MLPs: their hidden units for the new blocks, before bias and GELU."""
    assert cache.key_raw_ring is not None
    rows = shapes.batch * shapes.blocks * shapes.kv_heads
    sizes = hidden_sizes(rows, shapes.config.compression_block_size)
    operands: list[Array | None] = []
    constants: dict[str, Any] = {}
    for name, mlp in (("key", key), ("value", value)):
        ring, new = getattr(cache, f"{name}_raw_ring"), getattr(tokens, f"{name}_cmp")
        weights = None if mlp is None else mlp.kernel_in
        dtype = ring.dtype if weights is None else weights.dtype
        operands += [None] * 4 if mlp is None else [ring, new, mlp.position_embedding, weights]
        of_layer = dict(
            UNITS=0 if weights is None else weights.shape[1], DIM=ring.shape[3],
            DEPTH=hidden_depth(ring.shape[3], dtype.itemsize), PRECISION=precision(dtype),
        )  # fmt: skip
        constants |= {f"{name.upper()}_{what}": size for what, size in of_layer.items()}
    columns = constants["KEY_UNITS"], constants["VALUE_UNITS"]
    shape = (shapes.batch, shapes.blocks, shapes.kv_heads, sizes.parts, sum(columns))
    tiles_of_units = sum(-(-units // sizes.units) for units in columns)
    return launch(
        hidden_kernel, cache.lengths, num_tokens, *operands, out=jax.ShapeDtypeStruct(shape, jnp.float32),
        grid=(sizes.parts * tiles_of_units * -(-rows // sizes.rows),), num_stages=sizes.stages,
        batch=shapes.batch, RAW=cache.key_raw_ring.shape[1], ROWS=sizes.rows, COLUMNS=sizes.units,
        PARTS=sizes.parts, STAGES=sizes.stages, **constants, **shapes.of_tokens(),
    )  # fmt: skip


def _first(
    cache: NSACache,
    query: Float[Array, "B T N H"],
    tokens: TokenKeysValues,
    num_tokens: Int32[Array, " B"] | None,
    formed: _Formed,
    scored: bool,
    scale: float,
    shapes: _Shapes,
) -> tuple[NSACache, _Parts, _Found]:
    """First launch: the cache with the new tokens, the compressed parts, and what else it writes.

    Unless `scored`, nothing is in the arrays from which a selection is chosen; without a compressed branch,
    nothing is in those of new blocks.
    """
    batch, kv_heads, sizes, rows = shapes.batch, shapes.kv_heads, shapes.sizes, shapes.rows
    raw, ring = cache.key_raw_ring, cache.key_win_ring
    shares = 0 if cache.key_cmp is None else sizes.cmp_parts
    attending = shares * batch * kv_heads * sizes.groups
    tiles, blocks = shapes.tiles if scored else 1, max(shapes.blocks, 1)
    block = (batch, blocks, kv_heads)
    out = (
        shapes.floats(shapes.all_parts, rows, shapes.value_dim),
        shapes.floats(shapes.all_parts, 2, rows),
        shapes.floats(rows, tiles * shapes.tile_blocks),
        shapes.floats(rows, tiles),
        shapes.floats(rows, tiles),
        jax.ShapeDtypeStruct((batch, 3), jnp.int32),
        like(tokens.key_slc, (*block, shapes.key_dim)),
        like(tokens.value_slc, (*block, shapes.value_dim)),
        shapes.floats(rows, blocks),
        jax.ShapeDtypeStruct((batch, kv_heads, shapes.num_new), jnp.int32),
    )
    updated, found = launch(
        first_kernel, cache.lengths, num_tokens, *tokens, *formed, query, cache.key_cmp, cache.value_cmp,
        cache.key_cmp_scale, cache.value_cmp_scale, out=out,
        in_place=dict(
            key_slc=cache.key_slc, value_slc=cache.value_slc, key_raw_ring=raw,
            value_raw_ring=cache.value_raw_ring, key_win_ring=ring, value_win_ring=cache.value_win_ring,
            key_slc_scale=cache.key_slc_scale, value_slc_scale=cache.value_slc_scale,
            key_win_ring_scale=cache.key_win_ring_scale, value_win_ring_scale=cache.value_win_ring_scale,
        ),
        grid=(attending + batch * kv_heads,), num_warps=sizes.cmp_warps, num_stages=sizes.cmp_stages,
        scale=float(scale * LOG2_E.value), batch=batch,
        D=StepDims(
            G=shapes.heads, RAW=1 if raw is None else raw.shape[1], RING=1 if ring is None else ring.shape[1],
            ROWS=sizes.rows, PARTS=shapes.all_parts,
            HIDDEN_PARTS=1 if formed.hidden is None else formed.hidden.shape[3], KEY=shapes.key,
            VALUE=shapes.value, **formed.constants(), **shapes.of_tokens(),
        ),
        X=Tiling(
            MAX_BLOCKS=shapes.max_blocks, OWN=shapes.own, PADDED=_padded(shapes.own),
            TILE_BLOCKS=shapes.tile_blocks, TILES=shapes.tiles, SHARES=shares, GROUPS=sizes.groups,
            STAGES=sizes.cmp_stages, SCORED=scored,
        ),
        PRECISION=precision(query.dtype),
    )  # fmt: skip
    return cache._replace(**updated), _Parts(*found[:2]), _Found(*found[2:])


def _second(
    cache: NSACache,
    query: Float[Array, "B T N H"],
    gates: Float[Array, "B T N branches"] | None,
    parts: _Parts,
    found: _Found,
    block_indices: Int32[Array, "B T K R"] | None,
    scale: float,
    shapes: _Shapes,
) -> tuple[NSACache, Float[Array, "B T N V"], Int32[Array, "B T K R"]]:
    """Second launch: the cache with new blocks and lengths, the gated sum, and the selected blocks.

    With `block_indices` it reads no scores: what `_first` wrote without them is enough.
    """
    config, sizes = shapes.config, shapes.sizes
    batch, num_new, kv_heads, value_dim = shapes.batch, shapes.num_new, shapes.kv_heads, shapes.value_dim
    key, value = cache.key_win_ring, cache.value_win_ring
    of_slc = cache.key_slc_scale, cache.value_slc_scale
    of_win = cache.key_win_ring_scale, cache.value_win_ring_scale
    if key is None or value is None:
        key, value, of_win = cache.key_slc, cache.value_slc, of_slc
    chunks = shapes.chunks if block_indices is None else 1  # one that nobody reads
    out = (
        like(query, (*query.shape[:3], value_dim)),
        jax.ShapeDtypeStruct((batch, num_new, kv_heads, config.num_selected_blocks), jnp.int32),
        jax.ShapeDtypeStruct((batch, kv_heads, num_new, chunks, 2, shapes.slots), jnp.int32),
    )
    padded = _padded(shapes.all_parts)
    heads = max(
        min(_padded(-(-shapes.heads // sizes.shares)), MERGED_AT_ONCE // (padded * _padded(value_dim))), 1
    )
    of_cache = dict(
        key_cmp=cache.key_cmp, value_cmp=cache.value_cmp, key_cmp_scale=cache.key_cmp_scale,
        value_cmp_scale=cache.value_cmp_scale, lengths=cache.lengths, overflowed=cache.overflowed,
    )  # fmt: skip
    of_branches, of_heads = shapes.parts, dict(T=num_new, G=shapes.heads, KV_HEADS=kv_heads)
    of_blocks = dict(
        BLOCK=config.selection_block_size, SELECTED=config.num_selected_blocks,
        INITIAL=config.num_initial_blocks, LOCAL=config.num_local_blocks, SLOTS=shapes.slots,
    )  # fmt: skip
    of_parts = dict(PARTS=shapes.all_parts, ROWS=max(_padded(shapes.heads), 16), VALUE=shapes.value)
    updated, (merged, blocks, _) = launch(
        second_kernel, found.placed, query, gates, cache.key_slc, cache.value_slc, *of_slc,
        key, value, *of_win, found.block_key, found.block_value, found.block_logits,
        found.scores, found.tails, found.tops, block_indices, out=out,
        in_place=dict(**of_cache, **parts._asdict(), arrivals=found.arrivals),
        grid=(sizes.shares * batch * kv_heads * num_new,), num_warps=sizes.share_warps, num_stages=1,
        registers=sizes.registers, scale=float(scale * LOG2_E.value),
        C=Chunking(
            PADDED_G=_padded(shapes.heads), SIZE=config.compression_block_size,
            STRIDE=config.compression_stride, OWN=shapes.own, BLOCKS=shapes.blocks,
            TILE_BLOCKS=shapes.tile_blocks, TILES=shapes.tiles, CMP=of_branches["CMP"],
            PADDED_CMP=_padded(of_branches["CMP"]), PARTS=shapes.all_parts, CHUNK_TILES=shapes.chunk_tiles,
            CHUNKS=shapes.chunks, **of_heads, **of_blocks,
        ),
        W=WindowDims(
            RING=key.shape[1], WINDOW=min(config.window_size, shapes.max_length), SHARES=of_branches["WIN"],
            FIRST=of_branches["CMP"], TILE=sizes.keys, STAGES=sizes.win_stages, MAX_BLOCKS=shapes.max_blocks,
            SIZE=config.compression_block_size, STRIDE=config.compression_stride, BLOCKS=shapes.blocks,
            KEY=shapes.key, **of_heads, **of_parts,
        ),
        S=SelectedDims(
            MAX_LENGTH=shapes.max_length,
            WIDE=shapes.max_length * kv_heads * max(shapes.key_dim, value_dim) >= 2**31,
            PADDED_BLOCK=max(_padded(config.selection_block_size), 16),
            CHUNK=shapes.chunk_tiles * shapes.tile_blocks, LISTS=shapes.chunks, SHARES=of_branches["SLC"],
            FIRST=of_branches["CMP"] + of_branches["WIN"], STEP=sizes.slc_blocks, STAGES=sizes.slc_stages,
            KEY=shapes.key, **of_heads, **of_blocks, **of_parts,
        ),
        P=PartDims(
            BRANCHES=len(shapes.branches), PADDED=padded, HEADS=heads, VALUE=shapes.value, **of_heads,
            **of_branches,
        ),
        PRECISION=precision(query.dtype),
    )  # fmt: skip
    return cache._replace(**{name: updated[name] for name in of_cache}), merged, blocks
