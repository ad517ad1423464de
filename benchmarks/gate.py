"""The correctness gate: a program that gives a wrong answer gets no time reported.

Two checks against dense attention in float64 (`definitions.py`), within the error budget (`verdict.py`).
First every output and every gradient, also for a cotangent of the log-sum-exp, at a small length at which the
selection is sparse. Then the very program that is timed, at the shape and batch that are timed: outputs of
sampled queries, the form of all block indices, and all gradients for a cotangent that is zero but at the
sampled queries. So these few queries give every row of every gradient, also of keys, values and parameters.

A selection passes if its indices have their form and no rejected block scores higher than a chosen one;
outputs and gradients are then compared for this selection. A layer is compared with its own projections,
compressors and gates around dense attention.

Operations are compared one row of the batch and one KV head at a time. Where keys are so many that their
gradients in float64 would fill a device, those of each branch are computed alone and compared on the device.
"""

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import definitions, layers, programs
from benchmarks.command_line import progress
from benchmarks.inputs import ARGUMENTS, LAYERS, Draw, Shape, of_query
from benchmarks.selections import check_form, check_scores
from benchmarks.timing import Compiled
from benchmarks.verdict import NOTHING, Expected, Verdict, judge, sizes_of_tokens, worst
from nsa_jax.array_typing import Array

SAMPLED_QUERIES = 256  # at 64k tokens one in each 256: a fault of 512 queries in a row is always seen
# Of a layer, which computes its queries: the program that says which blocks they select may round otherwise,
# and select others where scores are close. So few are compared.
SAMPLED_OF_LAYER = 16
MOST_AT_ONCE = 4  # checks: each needs some gigabytes
MOST_NUMBERS = 1 << 26  # of gradients of keys and values that are computed at once: 512 MB in float64


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


def gate_shape(shape: Shape) -> Shape:
    """A small odd length beyond `n` blocks and the window, with the heads per KV head and dims of `shape`."""
    kv_heads, config = min(shape.kv_heads, 2), shape.config
    length = max((config.num_selected_blocks + 5) * config.selection_block_size, 2 * config.window_size) - 11
    heads = shape.query_heads // shape.kv_heads * kv_heads
    return dataclasses.replace(shape, batch=1, length=length, kv_heads=kv_heads, query_heads=heads)


def check_small(operation: str, implementation: str, mode: str, shape: Shape) -> Verdict:
    """Compares all results of one mode at `gate_shape`; gradients also for a cotangent of the lse."""
    shape = gate_shape(shape)
    if LAYERS.get(operation, operation) == "dense_attention":  # cuDNN has a gradient of even lengths only
        shape = dataclasses.replace(shape, length=shape.length // 64 * 64)
    draw = programs.draw(operation, implementation, shape)
    operands = programs.arguments(operation, draw, shape)
    run = programs.function(operation, implementation, shape)
    program = programs.compile_mode(run, mode, operands, every_result=True)
    return check_program(operation, mode, program, np.arange(shape.length), draw, shape)


def sample_positions(length: int, operation: str = "") -> np.ndarray:
    """Queries that the check at full length compares: one in each of equal parts of a row, and the last."""
    count = SAMPLED_OF_LAYER if operation == "layer" else SAMPLED_QUERIES
    if length <= count:
        return np.arange(length)
    edges = np.linspace(0, length, count + 1).astype(int)
    positions = np.random.default_rng(0).integers(edges[:-1], edges[1:])
    positions[-1] = length - 1
    return positions


def check_program(
    operation: str, mode: str, program: Compiled, positions: np.ndarray, draw: Draw, shape: Shape
) -> Verdict:
    """Compares what `program`, of `programs.compile_mode`, computes for the queries at `positions`.

    The form of block indices is that of all queries.
    """
    found = program.run() if mode == "fwd" else None
    selected = found if operation == "select_blocks" else draw.block_indices
    if selected is not None:
        form = check_form(np.asarray(selected), np.arange(shape.length), shape.config)
        if not form.green:
            return form
    if found is not None:
        return check_rows(operation, found, positions, draw, shape)
    taken, cotangents = program.arguments
    given = {name: x[:, positions] for name, x in zip(("out", "lse"), cotangents, strict=False)}
    sampled = zip(cotangents, given.values(), strict=True)
    nothing_else = tuple(jnp.zeros_like(x).at[:, positions].set(rows) for x, rows in sampled)
    found = jax.block_until_ready(program.call(taken, nothing_else))
    got = dict(zip(_operands(operation, draw, shape), found if mode == "bwd" else found[1], strict=True))
    got = got if operation in LAYERS else _rows(got, positions)
    return _compare(
        operation, definitions.gradients, got, (given,), positions, draw, shape, gradients_in_both
    )


def check_rows(operation: str, got: Any, positions: np.ndarray, draw: Draw, shape: Shape) -> Verdict:
    """Compares the forward results `got` of a whole sequence in the rows `positions`."""
    if operation == "select_blocks":
        return _check_selection(got, _operands(operation, draw, shape), positions, shape)
    named = dict(zip(("out", "lse"), got if isinstance(got, tuple) else (got,), strict=False))
    return _compare(
        operation, definitions.results, _rows(named, positions), (), positions, draw, shape, in_both
    )  # fmt: skip


def _compare(
    operation: str, dense: Callable[..., Any], got: dict[str, Any], cotangents: tuple[Any, ...],
    positions: np.ndarray, draw: Draw, shape: Shape, compute: Callable[..., Expected],
) -> Verdict:  # fmt: skip
    """Compares results, or gradients, by name with those of `dense`; then what an operation selects."""
    operands = _operands(operation, draw, shape)
    blocks = None if draw.block_indices is None else draw.block_indices[:, positions]
    dense = functools.partial(dense, operation=operation, shape=shape)
    if operation in LAYERS:
        dense = functools.partial(dense, positions=positions, blocks=blocks)
        expected = compute(dense, (operands, *cotangents), shape.dtype)
        verdict = judge(got, expected, positions, whole=got.keys() - {"x", "out"})
    else:
        given = _rows(operands, positions), *cotangents
        verdict = compare(dense, got, given, positions, blocks, shape.kv_heads, compute)
    if LAYERS.get(operation, operation) != "native_sparse_attention":
        return verdict
    if operation in LAYERS:
        operands = definitions.layer_operands(operands, operation=operation, shape=shape)
    return worst(verdict, _check_selection(draw.block_indices, operands, positions, shape))


def in_both(
    dense: Callable[..., Any], given: tuple[Any, ...], dtype: str, names: tuple[str, ...] | None = None
) -> Expected:
    """`dense` in the input's own precision and in float64: results of all names."""
    del names
    return Expected(_computed_in(dtype, dense, given), _computed_in("float64", dense, given))


def gradients_in_both(
    dense: Callable[..., Any], given: tuple[Any, ...], dtype: str, names: tuple[str, ...] | None = None
) -> Expected:
    """The same of gradients, of `names` or all, with their terms.

    `dense` takes `names` and `uncentred`, as `definitions.gradients`.
    """
    dense = functools.partial(dense, names=names)
    terms = _computed_in("float64", functools.partial(dense, uncentred=1.0), given)
    terms = jax.tree.map(sizes_of_tokens, terms)  # first, so that it does not lie beside the others
    same, exact, _ = in_both(functools.partial(dense, uncentred=0.0), given, dtype)
    return Expected(same, exact, terms)


def _computed_in(dtype: str, dense: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    """In float64 on the host; what is large stays on the device as it is."""
    with jax.enable_x64(True):
        found = dense(*given, dtype=dtype)
    return jax.tree.map(lambda x: x if x.size > MOST_NUMBERS else np.asarray(x, np.float64), found)


def compare(
    dense: Callable[..., Any], got: Mapping[str, Any], given: tuple[Any, ...], positions: np.ndarray,
    blocks: Any, kv_heads: int, compute: Callable[..., Expected] = in_both,
) -> Verdict:  # fmt: skip
    """Compares results by name with those of `dense`, one row of the batch and one KV head at a time.

    Args:
      dense: a function of `given`, positions and blocks, as those of `definitions`.
      got: results; axis 0 is that of the batch, axis 2 that of heads.
      given: arrays by name, with the same axes.
      positions: of the queries.
      blocks: selected by these queries, or None.
      kv_heads: number of KV heads; none sees what another holds.
      compute: `in_both`, or `gradients_in_both` where `dense` gives gradients.
    """
    first, *_ = got.values()

    def of_piece(row: int, head: int) -> Verdict:
        results, arrays, chosen = _piece((dict(got), given, blocks), row, head, kv_heads)
        arrays, at = jax.device_put(arrays), functools.partial(dense, positions=positions, blocks=chosen)
        groups = ({name: results[name] for name in names} for names in _together(results))
        dtype = first.dtype.name
        return worst(*(judge(group, compute(at, arrays, dtype, tuple(group)), positions) for group in groups))

    return _by_piece(of_piece, first.shape[0], kv_heads)


def _together(results: Mapping[str, Array]) -> list[list[str]]:
    """Names of results that are computed at once: all of them; where keys are many, those of one branch."""
    keys = [name for name in results if not of_query(name)]
    if sum(results[name].size for name in keys) <= MOST_NUMBERS:
        return [list(results)]
    branches = {name.partition("_")[2] for name in keys}
    groups = [[name for name in keys if name.endswith(branch)] for branch in sorted(branches)]
    queries = [name for name in results if of_query(name)]
    return [queries, *groups] if queries else groups


def _check_selection(blocks: Any, operands: dict[str, Array], positions: np.ndarray, shape: Shape) -> Verdict:
    """The form of the indices of the queries at `positions`, and the scores of what they left out."""
    verdict = check_form(np.asarray(blocks[:, positions]), positions, shape.config)
    if not verdict.green:
        return verdict
    scores = functools.partial(definitions.importance, positions=positions, shape=shape)
    scored = {"query": operands["query"][:, positions], "key_cmp": operands["key_cmp"]}

    def of_piece(row: int, head: int) -> Verdict:
        arrays, chosen = _piece((scored, blocks[:, positions]), row, head, shape.kv_heads)
        same, exact, _ = in_both(scores, (arrays,), shape.dtype)
        return check_scores(np.asarray(chosen), positions, same, exact, shape)

    return worst(verdict, _by_piece(of_piece, shape.batch, shape.kv_heads))


def _piece(arrays: Any, row: int, head: int, kv_heads: int) -> Any:
    """What belongs to one row of the batch and one KV head. Of arrays of NumPy it is taken on the host."""
    on_host = all(isinstance(x, np.ndarray) for x in jax.tree.leaves(arrays))
    return (_cut if on_host else _cut_there)(arrays, row, head, kv_heads)


def _cut(arrays: Any, row: Any, head: Any, kv_heads: int) -> Any:
    def cut(x: Any) -> Any:
        grouped = x.reshape(*x.shape[:2], kv_heads, -1, *x.shape[3:])
        return grouped[row, :, head][None]

    return jax.tree.map(cut, arrays)


_cut_there = jax.jit(_cut, static_argnames="kv_heads")  # compiled once for all pieces


def _by_piece(check: Callable[[int, int], Verdict], batch: int, kv_heads: int) -> Verdict:
    """The worst verdict of `check` on all rows of the batch and KV heads."""
    verdict = NOTHING
    for row, head in itertools.product(range(batch), range(kv_heads)):
        found = check(row, head)
        place = f"{found.where}, row {row}, KV head {head}"
        verdict = worst(verdict, dataclasses.replace(found, where=place))
    return verdict


def _operands(operation: str, draw: Draw, shape: Shape) -> dict[str, Array]:
    """The arrays of the operation by name, without the selection that it is given."""
    operands = programs.arguments(operation, draw, shape)
    if operation in LAYERS:
        return dict(zip(("x", *layers.parameters(operation, shape)), operands, strict=True))
    named = dict(zip(ARGUMENTS[operation], operands, strict=True))
    return {name: x for name, x in named.items() if name != "block_indices"}


def _rows(arrays: Mapping[str, Array], positions: np.ndarray) -> dict[str, Array]:
    return {name: x[:, positions] if of_query(name) else x for name, x in arrays.items()}
