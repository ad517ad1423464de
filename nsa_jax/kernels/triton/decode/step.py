"""A decode step in two kernels, first `first`, then `second`.

XLA makes a CUDA graph of a compiled loop's body if it has five launches or more, and each launch in it waits
for the one before. So work that can run side by side is in one launch. The later pieces of work for a new
token and KV head need each other's results, and still are one launch: the programs of a team wait for each
other (`arrivals`). `hidden` runs before `first` if an MLP forms the new blocks.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton

from nsa_jax import layout
from nsa_jax.array_typing import Array, Float, Float32, Int, Int32
from nsa_jax.compression import Compression, ResidualMLP
from nsa_jax.config import NSAConfig
from nsa_jax.kernels.chip import num_processors
from nsa_jax.kernels.triton.decode.first import first_kernel
from nsa_jax.kernels.triton.decode.hidden import hidden_kernel
from nsa_jax.kernels.triton.decode.second import second_kernel
from nsa_jax.kernels.triton.decode.sizes import StepShape, StepSizes, hidden_depth, hidden_sizes, step_sizes
from nsa_jax.kernels.triton.dims import split_dim
from nsa_jax.kernels.triton.gpu import target
from nsa_jax.kernels.triton.launch import launch, like
from nsa_jax.kernels.triton.pieces import LOG2_E, precision
from nsa_jax.layout import NSACache, TokenKeysValues
from nsa_jax.sharding.manual import alike_in_shards

MERGED_AT_ONCE = 8192  # numbers of parts that a program holds: 64 in each of 128 threads, or one head's
_padded = triton.next_power_of_2


class StepResult(NamedTuple):
    """Output and cache of a step, and the blocks that each token selected, in any order, -1 for none."""

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

    def constants(self) -> dict[str, int]:
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
    gates: Float[Array, "B T N 3"],
    num_tokens: Int[Array, " B"] | None,
    compress: Compression | GivenBlocks,
    config: NSAConfig,
    scale: float,
    *,
    sizes: StepSizes | None = None,
) -> StepResult:
    """Appends the tokens and attends from each of them.

    Args:
      cache, query, tokens, gates, num_tokens: as in `nsa_jax.cache.decode_step`.
      compress: how the blocks that the step completes are formed, or these blocks.
      config, scale: as there, but without defaults.
      sizes: used instead of those that `step_sizes` would take.
    """
    step = _Step(cache, query, tokens, gates, num_tokens, compress, config, scale, sizes)
    cache, parts, found = step.begin()
    cache, out, blocks = step.complete(cache, parts, found)
    return StepResult(out, cache, blocks)


def sizes_of_step(cache: NSACache, query: Array, config: NSAConfig) -> StepSizes:
    """The sizes for the shapes of a step."""
    num_kv_heads, own = cache.key_slc.shape[2], config.selection_block_size // config.compression_stride
    return step_sizes(
        StepShape(
            gpu=target(),
            float_bytes=query.dtype.itemsize,
            kv_heads=query.shape[0] * num_kv_heads,
            num_new=query.shape[1],
            heads=query.shape[2] // num_kv_heads,
            dims=cache.key_slc.shape[3] + cache.value_slc.shape[3],
            own=own,
            blocks=-(-cache.key_cmp.shape[1] // own),
            slots=_padded(config.num_selected_blocks),
            block_size=max(_padded(config.selection_block_size), 16),
            processors=num_processors(),
        )
    )


class _Step:
    """The operands of a step and the sizes that follow from them; one method for each launch."""

    def __init__(self, cache, query, tokens, gates, num_tokens, compress, config, scale, sizes):
        self.cache, self.query, self.tokens, self.gates = cache, query, tokens, gates
        self.num_tokens = None if num_tokens is None else num_tokens.astype(jnp.int32)
        self.compress: Compression | GivenBlocks = compress
        self.config: NSAConfig = config
        self.scale = float(scale * LOG2_E.value)
        self.batch, self.num_new, self.num_heads, _ = query.shape
        self.kv_heads = cache.key_slc.shape[2]
        self.heads = self.num_heads // self.kv_heads
        self.max_blocks = cache.key_cmp.shape[1]
        self.blocks = layout.blocks_of_step(self.num_new, config)
        self.own = config.selection_block_size // config.compression_stride
        self.slots = _padded(config.num_selected_blocks)
        self.sizes = sizes or sizes_of_step(cache, query, config)
        # Tiles of compressed keys: whole selection blocks, each padded to a power of two of columns.
        self.tile_blocks = max(self.sizes.keys // _padded(self.own), 1)
        self.tiles = max(-(-self.max_blocks // (self.tile_blocks * self.own)), 1)
        self.chunk_tiles = self.sizes.list_blocks // self.tile_blocks
        self.chunks = _padded(-(-self.tiles // self.chunk_tiles))
        h, v = (split_dim(x.shape[3]) for x in (cache.key_slc, cache.value_slc))
        self.dims: dict[str, Any] = dict(H0=h[0], H1=h[1], V0=v[0], V1=v[1])
        self.common: dict[str, Any] = dict(T=self.num_new, G=self.heads, KV_HEADS=self.kv_heads)
        self.compression: dict[str, Any] = dict(
            SIZE=config.compression_block_size, STRIDE=config.compression_stride
        )
        self.selection: dict[str, Any] = dict(
            BLOCK=config.selection_block_size, SELECTED=config.num_selected_blocks,
            INITIAL=config.num_initial_blocks, LOCAL=config.num_local_blocks, SLOTS=self.slots,
        )  # fmt: skip
        self.products: dict[str, Any] = dict(scale=self.scale, PRECISION=precision(query.dtype))
        # Parts of the branches, in this order. New blocks are one more part of the compressed branch.
        self.parts: dict[str, int] = dict(
            CMP=self.sizes.cmp_parts + 1, WIN=self.sizes.win_parts, SLC=self.sizes.shares
        )
        self.all_parts = sum(self.parts.values())

    def floats(self, *shape: int) -> jax.ShapeDtypeStruct:
        """A float32 array with these axes for each batch row and KV head."""
        return jax.ShapeDtypeStruct((self.batch, self.kv_heads, *shape), jnp.float32)

    def begin(self) -> tuple[NSACache, _Parts, _Found]:
        """First launch: the cache with the new tokens, the compressed parts, and what else it writes."""
        cache, formed, sizes = self.cache, self.form(), self.sizes
        rings = (cache.key_raw_ring, cache.value_raw_ring, cache.key_win_ring, cache.value_win_ring)
        attending = sizes.cmp_parts * self.batch * self.kv_heads * sizes.groups
        rows, block = self.num_new * self.heads, (self.batch, self.blocks, self.kv_heads)
        key_cmp, value_cmp = cache.key_cmp, cache.value_cmp
        out = (
            self.floats(self.all_parts, rows, value_cmp.shape[3]),
            self.floats(self.all_parts, 2, rows),
            self.floats(rows, self.tiles * self.tile_blocks),
            self.floats(rows, self.tiles),
            self.floats(rows, self.tiles),
            jax.ShapeDtypeStruct((self.batch, 3), jnp.int32),
            like(key_cmp, (*block, key_cmp.shape[3])),
            like(value_cmp, (*block, value_cmp.shape[3])),
            self.floats(rows, self.blocks),
            jax.ShapeDtypeStruct((self.batch, self.kv_heads, self.num_new), jnp.int32),
        )
        updated, found = launch(
            first_kernel, cache.key_slc, cache.value_slc, *rings, cache.lengths, self.num_tokens,
            *self.tokens, *formed, self.query, key_cmp, value_cmp, out=out, in_place=6,
            grid=(attending + self.batch * self.kv_heads,), num_warps=sizes.cmp_warps,
            num_stages=sizes.cmp_stages, batch=self.batch, MAX_LENGTH=cache.max_length,
            RAW=rings[0].shape[1], RING=1 if rings[2] is None else rings[2].shape[1], BLOCKS=self.blocks,
            ROWS=sizes.rows, ALL=self.all_parts,
            HIDDEN_PARTS=1 if formed.hidden is None else formed.hidden.shape[3],
            MAX_BLOCKS=self.max_blocks, OWN=self.own, PADDED=_padded(self.own), TILE_BLOCKS=self.tile_blocks,
            TILES=self.tiles, SHARES=sizes.cmp_parts, GROUPS=sizes.groups, STAGES=sizes.cmp_stages,
            **formed.constants(), **self.common, **self.compression, **self.dims, **self.products,
        )  # fmt: skip
        names = ("key_slc", "value_slc", "key_raw_ring", "value_raw_ring", "key_win_ring", "value_win_ring")
        cache = cache._replace(**dict(zip(names, updated, strict=False)))
        return cache, _Parts(*found[:2]), _Found(*found[2:])

    def form(self) -> _Formed:
        """What forms the new blocks from their tokens."""
        if isinstance(self.compress, GivenBlocks):
            return _Formed(*self.compress)
        key, value, rotation = self.compress.key, self.compress.value, self.compress.rotation
        formed = _Formed()
        if key is not None or value is not None:
            formed = formed._replace(hidden=self.hidden(key, value))
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

    def hidden(
        self, key: ResidualMLP | None, value: ResidualMLP | None
    ) -> Float[Array, "B blocks K parts F"]:
        """The hidden units of the MLPs for the blocks of the step, before bias and GELU."""
        rows = self.batch * self.blocks * self.kv_heads
        sizes = hidden_sizes(rows, self.config.compression_block_size)
        operands: list[Array | None] = []
        constants: dict[str, Any] = {}
        for name, mlp in (("key", key), ("value", value)):
            ring, new = getattr(self.cache, f"{name}_raw_ring"), getattr(self.tokens, f"{name}_cmp")
            weights = None if mlp is None else mlp.kernel_in
            dtype = ring.dtype if weights is None else weights.dtype
            operands += [None] * 4 if mlp is None else [ring, new, mlp.position_embedding, weights]
            of_layer = dict(
                UNITS=0 if weights is None else weights.shape[1], DIM=ring.shape[3],
                DEPTH=hidden_depth(ring.shape[3], dtype.itemsize), PRECISION=precision(dtype),
            )  # fmt: skip
            constants |= {f"{name.upper()}_{what}": size for what, size in of_layer.items()}
        columns = constants["KEY_UNITS"], constants["VALUE_UNITS"]
        shape = (self.batch, self.blocks, self.kv_heads, sizes.parts, sum(columns))
        tiles_of_units = sum(-(-units // sizes.units) for units in columns)
        return launch(
            hidden_kernel, self.cache.lengths, self.num_tokens, *operands,
            out=jax.ShapeDtypeStruct(shape, jnp.float32),
            grid=(sizes.parts * tiles_of_units * -(-rows // sizes.rows),), num_stages=sizes.stages,
            batch=self.batch, T=self.num_new, KV_HEADS=self.kv_heads, MAX_LENGTH=self.cache.max_length,
            RAW=self.cache.key_raw_ring.shape[1], BLOCKS=self.blocks, ROWS=sizes.rows, COLUMNS=sizes.units,
            PARTS=sizes.parts, STAGES=sizes.stages, **constants, **self.compression,
        )  # fmt: skip

    def complete(
        self, cache: NSACache, parts: _Parts, found: _Found
    ) -> tuple[NSACache, Float[Array, "B T N V"], Int32[Array, "B T K R"]]:
        """Second launch: the cache with new blocks and lengths, the gated sum, and the selected blocks."""
        config, sizes = self.config, self.sizes
        key, value = cache.key_win_ring, cache.value_win_ring
        if key is None or value is None:
            key, value = cache.key_slc, cache.value_slc
        window, block = min(config.window_size, cache.max_length), config.selection_block_size
        dims = cache.key_slc.shape[3], cache.value_slc.shape[3]
        lists = (self.batch, self.kv_heads, self.num_new, self.chunks, 2, self.slots)
        chosen = (self.batch, self.num_new, self.kv_heads, config.num_selected_blocks)
        out = (
            like(self.query, (self.batch, self.num_new, self.num_heads, dims[1])),
            jax.ShapeDtypeStruct(chosen, jnp.int32),
            jax.ShapeDtypeStruct(lists, jnp.int32),
        )
        padded = _padded(self.all_parts)
        heads = max(
            min(_padded(-(-self.heads // sizes.shares)), MERGED_AT_ONCE // (padded * _padded(dims[1]))), 1
        )
        updated, (merged, blocks, _) = launch(
            second_kernel, cache.key_cmp, cache.value_cmp, cache.lengths, cache.overflowed, *parts,
            found.arrivals, found.placed, self.query, self.gates, cache.key_slc, cache.value_slc, key, value,
            found.block_key, found.block_value, found.block_logits, found.scores, found.tails, found.tops,
            out=out, in_place=7, grid=(sizes.shares * self.batch * self.kv_heads * self.num_new,),
            num_warps=sizes.share_warps, num_stages=1, registers=sizes.registers,
            PADDED_G=_padded(self.heads), MAX_LENGTH=cache.max_length,
            WIDE=cache.max_length * self.kv_heads * max(dims) >= 2**31, OWN=self.own,
            PADDED_BLOCK=max(_padded(block), 16), BLOCKS=self.blocks, TILE_BLOCKS=self.tile_blocks,
            TILES=self.tiles, PADDED_CMP=_padded(self.parts["CMP"]), PADDED=padded, HEADS=heads,
            CHUNK_TILES=self.chunk_tiles, CHUNKS=self.chunks, RING=key.shape[1], WINDOW=window,
            TILE=sizes.keys, STEP=sizes.slc_blocks, ROWS=max(_padded(self.heads), 16),
            WIN_STAGES=sizes.win_stages, SLC_STAGES=sizes.slc_stages, MAX_BLOCKS=self.max_blocks,
            **self.parts, **self.common, **self.compression, **self.selection, **self.dims, **self.products,
        )  # fmt: skip
        names = ("key_cmp", "value_cmp", "lengths", "overflowed")
        cache = cache._replace(**dict(zip(names, updated, strict=False)))
        cache = alike_in_shards(cache, self.cache, self.num_tokens, self.num_new, cache.max_length)
        return cache, merged, blocks
