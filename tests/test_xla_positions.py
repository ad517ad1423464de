"""Where the queries are: default positions, runs, and window keys that begin anywhere.

All are compared with explicit positions and the keys of the whole row.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from cases import OVERLAPPING, PACKED_ROWS, PLAIN, Operands
from programs import disagreements

from nsa_jax import attention, layout
from nsa_jax.budget import distance, size
from nsa_jax.layout import Run, Runs

NUM_QUERIES = 11  # of 61 and of 75 keys
CASES = {
    "plain": dataclasses.replace(PLAIN, num_queries=NUM_QUERIES),
    # With 7 selected blocks the whole operation attends to all branches at once.
    "packed": dataclasses.replace(
        PACKED_ROWS, num_queries=NUM_QUERIES, config=dataclasses.replace(OVERLAPPING, num_selected_blocks=7)
    ),
}


def results(case, positions, explicit):
    """Every output and log-sum-exp, the selection, the whole operation and its gradients, in float64."""
    shared = dict(config=case.config, segment_ids=case.segment_ids)

    def everything(operands, explicit, cotangent):
        shared["query_positions"] = explicit if positions is EXPLICIT else positions
        query, key_cmp, value_cmp, *keys_values, _ = operands
        cmp = attention.compressed_attention(query, key_cmp, value_cmp, **shared)
        blocks = attention.select_blocks(query, key_cmp, **shared)
        slc = attention.selected_attention(query, *keys_values[:2], blocks, **shared)
        win = attention.window_attention(query, *keys_values[2:], **shared)
        whole = functools.partial(attention.native_sparse_attention, **shared)
        if positions is None:  # a run, whose gradients are below
            return *cmp, blocks, *slc, *win, whole(*operands)
        out, pull_back = jax.vjp(whole, *operands)
        return *cmp, blocks, *slc, *win, out, *pull_back(cotangent)

    with jax.enable_x64(True):
        return program(case, positions, everything)(case.draw(), explicit, cotangent_of(case))


def cotangent_of(case):
    shape = (*case.query_positions.shape, case.num_heads, case.value_dim)
    return case.generator("cotangent").standard_normal(shape)


EXPLICIT = "explicit"
PROGRAMS = {}


def program(case, positions, function):
    """Explicit positions are an argument of the program, so all of them share one."""
    if positions is EXPLICIT:
        return PROGRAMS.setdefault(case.name, jax.jit(function))
    return jax.jit(function)


def agree(found, expected):
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert distance(np.asarray(ours), np.asarray(theirs)) <= 1e-12 * max(1, size(np.asarray(theirs))), i


def test_default_positions_are_the_last_of_the_row():
    """Those of a plain row: `test_xla_native` has them."""
    case = CASES["packed"]
    found = results(case, None, case.query_positions)
    agree(found, results(case, EXPLICIT, case.query_positions)[: len(found)])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_positions_that_the_row_does_not_have_are_padding(case):
    """`nsa_jax.debug` reports them; here such queries see nothing and add nothing to any gradient."""
    behind, before = (case.query_positions.copy() for _ in range(2))
    behind[:, [0, 3, 10]] = case.num_keys, 2**31 - 1, -7
    before[:, [0, 3, 10]] = -1

    agree(results(case, EXPLICIT, behind), results(case, EXPLICIT, before))


RUNS = {
    # The rows see keys so far apart that one tile of a window's length cannot hold them.
    "ragged_and_beyond_the_row": Runs(
        (Run(NUM_QUERIES, np.array([3, 55])),), num_queries=np.array([4, NUM_QUERIES])
    ),
    "two_runs_one_ragged": Runs((Run(7, 42), Run(4, np.array([56, 28]))), divisor=14),
}


@pytest.mark.parametrize(("row", "name"), [*zip(CASES, RUNS, strict=True)])
def test_runs_equal_their_positions(row, name):
    case, runs = CASES[row], RUNS[name]
    positions = np.asarray(layout.positions_of(runs, case.batch))

    agree(results(case, runs, positions), results(case, EXPLICIT, positions))


def with_gradients(operation, arrays, cotangent, **settings):
    """The output and the gradients by the name of their operand."""

    def attend(arrays):
        result = getattr(attention, operation)(**arrays, **settings)
        return result if operation == "native_sparse_attention" else result.out

    out, pull_back = jax.vjp(attend, arrays)
    return pull_back(cotangent)[0] | dict(out=out)


def of_runs(operation, case, arrays, runs, **more):
    """What `with_gradients` gives in float64 where runs say which queries these are."""
    settings = more | dict(config=case.config, segment_ids=case.segment_ids, query_positions=runs)
    with jax.enable_x64(True):
        found = jax.jit(functools.partial(with_gradients, operation, **settings))(arrays, cotangent_of(case))
    return {name: np.asarray(x) for name, x in found.items()}


of_whole_rows = jax.jit(with_gradients, static_argnames=("operation", "config"))


def of_the_row(operation, case, runs):
    """The same of explicit positions and the keys of the whole row, by programs that all tests share."""
    positions = np.asarray(layout.positions_of(runs, case.batch))
    if operation == "native_sparse_attention":
        names = "out", *Operands._fields
        found = dict(zip(names, results(case, EXPLICIT, positions)[-len(names) :], strict=True))
    else:
        arrays = {name: x for name, x in case.draw()._asdict().items() if name in WINDOW}
        settings = dict(config=case.config, segment_ids=case.segment_ids, query_positions=positions)
        with jax.enable_x64(True):
            found = of_whole_rows(operation, arrays, cotangent_of(case), **settings)
    return {name: np.asarray(x) for name, x in found.items()}


WINDOW = ("query", "key_win", "value_win")


@pytest.mark.parametrize(
    ("operation", "row", "run_first", "first"),
    [
        ("window_attention", "packed", [50, 37], [-3, 25]),
        ("window_attention", "plain", 37, -4),
        ("native_sparse_attention", "packed", [50, 37], [-3, 25]),
    ],
)
def test_window_keys_that_begin_anywhere_are_those_of_the_row(operation, row, run_first, first):
    """Places outside the row hold huge numbers; tokens that the array lacks are not needed."""
    case = CASES[row]
    runs = Runs((Run(NUM_QUERIES, run_first if isinstance(run_first, int) else np.array(run_first)),))
    first = first if isinstance(first, int) else np.array(first)
    operands = case.draw()._asdict()
    if operation == "window_attention":
        operands = {name: operands[name] for name in WINDOW}
    token = np.broadcast_to(first, case.batch)[:, None] + np.arange(case.num_keys + 9)
    inside = ((token >= 0) & (token < case.num_keys))[..., None, None]
    at = np.clip(token, 0, case.num_keys - 1)[..., None, None]

    def held(x, elsewhere):
        return np.where(inside, np.take_along_axis(x, at, axis=1), elsewhere)

    name = "first_key" if operation == "window_attention" else "first_key_win"
    part = {name: held(operands[name], 1e6) for name in WINDOW[1:]}
    found = of_runs(operation, case, operands | part, runs, **{name: first})
    expected = of_the_row(operation, case, runs)
    expected |= {name: held(expected[name], 0) for name in WINDOW[1:]}

    assert disagreements(found, expected) == {}
    assert found["key_win"].any()


@pytest.mark.parametrize(
    ("operation", "row"),
    [
        ("window_attention", "packed"),
        ("window_attention", "plain"),
        ("native_sparse_attention", "packed"),
    ],
)
def test_a_stretch_of_window_keys_for_each_run_is_as_good_as_all_keys(operation, row):
    """Places outside the row hold huge numbers."""
    case, halo = CASES[row], OVERLAPPING.window_size + 2
    runs = Runs((Run(7, np.array([20, 5])), Run(4, np.array([50, 37]))), halo=halo)
    operands = case.draw()._asdict()
    if operation == "window_attention":
        operands = {name: operands[name] for name in WINDOW}
    token = np.concatenate(
        [run.first[:, None] + np.arange(-halo, run.length)[None] for run in runs.runs], axis=1
    )
    inside, at = (token >= 0)[..., None, None], np.maximum(token, 0)[..., None, None]
    stretches = {
        name: np.where(inside, np.take_along_axis(operands[name], at, axis=1), 1e6) for name in WINDOW[1:]
    }

    found = of_runs(operation, case, operands | stretches, runs)
    expected = of_the_row(operation, case, runs)

    for name in WINDOW[1:]:  # a token may be in both stretches: its gradient is their sum
        total = np.zeros_like(expected[name])
        for b in range(case.batch):
            np.add.at(total[b], at[b, :, 0, 0], np.where(inside[b], found[name][b], 0))
        assert not found[name][~np.broadcast_to(inside, found[name].shape)].any()
        found[name] = total
    assert disagreements(found, expected) == {}
    assert found["key_win"].any()
