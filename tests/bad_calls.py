"""Good calls of every public callable, from which bad ones are made.

A callable's signature says which arguments it has. `VALUES` has a good one for each name; an array gets its
shape from its annotation. A call names what is different in it, as a value or as a value and its kind.
"""

import dataclasses
import functools
import inspect
import math
import typing
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
    Integers,
    KeptDType,
    Kind,
    Lengths,
    Name,
    Of,
    QuantisedDType,
    Real,
    Scale,
    Sharding,
    Whole,
)
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Int32

import nsa_jax
from nsa_jax import NSAConfig, Run, Runs, cache, debug, evaluate, model, nn, parallel
from nsa_jax.generate import LookUp, generate, prepare, sample, start, truncate

CONFIG = NSAConfig(
    compression_block_size=4,
    compression_stride=2,
    selection_block_size=4,
    num_selected_blocks=4,
    window_size=5,
)
ROOM, VOCAB, NEW = 12, 11, 2
SIZES = dict(
    B=2, T=10, M=3, S=10, W=10, P=10, N=4, K=2, H=4, V=3, D=12, C=4, R=4, J=3, I=2, E=5, branches=3, m=4, l=4,
    vocab=VOCAB,
)  # fmt: skip
KEPT_DTYPE = ("float32", KeptDType())
RATE = Kind(NO_FLOAT | {"negative": -0.1, "1": 1.0, "10^400": 10**400})
SHARE = Kind(NO_FLOAT | {"negative": -0.1, "0": 0.0, "above 1": 1.5, "10^400": 10**400})
TOO_HOT = NO_FLOAT | {"negative": -1.0, "10^400": 10**400, "1e300": 1e300}
ENDS = Kind(
    {"str": "3", "float": 2.5, "nan": math.nan, "bool": True, "negative": -1, "empty": [], "large": 2**40}
)
STOPS = Kind(
    {"str": "ab", "int": 3, "list": [3], "empty": [], "no token": [[1], []], "negative": [[1], [-1]]}
)
NO_BRANCHES = dict(
    **dict(str="slc", int=3, none=(), unknown=("slc", "mid"), twice=("slc", "slc"), no_slc=("cmp", "win")),
    numbers=(0, 1, 2), nan=math.nan,
)  # fmt: skip
NO_GATES = dict(
    **dict(str="abc", int=3, none=(), fewer=(0.1, 0.9), names=("a", "b", "c"), nan=(0.1, math.nan, 0.1)),
    **{
        "0": (0.0, 0.9, 0.1),
        "1": (0.1, 1.0, 0.1),
        "negative": (0.1, -0.9, 0.1),
        "10^400": (0.1, 10**400, 0.1),
    },
)
NO_TREE = {"nothing": {}, "a function": {"f": len}, "of names": ["a"], "a name": "a", "an object": object()}
# Good values by the name of the argument. Their kind is that of their type, if they come without one.
VALUES = dict(
    **{name: value for name, value in dataclasses.asdict(CONFIG).items() if "initial" not in name},
    **dict(num_heads=4, num_kv_heads=2, head_dim=4, value_dim=3, key_dim=4, in_features=12, model_dim=12),
    **dict(hidden_dim=8, mlp_dim=8, vocab_size=VOCAB, num_layers=1, num_devices=2, chunk_size=8, top_k=3),
    **dict(batch=2, max_length=ROOM, step_capacity=8, max_new_tokens=2, prefill_chunk=10, original_length=64),
    **dict(num_initial_blocks=(1, Whole(low=0)), length=(10, Whole(low=0)), num_keys=(10, Whole(low=0))),
    **dict(first_key=(0, Whole(low=None)), first_key_win=(0, Whole(low=None)), pad_id=(0, Whole(low=None))),
    **dict(eos_id=(1, ENDS), logprobs=(2, Whole(low=0)), stop=([[1, 2], [3]], STOPS)),
    **dict(
        min_p=(0.1, Kind(NO_FLOAT | {"negative": -0.1, "above 1": 1.5})), repetition_penalty=(1.1, Real())
    ),
    **dict(presence_penalty=(0.5, Real(positive=False)), logits_hook=(None, Function())),
    **dict(drafts=(None, Kind({"str": "a", "int": 3}))),
    **dict(temperature=(1.0, Kind(TOO_HOT)), top_p=(0.5, SHARE)),
    **dict(rope_base=10000.0, base=10000.0, factor=2.0, low_frequency_factor=1.0, high_frequency_factor=4.0),
    **dict(beta_fast=32.0, beta_slow=1.0, attention_factor=1.0, magnitude=(1.0, Real(positive=False))),
    **dict(scale=(None, Scale()), dropout_rate=(0.5, RATE)),
    **dict.fromkeys(("use_bias", "qkv_bias", "out_bias", "normalize_qk", "share_keys_values"), False),
    **dict(post_norms=False, activation="silu", embedding_scale=2.0),
    **dict(norm_epsilon=1e-6, initial_gates=((0.1, 0.8, 0.1), Kind(NO_GATES, error=(TypeError, ValueError)))),
    **dict(
        tie_embeddings=True,
        scan_layers=False,
        remat=(False, Name()),
        deterministic=True,
        return_probabilities=False,
    ),
    **dict(operation="window_attention", implementation="xla", platform="cuda", precision=(None, Name())),
    **dict(
        reduce="sum", order="zigzag", context_order="zigzag", attention="nsa", compression="mlp", mode="mlp"
    ),
    **dict(branches=(("cmp", "slc", "win"), Kind(NO_BRANCHES, error=(TypeError, ValueError)))),
    **dict(selector=("importance", Kind(dict(str="a", int=3, list=[]), error=(TypeError, ValueError)))),
    **dict(distil=(None, Name()), options=(nn.IndexerConfig(), Of()), num_branches=3, dim=4, weighted=False),
    **dict(shared_key=True, slow_pairs=False),
    **dict(layout="BTKn2", axis=("context", FreeName()), context_axis=(None, FreeName())),
    **dict.fromkeys(("dtype", "param_dtype"), ("float32", DType())),
    **dict(raw_dtype=("float32", DType()), cache_dtype=("int8", QuantisedDType())),
    **dict.fromkeys(("compressor", "gate", "rotary", "out_kernel_init"), (None, Function())),
    **dict.fromkeys(("kernel_init", "bias_init"), (nnx.initializers.zeros_init(), Function())),
    **dict(compress=(cache.Compression(), Function()), sharding=(None, Sharding())),
    **dict(config=CONFIG, nsa=CONFIG, rope_scaling=(None, Of()), scaling=(None, Of()), module=nnx.Dict()),
    **dict.fromkeys(("training", "like"), ({"step": 3}, Kind(NO_TREE, error=ValueError))),
    **dict(rngs=nnx.Rngs(0), keys=jax.random.split(jax.random.key(0), 2)),
)
# The selection of each NSA layer of a model: one array for each.
NO_SELECTION = dict(number=1, none_of_a_layer=[], no_arrays=[[0, -1, -1, -1]], dict={})
OF_LAYERS = Kind(NO_SELECTION, error=(TypeError, ValueError))
OF_NSA = Kind({"list": [3], "int": 3}, error=NotImplementedError)  # a dense layer has no selection
KINDS = {bool: Flag(), int: Whole(), float: Real(), str: Name()}
COUNTS = dict(
    num_tokens=Counts(high=NEW),
    prompts=Counts(high=VOCAB - 1),
    tokens=Counts(high=VOCAB - 1, error=(TypeError, ValueError)),  # shape and dtype have one message
)


class Call:
    """A good call of a function that has the signature of `like`; axes of `free` may have any size.

    It is a call of `of`, by default that function. What takes seconds when it is called rightly is given
    wrong values alone, with `only_wrong`. What reads or writes files is not `traced`.
    """

    def __init__(
        self, function, /, *, like=None, of=None, free="", sizes=(), only_wrong=False, traced=True, **given
    ):
        self.function, self.arguments, self.optional = function, {}, set()
        self.of = of or like or inspect.unwrap(function)
        self.only_wrong, self.traced = only_wrong, traced
        free, sizes = tuple(free.split()), SIZES | dict(sizes)
        parameters = inspect.signature(like or function).parameters.values()
        for parameter in parameters:
            name, parts = parameter.name, typing.get_args(parameter.annotation)
            if name == "self" or parameter.kind is parameter.VAR_POSITIONAL:
                continue
            if parameter.default is None or type(None) in parts:
                self.optional.add(name)
            shaped = [part for part in parts or (parameter.annotation,) if hasattr(part, "dim_str")]
            self.arguments[name] = (
                _array(name, shaped[0], free, sizes)
                if shaped and name not in given and name not in VALUES
                else _with_kind(given[name] if name in given else VALUES[name])
            )
        self.arguments |= {name: _with_kind(value) for name, value in given.items()}
        for name, value in given.items():  # arrays of a cache are arguments of their own
            if isinstance(value, cache.NSACache | cache.DenseCache | cache.TokenKeysValues):
                for field, shape in inspect.get_annotations(type(value)).items():
                    if shape is typing.Any or getattr(value, field) is None:
                        continue  # what a selector keeps may be anything; some caches have no scales
                    if parts := typing.get_args(shape):
                        shape = parts[0]
                        self.optional.add(f"{name}.{field}")
                    kind = _array(field, shape, (), SIZES | {"window": 1, "raw": 1})[1]
                    self.arguments[f"{name}.{field}"] = getattr(value, field), kind

    def outcome(self, changes: dict[str, Any]) -> Any:
        """What the call gives if arguments have other values, with shapes in the place of arrays."""
        given = {key: argument for key, (argument, _) in self.arguments.items() if "." not in key}
        for name, value in changes.items():
            owner, _, field = name.partition(".")
            given[owner] = given[owner]._replace(**{field: value}) if field else value
        found = []
        run = jax.eval_shape if self.traced else lambda call: call()
        run(lambda: found.append(self.function(**given)))
        return jax.tree.map(_shape, found)

    def wrong(self, seed: int) -> Iterator[tuple[str, str, Any, Any]]:
        """Argument, what is wrong with its value, the value, and the error."""
        rng = np.random.default_rng(seed)
        for name, (value, kind) in self.arguments.items():
            none = {} if name in self.optional else {"None": None}
            for label, bad in (kind.wrong(value, rng) | none).items():
                yield name, label, bad, kind.errors(label)

    def same(self) -> dict[str, dict[str, Any]]:
        """By the name of a form: the values of all arguments that have such a form."""
        forms: dict[str, dict[str, Any]] = {}
        for name, (value, kind) in () if self.only_wrong else self.arguments.items():
            for label, other in kind.same(value).items():
                forms.setdefault(label, {})[name] = other
        return forms


def _with_kind(value: Any) -> tuple[Any, Kind]:
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Kind):
        return value
    return value, KINDS.get(type(value), Of())


def _array(
    name: str, annotation: Any, free: tuple[str, ...], sizes: dict[str, int]
) -> tuple[np.ndarray, Kind]:
    axes = tuple(annotation.dim_str.split())
    shape = [int(axis) if axis.isdigit() else sizes[axis] for axis in axes]
    if annotation.dtype is Bool:
        return np.zeros(shape, bool), Flags(axes=axes)
    if annotation.dtype is Int32:
        return np.zeros(shape, np.int32), Lengths(axes=axes, high=ROOM)
    if annotation.dtype is Float:
        return np.ones(shape, np.float32), Floats(axes=axes, free=free)
    ints = np.full(shape, {"segment_ids": 1, "num_tokens": NEW}.get(name, 0), np.int32)
    if name == "block_indices":
        ints[..., 1:] = -1
    return ints, dataclasses.replace(COUNTS.get(name, Integers()), axes=axes, free=free)


def _shape(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array | np.ndarray) else x


def making(module: Callable[..., nnx.Module], **more: Any) -> Call:
    """Makes a module, and gives its parameters."""

    def made(rngs, **given):
        def parameters():
            own = nnx.Rngs(0) if isinstance(rngs, nnx.Rngs) else rngs
            return nnx.state(module(rngs=own, **given), nnx.Param)

        return nnx.eval_shape(parameters)

    return Call(made, like=module.__init__, **more)


class Abstract:
    """A module whose parameters are traced, and calls of its methods."""

    def __init__(self, module: Callable[..., nnx.Module], **options: Any):
        graph, state = nnx.split(nnx.eval_shape(lambda: module(**options, rngs=nnx.Rngs(0))))
        zeros = zeros_of(state)
        self.of, self.make = module, lambda: nnx.merge(graph, zeros)

    def call(self, name: str, **more: Any) -> Call:
        return Call(lambda **given: getattr(self.make(), name)(**given), like=getattr(self.of, name), **more)


def zeros_of(held: Any) -> Any:
    """The same with zeros in the place of arrays; keys are keys."""

    def zeros(x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0), x.shape)
        return np.zeros(x.shape, x.dtype)

    return jax.tree.map(zeros, held)


def window_by_runs(
    length: int, first: int, divisor: int, num_queries: Int[Array, "B"] | None, halo: int | None
):
    runs = Runs((Run(length, first), Run(6, 4)), divisor, num_queries, halo)
    return nsa_jax.window_attention(*WINDOW, config=CONFIG, query_positions=runs)


def in_shard_map(operation):
    """Calls a context-parallel operation on the first of two devices."""
    mesh = AbstractMesh((2,), ("context",), (AxisType.Auto,))

    def call(**given):
        # Arrays of floats are given to the shard_map; the rest is closed over.
        spread = {
            name: x for name, x in given.items() if getattr(x, "dtype", None) == np.float32 and x.ndim > 2
        }
        run = functools.partial(operation, **{name: x for name, x in given.items() if name not in spread})
        spec = PartitionSpec(None, None)
        options = dict(mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"context"}, check_vma=False)
        return jax.shard_map(lambda arrays: run(**arrays), **options)(spread)

    return call


WINDOW = [np.ones((2, 10, heads, dim), np.float32) for heads, dim in ((4, 4), (2, 4), (2, 3))]
LAYER_SIZES = dict(num_heads=4, in_features=12, num_kv_heads=2, head_dim=4)
MODEL = model.TransformerConfig(
    vocab_size=VOCAB, num_layers=1, model_dim=12, num_heads=4, num_kv_heads=2, nsa=CONFIG
)
LAYER = Abstract(nn.NSAAttention, **LAYER_SIZES, value_dim=3, config=CONFIG, implementation="xla")
DENSE = Abstract(nn.DenseAttention, **LAYER_SIZES, implementation="xla")
GATE = Abstract(nn.Gate, in_features=12, num_heads=4)
INDEXER = Abstract(nn.Indexer, in_features=12, num_kv_heads=2, config=CONFIG)
COMPRESSOR = Abstract(nn.Compressor, head_dim=4, config=CONFIG)
TRANSFORMER = Abstract(model.Transformer, config=MODEL, implementation="xla")
CACHE_SIZES = dict(num_kv_heads=2, key_dim=4, value_dim=3, dtype=jnp.float32)
HELD = zeros_of(jax.eval_shape(lambda: cache.init_cache(2, ROOM, config=CONFIG, **CACHE_SIZES)))
DENSE_HELD = zeros_of(jax.eval_shape(lambda: cache.init_dense_cache(2, ROOM, **CACHE_SIZES)))
DENSE_OF_LAYER, MODEL_HELD = (
    zeros_of(jax.eval_shape(lambda module=module: module.make().init_cache(2, ROOM)))
    for module in (DENSE, TRANSFORMER)
)
TOKENS = cache.TokenKeysValues(*(np.ones((2, NEW, 2, dim), np.float32) for dim in (4, 3) * 3))

NOT_KEPT = dict(str="a", int=3, empty=[], rank=[np.ones((2, NEW))], rows=[np.ones((3, NEW, 3))], many=[0, 1])
NEW_KEPT = [np.ones((2, NEW, 3))], Kind(NOT_KEPT, error=(TypeError, ValueError))
NO_ARRAY = {"list": [[1, 2, 3, 4]], "str": "a", "int": 3, "nan": math.nan}
IN_ZIGZAG = Kind(NO_ARRAY | {"rank": np.ones(8), "length": np.ones((2, 7))})
NO_OPERAND = Kind({"str": "a", "int": 3, "list": [1.0], "rank": WINDOW[0][0]})
ZEROS = np.zeros((2, 10, 2, 4, 2), np.int32)
NO_RANGES = Kind(
    {
        "float": ZEROS * 1.0,
        "bool": ZEROS.astype(bool),
        "str": "a",
        "ragged": [[1, 2], [3]],
        "rank": ZEROS[0],
        "three ends": ZEROS[..., [0, 1, 1]],
        "negative": ZEROS - np.array([4, 0]),
        "huge": ZEROS + np.array([0, 2**40]),
        "nan": math.nan,
    }
)
RANGES = ZEROS, NO_RANGES
NO_POSITIONS = Kind(
    {
        "float": np.zeros((2, 10)),
        "rank": np.zeros(10, int),
        "length": np.zeros((2, 11), int),
        "below -1": np.full((2, 10), -5),
        "huge": np.full((2, 10), 2**40),
        "str": "a",
        "no axis": 3,
    }
)
POSITIONS = np.tile(np.arange(10), (2, 1)), NO_POSITIONS
CU_SEQLENS = np.array([[0, 4, 10]] * 2, np.int32)
NO_CU_SEQLENS = {
    "float": CU_SEQLENS * 1.0,
    "bool": CU_SEQLENS > 0,
    "str": "a",
    "nan": math.nan,
    "empty": CU_SEQLENS[:, :0],
    "rank": CU_SEQLENS[None],
    "huge": CU_SEQLENS + np.int64(2**40),
}
NO_FREQUENCY = {"list": [1.0], "int": np.array([1, 2]), "NaN": np.array([math.nan]), "float": 1.0, "str": "a"}
NO_WEIGHTS = {"list": [1.0], "int": 3, "unknown": {"a": np.ones(3)}, "no array": {"a": 3}}
NO_KEY = NO_INT | {"2^64": 2**64, "keys": VALUES["keys"][:1], "raw key": np.zeros((2, 2), np.uint32)}

SHARD = dict(sizes=dict(T=8))  # two chunks of a device
STEP = dict(sizes=dict(T=NEW))
HELD_STEP = STEP | dict(cache=HELD, tokens=TOKENS)
DENSE_STEP = STEP | dict(cache=DENSE_HELD)
ZIGZAG = dict(array=(np.zeros((2, 8), int), IN_ZIGZAG), axis=(1, Whole(low=-2)))
CALLS = {
    "compressed_attention": Call(nsa_jax.compressed_attention, free="V"),
    "select_blocks": Call(nsa_jax.select_blocks),
    "block_scores": Call(nsa_jax.block_scores),
    "select_by_index": Call(nsa_jax.select_by_index),
    "top_blocks": Call(nsa_jax.top_blocks, free="K M"),
    "selected_attention": Call(nsa_jax.selected_attention, free="V"),
    "block_probabilities": Call(nsa_jax.block_probabilities),
    "selected_probabilities": Call(nsa_jax.selected_probabilities),
    "importance_scores": Call(nsa_jax.importance_scores),
    "selection_loss": Call(nsa_jax.selection_loss),
    "window_attention": Call(nsa_jax.window_attention, free="V"),
    "gated_sum": Call(nsa_jax.gated_sum),
    "native_sparse_attention": Call(nsa_jax.native_sparse_attention),
    "window_attention by Runs": Call(
        window_by_runs,
        length=(4, Whole(error=ValueError)),
        first=(0, Whole(low=None)),
        divisor=1,
        num_queries=(
            np.array([3, 10], np.int32),
            Counts(axes=("B",), high=10, error=(TypeError, ValueError)),
        ),
        halo=(None, Whole(low=CONFIG.window_size - 1, error=ValueError)),
    ),
    "Runs": Call(
        lambda runs: debug.checked(nsa_jax.window_attention)(
            *WINDOW, config=CONFIG, query_positions=Runs(runs)
        ),
        of=Runs,
        runs=((Run(10, 0),), Of()),
    ),
    "choose": Call(
        lambda operation, operand, **given: nsa_jax.choose(operation, operand, **given),
        like=nsa_jax.choose,
        operand=(WINDOW[0], NO_OPERAND),
    ),
    "unsupported_reason": Call(nsa_jax.unsupported_reason),
    "use_implementation": Call(
        lambda implementation: type(nsa_jax.use_implementation(implementation)).__name__,
        like=nsa_jax.use_implementation,
    ),
    "NSAConfig": Call(NSAConfig),
    "block_indices_from_ranges": Call(
        nsa_jax.block_indices_from_ranges,
        ranges=RANGES,
        query_positions=POSITIONS,
    ),
    "segment_ids_from_cu_seqlens": Call(
        nsa_jax.segment_ids_from_cu_seqlens, cu_seqlens=(CU_SEQLENS, Kind(NO_CU_SEQLENS))
    ),
    "check_segment_ids": Call(debug.check_segment_ids, free="B S"),
    "check_cu_seqlens": Call(
        debug.check_cu_seqlens, cu_seqlens=(CU_SEQLENS, Kind(NO_CU_SEQLENS | {"list": [0, 4], "int": 3}))
    ),
    "check_query_positions": Call(debug.check_query_positions, free="B T"),
    "check_block_indices": Call(debug.check_block_indices, free="K R S"),
    "check_runs": Call(
        debug.check_runs, runs=Runs((Run(10, np.zeros(2, np.int32)),)), batch=(2, Whole(low=0))
    ),
    "checked": Call(
        lambda operation: debug.checked(operation).__name__, operation=(nsa_jax.gated_sum, Function())
    ),
    "to_zigzag": Call(parallel.to_zigzag, **ZIGZAG),
    "from_zigzag": Call(parallel.from_zigzag, **ZIGZAG),
    "token_indices": Call(parallel.token_indices, length=(8, Whole(low=0))),
    "padded_length": Call(parallel.padded_length, length=(9, Whole(low=0))),
    "context_attention": Call(
        in_shard_map(parallel.context_attention), like=parallel.context_attention, **SHARD
    ),
    "context_selection": Call(
        in_shard_map(parallel.context_selection), like=parallel.context_selection, free="V", **SHARD
    ),
    "NSAAttention": making(nn.NSAAttention),
    "DenseAttention": making(nn.DenseAttention),
    "Gate": making(nn.Gate),
    "Indexer": making(nn.Indexer),
    "IndexerConfig": Call(nn.IndexerConfig, num_heads=2, normalize=False),
    "Compressor": making(nn.Compressor),
    "NSAAttention()": LAYER.call("__call__"),
    "NSAAttention.operands": LAYER.call("operands"),
    "NSAAttention.inspect": LAYER.call("inspect"),
    "DenseAttention()": DENSE.call("__call__"),
    "Gate()": GATE.call("__call__", free="B T"),
    "Indexer.project": INDEXER.call("project", free="B T", query=(None, Kind({})), key_slc=(None, Kind({}))),
    "Compressor()": COMPRESSOR.call("__call__", free="B m K"),
    "Compressor.is_data": COMPRESSOR.call("is_data"),
    "Compressor.weights": COMPRESSOR.call("weights"),
    "LinearScaling": Call(nn.LinearScaling),
    "Llama3Scaling": Call(nn.Llama3Scaling, original_length=(64, Real())),
    "YarnScaling": Call(nn.YarnScaling, original_length=(64, Real())),
    "load_weights": Call(nn.load_weights, weights=({}, Kind(NO_WEIGHTS))),
    "weights": Call(nn.weights),
    "rotate": Call(nn.rotate, free="N H"),
    "token_windows": Call(nn.token_windows, free="K H"),
    "init_cache": Call(cache.init_cache, dtype=KEPT_DTYPE),
    "init_dense_cache": Call(cache.init_dense_cache, dtype=KEPT_DTYPE),
    "expected_reads": Call(cache.expected_reads),
    "keep": Call(cache.keep, cache=HELD._replace(kept=[np.zeros((2, ROOM, 3))]), new=NEW_KEPT, **STEP),
    "rewind": Call(cache.rewind, cache=HELD, num_tokens=(np.zeros(2, np.int32), Counts(axes=("B",), high=0))),
    "count_reads": Call(cache.count_reads, cache=HELD, free="T", **STEP),
    "prefill": Call(cache.prefill, **HELD_STEP),
    "decode_step": Call(cache.decode_step, **HELD_STEP),
    "dense_prefill": Call(cache.dense_prefill, window_size=(None, Whole()), **DENSE_STEP),
    "dense_decode_step": Call(cache.dense_decode_step, window_size=(None, Whole()), **DENSE_STEP),
    "Rotation.of": Call(cache.Rotation.of, frequency=(np.array([1.0, 0.5]), Kind(NO_FREQUENCY))),
    "NSAAttention.init_cache": LAYER.call("init_cache", dtype=KEPT_DTYPE),
    "NSAAttention.check_cache": LAYER.call(
        "check_cache", cache=(HELD, Of()), batch=(2, Whole(error=ValueError))
    ),
    "NSAAttention.prefill": LAYER.call("prefill", cache=HELD, free="T", **STEP),
    "NSAAttention.decode_step": LAYER.call("decode_step", cache=HELD, free="T", **STEP),
    "DenseAttention.init_cache": DENSE.call("init_cache", dtype=KEPT_DTYPE),
    "DenseAttention.decode_step": DENSE.call(
        "decode_step", cache=DENSE_OF_LAYER, free="T", **STEP, block_indices=(None, OF_NSA)
    ),
    "DenseAttention.prefill": DENSE.call(
        "prefill", cache=DENSE_OF_LAYER, free="T", **STEP, block_indices=(None, OF_NSA)
    ),
    "TransformerConfig": Call(  # two layers, so that a list of one value is wrong
        model.TransformerConfig,
        num_layers=2,
        attention=("window", Name()),
        window_size=(5, Whole(error=(TypeError, ValueError))),
        rope_base=(10000.0, Real(error=(TypeError, ValueError))),
        rope_scaling=(None, Of(error=(TypeError, ValueError))),
    ),
    "Transformer": making(model.Transformer, config=MODEL),
    "Transformer()": TRANSFORMER.call("__call__", block_indices=(None, OF_LAYERS)),
    "Transformer.loss": TRANSFORMER.call(
        "loss",
        block_indices=(None, OF_LAYERS),
        reduce=("mean", Name()),
        teacher=(None, Kind({"str": "a", "int": 3})),
    ),
    "next_tokens": Call(
        model.next_tokens, tokens=(np.zeros((2, 10), np.int32), Integers(axes=("B", "T"), free=("B", "T")))
    ),
    "token_losses": Call(model.token_losses, free="vocab"),
    "token_divergences": Call(model.token_divergences, sizes={"E": 3}),
    "Transformer.inspect": TRANSFORMER.call("inspect"),
    "Transformer.init_cache": TRANSFORMER.call("init_cache", dtype=KEPT_DTYPE),
    "Transformer.prefill": TRANSFORMER.call(
        "prefill", cache=MODEL_HELD, free="T", **STEP, block_indices=(None, OF_LAYERS)
    ),
    "Transformer.decode_step": TRANSFORMER.call(
        "decode_step", cache=MODEL_HELD, free="T", **STEP, block_indices=(None, OF_LAYERS)
    ),
    "generate": Call(
        lambda model, **given: generate(model.make() if model is TRANSFORMER else model, **given),
        like=generate,
        free="P",
        model=TRANSFORMER,
        lengths=(np.full(2, 10, np.int32), Counts(axes=("B",), low=1, high=10)),
        key=(0, Kind(NO_KEY)),
    ),
    "start": Call(
        lambda model, **given: start(model.make() if model is TRANSFORMER else model, **given).rows.logits,
        like=start,
        free="P",
        model=TRANSFORMER,
        lengths=(np.full(2, 10, np.int32), Counts(axes=("B",), low=1, high=10)),
        key=(0, Kind(NO_KEY)),
    ),
    "LookUp": Call(LookUp, num_tokens=4, match=3),
    "prepare": Call(
        lambda model, **given: nn.weights(prepare(model.make() if model is TRANSFORMER else model, **given)),
        like=prepare,
        model=TRANSFORMER,
        donate=False,
    ),
    "MagicNumber": Call(evaluate.MagicNumber, encode=(ord, Function()), digits=5, keys=1),
    "PassKey": Call(evaluate.PassKey, encode=(ord, Function()), digits=5),
    "sample": Call(sample, free="vocab", temperature=(1.0, Kind(TOO_HOT | {"0": 0.0}))),
    "truncate": Call(truncate, free="B vocab"),
}
