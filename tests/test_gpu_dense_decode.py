"""Steps of dense and window layers by the Triton kernels on a GPU, against `xla` on the same numbers."""

import functools

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("jax_triton", reason="needs jax-triton", exc_type=ImportError)

from nsa_jax import cache, dispatch
from nsa_jax.layout.quantised import fields, like
from nsa_jax.layout.quantised import held as held_array

pytestmark = pytest.mark.gpu


def wide(arrays):
    return jax.tree.map(
        lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, arrays
    )


def distance(found, expected):
    return float(jnp.abs(found.astype(jnp.float32) - expected.astype(jnp.float32)).max())


# Lengths around the ends of tiles, parts and the ring, long ones, and a full row.
LENGTHS = (0, 1, 63, 64, 1000, 4095, 4096, 4100, 30000, 65520, 65536)


def operands(dtype, num_new, *, window_size=None, lengths=LENGTHS, heads=(32, 2), dims=(128, 128),
                   max_length=65536, kept=None):  # fmt: skip
    keys = iter(jax.random.split(jax.random.key(num_new), 5))

    def normal(*shape):
        return jax.random.normal(next(keys), (len(lengths), *shape), dtype)

    empty = cache.init_dense_cache(
        len(lengths), max_length, num_kv_heads=heads[1], key_dim=dims[0], value_dim=dims[1],
        dtype=kept or dtype, window_size=window_size,
    )  # fmt: skip
    shapes = dict(key=empty.key.shape[1:], value=empty.value.shape[1:])
    filled = {name: like(normal(*shape), held_array(empty, name)) for name, shape in shapes.items()}
    held = empty._replace(**fields(filled), lengths=jnp.asarray(lengths, jnp.int32))
    return held, *(
        normal(num_new, *x) for x in ((heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]))
    )


@functools.partial(jax.jit, static_argnames=("implementation", "window_size"))
def step(implementation, window_size, num_tokens, *arrays):
    settings = dict(window_size=window_size, num_tokens=num_tokens, implementation=implementation)
    return cache.dense_decode_step(*arrays, **settings)


@pytest.mark.parametrize(
    ("dtype", "num_new", "more"),
    [
        ("bfloat16", 1, {}),
        ("bfloat16", 1, dict(window_size=4096)),
        ("bfloat16", 8, dict(window_size=4096, heads=(64, 4))),
        ("float32", 3, {}),
        ("float16", 4, dict(heads=(12, 2), dims=(64, 32))),
        ("bfloat16", 2, dict(heads=(64, 1), dims=(192, 128))),
        ("float32", 8, dict(window_size=5, heads=(8, 8), lengths=(0, 3, 4, 5, 6, 70000))),
        ("bfloat16", 1, dict(heads=(16, 1), lengths=(500_000, 65536, 7), max_length=524_288)),
        ("bfloat16", 1, dict(kept="int8")),
        ("bfloat16", 8, dict(kept="int8", window_size=4096, heads=(64, 4))),
    ],
)
def test_step_equals_xla(dtype, num_new, more):
    arrays = operands(jnp.dtype(dtype), num_new, **more)
    window, batch = more.get("window_size"), len(arrays[0].lengths)
    num_tokens = None if num_new == 1 else jnp.arange(batch, dtype=jnp.int32) % (num_new + 1)
    found = step("triton", window, num_tokens, *arrays)
    own = step("xla", window, num_tokens, *arrays)
    exact = step("xla", window, num_tokens, *wide(arrays))

    assert distance(found.out, exact.out) <= 2 * distance(own.out, exact.out) + 4e-6
    for name, got, want in zip(found.cache._fields, found.cache, own.cache, strict=True):
        if name.endswith("_scale"):
            assert got is want is None or jnp.allclose(got, want, rtol=1e-6), name
        elif got.dtype == jnp.int8:  # XLA divides less exactly than the kernels where a half is rounded
            assert distance(got, want) <= 1, name
            assert (got == want).mean() > 0.999, name
        else:
            assert (got == want).all(), name
    assert (found.out == step("triton", window, num_tokens, *arrays).out).all(), "two runs differ"


@pytest.mark.parametrize("window_size", [None, 512])
def test_a_bad_row_stays_alone(window_size):
    """NaN in all of row 1, and in the unused slots of every row, reaches no other row."""
    given = operands(jnp.bfloat16, 4, window_size=window_size, lengths=(100, 2000, 65000))
    clean = step("triton", window_size, None, *given)
    held, *tokens = given
    unused = jnp.arange(held.key.shape[1])[None, :, None, None] >= held.lengths[:, None, None, None]
    held = held._replace(
        key=jnp.where(unused, jnp.nan, held.key).at[1].set(jnp.nan),
        value=jnp.where(unused, jnp.nan, held.value).at[1].set(jnp.nan),
    )
    found = step("triton", window_size, None, held, *(x.at[1].set(jnp.nan) for x in tokens))

    assert jnp.isnan(found.out[1]).all()
    for row in (0, 2):
        assert (found.out[row] == clean.out[row]).all()


@pytest.mark.parametrize("window_size", [None, 100])
def test_compiled_loop_equals_steps_of_xla(window_size):
    """The cache is updated in place, around the ring; rows end at different steps, one because it is full."""
    arrays = operands(jnp.float32, 1, window_size=window_size, lengths=(0, 20, 1000, 8150), max_length=8192)
    steps = 120

    def run(implementation, held, query, key, value):
        def body(i, carry):
            held, out = carry
            step = cache.dense_decode_step(
                held, *(jnp.roll(x, i, -1) for x in (query, key, value)), window_size=window_size,
                num_tokens=(i < jnp.array([120, 60, 120, 120])).astype(jnp.int32),
                implementation=implementation,
            )  # fmt: skip
            return step.cache, out.at[i].set(step.out)

        return jax.lax.fori_loop(0, steps, body, (held, jnp.zeros((steps, *query.shape))))

    found, out = jax.jit(functools.partial(run, "triton"))(*arrays)
    expected, right = jax.jit(functools.partial(run, "xla"))(*arrays)

    assert found.lengths.tolist() == [120, 80, 1120, 8192 if window_size is None else 8270]
    assert found.overflowed.tolist() == [False, False, False, window_size is None]
    assert distance(out, right) <= 1e-5
    same = jax.tree.map(lambda got, want: bool((got == want).all()), found, expected)
    assert all(jax.tree.leaves(same)), same


def test_step_kernels_are_what_runs_by_default():
    held, query, *_ = operands(jnp.bfloat16, 1, lengths=(700,), max_length=1024)
    chosen = dispatch.choose("dense_decode_step", query, held.key, held.value)

    assert chosen.implementation == "triton"
