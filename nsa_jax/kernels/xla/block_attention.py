"""Attention of query rows over lists of key blocks: the selected branch.

Gathering each row's blocks would copy `n l'` keys for the G heads of one token. So the (row, block) pairs of
a chunk of
rows are sorted by block and cut into items of pairs that share one block: an item is one dense product of
its rows with its block. The partial results of a row's blocks are then gathered and merged. The backward
walks the same items; `dk` and `dv` are added item by item in a fixed order.

Rows are the flattened (batch, KV head, query token), so batches, packed rows and ragged caches differ only
in their block starts. Keys stay `[tokens, K, H]` as they come, `tokens` the flattened (batch, key token): a
decode step must not copy its cache. A key is named by its index in the flattened `[tokens * K]`, so a
block's keys lie `K` apart.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from nsa_jax.array_typing import Array, Bool, Float, Int32
from nsa_jax.config import Tiles
from nsa_jax.kernels.xla.range_attention import product, softmax_residuals, zeros_beside

_NO_BLOCK = jnp.iinfo(jnp.int32).max  # sorts behind every block start

# Floats in the partial results of one chunk of rows: 32 MiB in float32, about what a last-level cache holds.
_PARTIAL_FLOATS = 2**23


class BlockLists(NamedTuple):
    """Keys of each row: a block of them from `starts[r]` on, as far as below `limit`; -1 = no block."""

    starts: Int32[Array, "rows R"]
    limit: Int32[Array, " rows"]


class ItemSizes(NamedTuple):
    """Static sizes: the pairs of `rows` rows fill up to `num_items` items of `pairs_per_item`."""

    block_size: int
    rows: int
    pairs_per_item: int
    items_per_step: int
    num_items: int

    @classmethod
    def choose(
        cls, *, num_rows: int, slots: int, width: int, block_size: int, rows_per_sequence: int,
        blocks_per_sequence: int, tiles: Tiles,
    ) -> "ItemSizes":  # fmt: skip
        """Sizes for rows of `slots` blocks and `width` floats, `blocks_per_sequence` of them distinct."""
        rows = max(1, min(tiles.selected_chunk, _PARTIAL_FLOATS // (slots * width), num_rows))
        pairs = rows * slots
        sequences = 1 + -(-(rows - 1) // rows_per_sequence)
        distinct = min(pairs, sequences * blocks_per_sequence)
        # Where few rows share a block (a decode step: none), wide items would be mostly empty places.
        pairs_per_item = min(tiles.pairs_per_item, -(-pairs // distinct))
        num_items = pairs if pairs_per_item == 1 else pairs // pairs_per_item + distinct
        items_per_step = min(tiles.items_per_step * tiles.pairs_per_item // pairs_per_item, num_items)
        return cls(
            block_size, rows, pairs_per_item, items_per_step, -(-num_items // items_per_step) * items_per_step
        )


class _Items(NamedTuple):
    """Pairs of one chunk grouped by block; pair `row * R + slot`, -1 = none."""

    start: Int32[Array, " items"]
    pairs: Int32[Array, "items size"]
    place: Int32[Array, " pairs"]  # where each pair lies in the flattened `pairs`
    total: Int32[Array, ""]


class _Read(NamedTuple):
    """What the items of one step read."""

    row: Int32[Array, "items size"]
    token: Int32[Array, "items block"]
    head: Int32[Array, " items"]
    visible: Bool[Array, "items size block"]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def block_attention(
    query: Float[Array, "rows G H"],
    key: Float[Array, "tokens K H"],
    value: Float[Array, "tokens K V"],
    blocks: BlockLists,
    scale: float,
    sizes: ItemSizes,
) -> tuple[Float[Array, "rows G V"], Float[Array, "rows G"], Int32[Array, " rows"]]:
    """Attention of each row over its blocks, which must not overlap; at least `block_size` tokens.

    Returns:
      `(out, lse, reads)`: `reads` counts the keys that the masks let each row see.
    """
    return _forward(query, key, value, blocks, scale, sizes)[0]


def _forward(query, key, value, blocks, scale, sizes):
    num_rows, heads, _ = query.shape
    accumulate = jnp.promote_types(query.dtype, jnp.float32)

    def attend_chunk(inputs):
        query, blocks = inputs
        items = _group(blocks.starts, sizes)

        def attend_items(step, partials):
            at = step * sizes.items_per_step
            read = _read_items(items, blocks, at, sizes, key.shape)
            q, k, v = query[read.row], _read_blocks(key, read), _read_blocks(value, read)
            logits = product("ipgh,ish->ipgs", q, k, accumulate) * scale
            logits = jnp.where(read.visible[:, :, None], logits, -jnp.inf)
            largest = logits.max(-1)
            weights = jnp.exp(logits - jnp.where(largest == -jnp.inf, 0, largest)[..., None])
            out = product("ipgs,isv->ipgv", weights.astype(v.dtype), v, accumulate)
            part = (largest, weights.sum(-1), out, read.visible.sum(-1, dtype=jnp.int32))
            return jax.tree.map(
                lambda whole, p: jax.lax.dynamic_update_slice_in_dim(whole, p, at, 0), partials, part
            )

        places = (sizes.num_items, sizes.pairs_per_item)
        partials = (
            zeros_beside(query, (*places, heads), accumulate),
            zeros_beside(query, (*places, heads), accumulate),
            zeros_beside(query, (*places, heads, value.shape[-1]), accumulate),
            zeros_beside(blocks.starts, places, jnp.int32),
        )
        partials = jax.lax.fori_loop(0, _num_steps(items, sizes), attend_items, partials)
        largest, total, out, reads = (_by_pair(x, items, sizes) for x in partials)
        return _merge(largest, total, out, reads, items.place.reshape(sizes.rows, -1) >= 0)

    chunks = (
        _split(query, sizes),
        BlockLists(_split(blocks.starts, sizes, fill=-1), _split(blocks.limit, sizes)),
    )
    out, lse, reads = (x.reshape(-1, *x.shape[2:])[:num_rows] for x in jax.lax.map(attend_chunk, chunks))
    out = out.astype(query.dtype)
    return (out, lse, reads), (query, key, value, blocks, out, lse)


def _backward(scale, sizes, residuals, cotangents):
    query, key, value, blocks, out, lse = residuals
    d_out, d_lse, _ = cotangents
    num_rows, heads, key_dim = query.shape
    accumulate = lse.dtype
    shift, delta = softmax_residuals(out, lse, d_out, d_lse)

    def differentiate_chunk(d_keys_values, inputs):
        query, d_out, shift, delta, blocks = inputs
        items = _group(blocks.starts, sizes)

        def differentiate_items(step, carry):
            d_key, d_value, d_query = carry
            at = step * sizes.items_per_step
            read = _read_items(items, blocks, at, sizes, key.shape)
            q, k, v = query[read.row], _read_blocks(key, read), _read_blocks(value, read)
            do = d_out[read.row]
            logits = product("ipgh,ish->ipgs", q, k, accumulate) * scale
            logits = jnp.where(read.visible[:, :, None], logits, -jnp.inf)
            weights = jnp.exp(logits - shift[read.row][..., None])
            d_weights = product("ipgv,isv->ipgs", do, v, accumulate)
            d_logits = (weights * (d_weights - delta[read.row][..., None]) * scale).astype(k.dtype)
            part = product("ipgs,ish->ipgh", d_logits, k, accumulate)
            d_query = jax.lax.dynamic_update_slice_in_dim(d_query, part, at, 0)
            parts = (
                product("ipgs,ipgh->ish", d_logits, q, accumulate),
                product("ipgs,ipgv->isv", weights.astype(v.dtype), do, accumulate),
            )

            def add_item(item, totals):
                at = (read.token[item, 0], read.head[item], jnp.int32(0))
                return tuple(
                    _add_block(total, at, part[item]) for total, part in zip(totals, parts, strict=True)
                )

            items_left = jnp.minimum(items.total - at, sizes.items_per_step)
            return *jax.lax.fori_loop(0, items_left, add_item, (d_key, d_value)), d_query

        d_query = zeros_beside(query, (sizes.num_items, sizes.pairs_per_item, heads, key_dim), accumulate)
        carry = jax.lax.fori_loop(0, _num_steps(items, sizes), differentiate_items, (*d_keys_values, d_query))
        d_query = _by_pair(carry[2], items, sizes)
        has_block = items.place.reshape(sizes.rows, -1, 1, 1) >= 0
        return carry[:2], jnp.where(has_block, d_query, 0).sum(1)

    per_row = tuple(_split(x, sizes) for x in (query, d_out, shift, delta))
    lists = BlockLists(_split(blocks.starts, sizes, fill=-1), _split(blocks.limit, sizes))
    totals = (zeros_beside(key, key.shape, accumulate), zeros_beside(value, value.shape, accumulate))
    (d_key, d_value), d_query = jax.lax.scan(differentiate_chunk, totals, (*per_row, lists))
    d_query = d_query.reshape(-1, *query.shape[1:])[:num_rows].astype(query.dtype)
    return d_query, d_key.astype(key.dtype), d_value.astype(value.dtype), None


block_attention.defvjp(_forward, _backward)


def _group(starts: Int32[Array, "rows R"], sizes: ItemSizes) -> _Items:
    """Sorts the pairs of a chunk by block and cuts each block's run into items."""
    starts = jnp.where(starts < 0, _NO_BLOCK, starts).reshape(-1)
    size, num_pairs = sizes.pairs_per_item, starts.shape[0]
    pair = jnp.arange(num_pairs, dtype=jnp.int32)
    if size == 1:
        missing = sizes.num_items - num_pairs
        pairs = jnp.pad(jnp.where(starts == _NO_BLOCK, -1, pair), (0, missing), constant_values=-1)
        return _Items(jnp.pad(starts, (0, missing)), pairs[:, None], pairs[:num_pairs], jnp.int32(num_pairs))
    in_order, order = jax.lax.sort((starts, pair), num_keys=1, is_stable=True)
    has_block = in_order != _NO_BLOCK
    run_starts = jnp.diff(in_order, prepend=-1) != 0
    rank = pair - jax.lax.cummax(jnp.where(run_starts, pair, 0))
    items_opened = jnp.cumsum(has_block & (rank % size == 0), dtype=jnp.int32)
    item = items_opened - 1
    numbers = jnp.arange(sizes.num_items, dtype=jnp.int32)
    first = jnp.searchsorted(items_opened, numbers + 1).astype(jnp.int32)
    member = first[:, None] + jnp.arange(size, dtype=jnp.int32)
    exists = (member < num_pairs) & (item.at[member].get(mode="clip") == numbers[:, None])
    exists &= has_block.at[member].get(mode="clip")
    pairs = jnp.where(exists, order.at[member].get(mode="clip"), -1)
    place_in_order = jnp.where(has_block, item * size + rank % size, -1)
    _, place = jax.lax.sort((order, place_in_order), num_keys=1)
    return _Items(in_order.at[first].get(mode="clip"), pairs, place, items_opened[-1])


def _num_steps(items: _Items, sizes: ItemSizes) -> Array:
    return (items.total + sizes.items_per_step - 1) // sizes.items_per_step


def _read_items(items: _Items, blocks: BlockLists, at, sizes: ItemSizes, key_shape: tuple[int, ...]) -> _Read:
    num_tokens, num_heads = key_shape[:2]
    start = jax.lax.dynamic_slice_in_dim(items.start, at, sizes.items_per_step)
    pairs = jax.lax.dynamic_slice_in_dim(items.pairs, at, sizes.items_per_step)
    row = jnp.maximum(pairs, 0) // blocks.starts.shape[1]
    # The last block may stick out of the array: read the last whole block instead and mask what precedes
    # `start`.
    clamped = jnp.clip(start // num_heads, 0, num_tokens - sizes.block_size)
    token, head = clamped[:, None] + jnp.arange(sizes.block_size, dtype=jnp.int32), start % num_heads
    key = token * num_heads + head[:, None]
    visible = (
        (pairs >= 0)[:, :, None]
        & (key >= start[:, None])[:, None]
        & (key[:, None] < blocks.limit[row][..., None])
    )
    return _Read(row, token, head, visible)


def _read_blocks(array: Float[Array, "tokens K X"], read: _Read) -> Float[Array, "items block X"]:
    return array.at[read.token, read.head[:, None]].get(mode="promise_in_bounds")


def _by_pair(partials: Array, items: _Items, sizes: ItemSizes) -> Array:
    """Brings `[items, size, ...]` into the order `[rows, R, ...]`; arbitrary where a pair has no block."""
    flat = partials.reshape(-1, *partials.shape[2:])
    return flat[jnp.maximum(items.place, 0)].reshape(sizes.rows, -1, *flat.shape[1:])


def _merge(largest, total, out, reads, has_block) -> tuple[Array, Array, Array]:
    """Merges the partial softmaxes of each row's blocks (axis 1)."""
    largest = jnp.where(has_block[..., None], largest, -jnp.inf)
    overall = largest.max(1)
    seen = overall > -jnp.inf
    decay = jnp.exp(largest - jnp.where(seen, overall, 0)[:, None])
    total = jnp.where(seen, (decay * total).sum(1), 1)
    out = (decay[..., None] * out).sum(1) / total[..., None]
    reads = jnp.where(has_block, reads, 0).sum(1, dtype=jnp.int32)
    return out, jnp.where(seen, overall + jnp.log(total), -jnp.inf), reads


def _split(x: Array, sizes: ItemSizes, fill: int = 0) -> Array:
    pad = -x.shape[0] % sizes.rows
    x = jnp.pad(x, ((0, pad),) + ((0, 0),) * (x.ndim - 1), constant_values=fill)
    return x.reshape(-1, sizes.rows, *x.shape[1:])


def _add_block(
    total: Float[Array, "tokens K X"], at: tuple[Array, ...], part: Float[Array, "block X"]
) -> Array:
    part = part[:, None]
    old = jax.lax.dynamic_slice(total, at, part.shape)
    return jax.lax.dynamic_update_slice(total, old + part, at)
