"""What a selection is taught from: loops in float64 -> reference -> xla, and that nothing leaks."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import targets_by_loops
from cases import BY_NAME, OVERLAPPING, PACKED, Case
from programs import by_brute_force

from nsa_jax import Run, Runs, attention, layout, reference
from nsa_jax.config import NSAConfig
from nsa_jax.kernels import xla
from nsa_jax.kernels.xla.sizes import Sizes

ODD = NSAConfig(
    compression_block_size=8, compression_stride=4, selection_block_size=12, num_selected_blocks=3,
    num_local_blocks=1, window_size=5,
)  # fmt: skip
# Blocks that no whole compression block overlaps; rows of several chunks; scattered queries and padding.
CASES = {
    case.name: case
    for case in (
        Case(name="odd", config=ODD, num_keys=37, num_heads=6, key_dim=5),
        Case(name="packed", config=OVERLAPPING, num_keys=75, runs=PACKED, scale=0.9),
        BY_NAME["packed_rows_queried_anywhere"],
        BY_NAME["one_token"],
    )
}
REDUCTIONS = ("sum", "max")
SMALL = Sizes(query_chunk=5)
every_case = pytest.mark.parametrize("name", CASES)


@functools.cache
def operands(name):
    return CASES[name].draw()


@functools.cache
def blocks_of(name):
    """Selections with unused slots, blocks of the future, and repetitions."""
    case = CASES[name]
    count = -(-case.num_keys // case.config.selection_block_size)
    shape = (*case.query_positions.shape, case.num_kv_heads, case.config.num_selected_blocks)
    return case.generator("blocks").integers(-1, count + 1, shape).astype(np.int32)


@functools.cache
def program(module, case, sizes=None):
    """All targets of a case by the oracle or by `xla`, compiled once."""
    shared = dict(config=case.config, scale=case.scale)
    shared |= {} if module == "reference" else dict(implementation="xla")
    functions = reference if module == "reference" else attention

    def everything(query, key, key_cmp, blocks, positions, segment_ids, lse):
        rows = dict(shared, query_positions=positions, segment_ids=segment_ids)
        found = {}
        for reduce in REDUCTIONS:
            more = dict(rows, reduce=reduce)
            found |= {
                f"blocks {reduce}": functions.block_probabilities(query, key, **more),
                f"slots {reduce}": functions.selected_probabilities(query, key, blocks, **more),
            }
        found["blocks lse"] = functions.block_probabilities(query, key, lse=lse, **rows)
        found["slots lse"] = functions.selected_probabilities(query, key, blocks, lse=lse, **rows)
        found["importance"] = functions.importance_scores(query, key_cmp, **rows)
        return found

    return jax.jit(everything)


def evaluate(module, name, dtype="float64", positions=None, **changed):
    case, drawn = CASES[name], operands(name)
    given = dict(query=drawn.query, key=drawn.key_slc, key_cmp=drawn.key_cmp, lse=lse_of(name)) | changed
    with jax.enable_x64(dtype == "float64"):
        arrays = {key: jnp.asarray(x, dtype) for key, x in given.items()}
        ids = None if case.segment_ids is None else jnp.asarray(case.segment_ids)
        positions = jnp.asarray(case.query_positions) if positions is None else positions
        found = program(module, case)(
            **arrays, blocks=jnp.asarray(blocks_of(name)), positions=positions, segment_ids=ids
        )
        return {key: np.asarray(x) for key, x in found.items()}


@functools.cache
def cached(module, name, dtype="float64"):
    return evaluate(module, name, dtype)


def lse_of(name):
    case = CASES[name]
    return case.generator("lse").uniform(1, 4, operands(name).query.shape[:3])


@functools.cache
def by_loops(name):
    case, drawn, loops = CASES[name], operands(name), targets_by_loops
    found = {}
    for reduce in REDUCTIONS:
        pair = drawn.query, drawn.key_slc
        found[f"blocks {reduce}"] = loops.block_probabilities(case, *pair, reduce)
        found[f"slots {reduce}"] = loops.selected_probabilities(case, *pair, blocks_of(name), reduce)
    found["blocks lse"] = loops.block_probabilities(case, *pair, lse=lse_of(name))
    found["slots lse"] = loops.selected_probabilities(case, *pair, blocks_of(name), lse=lse_of(name))
    found["importance"] = loops.importance_scores(case, importance(name))
    return found


def importance(name):
    if name in BY_NAME:
        return by_brute_force(name)["importance"]
    return targets_by_loops.brute_force.evaluate(CASES[name], operands(name))["importance"]


def agree(found, expected, tolerance=1e-12):
    assert found.keys() == expected.keys()
    for name, theirs in expected.items():
        ours = found[name]
        if name == "importance":  # a block that no query sees may be added
            assert (ours[..., theirs.shape[-1] :] == -np.inf).all()
            ours = ours[..., : theirs.shape[-1]]
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance, err_msg=name)


@every_case
def test_the_oracle_equals_the_loops(name):
    agree(cached("reference", name), by_loops(name))


@every_case
def test_xla_equals_the_oracle(name):
    agree(cached("xla", name), cached("reference", name))


def test_cases_have_what_they_are_for():
    lowest = np.log(np.finfo(np.float64).tiny)
    found = by_loops("odd")

    assert (found["importance"] == lowest).any()
    assert (found["slots sum"] == 0).any()
    assert (cached("xla", "packed")["blocks sum"].sum(-1) == 0).any()  # padding


@every_case
def test_probabilities_of_a_query_sum_to_its_heads(name):
    case, found = CASES[name], cached("xla", name)
    heads = case.num_heads // case.num_kv_heads
    sees = (np.asarray(case.query_positions) >= 0)[:, :, None]
    if case.segment_ids is not None:
        at = np.maximum(case.query_positions, 0)
        sees = sees & (np.take_along_axis(case.segment_ids, at, 1) != 0)[:, :, None]

    np.testing.assert_allclose(
        found["blocks sum"].sum(-1), np.broadcast_to(heads * sees, found["blocks sum"].shape[:3]), atol=1e-12
    )


def test_the_log_sum_exp_of_the_attention_changes_nothing():
    name = "packed"
    case, drawn = CASES[name], operands(name)
    where = dict(config=case.config, scale=case.scale, segment_ids=case.segment_ids)
    dense = dict(where, config=NSAConfig(window_size=case.num_keys))

    @jax.jit
    def run(query, key, value, blocks):
        lse = attention.window_attention(query, key, value, **dense).lse
        of_slots = attention.selected_attention(query, key, value, blocks, **where).lse
        return (
            attention.block_probabilities(query, key, lse=lse, **where),
            attention.selected_probabilities(query, key, blocks, lse=of_slots, **where),
        )

    with jax.enable_x64(True):
        found, slots = run(drawn.query, drawn.key_slc, drawn.value_slc, blocks_of(name))

    np.testing.assert_allclose(found, cached("xla", name)["blocks sum"], atol=1e-12)
    np.testing.assert_allclose(slots, cached("xla", name)["slots sum"], atol=1e-12)


@pytest.mark.parametrize(
    ("name", "sizes"), [("odd", Sizes()), ("packed", Sizes(dense_blocks=0))], ids=["odd-short", "packed-long"]
)
def test_the_forward_gives_the_probabilities_of_its_slots(name, sizes, monkeypatch):
    """Beside the same output and gradients; of three branches, and of the selected one alone."""
    case, drawn = CASES[name], operands(name)
    where: dict = dict(config=case.config, scale=case.scale, block_indices=jnp.asarray(blocks_of(name)))
    where |= dict(segment_ids=case.segment_ids, implementation="xla")
    for operation in ("selected_attention", "native_sparse_attention"):
        monkeypatch.setattr(xla, operation, functools.partial(getattr(xla, operation), sizes=sizes))

    @jax.jit
    def run(arrays):
        def attend(arrays, **more):
            return attention.native_sparse_attention(*arrays, **where, **more)

        def with_probabilities(arrays):
            out, probabilities = attend(arrays, return_probabilities=True)
            return out + 0 * probabilities.sum(), probabilities

        def gradients(loss, **more):
            return jax.value_and_grad(lambda arrays: jnp.sin(loss(arrays)).sum())(arrays)

        alone, beside = gradients(attend), gradients(lambda arrays: with_probabilities(arrays)[0])
        selected = (arrays[0], None, None, *arrays[3:5], None, None, None)
        return alone, beside, with_probabilities(arrays)[1], attend(selected, return_probabilities=True)[1]

    with jax.enable_x64(True):
        alone, beside, probabilities, of_one_branch = run(tuple(jax.tree.map(jnp.asarray, drawn)))
    for ours, theirs in zip(jax.tree.leaves(beside), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)
    expected = cached("xla", name)["slots sum"]
    np.testing.assert_allclose(probabilities, expected, atol=1e-12)
    np.testing.assert_allclose(of_one_branch, expected, atol=1e-12)


def test_probabilities_need_the_blocks():
    drawn = operands("odd")
    with pytest.raises(ValueError, match="return_probabilities needs block_indices, got None"):
        attention.native_sparse_attention(*drawn, config=ODD, return_probabilities=True)


@pytest.mark.parametrize(
    ("name", "sizes"), [("odd", SMALL), ("packed", Sizes(partial_floats=1))], ids=["odd-5", "packed-1"]
)
def test_chunks_do_not_depend_on_their_size(name, sizes):
    """Chunks of 5 queries, of which the last is padded, and of one."""
    case, drawn = CASES[name], operands(name)
    scale = case.key_dim**-0.5 if case.scale is None else case.scale

    @jax.jit
    def run(query, key, key_cmp, blocks):
        placed = layout.place(
            case.config, batch=case.batch, num_queries=case.num_keys, num_keys=case.num_keys,
            segment_ids=case.segment_ids,
        )  # fmt: skip
        distinct, shared = layout.distinct_blocks(blocks, case.num_keys, case.config), (None, placed, scale)
        return {
            "blocks sum": xla.block_probabilities(query, key, *shared, "sum", sizes=sizes),
            "slots sum": xla.selected_probabilities(query, key, distinct, *shared, "sum", sizes=sizes),
            "importance": xla.importance_scores(query, key_cmp, *shared, sizes=sizes),
        }

    with jax.enable_x64(True):
        found = run(drawn.query, drawn.key_slc, drawn.key_cmp, blocks_of(name))
    for result, x in found.items():
        np.testing.assert_allclose(x, cached("xla", name)[result], rtol=1e-12, atol=1e-12)


def test_chunks_of_runs_joined_are_the_whole():
    """As a loss consumes them: each chunk says with `Runs` where its queries stand."""
    case, drawn, whole = CASES["odd"], operands("odd"), cached("xla", "odd")
    found = {"blocks sum": [], "slots sum": [], "importance": []}
    key, key_cmp, shared = drawn.key_slc, drawn.key_cmp, dict(config=ODD)

    @jax.jit
    def run(query, blocks, first):
        where = dict(shared, query_positions=Runs((Run(query.shape[1], first),)))
        return (
            attention.block_probabilities(query, key, **where),
            attention.selected_probabilities(query, key, blocks, **where),
            attention.importance_scores(query, key_cmp, **where),
        )

    with jax.enable_x64(True):
        for first, new in ((0, 0), (18, 1)):  # 19 of 37 queries, so that both chunks have one program
            here = slice(first, first + 19)
            chunk = run(drawn.query[:, here], blocks_of("odd")[:, here], first)
            for parts, part in zip(found.values(), chunk, strict=True):
                parts.append(part[:, new:])
    assert case.num_queries is None
    for name, parts in found.items():
        np.testing.assert_allclose(np.concatenate(parts, 1), whole[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("number", [np.nan, np.inf, 1e30])
def test_the_future_changes_nothing_bitwise(number):
    """From token 25 on, and the compressed blocks that end there."""
    drawn, expected = operands("odd"), cached("xla", "odd")
    changed = dict(query=drawn.query.copy(), key=drawn.key_slc.copy(), key_cmp=drawn.key_cmp.copy())
    changed["query"][:, 25:] = changed["key"][:, 25:] = number
    changed["key_cmp"][:, (25 - 8) // 4 + 1 :] = number
    found = evaluate("xla", "odd", **changed)

    for name, theirs in expected.items():
        assert found[name][:, :25].tobytes() == theirs[:, :25].tobytes(), name


@pytest.mark.parametrize("place", ["row", "kv_head", "sequence", "padding", "query"])
def test_nan_stays_where_it_is_seen(place):
    """In packed rows; what sees NaN gives NaN in blocks in sight and 0, or -inf, in others."""
    case, drawn, expected = CASES["packed"], operands("packed"), cached("xla", "packed")
    ids = case.segment_ids
    at = {
        "row": np.s_[0],
        "kv_head": np.s_[:, :, :1],
        "sequence": ids == np.array([[9], [1]]),
        "padding": ids == 0,
        "query": np.s_[1, 20],
    }[place]
    changed = dict(query=drawn.query.copy(), key=drawn.key_slc.copy(), key_cmp=drawn.key_cmp.copy())
    changed["query"][np.s_[:, :, :2] if place == "kv_head" else at] = np.nan
    if place != "query":
        changed["key"][at] = np.nan
        if place in ("row", "kv_head"):
            changed["key_cmp"][at] = np.nan
    found = evaluate("xla", "packed", **changed)

    spoilt = np.zeros((*case.query_positions.shape, case.num_kv_heads), bool)
    spoilt[np.s_[:, :, :1] if place == "kv_head" else at] = place != "padding"
    for name, theirs in expected.items():
        ours = found[name]
        np.testing.assert_allclose(ours[~spoilt], theirs[~spoilt], rtol=1e-12, atol=1e-12, err_msg=name)
        hidden = (theirs == 0) | (theirs == -np.inf) | (theirs == np.log(np.finfo(np.float64).tiny))
        assert (ours[hidden] == theirs[hidden]).all(), name
        assert np.isnan(ours[spoilt & ~hidden.all(-1)]).any() == (place != "padding"), name


@pytest.mark.parametrize(("name", "given"), [("odd", True), ("packed", False)])
def test_gradients_of_the_scores_are_those_of_the_oracle(name, given):
    """Under random cotangents, with a log-sum-exp that is computed, or that of the compressed branch."""
    case, drawn = CASES[name], operands(name)
    shared = dict(config=case.config, scale=case.scale, segment_ids=case.segment_ids)
    weights = case.generator("cotangent").standard_normal(cached("xla", name)["importance"].shape)

    def objective(module, given, query, key_cmp):
        more = {}
        if given:
            more["lse_cmp"] = module.compressed_attention(query, key_cmp, key_cmp, **shared).lse
        scores = module.importance_scores(query, key_cmp, **more, **shared)
        return jnp.where(scores == -jnp.inf, 0, scores * weights).sum()

    with jax.enable_x64(True):
        arrays = jnp.asarray(drawn.query), jnp.asarray(drawn.key_cmp)
        expected, found = (
            jax.jit(jax.grad(functools.partial(objective, *by), (0, 1)))(*arrays)
            for by in ((reference, False), (attention, given))
        )
    for ours, theirs in zip(found, expected, strict=True):
        assert np.abs(theirs).max() > 0.1
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-10)


def test_gradients_of_the_scores_do_not_spread_nan():
    """From other sequences and rows; queries that are NaN spoil what they see, even with cotangents of 0."""
    case, drawn = CASES["packed"], operands("packed")
    shared = dict(config=case.config, segment_ids=case.segment_ids)
    first = case.segment_ids[0] == 7  # its compressed blocks are the first of row 0

    def objective(query, key_cmp):
        scores = attention.importance_scores(query, key_cmp, **shared)
        return jnp.where(jnp.isfinite(scores), scores, 0)[0, first].sum()

    key_cmp = drawn.key_cmp.copy()
    run = jax.jit(jax.grad(objective, (0, 1)))
    with jax.enable_x64(True):
        expected = map(np.asarray, run(drawn.query, key_cmp))
        key_cmp[0, 13:] = key_cmp[1] = np.nan
        query = drawn.query.copy()
        query[0, ~first] = query[1] = np.nan
        found = map(np.asarray, run(query, key_cmp))
    for ours, theirs, seen in zip(found, expected, (first, np.s_[:13]), strict=True):
        assert np.abs(theirs[0, seen]).max() > 0.1
        np.testing.assert_allclose(ours[0, seen], theirs[0, seen], rtol=1e-12, atol=1e-12)


def test_targets_have_no_gradient():
    case, drawn = CASES["odd"], operands("odd")

    def objective(query, key):
        found = attention.block_probabilities(query, key, config=case.config)
        return (found**2).sum() + (query**2).sum()

    arrays = jnp.asarray(drawn.query, jnp.float32), jnp.asarray(drawn.key_slc, jnp.float32)
    d_query, d_key = map(np.asarray, jax.jit(jax.grad(objective, (0, 1)))(*arrays))

    assert (d_query == 2 * np.asarray(arrays[0])).all()
    assert not d_key.any()


def taught(query, key, key_cmp):
    """All that a step of distillation computes, with its gradient."""
    blocks = attention.select_blocks(query, key_cmp, config=ODD)
    target = attention.block_probabilities(query, key, config=ODD)
    slots = attention.selected_probabilities(query, key, blocks, config=ODD)

    def objective(query, key_cmp):
        scores = attention.importance_scores(query, key_cmp, config=ODD)
        return attention.selection_loss(scores[..., : target.shape[-1]], target).sum()

    return target, slots, *jax.grad(objective, (0, 1))(query, key_cmp)


def test_vmap_and_export_for_any_number_of_rows():
    drawn = operands("odd")
    arrays = [jnp.asarray(x, jnp.float32) for x in (drawn.query, drawn.key_slc, drawn.key_cmp)]
    by_row = jax.jit(jax.vmap(lambda *row: [x[0] for x in taught(*(x[None] for x in row))]))(*arrays)
    (batch,) = jax.export.symbolic_shape("batch")
    shapes = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in arrays]
    exported = jax.export.export(jax.jit(taught))(*shapes).call(*arrays)

    for ours, theirs in zip(by_row, exported, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)  # float32 sums in another order


def test_a_long_row_is_taught_within_bounded_memory():
    """A chunk of a row of 16k tokens: the logits of all its queries would take 268 MB, its target 2 MB."""
    query = jax.ShapeDtypeStruct((1, 1024, 4, 16), jnp.float32)
    key = jax.ShapeDtypeStruct((1, 16384, 2, 16), jnp.float32)
    key_cmp = jax.ShapeDtypeStruct((1, 1023, 2, 16), jnp.float32)
    config = NSAConfig()

    def teach(query, key, key_cmp, first):
        at = Runs((Run(1024, first),))
        shared = dict(config=config, query_positions=at)
        target = attention.block_probabilities(query, key, **shared)

        def objective(query, key_cmp):
            scores = attention.importance_scores(query, key_cmp, **shared)
            return attention.selection_loss(scores[..., : target.shape[-1]], target).sum()

        return jax.grad(objective, (0, 1))(query, key_cmp)

    first = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = jax.jit(teach).lower(query, key, key_cmp, first).compile()

    assert compiled.memory_analysis().temp_size_in_bytes < 140e6


# --- The loss ---------------------------------------------------------------------------------------------


def scores_and_target(rows=40, blocks=7):
    rng = np.random.default_rng(5)
    scores = rng.standard_normal((1, rows, 2, blocks)) * 3
    scores[rng.random(scores.shape) < 0.3] = -np.inf
    target = rng.random(scores.shape) * (rng.random(scores.shape) < 0.7)
    scores[0, 0], target[0, 1] = -np.inf, 0
    target[0, 2] = np.where(scores[0, 2] == -np.inf, 1, 0)  # all mass is out of sight
    scores[0, 3, :, 0], target[0, 3, :, 0] = -200, 1  # the softmax of it underflows in float32
    return scores, target


def test_the_loss_equals_the_loops():
    scores, target = scores_and_target()
    expected = targets_by_loops.selection_loss(scores, target)
    with jax.enable_x64(True):
        for function in (attention.selection_loss, reference.selection_loss):
            np.testing.assert_allclose(jax.jit(function)(scores, target), expected, rtol=1e-12, atol=1e-13)
    found = jax.jit(attention.selection_loss)(scores.astype("bfloat16"), target.astype("float32"))
    rounded = scores.astype("bfloat16").astype(np.float64)

    assert found.dtype == jnp.float32
    assert (expected[0, :3] == 0).all()
    assert (expected[0, 3:] > 0).all()
    np.testing.assert_allclose(found, targets_by_loops.selection_loss(rounded, target), rtol=1e-5, atol=1e-5)


def test_gradients_of_the_loss_are_those_of_finite_differences():
    scores, target = scores_and_target(rows=6)
    weights = np.random.default_rng(6).standard_normal(scores.shape[:3])

    def objective(scores, target):
        return (attention.selection_loss(scores, target) * weights).sum()

    with jax.enable_x64(True):
        d_scores, d_target = map(np.asarray, jax.jit(jax.grad(objective, (0, 1)))(scores, target))
    by_steps = np.zeros_like(scores)
    for index in zip(*np.nonzero(scores > -np.inf), strict=True):
        step = np.zeros_like(scores)
        step[index] = 1e-5
        up, down = (targets_by_loops.selection_loss(scores + x, target) for x in (step, -step))
        by_steps[index] = ((up - down) * weights).sum() / 2e-5

    np.testing.assert_allclose(d_scores, by_steps, atol=1e-8)
    assert not d_target.any()
    assert np.abs(by_steps).max() > 0.1


def test_nan_of_one_row_stays_in_its_loss():
    scores, target = scores_and_target()

    @jax.jit
    def run(scores, target):
        found, pull_back = jax.vjp(attention.selection_loss, scores, target)
        return found, pull_back(jnp.ones_like(found))[0]

    expected = np.asarray(run(scores, target)[0])
    scores[0, 5, 0, 1] = target[0, 6, 1, 1] = np.nan
    scores[0, 6, 1, 1] = 0.0
    found, gradient = map(np.asarray, run(scores, target))
    spoilt = np.zeros(found.shape, bool)
    spoilt[0, 5, 0] = spoilt[0, 6, 1] = True

    assert np.isnan(found[spoilt]).all()
    assert np.isfinite(gradient[~spoilt]).all()
    np.testing.assert_allclose(found[~spoilt], expected[~spoilt], rtol=1e-6)


def test_the_loss_of_equal_shares_is_0():
    scores, _ = scores_and_target()

    @jax.jit
    def loss(scores):
        return attention.selection_loss(scores, 3 * jax.nn.softmax(scores, axis=-1))

    assert np.abs(loss(scores[:, 3:])).max() < 1e-6
