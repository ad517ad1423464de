"""Dense and window layers through a cache: every output is that of a full forward, and nothing leaks."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import refused
from modules import abstract, randomised
from test_generate_model import loop_bodies

from nsa_jax import cache
from nsa_jax.cache import DenseCache, dense_decode_step, dense_prefill, init_dense_cache, rewind
from nsa_jax.config import NSAConfig
from nsa_jax.nn import DenseAttention

LENGTH, WIDTH = 40, 16
PROMPTS = np.array([17, 0, 3, 8])
# A query sees all tokens; 7, in a ring of 9; 1, in a ring of 3; all, as the window is longer than the rows.
WINDOWS = (None, 7, 1, 100)


def layer(window_size, **changes):
    sizes = dict(num_kv_heads=2, window_size=window_size, param_dtype=jnp.float64, normalize_qk=True)
    return randomised(abstract(DenseAttention, 4, WIDTH, **(sizes | changes)), 0.25)


# For sums of at most 40 products of numbers around 1, added in another order, in float64.
BUDGET = 64 * float(np.finfo(np.float64).eps)


def inputs(length=LENGTH):
    return np.random.default_rng(1).standard_normal((len(PROMPTS), length, WIDTH))


def part(x, first, count):
    """`count` tokens from `first[b]` on, with zeros after the last token."""
    x = np.pad(x, ((0, 0), (0, count), (0, 0)))
    return np.stack([row[i : i + count] for row, i in zip(x, first, strict=True)])


@nnx.jit
def full_forward(made, x):
    return made(x)


@nnx.jit
def prefill(made, x, held, num_tokens):
    return made.prefill(x, held, num_tokens=num_tokens)


@nnx.jit
def decode_step(made, x, held, num_tokens):
    return made.decode_step(x, held, num_tokens=num_tokens)


def prefilled(made, x, held, chunk=5):
    """Prefills the prompts chunk by chunk; gives the outputs of each row, and the cache."""
    rows = [np.zeros((0, WIDTH)) for _ in PROMPTS]
    for first in range(0, max(PROMPTS), chunk):
        real = np.clip(PROMPTS - first, 0, chunk)
        out, held = prefill(made, part(x, [first] * len(PROMPTS), chunk), held, real)
        out = np.asarray(out)  # NumPy's slices: JAX would compile each
        rows = [np.concatenate([row, new[:n]]) for row, new, n in zip(rows, out, real, strict=True)]
        assert all((new[n:] == 0).all() for new, n in zip(out, real, strict=True))
    return rows, held


@pytest.mark.parametrize("window_size", WINDOWS)
def test_rows_are_those_of_a_full_forward(window_size):
    """Prompts of different lengths in chunks, then steps of which each row takes 0 to 3 tokens.

    The last 0 to 2 of them are NaN, and are taken back again.
    """
    with jax.enable_x64(True):
        made, x = layer(window_size), inputs()
        exact = np.asarray(full_forward(layer(None if window_size == 100 else window_size), x))
        rows, held = prefilled(made, x, made.init_cache(len(PROMPTS), LENGTH, step_capacity=3))
        rng, done = np.random.default_rng(2), PROMPTS.copy()
        while min(done) < 30:
            number = np.minimum(rng.integers(0, 4, len(PROMPTS)), LENGTH - done)
            back = np.minimum(rng.integers(0, 3, len(PROMPTS)), number)
            good = number - back
            new = part(x, done, 3)
            new[np.arange(3) >= good[:, None]] = np.nan
            out, held = decode_step(made, new, held, number)
            held = rewind(held, back)
            for row, (new, n, given) in enumerate(zip(np.asarray(out), good, number, strict=True)):
                rows[row] = np.concatenate([rows[row], new[:n]])
                assert (new[given:] == 0).all()
            done += good

    for row, right, count in zip(rows, exact, done, strict=True):
        np.testing.assert_allclose(row, right[:count], rtol=0, atol=BUDGET)
    assert held.lengths.tolist() == done.tolist()
    assert not np.any(held.overflowed)


def test_a_whole_prompt_is_its_chunks():
    """Also a prompt longer than the ring; and both ways leave the same cache."""
    with jax.enable_x64(True):
        made, x = layer(7), inputs()
        exact = np.asarray(full_forward(made, x))
        empty = made.init_cache(len(PROMPTS), LENGTH, step_capacity=3)
        out, whole = prefill(made, x[:, :17], empty, PROMPTS)
        _, held = prefilled(made, x, empty)

    for row, right, count in zip(np.asarray(out), exact, PROMPTS, strict=True):
        np.testing.assert_allclose(row[:count], right[:count], rtol=0, atol=BUDGET)
    for found, other in zip(*map(jax.tree.leaves, (held, whole)), strict=True):
        np.testing.assert_allclose(found, other, rtol=0, atol=BUDGET)


def operands(num_new=2, lengths=(30, 31, 9), window_size=None, max_length=32):
    """A cache of random numbers with these lengths, and the operands of a step, in float32."""
    rng = np.random.default_rng(3)

    def normal(*shape):
        return rng.standard_normal((len(lengths), *shape)).astype(np.float32)

    sizes = dict(num_kv_heads=2, key_dim=6, value_dim=5, dtype=jnp.float32)
    empty = init_dense_cache(len(lengths), max_length, window_size=window_size, step_capacity=4, **sizes)
    held = DenseCache(
        normal(*empty.key.shape[1:]), normal(*empty.value.shape[1:]), np.int32(lengths), np.zeros(3, bool)
    )
    return held, normal(num_new, 4, 6), normal(num_new, 2, 6), normal(num_new, 2, 5)


STEPS = [jax.jit(step, static_argnames="window_size") for step in (dense_decode_step, dense_prefill)]


def test_a_full_row_stays_as_it_is():
    given, (decode, fill) = operands(), STEPS
    held, twos = given[0], np.array([2, 2, 2])

    step = decode(*given, num_tokens=twos, window_size=None)
    again = fill(step.cache, *given[1:], num_tokens=np.array([0, 1, 2]), window_size=None)
    under_jit = fill(*given, num_tokens=twos, window_size=None)

    for out, after in jax.tree.map(np.asarray, (step, under_jit)):
        assert after.lengths.tolist() == [32, 31, 11]
        assert after.overflowed.tolist() == [False, True, False]
        assert (out[1] == 0).all()
        assert (out[2] != 0).any()
        np.testing.assert_array_equal(after.key[1], held.key[1])
        np.testing.assert_array_equal(after.value[1], held.value[1])
    np.testing.assert_array_equal(np.asarray(step.cache.key)[0, 30:], given[2][0])
    assert again.cache.lengths.tolist() == [32, 32, 13]
    assert again.cache.overflowed.tolist() == [False, True, False]


def test_a_ring_is_never_full():
    given = operands(window_size=7, lengths=(30, 1000, 9))

    _, after = STEPS[0](*given, num_tokens=np.array([2, 2, 2]), window_size=7)
    after = jax.tree.map(np.asarray, after)

    assert after.key.shape[1] == 10
    assert after.lengths.tolist() == [32, 1002, 11]
    assert not after.overflowed.any()
    np.testing.assert_array_equal(after.key[1, [0, 1]], given[2][1])


@pytest.mark.parametrize("step", STEPS, ids=["dense_decode_step", "dense_prefill"])
@pytest.mark.parametrize("window_size", [None, 7])
def test_what_is_not_a_number_stays_where_it_is(step, window_size):
    """NaN and infinity in another row, in slots that are unused or unseen, in padding or in a later token."""
    given = operands(lengths=(5, 20, 9), window_size=window_size)
    run = functools.partial(step, window_size=window_size)
    number = np.array([2, 2, 1])
    clean = jax.tree.map(np.asarray, run(*given, num_tokens=number))
    held, query, key, value = jax.tree.map(np.array, given)
    for x in (held.key, held.value, query, key, value):
        x[1] = np.nan
    for x in (held.key, held.value):
        x[0, 7:] = np.nan
        if window_size is None:
            x[2, 10:] = np.inf
        else:
            x[2, [0, 1]] = np.inf  # tokens 0 and 1; token 9 sees 3 .. 9
    for x in (query, key, value):
        x[2, 1] = np.nan
    value[0, 1, 0] = np.nan  # of one KV head, which token 0 does not see

    spoilt = jax.tree.map(np.asarray, run(held, query, key, value, num_tokens=number))

    # Where a result is not finite, `xla` takes that of a second, careful pass, which adds in another order.
    same = functools.partial(np.testing.assert_allclose, rtol=0, atol=16 * np.finfo(np.float32).eps)
    same(spoilt.out[0, 0], clean.out[0, 0])
    same(spoilt.out[0, 1, 2:], clean.out[0, 1, 2:])
    assert np.isnan(spoilt.out[0, 1, :2]).all()
    assert np.isnan(spoilt.out[1]).all()
    same(spoilt.out[2], clean.out[2])
    np.testing.assert_array_equal(spoilt.cache.key[0, :7], clean.cache.key[0, :7])


def test_gradients_reach_the_new_tokens():
    """Through a prompt and a step by `xla`, they equal those of the layer."""
    made, x = layer(7, param_dtype=jnp.float32), inputs(12).astype(np.float32)
    cotangent = np.random.default_rng(4).standard_normal(x.shape).astype(np.float32)

    def through_cache(x):
        prompt, held = made.prefill(x[:, :10], made.init_cache(len(PROMPTS), 12))
        step, _ = made.decode_step(x[:, 10:], held)
        return (jnp.concatenate([prompt, step], axis=1) * cotangent).sum()

    found = np.asarray(jax.jit(jax.grad(through_cache))(x))
    right = np.asarray(jax.jit(jax.grad(lambda x: (made(x) * cotangent).sum()))(x))

    assert np.abs(found - right).max() <= 32 * np.finfo(np.float32).eps * np.abs(right).max()


CASES = {"dense": (None, 2**16), "window": (4096, 4096 + 7)}


@pytest.mark.parametrize("case", CASES)
def test_a_loop_writes_the_cache_in_place(case):
    """In the loop's body only scatters produce an array of the cache's size."""
    window_size, size = CASES[case]
    sizes = dict(num_kv_heads=2, key_dim=64, value_dim=64, dtype=jnp.float32, window_size=window_size)
    held = jax.eval_shape(lambda: init_dense_cache(2, 2**16, **sizes))
    token = [jax.ShapeDtypeStruct((2, 1, heads, 64), jnp.float32) for heads in (4, 2, 2)]

    def loop(held, query, key, value):
        def body(_, carry):
            out, held = carry
            return dense_decode_step(held, query + out, key, value, window_size=window_size)

        return jax.lax.fori_loop(0, 4, lambda i, carry: tuple(body(i, carry)), (query, held))

    compiled = jax.jit(loop, donate_argnums=0).lower(held, *token).compile()

    assert "nsa_jax.xla.dense_decode_step/" in compiled.as_text()
    large = [line for line in loop_bodies(compiled.as_text()) if f"= f32[2,{size}," in line]
    written = [line for line in large if not re.search(r" (get-tuple-element|parameter|bitcast)\(", line)]
    assert len(written) >= 2
    assert all("scatter" in line.split(" = ")[0] for line in written), written
    if window_size is None:
        assert compiled.memory_analysis().temp_size_in_bytes < held.key.size * 4 / 2


def told(function, error, part):
    with refused(error, re.escape(part)):
        function()


def test_a_prompt_may_fill_the_cache():
    held, *new = operands(32, lengths=(0, 0, 0))

    step = jax.eval_shape(lambda: dense_prefill(held, *new))

    assert step.out.shape == (3, 32, 4, 5)


def test_bad_input_is_told():
    held, query, key, value = given = operands()
    ring, *token = operands(num_new=5, window_size=7)
    triton = functools.partial(jax.eval_shape, lambda: dense_decode_step(*given, implementation="triton"))
    cases = [
        (lambda: dense_decode_step(held, query[:, :, :3], key, value), ValueError, "must be a multiple"),
        (lambda: dense_decode_step(held, query.astype(np.float16), key, value), ValueError, "one dtype"),
        (lambda: dense_prefill(held, query[:, :0], key[:, :0], value[:, :0]), ValueError, "at least one"),
        (lambda: dense_decode_step(ring, *token, window_size=7), ValueError, "step_capacity, got 5 > 4"),
        (lambda: dense_prefill(*given), ValueError, "a prompt must fit the cache, got [2, 2, 2] tokens"),
        (lambda: dense_prefill(*given, num_tokens=np.array([3, 0, 0])), ValueError, "within 0 .. T, got"),
        (lambda: dense_prefill(*operands(num_new=33)), ValueError, "got 33 tokens and max_length=32."),
        (triton, NotImplementedError, "dense_decode_step cannot run as triton: the Triton kernels need an N"),
    ]
    for function, error, part_of_it in cases:
        told(function, error, part_of_it)


def test_a_layer_takes_its_own_cache():
    made, x = layer(None, param_dtype=jnp.float32), inputs(2).astype(np.float32)
    nsa = cache.init_cache(4, 8, num_kv_heads=2, key_dim=4, value_dim=4, config=NSAConfig(), dtype="float32")
    others = [
        (nsa, TypeError, "the cache of a dense layer must be a DenseCache, got NSACache. Pass what"),
        (layer(None, num_kv_heads=4).init_cache(4, 8), ValueError, "the heads and dims of its layer, got"),
        (made.init_cache(3, 8), ValueError, "as many rows as the input, got 3 for 4. Call"),
    ]
    for held, error, part_of_it in others:
        told(functools.partial(made.decode_step, x, held), error, part_of_it)
        told(functools.partial(made.prefill, x, held), error, part_of_it)
