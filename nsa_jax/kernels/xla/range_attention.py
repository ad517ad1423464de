"""Attention in which every query sees one contiguous range of keys: the compressed and the window branch.

Queries go in chunks (outer scan), keys in tiles (inner loop over just the tiles that some query of the chunk
sees) with an online softmax, so memory is that of one `[chunk, tile]` block of logits per head and work
follows the ranges. The backward repeats the loop with the saved normaliser and adds `dk, dv` tile by tile,
in a fixed order.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from nsa_jax.array_typing import Array, Float, Int, Int32
from nsa_jax.config import Tiles

# A tile is read whole for one visible key of it, so a decode step on a large empty cache must not read it
# all: with the default tiles this is 4096 compressed keys, those of 64k tokens in the paper's configuration.
_WIDEST_TILE = 16  # in units of `Tiles.key_tile`

# Fewer rows than this in all KV heads together: a decode step, which waits for memory and not for arithmetic.
_FEW_ROWS = 128


class _Chunks(NamedTuple):
    """Queries of one chunk: `rows` pairs each query token with each of the G heads of its KV head."""

    query: Float[Array, "B K rows H"]
    start: Int32[Array, "B rows"]
    end: Int32[Array, "B rows"]


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def range_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    start: Int[Array, "B T"],
    end: Int[Array, "B T"],
    scale: float,
    tiles: Tiles,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"], Int32[Array, "B T"]]:
    """Attention of each query over keys `start .. end - 1`.

    Returns:
      `(out, lse, reads)`: `reads` counts the keys that the masks let each query see.
    """
    return _forward(query, key, value, start, end, scale, tiles)[0]


def _forward(query, key, value, start, end, scale, tiles):
    batch, num_queries, num_heads, _ = query.shape
    num_kv_heads, value_dim = value.shape[2:]
    accumulate = jnp.promote_types(query.dtype, jnp.float32)
    if key.shape[1] == 0 or num_queries == 0:
        out = jnp.zeros((batch, num_queries, num_heads, value_dim), query.dtype)
        lse = jnp.full((batch, num_queries, num_heads), -jnp.inf, accumulate)
        return (out, lse, jnp.zeros_like(start, jnp.int32)), (query, key, value, start, end, out, lse)
    tile = tile_size(num_queries, key.shape[1], tiles)

    def attend_chunk(chunk: _Chunks):
        rows = chunk.query.shape[2]
        lowest, num_tiles = tiles_of_chunk(chunk.start, chunk.end, tile)

        def attend_tile(index, carry):
            largest, total, out, reads = carry
            first = lowest + index * tile
            visible, (k, v) = read_tile(chunk, first, tile, key, value)
            logits = row_logits(chunk.query, k, accumulate) * scale
            logits = jnp.where(visible[:, None], logits, -jnp.inf)
            new_largest = jnp.maximum(largest, logits.max(-1))
            # A row that has seen nothing keeps -inf as its maximum; subtracting 0 instead keeps exp at 0,
            # not NaN.
            shift = jnp.where(new_largest == -jnp.inf, 0, new_largest)
            weights = jnp.exp(logits - shift[..., None])
            decay = jnp.exp(largest - shift)
            total = total * decay + weights.sum(-1)
            out = out * decay[..., None] + _row_values(weights.astype(v.dtype), v, accumulate)
            return new_largest, total, out, reads + visible.sum(-1, dtype=jnp.int32)

        shape = (batch, num_kv_heads, rows)
        initial = (
            jnp.full_like(query, -jnp.inf, accumulate, shape=shape),
            zeros_beside(query, shape, accumulate),
            zeros_beside(query, (*shape, value_dim), accumulate),
            zeros_beside(start, (batch, rows), jnp.int32),
        )
        largest, total, out, reads = jax.lax.fori_loop(0, num_tiles, attend_tile, initial)
        seen = total > 0
        out = out / jnp.where(seen, total, 1)[..., None]
        lse = jnp.where(seen, largest + jnp.log(jnp.where(seen, total, 1)), -jnp.inf)
        return out.astype(query.dtype), lse, reads

    out, lse, reads = jax.lax.map(attend_chunk, split_queries(query, start, end, num_kv_heads, tiles))
    out = join_queries(out, num_queries, num_heads)
    lse = join_queries(lse[..., None], num_queries, num_heads)[..., 0]
    heads = num_heads // num_kv_heads
    reads = reads.reshape(reads.shape[0], batch, -1, heads)[..., 0].swapaxes(0, 1).reshape(batch, -1)
    return (out, lse, reads[:, :num_queries]), (query, key, value, start, end, out, lse)


def _backward(scale, tiles, residuals, cotangents):
    query, key, value, start, end, out, lse = residuals
    d_out, d_lse, _ = cotangents
    if key.shape[1] == 0 or query.shape[1] == 0:
        return jnp.zeros_like(query), jnp.zeros_like(key), jnp.zeros_like(value), None, None
    num_kv_heads = key.shape[2]
    accumulate = jnp.promote_types(query.dtype, jnp.float32)
    tile = tile_size(query.shape[1], key.shape[1], tiles)
    shift, delta = softmax_residuals(out, lse, d_out, d_lse)

    def by_chunk(x):
        return split_queries(x, start, end, num_kv_heads, tiles).query

    def differentiate_chunk(carry, inputs):
        chunk, d_out, shift, delta = inputs
        lowest, num_tiles = tiles_of_chunk(chunk.start, chunk.end, tile)

        def differentiate_tile(index, carry):
            d_query, d_keys, d_values = carry
            first = lowest + index * tile
            visible, (k, v) = read_tile(chunk, first, tile, key, value)
            logits = product("bkrh,bskh->bkrs", chunk.query, k, accumulate) * scale
            weights = jnp.exp(jnp.where(visible[:, None], logits, -jnp.inf) - shift)
            d_weights = product("bkrv,bskv->bkrs", d_out, v, accumulate)
            d_logits = (weights * (d_weights - delta) * scale).astype(k.dtype)
            d_query = d_query + product("bkrs,bskh->bkrh", d_logits, k, accumulate)
            d_k = product("bkrs,bkrh->bskh", d_logits, chunk.query, accumulate)
            d_v = product("bkrs,bkrv->bskv", weights.astype(v.dtype), d_out, accumulate)
            return d_query, add_tile(d_keys, first, d_k, axis=1), add_tile(d_values, first, d_v, axis=1)

        d_query = zeros_beside(query, chunk.query.shape, accumulate)
        d_query, *carry = jax.lax.fori_loop(0, num_tiles, differentiate_tile, (d_query, *carry))
        return tuple(carry), d_query.astype(query.dtype)

    carry = (zeros_beside(key, key.shape, accumulate), zeros_beside(value, value.shape, accumulate))
    chunks = split_queries(query, start, end, num_kv_heads, tiles)
    inputs = (chunks, by_chunk(d_out), by_chunk(shift[..., None]), by_chunk(delta[..., None]))
    (d_keys, d_values), d_query = jax.lax.scan(differentiate_chunk, carry, inputs)
    return (
        join_queries(d_query, query.shape[1], query.shape[2]),
        d_keys.astype(key.dtype),
        d_values.astype(value.dtype),
        None,
        None,
    )


range_attention.defvjp(_forward, _backward)


def softmax_residuals(out, lse, d_out, d_lse) -> tuple[Float[Array, "*rows"], Float[Array, "*rows"]]:
    """`lse` and `delta = sum(out * d_out) - d_lse` for the backward, both 0 in rows that see no key."""
    seen = lse > -jnp.inf
    delta = (out.astype(lse.dtype) * d_out.astype(lse.dtype)).sum(-1) - d_lse
    return jnp.where(seen, lse, 0), jnp.where(seen, delta, 0)


def zeros_beside(array: Array, shape: tuple[int, ...], dtype) -> Array:
    """Zeros to start a loop from, which under `shard_map` vary over the same mesh axes as `array`."""
    return jnp.zeros_like(array, dtype, shape)


def product(spec: str, left: Array, right: Array, accumulate) -> Array:
    """Matrix product of two blocks, exact enough for the error budget of their dtype."""
    return jnp.einsum(spec, left, right, precision="highest", preferred_element_type=accumulate)


def row_logits(query: Float[Array, "B K rows H"], key: Float[Array, "B S K H"], accumulate) -> Array:
    """`[B, K, rows, S]`: products of the rows of each KV head with its keys.

    The keys of one KV head do not lie together, so a product per KV head first copies them. Few rows are
    cheaper as
    rows of all heads with zeros in the places of the others: one product that reads the keys as they lie.
    """
    batch, num_kv_heads, rows, dim = query.shape
    if num_kv_heads == 1 or num_kv_heads * rows > _FEW_ROWS:
        return product("bkrh,bskh->bkrs", query, key, accumulate)
    own = jnp.eye(num_kv_heads, dtype=query.dtype)[:, None, :, None]
    wide = (query[:, :, :, None] * own).reshape(batch, num_kv_heads * rows, num_kv_heads * dim)
    logits = product("bnx,bsx->bns", wide, key.reshape(*key.shape[:2], -1), accumulate)
    return logits.reshape(batch, num_kv_heads, rows, -1)


def _row_values(weights: Float[Array, "B K rows S"], value: Float[Array, "B S K V"], accumulate) -> Array:
    """`[B, K, rows, V]`: weighted sums of each KV head's values; for few rows as in `row_logits`."""
    batch, num_kv_heads, rows, num_keys = weights.shape
    if num_kv_heads == 1 or num_kv_heads * rows > _FEW_ROWS:
        return product("bkrs,bskv->bkrv", weights, value, accumulate)
    wide = weights.reshape(batch, num_kv_heads * rows, num_keys)
    out = product("bns,bsx->bnx", wide, value.reshape(batch, num_keys, -1), accumulate)
    out = out.reshape(batch, num_kv_heads, rows, num_kv_heads, -1)
    return jnp.stack([out[:, head, :, head] for head in range(num_kv_heads)], axis=1)


def split_queries(query, start, end, num_kv_heads, tiles) -> _Chunks:
    """Cuts the queries into chunks (leading axis), the last one padded with queries that see nothing."""
    batch, num_queries, num_heads, dim = query.shape
    size = min(tiles.query_chunk, num_queries)
    pad = -num_queries % size
    heads = num_heads // num_kv_heads
    query = jnp.pad(query, ((0, 0), (0, pad), (0, 0), (0, 0)))
    query = query.reshape(batch, -1, size, num_kv_heads, heads, dim).transpose(1, 0, 3, 2, 4, 5)
    query = query.reshape(*query.shape[:3], size * heads, dim)

    def by_row(limit):
        limit = jnp.pad(limit.astype(jnp.int32), ((0, 0), (0, pad))).reshape(batch, -1, size).swapaxes(0, 1)
        return jnp.repeat(limit, heads, axis=2)

    return _Chunks(query, by_row(start), by_row(end))


def join_queries(
    x: Float[Array, "chunks B K rows X"], num_queries: int, num_heads: int
) -> Float[Array, "B T N X"]:
    """Undoes `split_queries`."""
    chunks, batch, num_kv_heads, rows, dim = x.shape
    heads = num_heads // num_kv_heads
    x = x.reshape(chunks, batch, num_kv_heads, rows // heads, heads, dim).transpose(1, 0, 3, 2, 4, 5)
    return x.reshape(batch, chunks * (rows // heads), num_heads, dim)[:, :num_queries]


def tile_size(num_queries: int, num_keys: int, tiles: Tiles) -> int:
    """Keys of one tile: more where there are few queries, as in a decode step, so that turns are few."""
    widening = min(max(tiles.query_chunk // num_queries, 1), _WIDEST_TILE)
    return min(tiles.key_tile * widening, num_keys)


def tiles_of_chunk(start, end, tile: int) -> tuple[Array, Array]:
    """First key and number of tiles of the chunk: just those that cover the union of its ranges."""
    some = start < end
    lowest = jnp.min(jnp.where(some, start, jnp.iinfo(jnp.int32).max))
    highest = jnp.max(jnp.where(some, end, 0))
    lowest = jnp.minimum(lowest, highest)
    return lowest, (highest - lowest + tile - 1) // tile


def read_tile(chunk: _Chunks, first, tile: int, *arrays):
    """The keys `first .. first + tile - 1` of each array and the mask of those that each row sees.

    The slice is clamped at the end of the array; keys before `first`, seen by an earlier tile, are masked.
    """
    clamped = jnp.minimum(first, arrays[0].shape[1] - tile)
    index = clamped + jnp.arange(tile, dtype=jnp.int32)
    visible = (index >= jnp.maximum(chunk.start, first)[..., None]) & (index < chunk.end[..., None])
    return visible, [jax.lax.dynamic_slice_in_dim(x, clamped, tile, axis=1) for x in arrays]


def add_tile(total: Array, first, part: Array, axis: int) -> Array:
    """Adds the results of one tile of keys to a total over all keys, clamped as `read_tile` clamps."""
    clamped = jnp.minimum(first, total.shape[axis] - part.shape[axis])
    old = jax.lax.dynamic_slice_in_dim(total, clamped, part.shape[axis], axis)
    return jax.lax.dynamic_update_slice_in_dim(total, old + part, clamped, axis)
