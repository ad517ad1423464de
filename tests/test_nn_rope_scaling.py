"""Scaled rotary frequencies: those of released models, what a scaling does to heads, what is refused."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import refused

from nsa_jax.nn import DenseAttention, LinearScaling, Llama3Scaling, NSAAttention, YarnScaling, rotate

HALF = 64  # pairs of a head of 128, which all models below have
INDEX = np.arange(HALF)
ROUNDING = 16 * np.finfo(np.float64).eps  # a frequency is a power and at most ten operations


def ratio(scaling, base):
    """Scaled over plain frequency of each pair."""
    plain = base ** (-INDEX / HALF)
    return scaling.scaled(plain, base) / plain


def test_llama_3_1_keeps_the_fast_pairs_and_divides_the_slow_ones():
    """Base 500000: pair 28 has a wavelength of 1954 tokens, 29 of 2399; 34 of 6691, 35 of 8213."""
    found = ratio(Llama3Scaling(), 500_000.0)

    np.testing.assert_allclose(found[:29], 1, rtol=ROUNDING)
    np.testing.assert_allclose(found[35:], 1 / 8, rtol=ROUNDING)
    wavelength = 2 * math.pi * 500_000.0 ** (INDEX[29:35] / HALF)
    part = (8192 / wavelength - 1) / 3  # 1 where a pair turns 4 times in 8192 tokens, 0 where it turns once
    np.testing.assert_allclose(found[29:35], (1 - part) / 8 + part, rtol=ROUNDING)


def test_yarn_ramps_from_pair_to_pair():
    """Qwen 2.5: base 1e6, 4 x 32768 tokens. 32 turns lie between pairs 23 and 24, one between 39 and 40."""
    scaling = YarnScaling(4.0, 32768)

    found = ratio(scaling, 1e6)

    np.testing.assert_allclose(found[:24], 1, rtol=ROUNDING)
    np.testing.assert_allclose(found[40:], 1 / 4, rtol=ROUNDING)
    np.testing.assert_allclose(found[23:41], 1 - 3 / 4 * np.arange(18) / 17, rtol=ROUNDING)
    assert scaling.magnitude == pytest.approx(1 + math.log(4) / 10, rel=ROUNDING)
    assert YarnScaling(4.0, 32768, attention_factor=0.7).magnitude == 0.7
    assert YarnScaling(0.5, 32768).magnitude == 1


def test_yarn_ramp_without_width_is_a_step():
    """Both ends of the ramp are pair 0: it is kept, all others are interpolated."""
    found = ratio(YarnScaling(2.0, 6), 1e4)

    np.testing.assert_allclose(found, np.where(INDEX == 0, 1, 1 / 2), rtol=ROUNDING)


def test_the_twin_computes_the_same_frequencies():
    pytest.importorskip("torch", reason="nsa_torch_ref needs the extra `torch`")
    from nsa_torch_ref import rotary

    schemes = (
        LinearScaling(3),
        *(Llama3Scaling(factor, 1, 4, length) for factor in (2, 8.5) for length in (100, 8192)),
        *(YarnScaling(factor, length) for factor in (0.5, 16) for length in (6, 40, 4096)),
        YarnScaling(4, 30, beta_fast=3, beta_slow=0.2, attention_factor=1.5),
    )
    for scaling in schemes:
        for half, base in ((1, 1e4), (5, 10.0), (64, 5e5)):
            found = scaling.scaled(base ** (-np.arange(half) / half), base)
            expected = [rotary.frequency(i, half, base, scaling) for i in range(half)]
            np.testing.assert_allclose(found, expected, rtol=ROUNDING, err_msg=f"{scaling} {half} {base}")
        assert rotary.magnitude(scaling) == pytest.approx(scaling.magnitude, rel=ROUNDING)


def test_scaled_heads():
    """Scaling by 4 undoes positions that are 4 times as large."""
    rng = np.random.default_rng(0)
    x, positions = rng.standard_normal((1, 5, 2, 7)).astype(np.float32), rng.integers(0, 999, (1, 5))

    plain = rotate(x, positions)

    # Both sides: angles of at most pi with four roundings, and six more of numbers below 4.
    tolerance = 2 * (4 * math.pi + 6) * 4 * np.finfo(np.float32).eps / 2
    undone = rotate(x, 4 * positions, scaling=LinearScaling(4))
    np.testing.assert_allclose(undone, plain, rtol=0, atol=tolerance)
    long = rotate(x, positions, scaling=YarnScaling(4.0, 50, attention_factor=2.0))
    lengths = (np.linalg.norm(heads[..., :6], axis=-1) for heads in (long, x))
    # Sums of 6 squares of numbers that carry two roundings each.
    np.testing.assert_allclose(next(lengths), 2 * next(lengths), rtol=16 * np.finfo(np.float32).eps)
    np.testing.assert_array_equal(long[..., 6], x[..., 6], "an odd last dimension stays as it is")


def yarn_of_base_1():
    rotate(jnp.ones((1, 1, 1, 4)), jnp.ones((1, 1), int), base=1, scaling=YarnScaling(4, 4096))


WRONG = {
    "llama3": (lambda: Llama3Scaling(high_frequency_factor=1), "below high_frequency_factor, got 1.0 "),
    "yarn": (lambda: YarnScaling(4, 4096, beta_fast=1, beta_slow=32), "below beta_fast, got 32 and 1"),
    "base of yarn": (yarn_of_base_1, "YaRN needs a rope_base above 1, got 1"),
}


@pytest.mark.parametrize(("make", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_scalings(make, message):
    with refused(ValueError, message):
        make()


@pytest.mark.parametrize("layer", [NSAAttention, DenseAttention])
@pytest.mark.parametrize("more", [dict(rope_base=5e5), dict(rope_scaling=LinearScaling(2))])
def test_a_rotary_function_needs_no_base_and_no_scaling(layer, more):
    (told,) = map(re.escape, map(repr, more.values()))
    with refused(ValueError, f"rope_base and rope_scaling must be left out .* got .*{told}"):
        layer(4, 12, num_kv_heads=2, rotary=lambda x, _: x, **more, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("layer", [NSAAttention, DenseAttention])
def test_a_rotary_function_keeps_shapes(layer):
    rotary = lambda x, positions: x[..., :1]  # noqa: E731
    module = nnx.eval_shape(lambda: layer(4, 12, num_kv_heads=2, rotary=rotary, rngs=nnx.Rngs(0)))

    with refused(ValueError, r"must keep the shape of its heads, got \(1, 5, \d, 1\) for"):
        nnx.eval_shape(lambda module, x: module(x), module, jax.ShapeDtypeStruct((1, 5, 12), jnp.float32))
