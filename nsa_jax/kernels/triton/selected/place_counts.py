"""How often each place occurs in each tile of pairs, for `counting_sort`.

grid = (tiles, lanes): one program per tile, which has a row of counts for itself. It sets them to 0, then
adds 1 for each pair, atomically: sums of integers do not depend on the order. `4 lanes tiles places` bytes of
counts (0.4 MB at 8k tokens, K = 3, R = 16; 17 MB at 32k, K = 8). Floor: to read the places and to write the
counts.

Why tiles: within a tile `sorted_pairs` finds the order in registers, and from tile to tile the counts say
where to go on.
"""

import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Int32
from nsa_jax.kernels.triton.launch import launch, like, named
from nsa_jax.kernels.triton.selected.pair_tiles import PairTiles, load_places


def place_counts(places: Int32[Array, "B T K R"], tiles: PairTiles) -> Int32[Array, "lanes tiles places"]:
    """The counts of places in `0 .. num_places - 1`; a pair of place -1 does not count."""
    return launch(
        place_counts_kernel, places, out=like(places, (tiles.lanes, tiles.number, tiles.num_places)),
        grid=tiles.grid, num_warps=tiles.num_warps, **tiles.parameters,
    )  # fmt: skip


@triton.jit(repr=named("nsa_place_counts"))
def place_counts_kernel(
    places, counts, num_queries, range_queries, ranges, num_places, KV_HEADS: tl.constexpr,
    SLOTS: tl.constexpr, PADDED_SLOTS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The counts of one tile."""
    SIZE: tl.constexpr = TOKENS * PADDED_SLOTS
    row = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    counts += row * num_places
    i = tl.arange(0, SIZE)
    for first in range(0, num_places, SIZE):
        tl.store(counts + first + i, tl.zeros([SIZE], tl.int32), mask=first + i < num_places)
    place = load_places(places, num_queries, range_queries, ranges, KV_HEADS, SLOTS, PADDED_SLOTS, TOKENS)
    tl.debug_barrier()  # other threads have stored the zeros
    tl.atomic_add(counts + place, tl.full([SIZE], 1, tl.int32), mask=place >= 0, sem="relaxed")
