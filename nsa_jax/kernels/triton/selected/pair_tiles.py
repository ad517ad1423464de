"""How the pairs of a query and a block are cut into tiles, to be sorted by counting (`counting_sort`).

A lane is a KV head and a range of its queries. Its pairs are cut into tiles of consecutive queries.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class PairTiles(NamedTuple):
    """How the pairs `[B, T, K, R]` are cut.

    Attributes:
      num_queries, num_kv_heads, slots: T, K and R.
      range_queries: queries of a range.
      ranges: ranges of a KV head.
      lanes: KV heads of all rows, times their ranges.
      number: tiles of a lane.
      pairs: pairs of a tile, a power of two, with those of the slots that fill up R to one.
      num_places: places of a lane.
    """

    num_queries: int
    num_kv_heads: int
    slots: int
    range_queries: int
    ranges: int
    lanes: int
    number: int
    pairs: int
    num_places: int

    @classmethod
    def of(cls, shape: tuple[int, ...], num_places: int, range_queries: int, pairs: int) -> "PairTiles":
        """The pairs of this shape in tiles of `pairs`, or of more, where a query alone has more."""
        batch, num_queries, num_kv_heads, slots = shape
        padded = triton.next_power_of_2(slots)
        pairs = max(pairs, padded)
        ranges = max(1, triton.cdiv(num_queries, range_queries))
        number = max(1, triton.cdiv(min(range_queries, num_queries), pairs // padded))
        lanes = batch * num_kv_heads * ranges
        return cls(num_queries, num_kv_heads, slots, range_queries, ranges, lanes, number, pairs, num_places)

    @property
    def grid(self) -> tuple[int, int]:
        """One program per tile and lane."""
        return self.number, self.lanes

    @property
    def num_warps(self) -> int:
        """Warps of such a program: each thread has 8 pairs."""
        return max(1, min(16, self.pairs // 256))

    @property
    def parameters(self) -> dict[str, Any]:
        """What `load_places` takes, and the places of a lane."""
        padded = triton.next_power_of_2(self.slots)
        return dict(
            num_queries=self.num_queries, range_queries=self.range_queries, ranges=self.ranges,
            num_places=self.num_places, KV_HEADS=self.num_kv_heads, SLOTS=self.slots, PADDED_SLOTS=padded,
            TOKENS=self.pairs // padded,
        )  # fmt: skip


@triton.jit
def first_query(range_queries, ranges, TOKENS: tl.constexpr):
    """The first query of the program's tile."""
    return tl.program_id(1) % ranges * range_queries + tl.program_id(0) * TOKENS


@triton.jit
def load_places(
    places, num_queries, range_queries, ranges, KV_HEADS: tl.constexpr, SLOTS: tl.constexpr,
    PADDED_SLOTS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The place of each pair of the program's tile, by query, then slot; -1 where there is none."""
    i = tl.arange(0, TOKENS * PADDED_SLOTS)
    token = i // PADDED_SLOTS
    slot = i % PADDED_SLOTS
    query = first_query(range_queries, ranges, TOKENS) + token
    inside = (tl.program_id(0) * TOKENS + token < range_queries) & (query < num_queries) & (slot < SLOTS)
    both = tl.program_id(1) // ranges
    at = ((both // KV_HEADS) * num_queries + query) * KV_HEADS + both % KV_HEADS
    return tl.load(places + at * SLOTS + slot, mask=inside, other=-1)
