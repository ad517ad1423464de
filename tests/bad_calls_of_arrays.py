"""Good calls of the operations on arrays, and of what prepares, chooses and checks them."""

import dataclasses
import math

import jax
import numpy as np
from bad_calls import (
    BLOCKS,
    BOUND_VALUE,
    CONFIG,
    FIRST_KEY,
    GATES,
    KEY,
    KEY_CMP,
    OPTIONS,
    OUT,
    PLACES,
    QUERY,
    VALUE,
    VALUE_CMP,
    B,
    Call,
    H,
    K,
    N,
    T,
    V,
    floats,
    ints,
)
from bad_values import Counts, Floats, FreeName, Function, Given, Integers, Name, Of, Whole
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import nsa_jax
from nsa_jax import NSAConfig, Run, Runs, cache, debug, parallel


def window_by_runs(length, first, divisor, num_queries, halo):
    runs = Runs((Run(length, first), Run(T - 4, 4)), divisor, num_queries, halo)
    return nsa_jax.window_attention(*(x for x, _ in (QUERY, KEY, VALUE)), config=CONFIG, query_positions=runs)


OPERATIONS = {
    "compressed_attention": Call(
        nsa_jax.compressed_attention,
        dict(query=QUERY, key_cmp=KEY_CMP, value_cmp=VALUE_CMP) | OPTIONS | PLACES,
    ),
    "select_blocks": Call(
        nsa_jax.select_blocks,
        dict(query=QUERY, key_cmp=KEY_CMP, lse_cmp=(floats(B, T, N), Floats(True, "BTN"))) | OPTIONS | PLACES,
    ),
    "selected_attention": Call(
        nsa_jax.selected_attention,
        dict(query=QUERY, key_slc=KEY, value_slc=VALUE, block_indices=BLOCKS) | OPTIONS | PLACES,
    ),
    "window_attention": Call(
        nsa_jax.window_attention,
        dict(query=QUERY, key_win=KEY, value_win=VALUE, first_key=FIRST_KEY) | OPTIONS | PLACES,
    ),
    "gated_sum": Call(
        nsa_jax.gated_sum,
        dict(out_cmp=OUT, out_slc=OUT, out_win=OUT, gates=GATES, implementation=("xla", Name(optional=True))),
    ),
    "native_sparse_attention": Call(
        nsa_jax.native_sparse_attention,
        dict(
            query=QUERY,
            key_cmp=KEY_CMP,
            value_cmp=(VALUE_CMP[0], Floats(axes="BCKV")),
            key_slc=KEY,
            value_slc=BOUND_VALUE,
            key_win=KEY,
            value_win=BOUND_VALUE,
            gates=GATES,
            first_key_win=FIRST_KEY,
            block_indices=(BLOCKS[0], Integers(True, "BTKR")),
        )
        | OPTIONS
        | PLACES,
    ),
    "window_attention by Runs": Call(
        window_by_runs,
        dict(
            length=(4, Whole()),
            first=(0, Whole(low=None)),
            divisor=(1, Whole()),
            num_queries=(np.array([3, 10], np.int32), Counts(True, "B", low=0, high=T)),
            halo=(None, Whole(True, CONFIG.window_size - 1)),
        ),
    ),
    "Runs": Call(
        lambda runs: debug.checked(nsa_jax.window_attention)(
            QUERY[0], KEY[0], VALUE[0], config=CONFIG, query_positions=Runs(runs)
        ),
        dict(runs=((Run(T, 0),), Of())),
    ),
}

NO_ARRAYS = {"list": [[1, 2, 3, 4]], "str": "a", "int": 3, "nan": math.nan}
ARRAY = Given(refused=NO_ARRAYS | {"rank": np.ones(8), "length": np.ones((2, 7))})
PLATFORM = dict(config=(CONFIG, Of(optional=True)), platform=("cuda", Name(optional=True)))
RANGES = np.zeros((B, T, K, 4, 2), np.int32)
RANGE_VALUES = {
    "float": RANGES * 1.0,
    "bool": RANGES.astype(bool),
    "str": "a",
    "ragged": [[1, 2], [3]],
    "rank": RANGES[0],
    "three ends": RANGES[..., [0, 1, 1]],
    "negative": RANGES - np.array([4, 0]),
    "huge": RANGES + np.array([0, 2**40]),
    "nan": math.nan,
}
POSITION_VALUES = {
    "float": np.zeros((B, T)),
    "rank": np.zeros(T, int),
    "length": np.zeros((B, T + 1), int),
    "below -1": np.full((B, T), -5),
    "huge": np.full((B, T), 2**40),
    "str": "a",
    "int": 3,
}
CU_SEQLENS = np.array([[0, 4, T]] * B, np.int32)
CU_VALUES = {
    "float": CU_SEQLENS * 1.0,
    "bool": CU_SEQLENS > 0,
    "str": "a",
    "nan": math.nan,
    "empty": CU_SEQLENS[:, :0],
    "rank": CU_SEQLENS[None],
    "huge": CU_SEQLENS + np.int64(2**40),
    "None": None,
}


def in_shard_map(operation):
    """Calls a context-parallel operation on the first of two devices."""
    mesh = AbstractMesh((2,), ("context",), (AxisType.Auto,))

    def call(**given):
        # Arrays of floats are given to the shard_map; the rest is closed over.
        spread = {
            name: x for name, x in given.items() if getattr(x, "dtype", None) == np.float32 and x.ndim > 2
        }
        others = {name: x for name, x in given.items() if name not in spread}
        spec = PartitionSpec(None, None)
        run = jax.shard_map(
            lambda arrays: operation(**arrays, **others),
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
            axis_names={"context"},
            check_vma=False,
        )
        return run(spread)

    return call


TOKENS = 8  # of a device: two chunks
TOKEN_KEY = (floats(B, TOKENS, K, H), Floats(axes="BTKH"))
TOKEN_VALUE = (floats(B, TOKENS, K, V), Floats(axes="BTKV"))
CONTEXT = dict(
    query=(floats(B, TOKENS, N, H), Floats(axes="BTNH")),
    key_cmp=TOKEN_KEY,
    value_cmp=TOKEN_VALUE,
    compress=(cache.Compression(), Function()),
    axis=("context", FreeName()),
    order=("zigzag", Name()),
    positions=(ints(B, TOKENS), Integers(True, "BT")),
    segment_ids=(np.ones((B, TOKENS), np.int32), Integers(True, "BT")),
)
FREE_TOKEN_VALUE = (TOKEN_VALUE[0], Floats(axes="BTKV", free="V"))

ARRANGEMENTS = {
    "choose": Call(
        lambda operation, operand, **given: nsa_jax.choose(operation, operand, **given),
        dict(
            operation=("window_attention", Name()),
            operand=(
                QUERY[0],
                Given(refused={"str": "a", "int": 3, "list": [1.0], "None": None, "rank": QUERY[0][0]}),
            ),
            **PLATFORM,
            implementation=(None, Name(optional=True)),
        ),
    ),
    "unsupported_reason": Call(
        nsa_jax.unsupported_reason,
        dict(operation=("window_attention", Name()), implementation=("xla", Name()), **PLATFORM),
    ),
    "use_implementation": Call(
        lambda implementation: type(nsa_jax.use_implementation(implementation)).__name__,
        dict(implementation=("xla", Name(optional=True))),
    ),
    "NSAConfig": Call(
        NSAConfig,
        {
            name: (value, Whole(low=0 if "initial" in name else 1))
            for name, value in dataclasses.asdict(CONFIG).items()
        },
    ),
    "block_indices_from_ranges": Call(
        nsa_jax.block_indices_from_ranges,
        dict(
            ranges=(RANGES, Given(refused=RANGE_VALUES)),
            layout=("BTKn2", Name()),
            config=(CONFIG, Of()),
            query_positions=(PLACES["query_positions"][0], Given(True, POSITION_VALUES)),
            num_kv_heads=(K, Whole(True)),
        ),
    ),
    "segment_ids_from_cu_seqlens": Call(
        nsa_jax.segment_ids_from_cu_seqlens,
        dict(cu_seqlens=(CU_SEQLENS, Given(refused=CU_VALUES)), length=(T, Whole(low=0))),
    ),
    "check_segment_ids": Call(
        debug.check_segment_ids, dict(segment_ids=(PLACES["segment_ids"][0], Integers(axes="")))
    ),
    "check_cu_seqlens": Call(
        debug.check_cu_seqlens,
        dict(
            cu_seqlens=(CU_SEQLENS, Given(refused=CU_VALUES | {"list": [0, 4], "int": 3})),
            length=(T, Whole(low=0)),
        ),
    ),
    "check_query_positions": Call(
        debug.check_query_positions,
        dict(query_positions=(ints(B, T), Integers(axes="")), num_keys=(T, Whole(low=0))),
    ),
    "check_block_indices": Call(
        debug.check_block_indices,
        dict(
            block_indices=(BLOCKS[0], Integers(axes="BTKR", free="KR")),
            config=(CONFIG, Of()),
            query_positions=(ints(B, T), Integers(axes="BT")),
            segment_ids=(PLACES["segment_ids"][0], Integers(True, "BS", "S")),
        ),
    ),
    "check_runs": Call(
        debug.check_runs, dict(runs=(Runs((Run(T, np.zeros(B, np.int32)),)), Of()), batch=(B, Whole(low=0)))
    ),
    "checked": Call(
        lambda operation: debug.checked(operation).__name__, dict(operation=(nsa_jax.gated_sum, Function()))
    ),
    "to_zigzag": Call(
        parallel.to_zigzag,
        dict(array=(ints(B, 8), ARRAY), num_devices=(2, Whole()), axis=(1, Whole(low=-2))),
    ),
    "from_zigzag": Call(
        parallel.from_zigzag,
        dict(array=(ints(B, 8), ARRAY), num_devices=(2, Whole()), axis=(1, Whole(low=-2))),
    ),
    "token_indices": Call(
        parallel.token_indices,
        dict(length=(8, Whole(low=0)), num_devices=(2, Whole()), order=("zigzag", Name())),
    ),
    "padded_length": Call(
        parallel.padded_length,
        dict(
            length=(9, Whole(low=0)),
            num_devices=(2, Whole()),
            config=(CONFIG, Of()),
            order=("zigzag", Name()),
        ),
    ),
    "context_attention": Call(
        in_shard_map(parallel.context_attention),
        CONTEXT
        | dict(
            key_slc=TOKEN_KEY,
            value_slc=TOKEN_VALUE,
            key_win=TOKEN_KEY,
            value_win=TOKEN_VALUE,
            gates=(floats(B, TOKENS, N, 3), Floats(axes="BTN3")),
            block_indices=(np.tile(BLOCKS[0][:, :1], (1, TOKENS, 1, 1)), Integers(True, "BTKR")),
        )
        | OPTIONS,
    ),
    "context_selection": Call(
        in_shard_map(parallel.context_selection), CONTEXT | dict(value_cmp=FREE_TOKEN_VALUE) | OPTIONS
    ),
}
