"""Attention of query rows over lists of key blocks: the selected branch of long rows.

Gathering the blocks of each row would copy `n l'` keys for the G heads of one token. Instead, the (row,
block) pairs of a chunk of rows are sorted by block and cut into items. All pairs of an item share one block,
so an item is one dense product of its rows with its block. The partial results of a row's blocks are then
gathered and merged. The backward pass loops over the same items and adds `dk` and `dv` item by item, in a
fixed order.

A row is one (batch, KV head, query token). So batches, packed rows and ragged caches differ only in the
starts of their blocks. Keys keep their layout `[tokens, K, H]`, with batch and key token flattened into
`tokens`, because a decode step must not copy its cache. A key is identified by its index in the flattened
`[tokens * K]`, so the keys of a block are `K` apart.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nsa_jax.array_typing import Array, Bool, Float, Int32
from nsa_jax.kernels.xla.chunks import fold_chunks, over_chunks, zeros_beside
from nsa_jax.kernels.xla.masked import (
    Partial,
    Rows,
    accumulator,
    attend_tile,
    normalised,
    softmax_residuals,
    tile_gradients,
)
from nsa_jax.kernels.xla.sizes import Sizes
from nsa_jax.layout import Quantised
from nsa_jax.layout.quantised import check_differentiable, widened

NO_BLOCK = jnp.iinfo(jnp.int32).max  # the start of a missing block: it sorts after every block


class BlockLists(NamedTuple):
    """The keys that each row sees: those in its blocks that are at or after `floor` and before `limit`.

    Attributes:
      starts: first key of each block, `NO_BLOCK` if there is none.
      floor: first key that the row may see.
      limit: one past the last key that the row may see.
    """

    starts: Int32[Array, "rows R"]
    floor: Int32[Array, " rows"]
    limit: Int32[Array, " rows"]


class ItemSizes(NamedTuple):
    """Static sizes of the work on one chunk of rows.

    Attributes:
      block_size: keys of a block.
      rows: rows of a chunk.
      pairs_per_item: most (row, block) pairs of an item.
      items_per_step: items that are computed at once.
      num_items: most items of a chunk, a multiple of `items_per_step`.
    """

    block_size: int
    rows: int
    pairs_per_item: int
    items_per_step: int
    num_items: int

    @classmethod
    def choose(
        cls, *, num_rows: int, slots: int, width: int, block_size: int, rows_per_sequence: int,
        blocks_per_sequence: int, sizes: Sizes,
    ) -> "ItemSizes":  # fmt: skip
        """Chooses sizes for rows of `slots` blocks and `width` floats.

        At most `blocks_per_sequence` of the blocks of a sequence are distinct.
        """
        rows = max(1, min(sizes.selected_chunk, sizes.partial_floats // (slots * width), num_rows))
        pairs = rows * slots
        sequences = 1 + -(-(rows - 1) // rows_per_sequence)
        distinct = min(pairs, sequences * blocks_per_sequence)
        # If few rows share a block, wide items would be mostly empty. In a decode step no rows share one.
        pairs_per_item = min(sizes.pairs_per_item, -(-pairs // distinct))
        num_items = pairs if pairs_per_item == 1 else pairs // pairs_per_item + distinct
        items_per_step = min(sizes.items_per_step * sizes.pairs_per_item // pairs_per_item, num_items)
        return cls(
            block_size, rows, pairs_per_item, items_per_step, -(-num_items // items_per_step) * items_per_step
        )


class _Items(NamedTuple):
    """The pairs of a chunk, grouped by block. A pair has the number `row * R + slot`; -1 = none."""

    start: Int32[Array, " items"]
    pairs: Int32[Array, "items size"]
    place: Int32[Array, " pairs"]  # index of each pair in the flattened `pairs`
    total: Int32[Array, ""]


class _Read(NamedTuple):
    """Indices of the rows and keys that the items of one step read, and which keys each row sees."""

    row: Int32[Array, "items size"]
    token: Int32[Array, "items block"]
    head: Int32[Array, " items"]
    visible: Bool[Array, "items 1 item_rows block"]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def block_attention(
    query: Float[Array, "rows G H"],
    key: Float[Array, "tokens K H"],
    value: Float[Array, "tokens K V"],
    blocks: BlockLists,
    scale: float,
    sizes: ItemSizes,
) -> tuple[Float[Array, "rows G V"], Float[Array, "rows G"]]:
    """Attention of each row over its blocks, which must not overlap. There must be `block_size` tokens.

    Returns:
      `(out, lse)`.
    """
    return _forward(query, key, value, blocks, scale, sizes)[0]


def _forward(query, key, value, blocks, scale, sizes):
    num_rows, heads, _ = query.shape
    accumulate = accumulator(query)

    def attend_chunk(inputs):
        query, blocks = inputs
        items = _group(blocks.starts, sizes)

        def attend_items(step, partials):
            at = step * sizes.items_per_step
            read = _read_items(items, blocks, at, sizes, key.shape, heads)
            k, v = (widened(_read_blocks(x, read), query.dtype) for x in (key, value))
            part = attend_tile(_rows_of(query, read), k, v, read.visible, scale)
            return jax.tree.map(
                lambda whole, p: jax.lax.dynamic_update_slice_in_dim(
                    whole, p.reshape(-1, *whole.shape[1:]), at, 0
                ),
                partials,
                part,
            )

        places = (sizes.num_items, sizes.pairs_per_item)
        partials = Partial(
            zeros_beside(query, (*places, heads), accumulate),
            zeros_beside(query, (*places, heads), accumulate),
            zeros_beside(query, (*places, heads, value.shape[-1]), accumulate),
        )
        sums = _over_steps(items, sizes, attend_items, partials)
        has_block = items.place.reshape(sizes.rows, -1) >= 0
        sums = jax.tree.map(lambda x: _by_pair(x, items, sizes), sums)
        return normalised(_merged_slots(sums, has_block))

    chunks = (_split(query, sizes), _split_lists(blocks, sizes))
    results = over_chunks(attend_chunk, chunks)
    out, lse = (x.reshape(-1, *x.shape[2:])[:num_rows] for x in results)
    out = out.astype(query.dtype)
    return (out, lse), (query, key, value, blocks, out, lse)


def _backward(scale, sizes, residuals, cotangents):
    query, key, value, blocks, out, lse = residuals
    check_differentiable(key, value)
    d_out, d_lse = cotangents
    num_rows, heads, key_dim = query.shape
    accumulate = lse.dtype
    shift, delta = softmax_residuals(out, lse, d_out, d_lse)

    def differentiate_chunk(d_keys_values, inputs):
        per_row, blocks = inputs
        items = _group(blocks.starts, sizes)

        def differentiate_items(step, carry):
            d_key, d_value, d_query = carry
            at = step * sizes.items_per_step
            read = _read_items(items, blocks, at, sizes, key.shape, heads)
            query, d_out, shift, delta = (_rows_of(x, read) for x in per_row)
            rows = Rows.of(query, d_out, shift[..., 0], delta[..., 0])
            part, *parts = tile_gradients(
                rows, _read_blocks(key, read), _read_blocks(value, read), read.visible, scale
            )
            part = part.reshape(-1, *d_query.shape[1:])
            d_query = jax.lax.dynamic_update_slice_in_dim(d_query, part, at, 0)

            def add_item(item, totals):
                at = (read.token[item, 0], read.head[item], jnp.int32(0))
                return tuple(
                    _add_block(total, at, part[item]) for total, part in zip(totals, parts, strict=True)
                )

            items_left = jnp.minimum(items.total - at, sizes.items_per_step)
            return *jax.lax.fori_loop(0, items_left, add_item, (d_key, d_value)), d_query

        shape = (sizes.num_items, sizes.pairs_per_item, heads, key_dim)
        d_query = zeros_beside(per_row[0], shape, accumulate)
        carry = _over_steps(items, sizes, differentiate_items, (*d_keys_values, d_query))
        d_query = _by_pair(carry[2], items, sizes)
        has_block = items.place.reshape(sizes.rows, -1, 1, 1) >= 0
        return carry[:2], jnp.where(has_block, d_query, 0).sum(1)

    per_row = tuple(_split(x, sizes) for x in (query, d_out, shift[..., None], delta[..., None]))
    totals = (zeros_beside(key, key.shape, accumulate), zeros_beside(value, value.shape, accumulate))
    totals, d_query = fold_chunks(differentiate_chunk, totals, (per_row, _split_lists(blocks, sizes)))
    d_query = d_query.reshape(-1, *query.shape[1:])[:num_rows].astype(query.dtype)
    return d_query, totals[0].astype(key.dtype), totals[1].astype(value.dtype), None


block_attention.defvjp(_forward, _backward)


def _group(starts: Int32[Array, "rows R"], sizes: ItemSizes) -> _Items:
    """Sorts the pairs of a chunk by block and cuts the pairs of each block into items.

    An example: four pairs with blocks 8, 0, 8, 8, in items of two pairs. Sorted by block they are pairs 1, 0,
    2, 3, and their ranks within their block are 0, 0, 1, 2. Every even rank opens an item, so there are items
    for the blocks 0, 8, 8 with pairs (1, -), (0, 2), (3, -). Pairs 0 to 3 have the places 2, 0, 3, 4 in them.
    """
    starts = starts.reshape(-1)
    size, num_pairs = sizes.pairs_per_item, starts.shape[0]
    pair = jnp.arange(num_pairs, dtype=jnp.int32)
    if size == 1:
        missing = sizes.num_items - num_pairs
        pairs = jnp.pad(jnp.where(starts == NO_BLOCK, -1, pair), (0, missing), constant_values=-1)
        return _Items(jnp.pad(starts, (0, missing)), pairs[:, None], pairs[:num_pairs], jnp.int32(num_pairs))
    in_order, order = jax.lax.sort((starts, pair), num_keys=1, is_stable=True)
    has_block = in_order != NO_BLOCK
    is_first = jnp.pad(in_order[1:] != in_order[:-1], (1, 0), constant_values=True)
    rank = pair - jax.lax.cummax(jnp.where(is_first, pair, 0))
    items_opened = jnp.cumsum(has_block & (rank % size == 0), dtype=jnp.int32)
    place_in_order = jnp.where(has_block, (items_opened - 1) * size + rank % size, -1)
    # A pair without a place gets an index beyond the end, and the write is dropped.
    target = jnp.where(has_block, place_in_order, sizes.num_items * size + pair)
    pairs = jnp.full_like(order, -1, shape=(sizes.num_items * size,))
    pairs = pairs.at[target].set(order, mode="drop", unique_indices=True)
    first = jnp.where(has_block & (rank % size == 0), items_opened - 1, sizes.num_items + pair)
    start = jnp.zeros_like(order, shape=(sizes.num_items,))
    start = start.at[first].set(in_order, mode="drop", unique_indices=True)
    place = jnp.zeros_like(pair).at[order].set(place_in_order, unique_indices=True)
    return _Items(start, pairs.reshape(-1, size), place, items_opened[-1])


def _over_steps(items: _Items, sizes: ItemSizes, function, carry):
    """Repeats `carry = function(step, carry)` for the steps that have items."""
    if sizes.num_items == sizes.items_per_step:
        return function(jnp.int32(0), carry)
    steps = (items.total + sizes.items_per_step - 1) // sizes.items_per_step
    return jax.lax.fori_loop(0, steps, function, carry)


def _read_items(
    items: _Items, blocks: BlockLists, at, sizes: ItemSizes, key_shape: tuple[int, ...], heads: int
) -> _Read:
    num_tokens, num_heads = key_shape[:2]
    start = jax.lax.dynamic_slice_in_dim(items.start, at, sizes.items_per_step)
    pairs = jax.lax.dynamic_slice_in_dim(items.pairs, at, sizes.items_per_step)
    row = jnp.maximum(pairs, 0) // blocks.starts.shape[1]
    # A block may reach beyond the array: read a whole block inside it, and mask what is not of this block.
    clamped = jnp.clip(start // num_heads, 0, num_tokens - sizes.block_size)
    token, head = clamped[:, None] + jnp.arange(sizes.block_size, dtype=jnp.int32)[None], start % num_heads
    key = token * num_heads + head[:, None]
    behind = start[:, None] + sizes.block_size * num_heads
    in_block = (key >= start[:, None]) & (key < behind)
    visible = (
        (pairs >= 0)[:, :, None]
        & in_block[:, None]
        & (key[:, None] >= blocks.floor[row][..., None])
        & (key[:, None] < blocks.limit[row][..., None])
    )
    return _Read(row, token, head, jnp.repeat(visible, heads, axis=1)[:, None])


def _rows_of(per_row: Float[Array, "rows G X"], read: _Read) -> Float[Array, "items 1 item_rows X"]:
    """Gathers the rows of each item, with the heads of its pairs one after the other."""
    gathered = per_row[read.row]
    return gathered.reshape(gathered.shape[0], 1, -1, gathered.shape[-1])


def _read_blocks(array: Array | Quantised, read: _Read) -> Any:
    """`[items, block, 1, X]` of `[tokens, K, X]`."""
    at = read.token, read.head[:, None]
    return jax.tree.map(lambda x: x.at[at].get(mode="promise_in_bounds")[:, :, None], array)


def _by_pair(partials: Array, items: _Items, sizes: ItemSizes) -> Array:
    """Reorders `[items, size, ...]` to `[rows, R, ...]`; arbitrary where a pair has no block."""
    flat = partials.reshape(-1, *partials.shape[2:])
    return flat[jnp.maximum(items.place, 0)].reshape(sizes.rows, -1, *flat.shape[1:])


def _merged_slots(sums: Partial, has_block: Bool[Array, "rows R"]) -> Partial:
    """Merges the partial softmaxes of the blocks of each row (axis 1)."""
    largest = jnp.where(has_block[..., None], sums.largest, -jnp.inf)
    overall = largest.max(axis=1)
    part = jnp.exp(largest - jnp.where(overall == -jnp.inf, 0, overall)[:, None])
    total = jnp.where(has_block[..., None], part * sums.total, 0).sum(axis=1)
    out = jnp.where(has_block[..., None, None], part[..., None] * sums.out, 0).sum(axis=1)
    return Partial(overall, total, out)


def _split(x: Array, sizes: ItemSizes, fill: int = 0) -> Array:
    pad = -x.shape[0] % sizes.rows
    x = jnp.pad(x, ((0, pad),) + ((0, 0),) * (x.ndim - 1), constant_values=fill)
    return x.reshape(-1, sizes.rows, *x.shape[1:])


def _split_lists(blocks: BlockLists, sizes: ItemSizes) -> BlockLists:
    starts = _split(blocks.starts, sizes, fill=NO_BLOCK)
    return BlockLists(starts, _split(blocks.floor, sizes), _split(blocks.limit, sizes))


def _add_block(
    total: Float[Array, "tokens K X"], at: tuple[Array, ...], part: Float[Array, "block 1 X"]
) -> Array:
    old = jax.lax.dynamic_slice(total, at, part.shape)
    return jax.lax.dynamic_update_slice(total, old + part, at)
