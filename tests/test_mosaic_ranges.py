"""The steps of tiles whose queries see ranges of keys, which the Mosaic GPU kernels compute: by loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

WHERE = "installed by `tox -e test`; not a dependency of nsa_jax"
pytest.importorskip("jax_triton", reason=f"needs jax-triton, {WHERE}", exc_type=ImportError)

from nsa_jax.kernels.mosaic_gpu.range_visits import RangeVisits  # noqa: E402
from nsa_jax.kernels.mosaic_gpu.sizes import CONSUMERS  # noqa: E402
from nsa_jax.kernels.mosaic_gpu.visits import MEMBER_BITS  # noqa: E402
from nsa_jax.kernels.triton.ranges.edges import Edges  # noqa: E402

EDGES = {
    "window of 1": Edges("window", window=1),
    "window of 45": Edges("window", window=45),
    "window of 128": Edges("window", window=128),
    "compressed": Edges("compressed", size=8, stride=4),
    "compressed, every token": Edges("compressed", size=3, stride=1),
    "causal": Edges("selected_causal"),
}
KEYS = 32


def ranges(edges, num_queries, num_keys):
    """The keys `start .. end - 1` that each query sees, by walking over them."""
    seen = [
        [i for i in range(num_keys) if i * edges.stride + edges.size - 1 <= t] for t in range(num_queries)
    ]
    ends = np.array([len(keys) for keys in seen])
    return np.zeros_like(ends) if edges.window is None else np.maximum(ends - edges.window, 0), ends


@pytest.mark.parametrize("tokens", [8, 32])
@pytest.mark.parametrize("num_queries", [1, 7, 64, 203])
@pytest.mark.parametrize("edges", EDGES.values(), ids=EDGES.keys())
def test_steps_are_all_that_a_tile_sees_and_those_in_part_come_first(edges, num_queries, tokens):
    num_keys = max((num_queries - edges.size) // edges.stride + 1, 1)
    start, end = ranges(edges, num_queries, num_keys)
    visits = RangeVisits(edges, num_queries, num_keys, tokens, KEYS)
    tiles, most = -(-num_queries // tokens), num_keys // KEYS + 2

    @jax.jit
    def everything():
        at = [(0, 0, jnp.int32(tile)) for tile in range(tiles)]
        places = [jnp.int32(place) for place in range(most)]
        return [
            (
                visits.num_fills(one), *visits.num_visits(one, 1), [visits.fill(one, x) for x in places],
                [visits.visit(one, 1, x) for x in places],
            )
            for one in at
        ]  # fmt: skip

    for tile, (fills, visited, masked, entries, members) in enumerate(jax.tree.map(int, everything())):
        mine = slice(tile * tokens, (tile + 1) * tokens)
        steps = [entry >> CONSUMERS for entry in entries[:fills]]
        seen = [x for x in range(0, num_keys, KEYS) if ((start[mine] < x + KEYS) & (end[mine] > x)).any()]
        whole = [x for x in seen if ((start[mine] <= x) & (end[mine] >= x + KEYS)).all()]
        assert fills == visited == max(len(seen), 1)
        assert 1 <= masked <= fills
        assert sorted(steps) == seen or not seen
        assert set(steps[masked:]) <= set(whole)
        assert len(whole) - len(steps[masked:]) <= 1  # one step is masked at least
        assert all(entry % 2**CONSUMERS == 2**CONSUMERS - 1 for entry in entries[:fills])
        every = 2 ** (tokens // CONSUMERS) - 1
        assert [(x & (2**MEMBER_BITS - 1), x >> MEMBER_BITS & every) for x in members] == [
            (place, every) for place in range(most)
        ]
