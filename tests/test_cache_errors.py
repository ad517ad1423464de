"""What a cache refuses: each is one clear error, raised before anything is written."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_layer import SMALL, Layer

from nsa_jax import cache

LAYER = Layer.make(length=12)
SIZES = dict(batch=2, max_length=16, num_kv_heads=2, key_dim=6, value_dim=5, config=SMALL, dtype=jnp.float32)


def arguments(length=3, **changes):
    query, tokens, gates = LAYER.slice(0, length)
    given = dict(cache=LAYER.empty(16), query=query, tokens=tokens, gates=gates, config=SMALL)
    return given | dict(compress=LAYER.compress) | changes


def with_tokens(**changes):
    return LAYER.slice(0, 3)[1]._replace(**changes)


BAD_SHAPES = {
    "rank": (
        dict(query=np.zeros((3, 4, 6), np.float32)),
        r"query must be \[B, T, N, H\], got shape \(3, 4, 6\)",
    ),
    "no token": (arguments(0), "a step must have at least one token"),
    "batch": (dict(cache=Layer.make(batch=3, length=1).empty(16)), r"query must have shape \(3, 3, 4, 6\)"),
    "heads do not divide": (
        dict(query=np.zeros((2, 3, 3, 6), np.float32)),
        "multiple of KV heads, got 3 and 2",
    ),
    "key dim": (dict(query=np.zeros((2, 3, 4, 7), np.float32)), "query must have shape .* to fit the cache"),
    "KV heads": (
        dict(tokens=with_tokens(key_slc=np.zeros((2, 3, 4, 6), np.float32))),
        "tokens.key_slc must have",
    ),
    "tokens": (
        dict(tokens=with_tokens(value_win=np.zeros((2, 4, 2, 5), np.float32))),
        "tokens.value_win must have",
    ),
    "value dim": (
        dict(tokens=with_tokens(value_cmp=np.zeros((2, 3, 2, 6), np.float32))),
        "tokens.value_cmp must",
    ),
    "query dtype": (
        dict(query=np.zeros((2, 3, 4, 6), np.float16)),
        "dtype of the cache, got float16 and float32",
    ),
    "integer query": (
        dict(query=np.zeros((2, 3, 4, 6), np.int32)),
        "dtype of the cache, got int32 and float32",
    ),
    "token dtype": (
        dict(tokens=with_tokens(key_cmp=np.zeros((2, 3, 2, 6), np.float16))),
        "tokens.key_cmp must have",
    ),
    "gates": (
        dict(gates=np.zeros((2, 3, 4, 2), np.float32)),
        r"gates must be floats of shape \(2, 3, 4, 3\)",
    ),
    "integer gates": (dict(gates=np.zeros((2, 3, 4, 3), np.int32)), "gates must be floats .* got int32"),
    "num_tokens shape": (
        dict(num_tokens=np.zeros(3, np.int32)),
        r"integers of shape \(2,\), got int32 of shape",
    ),
    "num_tokens dtype": (dict(num_tokens=np.zeros(2)), "num_tokens must be integers"),
    "window size": (
        dict(config=dataclasses.replace(SMALL, window_size=9)),
        "a step must have the config of its",
    ),
    "huge window": (
        dict(config=dataclasses.replace(SMALL, window_size=99)),
        "a step must have the config of its",
    ),
    "stride": (
        dict(config=dataclasses.replace(SMALL, compression_stride=1)),
        "a step must have the config of its",
    ),
}


@pytest.mark.parametrize("step", [cache.prefill, cache.decode_step])
@pytest.mark.parametrize(("changes", "message"), BAD_SHAPES.values(), ids=BAD_SHAPES.keys())
def test_step_refuses_what_does_not_fit(step, changes, message):
    with pytest.raises(ValueError, match=message):
        step(**arguments(**changes))


def test_step_longer_than_its_capacity():
    with pytest.raises(ValueError, match=r"step_capacity, got 5 > 4 tokens\. Call prefill, or init_cache"):
        cache.decode_step(**arguments(5))


def test_prompt_longer_than_the_cache():
    held = LAYER.empty(11)
    with pytest.raises(
        ValueError, match=r"a prompt must fit the cache, got 12 tokens and max_length=11\. Call init"
    ):
        cache.prefill(**arguments(12, cache=held))
    with pytest.raises(ValueError, match="got 12 tokens and max_length=11"):  # known at trace time
        jax.jit(lambda: cache.prefill(**arguments(12, cache=held)))()


def test_chunk_without_room_in_one_row():
    held = dataclasses.replace(LAYER.empty(16), lengths=jnp.array([13, 14]))
    with pytest.raises(
        ValueError, match=r"got \[3, 3\] tokens for rows that hold \[13, 14\] of max_length=16"
    ):
        cache.prefill(**arguments(cache=held))
    with pytest.raises(ValueError, match=r"got \[1, 3\] tokens for rows"):
        cache.prefill(**arguments(cache=held, num_tokens=np.array([1, 3])))


@pytest.mark.parametrize("count", [-1, 4])
def test_num_tokens_out_of_range(count):
    with pytest.raises(ValueError, match=r"num_tokens must be within 0 \.\. T, got \[1, -?\d\] with T=3"):
        cache.prefill(**arguments(num_tokens=np.array([1, count])))


@pytest.mark.parametrize(
    "name", ["batch", "max_length", "num_kv_heads", "key_dim", "value_dim", "step_capacity"]
)
def test_init_cache_refuses_sizes_below_one(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        cache.init_cache(**(SIZES | {name: 0}))


def test_init_cache_refuses_integers():
    with pytest.raises(ValueError, match=r"dtype must be floating, got int32\. Pass the dtype of the keys"):
        cache.init_cache(**(SIZES | dict(dtype=jnp.int32)))
