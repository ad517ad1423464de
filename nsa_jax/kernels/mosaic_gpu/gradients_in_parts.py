"""The gradients of the selected branch by one kernel, which forms that of the queries in parts.

The kernel of the keys' gradients multiplies no masked logits, since each block meets the queries that chose
it and no others. So it is also the cheapest place to form the queries' gradients: five products a step
instead of the seven of two kernels. But a query's gradient comes in R parts, one for each block, which are
stored in 16 bits and added up by a pass over memory (`triton.selected.sum_query_parts`). Where neighbours
choose the same blocks, a kernel of the queries masks little, and is faster: `shares_little` tells the cases
apart.

All parts take `2 B T R N H` bytes, 17 GB at 64k tokens, 64 heads, H = 128 and R = 16. So the queries are
worked through in chunks whose parts fit into `PART_BYTES`: a few KV heads, or one and a range of queries. A
block that queries of several ranges chose has items in each, whose partial sums are added in order at the
end: at most `4 block (H + V)` bytes for each block and range, and for each full item of queries (0.8 GB
there). Ranges grow with the queries and blocks with the keys, so their sums may take more than all else. Two
kernels run instead where a row would need more than `MOST_RANGES`: there, one of more than 131072 tokens;
and where the sums would take more than `MOST_SUMS` times those of a row of as many keys as queries, as for
131072 queries of a million keys.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from nsa_jax.array_typing import Array, Bool, Float, Int, Int32
from nsa_jax.kernels.mosaic_gpu import sizes
from nsa_jax.kernels.mosaic_gpu.key_arrays import KeyArrays, QueryParts
from nsa_jax.kernels.mosaic_gpu.selected_key_gradients import selected_key_gradients
from nsa_jax.kernels.mosaic_gpu.unstable import loop_with_references
from nsa_jax.kernels.triton.backward import Backward
from nsa_jax.kernels.triton.selected.backward_key import join_items
from nsa_jax.kernels.triton.selected.chunks import Chunks
from nsa_jax.kernels.triton.selected.deltas import row_deltas
from nsa_jax.kernels.triton.selected.items import (
    BlockItems,
    invert,
    most_partials,
    most_partials_of_plain_rows,
)
from nsa_jax.kernels.triton.selected.sharing import shares_less
from nsa_jax.kernels.triton.selected.sum_query_parts import add_query_parts
from nsa_jax.kernels.triton.selected.unions import last_rows
from nsa_jax.layout import Placement

PART_BYTES = 2**31  # most bytes of the parts of a chunk; half of it would take twice the ranges
MOST_RANGES = 4  # of the queries of a head
MOST_SUMS = 3  # most partial sums, in those that a call with as many keys as queries needs
ITEM_QUERIES = 1024  # most queries of an item
BLOCK = 64  # the kernel forms parts for blocks of that many keys
FEWEST_HEADS = 9  # query heads of a KV head: with fewer, steps hold more padding than parts gain
FEWEST_PAIRS = 2**20  # of a query and a block: with fewer, the choice costs about what it gains
MOST_SHARED = 2.4  # pairs of a query and a block for each block that some neighbours chose


def chunks_of(query: Float[Array, "B T N H"], block_indices: Int[Array, "B T K R"]) -> Chunks:
    """The chunks of a call: at most `PART_BYTES` each."""
    slots, heads = block_indices.shape[3], query.shape[2] // block_indices.shape[2]
    of_query = query.dtype.itemsize * slots * sizes.gathered_rows(heads) * query.shape[3]
    return Chunks.of(block_indices, of_query, PART_BYTES)


def can_form_parts(
    query: Float[Array, "B T N H"], value: Float[Array, "B S K V"], block_indices: Int[Array, "B T K R"],
    placement: Placement,
) -> bool:  # fmt: skip
    """Whether there are kernels for this call, enough work for them, and room for the sums."""
    possible = (
        placement.config.selection_block_size == BLOCK
        and query.shape[3] + value.shape[3] <= 256
        and query.shape[2] >= FEWEST_HEADS * value.shape[2]
        and FEWEST_PAIRS <= block_indices.size < 2**31
    )
    if not possible or (ranges := chunks_of(query, block_indices).ranges) > MOST_RANGES:
        return False
    cut = dict(item=ITEM_QUERIES, ranges=ranges)
    sums = most_partials(block_indices, placement, value.shape[1], **cut)
    return sums <= MOST_SUMS * most_partials_of_plain_rows(block_indices, placement, query.shape[1], **cut)


def shares_little(block_indices: Int[Array, "B T K R"], tokens: int) -> Bool[Array, ""]:
    """Whether few of `tokens` neighbours choose the same block, on average over a sample of them."""
    return shares_less(block_indices, tokens, MOST_SHARED)


def gradients_in_parts(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    block_indices: Int32[Array, "B T K R"],
    placement: Placement,
    given: Backward,
    *,
    scale: float,
    **known: Any,
) -> tuple[Array, Array, Array, Array, Array]:
    """`(d_query, d_key, d_value, products, delta)` as of the kernels that form each by itself.

    Arguments as in `triton.selected.selected_gradients`; `known` are those that all kernels here take.
    """
    slots = block_indices.shape[3]
    num_keys, last_keys = key.shape[1], last_rows(placement)
    chunks = chunks_of(query, block_indices)
    items = invert(
        block_indices, placement, num_keys,
        item=ITEM_QUERIES, range_queries=chunks.queries, chunk_heads=chunks.heads,
    )  # fmt: skip
    most = chunks.most_items(items, slots, ITEM_QUERIES)
    products, delta = row_deltas(given)
    arrays = KeyArrays.of(query, key, value, given, delta, aligned=known["aligned"])
    shapes = arrays.sums(items, block_size=known["block_size"], aligned=known["aligned"])

    def chunk(number, d_query, *sums):
        lane = number * chunks.heads
        first = jnp.stack([lane // chunks.ranges, lane % chunks.ranges * chunks.queries])
        (parts,) = selected_key_gradients(
            arrays, _items_of(items, lane, chunks.heads, most), last_keys, scale=scale,
            parts=QueryParts(slots, chunks.heads, chunks.queries, first, sums), **known,
        )  # fmt: skip
        return add_query_parts(d_query, parts, first, block_indices, placement, given.previous)

    d_query, part_key, part_value, d_key, d_value = loop_with_references(
        chunks.number, chunk, lax.empty(query.shape, query.dtype), shapes
    )
    d_key, d_value = join_items(items, part_key, part_value, d_key[:, :num_keys], d_value[:, :num_keys])
    return d_query, d_key, d_value, products, delta


def _items_of(items: BlockItems, lane: Int32[Array, ""], lanes: int, most: int) -> BlockItems:
    """The items of `lanes` KV heads, or ranges of queries of one head, from number `lane` on."""
    bounds, table = items.bounds, items.items
    assert bounds is not None
    end = bounds[jnp.minimum(lane + lanes, bounds.shape[0] - 1)]
    number = bounds[lane] + jnp.arange(most, dtype=jnp.int32)
    found = table[jnp.minimum(number, table.shape[0] - 1)]
    return items._replace(items=jnp.where((number < end)[:, None], found, -1))
