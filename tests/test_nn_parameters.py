"""Weights of any module as NumPy arrays by name: read from it, loaded into it, and what is refused."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import refused
from modules import MODEL, NSA, abstract, named

from nsa_jax import nn
from nsa_jax.model import Transformer

MODULES = {
    "NSA": lambda **a: nn.NSAAttention(4, 12, num_kv_heads=2, config=NSA, use_bias=True, **a),
    "dense": lambda **a: nn.DenseAttention(4, 12, num_kv_heads=2, **a),
    "model": lambda **a: Transformer(MODEL, **a),
    "any": lambda **a: nnx.Sequential(nnx.Linear(3, 4, **a), nnx.BatchNorm(4, **a)),
}


def made(kind="NSA", **arguments):
    return abstract(MODULES[kind], **arguments)


def drawn(module, seed=0, dtype=np.float32):
    """Random weights for all parameters of a module."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(leaf.shape).astype(dtype)
        for name, leaf in named(nnx.state(module, nnx.Param)).items()
    }


def loaded(kind="NSA", seed=0, **arguments):
    module = made(kind, **arguments)
    nn.load_weights(module, drawn(module, seed))
    return module


@pytest.mark.parametrize("kind", MODULES)
def test_weights_come_back_as_they_went(kind):
    module = made(kind)
    given = drawn(module)

    nn.load_weights(module, given)
    found = nn.weights(module)

    assert found.keys() == given.keys()
    for name, value in found.items():
        assert type(value) is np.ndarray
        np.testing.assert_array_equal(value, given[name])


def test_a_layer_computes_with_what_was_loaded():
    layer = loaded("dense")
    x = np.random.default_rng(1).standard_normal((1, 1, 12)).astype(np.float32)

    out = nnx.jit(lambda layer, x: layer(x))(layer, x)

    # A single token attends only to itself, so attention gives its value, once for each query head.
    given = drawn(layer)
    value = np.tensordot(x, given["value_proj.kernel"], 1).repeat(2, axis=2)
    expected = np.tensordot(value, given["out_proj.kernel"], 2)
    # Two products of 12 terms each: 24 roundings of sums at most 10 times the result's scale.
    tolerance = 240 * np.finfo(np.float32).eps * np.abs(expected).max()
    np.testing.assert_allclose(out, expected, rtol=0, atol=tolerance)


def aligned(value):
    """A copy that begins at a multiple of 64 bytes: memory that JAX on a CPU uses without copying it."""
    room = np.empty(value.nbytes + 64, np.uint8)
    first = -room.ctypes.data % 64
    copy = room[first : first + value.nbytes].view(value.dtype).reshape(value.shape)
    copy[...] = value
    return copy


def test_both_directions_copy():
    layer = loaded("dense")
    given = {name: aligned(value) for name, value in nn.weights(layer).items()}
    nn.load_weights(layer, given)
    taken = nn.weights(layer)

    for value in (*given.values(), *taken.values()):
        value[...] = 7

    for name, value in nn.weights(layer).items():
        np.testing.assert_array_equal(value, drawn(layer)[name])


def test_bfloat16_survives_a_file_of_numpy(tmp_path):
    written, read = made(param_dtype=jnp.bfloat16), made(param_dtype=jnp.float32)
    nn.load_weights(written, drawn(written))

    np.savez(tmp_path / "layer.npz", **nn.weights(written))
    nn.load_weights(read, np.load(tmp_path / "layer.npz"))

    for name, value in nn.weights(read).items():
        np.testing.assert_array_equal(value, nn.weights(written)[name].astype(np.float32))


@pytest.mark.parametrize("given", ["float32", "float64", "float16"])
@pytest.mark.parametrize("start", [made, loaded], ids=["abstract", "created"])
def test_dtypes_of_the_module_stay(start, given):
    module = start("dense", param_dtype="bfloat16")

    nn.load_weights(module, drawn(module, 1, given))

    for name, value in nn.weights(module).items():
        assert value.dtype == jnp.bfloat16
        np.testing.assert_array_equal(value, drawn(module, 1, given)[name].astype(jnp.bfloat16))


@pytest.mark.parametrize("start", [made, loaded], ids=["abstract", "created"])
def test_shardings_of_the_module_stay(start):
    mesh = jax.make_mesh((1,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        module = start("NSA", sharding={"heads": "tensor"})
        nn.load_weights(module, drawn(module, 1))

    kernel = module.query_proj.kernel
    assert kernel.get_value().sharding == jax.NamedSharding(mesh, jax.P(None, "tensor", None))
    assert kernel.get_metadata("out_sharding") == (None, "tensor", None)
    np.testing.assert_array_equal(kernel.get_value(), drawn(module, 1)["query_proj.kernel"])


def test_parameters_that_follow_the_default_device_still_do():
    module = loaded("dense")

    nn.load_weights(module, drawn(module, 1))

    assert not any(value.committed for value in jax.tree.leaves(nnx.state(module)))


def test_what_is_no_parameter_stays():
    module = MODULES["any"](rngs=nnx.Rngs(0))
    module.layers[1].mean[...] = jnp.arange(4.0)

    nn.load_weights(module, drawn(module))

    assert "layers.1.mean" not in nn.weights(module)
    np.testing.assert_array_equal(module.layers[1].mean[...], np.arange(4.0))


def without(names):
    return lambda given: {name: value for name, value in given.items() if not name.startswith(names)}


def with_others(**others):
    return lambda given: given | {name.replace("__", "."): x for name, x in others.items()}


BAD = {
    "missing": (without("gate.kernel_in"), "got 1 missing (gate.kernel_in). Rename or convert them"),
    "many": (without(("query", "key", "value")), "key_cmp_proj.kernel, key_slc_proj.bias and 11 more)"),
    "extra": (with_others(b=np.ones(2), a=np.ones(3)), "got 2 extra (b, a). Rename"),
    "shape": (
        with_others(query_proj__kernel=np.ones((12, 12))),
        "got 1 of another shape (query_proj.kernel: (12, 12) for (12, 4, 3)). Rename",
    ),
    "all at once": (
        lambda given: without("out_proj.bias")(given) | {"x": np.ones(1), "gate.bias_in": np.ones(())},
        "got 1 missing (out_proj.bias), 1 extra (x), 1 of another shape (gate.bias_in: () for (8,)). Rename",
    ),
}


@pytest.mark.parametrize(("change", "told"), BAD.values(), ids=BAD.keys())
def test_other_weights_are_one_short_error_and_nothing_is_set(change, told):
    module = loaded()

    with refused(ValueError, f"weights must be those of the module, .*{re.escape(told)}"):
        nn.load_weights(module, change(drawn(module, 1)))

    for name, value in nn.weights(module).items():
        np.testing.assert_array_equal(value, drawn(module)[name])


OTHER_KINDS = {
    "list": (list, "weights must map names to arrays, got list. Pass a dict."),
    "list of numbers": (with_others(gate__bias_in=[0.0] * 8), "must be arrays, got list at gate.bias_in"),
    "integers": (with_others(gate__bias_in=np.zeros(8, np.int8)), "got int8 at gate.bias_in for float"),
    "objects": (with_others(gate__bias_in=np.array([None] * 8)), "got object at gate.bias_in"),
}


@pytest.mark.parametrize(("change", "told"), OTHER_KINDS.values(), ids=OTHER_KINDS.keys())
def test_weights_of_another_kind(change, told):
    module = loaded()

    with refused(TypeError, re.escape(told)):
        nn.load_weights(module, change(drawn(module, 1)))

    for name, value in nn.weights(module).items():
        np.testing.assert_array_equal(value, drawn(module)[name])


def test_modules_that_hold_no_arrays():
    module = loaded("dense")
    given = nn.weights(module)
    mesh = jax.make_mesh((1,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        sharded = made("dense", sharding={"heads": "tensor"})

    for error, told, call in (
        (TypeError, "weights must be arrays, got ShapeDtypeStruct at", lambda: nn.weights(made("dense"))),
        (TypeError, "weights must be arrays, got .*Tracer at", lambda: nnx.jit(nn.weights)(module)),
        (
            TypeError,
            "weights must be arrays, got .*Tracer at",
            lambda: jax.jit(lambda given: nn.load_weights(made("dense"), given))(given),
        ),
        (
            TypeError,
            "weights must be loaded outside jit, got a module that holds .*Tracer",
            lambda: nnx.jit(lambda module: nn.load_weights(module, given))(module),
        ),
        (
            ValueError,
            "an abstract module with shardings needs its mesh in context, got none",
            lambda: nn.load_weights(sharded, given),
        ),
    ):
        with refused(error, told):
            call()
