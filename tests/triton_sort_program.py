"""The counting sort in Triton's interpreter against a stable sort: `python tests/triton_sort_program.py`.

Every output is poisoned first.
"""

from triton_interpreter import interpreted  # isort: skip

import time
from typing import NamedTuple

import jax
import numpy as np

from nsa_jax.kernels.triton.selected.counting_sort import TILE_PAIRS, counting_sort, fitting_tile


class Case(NamedTuple):
    shape: tuple[int, int, int, int]  # of the pairs, B T K R
    num_places: int
    range_queries: int
    tile_pairs: int
    empty: float = 0.2  # share of pairs that do not exist
    alike: bool = False  # whether all pairs have one place


CASES = {
    "one tile": Case((1, 50, 2, 4), 16, 50, 256),
    "many tiles": Case((2, 130, 2, 4), 33, 130, 32),
    "more tiles than are added up at a time": Case((1, 300, 1, 2), 5, 300, 4),
    "odd slots": Case((2, 37, 3, 5), 9, 37, 32),
    "one slot": Case((3, 33, 1, 1), 40, 33, 16),
    "ranges": Case((2, 37, 3, 5), 9, 10, 32),
    "ranges of less than a tile": Case((2, 37, 2, 4), 9, 3, 64),
    "more places than are added up at a time": Case((3, 5, 2, 7), 1000, 5, 4),
    "more slots than a tile has pairs": Case((1, 9, 2, 40), 70, 9, 16),
    "as in rows of 8k": Case((1, 700, 1, 16), 256, 700, 1024),
    "no pair": Case((2, 20, 2, 4), 6, 20, 16, empty=1),
    "every pair": Case((2, 20, 2, 4), 6, 20, 16, empty=0),
    "one place": Case((1, 90, 2, 4), 6, 40, 64, alike=True),
    "one query": Case((2, 1, 2, 16), 30, 1, 64),
    "a single pair": Case((1, 1, 1, 1), 1, 1, 16, empty=0),
}


def pairs_of(case: Case) -> np.ndarray:
    """Random places; some queries have none."""
    random = np.random.default_rng(len(str(case)))
    places = random.integers(0, case.num_places, case.shape)
    if case.alike:
        places[:] = case.num_places - 1
    exists = random.random(case.shape) >= case.empty
    if case.empty > 0:
        exists[:, ::3] = False
    return np.where(exists, places, -1).astype(np.int32)


def check(case: Case) -> None:
    """What a stable sort by lane and place gives, as queries and as codes."""
    places = pairs_of(case)
    batch, num_queries, heads, slots = case.shape
    ranges = -(-num_queries // case.range_queries)
    b, t, k, r = np.indices(case.shape)
    lane, lanes = (b * heads + k) * ranges + t // case.range_queries, batch * heads * ranges
    place = np.where(places >= 0, lane * case.num_places + places, lanes * case.num_places).reshape(-1)
    order = np.argsort(place, stable=True)
    bounds = np.searchsorted(place[order], np.arange(lanes * case.num_places + 1))
    assert bounds[-1] == (places >= 0).sum()
    sizes = dict(range_queries=case.range_queries, tile_pairs=case.tile_pairs)

    @jax.jit
    def sort(places):
        return [counting_sort(places, case.num_places, coded=coded, **sizes) for coded in (True, False)]

    with interpreted():
        both = sort(places)
    for (found, found_bounds), queries in zip(both, (t * slots + r, t), strict=True):
        assert found.shape == (places.size,)
        assert np.array_equal(found_bounds, bounds)
        assert np.array_equal(found[: bounds[-1]], queries.reshape(-1)[order][: bounds[-1]])


def check_tiles() -> None:
    """A tile has at least as many pairs as there are places, and as few as that allows."""
    assert fitting_tile(1) == fitting_tile(TILE_PAIRS[0]) == TILE_PAIRS[0]
    assert fitting_tile(TILE_PAIRS[0] + 1) == TILE_PAIRS[1]
    assert fitting_tile(TILE_PAIRS[-1]) == TILE_PAIRS[-1]
    assert fitting_tile(TILE_PAIRS[-1] + 1) is None


def main() -> None:
    for name, case in CASES.items():
        began = time.time()
        check(case)
        print(f"case {name}: ok in {time.time() - began:.1f} s", flush=True)
    check_tiles()
    print("tiles: ok", flush=True)


if __name__ == "__main__":
    main()
