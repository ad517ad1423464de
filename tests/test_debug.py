"""Wrong values in index arrays: refused at once outside jit, and returned as an error to throw inside."""

import contextlib
import functools
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import OVERLAPPING, PACKED_ROWS, PLAIN
from jax.experimental import checkify
from programs import by_brute_force

import nsa_jax
from nsa_jax import attention, debug

FORM = r".+, got .+\. [A-Z].*\. \(`check` failed\)"  # what checkify appends
refused = functools.partial(pytest.raises, checkify.JaxRuntimeError)


def test_the_checks_come_with_the_package():
    """Nothing but `import nsa_jax` is needed."""
    assert runpy.run_path(nsa_jax.__file__)["debug"] is debug


def padded(*rows):
    """Rows of ids with padding behind, of one shape: each operation is compiled for each shape."""
    ids = np.zeros((3, 9), int)
    for row, given in zip(ids, rows, strict=False):
        row[: len(given)] = given
    return ids


@pytest.mark.parametrize(
    "ids",
    [
        padded([0, 0, 5, 5, 2, 0, 3, 3, 0], [0, 1, 0, 2, 0, 3, 0]),  # padding anywhere, and between
        padded([1, 2, 3], [3, 2, 1], [-1, -1, 0, 7]),  # ids of other rows
        [[4]],
    ],
    ids=["padding", "other rows", "one token"],
)
@pytest.mark.parametrize("dtype", ["int32", "uint8"])
def test_runs_that_are_contiguous_are_accepted(ids, dtype):
    debug.check_segment_ids(jnp.asarray(np.array(ids).astype(dtype)))


@pytest.mark.parametrize(
    ("ids", "name"),
    [([[1, 2, 1]], 1), ([[4, 0, 4]], 4), ([[1, 1, 2], [9, 0, 9]], 9), ([[-3, 1, -3]], -3)],
    ids=["other_between", "padding_between", "in_a_later_row", "negative_id"],
)
def test_runs_that_come_back_are_refused(ids, name):
    with refused(
        match=f"^each non-zero segment id must be one contiguous run, got id {name} in several runs"
    ) as error:
        debug.check_segment_ids(jnp.asarray(padded(*ids)))

    assert error.match(FORM)


@pytest.mark.parametrize("rows", [[0, 3, 3, 8], [0], [[0, 5, 8, 8], [0, 0, 0, 0]]], ids=str)
def test_cumulative_lengths_are_accepted(rows):
    debug.check_cu_seqlens(jnp.asarray(rows), 8)
    debug.check_cu_seqlens(jnp.zeros((0, 3), int), 8)


def test_cumulative_lengths_of_a_narrow_dtype_are_compared_with_a_length_beyond_it():
    debug.check_cu_seqlens(jnp.asarray([0, 9, 9, 200], jnp.uint8), 300)


check_lengths = jax.jit(checkify.checkify(lambda rows: debug.check_cu_seqlens(rows, 8)))


@pytest.mark.parametrize("dtype", ["int32", "uint8"])
@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([1, 3, 3, 8], r"cu_seqlens must start at 0 and never decrease, got \[1 3 3 8\]\. "),
        ([[0, 3, 5, 8], [0, 4, 3, 8]], r"must start at 0 and never decrease, got \[0 4 3 8\]\. "),
        ([[0, 8, 8, 8], [0, 8, 8, 9]], "cu_seqlens must end within the row, got 9 > 8"),
    ],
    ids=["late", "decreasing", "too long"],
)
def test_wrong_cumulative_lengths_are_refused(rows, told, dtype):
    rows = jnp.asarray(rows, dtype)
    with refused(match=told) as error:
        debug.check_cu_seqlens(rows, 8)

    assert error.match(FORM)
    found, _ = check_lengths(rows)
    with refused(match=told):
        found.throw()


@pytest.mark.parametrize("positions", [[[-1, -1], [-1, -1]], [[9, 0], [3, 3]]], ids=str)
def test_positions_within_the_row_are_accepted(positions):
    debug.check_query_positions(jnp.asarray(positions), 10)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "int64"])
@pytest.mark.parametrize("array", [np.asarray, jnp.asarray], ids=["NumPy", "JAX"])
def test_arrays_of_every_kind_and_integer_dtype_are_compared_by_value(array, dtype):
    given = lambda values: array(np.array(values).astype(dtype))  # noqa: E731

    debug.check_segment_ids(given(padded([0, 5, 5])))
    debug.check_cu_seqlens(given([0, 3, 5, 5]), 300)
    debug.check_query_positions(given([[0, 100], [0, 0]]), 300)
    with refused(match=r"must lie in \[-1, 100\), got values from 0 to 100"):
        debug.check_query_positions(given([[0, 100], [0, 0]]), 100)
    for blocks, wrong in (([[[[0, 1, 2, 3]]]], False), ([[[[1, 0, 2, 3]]]], True)):
        with refused(match="must be ascending") if wrong else contextlib.nullcontext():
            debug.check_block_indices(given(blocks), config=OVERLAPPING, query_positions=given([[30]]))


@pytest.mark.parametrize(
    ("positions", "values"), [([[0, 3], [10, 3]], "0 to 10"), ([[-2, 3], [0, 0]], "-2 to 3")], ids=str
)
def test_positions_outside_the_row_are_refused(positions, values):
    with refused(match=rf"^query_positions must lie in \[-1, 10\), got values from {values}\. ") as error:
        debug.check_query_positions(jnp.asarray(positions), 10)

    assert error.match(FORM)


def check_blocks(blocks, position, **more):
    debug.check_block_indices(
        jnp.asarray(np.reshape(blocks, (1, 1, 1, -1)), jnp.int32),
        config=OVERLAPPING,  # blocks of 6 tokens
        query_positions=jnp.asarray(np.reshape(position, (1, 1))),
        **more,
    )


@pytest.mark.parametrize(
    ("blocks", "position"),
    [([0, 1, 2, 5], 30), ([-1] * 4, 30), ([5, -1, -1, -1], 30), ([0], 0), ([-1] * 4, -1)],
    ids=["full", "empty", "one", "one_slot", "padding_query"],
)
def test_well_formed_selections_are_accepted(blocks, position):
    check_blocks(blocks, position)


@pytest.mark.parametrize(
    ("blocks", "position", "rule"),
    [
        ([0, 2, 1, -1], 30, "block_indices must be ascending .*, got 1 slots that break this"),
        ([0, 2, 2, -1], 30, "block_indices must be ascending .*, got 1 slots that break this"),
        ([0, -1, 2, -1], 30, "block_indices must be ascending .*, got 1 slots that break this"),
        ([-1, -1, -1, 0], 30, "block_indices must be ascending .*, got 1 slots that break this"),
        ([0, 1, -2, -2], 30, "block_indices must be at least -1, got -2"),
        ([0, 5, -1, -1], 29, "selected blocks must start at or before their query, got 1 that start after"),
        ([0, 2**29, -1, -1], 29, "selected blocks must start at or before their query, got 1 that start"),
    ],
    ids=["descending", "twice", "gap", "late", "below_-1", "future", "far_future"],
)
def test_ill_formed_selections_are_refused(blocks, position, rule):
    with refused(match="^" + rule) as error:
        check_blocks(blocks, position)

    assert error.match(FORM)


def test_blocks_count_from_the_start_of_their_sequence():
    @jax.jit
    @checkify.checkify
    def check(position):
        debug.check_block_indices(
            np.array([[[[0, 1]]]]), config=OVERLAPPING, query_positions=position,
            segment_ids=np.array([[1] * 10 + [2] * 10]),
        )  # fmt: skip

    check(np.array([[16]]))[0].throw()
    error, _ = check(np.array([[15]]))
    with refused(match="must start at or before their query"):
        error.throw()


@pytest.fixture(scope="module")
def operands():
    return jax.tree.map(np.float32, PLAIN.draw())


def test_checked_operations_return_what_the_operations_return(operands):
    arguments = (operands.query, operands.key_win, operands.value_win)
    found = debug.checked(attention.window_attention)(*arguments, config=PLAIN.config)
    expected = attention.window_attention(*arguments, config=PLAIN.config)

    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("operation", ["compressed_attention", "select_blocks", "window_attention"])
def test_checked_operations_refuse_bad_segments(operands, operation):
    names = {"window_attention": ("key_win", "value_win"), "select_blocks": ("key_cmp",)}
    arrays = [getattr(operands, name) for name in names.get(operation, ("key_cmp", "value_cmp"))]
    bad = np.ones(operands.key_win.shape[:2], int)
    bad[:, 7] = 0
    with refused(match="^each non-zero segment id must be one contiguous run, got id 1"):
        debug.checked(getattr(attention, operation))(
            operands.query, *arrays, config=PLAIN.config, segment_ids=bad
        )


def test_checked_operations_refuse_bad_positions(operands):
    bad = PLAIN.query_positions.copy()
    bad[1, 3] = PLAIN.num_keys
    attend = debug.checked(attention.window_attention)
    with refused(match=r"^query_positions must lie in \[-1, 61\), got values from 0 to 61"):
        attend(operands.query, operands.key_win, operands.value_win, config=PLAIN.config, query_positions=bad)


def test_checked_operations_are_checked_for_shapes_and_kinds_first():
    """A wrong rank gives the operation's clear error, not an error from within the checks."""
    attend, keys = debug.checked(attention.window_attention), jnp.zeros((1, 3, 1, 4))
    with pytest.raises(ValueError, match=r"^query must have 4 axes"):
        attend(jnp.zeros(3), keys, keys, config=OVERLAPPING)
    with pytest.raises(TypeError, match=r"^query_positions must be an array, got list"):
        attend(keys, keys, keys, config=OVERLAPPING, query_positions=[[0, 1, 2]])


def test_checked_operations_are_checked_before_they_run():
    """Values out of range may make an operation run long, or fail with another error."""
    ran = []

    def operation(query, key_win, value_win, *, config, query_positions):
        if not isinstance(query + 0, jax.core.Tracer):  # while tracing, every result is a Tracer
            ran.append(query_positions.tolist())
        return query

    keys = jnp.zeros((1, 3, 1, 4))
    attend = functools.partial(debug.checked(operation), keys, keys, keys, config=OVERLAPPING)
    with refused(match="^query_positions must lie in"):
        attend(query_positions=jnp.asarray([[0, 1, 3]]))
    attend(query_positions=jnp.asarray([[0, 1, 2]]))

    assert ran == [[[0, 1, 2]]]


def test_checks_inside_jit_are_an_error_to_throw(operands):
    attend = functools.partial(debug.checked(attention.selected_attention), config=PLAIN.config)
    attend = jax.jit(checkify.checkify(attend))
    arrays = (operands.query, operands.key_slc, operands.value_slc)
    blocks = by_brute_force("plain")["blocks"].astype(np.int32)

    error, (out, _) = attend(*arrays, blocks)
    error.throw()
    assert np.abs(out - by_brute_force("plain")["out_slc"]).max() < 1e-5
    blocks[0, 0, 0] = [0, 1, -1, -1]
    error, _ = attend(*arrays, blocks)
    with refused(match="^selected blocks must start at or before their query, got 1 "):
        error.throw()


def test_checks_of_packed_rows_pass_on_our_own_selections():
    case = PACKED_ROWS

    @jax.jit
    @checkify.checkify
    def check(blocks, query_positions, segment_ids):
        debug.check_segment_ids(segment_ids)
        where = dict(query_positions=query_positions, segment_ids=segment_ids)
        debug.check_block_indices(blocks, config=case.config, **where)

    blocks = by_brute_force(case.name)["blocks"].astype(np.int32)
    error, _ = check(blocks, case.query_positions, case.segment_ids)
    assert error.get() is None


def test_the_gated_sum_has_nothing_to_check():
    branch, gates = np.ones((1, 3, 2, 4), np.float32), np.ones((1, 3, 2, 3), np.float32)

    error, out = checkify.checkify(debug.checked(attention.gated_sum))(branch, branch, branch, gates)

    assert error.get() is None
    np.testing.assert_array_equal(out, 3 * branch)
