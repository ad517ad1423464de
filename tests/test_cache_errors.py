"""What a cache refuses: each is one clear error, raised before anything is written."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_layer import SMALL, Layer, compress
from messages import refused

from nsa_jax import cache
from nsa_jax.cache import Compression, ResidualMLP, Rotation

LAYER = Layer.make(length=12)
SIZES = dict(batch=2, max_length=16, num_kv_heads=2, key_dim=6, value_dim=5, config=SMALL, dtype=jnp.float32)


def arguments(length=3, **changes):
    query, tokens, gates = LAYER.slice(0, length)
    given = dict(cache=LAYER.empty(16), query=query, tokens=tokens, gates=gates, config=SMALL)
    return given | dict(compress=functools.partial(compress, SMALL)) | changes


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def other_config(**changes):
    return dict(config=dataclasses.replace(SMALL, **changes))


THREE_HEADS = dict(query=zeros(2, 3, 3, 6), gates=zeros(2, 3, 3, 3))
OF_ANOTHER = "a step must be given the config of its cache, got a cache with rings"
BAD = {
    "no token": (arguments(0), "a step must have at least one token"),
    "heads": (THREE_HEADS, "must be a multiple .* N = 3 and K = 2"),
    "query dtype": (dict(query=zeros(2, 3, 4, 6, dtype=np.float16)), "one dtype, got .* query float16"),
    "slots": (
        dict(block_indices=zeros(2, 3, 2, 5, dtype=int)),
        "block_indices must have num_selected_blocks = 4 slots per query, got 5",
    ),
    "window size": (other_config(window_size=9), OF_ANOTHER),
    "huge window": (other_config(window_size=99), OF_ANOTHER),
    "stride": (other_config(compression_stride=1), OF_ANOTHER),
}


@pytest.mark.parametrize("step", [cache.prefill, cache.decode_step])
@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD.keys())
def test_step_refuses_what_does_not_fit(step, changes, message):
    with refused(ValueError, message):
        step(**arguments(**changes))


def test_compression_of_another_cache():
    def mlp(size, dim, dtypes=("float32",) * 5):
        shapes = ((size, dim), (size * dim, 3), (3,), (3, dim), (dim,))
        return ResidualMLP(*(np.zeros(x, dtype) for x, dtype in zip(shapes, dtypes, strict=True)))

    size, key_dim = SMALL.compression_block_size, SIZES["key_dim"]
    bad = {
        "key MLP of a compression must have arrays of shapes": Compression(key=mlp(size + 1, key_dim)),
        "value MLP of a compression": Compression(value=mlp(size, key_dim)),
        "share one floating dtype, got": Compression(key=mlp(size, key_dim, ("float16", *["float32"] * 4))),
        "must share one floating dtype": Compression(key=mlp(size, key_dim, ("int32",) * 5)),
        "at most 3 pairs for keys of width 6": Compression(rotation=Rotation.of(np.ones(4))),
        r"got int32 and float32 of shapes \(\(2, 2\)": Compression(rotation=Rotation.of(np.ones((2, 2)))),
        "got float32 and float32": Compression(rotation=Rotation(*np.ones((2, 3), np.float32))),
        "a ResidualMLP or None, got function": Compression(key=lambda windows: windows.mean(2)),
        "a Rotation or None, got function": Compression(rotation=lambda x, positions: x),
        "one key and one value for each block": lambda k, v, first: (k.mean(2)[:, :, :1], v.mean(2)),
    }
    for message, compression in bad.items():
        for step in (cache.prefill, cache.decode_step):
            given = arguments(compress=compression)
            with refused(TypeError if "None" in message else ValueError, message):
                jax.eval_shape(lambda: step(**given))  # noqa: B023


def test_fields_of_a_cache_are_not_assigned():
    with pytest.raises(AttributeError, match="can't set attribute"):
        LAYER.empty(4).lengths = jnp.zeros(2, jnp.int32)


def test_step_longer_than_its_capacity():
    with refused(ValueError, r"step_capacity, got 5 > 4 tokens\. Call prefill, or init_cache"):
        cache.decode_step(**arguments(5))


def test_prompt_longer_than_the_cache():
    held = LAYER.empty(11)
    with refused(ValueError, r"a prompt must fit the cache, got 12 tokens and max_length=11\. Call init"):
        cache.prefill(**arguments(12, cache=held))
    with refused(ValueError, "got 12 tokens and max_length=11"):  # known at trace time
        jax.jit(lambda: cache.prefill(**arguments(12, cache=held)))()


def test_a_prompt_may_fill_the_cache():
    given = arguments(12, cache=LAYER.empty(12))

    step = jax.eval_shape(lambda: cache.prefill(**given))

    assert step.out.shape == (2, 12, 4, 5)


def test_a_cache_of_arrays_that_do_not_fit_together():
    held = LAYER.empty(16)
    bad = {
        r"axis window of cache\.value_win_ring must be 11": dict(value_win_ring=held.value_win_ring[:, :3]),
        "one dtype, got .*cache.key_raw_ring bfloat16": dict(
            key_raw_ring=held.key_raw_ring.astype("bfloat16")
        ),
        "both window rings or neither, got one without values": dict(value_win_ring=None),
    }
    for message, change in bad.items():
        for step in (cache.prefill, cache.decode_step):
            with refused((TypeError, ValueError), message):
                step(**arguments(cache=held._replace(**change)))


def test_chunk_without_room_in_one_row():
    held = LAYER.empty(16)._replace(lengths=jnp.array([13, 14]))
    with refused(ValueError, r"got \[3, 3\] tokens for rows that hold \[13, 14\] of max_length=16"):
        cache.prefill(**arguments(cache=held))
    with refused(ValueError, r"got \[1, 3\] tokens for rows"):
        cache.prefill(**arguments(cache=held, num_tokens=np.array([1, 3])))


@pytest.mark.parametrize("dtype", [np.int64, np.uint8])
@pytest.mark.parametrize("max_length", [2, 16])
def test_init_cache_takes_ints_of_numpy_in_a_program(max_length, dtype):
    """2 tokens are fewer than a block has."""
    given = SIZES | dict(max_length=max_length)
    sizes = {name: dtype(given[name]) for name in ("batch", "max_length", "num_kv_heads", "key_dim")}

    held = jax.jit(lambda: cache.init_cache(**(given | sizes)))()

    assert jax.tree.map(jnp.shape, held) == jax.tree.map(jnp.shape, cache.init_cache(**given))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint16"])
def test_counts_may_be_narrow_where_lengths_are_not(dtype):
    """300 tokens do not fit a narrow dtype, what is real of them does."""
    long = Layer.make(length=300)
    query, tokens, gates = long.slice(0, 300)
    given = dict(query=query, tokens=tokens, gates=gates, config=SMALL)
    given |= dict(compress=functools.partial(compress, SMALL), num_tokens=np.array([100, 3], dtype))

    empty = long.empty(320)

    lengths = jax.jit(lambda: cache.prefill(empty, **given).cache.lengths)()

    assert lengths.tolist() == [100, 3]
    with refused(ValueError, r"got \[100, 3\] tokens for rows that hold \[300, 300\]"):
        cache.prefill(empty._replace(lengths=np.full(2, 300, np.int32)), **given)
