"""Rotary embedding: against complex multiplication, and the property that it exists for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nsa_jax.nn import rotate


@pytest.mark.parametrize("head_dim", [1, 3, 7, 8])
def test_rotate_is_a_complex_product(head_dim):
    half = head_dim // 2
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 5, 3, head_dim))
    positions = rng.integers(-50, 5000, (2, 5))

    with jax.enable_x64(True):
        rotated = np.asarray(jax.jit(rotate)(x, positions))

    for i in range(half):
        angle = (positions.astype(np.float32) * np.float32(10000.0 ** (-i / half))).astype(np.float64)
        turned = (x[..., i] + 1j * x[..., i + half]) * np.exp(1j * angle)[:, :, None]
        # Sine, cosine and two products of numbers below 6, each rounded to float64: a few 1e-16 each.
        np.testing.assert_allclose(rotated[..., i], turned.real, rtol=0, atol=1e-14)
        np.testing.assert_allclose(rotated[..., i + half], turned.imag, rtol=0, atol=1e-14)
    np.testing.assert_array_equal(rotated[..., 2 * half :], x[..., 2 * half :])


@pytest.mark.parametrize(
    ("base", "exact"), [(2.0**4, True), (10000.0, False)], ids=["exact angles", "base 10000"]
)
def test_dot_products_depend_on_distance_only(base, exact):
    """With base 2^(H/2) every angle is exact in float32; else each of the four errs by |angle| 2^-24."""
    head_dim, shift = 8, 1000
    rng = np.random.default_rng(1)
    query, key = rng.standard_normal((2, 1, 6, 2, head_dim))
    at_query, at_key = rng.integers(0, 500, (2, 1, 6))

    with jax.enable_x64(True):

        def dots(offset):
            return (
                rotate(query, at_query + offset, base=base) * rotate(key, at_key + offset, base=base)
            ).sum(-1)

        dots = jax.jit(dots)
        error = np.abs(np.asarray(dots(0) - dots(shift)))

    magnitude = np.linalg.norm(query, axis=-1) * np.linalg.norm(key, axis=-1)
    angle_error = 0 if exact else 4 * (500 + shift) * 2.0**-24
    assert (error <= (angle_error + 16 * np.finfo(np.float64).eps) * magnitude).all()


def test_low_precision_inputs_are_turned_in_float32():
    x = jax.random.normal(jax.random.key(0), (1, 4, 2, 6), jnp.bfloat16)
    positions = jnp.asarray([[0, 1, 100, 4000]])

    rotated = rotate(x, positions)

    assert rotated.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rotated, rotate(x.astype(jnp.float32), positions).astype(jnp.bfloat16))
