"""Options of the NSA layer: a step through a cache gives what the full forward gives; dropout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from selector_examples import Recent
from small_layer import (
    LENGTH,
    ROWS,
    WIDTH,
    WeightedSum,
    assert_steps_give,
    fixed_gate,
    make_layer,
    random,
    turn_first_pair,
)

from nsa_jax.nn import DenseAttention, NSAAttention

# With dropout: in training mode a forward drops outputs, and a step must not.
NORMED = dict(normalize_qk=True, scale=0.7, dropout_rate=0.5)
OWN_PARTS = dict(compressor=WeightedSum, gate=fixed_gate, rotary=turn_first_pair)


def test_steps_of_a_cache_equal_the_full_forward():
    x = random(ROWS, LENGTH, WIDTH)
    with jax.enable_x64(True):
        layer = make_layer(jnp.float64, **NORMED, **OWN_PARTS)
        full = np.asarray(jax.jit(lambda x: layer(x, deterministic=True))(x))
        assert_steps_give(full, layer, x)


@pytest.mark.parametrize("kind", [NSAAttention, DenseAttention])
def test_dropout_wants_a_stream(kind):
    """Without one the first call raised Flax's KeyError."""
    with pytest.raises(ValueError, match=r"rngs must have a stream for dropout, got \['params'\]"):
        kind(4, WIDTH, num_kv_heads=2, dropout_rate=0.5, rngs=nnx.Rngs(params=0))
    kind(4, WIDTH, num_kv_heads=2, dropout_rate=0.0, rngs=nnx.Rngs(params=0))
    kind(4, WIDTH, num_kv_heads=2, dropout_rate=0.5, rngs=nnx.Rngs(params=0, dropout=1))


@pytest.mark.parametrize("kind", ["nsa", "dense"])
def test_dropout_falls_on_the_output_in_training(kind):
    """It drops a quarter of the output, drawn anew in each call, and divides the rest by three quarters."""
    x = random(2, 40, WIDTH).astype(np.float32)
    if kind == "nsa":
        layer = make_layer(dropout_rate=0.25, selector=Recent, branches=("slc",))
    else:
        layer = DenseAttention(4, WIDTH, num_kv_heads=2, dropout_rate=0.25, rngs=nnx.Rngs(0))

    @nnx.jit
    def run(layer, x):
        plain, keyed = layer(x, deterministic=True), [layer(x, rngs=jax.random.key(1)) for _ in range(2)]
        first, second = layer(x), layer(x)
        layer.eval()
        return plain, *keyed, first, second, layer(x)

    plain, keyed, again, first, second, evaluated = map(np.asarray, run(layer, x))

    np.testing.assert_array_equal(keyed, again)
    np.testing.assert_array_equal(evaluated, plain)
    for out in (keyed, first, second):
        kept = out != 0
        # One rounding of the division, in float32.
        np.testing.assert_allclose(out[kept], plain[kept] / 0.75, rtol=2 * np.finfo(np.float32).eps)
        assert abs(kept.mean() - 0.75) < 6 * np.sqrt(0.25 * 0.75 / kept.size), "off by six deviations"
    assert (first != second).any()
    assert (first != keyed).any()
