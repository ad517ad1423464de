"""Rotary embedding: against complex multiplication, and the property that it exists for."""

import decimal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equations import equations

from nsa_jax.nn import YarnScaling, rotate
from nsa_jax.nn.rotary import Rotary


def exact_angles(rotary: Rotary, head_dim: int, positions: list[int]) -> np.ndarray:
    """`position * frequency` modulo a turn, `[positions, pairs]`, from 60 digits of both and of pi."""
    half = head_dim // 2
    with decimal.localcontext(prec=60):
        base = decimal.Decimal(rotary.base)
        frequencies = [base ** (-decimal.Decimal(i) / half) for i in range(half)]
        if rotary.scaling is not None:  # a factor for each pair, which float64 gives to 1e-15
            plain = np.array([float(x) for x in frequencies])
            factors = rotary.scaling.scaled(plain, rotary.base) / plain
            frequencies = [x * decimal.Decimal(float(y)) for x, y in zip(frequencies, factors, strict=True)]
        angles = [[(position * x).remainder_near(2 * PI) for x in frequencies] for position in positions]
    return np.array(angles, np.float64)


PI = decimal.Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
ROTARIES = {
    "base 10000": Rotary(10000.0, None),
    "base 500000": Rotary(500000.0, None),
    "yarn": Rotary(500000.0, YarnScaling(16.0, 8192)),
}


@pytest.mark.parametrize("rotary", ROTARIES.values(), ids=ROTARIES.keys())
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_angles_are_exact_at_every_position(framework, rotary):
    """A product of float32 numbers lost 0.06 rad at a million tokens and 1 rad at 2^24."""
    positions = [
        *range(33),
        4095,
        65535,
        100_000,
        999_983,
        2**20 + 1,
        2**24 - 1,
        2**24,
        -7,
        -(2**24),
        2**31 - 1,
    ]
    head_dim = 128
    exact = exact_angles(rotary, head_dim, positions)
    ones = np.concatenate([np.ones((1, len(positions), 1, 64)), np.zeros((1, len(positions), 1, 64))], -1)
    if framework == "jax":
        heads, at = jnp.asarray(ones, jnp.float32), jnp.asarray([positions], jnp.int32)
        turned = jax.jit(rotary)(heads, at)
    else:
        torch = pytest.importorskip("torch", reason="nsa_torch_ref needs the extra `torch`")
        from nsa_torch_ref.rotary import rotate as torch_rotate

        turned = torch_rotate(
            torch.tensor(ones).float(), torch.tensor([positions]), rotary.base, rotary.scaling
        )
    x, y = np.split(np.asarray(turned, np.float64)[0, :, 0], 2, axis=-1)
    error = np.abs(np.remainder(np.arctan2(y, x) - exact + np.pi, 2 * np.pi) - np.pi)
    # An angle is rounded four times, and cosine and sine once or twice each: 6 roundings of at most pi.
    assert error.max() <= 6 * np.pi * 2.0**-24
    # An angle that a few positions make is small, and its roundings are relative to it.
    few = error[: len(range(33))]
    assert (few <= 6 * 2.0**-24 * np.maximum(np.abs(exact[: len(few)]), 1e-3)).all()


@pytest.mark.parametrize("head_dim", [1, 3, 7, 8])
def test_rotate_is_a_complex_product(head_dim):
    half = head_dim // 2
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 5, 3, head_dim))
    positions = rng.integers(-50, 5000, (2, 5))

    with jax.enable_x64(True):
        rotated = np.asarray(jax.jit(rotate)(x, positions))

    for i in range(half):
        turned = (x[..., i] + 1j * x[..., i + half]) * np.exp(1j * positions * 10000.0 ** (-i / half))[
            ..., None
        ]
        # Two float64 roundings of angles up to 5000, here or there, and heads below 6: 5000 * 6 * 4 eps.
        np.testing.assert_allclose(rotated[..., i], turned.real, rtol=0, atol=2.7e-11)
        np.testing.assert_allclose(rotated[..., i + half], turned.imag, rtol=0, atol=2.7e-11)
    np.testing.assert_array_equal(rotated[..., 2 * half :], x[..., 2 * half :])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shift", [1000, 100_000, 2**23])
def test_dot_products_depend_on_distance_only(shift, dtype):
    head_dim = 8
    rng = np.random.default_rng(1)
    query, key = rng.standard_normal((2, 1, 6, 2, head_dim))
    at_query, at_key = rng.integers(0, 500, (2, 1, 6))

    with jax.enable_x64(True):
        query, key = jnp.asarray(query, dtype), jnp.asarray(key, dtype)

        def dots(offset):
            return (rotate(query, at_query + offset) * rotate(key, at_key + offset)).sum(-1)

        dots = jax.jit(dots)
        error = np.abs(np.asarray(dots(0) - dots(shift)))

    magnitude = np.linalg.norm(query, axis=-1) * np.linalg.norm(key, axis=-1)
    # Of each of four rotations: an angle is rounded four times, its sine, cosine and the products six times.
    # `rest` is float32 in float64, too; an angle is off by 2^-25 of it.
    eps = np.finfo(dtype).eps / 2
    budget = 4 * (4 * np.pi + 6) * eps + 4 * shift * np.pi * 2.0**-32 * 2.0**-25
    assert (error <= budget * magnitude).all()


def test_one_row_of_positions_stands_for_all_rows():
    x, turn = np.random.default_rng(0).standard_normal((2, 5, 1, 4), np.float32), jax.jit(rotate)
    positions = np.arange(5)[None]

    np.testing.assert_array_equal(turn(x, positions), turn(x, np.repeat(positions, 2, axis=0)))


def test_low_precision_inputs_are_turned_in_float32():
    x = np.random.default_rng(0).standard_normal((1, 4, 2, 6)).astype(jnp.bfloat16)
    positions, turn = np.array([[0, 1, 100, 4000]]), jax.jit(rotate)

    rotated = turn(x, positions)

    assert rotated.dtype == jnp.bfloat16
    wide = np.asarray(turn(x.astype(np.float32), positions))
    np.testing.assert_array_equal(rotated, wide.astype(jnp.bfloat16))


@pytest.mark.parametrize("head_dim", [8, 9])
def test_the_gradient_is_no_sum_of_padded_halves(head_dim):
    """XLA takes 2.5 times as long for such a sum as for halves that are laid side by side."""
    positions = jnp.arange(4)[None]
    program = jax.make_jaxpr(jax.grad(lambda x: jnp.sin(rotate(x, positions)).sum()))(
        jnp.ones((1, 4, 2, head_dim))
    )

    assert not {"pad", "scatter-add"} & {equation.primitive.name for equation in equations(program.jaxpr)}
