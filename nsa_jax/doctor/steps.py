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
from nsa_jax.cache import Compression, DenseCache, NSACache, TokenKeysValues
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
)


def subjects(operands: Results, rng: np.random.Generator) -> Iterator[Subject]:
    """Both steps, on operands by name; `rng` draws the tokens that are compressed."""
    yield _step(operands, rng)
    yield _dense_step(operands)


def _step(operands: Results, rng: np.random.Generator) -> Subject:
    """A step of an NSA layer; it completes a compression block."""
    query, gates = operands["query"][:, -1:], operands["gates"][:, -1:]
    dtype, shape = query.dtype, (1, TOKENS, KV_HEADS, DIM)
    # Means of 32 tokens are small; of larger tokens, they are as large as other keys.
    raw = {kind: (4 * rng.standard_normal(shape)).astype(dtype) for kind in ("key", "value")}
    compressed = {kind: _means(x[:, :-1]).astype(dtype) for kind, x in raw.items()}
    empty = cache.init_cache(
        1, TOKENS, num_kv_heads=KV_HEADS, key_dim=DIM, value_dim=DIM, config=CONFIG, dtype=dtype
    )
    held: dict[str, Any] = {name: np.array(x) for name, x in empty._asdict().items()}
    held["lengths"][:] = TOKENS - 1
    for kind in ("key", "value"):
        held[f"{kind}_slc"][:, :-1] = operands[f"{kind}_slc"][:, :-1]
        held[f"{kind}_cmp"][:, :-1] = compressed[kind]
        _fill_ring(held[f"{kind}_win_ring"], operands[f"{kind}_win"])
        _fill_ring(held[f"{kind}_raw_ring"], raw[kind])
    before = NSACache(**held)
    branches = [operands[f"{kind}_{branch}"] for branch in ("slc", "win") for kind in ("key", "value")]
    tokens = TokenKeysValues(*(x[:, -1:] for x in (raw["key"], raw["value"], *branches)))

    def run(implementation: Any) -> Results:
        step = functools.partial(
            cache.decode_step, config=CONFIG, compress=Compression(), implementation=implementation
        )
        out, after = jax.jit(step)(before, query, tokens, gates)
        return {"out": out, "key_cmp": after.key_cmp[:, -1:], "value_cmp": after.value_cmp[:, -1:]}

    def results(query: Any, gates: Any, compressed: Any, windows: Any, *others: Any) -> Results:
        completed = {kind: x.mean(axis=1, keepdims=True) for kind, x in windows.items()}
        arrays = [jnp.concatenate([compressed[kind], completed[kind]], axis=1) for kind in ("key", "value")]
        operands = query, *arrays, *others, gates
        out = reference.native_sparse_attention(*operands, config=CONFIG)  # type: ignore[misc]
        return {"out": out, "key_cmp": completed["key"], "value_cmp": completed["value"]}

    def expect() -> dict[str, Expected]:
        windows = {kind: x[:, -CONFIG.compression_block_size :] for kind, x in raw.items()}
        logit = largest_logit(query, before.key_cmp, before.key_slc, operands["key_win"])
        return expected(results, dtype.name, query, gates, compressed, windows, *branches, logit=logit)

    return Subject("decode_step", (query, before.key_cmp, before.value_cmp), run, expect)


def _means(tokens: np.ndarray) -> np.ndarray:
    """Means of the tokens of each compression block, in float32."""
    size, stride = CONFIG.compression_block_size, CONFIG.compression_stride
    starts = range(0, tokens.shape[1] - size + 1, stride)
    return np.stack([tokens[:, s : s + size].astype("float32").mean(axis=1) for s in starts], axis=1)


def _fill_ring(ring: np.ndarray, tokens: np.ndarray) -> None:
    """Writes all tokens but the last into a ring of the cache: token `s` lies in slot `s mod size`."""
    size, held = ring.shape[1], tokens.shape[1] - 1
    last = np.arange(max(held - size, 0), held)
    ring[:, last % size] = tokens[:, last]


def _dense_step(operands: Results) -> Subject:
    """A step of a dense layer."""
    query, key, value = operands["query"][:, -1:], operands["key_slc"], operands["value_slc"]
    arrays: list[Any] = [key.copy(), value.copy(), np.full(1, TOKENS - 1, np.int32), np.zeros(1, bool)]
    arrays[0][:, -1] = arrays[1][:, -1] = 0
    held = DenseCache(*arrays)

    def run(implementation: Any) -> Results:
        step = functools.partial(cache.dense_decode_step, implementation=implementation)
        return {"out": jax.jit(step)(held, query, key[:, -1:], value[:, -1:]).out}

    def results(*arrays: Any) -> Results:
        # A window over all tokens is dense attention.
        return {"out": reference.window_attention(*arrays, config=NSAConfig(window_size=TOKENS)).out}

    def expect() -> dict[str, Expected]:
        return expected(results, query.dtype.name, query, key, value, logit=largest_logit(query, key))

    return Subject("dense_decode_step", (query, held.key, held.value), run, expect)
