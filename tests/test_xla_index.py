"""Scores of an indexer, their gradients, and what they select: `xla` and the reference against loops."""

import dataclasses
import functools
import math

import index_cases
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ADJOINING, BY_NAME, OVERLAPPING, PACKED_ROWS, Case
from index_cases import Indexed
from jax.experimental import checkify
from messages import refused
from programs import OPTIONS
from test_xla_memory import arrays

from nsa_jax import attention, debug, layout, reference
from nsa_jax.config import NSAConfig
from nsa_jax.kernels import xla
from nsa_jax.kernels.xla.sizes import Sizes

TWELVE = dataclasses.replace(OVERLAPPING, selection_block_size=12)
SMALL = Sizes(query_chunk=7, key_tile=9, partial_floats=1, widest_tile=1)
OWN_KEYS = Case(name="keys of each head", config=TWELVE, num_keys=40, num_kv_heads=3, num_heads=3)
CASES = (  # case, index heads, index dim, whether weighted, whether all KV heads share a key
    (BY_NAME["packed_rows_queried_anywhere"], 2, 5, True, True),
    (PACKED_ROWS, 2, 3, False, True),
    (BY_NAME["one_token"], 3, 4, True, False),
    (Case(name="blocks of twelve", config=TWELVE, num_keys=37, num_kv_heads=1, scale=-0.3), 3, 7, True, True),
    (dataclasses.replace(OWN_KEYS, name="blocks of four", config=ADJOINING, num_keys=50), 1, 1, False, True),
    (OWN_KEYS, 2, 3, True, False),
)


def where(case: Case) -> dict:
    return dict(query_positions=case.query_positions, segment_ids=case.segment_ids)


def settings(case: Case) -> dict:
    return dict(config=case.config, scale=case.scale, **where(case))


@functools.cache
def program(module, case: Case, sizes: Sizes | None = None):
    """Scores, their gradients under a cotangent, and selections, compiled together."""

    def score(query, key, weights):
        if sizes is None:
            return module.block_scores(query, key, weights=weights, **settings(case))
        return xla.block_scores(query, key, weights, None, *placed(case, query), sizes=sizes)

    def run(query, key, weights, cotangent):
        scores, pull_back = jax.vjp(score, query, key, weights)
        if sizes is None:
            blocks = module.select_by_index(query, key, weights=weights, **settings(case))
            best = module.top_blocks(scores, config=case.config, **where(case))
        else:
            blocks = xla.select_by_index(query, key, weights, *placed(case, query), sizes=sizes)
            best = xla.top_blocks(scores, placed(case, query)[0], sizes=sizes)
        return scores, blocks, best, pull_back(cotangent.astype(scores.dtype))

    return jax.jit(run, compiler_options=OPTIONS["reference"])


def placed(case: Case, query) -> tuple[layout.Placement, float]:
    known = dict(batch=case.batch, num_queries=query.shape[1], num_keys=case.num_keys)
    scale = query.shape[-1] ** -0.5 if case.scale is None else case.scale
    return layout.place(case.config, **known, **where(case)), scale


@functools.cache
def problem(number: int) -> tuple[Indexed, np.ndarray, index_cases.Loops]:
    """Operands of `CASES[number]`, a cotangent, and what loops make of them; do not write into them."""
    case, heads, dim, weighted, shared = CASES[number]
    given = index_cases.draw(case, heads=heads, dim=dim, weighted=weighted, shared=shared)
    cotangent = cotangent_of(case, given)
    return given, cotangent, index_cases.by_loops(case, given, cotangent)


def cotangent_of(case: Case, given: Indexed) -> np.ndarray:
    num_blocks = layout.num_selection_blocks(case.num_keys, case.config)
    return case.generator("cotangent").standard_normal((*given.query.shape[:3], num_blocks))


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.name for case, *_ in CASES])
@pytest.mark.parametrize("name", ["reference", "xla", "xla in tiles"])
def test_scores_gradients_and_selection_equal_the_loops(name, number):
    case, (given, cotangent, expected) = CASES[number][0], problem(number)
    module, sizes = {"reference": (reference, None), "xla": (attention, None)}.get(name, (None, SMALL))
    if name == "reference":  # its gradients are not masked where a block is not seen
        cotangent = np.where(np.isfinite(expected.scores), cotangent, 0)
    with jax.enable_x64(True):
        scores, blocks, best, gradients = program(module, case, sizes)(*given, cotangent)

    assert scores.dtype == jnp.float64
    np.testing.assert_allclose(scores, expected.scores, rtol=0, atol=1e-12)
    assert blocks.tolist() == best.tolist() == expected.blocks.tolist()
    for found, right in zip(gradients, expected.gradients, strict=True):
        assert (found is None) == (right is None)
        if found is not None:
            np.testing.assert_allclose(found, right, rtol=0, atol=1e-12)


@functools.cache
def slots_problem(number: int) -> tuple:
    """Slots for `problem`, with their scores, a cotangent and gradients; do not write into them."""
    case, given = CASES[number][0], problem(number)[0]
    slots = index_cases.slots_of(case, given)
    return slots, *index_cases.slots_by_loops(case, given, slots.blocks)


@pytest.mark.parametrize("number", [1, 5])
@pytest.mark.parametrize("module", [reference, None], ids=["reference", "xla in tiles"])
def test_scores_of_chosen_blocks_are_those_of_all(module, number):
    """Among them blocks out of sight, beyond the row, and twice, whose second slot counts as unused."""
    case, given = CASES[number][0], problem(number)[0]
    slots, scores, cotangent, expected = slots_problem(number)
    assert slots.repeated.any()
    assert np.isneginf(scores[slots.repeated]).all()

    def score(query, key, weights):
        if module is not None:
            known = dict(weights=weights, block_indices=jnp.asarray(slots.blocks))
            return module.block_scores(query, key, **known, **settings(case))
        blocks = layout.distinct_blocks(jnp.asarray(slots.blocks), case.num_keys, case.config)
        return xla.block_scores(query, key, weights, blocks, *placed(case, query), sizes=SMALL)

    @functools.partial(jax.jit, compiler_options=OPTIONS["reference"])
    def run(*arrays):
        found, pull_back = jax.vjp(score, *arrays)
        return found, pull_back(jnp.asarray(cotangent))

    with jax.enable_x64(True):
        found, gradients = run(*given)
        np.testing.assert_allclose(found, scores, rtol=0, atol=1e-12)
        for ours, right in zip(gradients, expected, strict=True):
            if right is not None:
                np.testing.assert_allclose(ours, right, rtol=0, atol=1e-12)


def test_many_chunks_add_up_gradients_of_keys_in_float32():
    """Each of 512 queries gives its gradient to the first block; in bfloat16 the sum would stop growing."""
    config = NSAConfig(num_selected_blocks=4)
    ones = jnp.ones((1, 512, 1, 1, 4), jnp.bfloat16)
    blocks = jnp.zeros((1, 512, 1, 4), jnp.int32)
    placement = layout.place(config, batch=1, num_queries=512, num_keys=512)

    def total(key):
        sizes = SMALL._replace(query_chunk=1)
        scores = xla.block_scores(ones, key, None, blocks.at[..., 1:].set(-1), placement, 1.0, sizes=sizes)
        return scores[..., 0].sum()

    assert (np.asarray(jax.jit(jax.grad(total))(ones[:, :, 0]))[0, 0] == 512).all()


def test_gradients_of_equal_tokens_go_to_the_first_token_and_head():
    case = BY_NAME["plain"]
    given = index_cases.draw(case, heads=2, dim=8)
    given = given._replace(query=np.ones_like(given.query), key=np.ones_like(given.key))
    cotangent = cotangent_of(case, given)
    expected = index_cases.by_loops(case, given, cotangent).gradients
    with jax.enable_x64(True):
        found = [np.asarray(x) for x in program(attention, case)(*given, cotangent)[3][:2]]

    assert not found[0][..., 1, :].any()  # of the second head
    of_block = found[1][:, :60].reshape(case.batch, 10, 6, 8)
    assert of_block[:, :, 0].any(axis=(1, 2)).all()
    assert not of_block[:, :, 1:].any()
    for ours, right in zip(found, expected[:2], strict=True):
        np.testing.assert_allclose(ours, right, rtol=0, atol=1e-12)


def test_gradients_are_those_of_small_differences():
    case, heads, dim, weighted, _ = CASES[0]
    given = index_cases.draw(case, heads=heads, dim=dim, weighted=weighted)
    cotangent, rng = cotangent_of(case, given), np.random.default_rng(0)
    ways = [rng.standard_normal(x.shape) for x in given]
    with jax.enable_x64(True):
        run = program(attention, case)
        scores, *_, gradients = run(*given, cotangent)
        ends = [
            run(*(x + sign * 1e-6 * way for x, way in zip(given, ways, strict=True)), cotangent)[0]
            for sign in (1, -1)
        ]
    change = np.where(np.isfinite(scores), ends[0], 0) - np.where(np.isfinite(scores), ends[1], 0)
    expected = (change * cotangent).sum() / 2e-6
    found = sum((np.asarray(x) * way).sum() for x, way in zip(gradients, ways, strict=True))

    assert abs(found - expected) < 1e-6 * abs(expected)  # the square of the step, and eps over the step


def spoilt(case: Case, given: Indexed) -> tuple[Indexed, np.ndarray]:
    """NaN in one query, infinity in another, NaN in the keys of a future that some queries see."""
    query, key = given.query.copy(), given.key.copy()
    query[0, 30, 1, 0, 2] = math.nan
    query[0, 31, 0] = math.inf
    key[1, 50] = math.nan
    key[1, 55, 0] = -math.inf
    same = np.ones(query.shape[:3], bool)
    same[0, 30, 1] = same[0, 31, 0] = False
    same[1] = case.query_positions[1][:, None] < 50
    return given._replace(query=query, key=key), same


@pytest.mark.parametrize("weighted", [False, True])
def test_what_is_not_finite_reaches_those_who_see_it(weighted):
    case = BY_NAME["plain"]
    given = index_cases.draw(case, heads=2, dim=8, weighted=weighted)
    cotangent = cotangent_of(case, given)
    bad, same = spoilt(case, given)
    with np.errstate(invalid="ignore"):
        expected = index_cases.by_loops(case, bad, cotangent)
    with jax.enable_x64(True):
        plain, (scores, blocks, best, gradients) = (
            jax.tree.map(np.asarray, program(attention, case)(*arrays, cotangent)) for arrays in (given, bad)
        )

    assert np.array_equal(scores[same], plain[0][same])
    assert np.array_equal(blocks[same], plain[1][same])
    assert not np.isnan(scores).any()
    np.testing.assert_allclose(scores, expected.scores, rtol=0, atol=1e-12)
    assert blocks.tolist() == best.tolist() == expected.blocks.tolist()
    assert np.array_equal(gradients[0][same], plain[3][0][same])
    for found in gradients:
        assert found is None or np.isfinite(found).all()
    assert not gradients[0][0, 31, 0].any() or weighted


@pytest.mark.parametrize("number", [3, 4], ids=["weighted", "unweighted"])
def test_the_future_changes_nothing(number):
    """Bitwise, in scores and selections of the queries before it."""
    case, (given, cotangent, _) = CASES[number][0], problem(number)
    key = given.key.copy()
    key[:, 20:] = case.generator("future").standard_normal(key[:, 20:].shape) * 100
    with jax.enable_x64(True):
        before, after = (
            program(attention, case)(given.query, x, given.weights, cotangent) for x in (given.key, key)
        )

    for found, expected in zip(before[:3], after[:3], strict=True):
        assert np.array_equal(found[:, :20], expected[:, :20])
    assert not np.array_equal(before[0][:, 20:], after[0][:, 20:])


@pytest.mark.parametrize("key", ["zero", "small_integers", "any_floats"])
def test_ties_go_to_the_lower_block(key):
    case = BY_NAME["plain"]
    given = index_cases.draw(case, heads=2, dim=8, weighted=True)
    rng = np.random.default_rng(0)
    value = {"zero": 0, "small_integers": rng.integers(-3, 4, 8), "any_floats": rng.standard_normal(8)}[key]
    given = given._replace(key=np.broadcast_to(np.float64(value), given.key.shape))
    cotangent = cotangent_of(case, given)
    for module in (attention, reference):
        with jax.enable_x64(True):
            blocks = np.asarray(program(module, case)(*given, cotangent)[1])
        assert (blocks[:, 40:, :, 1] == 1).all()  # 0 and the two local ones are forced


def test_scores_of_their_own_are_ranked_exactly():
    """Zeros of both signs tie, NaN is the lowest, infinity a finite number; in every dtype."""
    case = Case(name="own scores", batch=1, num_keys=71, num_queries=20)
    rng = case.generator()
    drawn = rng.choice([-math.inf, -2, -0.0, 0.0, 3, math.inf, math.nan], (1, 20, 2, 12))
    given = dict(config=case.config, **where(case))
    best = jax.jit(lambda x: [module.top_blocks(x, **given) for module in (attention, reference)])
    for dtype in ("bfloat16", "float16", "float32", "float64"):
        with jax.enable_x64(dtype == "float64"):
            scores = jnp.asarray(drawn, dtype)
            wide = np.asarray(scores).astype(jnp.promote_types(dtype, jnp.float32))
            expected = index_cases.best_of(case, wide).tolist()
            for module, found in zip((attention, reference), best(scores), strict=True):
                assert found.tolist() == expected, (dtype, module.__name__)


def test_positions_of_scores():
    """By default the queries are all tokens of their row; else their positions say where they stand."""
    case = Case(name="scores of a row", batch=1, num_keys=29)
    scores = case.generator().standard_normal((1, 29, 2, 5)).astype(np.float32)
    best = jax.jit(functools.partial(attention.top_blocks, config=case.config))
    every = np.asarray(best(scores))
    last = best(scores[:, -3:], query_positions=layout.Runs((layout.Run(3, 26),)))

    assert every.tolist() == index_cases.best_of(case, scores).tolist()
    assert last.tolist() == every[:, -3:].tolist()
    with refused(ValueError, "^scores must have one number for each selection block of a row of 29 tokens"):
        attention.top_blocks(scores[..., :4], config=case.config)


def test_runs_equal_their_positions():
    case = Case(name="index runs", num_keys=61, positions=(*range(8, 19), *range(40, 55)))
    given = index_cases.draw(case, heads=2, dim=4)
    runs = layout.Runs((layout.Run(11, 8), layout.Run(15, 40)))

    @jax.jit
    def run(positions):
        where = dict(config=case.config, query_positions=positions)
        operations = attention.block_scores, attention.select_by_index
        return [operation(given.query, given.key, **where) for operation in operations]

    for found, expected in zip(run(runs), run(case.query_positions), strict=True):
        assert np.array_equal(found, expected)


def test_a_chunk_of_queries_has_the_scores_of_the_whole():
    """As a loss consumes them: for some queries at a time, whose first position is known only at run time."""
    case = BY_NAME["plain"]
    given = index_cases.draw(case, heads=2, dim=4)
    score = jax.jit(functools.partial(attention.block_scores, config=case.config))
    whole = np.asarray(score(given.query, given.key))

    key = jnp.asarray(given.key)

    def chunk(query, first):
        at = layout.Runs((layout.Run(query.shape[1], first),))
        return score(query, key, query_positions=at)

    run = jax.jit(chunk)
    parts = [run(given.query[:, first : first + 20], jnp.int32(first)) for first in (0, 20, 40)]
    np.testing.assert_allclose(np.concatenate(parts, 1), whole[:, :60], rtol=0, atol=1e-6)


def test_no_array_holds_the_scores_of_all_tokens():
    config = NSAConfig(num_selected_blocks=4, selection_block_size=64)

    def run(query, key):
        scores, pull_back = jax.vjp(functools.partial(attention.block_scores, config=config), query, key)
        return pull_back(scores), attention.select_by_index(query, key, config=config)

    def sizes(length: int) -> np.ndarray:
        query = jax.ShapeDtypeStruct((1, length, 2, 1, 8), jnp.float32)
        key = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)
        return np.array(list(arrays(jax.make_jaxpr(run)(query, key).jaxpr)))

    short, long = sizes(16384), sizes(65536)
    scores = 65536 * 2 * (65536 // 64)

    assert len(short) == len(long) > 100
    assert long.max() == scores
    assert set(long[long > 1.05 * 4 * short]) <= {scores, scores + 65536 // 256}


def test_hessian_vector_products():
    """A score is linear in the query and in the key, so the mixed second derivative is known."""
    case, (given, cotangent, _) = CASES[4][0], problem(4)
    way = case.generator("way").standard_normal(given.key.shape)
    with jax.enable_x64(True):

        def d_query(key):
            return program(attention, case)(given.query, key, None, cotangent)[3][0]

        change = jax.jvp(d_query, (jnp.asarray(given.key),), (jnp.asarray(way),))[1]
        expected = (d_query(given.key + 1e-6 * way) - d_query(given.key - 1e-6 * way)) / 2e-6

    np.testing.assert_allclose(change, expected, rtol=0, atol=1e-7)


def test_transformations():
    """`vmap` over single rows, and `export` for any number of rows: equal gradients, by `remat`, too."""
    case = Case(name="index transformed", batch=3, num_keys=22, num_kv_heads=2)
    given = index_cases.draw(case, heads=2, dim=4, weighted=True)
    arrays = [jnp.asarray(x, jnp.float32) for x in (*given, cotangent_of(case, given))]

    def run(query, key, weights, cotangent):
        def score(query, key, weights):
            return attention.block_scores(query, key, weights=weights, config=case.config)

        scores, pull_back = jax.vjp(jax.checkpoint(score), query, key, weights)
        blocks = attention.select_by_index(query, key, weights=weights, config=case.config)
        best = attention.top_blocks(scores, config=case.config)
        return scores, blocks, best, *pull_back(cotangent)

    one = jax.vmap(lambda *row: [x[0] for x in run(*(x[None] for x in row))])
    found = jax.jit(one, compiler_options=OPTIONS["reference"])(*arrays)
    (batch,) = jax.export.symbolic_shape("batch")
    shapes = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in arrays]
    exported = jax.export.export(jax.jit(run, compiler_options=OPTIONS["reference"]))(*shapes)
    for ours, theirs in zip(found, exported.call(*arrays), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def test_checked_calls():
    case = PACKED_ROWS
    given = index_cases.draw(case, dim=4)
    select, shared = attention.select_by_index, dict(config=case.config, segment_ids=case.segment_ids)

    @jax.jit
    def run(positions):
        where = shared | dict(query_positions=positions)
        checked = checkify.checkify(functools.partial(debug.checked(select), **where))
        return checked(given.query, given.key), select(given.query, given.key, **where)

    (error, found), expected = run(case.query_positions)
    assert error.get() is None
    assert np.array_equal(found, expected)
    (error, _), _ = run(case.query_positions + 1)
    with pytest.raises(checkify.JaxRuntimeError, match=r"^query_positions must lie"):
        error.throw()
