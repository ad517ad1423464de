"""Sorts the pairs of a query and a block by small integers, their places, by counting.

XLA's sort on a GPU is a call of a library: five memory sets and six kernels, in no CUDA graph, that read and
write 68 bytes a pair. Places are few, so here four kernels do it. The pairs of a lane, which is a KV head and
a range of its queries, are cut into tiles of consecutive queries:

1. `place_counts` counts how often each place occurs in each tile;
2. `place_bounds` takes prefix sums of the counts, over the tiles before and over all places before: where
   the pairs of a place begin;
3. `sorted_pairs` sorts the pairs of each tile in registers and stores them behind those of the tiles before.

The order is that of a stable sort: by lane, place, query and slot. Bytes: 12 a pair read and written, and 16
for each place of each tile. A tile has at least as many pairs as a lane has places, so where tiles
are full there are at most as many counts as pairs.
"""

from nsa_jax.array_typing import Array, Int32
from nsa_jax.kernels.triton.selected.pair_tiles import PairTiles
from nsa_jax.kernels.triton.selected.place_bounds import place_bounds
from nsa_jax.kernels.triton.selected.place_counts import place_counts
from nsa_jax.kernels.triton.selected.sorted_pairs import sorted_pairs

TILE_PAIRS = (1024, 2048, 4096)


def fitting_tile(num_places: int) -> int | None:
    """Pairs of a tile for so many places of a lane; None where they are too many."""
    return next((pairs for pairs in TILE_PAIRS if pairs >= num_places), None)


def counting_sort(
    places: Int32[Array, "B T K R"], num_places: int, *, range_queries: int, coded: bool, tile_pairs: int
) -> tuple[Int32[Array, " pairs"], Int32[Array, " bounds"]]:
    """The pairs in order, and where those of each place begin.

    The first result is the query of each pair, or `token R + slot` if `coded`; what is behind the last pair
    is arbitrary. The second has an entry for each lane and place, and at last the number of pairs.

    Args:
      places: of each pair, below `num_places`; -1 where there is none.
      num_places: places of a lane.
      range_queries: queries of a range.
      coded: what is returned of a pair.
      tile_pairs: pairs of a tile, a power of two; see `fitting_tile`.
    """
    tiles = PairTiles.of(places.shape, num_places, range_queries, tile_pairs)
    before, bounds = place_bounds(place_counts(places, tiles))
    return sorted_pairs(places, before, bounds, tiles, coded=coded), bounds
