"""The operations that teach a selection, as subjects of a check."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nsa_jax import attention, layout, reference
from nsa_jax.doctor.subject import CONFIG, KV_HEADS, TOKENS, Results, Subject, expected, largest_logit

LOWEST = -80.0  # below it are blocks without importance, whose score depends on the dtype


def subjects(operands: Results, rng: np.random.Generator) -> Iterator[Subject]:
    """The three operations, on operands by name; `rng` draws blocks and the cotangents."""
    query, key = operands["query"], operands["key_slc"]
    shape = (1, TOKENS, KV_HEADS, CONFIG.num_selected_blocks)
    blocks = rng.integers(-1, layout.num_selection_blocks(TOKENS, CONFIG), shape, dtype=np.int32)
    yield _probabilities("block_probabilities", query, key)
    yield _probabilities("selected_probabilities", query, key, blocks)
    yield _importance(query, operands["key_cmp"], rng)


def _probabilities(operation: str, query: np.ndarray, key: np.ndarray, *blocks: np.ndarray) -> Subject:
    """Of the heads their sum, and the largest."""
    arrays = query, key, *blocks

    def results(module: Any, *arrays: Any, **more: Any) -> Results:
        function = functools.partial(getattr(module, operation), config=CONFIG, **more)
        return {reduce: function(*arrays, reduce=reduce) for reduce in ("sum", "max")}

    def run(implementation: Any) -> Results:
        return jax.jit(functools.partial(results, attention, implementation=implementation))(*arrays)

    def expect() -> Any:
        function = functools.partial(results, reference)
        return expected(function, query.dtype.name, *arrays, logit=largest_logit(query, key))

    return Subject(operation, arrays, run, expect)


def _importance(query: np.ndarray, key_cmp: np.ndarray, rng: np.random.Generator) -> Subject:
    """The scores, with gradients under random cotangents."""
    arrays = query, key_cmp
    num_blocks = max(layout.max_selection_blocks(key_cmp.shape[1], CONFIG), 1)
    cotangent = rng.standard_normal((1, TOKENS, KV_HEADS, num_blocks)).astype(np.float32)

    def results(module: Any, arrays: Any, cotangent: Any, **more: Any) -> Results:
        def score(query: Any, key_cmp: Any) -> Any:
            scores = module.importance_scores(query, key_cmp, config=CONFIG, **more)
            return jnp.where(scores > LOWEST, scores, 0)

        scores, pull_back = jax.vjp(score, *arrays)
        d_query, d_key_cmp = pull_back(cotangent.astype(scores.dtype))
        return dict(scores=scores, d_query=d_query, d_key_cmp=d_key_cmp)

    def run(implementation: Any) -> Results:
        function = functools.partial(results, attention, implementation=implementation)
        return jax.jit(function)(arrays, cotangent)

    def expect() -> Any:
        function = functools.partial(results, reference)
        logit = largest_logit(query, key_cmp)
        return expected(function, query.dtype.name, arrays, cotangent, logit=logit)

    return Subject("importance_scores", arrays, run, expect)
