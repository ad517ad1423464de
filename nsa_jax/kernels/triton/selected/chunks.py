"""How parts, one for each slot of a query, are cut into chunks whose memory is bounded.

A kernel that has key blocks outside leaves, for each query and each block that it chose, a part of a result,
which a second kernel adds up. All parts together would take R times the memory of the result. So the queries
are worked through in chunks: a few KV heads, or one and a range of its queries.
"""

from typing import NamedTuple

import jax.numpy as jnp

from nsa_jax.array_typing import Array, Int, Int32
from nsa_jax.kernels.triton.selected.items import BlockItems

PART_BYTES = (
    2**30
)  # most bytes of the parts of a chunk; 2^31 is 1.1 % faster at best. `chunks_of` says what may take twice


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
    def of(cls, block_indices: Int[Array, "B T K R"], query_bytes: int, most_bytes: int) -> "Chunks":
        """The fewest chunks of at most `most_bytes`; the parts of a query and KV head take `query_bytes`."""
        batch, num_queries, num_kv_heads, _ = block_indices.shape
        most = max(1, most_bytes // query_bytes)  # queries of a chunk
        ranges = -(-num_queries // most)
        queries = -(-num_queries // ranges)
        heads = min(max(1, most // num_queries), batch * num_kv_heads)
        return cls(heads, queries, ranges, ranges * -(-batch * num_kv_heads // heads))

    def most_items(self, items: BlockItems, slots: int, item: int) -> int:
        """Items of a chunk at most, of `item` pairs each."""
        full = self.heads * self.queries * slots // item
        return min(items.items.shape[0], full + self.heads * items.starts.shape[1])

    def table(self, items: BlockItems) -> Int32[Array, "chunks 4"]:
        """Of each chunk: first `b K + k`, first query, first item, and end of its items."""
        assert items.bounds is not None
        first = jnp.arange(self.number, dtype=jnp.int32) * self.heads  # heads times their ranges
        end = jnp.minimum(first + self.heads, items.bounds.shape[0] - 1)
        columns = (
            first // self.ranges, first % self.ranges * self.queries, items.bounds[first], items.bounds[end]
        )  # fmt: skip
        return jnp.stack(columns, axis=-1)
