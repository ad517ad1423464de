"""The operations of `nsa_jax.attention` with their gradients, as subjects of a check."""

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nsa_jax import attention, reference
from nsa_jax.budget import allowance
from nsa_jax.doctor.subject import (
    CONFIG,
    DIM,
    HEADS,
    TOKENS,
    Expected,
    Results,
    Subject,
    expected,
    largest_logit,
    oracle,
)

OPERANDS = {
    "compressed_attention": ("query", "key_cmp", "value_cmp"),
    "selected_attention": ("query", "key_slc", "value_slc"),
    "window_attention": ("query", "key_win", "value_win"),
    "gated_sum": ("out_cmp", "out_slc", "out_win", "gates"),
    "native_sparse_attention": (
        *("query", "key_cmp", "value_cmp", "key_slc", "value_slc", "key_win", "value_win", "gates"),
    ),
}
type Scores = Callable[[str], np.ndarray]  # importance of the blocks, by the precision it is computed in

SELECTION_IS_GIVEN = ("selected_attention", "native_sparse_attention")


def subjects(operands: Results, rng: np.random.Generator) -> Iterator[Subject]:
    """All operations, on operands by name; `rng` draws the cotangents."""
    cached, one_at_a_time = functools.cache(functools.partial(_scores, operands)), threading.Lock()

    def scores(dtype: str) -> np.ndarray:
        with one_at_a_time:  # checks run in several threads
            return cached(dtype)

    yield _selection(operands, scores)
    for operation in OPERANDS:
        yield _with_gradients(operation, operands, scores, rng)


def _with_gradients(operation: str, operands: Results, scores: Scores, rng: np.random.Generator) -> Subject:
    """An operation with its gradients under random cotangents of the output and the log-sum-exps."""
    names = OPERANDS[operation]
    arrays = tuple(operands[name] for name in names)
    dtype = arrays[0].dtype
    outputs = ("out",) if operation in ("gated_sum", "native_sparse_attention") else ("out", "lse")
    shape = (1, TOKENS, HEADS, DIM)
    cotangents = [rng.standard_normal(shape[: 4 - i]).astype(dtype) for i in range(len(outputs))]
    settings: dict[str, Any] = {} if operation == "gated_sum" else {"config": CONFIG}

    def given() -> dict[str, np.ndarray]:
        return {"block_indices": best_blocks(scores("float64"))} if operation in SELECTION_IS_GIVEN else {}

    def results(function: Callable[..., Any], arrays: Any, cotangents: Any, given: Any) -> Results:
        function = functools.partial(function, **settings, **given)
        found, pull_back = jax.vjp(lambda *arrays: jax.tree.leaves(function(*arrays)), *arrays)
        gradients = pull_back([x.astype(y.dtype) for x, y in zip(cotangents, found, strict=True)])
        return dict(zip(outputs, found, strict=True)) | dict(
            zip((f"d_{name}" for name in names), gradients, strict=True)
        )

    def run(implementation: Any) -> Results:
        function = functools.partial(getattr(attention, operation), implementation=implementation)
        return jax.jit(functools.partial(results, function))(arrays, cotangents, given())

    def expect() -> dict[str, Expected]:
        function = functools.partial(results, getattr(reference, operation))
        keys = [operands[name] for name in names if name.startswith("key")]
        logit = largest_logit(operands["query"], *keys) if keys else 0.0
        return expected(function, dtype.name, arrays, cotangents, given(), logit=logit)

    return Subject(operation, arrays, run, expect)


def _selection(operands: Results, scores: Scores) -> Subject:
    """Selection, judged by the scores of what it selects: where two are equal, either block is right."""
    arrays = operands["query"], operands["key_cmp"]

    def run(implementation: Any) -> Results:
        select = functools.partial(attention.select_blocks, config=CONFIG, implementation=implementation)
        return {"scores": scores_of(jax.jit(select)(*arrays), scores("float64"))}

    def expect() -> dict[str, Expected]:
        exact, same = scores("float64"), scores(arrays[0].dtype.name)
        eps = float(jnp.finfo(jnp.float32).eps)  # of scores, for inputs of every dtype
        # Two blocks may change places if the score of each is off by its budget.
        budget = 2 * allowance(same, exact, eps)
        return {"scores": Expected(scores_of(best_blocks(exact), exact), budget)}

    return Subject("select_blocks", arrays, run, expect)


def _scores(operands: Results, dtype: str) -> np.ndarray:
    """Importance of the blocks [B, T, K, M]: inf for those that are always selected, -inf in the future."""
    score = functools.partial(reference.importance, config=CONFIG)
    scores = oracle(score, dtype, operands["query"], operands["key_cmp"])
    position = np.arange(TOKENS)[:, None, None]
    block = np.arange(scores.shape[-1])
    current = position // CONFIG.selection_block_size
    certain = (block < CONFIG.num_initial_blocks) | (block > current - CONFIG.num_local_blocks)
    return np.where(block > current, -np.inf, np.where(certain, np.inf, scores))


def best_blocks(scores: np.ndarray) -> np.ndarray:
    """The blocks with the highest scores [B, T, K, R], ascending; -1 for slots without a block."""
    best = np.argsort(-scores, axis=-1, kind="stable")[..., : CONFIG.num_selected_blocks]
    unused = np.take_along_axis(scores, best, -1) == -np.inf
    best = np.sort(np.where(unused, scores.shape[-1], best), axis=-1)
    return np.where(best == scores.shape[-1], -1, best).astype(np.int32)


def scores_of(blocks: Any, scores: np.ndarray) -> np.ndarray:
    """Scores of the blocks in each selection, the highest first; NaN for a selection that cannot be."""
    blocks = np.asarray(blocks)
    used = blocks >= 0
    found = np.take_along_axis(scores, np.clip(blocks, 0, scores.shape[-1] - 1), -1)
    found = -np.sort(-np.where(used, found, 0), axis=-1)
    ordered = (np.diff(blocks, axis=-1) > 0) | ~used[..., 1:]
    return np.where((ordered.all(-1) & (blocks < scores.shape[-1]).all(-1))[..., None], found, np.nan)
