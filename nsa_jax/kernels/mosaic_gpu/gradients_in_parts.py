"""The gradients of the selected branch by one kernel, which forms that of the queries in parts.

The kernel of the keys' gradients multiplies no masked logits, since each block meets the queries that chose
it and no others. So it is also the cheapest place to form the queries' gradients: five products a step
instead of the seven of two kernels. But a query's gradient comes in R parts, one for each block, which are
stored in 16 bits and added up by a pass over memory (`triton.selected.query_parts`). Where neighbours choose
the same blocks, a kernel of the queries masks little, and is faster: `shares_little` tells the cases apart.

All parts take `2 B T R N H` bytes, 17 GB at 64k tokens, 64 heads, H = 128 and R = 16. So the queries are
worked through in chunks whose parts fit into `PART_BYTES`: a few KV heads, or one and a range of queries. A
block that queries of several ranges chose has items in each, whose partial sums are added in order at the
end: at most `4 block (H + V)` bytes for each block and range, and for each full item of queries (0.8 GB
there). Blocks and ranges both grow with the row, so the sums of a long one would take more than all else. A
row that would need more than `MOST_RANGES` takes the two kernels: there, one of more than 131072 tokens.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from nsa_jax.array_typing import Array, Bool, Float, Int, Int32
from nsa_jax.kernels.mosaic_gpu import sizes
from nsa_jax.kernels.mosaic_gpu.deltas import row_deltas
from nsa_jax.kernels.mosaic_gpu.key_arrays import KeyArrays, QueryParts
from nsa_jax.kernels.mosaic_gpu.query_parts import add_query_parts
from nsa_jax.kernels.mosaic_gpu.selected_key_gradients import selected_key_gradients
from nsa_jax.kernels.mosaic_gpu.support import FEWEST_HEADS
from nsa_jax.kernels.mosaic_gpu.unstable import loop_with_references
from nsa_jax.kernels.triton.backward import Backward
from nsa_jax.kernels.triton.selected.backward_key import join_items
from nsa_jax.kernels.triton.selected.items import BlockItems, invert
from nsa_jax.kernels.triton.selected.unions import last_rows
from nsa_jax.layout import Placement

PART_BYTES = 2**31  # most bytes of the parts of a chunk
MOST_RANGES = 4  # of the queries of a head
ITEM_QUERIES = 1024  # most queries of an item
BLOCK = 64  # the kernel forms parts for blocks of that many keys
FEWEST_PAIRS = 2**20  # of a query and a block: with fewer, the choice costs about what it gains
MOST_SHARED = 2.4  # pairs of a query and a block for each block that some neighbours chose
SAMPLED_TILES = 256  # of neighbours in a row of the batch, from which the choice is made


class Chunks(NamedTuple):
    """How the parts are cut into chunks.

    Attributes:
      heads: KV heads of a chunk, counted over all rows of the batch.
      queries: queries of a chunk; all of a row where there are several heads.
      ranges: chunks of a head along the queries.
      number: chunks in all.
    """

    heads: int
    queries: int
    ranges: int
    number: int

    @classmethod
    def of(cls, query: Float[Array, "B T N H"], num_kv_heads: int, slots: int) -> "Chunks":
        """The fewest chunks whose parts fit."""
        batch, num_queries, num_heads, key_dim = query.shape
        rows = sizes.gathered_rows(num_heads // num_kv_heads)
        of_query = query.dtype.itemsize * slots * rows * key_dim
        most = max(1, PART_BYTES // of_query)  # queries of a chunk
        ranges = -(-num_queries // most)
        queries = -(-num_queries // ranges)
        heads = min(max(1, most // num_queries), batch * num_kv_heads)
        return cls(heads, queries, ranges, ranges * -(-batch * num_kv_heads // heads))

    def most_items(self, items: BlockItems, slots: int) -> int:
        """Items of a chunk at most."""
        full = self.heads * self.queries * slots // ITEM_QUERIES
        return min(items.items.shape[0], full + self.heads * items.starts.shape[1])


def can_form_parts(
    query: Float[Array, "B T N H"], value: Float[Array, "B S K V"], block_indices: Int[Array, "B T K R"],
    placement: Placement,
) -> bool:  # fmt: skip
    """Whether there are kernels for this call, enough work for them, and room for the sums."""
    return (
        placement.config.selection_block_size == BLOCK
        and query.shape[3] + value.shape[3] <= 256
        and query.shape[2] >= FEWEST_HEADS * value.shape[2]
        and FEWEST_PAIRS <= block_indices.size < 2**31
        and Chunks.of(query, value.shape[2], block_indices.shape[3]).ranges <= MOST_RANGES
    )


def shares_little(block_indices: Int[Array, "B T K R"], tokens: int) -> Bool[Array, ""]:
    """Whether few of `tokens` neighbours choose the same block, on average over a sample of them."""
    batch, num_queries, num_kv_heads, slots = block_indices.shape
    tiles = num_queries // tokens
    found = block_indices[:, : tiles * tokens].reshape(batch, tiles, tokens, num_kv_heads, slots)
    found = found[:, :: max(1, tiles // SAMPLED_TILES)].swapaxes(2, 3).reshape(-1, tokens * slots)
    before = jnp.tri(tokens * slots, k=-1, dtype=bool)
    again = ((found[:, :, None] == found[:, None, :]) & before).any(axis=2)
    pairs, distinct = (found >= 0).sum(), ((found >= 0) & ~again).sum()
    return pairs < MOST_SHARED * distinct


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
    num_kv_heads, slots = block_indices.shape[2:]
    num_keys, last_keys = key.shape[1], last_rows(placement)
    chunks = Chunks.of(query, num_kv_heads, slots)
    items = invert(block_indices, placement, num_keys, item=ITEM_QUERIES, range_queries=chunks.queries)
    most = chunks.most_items(items, slots)
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
