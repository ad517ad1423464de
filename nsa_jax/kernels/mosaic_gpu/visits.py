"""Cuts a tile's union list up for warpgroups that share a pipeline of key tiles in shared memory.

grid = (tiles, B K): one program per tile of queries and KV head. A producer fills the pipeline with the
blocks of the whole tile, in the order of its list. Each consumer, a warpgroup that holds the queries of a
part of the tile, skips the blocks that none of its queries chose. So it has a list of its own: places in the
producer's list, and which of its queries chose the block there. A consumer that skips too far loses track of
the pipeline, so its list visits a place at least every `longest_gap`, without members if need be; and it
begins at place 0.

Blocks that need the causal mask come first, in both lists. `12 tokens R` bytes a tile at two warpgroups.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Int32
from nsa_jax.kernels.triton.launch import launch, like, named
from nsa_jax.kernels.triton.selected.unions import UnionLists

MEMBER_BITS = 16  # of an entry of a consumer: its members above, the place in the pipeline below


type TilePlace = tuple[Any, Any, Any]  # row of the batch, KV head, tile of that head


class VisitLists(NamedTuple):
    """What producer and consumers of each tile loop over; entries from a count on are arbitrary.

    In a kernel it holds references, and its methods read them.

    Attributes:
      fills: row index of the first key of each block times 2 to the power of the warpgroups; bit `w` says
        whether warpgroup `w` has the block in its list.
      visits: for each warpgroup: the place of a block among `fills`, and above it, from bit `MEMBER_BITS` on,
        bit `i` for the warpgroup's `i`-th query: whether that query chose the block.
      counts: number of fills, at least 1; then for each warpgroup the number of its visits, at least 1, and
        how many of them, at least 1 and the first ones, may need the causal mask.
    """

    fills: Int32[Array, "B K tiles size"]
    visits: Int32[Array, "B K tiles warpgroups size"]
    counts: Int32[Array, "B K tiles fields"]

    def num_fills(self, at: TilePlace) -> Any:
        """Number of fills of a tile."""
        return self.counts[*at, 0]

    def fill(self, at: TilePlace, place: Any) -> Any:
        """An entry of `fills`."""
        return self.fills[*at, place]

    def num_visits(self, at: TilePlace, warpgroup: Any) -> tuple[Any, Any]:
        """Number of visits of a warpgroup, and how many of them may need a mask."""
        return self.counts[*at, 1 + 2 * warpgroup], self.counts[*at, 2 + 2 * warpgroup]

    def visit(self, at: TilePlace, warpgroup: Any, number: Any) -> Any:
        """An entry of `visits`."""
        return self.visits[*at, warpgroup, number]


def visit_lists(lists: UnionLists, *, tokens: int, warpgroups: int, longest_gap: int) -> VisitLists:
    """Cuts the lists of tiles of `tokens` queries up for warpgroups of `tokens // warpgroups` queries.

    Args:
      lists: the union lists of tiles of `tokens` queries.
      tokens: queries of a tile, at most `MEMBER_BITS` for each warpgroup.
      warpgroups: consumers of a tile.
      longest_gap: most places from one visit of a warpgroup to its next one.
    """
    batch, num_kv_heads, tiles, size = lists.starts.shape
    assert tokens <= MEMBER_BITS * warpgroups
    if size >= 1 << MEMBER_BITS:
        raise NotImplementedError(
            f"the Mosaic GPU kernels need lists of fewer than {1 << MEMBER_BITS} blocks a tile, got {size}. "
            "Use implementation='triton'."
        )
    padded = triton.next_power_of_2(size)
    return VisitLists(*launch(
        visit_lists_kernel, lists.starts, lists.members, lists.counts, lists.unmasked,
        out=(like(lists.starts), like(lists.starts, (batch, num_kv_heads, tiles, warpgroups, size)),
             like(lists.starts, (batch, num_kv_heads, tiles, 1 + 2 * warpgroups))),
        grid=(tiles, batch * num_kv_heads), num_warps=max(1, min(8, padded // 64)),
        SIZE=size, PADDED_SIZE=padded, QUERIES=tokens // warpgroups, WARPGROUPS=warpgroups, GAP=longest_gap,
        MEMBER_BITS=MEMBER_BITS,
    ))  # fmt: skip


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit(repr=named("nsa_visit_lists"))
def visit_lists_kernel(
    starts, members, counts, unmasked, fills, visits, new_counts,
    SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, QUERIES: tl.constexpr, WARPGROUPS: tl.constexpr,
    GAP: tl.constexpr, MEMBER_BITS: tl.constexpr,
):  # fmt: skip
    """The lists of one tile of queries and KV head."""
    this = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    found = tl.load(counts + this)
    free = tl.load(unmasked + this)
    masked = found - free
    count = tl.maximum(found, 1)
    place = tl.arange(0, PADDED_SIZE)
    entry = tl.where(place < masked, place + free, place - masked)
    start = tl.load(starts + this * SIZE + entry, mask=place < found, other=0)
    member = tl.load(members + this * SIZE + entry, mask=place < found, other=0)
    fill = start << WARPGROUPS
    to = new_counts + this * (1 + 2 * WARPGROUPS)
    tl.store(to, count)
    for w in tl.static_range(WARPGROUPS):
        mine = (member >> (w * QUERIES)) & ((1 << QUERIES) - 1)
        last = tl.associative_scan(tl.where((mine != 0) & (place < found), place, 0), 0, _larger)
        visited = ((place - last) % GAP == 0) & (place < count)
        fill |= visited.to(tl.int32) << w
        visit = visited.to(tl.int32)
        number = tl.cumsum(visit, 0) - 1
        tl.store(
            visits + (this * WARPGROUPS + w) * SIZE + number, place | (mine << MEMBER_BITS), mask=visited
        )
        tl.store(to + 1 + 2 * w, tl.sum(visit, 0))
        first = tl.sum(tl.where(place < tl.maximum(masked, 1), visit, 0), 0)
        tl.store(to + 2 + 2 * w, first)
    tl.store(fills + this * SIZE + place, fill, mask=place < count)
