"""Every public callable, given a wrong value for each of its arguments: it refuses it in the form of the house.

A call is its good arguments and the kind of each of them (`bad_values`). From these, a seeded generator makes
calls with one wrong argument: of another type, dtype, rank or length, negative, NaN, huge, None. Each must
raise a `TypeError`, `ValueError` or `NotImplementedError` in the form of the house, before anything runs. What a
kind takes as the same value, such as an int of NumPy, must give a result of the same form.

Calls are traced with arrays of NumPy, so that their values are known and nothing is computed.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bad_values import (
    NO_FLOAT,
    NO_INT,
    Counts,
    DType,
    Flag,
    Flags,
    Floats,
    FreeName,
    Function,
    Given,
    Integers,
    Kind,
    Lengths,
    Name,
    Of,
    Real,
    Scale,
    Sharding,
    Whole,
)
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from messages import has_form

import nsa_jax
from nsa_jax import NSAConfig, Run, Runs, cache, debug, generate, model, nn, parallel

CONFIG = NSAConfig(
    compression_block_size=4,
    compression_stride=2,
    selection_block_size=4,
    num_selected_blocks=4,
    window_size=5,
)
B, T, N, K, H, V, D, C, VOCAB, ROOM = 2, 10, 4, 2, 4, 3, 12, 4, 11, 12
RNG = np.random.default_rng(0)
KEYS = jax.random.split(jax.random.key(0), B)
MODEL = dict(vocab_size=VOCAB, num_layers=1, model_dim=D, num_heads=N, num_kv_heads=K, nsa=CONFIG)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def ints(*shape: int, below: int = 3) -> np.ndarray:
    return RNG.integers(0, below, shape).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Call:
    """A good call: a function, and the value and the kind of each argument. A value may hold `**` of others."""

    function: Callable[..., Any]
    arguments: dict[str, tuple[Any, Kind]]

    def outcome(self, name: str, value: Any) -> Any:
        """What the call gives if an argument has another value, with shapes in the place of arrays."""
        given = {key: argument for key, (argument, _) in self.arguments.items()} | {name: value}
        found = []
        jax.eval_shape(lambda: found.append(self.function(**given)))
        return jax.tree.map(_shape, found)

    def wrong(self, seed: int) -> Iterator[tuple[str, str, Any]]:
        rng = np.random.default_rng(seed)
        for name, (value, kind) in self.arguments.items():
            for label, bad in kind.wrong(value, rng).items():
                yield name, label, bad

    def same(self) -> Iterator[tuple[str, str, Any]]:
        for name, (value, kind) in self.arguments.items():
            for label, other in kind.same(value).items():
                yield name, label, other


def _shape(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array | np.ndarray) else x


def abstract(make: Callable[..., nnx.Module], **options: Any) -> Callable[[], nnx.Module]:
    """A function that gives a module whose parameters are traced."""
    graph, state = nnx.split(nnx.eval_shape(lambda: make(**options, rngs=nnx.Rngs(0))))
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state)
    return lambda: nnx.merge(graph, zeros)


def method(module: Callable[[], nnx.Module], name: str) -> Callable[..., Any]:
    return lambda **given: getattr(module(), name)(**given)


def made(make: Callable[..., nnx.Module]) -> Callable[..., Any]:
    """Makes a module, and gives its parameters."""

    def call(rngs, **given):
        def parameters():
            return nnx.state(
                make(rngs=nnx.Rngs(0) if isinstance(rngs, nnx.Rngs) else rngs, **given), nnx.Param
            )

        return nnx.eval_shape(parameters)

    return call


def zeros_of(held: Any) -> Any:
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), held)


def fields(of: type, prefix: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that gets a tuple by its fields."""

    def call(**given):
        own = {name: given.pop(f"{prefix}.{name}") for name in of._fields}
        return function(**{prefix: of(**own)}, **given)

    return call


LAYER_SIZES = dict(num_heads=N, in_features=D, num_kv_heads=K, head_dim=H)
LAYER = abstract(nn.NSAAttention, **LAYER_SIZES, value_dim=V, config=CONFIG, implementation="xla")
DENSE = abstract(nn.DenseAttention, **LAYER_SIZES, implementation="xla")
TRANSFORMER = abstract(model.Transformer, config=model.TransformerConfig(**MODEL), implementation="xla")
HELD = zeros_of(
    jax.eval_shape(
        lambda: cache.init_cache(
            B, ROOM, num_kv_heads=K, key_dim=H, value_dim=V, config=CONFIG, dtype=jnp.float32
        )
    )
)
DENSE_OF_LAYER = zeros_of(jax.eval_shape(lambda: DENSE().init_cache(B, ROOM)))
MODEL_HELD = zeros_of(jax.eval_shape(lambda: TRANSFORMER().init_cache(B, ROOM)))
DENSE_HELD = zeros_of(
    jax.eval_shape(
        lambda: cache.init_dense_cache(B, ROOM, num_kv_heads=K, key_dim=H, value_dim=V, dtype=jnp.float32)
    )
)

OPTIONS = dict(
    config=(CONFIG, Of()), scale=(None, Scale(optional=True)), implementation=("xla", Name(optional=True))
)
PLACES = dict(
    query_positions=(np.tile(np.arange(T, dtype=np.int32), (B, 1)), Integers(True, "BT")),
    segment_ids=(np.ones((B, T), np.int32), Integers(True, "BS")),
)
READS = dict(return_reads=(False, Flag()))
QUERY = (floats(B, T, N, H), Floats(axes="BTNH"))
KEY, VALUE = (floats(B, T, K, H), Floats(axes="BSKH")), (floats(B, T, K, V), Floats(axes="BSKV", free="V"))
KEY_CMP, VALUE_CMP = (
    (floats(B, C, K, H), Floats(axes="BCKH")),
    (floats(B, C, K, V), Floats(axes="BCKV", free="V")),
)
BOUND_VALUE = (VALUE[0], Floats(axes="BSKV"))
BLOCKS = (np.tile(np.array([0, -1, -1, -1], np.int32), (B, T, K, 1)), Integers(axes="BTKR"))
GATES = (floats(B, T, N, 3), Floats(axes="BTN3"))
OUT = (floats(B, T, N, V), Floats(axes="BTNV"))
FIRST_KEY = (0, Whole(low=None))


def window_by_runs(length, first, divisor, num_queries, halo):
    runs = Runs((Run(length, first), Run(T - 4, 4)), divisor, num_queries, halo)
    return nsa_jax.window_attention(*(x for x, _ in (QUERY, KEY, VALUE)), config=CONFIG, query_positions=runs)


OPERATIONS = {
    "compressed_attention": Call(
        nsa_jax.compressed_attention,
        dict(query=QUERY, key_cmp=KEY_CMP, value_cmp=VALUE_CMP) | OPTIONS | PLACES | READS,
    ),
    "select_blocks": Call(
        nsa_jax.select_blocks,
        dict(query=QUERY, key_cmp=KEY_CMP, lse_cmp=(floats(B, T, N), Floats(True, "BTN"))) | OPTIONS | PLACES,
    ),
    "selected_attention": Call(
        nsa_jax.selected_attention,
        dict(query=QUERY, key_slc=KEY, value_slc=VALUE, block_indices=BLOCKS) | OPTIONS | PLACES | READS,
    ),
    "window_attention": Call(
        nsa_jax.window_attention,
        dict(query=QUERY, key_win=KEY, value_win=VALUE, first_key=FIRST_KEY) | OPTIONS | PLACES | READS,
    ),
    "gated_sum": Call(
        nsa_jax.gated_sum,
        dict(out_cmp=OUT, out_slc=OUT, out_win=OUT, gates=GATES, implementation=("xla", Name(optional=True))),
    ),
    "native_sparse_attention": Call(
        nsa_jax.native_sparse_attention,
        dict(
            query=QUERY, key_cmp=KEY_CMP, value_cmp=(VALUE_CMP[0], Floats(axes="BCKV")), key_slc=KEY,
            value_slc=BOUND_VALUE, key_win=KEY, value_win=BOUND_VALUE, gates=GATES, first_key_win=FIRST_KEY,
            block_indices=(BLOCKS[0], Integers(True, "BTKR")),
        )
        | OPTIONS
        | PLACES,
    ),
    "window_attention by Runs": Call(
        window_by_runs,
        dict(
            length=(4, Whole()), first=(0, Whole(low=None)), divisor=(1, Whole()),
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
}  # fmt: skip

PLATFORM = dict(
    config=(CONFIG, Of(optional=True)), platform=("cuda", Name(optional=True)), return_reads=(False, Flag())
)
RANGES = np.zeros((B, T, K, 4, 2), np.int32)
RANGE_VALUES = {
    "float": RANGES * 1.0, "bool": RANGES.astype(bool), "str": "a", "ragged": [[1, 2], [3]], "rank": RANGES[0],
    "three ends": RANGES[..., [0, 1, 1]], "negative": RANGES - np.array([4, 0]), "huge": RANGES + np.array([0, 2**40]), "nan": math.nan,
}  # fmt: skip
POSITION_VALUES = {
    "float": np.zeros((B, T)), "rank": np.zeros(T, int), "length": np.zeros((B, T + 1), int), "below -1": np.full((B, T), -5),
    "huge": np.full((B, T), 2**40), "str": "a", "int": 3,
}  # fmt: skip
CU_SEQLENS = np.array([[0, 4, T]] * B, np.int32)
CU_VALUES = {
    "float": CU_SEQLENS * 1.0, "bool": CU_SEQLENS > 0, "str": "a", "nan": math.nan, "empty": CU_SEQLENS[:, :0], "rank": CU_SEQLENS[None],
    "huge": CU_SEQLENS + np.int64(2**40), "None": None,
}  # fmt: skip


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
            lambda arrays: operation(**arrays, **others), mesh=mesh, in_specs=spec, out_specs=spec,
            axis_names={"context"}, check_vma=False,
        )  # fmt: skip
        return run(spread)

    return call


TOKENS = 8  # of a device: two chunks
TOKEN_KEY = (floats(B, TOKENS, K, H), Floats(axes="BTKH"))
TOKEN_VALUE = (floats(B, TOKENS, K, V), Floats(axes="BTKV"))
CONTEXT = dict(
    query=(floats(B, TOKENS, N, H), Floats(axes="BTNH")), key_cmp=TOKEN_KEY, value_cmp=TOKEN_VALUE,
    compress=(cache.Compression(), Function()), axis=("context", FreeName()), order=("zigzag", Name()),
    positions=(ints(B, TOKENS), Integers(True, "BT")), segment_ids=(np.ones((B, TOKENS), np.int32), Integers(True, "BT")),
)  # fmt: skip
FREE_TOKEN_VALUE = (TOKEN_VALUE[0], Floats(axes="BTKV", free="V"))

ARRANGEMENTS = {
    "choose": Call(
        lambda operation, operand, **given: nsa_jax.choose(operation, operand, **given),
        dict(
            operation=("window_attention", Name()), operand=(QUERY[0], Given(refused={"str": "a", "int": 3, "list": [1.0], "None": None, "rank": QUERY[0][0]})), **PLATFORM,
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
        {name: (value, Whole(low=0 if "initial" in name else 1)) for name, value in dataclasses.asdict(CONFIG).items()},
    ),
    "block_indices_from_ranges": Call(
        nsa_jax.block_indices_from_ranges,
        dict(
            ranges=(RANGES, Given(refused=RANGE_VALUES)), layout=("BTKn2", Name()), config=(CONFIG, Of()),
            query_positions=(PLACES["query_positions"][0], Given(True, POSITION_VALUES)), num_kv_heads=(K, Whole(True)),
        ),
    ),
    "segment_ids_from_cu_seqlens": Call(
        nsa_jax.segment_ids_from_cu_seqlens,
        dict(cu_seqlens=(CU_SEQLENS, Given(refused=CU_VALUES)), length=(T, Whole(low=0))),
    ),
    "check_segment_ids": Call(debug.check_segment_ids, dict(segment_ids=(PLACES["segment_ids"][0], Integers(axes="")))),
    "check_cu_seqlens": Call(
        debug.check_cu_seqlens, dict(cu_seqlens=(CU_SEQLENS, Given(refused=CU_VALUES | {"list": [0, 4], "int": 3})), length=(T, Whole(low=0)))
    ),
    "check_query_positions": Call(
        debug.check_query_positions,
        dict(query_positions=(ints(B, T), Integers(axes="")), num_keys=(T, Whole(low=0))),
    ),
    "check_block_indices": Call(
        debug.check_block_indices,
        dict(
            block_indices=(BLOCKS[0], Integers(axes="BTKR", free="KR")), config=(CONFIG, Of()),
            query_positions=(ints(B, T), Integers(axes="BT")), segment_ids=(PLACES["segment_ids"][0], Integers(True, "BS", "S")),
        ),
    ),
    "check_runs": Call(
        debug.check_runs, dict(runs=(Runs((Run(T, np.zeros(B, np.int32)),)), Of()), batch=(B, Whole(low=0)))
    ),
    "checked": Call(lambda operation: debug.checked(operation).__name__, dict(operation=(nsa_jax.gated_sum, Function()))),
    "to_zigzag": Call(
        parallel.to_zigzag,
        dict(array=(ints(B, 8), Given(refused={"list": [[1, 2, 3, 4]], "str": "a", "int": 3, "nan": math.nan, "rank": np.ones(8), "length": np.ones((2, 7))})), num_devices=(2, Whole()), axis=(1, Whole(low=-2))),
    ),
    "from_zigzag": Call(
        parallel.from_zigzag,
        dict(array=(ints(B, 8), Given(refused={"list": [[1, 2, 3, 4]], "str": "a", "int": 3, "nan": math.nan, "rank": np.ones(8), "length": np.ones((2, 7))})), num_devices=(2, Whole()), axis=(1, Whole(low=-2))),
    ),
    "token_indices": Call(
        parallel.token_indices, dict(length=(8, Whole(low=0)), num_devices=(2, Whole()), order=("zigzag", Name()))
    ),
    "padded_length": Call(
        parallel.padded_length,
        dict(length=(9, Whole(low=0)), num_devices=(2, Whole()), config=(CONFIG, Of()), order=("zigzag", Name())),
    ),
    "context_attention": Call(
        in_shard_map(parallel.context_attention),
        CONTEXT
        | dict(
            key_slc=TOKEN_KEY, value_slc=TOKEN_VALUE, key_win=TOKEN_KEY, value_win=TOKEN_VALUE,
            gates=(floats(B, TOKENS, N, 3), Floats(axes="BTN3")),
            block_indices=(np.tile(BLOCKS[0][:, :1], (1, TOKENS, 1, 1)), Integers(True, "BTKR")),
        )
        | OPTIONS,
    ),
    "context_selection": Call(
        in_shard_map(parallel.context_selection), CONTEXT | dict(value_cmp=FREE_TOKEN_VALUE) | OPTIONS
    ),
}  # fmt: skip

PARAMETERS = dict(
    dtype=(None, DType(optional=True)), param_dtype=(jnp.float32, DType()), precision=(None, Name(optional=True)),
    rngs=(nnx.Rngs(0), Of()),
)  # fmt: skip
OPTIONAL_FUNCTION = (None, Function(optional=True))
INITIALIZER = (nnx.initializers.zeros_init(), Function())
DENSE_OPTIONS = dict(
    num_heads=(N, Whole()), in_features=(D, Whole()), num_kv_heads=(K, Whole()), head_dim=(H, Whole(optional=True)),
    use_bias=(False, Flag()), normalize_qk=(False, Flag()), scale=(None, Scale(optional=True)),
    dropout_rate=(0.5, Given(refused=NO_FLOAT | {"negative": -0.1, "1": 1.0, "10^400": 10**400})), rope_base=(10000.0, Real()), rope_scaling=(None, Of(optional=True)),
    rotary=OPTIONAL_FUNCTION, kernel_init=INITIALIZER, out_kernel_init=OPTIONAL_FUNCTION, bias_init=INITIALIZER,
    sharding=(None, Sharding(optional=True)), implementation=("xla", Name(optional=True)), **PARAMETERS,
)  # fmt: skip
X = (floats(B, T, D), Floats(axes="BTD", free="BT"))
X_OF_MANY = (floats(B, T, D), Floats(axes="BTD"))
PER_TOKEN = dict(
    positions=(ints(B, T), Integers(True, "BT")),
    segment_ids=(np.ones((B, T), np.int32), Integers(True, "BT")),
)
DROPOUT = dict(deterministic=(True, Flag(optional=True)), rngs=(nnx.Rngs(0), Of(optional=True)))

UNMAPPED = {"list": [1.0], "None": None, "int": 3, "unknown": {"a": np.ones(3)}, "no array": {"a": 3}}

LAYERS = {
    "NSAAttention": Call(
        made(nn.NSAAttention),
        DENSE_OPTIONS
        | dict(
            value_dim=(V, Whole(optional=True)), config=(CONFIG, Of()), share_keys_values=(False, Flag()),
            compression=("mlp", Name()), compressor=OPTIONAL_FUNCTION, gate=OPTIONAL_FUNCTION,
            context_axis=(None, FreeName(optional=True)), context_order=("zigzag", Name()),
        ),
    ),
    "DenseAttention": Call(made(nn.DenseAttention), DENSE_OPTIONS | dict(window_size=(3, Whole(optional=True)))),
    "Gate": Call(
        made(nn.Gate),
        dict(
            in_features=(D, Whole()), num_heads=(N, Whole()), hidden_dim=(8, Whole(optional=True)),
            sharding=(None, Sharding(optional=True)), **PARAMETERS,
        ),
    ),
    "Compressor": Call(
        made(nn.Compressor),
        dict(
            head_dim=(H, Whole()), config=(CONFIG, Of()), mode=("mlp", Name()), hidden_dim=(8, Whole(optional=True)),
            **PARAMETERS,
        ),
    ),
    "NSAAttention()": Call(method(LAYER, "__call__"), dict(x=X_OF_MANY, block_indices=(BLOCKS[0], Integers(True, "BTKR"))) | PER_TOKEN | DROPOUT),
    "NSAAttention.operands": Call(method(LAYER, "operands"), dict(x=X_OF_MANY) | PER_TOKEN),
    "NSAAttention.inspect": Call(method(LAYER, "inspect"), dict(x=X_OF_MANY) | PER_TOKEN),
    "DenseAttention()": Call(method(DENSE, "__call__"), dict(x=X_OF_MANY) | PER_TOKEN | DROPOUT),
    "Gate()": Call(
        method(abstract(nn.Gate, in_features=D, num_heads=N), "__call__"), dict(x=X)
    ),
    "Compressor()": Call(
        method(abstract(nn.Compressor, head_dim=H, config=CONFIG), "__call__"),
        dict(windows=(floats(B, C, 4, K, H), Floats(axes="BmlKH", free="BmK"))),
    ),
    "Compressor.is_data": Call(
        method(abstract(nn.Compressor, head_dim=H, config=CONFIG), "is_data"), dict(dtype=("float32", DType()))
    ),
    "Compressor.weights": Call(
        method(abstract(nn.Compressor, head_dim=H, config=CONFIG), "weights"), dict(dtype=("float32", DType()))
    ),
    "LinearScaling": Call(nn.LinearScaling, dict(factor=(2.0, Real()))),
    "Llama3Scaling": Call(
        nn.Llama3Scaling,
        dict(
            factor=(2.0, Real()), low_frequency_factor=(1.0, Real()), high_frequency_factor=(4.0, Real()),
            original_length=(64, Real()),
        ),
    ),
    "YarnScaling": Call(
        nn.YarnScaling,
        dict(
            factor=(2.0, Real()), original_length=(64, Real()), beta_fast=(32.0, Real()), beta_slow=(1.0, Real()),
            attention_factor=(1.0, Real(optional=True)),
        ),
    ),
    "load_weights": Call(
        nn.load_weights,
        dict(module=(nnx.Dict(), Of()), weights=({}, Given(refused=UNMAPPED))),
    ),
    "weights": Call(nn.weights, dict(module=(nnx.Dict(), Of()))),
    "rotate": Call(
        nn.rotate,
        dict(
            x=(floats(B, T, N, H), Floats(axes="BTNH", free="NH")), positions=(ints(B, T), Integers(axes="BT")),
            base=(10000.0, Real()), scaling=(None, Of(optional=True)),
        ),
    ),
    "token_windows": Call(
        nn.token_windows,
        dict(
            x=(floats(B, T, K, H), Floats(axes="BSKH", free="KH")), config=(CONFIG, Of()),
            segment_ids=PLACES["segment_ids"],
        ),
    ),
}  # fmt: skip

NEW = 2
ROWS = dict(batch=(B, Whole()), max_length=(ROOM, Whole()), step_capacity=(8, Whole()))
NEW_CACHE = ROWS | dict(
    num_kv_heads=(K, Whole()), key_dim=(H, Whole()), value_dim=(V, Whole()), dtype=(jnp.float32, DType())
)
COUNTS = (np.array([0, 2], np.int32), Counts(True, "B", low=0, high=NEW))
NEW_QUERY = (floats(B, NEW, N, H), Floats(axes="BTNH"))
NEW_X = (floats(B, NEW, D), Floats(axes="BTD", free="T"))


def held_in(held, prefix="cache"):
    """The arrays of a cache as arguments."""
    found = {}
    for name, array in zip(held._fields, held, strict=True):
        kind = Floats(axes="BSKH")
        if name == "lengths":
            kind = Lengths(axes="B", low=0, high=ROOM)
        elif name == "overflowed":
            kind = Flags(axes="B")
        found[f"{prefix}.{name}"] = (array, kind)
    return found


NEW_TOKENS = {
    f"tokens.{name}": (floats(B, NEW, K, V if "value" in name else H), Floats(axes="BTKH"))
    for name in cache.TokenKeysValues._fields
}
STEP = dict(query=NEW_QUERY, gates=(floats(B, NEW, N, 3), Floats(axes="BTN3")), num_tokens=COUNTS) | OPTIONS
DENSE_STEP = dict(
    query=NEW_QUERY, key=(floats(B, NEW, K, H), Floats(axes="BTKH")), value=(floats(B, NEW, K, V), Floats(axes="BTKV")),
    num_tokens=COUNTS, window_size=(None, Whole(optional=True)), scale=OPTIONS["scale"], implementation=OPTIONS["implementation"],
)  # fmt: skip


def step(function):
    of_tokens = fields(cache.TokenKeysValues, "tokens", function)
    return fields(cache.NSACache, "cache", of_tokens)


COMPRESS = dict(compress=(cache.Compression(), Function()))
COUNTED = dict(count_reads=(False, Flag()))
CACHES = {
    "init_cache": Call(cache.init_cache, NEW_CACHE | dict(config=(CONFIG, Of()), share_keys_values=(False, Flag()))),
    "init_dense_cache": Call(cache.init_dense_cache, NEW_CACHE | dict(window_size=(3, Whole(optional=True)))),
    "expected_reads": Call(cache.expected_reads, dict(length=(T, Whole(low=0)), config=(CONFIG, Of()))),
    "prefill": Call(step(cache.prefill), held_in(HELD) | NEW_TOKENS | STEP | COMPRESS),
    "decode_step": Call(step(cache.decode_step), held_in(HELD) | NEW_TOKENS | STEP | COMPRESS | COUNTED),
    "prefill of another": Call(
        cache.prefill,
        dict(cache=(HELD, Of()), tokens=(cache.TokenKeysValues(*(x for x, _ in NEW_TOKENS.values())), Of())) | STEP | COMPRESS,
    ),
    "dense_prefill": Call(fields(cache.DenseCache, "cache", cache.dense_prefill), held_in(DENSE_HELD) | DENSE_STEP),
    "dense_decode_step": Call(
        fields(cache.DenseCache, "cache", cache.dense_decode_step), held_in(DENSE_HELD) | DENSE_STEP
    ),
    "Rotation.of": Call(
        cache.Rotation.of,
        dict(frequency=(np.array([1.0, 0.5]), Given(refused={"list": [1.0], "int": np.array([1, 2]), "nan": np.array([math.nan]), "float": 1.0, "str": "a"})), magnitude=(1.0, Real(positive=False))),
    ),
    "NSAAttention.init_cache": Call(method(LAYER, "init_cache"), ROWS | dict(dtype=(None, DType(optional=True)))),
    "NSAAttention.check_cache": Call(method(LAYER, "check_cache"), dict(cache=(HELD, Of()), batch=(B, Whole()))),
    "NSAAttention.prefill": Call(
        fields(cache.NSACache, "cache", method(LAYER, "prefill")), held_in(HELD) | dict(x=NEW_X, num_tokens=COUNTS)
    ),
    "NSAAttention.decode_step": Call(
        fields(cache.NSACache, "cache", method(LAYER, "decode_step")),
        held_in(HELD) | dict(x=NEW_X, num_tokens=COUNTS) | COUNTED,
    ),
    "DenseAttention.init_cache": Call(method(DENSE, "init_cache"), ROWS | dict(dtype=(None, DType(optional=True)))),
    "DenseAttention.decode_step": Call(
        fields(cache.DenseCache, "cache", method(DENSE, "decode_step")),
        held_in(DENSE_OF_LAYER) | dict(x=NEW_X, num_tokens=COUNTS) | COUNTED,
    ),
    "DenseAttention.prefill": Call(
        fields(cache.DenseCache, "cache", method(DENSE, "prefill")),
        held_in(DENSE_OF_LAYER) | dict(x=NEW_X, num_tokens=COUNTS),
    ),
}  # fmt: skip

IDS = (ints(B, T, below=VOCAB), Counts(axes="BT", free="BT", low=0, high=VOCAB - 1))
IDS_OF_MANY = (IDS[0], Counts(axes="BT", low=0, high=VOCAB - 1))
NEW_IDS = (ints(B, NEW, below=VOCAB), Counts(axes="BT", free="T", low=0, high=VOCAB - 1))
ALL_NEW = np.full(B, NEW, np.int32)
MODELS = {
    "TransformerConfig": Call(
        model.TransformerConfig,
        dict(
            vocab_size=(VOCAB, Whole()), num_layers=(1, Whole()), model_dim=(D, Whole()), num_heads=(N, Whole()),
            num_kv_heads=(K, Whole()), head_dim=(H, Whole(optional=True)), mlp_dim=(8, Whole(optional=True)),
            attention=("nsa", Name()), nsa=(CONFIG, Of()), share_keys_values=(False, Flag()),
            compression=("mlp", Name()), compressor=OPTIONAL_FUNCTION, gate=OPTIONAL_FUNCTION,
            normalize_qk=(False, Flag()), scale=(None, Scale(optional=True)), dropout_rate=(0.5, Given(refused=NO_FLOAT | {"negative": -0.1, "1": 1.0, "10^400": 10**400})),
            rope_base=(10000.0, Real()), rope_scaling=(None, Of(optional=True)), rotary=OPTIONAL_FUNCTION,
            tie_embeddings=(True, Flag()), dtype=("float32", DType()), param_dtype=("float32", DType()),
            remat=(False, Flag()),
        ),
    ),
    "Transformer": Call(
        made(model.Transformer),
        dict(
            config=(model.TransformerConfig(**MODEL), Of()), sharding=(None, Sharding(optional=True)),
            context_axis=(None, FreeName(optional=True)), context_order=("zigzag", Name()),
            implementation=("xla", Name(optional=True)), rngs=(nnx.Rngs(0), Of()),
        ),
    ),
    "Transformer()": Call(method(TRANSFORMER, "__call__"), dict(tokens=IDS_OF_MANY) | PER_TOKEN),
    "Transformer.inspect": Call(method(TRANSFORMER, "inspect"), dict(tokens=IDS_OF_MANY) | PER_TOKEN),
    "Transformer.init_cache": Call(method(TRANSFORMER, "init_cache"), ROWS),
    "Transformer.prefill": Call(
        method(TRANSFORMER, "prefill"), dict(tokens=NEW_IDS, cache=(MODEL_HELD, Of()), num_tokens=(ALL_NEW, Counts(True, "B", high=NEW))),
    ),
    "Transformer.decode_step": Call(
        method(TRANSFORMER, "decode_step"),
        dict(tokens=NEW_IDS, cache=(MODEL_HELD, Of()), num_tokens=(ALL_NEW, Counts(True, "B", high=NEW))) | COUNTED,
    ),
    "generate": Call(
        lambda **given: generate.generate(TRANSFORMER() if given.pop("own", True) else 0, **given),
        dict(
            prompts=(IDS[0], Counts(axes="BT", free="T", low=0, high=VOCAB - 1)),
            lengths=(np.full(B, T, np.int32), Counts(True, "B", low=1, high=T)), max_new_tokens=(2, Whole()),
            max_length=(ROOM, Whole(optional=True)), temperature=(1.0, Given(refused=NO_FLOAT | {"negative": -1.0, "10^400": 10**400, "1e300": 1e300})), top_k=(3, Whole(optional=True)),
            top_p=(0.5, Given(True, NO_FLOAT | {"negative": -0.1, "0": 0.0, "above 1": 1.5, "10^400": 10**400})), eos_id=(1, Whole(True, low=0)), pad_id=(0, Whole(low=None)),
            key=(0, Given(refused=NO_INT | {"2^64": 2**64, "keys": KEYS[:1], "raw key": np.zeros((B, 2), np.uint32)})), chunk_size=(8, Whole()), prefill_chunk=(T, Whole(optional=True)),
        ),
    ),
    "generate with a model": Call(
        lambda model: generate.generate(model, IDS[0], max_new_tokens=2), dict(model=(TRANSFORMER(), Of()))
    ),
    "sample": Call(
        generate.sample,
        dict(
            logits=(floats(B, VOCAB), Floats(axes="BV", free="V")), keys=(KEYS, Of()),
            temperature=(1.0, Given(True, NO_FLOAT | {"negative": -1.0, "0": 0.0, "10^400": 10**400, "1e300": 1e300})), top_k=(3, Whole(optional=True)), top_p=(0.5, Given(True, NO_FLOAT | {"negative": -0.1, "0": 0.0, "above 1": 1.5, "10^400": 10**400})),
        ),
    ),
    "truncate": Call(
        generate.truncate,
        dict(logits=(floats(B, VOCAB), Floats(axes="")), top_k=(3, Whole(optional=True)), top_p=(0.5, Given(True, NO_FLOAT | {"negative": -0.1, "0": 0.0, "above 1": 1.5, "10^400": 10**400}))),
    ),
}  # fmt: skip

CALLS = OPERATIONS | ARRANGEMENTS | LAYERS | CACHES | MODELS


def seed_of(name: str) -> int:
    return zlib.crc32(name.encode())


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_is_refused_in_the_form_of_the_house(name):
    call, wrong = CALLS[name], []
    for argument, label, value in call.wrong(seed_of(name)):
        try:
            call.outcome(argument, value)
        except (TypeError, ValueError, NotImplementedError) as error:
            if not has_form(str(error)):
                wrong.append(f"{argument}, {label}: {type(error).__name__}: {error}"[:300])
        except Exception as error:
            wrong.append(f"{argument}, {label}: {type(error).__name__}: {error}"[:300])
        else:
            wrong.append(f"{argument}, {label}: accepted")

    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if any(call.same())])
def test_another_form_of_the_same_value_is_the_same_call(name):
    call = CALLS[name]
    argument, (value, _) = next(iter(call.arguments.items()))
    expected = call.outcome(argument, value)

    wrong = [
        f"{name}, {label}" for name, label, value in call.same() if call.outcome(name, value) != expected
    ]

    assert not wrong, "\n".join(wrong)


def test_there_are_many_calls():
    assert sum(1 for name, call in CALLS.items() for _ in call.wrong(seed_of(name))) >= 400


# Results and other tuples, which check nothing, and what has its own test: checkpoints in `test_model_checkpoint`.
NOT_CALLED = {
    "nsa_jax": ("Run", "__version__"),
    "nsa_jax.nn": ("Operands", "RopeScaling", "Selection"),
    "nsa_jax.cache": (
        "Compression", "CountedStep", "DenseCache", "DenseStep", "NSACache", "Reads", "ResidualMLP", "Step",
        "TokenKeysValues",
    ),
    "nsa_jax.generate": ("Decoder", "Generation"),
    "nsa_jax.model": ("restore", "restore_training", "save"),
    "nsa_jax.parallel": ("Order",),
}  # fmt: skip


@pytest.mark.parametrize("module", [nsa_jax, nn, cache, generate, model, parallel], ids=lambda x: x.__name__)
def test_every_public_callable_has_its_bad_calls(module):
    called = {name.partition(" ")[0].partition(".")[0].partition("(")[0] for name in CALLS}

    assert set(module.__all__) - called == set(NOT_CALLED[module.__name__])
