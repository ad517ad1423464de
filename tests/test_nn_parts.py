"""Gates and compressors of the user's: which are refused, and which compression is data for a kernel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import refused
from small_layer import (
    CONFIG,
    KEY_DIM,
    KV_HEADS,
    VALUE_DIM,
    WeightedSum,
    fixed_gate,
    make_layer,
    random,
)

from nsa_jax.cache import Compression
from nsa_jax.nn import Compressor, Gate, NSAAttention, YarnScaling

X = jax.ShapeDtypeStruct((2, 9, 12), jnp.float32)


def test_parts_of_another_dtype_do_not_change_that_of_the_layer():
    options = dict(compressor=functools.partial(Compressor, dtype="float32"), gate=fixed_gate)
    layer = abstract_layer(dtype="bfloat16", param_dtype="bfloat16", **options)

    operands = nnx.eval_shape(lambda layer, x: layer.operands(x), layer, X)

    assert {operand.dtype for operand in operands} == {jnp.dtype("bfloat16")}


def abstract_layer(**options):
    return nnx.eval_shape(lambda: NSAAttention(4, 12, num_kv_heads=2, **options, rngs=nnx.Rngs(0)))


def of_blocks(blocks):
    return blocks.mean(2)


WRONG = {
    "function of blocks": (dict(compressor=of_blocks), TypeError, "called as compressor.* got of_blocks"),
    "module": (dict(gate=Gate(12, 4, rngs=nnx.Rngs(0))), TypeError, "called as gate.* got Gate"),
    "makes nothing": (dict(gate=lambda *_, rngs: None), TypeError, "must make a function .* got NoneType"),
    "both": (dict(compressor=Compressor, compression="mean"), ValueError, "got compression='mean'"),
}


@pytest.mark.parametrize(("options", "error", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_parts(options, error, message):
    with refused(error, message) as raised:
        abstract_layer(**options)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(compressor=lambda *_, rngs: lambda blocks: blocks.mean(1)), r"\[B, m, K, H\], got .* Make it"),
        (dict(gate=lambda *_, rngs: lambda x: x), r"\[B, T, N, 3\], got \(2, 9, 12\) .* with 4 query heads"),
        (dict(gate=lambda *_, rngs: Gate(24, 4, rngs=rngs)), "as wide as the gate, 24, got 12"),
        (
            dict(gate=lambda *_, rngs: Gate(12, 1, rngs=rngs)),
            r"\[B, T, N, 3\], got \(2, 9, 1, 3\) .* 4 query heads",
        ),
    ],
    ids=["compressor", "gate", "wider gate", "gate of one head"],
)
def test_parts_of_other_shapes(options, message):
    config = dict(config=CONFIG)
    with refused(ValueError, message):
        nnx.eval_shape(lambda layer, x: layer(x), abstract_layer(**options, **config), X)


DATA = {
    "mlp": {},
    "mean": dict(compression="mean"),
    "yarn": dict(rope_scaling=YarnScaling(factor=4.0, original_length=16)),
    "mlp in float32": dict(dtype=jnp.float32),
}
NO_DATA = {
    "a compressor of one's own": dict(compressor=WeightedSum),
    "a rotary of one's own": dict(rotary=lambda x, positions: x),
    "precision": dict(precision="highest"),
    "a mean in another dtype": dict(compression="mean", dtype=jnp.bfloat16),
}


@pytest.mark.parametrize("options", DATA.values(), ids=DATA.keys())
def test_compression_as_data_is_that_of_the_layer(options):
    layer = make_layer(**options)
    windows = [random(2, 3, 4, KV_HEADS, dim).astype(np.float32) for dim in (KEY_DIM, VALUE_DIM)]
    first = np.array([[0, 2, 4], [10, 12, 1000]], np.int32)

    compress = layer._compression(jnp.float32)

    assert type(compress) is Compression
    as_data = jax.jit(lambda *blocks: compress(*blocks))(*windows, first)
    for found, expected in zip(as_data, jax.jit(layer._compress)(*windows, first), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("options", NO_DATA.values(), ids=NO_DATA.keys())
def test_what_is_no_data_stays_a_function(options):
    layer = make_layer(**options)

    assert layer._compression(jnp.float32) == layer._compress
