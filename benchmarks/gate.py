"""The correctness gate: a program that gives a wrong answer gets no time reported.

Two checks against dense attention under explicit masks, computed here in float64 from the definitions alone:
every output and every gradient at a small length at which the selection is sparse; then, for a forward,
sampled queries of the very program that is timed. The budget is the package's: twice the error of the same
dense maths in the input's own precision, plus `8 eps` of the largest value. A selection passes if no rejected
block scores higher than a chosen one by more than that budget; outputs are then compared for this selection.
A layer is compared with its own projections, compressors and gates around dense attention.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import layers, programs
from benchmarks.command_line import progress
from benchmarks.inputs import ARGUMENTS, LAYERS, Draw, Shape, draw_blocks, draw_queries
from nsa_jax.array_typing import Array, Bool, Float, Int
from nsa_jax.config import NSAConfig
from nsa_jax.nn import DenseAttention, Operands, rotate

SAMPLED_QUERIES = 16
MOST_AT_ONCE = 4  # checks: each needs some gigabytes
TINY = 1e-300  # makes 0 of a budget of 0 green and anything else red


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Largest error of a check as a share of its budget, and where it was."""

    share: float
    where: str

    @property
    def green(self) -> bool:
        """Whether speed may be reported."""
        return self.share <= 1.0

    def __str__(self) -> str:
        return f"{'green' if self.green else 'RED'}: error {self.share:.2f} of its budget in {self.where}"


def verdicts[K](checks: Mapping[K, Callable[[], Verdict]]) -> Iterator[tuple[K, Verdict]]:
    """Runs checks, a few at the same time because they mostly compile; yields verdicts in the given order."""
    if checks:
        progress(f"{len(checks)} gates: compiling and comparing with dense attention in float64")
    pool = ThreadPoolExecutor(min(MOST_AT_ONCE, os.cpu_count() or 1))
    try:
        started = {name: pool.submit(check) for name, check in checks.items()}
        for name, verdict in started.items():
            yield name, verdict.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # after Ctrl-C nothing new begins


def gate_shape(shape: Shape, config: NSAConfig) -> Shape:
    """A small odd length beyond `n` blocks and the window, with the heads per KV head and dims of `shape`."""
    kv_heads = min(shape.kv_heads, 2)
    length = max((config.num_selected_blocks + 5) * config.selection_block_size, 2 * config.window_size) - 11
    heads = shape.query_heads // shape.kv_heads * kv_heads
    return dataclasses.replace(shape, batch=1, length=length, kv_heads=kv_heads, query_heads=heads)


def check_small(operation: str, implementation: str, mode: str, shape: Shape, config: NSAConfig) -> Verdict:
    """Compares all results of one mode at `gate_shape`."""
    shape = gate_shape(shape, config)
    if LAYERS.get(operation, operation) == "dense_attention":  # cuDNN has a gradient of even lengths only
        shape = dataclasses.replace(shape, length=shape.length // 64 * 64)
    if operation in LAYERS:
        draw = layers.draw(operation, implementation, shape, config)
    elif operation == "selected_attention":
        draw = draw_blocks(shape, config, "random")
    else:
        choose = jax.jit(programs.function("select_blocks", implementation, config))
        selects = operation == "native_sparse_attention"
        draw = draw_queries(shape, config, "random", choose if selects else None)
    operands = programs.arguments(operation, draw, shape, config)
    run = programs.function(operation, implementation, config, shape)
    got = programs.compile_mode(run, mode, operands).run()
    positions = np.arange(shape.length)
    if mode == "fwd":
        return check_rows(operation, got, positions, draw, shape, config)
    named = _named(operation, operands, shape, config)
    gradients = functools.partial(
        _gradients, positions=positions, blocks=draw.block_indices, operation=operation, config=config,
        cotangent_dtype=shape.dtype, shape=shape,
    )  # fmt: skip
    got = got if mode == "bwd" else got[1]
    return compare(dict(zip(named, got, strict=True)), gradients, named, shape.dtype)


def sample_positions(length: int) -> np.ndarray:
    """Queries that the check at full length compares: the first, the last, and random ones in between."""
    between = np.random.default_rng(0).integers(0, length, SAMPLED_QUERIES - 2)
    return np.unique([0, *between, length - 1])


def check_rows(
    operation: str, got: Any, positions: np.ndarray, draw: Draw, shape: Shape, config: NSAConfig
) -> Verdict:
    """Compares the forward results `got` of a whole sequence in the rows `positions`."""
    operands = _named(operation, programs.arguments(operation, draw, shape, config), shape, config)
    if operation in LAYERS:
        return _check_layer_rows(operation, got[:, positions], positions, operands, draw, shape, config)
    for name in operands:
        if name in ("query", "gates") or name.startswith("out"):
            operands[name] = operands[name][:, positions]
    if operation == "select_blocks":
        return _compare_selection(got[:, positions], operands, positions, shape, config)
    rows = tuple(x[:, positions] for x in (got if isinstance(got, tuple) else (got,)))
    blocks = None if draw.block_indices is None else draw.block_indices[:, positions]
    verdict = compare_rows(operation, rows, operands, positions, blocks, config)
    if operation == "native_sparse_attention":
        selection = _compare_selection(blocks, operands, positions, shape, config)
        verdict = max(verdict, selection, key=lambda verdict: verdict.share)
    return verdict


def _check_layer_rows(
    operation: str, rows: Array, positions: np.ndarray, operands: dict[str, Array], draw: Draw, shape: Shape,
    config: NSAConfig,
) -> Verdict:  # fmt: skip
    blocks = None if draw.block_indices is None else draw.block_indices[:, positions]
    settings = dict(operation=operation, config=config, shape=shape)
    dense = functools.partial(_rows, positions=positions, blocks=blocks, **settings)
    verdict = compare({"out": rows}, dense, operands, shape.dtype)
    if operation == "layer":
        made = jax.jit(lambda x: _layer_operands(x, shape, config))(operands)
        of_selection = {"query": made.query[:, positions], "key_cmp": made.key_cmp}
        selection = _compare_selection(blocks, of_selection, positions, shape, config)
        verdict = max(verdict, selection, key=lambda verdict: verdict.share)
    return verdict


def compare_rows(
    operation: str,
    rows: tuple[Array, ...],
    operands: dict[str, Array],
    positions: np.ndarray,
    blocks: Any,
    config: NSAConfig,
) -> Verdict:
    """Compares `(out,)` or `(out, lse)` of the queries at `positions`, given those queries and all keys."""
    dense = functools.partial(_rows, positions=positions, blocks=blocks, operation=operation, config=config)
    return compare(dict(zip(("out", "lse"), rows, strict=False)), dense, operands, rows[0].dtype.name)


def _named(operation: str, operands: tuple[Array, ...], shape: Shape, config: NSAConfig) -> dict[str, Array]:
    if operation in LAYERS:
        return dict(zip(("x", *layers.parameters(operation, shape, config)), operands, strict=True))
    named = dict(zip(ARGUMENTS[operation], operands, strict=True))
    named.pop("block_indices", None)
    return named


def _in_both(dense: Callable[..., Any], operands: Mapping[str, Any], dtype: str) -> tuple[Any, Any]:
    """`dense`, compiled, in the input's own precision and in float64, both as float64 arrays of NumPy."""
    results = []
    for computed_in in (dtype, "float64"):
        with jax.enable_x64(True):
            result = dense({name: x.astype(computed_in) for name, x in operands.items()})
        results.append(jax.tree.map(lambda x: np.asarray(x, np.float64), result))
    return tuple(results)


def compare(got: Mapping[str, Any], dense: Any, operands: Mapping[str, Any], dtype: str) -> Verdict:
    """Compares results by name with those of `dense`, a function of arrays by name, by the budget above."""
    same, exact = _in_both(dense, operands, dtype)
    worst = Verdict(0.0, "nothing")
    for name, x in got.items():
        size = np.abs(np.where(np.isfinite(exact[name]), exact[name], 0)).max(initial=0)
        rounding = _distance(same[name], exact[name])
        assert np.isfinite(rounding), name
        budget = 2 * rounding + 8 * float(jnp.finfo(dtype).eps) * size
        share = _distance(np.asarray(x, np.float64), exact[name]) / (budget + TINY)
        if share > worst.share:
            worst = Verdict(share, name)
    return worst


def _distance(x: np.ndarray, exact: np.ndarray) -> float:
    """Largest difference; the -inf of an empty row equals only itself, and NaN is infinitely far from all."""
    with np.errstate(invalid="ignore"):
        difference = np.where(x == exact, 0, np.abs(x - exact))
    return float(np.nan_to_num(difference, nan=np.inf).max(initial=0))


def _compare_selection(
    got: Any, operands: dict[str, Array], positions: np.ndarray, shape: Shape, config: NSAConfig
) -> Verdict:
    scores = functools.partial(_importance, positions=positions, length=shape.length, config=config)
    same, exact = _in_both(scores, operands, shape.dtype)
    # Scores fall as 1/t, so each query has a budget of its own.
    budget = 2 * np.abs(same - exact).max(-1) + 8 * float(jnp.finfo(shape.dtype).eps) * exact.max(-1)
    block = np.arange(exact.shape[-1])
    current = positions[:, None, None] // config.selection_block_size
    candidate = block <= current
    forced = candidate & ((block < config.num_initial_blocks) | (block > current - config.num_local_blocks))
    chosen = (np.asarray(got)[..., None] == block).any(axis=-2)
    expected = np.minimum(current + 1, config.num_selected_blocks)
    if (chosen & ~candidate | forced & ~chosen).any() or (chosen.sum(-1, keepdims=True) != expected).any():
        return Verdict(np.inf, "block_indices: a block of the future, or a missing one")
    worst_in = np.where(chosen & ~forced, exact, np.inf).min(axis=-1)
    best_out = np.where(candidate & ~chosen, exact, -np.inf).max(axis=-1)
    return Verdict(float((np.maximum(best_out - worst_in, 0) / (budget + TINY)).max()), "block_indices")


@functools.partial(jax.jit, static_argnames=("operation", "config", "shape"))
def _rows(
    x: dict[str, Array],
    positions: Array,
    blocks: Any,
    operation: str,
    config: NSAConfig,
    shape: Shape | None = None,
) -> dict[str, Array]:
    return dict(zip(("out", "lse"), _dense(operation, x, positions, blocks, config, shape), strict=False))


@functools.partial(jax.jit, static_argnames=("operation", "config", "cotangent_dtype", "shape"))
def _gradients(
    x: dict[str, Array],
    positions: Array,
    blocks: Any,
    operation: str,
    config: NSAConfig,
    cotangent_dtype: str,
    shape: Shape,
) -> dict[str, Array]:
    out, pullback = jax.vjp(lambda x: _dense(operation, x, positions, blocks, config, shape)[0], x)
    return pullback(programs.cotangent_like(out, cotangent_dtype).astype(out.dtype))[0]


def _visible(operation: str, positions: Array, num_keys: int, config: NSAConfig) -> Bool[Array, "T S"]:
    t, s = positions[:, None], jnp.arange(num_keys)
    if operation == "compressed_attention":
        return s * config.compression_stride + config.compression_block_size - 1 <= t
    if operation == "window_attention":
        return (s <= t) & (s > t - config.window_size)
    return s <= t


def _dense(
    operation: str,
    x: dict[str, Array],
    positions: Array,
    blocks: Any,
    config: NSAConfig,
    shape: Shape | None = None,
) -> Any:
    """`(out, lse)` or `(out,)` of the operation, from its definition; arrays in the dtype to compute in."""
    if operation in LAYERS:
        assert shape is not None
        return (_dense_of_layer(operation, x, positions, blocks, config, shape),)
    if operation == "gated_sum":
        outs = enumerate(("out_cmp", "out_slc", "out_win"))
        return (sum(x["gates"][..., i, None] * x[name] for i, name in outs),)
    if operation == "native_sparse_attention":
        parts = {"cmp": "compressed_attention", "slc": "selected_attention", "win": "window_attention"}
        branches = {"gates": x["gates"]}
        for branch, part in parts.items():
            own = {"query": x["query"], "key": x[f"key_{branch}"], "value": x[f"value_{branch}"]}
            branches[f"out_{branch}"] = _dense(part, own, positions, blocks, config)[0]
        return _dense("gated_sum", branches, positions, None, config)
    key, value = (next(x[name] for name in x if name.startswith(kind)) for kind in ("key", "value"))
    visible = _visible(operation, positions, key.shape[1], config)[None, :, None]
    if operation == "selected_attention":
        key_block = jnp.arange(key.shape[1]) // config.selection_block_size
        visible = visible & (blocks[..., None] == key_block).any(axis=-2)
    weights, lse = _softmax(_logits(x["query"], key), visible[:, :, :, None])
    out = jnp.einsum("btkgs,bskv->btkgv", weights, value, precision="highest")
    batch, length, heads, _ = x["query"].shape
    return out.reshape(batch, length, heads, -1), lse.reshape(batch, length, heads)


def _dense_of_layer(
    operation: str, x: dict[str, Array], positions: Array, blocks: Any, config: NSAConfig, shape: Shape
) -> Float[Array, "B T D"]:
    layer = _layer(operation, x, shape, config)
    if isinstance(layer, DenseAttention):
        index = jnp.arange(shape.length)[None]
        query, key = (rotate(project(x["x"]), index) for project in (layer.query_proj, layer.key_proj))
        operands = {"query": query, "key": key, "value": layer.value_proj(x["x"])}
    else:
        operands = _layer_operands(x, shape, config)._asdict()
    rows = {name: operands[name][:, positions] for name in ("query", "gates") if name in operands}
    return layer.out_proj(_dense(LAYERS[operation], operands | rows, positions, blocks, config)[0])


def _layer(operation: str, x: dict[str, Array], shape: Shape, config: NSAConfig) -> layers.Layer:
    values = tuple(x[name] for name in layers.parameters(operation, shape, config))
    return layers.merged(operation, "", shape, config, values)


def _layer_operands(x: dict[str, Array], shape: Shape, config: NSAConfig) -> Operands:
    layer = _layer("layer", x, shape, config)
    assert not isinstance(layer, DenseAttention)
    return layer.operands(x["x"])


def _logits(query: Array, key: Array) -> Float[Array, "B T K G S"]:
    grouped = query.reshape(*query.shape[:2], key.shape[2], -1, query.shape[-1])
    return jnp.einsum("btkgh,bskh->btkgs", grouped, key, precision="highest") * query.shape[-1] ** -0.5


def _softmax(logits: Array, visible: Array) -> tuple[Array, Array]:
    masked = jnp.where(visible, logits, -1e30)  # finite, so that an empty row has finite gradients
    weights = jnp.where(visible, jax.nn.softmax(masked, axis=-1), 0)
    return weights, jnp.where(visible.any(axis=-1), jax.nn.logsumexp(masked, axis=-1), -jnp.inf)


@functools.partial(jax.jit, static_argnames=("length", "config"))
def _importance(x: dict[str, Array], positions: Int[Array, "T"], length: int, config: NSAConfig) -> Array:
    """Eq. 8-10: probabilities of compressed blocks, weighted by the tokens shared with a selection block."""
    key = x["key_cmp"]
    visible = _visible("compressed_attention", positions, key.shape[1], config)[None, :, None, None]
    per_block = _softmax(_logits(x["query"], key), visible)[0].sum(axis=3)
    num_blocks = -(-length // config.selection_block_size)
    start, block = jnp.arange(key.shape[1]) * config.compression_stride, jnp.arange(num_blocks)
    first = jnp.maximum(start[:, None], block * config.selection_block_size)
    last = jnp.minimum(
        start[:, None] + config.compression_block_size, (block + 1) * config.selection_block_size
    )
    weight = jnp.maximum(last - first, 0) / config.compression_stride
    return jnp.einsum("btkc,cm->btkm", per_block, weight.astype(per_block.dtype), precision="highest")
