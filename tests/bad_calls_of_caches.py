"""Good calls that make caches and extend them."""

import math

import jax.numpy as jnp
import numpy as np
from bad_calls import (
    CONFIG,
    DENSE,
    DENSE_HELD,
    DENSE_OF_LAYER,
    HELD,
    LAYER,
    OPTIONS,
    ROOM,
    B,
    Call,
    D,
    H,
    K,
    N,
    T,
    V,
    fields,
    floats,
    method,
)
from bad_values import Counts, DType, Flag, Flags, Floats, Function, Given, Lengths, Of, Real, Whole

from nsa_jax import cache

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
    query=NEW_QUERY,
    key=(floats(B, NEW, K, H), Floats(axes="BTKH")),
    value=(floats(B, NEW, K, V), Floats(axes="BTKV")),
    num_tokens=COUNTS,
    window_size=(None, Whole(optional=True)),
    scale=OPTIONS["scale"],
    implementation=OPTIONS["implementation"],
)


def step(function):
    of_tokens = fields(cache.TokenKeysValues, "tokens", function)
    return fields(cache.NSACache, "cache", of_tokens)


COMPRESS = dict(compress=(cache.Compression(), Function()))
CACHES = {
    "init_cache": Call(
        cache.init_cache, NEW_CACHE | dict(config=(CONFIG, Of()), share_keys_values=(False, Flag()))
    ),
    "init_dense_cache": Call(cache.init_dense_cache, NEW_CACHE | dict(window_size=(3, Whole(optional=True)))),
    "count_reads": Call(
        fields(cache.NSACache, "cache", cache.count_reads),
        held_in(HELD)
        | dict(
            query=(NEW_QUERY[0], Floats(axes="BTNH", free="T")),
            num_tokens=COUNTS,
            config=OPTIONS["config"],
            scale=OPTIONS["scale"],
        ),
    ),
    "expected_reads": Call(cache.expected_reads, dict(length=(T, Whole(low=0)), config=(CONFIG, Of()))),
    "prefill": Call(step(cache.prefill), held_in(HELD) | NEW_TOKENS | STEP | COMPRESS),
    "decode_step": Call(step(cache.decode_step), held_in(HELD) | NEW_TOKENS | STEP | COMPRESS),
    "prefill of another": Call(
        cache.prefill,
        dict(cache=(HELD, Of()), tokens=(cache.TokenKeysValues(*(x for x, _ in NEW_TOKENS.values())), Of()))
        | STEP
        | COMPRESS,
    ),
    "dense_prefill": Call(
        fields(cache.DenseCache, "cache", cache.dense_prefill), held_in(DENSE_HELD) | DENSE_STEP
    ),
    "dense_decode_step": Call(
        fields(cache.DenseCache, "cache", cache.dense_decode_step), held_in(DENSE_HELD) | DENSE_STEP
    ),
    "Rotation.of": Call(
        cache.Rotation.of,
        dict(
            frequency=(
                np.array([1.0, 0.5]),
                Given(
                    refused={
                        "list": [1.0],
                        "int": np.array([1, 2]),
                        "nan": np.array([math.nan]),
                        "float": 1.0,
                        "str": "a",
                    }
                ),
            ),
            magnitude=(1.0, Real(positive=False)),
        ),
    ),
    "NSAAttention.init_cache": Call(
        method(LAYER, "init_cache"), ROWS | dict(dtype=(None, DType(optional=True)))
    ),
    "NSAAttention.check_cache": Call(
        method(LAYER, "check_cache"), dict(cache=(HELD, Of()), batch=(B, Whole()))
    ),
    "NSAAttention.prefill": Call(
        fields(cache.NSACache, "cache", method(LAYER, "prefill")),
        held_in(HELD) | dict(x=NEW_X, num_tokens=COUNTS),
    ),
    "NSAAttention.decode_step": Call(
        fields(cache.NSACache, "cache", method(LAYER, "decode_step")),
        held_in(HELD) | dict(x=NEW_X, num_tokens=COUNTS),
    ),
    "DenseAttention.init_cache": Call(
        method(DENSE, "init_cache"), ROWS | dict(dtype=(None, DType(optional=True)))
    ),
    "DenseAttention.decode_step": Call(
        fields(cache.DenseCache, "cache", method(DENSE, "decode_step")),
        held_in(DENSE_OF_LAYER) | dict(x=NEW_X, num_tokens=COUNTS),
    ),
    "DenseAttention.prefill": Call(
        fields(cache.DenseCache, "cache", method(DENSE, "prefill")),
        held_in(DENSE_OF_LAYER) | dict(x=NEW_X, num_tokens=COUNTS),
    ),
}
