"""The gate of the benchmarks rejects wrong programs, also those that are wrong only where they are timed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from printed import last_line
from quick_benchmarks import quick_ceiling, quick_draws  # noqa: F401

from benchmarks import attention, definitions, gate, inputs, layers, selections, verdict
from benchmarks.inputs import Shape
from nsa_jax import attention as operations
from nsa_jax.config import NSAConfig

SMALL = NSAConfig(
    compression_block_size=8,
    compression_stride=4,
    selection_block_size=16,
    num_selected_blocks=4,
    window_size=24,
)
LENGTH = 300  # longer than the small check, and than the sample of the other one
SIZES = ["--heads", "2", "--key-dim", "8", "--value-dim", "8", "--budget-s", "0.01"]
RIGHT, RIGHT_SUM, RIGHT_BLOCKS = operations.window_attention, operations.gated_sum, operations.select_blocks


def with_gradient(x, wrong):
    """`x`, whose gradient is what `wrong` makes of it."""
    same = jax.custom_vjp(lambda x: x)
    same.defvjp(lambda x: (x, None), lambda _, gradient: (wrong(gradient),))
    return same(x)


def halved(gradient):
    return 0.5 * gradient


def short_window(*arrays, config, **options):
    return RIGHT(*arrays, config=dataclasses.replace(config, window_size=config.window_size - 1), **options)


def not_a_number(*arrays, **options):
    out, lse = RIGHT(*arrays, **options)
    return out.at[0, -1, 0, 0].set(jnp.nan), lse


def lse_in_base_2(*arrays, **options):
    out, lse = RIGHT(*arrays, **options)
    return out, lse * jnp.log2(jnp.e)


def no_gradient_of_the_lse(*arrays, **options):
    out, lse = RIGHT(*arrays, **options)
    return out, jax.lax.stop_gradient(lse)


def no_gradient_of_the_gates(*branches_and_gates, **options):
    *branches, gates = branches_and_gates
    return RIGHT_SUM(*branches, jax.lax.stop_gradient(gates), **options)


def a_token_late(*arrays, **options):
    out, lse = RIGHT(*arrays, **options)
    return jnp.roll(out, 1, axis=1), lse


def garbage_in_unused_slots(*arrays, **options):
    blocks = RIGHT_BLOCKS(*arrays, **options)
    return jnp.where(blocks < 0, 10**6, blocks)


def descending_blocks(*arrays, **options):
    return RIGHT_BLOCKS(*arrays, **options)[..., ::-1]


def wrong_when_long(*arrays, **options):
    out, lse = RIGHT(*arrays, **options)
    return (out * 1.001 if out.shape[1] == LENGTH else out), lse


def query_gradient_halved_when_long(query, *keys, **options):
    return RIGHT(with_gradient(query, halved) if query.shape[1] == LENGTH else query, *keys, **options)


def value_gradient_halved_in_the_last_row(query, key, value, **options):
    wrong = with_gradient(value, lambda x: x.at[1:].multiply(0.5))
    return RIGHT(query, key, wrong, **options)


def key_gradient_missing_at_the_end(query, key, value, **options):
    wrong = with_gradient(key, lambda x: x.at[:, 290:].set(0))
    return RIGHT(query, wrong, value, **options)


def key_gradient_of_half_the_queries(query, key, value, **options):
    out, lse = RIGHT(query, key, value, **options)
    without, _ = RIGHT(query, jax.lax.stop_gradient(key), value, **options)
    early = jnp.arange(out.shape[1])[:, None, None] < LENGTH // 2
    return jnp.where(early, out, without), lse


def gradient_of_the_gates_halved_when_long(*branches_and_gates, **options):
    *branches, gates = branches_and_gates
    wrong = with_gradient(gates, halved) if gates.shape[1] == LENGTH else gates
    return RIGHT_SUM(*branches, wrong, **options)


BATCH = ["--batch", "2"]
WRONG_WHEN_SMALL = {
    "short window": ("window_attention", short_window, "fwd"),
    "NaN": ("window_attention", not_a_number, "fwd"),
    "base-2 lse": ("window_attention", lse_in_base_2, "fwd"),
    "a token late": ("window_attention", a_token_late, "fwd"),
    "missing gradient, bwd": ("gated_sum", no_gradient_of_the_gates, "bwd"),
    "missing gradient, fwd_bwd": ("gated_sum", no_gradient_of_the_gates, "fwd_bwd"),
    "cotangent of the lse": ("window_attention", no_gradient_of_the_lse, "bwd"),
    "garbage in unused slots": ("select_blocks", garbage_in_unused_slots, "fwd"),
    "descending blocks": ("select_blocks", descending_blocks, "fwd"),
}
WRONG_AS_TIMED = {
    "output": ("window_attention", wrong_when_long, "fwd", []),
    "query, long, fwd_bwd": ("window_attention", query_gradient_halved_when_long, "fwd_bwd", []),
    "value, last row": ("window_attention", value_gradient_halved_in_the_last_row, "bwd", BATCH),
    "key, last tokens": ("window_attention", key_gradient_missing_at_the_end, "bwd", []),
    "key, late queries": ("window_attention", key_gradient_of_half_the_queries, "bwd", []),
    "gates": ("gated_sum", gradient_of_the_gates_halved_when_long, "bwd", []),
}


@pytest.mark.parametrize(("operation", "wrong", "mode"), WRONG_WHEN_SMALL.values(), ids=WRONG_WHEN_SMALL)
def test_red_gate_reports_no_speed(monkeypatch, tmp_path, capsys, operation, wrong, mode):
    path = tmp_path / "rows.jsonl"
    monkeypatch.setattr(operations, operation, wrong)
    command = ["--lengths", "100", "--modes", mode, "--operations", operation, "--output", str(path)]

    status = attention.main([*command, *SIZES], SMALL)

    printed, summary = last_line(capsys)
    assert status == 1
    assert f"gate {operation} xla {mode}: RED" in printed
    assert "median_ms" not in printed
    assert summary["rows"] == 0
    assert summary["red"] == [f"{operation} xla {mode}"]
    assert not path.exists()


@pytest.mark.parametrize(
    ("operation", "wrong", "mode", "more"), WRONG_AS_TIMED.values(), ids=WRONG_AS_TIMED.keys()
)
def test_gate_judges_the_timed_shape_and_batch_too(monkeypatch, capsys, operation, wrong, mode, more):
    monkeypatch.setattr(operations, operation, wrong)
    command = ["--lengths", f"{LENGTH}:{mode}", "--operations", operation]

    status = attention.main([*command, *SIZES, *more], SMALL)

    printed, summary = last_line(capsys)
    assert status == 1
    assert f"gate {operation} xla {mode}: green" in printed
    assert f"T={LENGTH}, {gate.SAMPLED_QUERIES} queries: RED" in printed
    assert summary["rows"] == 0
    assert summary["red"] == [f"{operation} xla {mode} random T={LENGTH}"]


def test_the_sample_has_the_last_query_and_no_long_gap():
    short, long = gate.sample_positions(100), gate.sample_positions(65536)

    assert short.tolist() == list(range(100))
    assert len(np.unique(long)) == gate.SAMPLED_QUERIES
    assert long[-1] == 65535
    assert np.diff(long).max() < 2 * 65536 / gate.SAMPLED_QUERIES


def selection(length: int) -> np.ndarray:
    """Each query selects block 0, its own, the one before it, and block 1."""
    blocks = np.full((1, length, 1, SMALL.num_selected_blocks), -1)
    for t in range(length):
        chosen = sorted({0, min(1, t // 16), max(t // 16 - 1, 0), t // 16})
        blocks[0, t, 0, : len(chosen)] = chosen
    return blocks


@pytest.mark.parametrize(
    ("token", "slots", "rule"),
    [
        (30, [0, 1, 10**6, -1], "an unused slot that is not -1"),
        (30, [0, -1, 1, -1], "an unused slot that is not -1"),
        (90, [0, 1, 4, -1], "a missing block"),
        (90, [0, 1, 5, 4], "not ascending"),
        (90, [0, 4, 4, 5], "not ascending"),
        (90, [0, 1, 5, 6], "a block of the future"),
        (90, [1, 2, 4, 5], "a forced block is missing"),
        (90, [0, 1, 2, 5], "a forced block is missing"),
        (90, [0, 1, 2, 4], "a forced block is missing"),
    ],
)
def test_the_form_of_block_indices_is_judged(token, slots, rule):
    blocks, positions = selection(100), np.arange(100)
    assert selections.check_form(blocks, positions, SMALL).green

    blocks[0, token, 0] = slots

    assert selections.check_form(blocks, positions, SMALL).where == f"block_indices: {rule}"


def test_selection_gate_sees_a_better_block_left_out():
    shape = Shape(length=150, query_heads=2, key_dim=8, value_dim=8, config=SMALL)
    draw = inputs.draw_queries(shape, "random", None)
    key_cmp = inputs.tensor("key_cmp", shape)
    blocks = jax.jit(lambda *x: operations.select_blocks(*x, config=SMALL))(draw.query, key_cmp)

    def judge(blocks):
        return gate.check_rows("select_blocks", blocks, np.arange(shape.length), draw, shape)

    (free,) = set(np.asarray(blocks[0, -1, 0]).tolist()) - {0, 8, 9}
    worse = next(block for block in range(1, 8) if block != free)

    assert judge(blocks).green
    assert not judge(blocks.at[0, -1, 0].set(jnp.array([0, worse, 8, 9]))).green


@pytest.mark.parametrize(("operation", "attended"), [("layer", 3), ("dense_layer", 1)])
def test_gradients_of_a_layers_keys_are_added_up_in_float64(monkeypatch, operation, attended):
    sizes = dict(length=64, query_heads=2, kv_heads=1, key_dim=8, value_dim=8, model_dim=16)
    shape = Shape(**sizes, dtype="bfloat16", config=SMALL)
    x = layers.parameters(operation, shape) | {"x": jax.ShapeDtypeStruct((1, 64, 16), jnp.bfloat16)}
    attend, dtypes = definitions._attend, []

    def noted(name, query, key, value, *others):
        dtypes.append([y.dtype.name for y in (query, key, value)])
        return attend(name, query, key, value, *others)

    monkeypatch.setattr(definitions, "_attend", noted)
    run = functools.partial(definitions.results.__wrapped__, operation=operation, shape=shape)
    with jax.enable_x64(True):
        jax.eval_shape(run, x, np.arange(4), np.zeros((1, 4, 1, 4), np.int32), 0.0)

    assert dtypes == [["bfloat16", "float64", "float64"]] * attended


def test_late_tokens_have_a_budget_of_their_own():
    """In 16 bits, 8 eps of the first output are more than the whole of a late one."""
    exact = np.random.default_rng(0).normal(size=(1, 4096, 2, 8)) / np.sqrt(np.arange(1, 4097))[:, None, None]
    rounded = np.asarray(jnp.asarray(exact, jnp.bfloat16))
    expected = verdict.Expected({"value_slc": rounded.astype(float)}, {"value_slc": exact})
    wrong = rounded.copy()
    wrong[:, 2000:] = 0
    assert np.abs(exact[:, 2000:]).max() < 8 * float(jnp.finfo(jnp.bfloat16).eps) * np.abs(exact).max()

    right, late = (verdict.judge({"value_slc": x}, expected, np.arange(4096)) for x in (rounded, wrong))

    assert right.green
    assert not late.green
    assert late.where.startswith("value_slc ")


@pytest.mark.parametrize("length", [1, 31, 32, 300, 4096])
def test_stretches_cover_all_tokens_and_are_short_at_both_ends(length):
    parts = verdict.stretches(length)

    sizes = [part.stop - part.start for part in parts]
    assert [t for part in parts for t in range(part.start, part.stop)] == [*range(length)]
    assert sizes == sizes[::-1]
    assert sizes[0] == min(verdict.SHORTEST, length)


def test_the_definition_takes_no_more_queries_at_a_time_than_their_logits_have_room(monkeypatch):
    rows = np.random.default_rng(0).normal(size=(3, 1, 20, 2, 8))
    x = dict(zip(("query", "key_win", "value_win"), rows, strict=True))
    settings = dict(operation="window_attention", shape=Shape(length=20, config=SMALL))
    taken, in_groups = [], jax.lax.map

    def spy(function, arrays, batch_size):
        taken.append(batch_size)
        return in_groups(function, arrays, batch_size=batch_size)

    def out():
        run = functools.partial(definitions.results.__wrapped__, **settings)  # without what its jit keeps
        return jax.jit(run)(x, jnp.arange(20), None)["out"]

    monkeypatch.setattr(jax.lax, "map", spy)
    whole = out()
    monkeypatch.setattr(definitions, "MOST_LOGITS", 5 * 2 * 20)

    few = out()

    assert taken == [0, 5]  # all of them, then five
    np.testing.assert_allclose(few, whole, rtol=1e-5)


@pytest.mark.parametrize("operation", ["selected_attention", "window_attention"])
def test_the_definition_takes_from_a_long_row_what_each_query_sees(monkeypatch, operation):
    shape, positions = Shape(length=LENGTH, config=SMALL), jnp.array([0, 5, 130, 299])
    branch = operation[:3].replace("sel", "slc")
    names = ("query", f"key_{branch}", f"value_{branch}")
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        x = {name: jnp.asarray(rng.normal(size=(1, LENGTH, 2, 8))) for name in names}
        x["query"] = jnp.asarray(rng.normal(size=(1, 4, 4, 8)))
        blocks = jnp.asarray(np.repeat(selection(LENGTH), 2, axis=2)[:, np.asarray(positions)])
        blocks = blocks.at[0, 3, 1].set(jnp.array([0, 0, 18, -1]))  # one said twice, and an unused slot
        run = definitions.results.__wrapped__  # without the programs that jit keeps

        def both(x):
            found, pull_back = jax.vjp(
                lambda x: run(x, positions, blocks, operation=operation, shape=shape), x
            )
            return found, pull_back(jax.tree.map(jnp.cos, found))[0]

        whole = jax.jit(both)(x)
        monkeypatch.setattr(definitions, "LONGEST_WHOLE", 0)
        traced = jax.jit(lambda x: both(x)).trace(x)
        taken = traced.lower().compile()(x)

    assert "gather" in str(traced.jaxpr)
    for found, expected in zip(jax.tree.leaves(taken), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-13)


def test_large_gradients_are_computed_branch_by_branch_and_judged_where_they_are(monkeypatch):
    monkeypatch.setattr(gate, "MOST_NUMBERS", 0)
    shape = Shape(length=LENGTH, query_heads=2, kv_heads=2, key_dim=8, value_dim=8, config=SMALL)
    positions, rng = gate.sample_positions(LENGTH), np.random.default_rng(0)
    size, names = (1, LENGTH, 2, 8), inputs.ARGUMENTS["window_attention"]
    x, cotangent = (
        {name: rng.normal(size=size).astype("float32") for name in names},
        np.zeros(size, "float32"),
    )
    cotangent[:, positions] = rng.normal(size=(1, len(positions), 2, 8))

    @jax.jit
    def gradients(cotangent, *x):
        return jax.vjp(lambda *x: RIGHT(*x, config=SMALL)[0], *x)[1](cotangent)

    right = dict(zip(names, map(np.asarray, gradients(cotangent, *x.values())), strict=True))
    right["query"], x["query"] = right["query"][:, positions], x["query"][:, positions]
    computed, compute = [], gate.gradients_in_both

    def spy(dense, given, dtype, names):
        expected = compute(dense, given, dtype, names)
        computed.append((names, {name: type(expected.exact[name]) for name in names}))
        return expected

    def judge(**wrong):
        dense = functools.partial(definitions.gradients, operation="window_attention", shape=shape)
        given = x, {"out": cotangent[:, positions]}
        return gate.compare(dense, right | wrong, given, positions, None, shape.kv_heads, spy)

    late, nowhere = right["value_win"].copy(), right["key_win"].copy()
    late[:, 250:, 1] *= 0.5
    nowhere[0, 3, 0, 0] = np.nan

    assert 0 < judge().share <= 1
    assert [names for names, _ in computed] == 2 * [("query",), ("key_win", "value_win")]
    assert all(issubclass(kind, jax.Array) for _, kinds in computed for kind in kinds.values())
    red = judge(value_win=late)
    assert red.where.startswith("value_win 268 to 299, row 0, KV head 1")
    assert not red.green
    assert judge(key_win=nowhere).share == np.inf


@pytest.mark.parametrize("wrong", [None, np.nan, np.inf, 9.0])
def test_numbers_on_a_device_are_judged_as_those_on_the_host(wrong):
    exact = np.random.default_rng(0).normal(size=(2, 300, 2, 4))
    exact[0, 7, 1, 2] = np.inf
    same = np.asarray(exact.astype("float32"), np.float64)
    found = exact.astype("float32")
    if wrong is not None:
        found[1, 200, 0, 3] = wrong

    on_host = verdict.judge({"out": found}, verdict.Expected({"out": same}, {"out": exact}), np.arange(300))
    with jax.enable_x64(True):
        there = {"same": {"out": jnp.asarray(same, "float32")}, "exact": {"out": jnp.asarray(exact)}}
        terms = verdict.sizes_of_tokens(there["exact"]["out"])
    on_device = verdict.judge({"out": found}, verdict.Expected(**there, terms={"out": terms}), np.arange(300))

    assert on_device == on_host
    assert on_host.green == (wrong is None)
    assert terms.shape == (1, 300, 1, 1)
