"""Splits queries into chunks, and finds the tiles of keys that a chunk needs.

The rows of a chunk are its query tokens, each with the G heads of its KV head: `[B, K, tokens * G, X]`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from nsa_jax.array_typing import Array, Bool, DType, Float, Int, Int32
from nsa_jax.kernels.xla.sizes import Sizes
from nsa_jax.layout import Placement
from nsa_jax.layout.quantised import widened


class TileSizes(NamedTuple):
    """Static sizes of a branch.

    Attributes:
      tile: number of keys that are worked on at a time.
      one: whether one tile holds all keys that a chunk sees.
    """

    tile: int
    one: bool

    @classmethod
    def choose(cls, num_queries: int, num_keys: int, most_at_once: int, sizes: Sizes) -> "TileSizes":
        """Chooses sizes for chunks that see at most `most_at_once` keys, which are consecutive."""
        if most_at_once <= sizes.one_tile:
            return cls(min(most_at_once, num_keys), True)
        # A tile is read whole even for a single visible key. With too wide tiles, a step would read all of a
        # large cache that is nearly empty.
        widening = min(max(sizes.query_chunk // num_queries, 1), sizes.widest_tile)
        tile = min(sizes.key_tile * widening, num_keys)
        return cls(tile, tile == num_keys)


class ChunkPlaces(NamedTuple):
    """Where the queries of all chunks stand.

    Attributes:
      first: first position of each chunk if the positions of a chunk are consecutive, else None.
      arrays: otherwise the positions and, for packed rows, where the sequences start.
      before_stretch: that of the placement.
    """

    first: Int32[Array, " chunks"] | None
    arrays: tuple[Int32[Array, "chunks B tokens"], ...]
    before_stretch: Int32[Array, "chunks B tokens"] | None

    @classmethod
    def of(cls, placement: Placement, tokens: int) -> "ChunkPlaces":
        """Cuts a placement into chunks of `tokens` queries; those that fill up the last chunk see nothing."""
        num_queries = placement.position.shape[1]
        before = placement.before_stretch
        before = None if before is None else split_tokens(before, tokens)
        if (first := placement.first_position) is not None:
            return cls(jnp.arange(first, first + num_queries, tokens, dtype=jnp.int32), (), before)
        arrays = split_tokens(placement.position, tokens, fill=-1)
        if not placement.packed:
            return cls(None, (arrays,), before)
        starts = placement.sequence_start, placement.compression_start
        return cls(None, (arrays, *(split_tokens(x, tokens) for x in starts)), before)

    def placement(self, whole: Placement, tokens: int) -> Placement:
        """The placement of one chunk, given the places of that chunk and the placement of the whole call."""
        batch, num_queries = whole.position.shape
        starts: list[Array]
        if self.first is not None:
            assert whole.first_position is not None
            position = self.first + jnp.arange(tokens, dtype=jnp.int32)[None]
            position = jnp.where(position < whole.first_position + num_queries, position, -1)
            position, starts = jnp.broadcast_to(position, (batch, tokens)), []
        else:
            position, *starts = self.arrays
        sequence_start, compression_start = starts or [jnp.zeros_like(position)] * 2
        return dataclasses.replace(
            whole, position=position, sequence_start=sequence_start, compression_start=compression_start,
            run_lengths=(), run_firsts=(), run_queries=None, before_stretch=self.before_stretch,
        )  # fmt: skip


class Look(NamedTuple):
    """The keys that the queries of a chunk see: `start .. end - 1`, or only those of them in chosen blocks.

    Attributes:
      start: first key of each query's range.
      end: one past the last key; equal to `start` for a query that sees nothing.
      chosen: whether each query and KV head chose each block; None if all keys of the range are seen.
      block_start: first key of block 0 of each query's sequence; None if that is key 0.
      ascending: whether the range of the first query is known to start first, at the same key in every row.
    """

    start: Int32[Array, "B tokens"]
    end: Int32[Array, "B tokens"]
    chosen: Bool[Array, "B tokens K M"] | None = None
    block_start: Int32[Array, "B tokens"] | None = None
    ascending: bool = False

    def tiles(self, sizes: TileSizes, num_keys: int) -> tuple[Int[Array, ""], Int[Array, ""]]:
        """First key and number of the tiles that cover the union of the ranges."""
        if sizes.tile == num_keys:
            return jnp.int32(0), jnp.int32(1)
        if self.ascending:
            return self.start[0, 0], (self.end.max() - self.start[0, 0] + sizes.tile - 1) // sizes.tile
        first = jnp.where(self.start < self.end, self.start, jnp.iinfo(jnp.int32).max).min()
        last = self.end.max()
        first = jnp.minimum(first, last)
        return first, (last - first + sizes.tile - 1) // sizes.tile

    def read(
        self, first: Int[Array, ""], sizes: TileSizes, block_size: int, dtype: DType, *arrays: Any
    ) -> tuple[Bool[Array, "B #K tokens tile"], list[Array]]:
        """Reads keys `first .. first + tile - 1` of each array, and finds which of them each query sees.

        The slice is clamped at the end of the array. Keys before `first` are then masked, because the tile
        before had them. Quantised arrays become tiles of `dtype`.
        """
        if sizes.tile == arrays[0].shape[1]:
            clamped, tiles = jnp.int32(0), list(arrays)
        else:
            clamped = jnp.minimum(first, arrays[0].shape[1] - sizes.tile)
            cut = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=clamped, slice_size=sizes.tile)
            tiles = jax.tree.map(functools.partial(cut, axis=1), list(arrays))
        tiles = widened(tiles, dtype)
        key = clamped + jnp.arange(sizes.tile, dtype=jnp.int32)[None, None]
        visible = (key >= jnp.maximum(self.start, first)[..., None]) & (key < self.end[..., None])
        if self.chosen is None:
            return visible[:, None], tiles
        chosen = self.chosen.swapaxes(1, 2)  # [B, K, tokens, M]
        if self.block_start is None and sizes.tile == arrays[0].shape[1]:
            whole = jnp.broadcast_to(chosen[..., None], (*chosen.shape, block_size))
            return visible[:, None] & whole.reshape(*chosen.shape[:3], -1)[..., : sizes.tile], tiles
        block = key if self.block_start is None else key - self.block_start[..., None]
        block = jnp.broadcast_to(block // block_size, visible.shape)
        block = jnp.clip(block, 0, chosen.shape[-1] - 1)[:, None]
        return visible[:, None] & jnp.take_along_axis(chosen, block, axis=3), tiles


def split_tokens(x: Array, tokens: int, fill: int = 0) -> Array:
    """Splits `[B, T, ...]` into `[chunks, B, tokens, ...]` and fills up the last chunk."""
    batch, num_queries = x.shape[:2]
    x = jnp.pad(x, ((0, 0), (0, -num_queries % tokens), *((0, 0),) * (x.ndim - 2)), constant_values=fill)
    return x.reshape(batch, -1, tokens, *x.shape[2:]).swapaxes(0, 1)


def split_rows(
    x: Float[Array, "B T N X"], num_kv_heads: int, tokens: int
) -> Float[Array, "chunks B K rows X"]:
    """Splits heads `[B, T, N, X]` into the rows of each chunk."""
    x = split_tokens(x, tokens)
    chunks, batch, _, num_heads, dim = x.shape
    x = x.reshape(chunks, batch, tokens, num_kv_heads, num_heads // num_kv_heads, dim)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(chunks, batch, num_kv_heads, -1, dim)


def join_tokens(x: Array, num_queries: int) -> Array:
    """Undoes `split_tokens`."""
    x = x.swapaxes(0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :num_queries]


def join_rows(
    x: Float[Array, "chunks B K rows X"], num_queries: int, num_heads: int
) -> Float[Array, "B T N X"]:
    """Undoes `split_rows`."""
    chunks, batch, num_kv_heads, rows, dim = x.shape
    heads = num_heads // num_kv_heads
    x = x.reshape(chunks, batch, num_kv_heads, rows // heads, heads, dim).transpose(1, 0, 3, 2, 4, 5)
    return x.reshape(batch, chunks * (rows // heads), num_heads, dim)[:, :num_queries]


def over_chunks(function: Callable[..., Any], inputs: Any) -> Any:
    """`jax.lax.map`, without a loop where there is one chunk."""
    if jax.tree.leaves(inputs)[0].shape[0] == 1:
        one = function(jax.tree.map(lambda x: x[0], inputs))
        return jax.tree.map(lambda x: x[None], one)
    return jax.lax.map(function, inputs)


def fold_chunks(function: Callable[..., Any], carry: Any, inputs: Any) -> Any:
    """`jax.lax.scan`, without a loop where there is one chunk."""
    if jax.tree.leaves(inputs)[0].shape[0] == 1:
        carry, one = function(carry, jax.tree.map(lambda x: x[0], inputs))
        return carry, jax.tree.map(lambda x: x[None], one)
    return jax.lax.scan(function, carry, inputs)


def fold_tiles(
    look: Look,
    sizes: TileSizes,
    num_keys: int,
    function: Callable[[Array, Any], Any],
    carry: Any,
    wanted: Bool[Array, ""] | None = None,
) -> Any:
    """Repeats `carry = function(first, carry)` for each tile of a chunk, where `first` is its first key.

    If `wanted` is given and False, there are no repetitions.
    """
    first, number = look.tiles(sizes, num_keys)
    if sizes.one:
        return function(first, carry)
    if wanted is not None:
        number = jnp.where(wanted, number, 0)
    return jax.lax.fori_loop(0, number, lambda i, carry: function(first + i * sizes.tile, carry), carry)


def add_tile(total: Array, first: Int[Array, ""], part: Array, axis: int) -> Array:
    """Adds the results of one tile of keys to a total over all keys, at the slice that `Look.read` read."""
    if part.shape[axis] == total.shape[axis]:
        return total + part
    clamped = jnp.minimum(first, total.shape[axis] - part.shape[axis])
    old = jax.lax.dynamic_slice_in_dim(total, clamped, part.shape[axis], axis)
    return jax.lax.dynamic_update_slice_in_dim(total, old + part, clamped, axis)


def of_rows(x: Bool[Array, "B #K tokens keys"], heads: int) -> Bool[Array, "B #K rows keys"]:
    """Repeats the mask of each token for each of its heads."""
    return x if heads == 1 else jnp.repeat(x, heads, axis=2)


def zeros_beside(array: Array, shape: tuple[int, ...], dtype) -> Array:
    """Zeros as the start of a loop. Under `shard_map` they vary over the same mesh axes as `array`.

    Of an array on explicit axes, every device has all: what is sharded there runs under `shard_map`. The mesh
    need not be in context.
    """
    zeros, mesh = jnp.zeros_like(array, dtype, shape), jax.typeof(array).sharding.mesh
    return jax.reshard(zeros, NamedSharding(mesh, PartitionSpec())) if mesh.explicit_axes else zeros
