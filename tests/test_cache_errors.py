"""What a cache refuses: each is one clear error, raised before anything is written."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_layer import SMALL, Layer, compress
from messages import has_form

from nsa_jax import cache
from nsa_jax.cache import Compression, ResidualMLP, Rotation

LAYER = Layer.make(length=12)
SIZES = dict(batch=2, max_length=16, num_kv_heads=2, key_dim=6, value_dim=5, config=SMALL, dtype=jnp.float32)


def arguments(length=3, **changes):
    query, tokens, gates = LAYER.slice(0, length)
    given = dict(cache=LAYER.empty(16), query=query, tokens=tokens, gates=gates, config=SMALL)
    return given | dict(compress=functools.partial(compress, SMALL)) | changes


def with_tokens(**changes):
    return LAYER.slice(0, 3)[1]._replace(**changes)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def other_config(**changes):
    return dict(config=dataclasses.replace(SMALL, **changes))


BAD = {
    "rank": (
        dict(query=zeros(3, 4, 6)),
        ValueError,
        r"query must have 4 axes \[B, T, N, H\], got shape \(3, 4, 6\)",
    ),
    "no token": (arguments(0), ValueError, "a step must have at least one token"),
    "no array": (dict(num_tokens=[1, 2]), TypeError, "num_tokens must be an array, got list"),
    "batch": (
        dict(cache=Layer.make(batch=3, length=1).empty(16)),
        ValueError,
        r"axis B of tokens.key_cmp must be 3 \(in cache",
    ),
    "heads": (
        dict(query=zeros(2, 3, 3, 6), gates=zeros(2, 3, 3, 3)),
        ValueError,
        "must be a multiple .* N = 3 and K = 2",
    ),
    "key dim": (dict(query=zeros(2, 3, 4, 7)), ValueError, "axis H of query must be 6"),
    "KV heads": (
        dict(tokens=with_tokens(key_slc=zeros(2, 3, 4, 6))),
        ValueError,
        "axis K of tokens.key_slc must be 2",
    ),
    "tokens": (
        dict(tokens=with_tokens(value_win=zeros(2, 4, 2, 5))),
        ValueError,
        "axis T of tokens.value_win must be 3",
    ),
    "value dim": (
        dict(tokens=with_tokens(value_cmp=zeros(2, 3, 2, 6))),
        ValueError,
        "axis V of tokens.value_cmp must",
    ),
    "query dtype": (
        dict(query=zeros(2, 3, 4, 6, dtype=np.float16)),
        ValueError,
        "one dtype, got .* query float16",
    ),
    "integer query": (
        dict(query=zeros(2, 3, 4, 6, dtype=int)),
        TypeError,
        "query must be floating point, got int64",
    ),
    "gates": (dict(gates=zeros(2, 3, 4, 2)), ValueError, "axis 3 of gates must be 3"),
    "integer gates": (dict(gates=zeros(2, 3, 4, 3, dtype=int)), TypeError, "gates must be floating point"),
    "num_tokens": (dict(num_tokens=zeros(3, dtype=int)), ValueError, "axis B of num_tokens must be 2"),
    "slots": (
        dict(block_indices=zeros(2, 3, 2, 5, dtype=int)),
        ValueError,
        "block_indices must have num_selected_blocks = 4 slots per query, got 5",
    ),
    "selections": (
        dict(block_indices=zeros(2, 2, 2, 4, dtype=int)),
        ValueError,
        "axis T of block_indices must be 3",
    ),
    "num_tokens dtype": (dict(num_tokens=zeros(2)), TypeError, "num_tokens must be an integer array"),
    "window size": (
        other_config(window_size=9),
        ValueError,
        "a step must be given the config of its cache, got a cache with rings",
    ),
    "huge window": (
        other_config(window_size=99),
        ValueError,
        "a step must be given the config of its cache, got a cache with rings",
    ),
    "stride": (
        other_config(compression_stride=1),
        ValueError,
        "a step must be given the config of its cache, got a cache with rings",
    ),
    "config": (dict(config=dict(window_size=8)), TypeError, "NSAConfig"),
}


@pytest.mark.parametrize("step", [cache.prefill, cache.decode_step])
@pytest.mark.parametrize(("changes", "error", "message"), BAD.values(), ids=BAD.keys())
def test_step_refuses_what_does_not_fit(step, changes, error, message):
    with pytest.raises(error, match=message):
        step(**arguments(**changes))


def test_compression_of_another_cache():
    def mlp(size, dim, dtypes=("float32",) * 5):
        shapes = ((size, dim), (size * dim, 3), (3,), (3, dim), (dim,))
        return ResidualMLP(*(jnp.zeros(x, dtype) for x, dtype in zip(shapes, dtypes, strict=True)))

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
            with pytest.raises(TypeError if "None" in message else ValueError, match=message):
                step(**arguments(compress=compression))


def test_fields_of_a_cache_are_not_assigned():
    with pytest.raises(AttributeError, match="can't set attribute"):
        LAYER.empty(4).lengths = jnp.zeros(2, jnp.int32)


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


def test_a_prompt_may_fill_the_cache():
    given = arguments(12, cache=LAYER.empty(12))

    step = jax.eval_shape(lambda: cache.prefill(**given))

    assert step.out.shape == (2, 12, 4, 5)


def test_a_cache_of_arrays_that_do_not_fit_together():
    held = LAYER.empty(16)
    bad = {
        r"axis raw of cache\.value_raw_ring must be 7": dict(value_raw_ring=held.value_raw_ring[:, :3]),
        r"axis window of cache\.value_win_ring must be 11": dict(value_win_ring=held.value_win_ring[:, :3]),
        r"axis K of cache\.key_win_ring must be 2": dict(key_win_ring=held.key_win_ring[:, :, :1]),
        r"axis B of cache\.lengths must be 2": dict(lengths=held.lengths[:1]),
        r"axis B of cache\.overflowed must be 2": dict(overflowed=held.overflowed[:1]),
        r"axis V of cache\.value_cmp must be 5": dict(value_cmp=held.value_cmp[..., :3]),
        "one dtype, got .*cache.key_raw_ring bfloat16": dict(
            key_raw_ring=held.key_raw_ring.astype("bfloat16")
        ),
        r"cache\.lengths must be int32, got float32": dict(lengths=held.lengths * 1.0),
        r"cache\.overflowed must be bool, got int32": dict(overflowed=held.lengths),
        "both window rings or neither, got one without values": dict(value_win_ring=None),
        "(the lengths of a cache must be at least 0|cache.lengths must be within 0)": dict(
            lengths=held.lengths - 1
        ),
    }
    for message, change in bad.items():
        for step in (cache.prefill, cache.decode_step):
            with pytest.raises((TypeError, ValueError), match=message) as raised:
                step(**arguments(cache=held._replace(**change)))
            assert has_form(str(raised.value)), str(raised.value)


def test_decode_step_refuses_counts_that_the_host_knows_to_be_wrong():
    with pytest.raises(ValueError, match=r"num_tokens must be within 0 \.\. 3, got values from -1 to 4"):
        cache.decode_step(**arguments(num_tokens=jnp.array([-1, 4])))


def test_chunk_without_room_in_one_row():
    held = LAYER.empty(16)._replace(lengths=jnp.array([13, 14]))
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


@pytest.mark.parametrize("name", ["batch", "max_length", "value_dim", "step_capacity"])
def test_init_cache_refuses_what_is_no_int(name):
    with pytest.raises(TypeError, match=rf"{name} must be an int, got float\. Pass a whole number\."):
        cache.init_cache(**(SIZES | {name: 2.0}))


def test_init_cache_refuses_another_config():
    with pytest.raises(TypeError, match="config must be an NSAConfig, got dict"):
        cache.init_cache(**(SIZES | dict(config={})))


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
    given |= dict(compress=functools.partial(compress, SMALL), num_tokens=jnp.array([100, 3], dtype))

    held = cache.prefill(long.empty(320), **given).cache

    assert held.lengths.tolist() == [100, 3]
    with pytest.raises(ValueError, match=r"got \[100, 3\] tokens for rows that hold \[300, 300\]"):
        cache.prefill(held._replace(lengths=jnp.full(2, 300, jnp.int32)), **given)


def test_init_cache_refuses_integers():
    with pytest.raises(ValueError, match=r"dtype must be floating, got int32\. Pass one of"):
        cache.init_cache(**(SIZES | dict(dtype=jnp.int32)))


@pytest.mark.parametrize("step", [cache.prefill, cache.decode_step])
def test_a_step_takes_the_cache_of_one_layer(step):
    with pytest.raises(TypeError, match=r"the cache of a layer must be an NSACache, got tuple\. Pass"):
        step(**arguments(cache=(LAYER.empty(16),)))
