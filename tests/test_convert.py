"""Index arrays converted from the formats of other code, and the inputs that are refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import refused

from nsa_jax.config import NSAConfig
from nsa_jax.convert import block_indices_from_ranges, segment_ids_from_cu_seqlens

CONFIG = NSAConfig(selection_block_size=16, compression_block_size=16, num_selected_blocks=4)
convert = functools.partial(block_indices_from_ranges, config=CONFIG)


@pytest.mark.parametrize(
    ("cu_seqlens", "length", "expected"),
    [
        ([0, 3, 5], 5, [1, 1, 1, 2, 2]),
        ([0, 3, 5], 7, [1, 1, 1, 2, 2, 0, 0]),
        ([0, 2, 2, 2, 3], 4, [1, 1, 4, 0]),
        ([0, 0, 2], 2, [2, 2]),
        ([0], 3, [0, 0, 0]),
        ([0, 0], 2, [0, 0]),
        ([0, 1], 1, [1]),
    ],
    ids=["full", "padded", "empty_between", "empty_first", "no_sequence", "only_empty", "one_token"],
)
@pytest.mark.parametrize("kind", [np.int64, np.uint16, jnp.int32], ids=["int64", "uint16", "jax"])
def test_cumulative_lengths_become_runs(cu_seqlens, length, expected, kind):
    array = jnp.asarray(cu_seqlens, kind) if kind is jnp.int32 else np.asarray(cu_seqlens, kind)
    ids = segment_ids_from_cu_seqlens(array, length)

    assert ids.dtype == jnp.int32
    assert ids.tolist() == [expected]


@pytest.mark.parametrize(
    ("cu_seqlens", "rule"),
    [
        ([1, 3], r"cu_seqlens must start at 0 and never decrease, got \[1, 3\]"),
        ([0, 4, 3], r"cu_seqlens must start at 0 and never decrease, got \[0, 4, 3\]"),
        ([0, 4, 9], "cu_seqlens must end within the row, got 9 > 8"),
        ([[0, 4], [0, 9]], "cu_seqlens must end within the row, got 9 > 8 in row 1"),
        ([[0, 4], [2, 4]], r"cu_seqlens must start at 0 .*, got \[2, 4\] in row 1"),
    ],
    ids=["late_start", "decreasing", "too_long", "second_row_too_long", "second_row_late"],
)
def test_bad_cumulative_lengths_are_one_clear_error(cu_seqlens, rule):
    with refused(ValueError, "^" + rule):
        segment_ids_from_cu_seqlens(np.asarray(cu_seqlens), 8)


ROWS = [[0, 3, 5, 5], [0, 0, 2, 7], [0, 0, 0, 0], [0, 8, 8, 8]]


def test_rows_of_a_batch_are_converted_each_on_its_own():
    ids = segment_ids_from_cu_seqlens(np.array(ROWS), 8)

    assert ids.tolist() == [segment_ids_from_cu_seqlens(np.array(row), 8)[0].tolist() for row in ROWS]
    assert ids.tolist()[1] == [2, 2, 3, 3, 3, 3, 3, 0]
    assert segment_ids_from_cu_seqlens(np.zeros((0, 3), int), 8).shape == (0, 8)


@pytest.mark.parametrize("kind", ["int32", "uint8"])
@pytest.mark.parametrize("rows", [ROWS, ROWS[1], [0]], ids=["batch", "row", "no sequence"])
def test_compiled_conversion_gives_the_same(rows, kind):
    rows = np.array(rows, kind)
    compiled = jax.jit(segment_ids_from_cu_seqlens, static_argnums=1)

    for length in (8, 1 + rows.max()):
        ids = compiled(rows, int(length))
        assert ids.dtype == jnp.int32
        np.testing.assert_array_equal(ids, segment_ids_from_cu_seqlens(rows, int(length)))
    alone = jax.vmap(lambda row: segment_ids_from_cu_seqlens(row, 8))(jnp.asarray(ROWS))
    np.testing.assert_array_equal(alone[:, 0], segment_ids_from_cu_seqlens(np.array(ROWS), 8))


def test_what_a_compiled_conversion_refuses():
    for arguments, error, rule in (
        ((jnp.zeros((1, 1, 2), int), 8), ValueError, r"cu_seqlens must be \[n \+ 1\] or"),
        ((jnp.zeros(2), 8), TypeError, "cu_seqlens must be an integer array, got float32"),
    ):
        with refused(error, rule):
            jax.jit(segment_ids_from_cu_seqlens, static_argnums=1)(*arguments)
    with refused(TypeError, r"length must be a Python int, got .*Tracer\. Make it a static"):
        jax.jit(segment_ids_from_cu_seqlens)(jnp.zeros(2, int), 8)


def test_decreasing_unsigned_lengths_are_refused():
    """Differences of unsigned integers wrap around, so they never show a decrease as a negative number."""
    with refused(ValueError, "never decrease"):
        segment_ids_from_cu_seqlens(np.array([0, 4, 3], np.uint32), 8)


def test_ranges_are_refused_where_they_are_traced():
    with refused(TypeError, r"^ranges must be concrete, got a traced array\. Convert it outside jit"):
        jax.jit(lambda x: convert(x, layout="BTKn2"))(jnp.zeros((1, 1, 1, 1, 2), int))


def as_ranges(blocks, position, merge):
    """[start, end) of ascending blocks; adjacent blocks share a range if `merge`."""
    ranges = []
    for block in blocks:
        start, end = 16 * block, min(16 * (block + 1), position + 1)
        if merge and ranges and ranges[-1][1] == start:
            ranges[-1][1] = end
        else:
            ranges.append([start, end])
    return ranges


@pytest.mark.parametrize("merge", [False, True], ids=["a_range_a_block", "ranges_that_span_blocks"])
def test_random_selections_survive_the_way_there_and_back(merge):
    rng = np.random.default_rng(0)
    shape = (2, 9, 3)
    positions = rng.integers(0, 200, shape[:2])
    expected = np.full((*shape, 4), -1)
    ranges = np.zeros((*shape, 6, 2), int)
    for b, t, k in np.ndindex(shape):
        candidates = positions[b, t] // 16 + 1
        blocks = np.sort(rng.choice(candidates, min(candidates, int(rng.integers(0, 5))), replace=False))
        expected[b, t, k, : len(blocks)] = blocks
        spans = as_ranges(blocks, positions[b, t], merge)
        order = rng.permutation(6)[: len(spans)]  # in any order, with empty ranges between
        ranges[b, t, k, order] = np.reshape(spans, (-1, 2))
    found = convert(ranges, layout="BTKn2", query_positions=positions)

    assert found.dtype == jnp.int32
    assert found.tolist() == expected.tolist()


def test_layouts_name_the_same_ranges():
    ranges = np.zeros((1, 40, 2, 2, 2), int)
    ranges[0, 39] = [[[0, 16], [32, 40]], [[16, 40], [5, 5]]]
    expected = np.full((1, 40, 2, 4), -1)
    expected[0, 39] = [[0, 2, -1, -1], [1, 2, -1, -1]]

    assert convert(ranges, layout="BTKn2").tolist() == expected.tolist()
    assert convert(ranges, layout="BTKn2", num_kv_heads=2).tolist() == expected.tolist()
    assert convert(ranges[0], layout="TKn2").tolist() == expected.tolist()
    assert (
        convert(ranges[:, :, 0], layout="BTn2", num_kv_heads=3).tolist() == expected[:, :, [0, 0, 0]].tolist()
    )


@pytest.mark.parametrize("count", [0, 1, 9])
def test_empty_ranges_select_nothing(count):
    anywhere = np.full((1, 2, 1, count, 2), 77)

    assert convert(anywhere, layout="BTKn2").tolist() == [[[[-1] * 4], [[-1] * 4]]]


@pytest.mark.parametrize(
    ("ranges", "rule"),
    [
        ([[-16, 0]], r"must not start before token 0, got \[-16, 0\)"),
        ([[32, 16]], r"must not be reversed, got \[32, 16\)"),
        ([[48, 64]], r"must not reach into the future, got \[48, 64\)"),
        ([[0, 16], [64, 80]], r"must not reach into the future, got \[64, 80\) at .*, KV head 1, range 1"),
        ([[8, 16]], r"must start at a multiple of 16, got \[8, 16\)"),
        ([[0, 20]], r"must end at a multiple of 16 or at t \+ 1, got \[0, 20\)"),
        ([[0, 32], [16, 32]], r"must not overlap, got \[0, 32\)"),
        ([[16, 32], [16, 32]], r"must not overlap"),
    ],
    ids=["before_the_first", "reversed", "future", "future_block", "start", "end", "overlap", "twice"],
)
def test_bad_ranges_are_one_clear_error(ranges, rule):
    array = np.zeros((2, 3, 2, len(ranges), 2), int)
    array[1, 2, 1] = ranges
    positions = np.full((2, 3), 50)
    with refused(ValueError, "^the ranges of a query " + rule) as error:
        convert(array, layout="BTKn2", query_positions=positions)

    assert "at row 1, query 2, KV head 1" in str(error.value)


def test_too_many_blocks_are_refused():
    array = np.array([0, 80]).reshape(1, 1, 1, 1, 2)
    with refused(ValueError, r"must cover at most 4 blocks, got \[0, 80\)"):
        convert(array, layout="BTKn2", query_positions=np.array([[79]]))


def test_padding_queries_may_only_select_nothing():
    array = np.array([[[[[0, 1]]], [[[0, 0]]]]])

    with refused(ValueError, "must not reach into the future"):
        convert(array, layout="BTKn2", query_positions=np.array([[-1, 0]]))
    assert convert(array, layout="BTKn2", query_positions=np.array([[0, -1]])).tolist()[0] == [
        [[0, -1, -1, -1]],
        [[-1, -1, -1, -1]],
    ]


@pytest.mark.parametrize(
    ("shape", "arguments", "rule"),
    [
        ((2, 1, 1, 2), dict(layout="BTKn2"), r"ranges must have the axes BTKn2, got shape \(2, 1, 1, 2\)"),
        ((1, 2, 1, 2), dict(layout="BTn2"), "the layout BTn2 needs num_kv_heads, got None"),
        (
            (1, 2, 1, 1, 2),
            dict(layout="BTKn2", num_kv_heads=2),
            "ranges must have num_kv_heads = 2 KV heads, got 1",
        ),
    ],
    ids=["axes", "no_kv_heads", "kv_heads"],
)
def test_bad_layouts_are_one_clear_error(shape, arguments, rule):
    with refused(ValueError, "^" + rule):
        convert(np.zeros(shape, int), **arguments)


@pytest.mark.parametrize("shape", [(0, 2, 1, 3, 2), (1, 0, 1, 3, 2)], ids=["rows", "queries"])
def test_no_queries_have_no_blocks(shape):
    assert convert(np.zeros(shape, int), layout="BTKn2").shape == (*shape[:3], CONFIG.num_selected_blocks)


def test_fewer_ranges_than_slots_and_more_slots_than_ranges():
    config = NSAConfig(num_selected_blocks=5)
    ranges = np.array([[[[[0, 128]]]]])
    found = block_indices_from_ranges(
        ranges, layout="BTKn2", config=config, query_positions=np.array([[127]])
    )

    assert found.tolist() == [[[[0, 1, -1, -1, -1]]]]
