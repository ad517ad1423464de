"""Puts the pairs of each tile where they belong, the last step of `counting_sort`.

grid = (tiles, lanes): one program per tile. In registers it sorts `place pairs + number` of its pairs, so
that those of a place are a run, by query and slot; a scan finds where each run begins. A pair goes to where
its place begins, behind those of the tiles before and those before it in the run. 8 numbers a thread. Floor:
to read the places and to write the pairs, 8 bytes a pair.

Why sort: the runs of a tile are then stored side by side, and the order is that of the queries without any
program waiting for another.
"""

import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Int32
from nsa_jax.kernels.triton.launch import launch, like, named
from nsa_jax.kernels.triton.selected.pair_tiles import PairTiles, first_query, load_places

NO_PAIR: tl.constexpr = tl.constexpr(2147483647)  # sorts behind all pairs


def sorted_pairs(
    places: Int32[Array, "B T K R"],
    before: Int32[Array, "lanes tiles places"],
    bounds: Int32[Array, " bounds"],
    tiles: PairTiles,
    *,
    coded: bool,
) -> Int32[Array, " pairs"]:
    """The query of each pair, or `token R + slot` if `coded`, by lane, place, query and slot.

    What is behind the last pair is arbitrary. `before` and `bounds` are those of `place_bounds`.
    """
    assert tiles.pairs * tiles.num_places <= NO_PAIR.value, "places and pairs of a tile share 31 bits"
    return launch(
        sorted_pairs_kernel, places, before, bounds, out=like(places, (places.size,)),
        grid=tiles.grid, num_warps=tiles.num_warps, CODED=coded, **tiles.parameters,
    )  # fmt: skip


@triton.jit
def _first_of_run(place_a, first_a, place_b, first_b):
    return place_b, tl.where(place_a == place_b, first_a, first_b)


@triton.jit(repr=named("nsa_sorted_pairs"))
def sorted_pairs_kernel(
    places, before, bounds, pairs, num_queries, range_queries, ranges, num_places,
    KV_HEADS: tl.constexpr, SLOTS: tl.constexpr, PADDED_SLOTS: tl.constexpr, TOKENS: tl.constexpr,
    CODED: tl.constexpr,
):  # fmt: skip
    """The pairs of one tile."""
    SIZE: tl.constexpr = TOKENS * PADDED_SLOTS
    place = load_places(places, num_queries, range_queries, ranges, KV_HEADS, SLOTS, PADDED_SLOTS, TOKENS)
    i = tl.arange(0, SIZE)
    found = tl.sort(tl.where(place >= 0, place * SIZE + i, NO_PAIR))
    exists = found != NO_PAIR
    place, first = tl.associative_scan((found // SIZE, i), 0, _first_of_run)
    lane = tl.program_id(1)
    row = lane.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    to = tl.load(bounds + lane * num_places + place, mask=exists, other=0) + i - first
    to += tl.load(before + row * num_places + place, mask=exists, other=0)
    number = found % SIZE
    query = first_query(range_queries, ranges, TOKENS) + number // PADDED_SLOTS
    pair = query * SLOTS + number % PADDED_SLOTS if CODED else query
    tl.store(pairs + to, pair, mask=exists)
