"""The operations of `nsa_jax.attention` with their gradients, as subjects of a check."""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nsa_jax import attention, layout, reference
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
INDEXED = ("query_index", "key_index", "weights")
type Scores = Callable[[str], np.ndarray]  # scores of the blocks, by the precision they are computed in

SELECTION_IS_GIVEN = ("selected_attention", "native_sparse_attention")


def subjects(operands: Results, rng: np.random.Generator) -> Iterator[Subject]:
    """All operations, on operands by name; `rng` draws the cotangents."""
    compressed, indexed, given = (
        [operands[name] for name in names] for names in (("query", "key_cmp"), INDEXED, ("scores",))
    )
    scores = _computed_once(functools.partial(reference.importance, config=CONFIG), *compressed)
    of_index = _computed_once(_index_scores(reference), *indexed)
    yield _selection("select_blocks", compressed, scores)
    yield _with_index_gradients(indexed, rng)
    yield _selection("select_by_index", indexed, of_index)
    yield _selection("top_blocks", given, _computed_once(lambda scores: scores, *given))
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


def _index_scores(module: Any, **settings: Any) -> Callable[..., Any]:
    """`block_scores` of a module with weights, as a function of its arrays."""

    def score(query: Any, key: Any, weights: Any) -> Any:
        return module.block_scores(query, key, weights=weights, config=CONFIG, **settings)

    return score


def _with_index_gradients(arrays: Sequence[Any], rng: np.random.Generator) -> Subject:
    """The scores of an indexer, 0 where a query sees nothing of a block, with their gradients."""
    num_blocks = layout.num_selection_blocks(TOKENS, CONFIG)
    cotangent = rng.standard_normal((*arrays[0].shape[:3], num_blocks)).astype(arrays[0].dtype)

    def results(score: Callable[..., Any], arrays: Any, cotangent: Any) -> Results:
        def visible(*arrays: Any) -> Any:
            scores = score(*arrays)
            return jnp.where(jnp.isfinite(scores), scores, 0)

        found, pull_back = jax.vjp(visible, *arrays)
        gradients = pull_back(cotangent.astype(found.dtype))
        return {"scores": found} | {f"d_{name}": x for name, x in zip(INDEXED, gradients, strict=True)}

    def run(implementation: Any) -> Results:
        score = _index_scores(attention, implementation=implementation)
        return jax.jit(functools.partial(results, score))(tuple(arrays), cotangent)

    def expect() -> dict[str, Expected]:
        function = functools.partial(results, _index_scores(reference))
        return expected(function, arrays[0].dtype.name, tuple(arrays), cotangent)

    return Subject("block_scores", tuple(arrays), run, expect)


def _selection(operation: str, arrays: Sequence[Any], scores: Scores) -> Subject:
    """Selection, judged by the scores of what it selects: where two are equal, either block is right."""

    def select(implementation: Any, *arrays: Any) -> Any:
        more = dict(weights=arrays[2]) if operation == "select_by_index" else {}
        function = getattr(attention, operation)
        return function(*arrays[:2], config=CONFIG, implementation=implementation, **more)

    def run(implementation: Any) -> Results:
        blocks = jax.jit(functools.partial(select, implementation))(*arrays)
        return {"scores": scores_of(blocks, scores("float64"))}

    def expect() -> dict[str, Expected]:
        exact, same = scores("float64"), scores(arrays[0].dtype.name)
        eps = float(jnp.finfo(jnp.float32).eps)  # of scores, for inputs of every dtype
        # Two blocks may change places if the score of each is off by its budget.
        budget = 2 * allowance(same, exact, eps)
        return {"scores": Expected(scores_of(best_blocks(exact), exact), budget)}

    return Subject(operation, tuple(arrays), run, expect)


def _computed_once(score: Callable[..., Any], *arrays: Any) -> Scores:
    """Scores of arrays by a function of the oracle."""
    cached, one_at_a_time = functools.cache(functools.partial(_scores, score, arrays)), threading.Lock()

    def scores(dtype: str) -> np.ndarray:
        with one_at_a_time:  # checks run in several threads
            return cached(dtype)

    return scores


def _scores(score: Callable[..., Any], arrays: Sequence[Any], dtype: str) -> np.ndarray:
    """Scores of the blocks [B, T, K, M]: inf for those that are always selected, -inf in the future."""
    scores = oracle(score, dtype, *arrays)
    position = np.arange(TOKENS)[:, None, None]
    block = np.arange(scores.shape[-1])
    current = position // CONFIG.selection_block_size
    certain = (block < CONFIG.num_initial_blocks) | (block > current - CONFIG.num_local_blocks)
    infinity = scores.dtype.type(np.inf)  # NumPy 2.1 takes a float beside bfloat16 for one of float16
    return np.where(block > current, -infinity, np.where(certain, infinity, scores))


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
