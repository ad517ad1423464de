"""On a Hopper GPU: the selected branch against the oracle, in parts for few query heads a KV head.

And in tiles where their sizes are other than those that most tests use: blocks of 128, or 192 / 128 dims.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("jax_triton", reason="needs jax-triton", exc_type=ImportError)

from poisoned import poison_memory
from selected_problem import problem

import nsa_jax
from nsa_jax import budget, layout, reference
from nsa_jax.config import NSAConfig
from nsa_jax.kernels.triton import selected
from nsa_jax.kernels.triton.selected import in_parts as parts_module
from nsa_jax.kernels.triton.selected import items
from nsa_jax.kernels.triton.selected.chunks import PART_BYTES

pytestmark = pytest.mark.gpu
triton = functools.partial(nsa_jax.selected_attention, implementation="triton")


@pytest.fixture
def in_parts(monkeypatch):
    """A function that forces all results to come in parts, in chunks of some bytes, or none.

    Or both ways are asked for, and neighbours are said to share few blocks, or many.
    """

    def force(forced: bool | str, part_bytes: int = PART_BYTES):
        few = {"asked, few": True, "asked, many": False}

        def way(sizes, *_, **__):
            asked = jnp.asarray(few[forced]) if forced in few else None
            return selected._Way(sizes if forced else None, asked)

        monkeypatch.setattr(selected, "_choose_way", way)
        monkeypatch.setattr(parts_module, "PART_BYTES", part_bytes)
        monkeypatch.setattr(selected, "cuts_queries", lambda *_: False)
        jax.clear_caches()

    yield force
    monkeypatch.undo()
    jax.clear_caches()


# A query of 16 slots takes 16 KB with 4 heads of 128. With 2^21 bytes a KV head is cut, at 256 queries.
SHAPES = {
    "four_heads": (dict(heads=4), PART_BYTES),
    "four_heads_in_chunks": (dict(heads=4), 2**21),
    "three_heads": (dict(heads=3, kv_heads=3, key_dim=64, value_dim=64), PART_BYTES),
    "two_heads": (dict(heads=2, batch=2, length=333), 2**20),
    "one_head": (dict(heads=1, key_dim=64, value_dim=64), PART_BYTES),
    "wide": (dict(heads=2, kv_heads=2, key_dim=256, value_dim=256), PART_BYTES),
    "wide_in_chunks": (dict(heads=4, key_dim=256, value_dim=192), 2**21),
    "other_dims": (dict(heads=4, key_dim=96, value_dim=80, kv_heads=2), PART_BYTES),
    "last_queries": (dict(heads=4, length=77, keys=1000), PART_BYTES),
    "float16": (dict(heads=4, dtype="float16"), PART_BYTES),
    "seven_slots": (dict(heads=3, slots=7), PART_BYTES),
    "packed": (dict(heads=4, packed=True), 2**21),
    "seven_heads": (dict(heads=7), PART_BYTES),
    "eight_heads_of_64": (dict(heads=8, kv_heads=2, key_dim=64, value_dim=64, packed=True), 2**21),
}


OF_TILES = {
    "three_heads": dict(heads=3, kv_heads=3, key_dim=64, value_dim=64, block=128, packed=True),
    "four_heads": dict(heads=4, block=128, length=1500),
    "one_head": dict(heads=1, block=128),
    "one_wide_head": dict(heads=1, key_dim=192, block=128),
    "two_wide_heads": dict(heads=2, key_dim=256, value_dim=256, block=128),
    "sixteen_heads_of_64": dict(key_dim=64, value_dim=64, block=128),
    "six_heads": dict(heads=6, kv_heads=2),
    "192_128": dict(key_dim=192),
    "192_128_blocks_of_128": dict(key_dim=192, block=128),
}


@pytest.mark.parametrize("name", SHAPES)
def test_values_and_gradients_equal_the_oracle(name, in_parts):
    """Twice, in memory that held NaN, with the same bits; a query that chooses nothing is among them."""
    shape, part_bytes = SHAPES[name]
    in_parts(True, part_bytes)
    kernels = check_values_and_gradients(shape)
    assert "nsa_selected_output_parts" in kernels
    assert "nsa_selected_gradient_parts" in kernels
    assert "nsa_selected_forward" not in kernels


@pytest.mark.parametrize("name", OF_TILES)
def test_tiles_equal_the_oracle(name, in_parts):
    """Tiles alone; twice, in memory that held NaN, with the same bits."""
    in_parts(False)
    kernels = check_values_and_gradients(OF_TILES[name])
    assert "nsa_selected_forward" in kernels
    assert "nsa_selected_key_gradients" in kernels


def check_values_and_gradients(shape):
    """Runs the shape, and returns the text of what ran."""
    arrays, _, gradients = problem(**shape)
    oracle = jax.jit(functools.partial(gradients, reference.selected_attention))
    ours = jax.jit(functools.partial(gradients, triton))
    found, same = ours(*arrays), oracle(*arrays)
    exact = oracle(*(x.astype(jnp.float32) for x in arrays))

    for result, x, theirs, right in zip(("out", "lse", "dq", "dk", "dv"), found, same, exact, strict=True):
        theirs = right if result == "lse" else theirs  # the kernels compute it in float32
        allowed = budget.allowance(theirs, right, float(jnp.finfo(x.dtype).eps))
        assert budget.distance(x, right) <= allowed, result
    poison_memory()
    again = ours(*arrays)
    assert all((x == y).all() for x, y in zip(found, again, strict=True))
    return str(jax.make_jaxpr(ours)(*arrays))


@pytest.mark.parametrize("name", SHAPES)
def test_both_ways_started_give_the_results_of_one(name, in_parts):
    """The same bits, but for keys of tiles, whose items are cut as those of parts; and the oracle's slots."""
    shape, part_bytes = SHAPES[name]
    arrays, blocks, gradients = problem(**shape)
    call = gradients.call | dict(implementation="triton")

    def results(*arrays):
        slots = nsa_jax.selected_probabilities(*arrays[:2], blocks, **call)
        return *gradients(triton, *arrays), slots

    def exact(*arrays):
        return reference.selected_probabilities(*arrays[:2], blocks, **gradients.call)

    expected = jax.jit(exact)(*(x.astype(jnp.float32) for x in arrays))
    for one, both in ((True, "asked, few"), (False, "asked, many")):
        in_parts(one, part_bytes)
        alone = jax.jit(results)(*arrays)
        in_parts(both, part_bytes)
        poison_memory()
        together = jax.jit(results)(*arrays)
        for name, x, y in zip(("out", "lse", "dq", "dk", "dv", "slots"), alone, together, strict=True):
            of_keys = not one and name in ("dk", "dv")
            assert budget.distance(x, y) <= (2**-7 * budget.size(x) if of_keys else 0), (both, name)
        assert budget.distance(alone[-1], expected) <= 2**-8 * shape["heads"]


@pytest.mark.parametrize("range_queries", [None, 3000], ids=["one_range", "ranges"])
@pytest.mark.parametrize(
    "shape",
    [(1, 8192, 3, 16), (2, 5000, 2, 7), (3, 77, 2, 16), (1, 65536, 1, 16), (1, 131072, 1, 4)],
    ids=["8k", "odd", "short", "64k", "128k"],
)
def test_lists_are_those_of_xlas_sort(shape, range_queries, monkeypatch):
    """Twice, in memory that held NaN; some queries choose nothing."""
    length = shape[1]
    random = np.random.default_rng(length)
    blocks = (random.random(shape) * (np.arange(length)[None, :, None, None] // 64 + 1)).astype(np.int32)
    blocks[random.random(shape) < 0.2] = -1
    blocks[:, ::5] = -1
    placed = layout.place(NSAConfig(), batch=shape[0], num_queries=length, num_keys=length)

    def lists(blocks):
        blocks = layout.distinct_blocks(blocks, length, NSAConfig())
        return items.invert(blocks, placed, length, item=512, range_queries=range_queries)

    found = []
    for _ in range(2):
        poison_memory()
        found.append(jax.tree.map(np.asarray, jax.jit(lambda blocks: lists(blocks))(blocks)))
    monkeypatch.setattr(items, "fitting_tile", lambda _: None)
    expected = jax.tree.map(np.asarray, jax.jit(lambda blocks: lists(blocks))(blocks))

    pairs = expected.items[:, 5].max(where=expected.items[:, 0] >= 0, initial=0)
    assert pairs > 0
    for ours in found:
        assert np.array_equal(ours.tokens[:pairs], expected.tokens[:pairs])
        both = (jax.tree.leaves(x._replace(tokens=0)) for x in (ours, expected))
        assert all(np.array_equal(x, y) for x, y in zip(*both, strict=True))


@pytest.mark.parametrize(
    "shape", [dict(heads=4, kv_heads=2), dict(heads=3, kv_heads=3, key_dim=64, value_dim=64)]
)
def test_long_rows_equal_those_of_tiles(shape, in_parts):
    arrays, _, gradients = problem(length=32768, **shape)
    results = []
    for forced in (True, False):
        in_parts(forced)
        results.append(jax.jit(functools.partial(gradients, triton))(*arrays))
    for ours, theirs in zip(*results, strict=True):
        allowed = 2 * 8 * float(jnp.finfo(ours.dtype).eps) * budget.size(theirs)
        assert budget.distance(ours, theirs) <= allowed


def test_what_is_not_a_number_stays_with_those_who_see_it(in_parts):
    """Results are finite exactly where those of tiles are: NaN in a query and a key, infinity in a value."""
    (query, key, value), _, gradients = problem(heads=4, length=1500, batch=2)
    arrays = (
        query.at[0, 700, 3, 5].set(jnp.nan),
        key.at[0, 1333, 1, 2].set(jnp.nan),
        value.at[1, 999, 0, 7].set(jnp.inf),
    )
    results = []
    for forced in (True, False):
        in_parts(forced)
        results.append(jax.jit(functools.partial(gradients, triton))(*arrays))
    for ours, theirs in zip(*results, strict=True):
        ours, theirs = (np.isfinite(np.asarray(x, np.float32)) for x in (ours, theirs))
        assert np.array_equal(ours, theirs)
        assert not theirs.all()
