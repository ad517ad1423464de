"""On a GPU: the kernels of block and slot probabilities are right, and deterministic."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nsa_jax
from benchmarks import targets
from benchmarks.inputs import Shape
from nsa_jax import Run, Runs, attention
from nsa_jax.config import NSAConfig

pytestmark = pytest.mark.gpu
CONFIG = NSAConfig()


def drawn(length, *, heads=64, kv_heads=4, dim=128, dtype="bfloat16", batch=1):
    keys = jax.random.split(jax.random.key(3), 2)
    shapes = (batch, length, heads, dim), (batch, length, kv_heads, dim)
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def probabilities_of(query, key, **more):
    return attention.block_probabilities(query, key, **dict(config=CONFIG, implementation="triton") | more)


def poison_memory():
    """Leaves NaN in the memory that the next results will take."""
    for size in (1 << 28, 1 << 24, 1 << 20):
        arrays = [jnp.full((size // 4,), jnp.nan) for _ in range(8)]
        jax.block_until_ready(arrays)
        for array in arrays:
            array.delete()


SHAPES = {
    "64/4 heads of 128": dict(),
    "32/8 heads of 128": dict(heads=32, kv_heads=8),
    "9/3 heads of 64": dict(heads=9, kv_heads=3, dim=64),
    "6/6 heads of 96": dict(heads=6, kv_heads=6, dim=96, dtype="float16"),
    "64/1 heads of 192": dict(heads=64, kv_heads=1, dim=192),
    "8/2 heads of 64 in float32": dict(heads=8, kv_heads=2, dim=64, dtype="float32"),
}


def test_the_kernels_are_what_runs_by_default():
    query, key = drawn(300)
    assert nsa_jax.choose("block_probabilities", query, key, config=CONFIG).implementation == "triton"
    assert nsa_jax.choose("selected_probabilities", query, key, config=CONFIG).implementation == "triton"
    assert nsa_jax.choose("importance_scores", query, key, config=CONFIG).implementation == "xla"


@pytest.mark.parametrize("block_size", [32, 64, 128])
@pytest.mark.parametrize("name", SHAPES)
def test_probabilities_are_within_their_budget(name, block_size):
    """Of sampled queries of 8k tokens and a bit, with log-sum-exps computed, or those of a window."""
    length = 8192 + 77
    query, key = drawn(length, **SHAPES[name])
    config = NSAConfig(selection_block_size=block_size)
    shape = Shape(
        length=length, query_heads=query.shape[2], kv_heads=key.shape[2], key_dim=key.shape[3],
        dtype=query.dtype.name, config=config,
    )  # fmt: skip
    whole = NSAConfig(window_size=length)
    lse = jax.jit(functools.partial(attention.window_attention, config=whole))(query, key, key).lse
    for reduce, given in (("sum", None), ("max", lse)):
        poison_memory()
        found = jax.jit(functools.partial(probabilities_of, config=config, reduce=reduce))(
            query, key, lse=given
        )
        assert targets.share_of_budget(found, query, key, shape, reduce) <= 1
        later = np.arange(found.shape[-1]) * block_size > np.arange(length)[:, None]
        assert not np.asarray(found)[0].swapaxes(0, 1)[:, later].any()


def test_packed_rows_chunks_and_scattered_queries_equal_xla():
    query, key = drawn(1500, heads=16, kv_heads=2, dim=64, batch=2, dtype="float32")
    ids = jnp.asarray(np.repeat([[1, 0, 5, 2, 3], [0, 4, 9, 7, 1]], [500, 3, 640, 1, 356], axis=1))
    anywhere = jax.random.randint(jax.random.key(1), (2, 300), -1, 1500)
    settings = (
        (query, dict(segment_ids=ids)),
        (query[:, :300], dict(segment_ids=ids, query_positions=anywhere)),
        (query[:, :300], dict(query_positions=anywhere)),
        (query[:, 200:900], dict(query_positions=Runs((Run(700, 200),)))),
    )
    for rows, more in settings:
        poison_memory()
        found, expected = (
            jax.jit(functools.partial(probabilities_of, implementation=name))(rows, key, **more)
            for name in ("triton", "xla")
        )
        assert jnp.abs(found - expected).max() < 1e-4  # shares of up to 8, of logits up to 6 within 16 eps
        assert ((found == 0) == (expected == 0)).all()


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_slots_have_the_probabilities_of_xla(name, block_size):
    """Of 700 queries in a packed row of 2100 tokens; log-sum-exps computed, or those of the branch."""
    query, key = drawn(2100, **SHAPES[name])
    config = NSAConfig(selection_block_size=block_size, num_selected_blocks=9)
    ids = jnp.asarray(np.repeat([[1, 0, 5, 2, 3]], [300, 3, 1240, 1, 556], axis=1))
    query, at = query[:, 1200:1900], Runs((Run(700, 1200),))
    shape = (1, 700, key.shape[2], 9)
    blocks = jax.random.randint(jax.random.key(5), shape, -1, 2100 // block_size + 1)
    where = dict(config=config, query_positions=at, segment_ids=ids)
    branch = jax.jit(functools.partial(attention.selected_attention, **where))
    lse = branch(query, key, key, blocks).lse
    for reduce, given in (("sum", None), ("max", lse)):
        poison_memory()
        found, expected = (
            jax.jit(
                functools.partial(
                    attention.selected_probabilities, reduce=reduce, implementation=name, **where
                )
            )(query, key, blocks, lse=given)
            for name in ("triton", "xla")
        )
        bound = 16 * 6 * 1.2e-7 * (query.shape[2] // key.shape[2])  # the same, of up to G
        assert jnp.abs(found - expected).max() < bound
        assert ((found == 0) == (expected == 0)).all()


def test_ten_runs_agree_bitwise():
    query, key = drawn(4100)
    run = jax.jit(probabilities_of)
    first = np.asarray(run(query, key))
    for _ in range(9):
        poison_memory()
        assert np.array_equal(np.asarray(run(query, key)), first)


def test_nan_and_the_future_stay_where_they_are():
    """Bitwise: a KV head that is NaN, and keys and queries from token 2000 on."""
    query, key = drawn(4100, heads=32, kv_heads=2)
    run = jax.jit(probabilities_of)
    expected = np.asarray(run(query, key))
    of_head = np.asarray(run(query.at[:, :, 16:].set(jnp.nan), key.at[:, :, 1].set(jnp.nan)))
    later = np.asarray(run(query.at[:, 2000:].set(jnp.nan), key.at[:, 2000:].set(jnp.nan)))

    assert np.array_equal(of_head[:, :, 0], expected[:, :, 0])
    assert np.isnan(of_head[:, :, 1, 0]).all()
    assert np.array_equal(later[:, :2000], expected[:, :2000])
