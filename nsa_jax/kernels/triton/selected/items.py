"""Inverts the selection: for each key block, the queries that chose it, cut into pieces of work.

All pairs of a query and a block are sorted by KV head and block. The pairs of one block are a group, which is
cut into items of at most `item` pairs. A block with one item has its gradient written at once; the items of
any other block store partial sums, which are added in order.

Each block has a number in its row of the batch. In a plain row that is its index. In a packed row, where a
sequence may begin at any token, it is `start // l'` plus the number of sequences that begin before it, so
numbers ascend with the blocks; some are unused.

On request the queries of a row are also cut into ranges, and the pairs of a range are sorted on their own: KV
head, then range, then block. So a kernel can work through the items of one range at a time.

Bytes: 12 a pair while sorting by counting (50 MB at 64k), 16 where there are too many block
numbers for that, in long packed rows and in very long ones, which take XLA's sort; 4 of them are kept.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from nsa_jax import layout
from nsa_jax.array_typing import Array, Bool, Int, Int32
from nsa_jax.kernels.triton.launch import launch, like, named
from nsa_jax.kernels.triton.selected.counting_sort import counting_sort, fitting_tile
from nsa_jax.kernels.triton.selected.item_table import (
    MOST_GROUPS,
    ItemCounts,
    count_below,
    count_items,
    item_table,
)
from nsa_jax.kernels.triton.selected.unions import last_rows

COUNTS_OF_A_PROGRAM = 128  # numbers that one program of `count_below` finds


class BlockItems(NamedTuple):
    """The queries of each block, and the items into which they are cut.

    A block is identified by its row of the batch, KV head and number. Ends and limits are exclusive.

    Attributes:
      tokens: the query of each pair, in order of the blocks, see `_sort_pairs`. With ranges, its code
        instead: `token R + slot` of the block among the R of the query.
      items: for each item: `b K + k` of row `b` and KV head `k` (-1: no item), row index of the block's first
        key, limit of the keys to write, first pair, end of the pairs that need the causal mask, end of the
        pairs, slot for the partial sums or -1.
      slots: first slot of each block.
      partials: number of slots of each block; 0 where it has at most one item.
      starts: row index of each block's first key.
      limits: limit of the keys of each block that may be written, as a row index.
      written: keys whose gradient is written; None where all are.
      num_partials: partial sums to allocate, one a slot; 0 where no block has several items.
      bounds: with ranges, the items before each KV head and range, and at last the number of items; else
        None. Where a chunk begins that is its first item.
    """

    tokens: Int32[Array, " pairs"]
    items: Int32[Array, "items 7"]
    slots: Int32[Array, "heads blocks"]
    partials: Int32[Array, "heads blocks"]
    starts: Int32[Array, "B blocks"]
    limits: Int32[Array, "B blocks"]
    written: Bool[Array, "B S K"] | None
    num_partials: int
    bounds: Int32[Array, " head_ranges_and_1"] | None = None


class _Numbering(NamedTuple):
    """What the block numbers of each row stand for; unused numbers have no keys to write."""

    first: Int32[Array, "B T"]  # number of the first block of the query's sequence
    starts: Int32[Array, "B blocks"]
    limits: Int32[Array, "B blocks"]


def invert(
    block_indices: Int[Array, "B T K R"],
    placement: layout.Placement,
    num_keys: int,
    *,
    item: int,
    range_queries: int | None = None,
    chunk_heads: int | None = None,
) -> BlockItems:
    """Sorts the pairs by block, and cuts the pairs of each block into items.

    The longest come first, unless there are very many blocks (`item_table.MOST_ORDERED`).

    Args:
      block_indices, placement: sequence-local blocks of each query, and where each query stands.
      num_keys: keys of a row.
      item: most pairs of an item.
      range_queries: queries of a range; None does without ranges and codes.
      chunk_heads: heads of a chunk, counted over all rows, whose items lie together; None for all. Where
        there are several ranges, those of a head and range do.

    Raises:
      NotImplementedError: too many pairs or blocks for 32-bit integers.
    """
    batch, num_queries, num_kv_heads, _ = block_indices.shape
    size, packed = placement.config.selection_block_size, placement.packed
    numbering = (_number_packed if packed else _number_plain)(placement, num_keys)
    num_blocks = numbering.starts.shape[1]
    heads = batch * num_kv_heads
    ranges = 1 if range_queries is None else max(1, triton.cdiv(num_queries, range_queries))
    num_pairs, num_groups = block_indices.size, heads * ranges * num_blocks
    if max(2 * num_groups + 2, num_pairs) >= 2**31:
        raise NotImplementedError(
            f"the Triton kernels need fewer than 2^31 pairs of a query and a block, got {num_pairs} pairs "
            f"and {num_groups} blocks. Split the batch or the heads, or use implementation='xla'."
        )

    tokens, pair_bounds = _sort_pairs(block_indices, placement, numbering, range_queries, ranges)
    several = num_queries > item or ranges > 1
    if num_queries <= item:  # a block has at most T pairs, so one item takes them all
        item = max(num_pairs, 1)
    # A block that nobody chose gets an item too, which writes zeros; in packed rows `written` says it.
    count = count_items if num_groups <= MOST_GROUPS else _count_by_xla
    counts = count(pair_bounds, heads, ranges, num_blocks, item=item, fill=not packed)
    num_items = num_pairs // item + (min(num_groups, num_pairs) if packed else num_groups)
    items = item_table(
        pair_bounds, counts, numbering.starts, numbering.limits, ranges, item=item, num_items=num_items,
        of_chunk=num_blocks * (1 if ranges > 1 else min(chunk_heads or heads, heads)),
    )  # fmt: skip
    written = _written(numbering, pair_bounds, num_kv_heads, ranges, num_keys, size) if packed else None
    bounds = None if range_queries is None else jnp.pad(counts.ends[num_blocks - 1 :: num_blocks], (1, 0))
    most = min(num_items, most_partials(block_indices, placement, num_keys, item=item, ranges=ranges))
    return BlockItems(
        tokens, items, counts.slots, counts.partials, numbering.starts, numbering.limits, written,
        max(most, 1) if several else 0, bounds,
    )  # fmt: skip


def most_partials(
    block_indices: Int[Array, "B T K R"],
    placement: layout.Placement,
    num_keys: int,
    *,
    item: int,
    ranges: int,
) -> int:
    """Most items of blocks that have several, each of which stores partial sums; arguments as in `invert`.

    In a packed row nearly every token may begin a block. But if the queries are consecutive tokens, only
    sequences that reach into a second range have blocks in several, and they are fewer than the ranges.
    """
    if not placement.packed:
        return most_partials_of_plain_rows(block_indices, placement, num_keys, item=item, ranges=ranges)
    batch, num_queries, num_kv_heads, _ = block_indices.shape
    several = 2 * (block_indices.size // item)  # of blocks that have them in one range
    if ranges == 1:
        return several
    sequences = ranges - 1 if len(placement.run_lengths) == 1 else min(num_queries, num_keys)
    blocks = layout.num_selection_blocks(num_keys, placement.config) + sequences
    return several + batch * num_kv_heads * ranges * blocks


def most_partials_of_plain_rows(
    block_indices: Int[Array, "B T K R"],
    placement: layout.Placement,
    num_keys: int,
    *,
    item: int,
    ranges: int,
) -> int:
    """`most_partials` of rows that are not packed.

    In one range, a block with c > 1 items has more than `(c - 1) item >= c item / 2` pairs.
    """
    batch, _, num_kv_heads, _ = block_indices.shape
    full = block_indices.size // item
    every = full + batch * num_kv_heads * ranges * layout.num_selection_blocks(num_keys, placement.config)
    return every if ranges > 1 else min(every, 2 * full)


def _sort_pairs(
    block_indices: Int[Array, "B T K R"],
    placement: layout.Placement,
    numbering: _Numbering,
    range_queries: int | None,
    ranges: int,
) -> tuple[Int32[Array, " pairs"], Int32[Array, " bounds"]]:
    """The pairs, sorted: those of one block and range are a group.

    Returns:
      The query of each pair, or its code; in a group those that need the causal mask first, each part
      ascending; behind the last group they are arbitrary. And the bounds that `count_items` takes.
    """
    size, num_blocks = placement.config.selection_block_size, numbering.starts.shape[1]
    row = last_rows(placement)[:, :, None, None]
    start = placement.sequence_start[:, :, None, None] + block_indices * size
    exists = (block_indices >= 0) & (start <= row)
    needs_no_mask = (start + (size - 1) <= row).astype(jnp.int32)
    place = 2 * (numbering.first[:, :, None, None] + block_indices) + needs_no_mask
    places = jnp.where(exists, place, -1).astype(jnp.int32)
    tile_pairs = fitting_tile(2 * num_blocks)
    if tile_pairs is None:
        return _sorted_by_xla(places, 2 * num_blocks, range_queries, ranges)
    return counting_sort(
        places, 2 * num_blocks, range_queries=range_queries or max(places.shape[1], 1),
        coded=range_queries is not None, tile_pairs=tile_pairs,
    )  # fmt: skip


def _sorted_by_xla(
    places: Int32[Array, "B T K R"], num_places: int, range_queries: int | None, ranges: int
) -> tuple[Int32[Array, " pairs"], Int32[Array, " bounds"]]:
    """What `counting_sort` gives, for any number of places."""
    batch, num_queries, num_kv_heads, of_query = places.shape
    lane = jnp.arange(batch * num_kv_heads, dtype=jnp.int32).reshape(batch, 1, num_kv_heads, 1)
    query = jnp.arange(num_queries, dtype=jnp.int32)[:, None, None]
    if range_queries is not None:
        lane = lane * ranges + query // range_queries
        query = query * of_query + jnp.arange(of_query, dtype=jnp.int32)
    most = batch * num_kv_heads * ranges * num_places
    place = jnp.where(places >= 0, num_places * lane + places, most)
    query = jnp.broadcast_to(query, places.shape)
    place, tokens = jax.lax.sort((place.reshape(-1), query.reshape(-1)), num_keys=1, is_stable=True)
    return tokens, _count_below(place, most + 1)


def _count_by_xla(
    bounds: Int32[Array, " bounds"], heads: int, ranges: int, num_blocks: int, *, item: int, fill: bool
) -> ItemCounts:
    """What `count_items` gives, for any number of groups."""
    pairs = (bounds[2::2] - bounds[:-1:2]).reshape(heads, ranges, num_blocks)
    count = jnp.where(pairs > 0, (pairs - 1) // item + 1, 0)
    total = count.sum(axis=1, dtype=jnp.int32)  # of each block
    partials = jnp.where(total > 1, total, 0)
    slots = (jnp.cumsum(partials, dtype=jnp.int32) - partials.reshape(-1)).reshape(partials.shape)
    of_group = slots[:, None] + jnp.cumsum(count, axis=1, dtype=jnp.int32) - count
    of_group = jnp.where(total[:, None] > 1, of_group, -1)
    if fill:
        first_range = jnp.arange(ranges)[:, None] == 0
        count = jnp.where(first_range & (total == 0)[:, None], 1, count)
    lasts = jnp.where(count > 0, pairs - (count - 1) * item, -1).reshape(-1)
    return ItemCounts(jnp.cumsum(count, dtype=jnp.int32), lasts, of_group.reshape(-1), slots, partials)


def _number_plain(placement: layout.Placement, num_keys: int) -> _Numbering:
    config = placement.config
    batch, num_blocks = placement.position.shape[0], layout.num_selection_blocks(num_keys, config)
    starts = jnp.arange(num_blocks, dtype=jnp.int32) * config.selection_block_size
    starts = jnp.broadcast_to(starts, (batch, num_blocks))
    return _Numbering(jnp.zeros_like(placement.position), starts, jnp.full_like(starts, num_keys))


def _number_packed(placement: layout.Placement, num_keys: int) -> _Numbering:
    config = placement.config
    size = config.selection_block_size
    batch, num_queries = placement.position.shape
    num_blocks = layout.num_selection_blocks(num_keys, config) + min(num_queries, num_keys)
    b = jnp.arange(batch, dtype=jnp.int32)[:, None]
    row = last_rows(placement)
    begin = jnp.where(row >= 0, placement.sequence_start, num_keys)  # out of bounds, so dropped below
    seen = jnp.zeros((batch, num_keys), jnp.int32).at[b, begin].set(1, mode="drop")
    before = jnp.cumsum(seen, axis=1, dtype=jnp.int32) - seen
    first = placement.sequence_start // size + jnp.take_along_axis(before, placement.sequence_start, axis=1)
    # Keys after a sequence's last query get no gradient from it, and may belong to the next sequence.
    end = jnp.zeros((batch, num_keys), jnp.int32).at[b, begin].max(row + 1, mode="drop")

    at = jnp.where(row >= 0, first, num_blocks)
    unknown = jnp.full((batch, num_blocks), -1, jnp.int32)
    sequence = jax.lax.cummax(unknown.at[b, at].set(placement.sequence_start, mode="drop"), axis=1)
    sequence_first = jax.lax.cummax(unknown.at[b, at].set(first, mode="drop"), axis=1)
    number = jnp.arange(num_blocks, dtype=jnp.int32)
    starts = sequence + (number - sequence_first) * size
    limits = jnp.take_along_axis(end, jnp.maximum(sequence, 0), axis=1)
    exists = (sequence >= 0) & (starts < limits)
    return _Numbering(
        first, jnp.where(exists, starts, num_keys), jnp.where(exists, jnp.minimum(limits, starts + size), 0)
    )


def _written(
    numbering: _Numbering, bounds: Int32[Array, " bounds"], num_kv_heads: int, ranges: int, num_keys: int,
    size: int,
) -> Bool[Array, "B S K"]:  # fmt: skip
    """Which keys are in a chosen block: starts ascend with the numbers, and blocks are disjoint."""
    batch, num_blocks = numbering.starts.shape
    chosen = (bounds[2::2] > bounds[:-1:2]).reshape(batch, num_kv_heads, ranges, num_blocks).any(axis=2)
    b = jnp.arange(batch, dtype=jnp.int32)[:, None]
    number = jnp.broadcast_to(jnp.arange(num_blocks, dtype=jnp.int32), (batch, num_blocks))
    at_key = jnp.full((batch, num_keys), -1, jnp.int32).at[b, numbering.starts].set(number, mode="drop")
    at_key = jax.lax.cummax(at_key, axis=1)
    inside = jnp.arange(num_keys) < jnp.take_along_axis(numbering.limits, jnp.maximum(at_key, 0), axis=1)
    inside &= at_key >= 0
    chosen = jnp.take_along_axis(chosen, jnp.maximum(at_key, 0)[:, None], axis=2)
    return inside[:, :, None] & chosen.swapaxes(1, 2)


def _count_below(ascending: Int32[Array, " n"], number: int) -> Int32[Array, " number"]:
    """For each integer in `0 .. number - 1`: how many entries are smaller."""
    length = ascending.shape[0]
    return launch(
        count_below_kernel, ascending, out=like(ascending, (number,)),
        grid=(triton.cdiv(number, COUNTS_OF_A_PROGRAM),),
        length=length, number=number, STEPS=length.bit_length(), SIZE=COUNTS_OF_A_PROGRAM,
    )  # fmt: skip


@triton.jit(repr=named("nsa_count_below"))
def count_below_kernel(ascending, counts, length, number, STEPS: tl.constexpr, SIZE: tl.constexpr):
    """Binary search, for `SIZE` integers at a time."""
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(counts + i, count_below(ascending, length, i, STEPS), mask=i < number)
