"""The decode steps of `nsa_jax.cache`, as subjects of a check.

Each appends the last token to a cache that holds all others, and attends from it.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nsa_jax import NSAConfig, cache, reference
from nsa_jax.cache import Compression, TokenKeysValues
from nsa_jax.dispatch import EVERYWHERE
from nsa_jax.doctor.subject import (
    CONFIG,
    DIM,
    KV_HEADS,
    TOKENS,
    Expected,
    Results,
    Subject,
    expected,
    largest_logit,
    oracle,
)


def subjects(operands: Results, rng: np.random.Generator) -> Iterator[Subject]:
    """Both steps, on operands by name; `rng` draws the tokens that are compressed."""
    yield _step(operands, rng)
    yield _dense_step(operands)


def _step(operands: Results, rng: np.random.Generator) -> Subject:
    """A step of an NSA layer; it completes a compression block."""
    dtype = operands["query"].dtype
    # Means of 32 tokens are small; of larger tokens, they are as large as other keys.
    raw = [(4 * rng.standard_normal((1, TOKENS, KV_HEADS, DIM))).astype(dtype) for _ in ("key", "value")]
    branches = [operands[f"{kind}_{branch}"] for branch in ("slc", "win") for kind in ("key", "value")]
    everything = operands["query"], operands["gates"], *raw, *branches
    prompt, (query, gates, *tokens) = [x[:, :-1] for x in everything], [x[:, -1:] for x in everything]
    empty = cache.init_cache(
        1, TOKENS, num_kv_heads=KV_HEADS, key_dim=DIM, value_dim=DIM, config=CONFIG, dtype=dtype
    )
    settings: dict[str, Any] = dict(config=CONFIG, compress=Compression())

    @functools.cache
    def before() -> cache.NSACache:
        fill = functools.partial(cache.prefill, **settings, implementation=EVERYWHERE)
        operands = empty, prompt[0], TokenKeysValues(*prompt[2:]), prompt[1]
        held: cache.NSACache = oracle(lambda *operands: fill(*operands).cache, dtype.name, *operands)
        return held

    def run(implementation: Any) -> Results:
        step = functools.partial(cache.decode_step, **settings, implementation=implementation)
        out, after = jax.jit(step)(before(), query, TokenKeysValues(*tokens), gates)
        return {"out": out, "key_cmp": after.key_cmp[:, -1:], "value_cmp": after.value_cmp[:, -1:]}

    def results(query: Any, gates: Any, compressed: Any, windows: Any, *others: Any) -> Results:
        key, value = (x.mean(axis=1, keepdims=True) for x in windows)
        arrays = [jnp.concatenate(pair, axis=1) for pair in zip(compressed, (key, value), strict=True)]
        out = reference.native_sparse_attention(query, *arrays, *others, gates, config=CONFIG)  # type: ignore[call-arg,misc]
        return {"out": out, "key_cmp": key, "value_cmp": value}

    def expect() -> dict[str, Expected]:
        compressed: list[Any] = [x[:, :-1] for x in (before().key_cmp, before().value_cmp) if x is not None]
        windows = [x[:, -CONFIG.compression_block_size :] for x in raw]
        logit = largest_logit(query, compressed[0], operands["key_slc"], operands["key_win"])
        return expected(results, dtype.name, query, gates, compressed, windows, *branches, logit=logit)

    return Subject("decode_step", (query, empty.key_cmp, empty.value_cmp), run, expect)


def _dense_step(operands: Results) -> Subject:
    """A step of a dense layer."""
    query, key, value = operands["query"][:, -1:], operands["key_slc"], operands["value_slc"]
    keys, values = (np.concatenate([x[:, :-1], 0 * x[:, -1:]], axis=1) for x in (key, value))
    arrays: Any = keys, values, np.full(1, TOKENS - 1, np.int32), np.zeros(1, bool)
    held = cache.DenseCache(*arrays)

    def run(implementation: Any) -> Results:
        step = functools.partial(cache.dense_decode_step, implementation=implementation)
        return {"out": jax.jit(step)(held, query, key[:, -1:], value[:, -1:]).out}

    def results(*arrays: Any) -> Results:
        # A window over all tokens is dense attention.
        return {"out": reference.window_attention(*arrays, config=NSAConfig(window_size=TOKENS)).out}

    def expect() -> dict[str, Expected]:
        return expected(results, query.dtype.name, query, key, value, logit=largest_logit(query, key))

    return Subject("dense_decode_step", (query, held.key, held.value), run, expect)
