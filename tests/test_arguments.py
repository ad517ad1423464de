"""Operations refuse wrong shapes, dtypes and kinds of objects with one clear error each, while tracing.

`test_bad_calls` gives every argument of every operation a value of another type, dtype, rank or size. Here is
what several arguments make wrong together, and what the errors say.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import refused

from nsa_jax import arguments, attention
from nsa_jax.config import NSAConfig
from nsa_jax.layout import Run, Runs

CONFIG = NSAConfig()
TRACED = jax.ShapeDtypeStruct
B, T, S, N, K, H, V = 2, 70, 70, 4, 2, 6, 5
C = (S - 32) // 16 + 1
SHAPES = {
    "query": (B, T, N, H),
    "key_cmp": (B, C, K, H),
    "value_cmp": (B, C, K, V),
    "key_slc": (B, S, K, H),
    "value_slc": (B, S, K, V),
    "key_win": (B, S, K, H),
    "value_win": (B, S, K, V),
    "gates": (B, T, N, 3),
    "block_indices": (B, T, K, 16),
    "query_positions": (B, T),
    "segment_ids": (B, S),
    "lse_cmp": (B, T, N),
    "out_cmp": (B, T, N, V),
    "out_slc": (B, T, N, V),
    "out_win": (B, T, N, V),
}
AXES = {
    "query": "BTNH",
    "key_cmp": "BCKH",
    "value_cmp": "BCKV",
    "key_slc": "BSKH",
    "value_slc": "BSKV",
    "key_win": "BWKH",
    "value_win": "BWKV",
    "gates": "BTN3",
    "block_indices": "BTKR",
    "out_cmp": "BTNV",
    "out_slc": "BTNV",
    "out_win": "BTNV",
}
INDEX_ARRAYS = ("block_indices", "query_positions", "segment_ids")
ARRAYS = {
    "compressed_attention": ("query", "key_cmp", "value_cmp"),
    "select_blocks": ("query", "key_cmp"),
    "selected_attention": ("query", "key_slc", "value_slc", "block_indices"),
    "window_attention": ("query", "key_win", "value_win"),
    "gated_sum": ("out_cmp", "out_slc", "out_win", "gates"),
    "native_sparse_attention": tuple(SHAPES)[:8],
}
ATTENTIONS = tuple(name for name in ARRAYS if name != "gated_sum")
every_operation = pytest.mark.parametrize("operation", ARRAYS)
every_attention = pytest.mark.parametrize("operation", ATTENTIONS)


def array(name, shape=None, dtype=None):
    dtype = dtype or (jnp.int32 if name in INDEX_ARRAYS else jnp.float32)
    return TRACED(SHAPES[name] if shape is None else shape, dtype)


def call(operation, settings=None, **arrays):
    """Traces `operation` on abstract arrays; nothing is computed and no values exist."""
    settings = ({} if operation == "gated_sum" else {"config": CONFIG}) | (settings or {})
    arrays = {name: array(name) for name in ARRAYS[operation]} | arrays
    return jax.eval_shape(functools.partial(getattr(attention, operation), **settings), **arrays)


def refuses(error, rule, operation="window_attention", settings=None, **arrays):
    with refused(error, "^" + rule):
        call(operation, settings, **arrays)


@every_operation
def test_shapes_and_dtypes_of_results(operation):
    attended = (TRACED((B, T, N, V), jnp.float32), TRACED((B, T, N), jnp.float32))
    expected = {
        "select_blocks": TRACED((B, T, K, 16), jnp.int32),
        "gated_sum": attended[0],
        "native_sparse_attention": attended[0],
    }.get(operation, attended)

    assert call(operation) == expected


def test_what_is_told_of_one_argument():
    refuses(ValueError, r"query must have 4 axes \[B, T, N, H\], got shape", query=array("query", (B, N, H)))
    refuses(ValueError, "segment_ids must have 2 axes", segment_ids=array("segment_ids", (S,)))
    refuses(TypeError, "query must be floating point, got int32", query=array("query", dtype="int32"))
    refuses(TypeError, "query must be one of .*'bfloat16'", query=array("query", dtype="float8_e5m2"))
    refuses(TypeError, "segment_ids must be an integer array", segment_ids=array("segment_ids", dtype=bool))
    refuses(TypeError, "key_win must be an array, got list", key_win=[[0.0]])
    refuses(TypeError, "config must be an NSAConfig, got dict", settings=dict(config={}))
    refuses(TypeError, "scale must be a Python number, got str", settings=dict(scale="1"))
    refuses(ValueError, "scale must be finite, got nan", settings=dict(scale=float("nan")))


@pytest.mark.parametrize(
    ("operation", "name", "shape", "rule"),
    [
        ("window_attention", "key_win", (3, S, K, H), r"axis B of key_win must be 2 \(in query\), got shape"),
        ("window_attention", "value_win", (B, S + 1, K, V), "axis W of value_win must be 70 "),
        ("selected_attention", "block_indices", (B, T, K, 15), "block_indices must have num_selected_blocks"),
        ("native_sparse_attention", "block_indices", (B, T, K, 17), "block_indices must have num_"),
        ("gated_sum", "gates", (B, T, N, 4), r"axis 3 of gates must be 3 \(by definition\)"),
        ("selected_attention", "segment_ids", (B, S + 1), "axis S of segment_ids must be 70 "),
        ("window_attention", "segment_ids", (B, S + 1), "the window's keys must cover all S = 71"),
    ],
)
def test_sizes_that_disagree(operation, name, shape, rule):
    refuses(ValueError, rule, operation, **{name: array(name, shape)})


@every_attention
@pytest.mark.parametrize("heads", [0, 1, 3])
def test_query_heads_that_kv_heads_do_not_divide(operation, heads):
    changed = {"query": array("query", (B, T, heads, H))}
    if operation == "native_sparse_attention":
        changed["gates"] = array("gates", (B, T, heads, 3))
    rule = f"the number of query heads must be a multiple of .* KV heads, got N = {heads} and K = 2"
    refuses(ValueError, rule, operation, **changed)


@pytest.mark.parametrize(
    ("operation", "axis"),
    [(o, axis) for o in ATTENTIONS for axis in "BTSWHV" if any(axis in AXES[name] for name in ARRAYS[o])]
    + [("gated_sum", axis) for axis in "BTNV"],
)
def test_empty_axes(operation, axis):
    changed = {
        name: array(name, tuple(0 if x == axis else n for x, n in zip(AXES[name], SHAPES[name], strict=True)))
        for name in ARRAYS[operation]
    }
    refuses(ValueError, f"every axis except C must be non-empty, got {axis} = 0", operation, **changed)


@every_attention
def test_no_kv_heads(operation):
    changed = {
        name: array(name, (*SHAPES[name][:2], 0, SHAPES[name][3]))
        for name in ARRAYS[operation]
        if name.startswith(("key", "value", "block"))
    }
    refuses(ValueError, "the number of query heads must be .*, got N = 4 and K = 0", operation, **changed)


@pytest.mark.parametrize(
    ("operation", "name"),
    [(o, name) for o, names in ARRAYS.items() for name in names if name not in ("gates", "block_indices")],
)
def test_mixed_dtypes(operation, name):
    rule = f"queries, keys and values must have one dtype, got .*{name} bfloat16"
    refuses(ValueError, rule, operation, **{name: array(name, dtype=jnp.bfloat16)})


def test_scale_that_is_traced():
    attend = functools.partial(attention.window_attention, config=CONFIG)
    with refused(TypeError, "^scale must be a Python number, got .*Multiply the queries by an array instead"):
        jax.eval_shape(
            lambda *x: attend(*x[:3], scale=x[3]),
            *map(array, ARRAYS["window_attention"]),
            TRACED((), "float32"),
        )


@pytest.mark.parametrize("scale", [1, 0.5, np.float32(0.5), np.float64(2)], ids=repr)
def test_scale_may_be_any_real_number(scale):
    call("window_attention", dict(scale=scale))


def test_wrong_number_of_compressed_keys():
    changed = {
        "key_cmp": array("key_cmp", (B, C + 1, K, H)),
        "value_cmp": array("value_cmp", (B, C + 1, K, V)),
    }
    rule = "a row of 70 tokens must have 3 compressed keys, got C = 4"
    for operation in ("compressed_attention", "native_sparse_attention"):
        refuses(ValueError, rule, operation, **changed)
    refuses(ValueError, rule, "select_blocks", key_cmp=changed["key_cmp"])
    refuses(ValueError, rule, "compressed_attention", **changed, segment_ids=array("segment_ids"))


def test_fewer_queries_than_tokens_need_positions_where_only_the_compressed_keys_are_known():
    query = array("query", (B, 5, N, H))
    rule = "a row of 5 tokens must have 0 compressed keys, got C = 3.*pass query_positions if only some"
    refuses(ValueError, rule, "compressed_attention", query=query)
    refuses(ValueError, rule, "select_blocks", query=query)
    call("compressed_attention", query=query, query_positions=array("query_positions", (B, 5)))
    call("compressed_attention", query=query, segment_ids=array("segment_ids"))


def test_more_queries_than_keys_need_positions():
    query = array("query", (B, S + 1, N, H))
    rule = "query_positions must be given if there are more queries than keys, got T = 71 and S = 70"
    refuses(ValueError, rule, "window_attention", query=query)
    blocks = array("block_indices", (B, S + 1, K, 16))
    refuses(ValueError, rule, "selected_attention", query=query, block_indices=blocks)
    call("window_attention", query=query, query_positions=array("query_positions", (B, S + 1)))


@pytest.mark.parametrize(
    ("runs", "error", "rule"),
    [
        (Runs((Run(T - 1, 0),)), ValueError, r"the lengths of runs must be .* got \[69\] and T = 70"),
        (Runs((Run(T, 0), Run(0, 0))), ValueError, r"the lengths of runs must be .* got \[70, 0\]"),
        (Runs((Run(T + 1, 0), Run(-1, 0))), ValueError, r"the lengths of runs must be .* got \[71, -1\]"),
        (Runs((Run(float(T), 0),)), ValueError, r"the lengths of runs must be .* got \[70.0\]"),
        (Runs(()), ValueError, r"the lengths of runs must be .* got \[\] and T = 70"),
        (Runs((Run(T, 0.0),)), TypeError, "the first of a run must be an integer or an array, got float"),
        (Runs((Run(T, np.zeros(B)),)), ValueError, "the first of a run must be a scalar .* got float64"),
        (Runs((Run(T, np.zeros(3, int)),)), ValueError, r"the first of a run must be .* shape \(3,\)"),
        (Runs((Run(T, 0),), num_queries=3), TypeError, "num_queries must be an integer or an array, got int"),
        (Runs((Run(T, 0),), num_queries=np.array(3)), ValueError, r"num_queries must be .* shape \(\)"),
        (Runs((Run(T, 0),), num_queries=np.array([T + 1, 0])), ValueError, r"num_queries must .* got .*71"),
    ],
    ids=[
        *("too_few", "empty", "negative", "float_length", "none", "float_first", "float_firsts"),
        *("firsts_of_other_rows", "int_num_queries", "scalar_num_queries", "too_many_num_queries"),
    ],
)
@pytest.mark.parametrize("operation", ["compressed_attention", "window_attention"])
def test_runs_that_make_no_sense(operation, runs, error, rule):
    refuses(error, rule, operation, dict(query_positions=runs))


@pytest.mark.parametrize(
    "runs",
    [
        Runs((Run(T, 0),)),
        Runs((Run(T, 0),), divisor=1),
        Runs((Run(T - 1, np.int64(3)), Run(1, np.array(0, np.int8)))),
        Runs((Run(np.int64(T), 0),), divisor=np.int32(2)),
        Runs((Run(T, np.zeros(B, int)),), divisor=64, num_queries=np.zeros(B, np.uint8)),
    ],
    ids=["default", "divisor_one", "numpy_scalars", "numpy_ints", "one_a_row"],
)
def test_runs_may_be_given_in_many_ways(runs):
    call("window_attention", dict(query_positions=runs))


def test_narrow_ints_of_runs_do_not_overflow():
    """100 + 100 tokens are more than an int8 holds."""
    size, narrow = (B, 200, N, H), np.int8(100)
    runs = Runs((Run(narrow, 0), Run(narrow, np.int8(100))), divisor=np.int8(4), halo=None)

    call("window_attention", dict(query_positions=runs, first_key=-3), query=array("query", size))

    assert runs == Runs((Run(100, 0), Run(100, 100)), divisor=4)
    assert type(runs.runs[0].length) is int


@pytest.mark.parametrize(
    ("first", "error", "rule"),
    [
        (1.0, TypeError, "first_key must be an integer or an array, got float"),
        (False, TypeError, "first_key must be an int, got bool"),
        (np.zeros(3, int), ValueError, r"first_key must be a scalar integer, .* got int64 of shape \(3,\)"),
        (np.zeros(B), ValueError, r"first_key must be a scalar integer, .* got float64 of shape \(2,\)"),
    ],
    ids=["float", "bool", "rows", "floats"],
)  # fmt: skip
def test_first_keys_that_make_no_sense(first, error, rule):
    refuses(error, rule, "window_attention", dict(first_key=first))
    refuses(error, rule, "native_sparse_attention", dict(first_key_win=first))


HALO = CONFIG.window_size


@pytest.mark.parametrize(
    ("halo", "keys", "first", "rule"),
    [
        (HALO - 2, T + HALO - 2, 0, "halo must be an int of at least window_size - 1 = 511, got 510"),
        (5.0, T, 0, "halo must be an int of at least window_size - 1 = 511, got 5.0"),
        (2**31 - T, T, 0, "halo must be at most 2147483577, got 2147483578"),
        (HALO, T + HALO, 3, "first_key must be left out if runs have a halo, got both"),
        (HALO, T, 0, "the window's keys must be 512 tokens and then its own for each of 1 runs, 582 in all"),
    ],
    ids=["short", "float", "long", "first_key", "keys"],
)
def test_halos_that_make_no_sense(halo, keys, first, rule):
    changed = {name: array(name, (B, keys, *SHAPES[name][2:])) for name in ("key_win", "value_win")}
    for operation, name in (("window_attention", "first_key"), ("native_sparse_attention", "first_key_win")):
        options = {"query_positions": Runs((Run(T, 0),), halo=halo), name: first}
        refuses(ValueError, rule, operation, options, **changed)


def test_window_keys_of_another_number_need_their_first():
    changed = {name: array(name, (B, S + 3, *SHAPES[name][2:])) for name in ("key_win", "value_win")}
    rule = "the window's keys must cover all S = 70 tokens unless first_key is given, got W = 73"
    refuses(ValueError, rule, "native_sparse_attention", dict(first_key_win=0), **changed)
    call("native_sparse_attention", dict(first_key_win=-3), **changed)


def test_numpy_arrays_are_welcome():
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(SHAPES[name]).astype(np.float32) for name in ARRAYS["window_attention"]]
    out, _ = jax.eval_shape(
        lambda: attention.window_attention(*arrays, config=CONFIG, segment_ids=np.ones((B, S), int))
    )

    assert out.shape == (B, T, N, V)


def test_narrow_block_indices_are_numbers_like_others():
    """An int8 block index times the block size does not fit int8: 11 * 16 = 176."""
    config = NSAConfig(
        compression_block_size=8, compression_stride=4, selection_block_size=16, num_selected_blocks=2,
        window_size=16, num_local_blocks=1,
    )  # fmt: skip
    random = np.random.default_rng(0)
    shapes = [(1, 190, 2, 8), *[(1, 190, 1, 8)] * 4, (1, 190, 2, 2)]  # without a compressed branch
    operands = [random.standard_normal(shape).astype(np.float32) for shape in shapes]
    own = np.arange(190) // 16
    blocks = np.stack([np.maximum(own - 1, 0), np.where(own > 0, own, -1)], -1)[None, :, None]

    @jax.jit
    def run(blocks):
        attend = functools.partial(attention.native_sparse_attention, config=config, block_indices=blocks)
        out, pull_back = jax.vjp(lambda query, *rest: attend(query, None, None, *rest), *operands)
        return out, *pull_back(out)

    for narrow, wide in zip(run(blocks.astype(np.int8)), run(blocks.astype(np.int32)), strict=True):
        assert np.array_equal(narrow, wide)


def test_a_first_key_of_few_bits_does_not_wrap():
    query, key = jnp.ones((1, 4, 2, 8)), jnp.ones((1, 100, 1, 8))
    keywords = dict(config=NSAConfig(), scale=None, query_positions=None, segment_ids=None)

    def positions(first_key):
        given = dict(query=query, key_win=key, value_win=key)
        call = arguments.check(attention.window_attention, given, first_key_win=first_key, **keywords)
        return np.asarray(call.placement.position)

    np.testing.assert_array_equal(positions(200), [[296, 297, 298, 299]])
    np.testing.assert_array_equal(positions(jnp.uint8(200)), positions(200))
    np.testing.assert_array_equal(positions(np.int8(100)), positions(100))
