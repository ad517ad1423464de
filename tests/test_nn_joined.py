"""Projections of one input as one product: what it computes, how often, and what stays apart."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equations import equations
from flax import nnx
from jax.sharding import AxisType
from modules import abstract, randomised
from small_layer import ROUNDING, WIDTH, make_layer, random

from nsa_jax.nn import DenseAttention, NSAAttention, joined

X = random(2, 8, WIDTH)


def layer_of(kind, **options):
    if kind == "nsa":
        return make_layer(jnp.float64, **options)
    return randomised(abstract(DenseAttention, 4, WIDTH, num_kv_heads=2, param_dtype=jnp.float64, **options))


def products(way, layer, x):
    """What `_project` reads, by a function of `joined`; also where it left the gate to the layer."""
    made = way(layer, x, layer.input_projections)
    if hasattr(layer, "gate"):
        hidden = made.pop("gate", None)
        made["gates"] = layer.gate(x) if hidden is None else layer.gate.of_hidden(hidden)
    return made


def num_products(way, layer, x, derive=lambda loss: loss) -> int:
    graph, state = nnx.split(layer)

    def loss(state, x):
        made = products(way, nnx.merge(graph, state), x)
        return sum(out.sum() for out in jax.tree.leaves(made))

    program = jax.make_jaxpr(derive(loss))(state, x)
    return sum(equation.primitive.name == "dot_general" for equation in equations(program.jaxpr))


def gradients(loss):
    return jax.grad(loss, (0, 1))


@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("kind", ["nsa", "dense"])
def test_one_product_and_its_gradients_are_those_of_each(kind, use_bias):
    with jax.enable_x64(True):
        graph, state = nnx.split(layer_of(kind, use_bias=use_bias))

        def evaluate(way):
            run = lambda state, x: products(way, nnx.merge(graph, state), x)  # noqa: E731
            made, pull_back = jax.vjp(run, state, X)
            return made, pull_back({name: jnp.cos(out) for name, out in made.items()})

        found = jax.jit(lambda: evaluate(joined.projected_together))()
        expected = jax.jit(lambda: evaluate(joined.projected))()

    assert found[0].keys() == expected[0].keys()
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize(("kind", "apart", "of_gate"), [("nsa", 8, 1), ("dense", 3, 0)])
def test_the_input_has_one_product_and_one_gradient(kind, apart, of_gate):
    """A gradient also has a product for the kernel, and the gate another one behind its hidden layer."""
    with jax.enable_x64(True):
        layer = layer_of(kind)

        assert num_products(joined.projected, layer, X) == apart + of_gate
        assert num_products(joined.projected_together, layer, X) == 1 + of_gate
        assert num_products(joined.projected, layer, X, gradients) == 3 * (apart + of_gate)
        assert num_products(joined.projected_together, layer, X, gradients) == 3 * (1 + of_gate)


def test_what_computes_otherwise_stays_apart():
    class Doubled(nnx.LinearGeneral):
        def __call__(self, x):
            return 2 * super().__call__(x)

    with jax.enable_x64(True):
        layer = layer_of("nsa")
        layer.key_slc_proj = Doubled(WIDTH, (2, 5), param_dtype=jnp.float64, rngs=nnx.Rngs(0))
        layer.value_win_proj.precision = "highest"

        found, expected = (products(way, layer, X) for way in (joined.projected_together, joined.projected))
        assert num_products(joined.projected_together, layer, X) == 3 + 1
        layer.query_proj = Doubled(WIDTH, (4, 5), param_dtype=jnp.float64, rngs=nnx.Rngs(1))
        assert num_products(joined.projected_together, layer, X) == 8 + 1

    for name, out in expected.items():
        np.testing.assert_allclose(found[name], out, rtol=0, atol=ROUNDING, err_msg=name)


def test_few_tokens_are_projected_one_by_one():
    """As in a decode step: to lay kernels side by side would take longer than to multiply."""
    with jax.enable_x64(True):
        layer = layer_of("nsa")

        assert num_products(joined.projected_together, layer, X[:1, : WIDTH - 1]) == 8 + 1
        assert num_products(joined.projected_together, layer, random(1, WIDTH, WIDTH)) == 1 + 1


@pytest.mark.parametrize(("head_dim", "number"), [(255, 1), (256, 2), (512, 3)])
def test_wide_products_stay_apart(head_dim, number):
    """At 256 that of the queries alone, at 512 all three."""
    sizes = dict(num_kv_heads=2, head_dim=head_dim, param_dtype=jnp.float64)
    with jax.enable_x64(True):
        layer = randomised(abstract(DenseAttention, 4, WIDTH, **sizes))

        assert num_products(joined.projected_together, layer, X) == number


@pytest.mark.parametrize(
    ("metadata", "devices", "apart"), [(None, 1, False), (None, 2, True), ({}, 2, False)]
)
def test_what_devices_may_divide_stays_apart(metadata, devices, apart, monkeypatch):
    """A trace shows no axes that are not explicit. A layer that was given a sharding says what is whole."""
    mesh = jax.make_mesh((1,), ("tensor",), axis_types=(AxisType.Auto,))
    with contextlib.nullcontext() if metadata is None else jax.set_mesh(mesh):
        layer = NSAAttention(4, WIDTH, num_kv_heads=2, sharding=metadata, rngs=nnx.Rngs(0))
        monkeypatch.setattr(jax, "device_count", lambda: devices)

        found = num_products(joined.projected_together, layer, jnp.asarray(X, jnp.float32))

    assert found == (8 if apart else 1) + 1


def test_gradients_in_16_bits_are_as_exact():
    """On a CPU a product that summed over two axes of tokens lost most of its digits."""
    layer = randomised(abstract(DenseAttention, 4, 128, num_kv_heads=2, param_dtype=jnp.float32))
    graph, state = nnx.split(layer)
    x = random(4, 100, 128)

    def of_kernels(way, dtype):
        cast = lambda tree: jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), tree)  # noqa: E731

        def loss(state, x):
            made = products(way, nnx.merge(graph, state), x)
            return sum(
                (out * jnp.cos(jnp.arange(out.size)).reshape(out.shape).astype(dtype)).sum()
                for out in made.values()
            )

        found = jax.jit(jax.grad(loss))(cast(state), cast(x))
        return [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(found)]

    exact = of_kernels(joined.projected, "float32")
    together, apart = (of_kernels(way, "bfloat16") for way in (joined.projected_together, joined.projected))
    errors = [[np.abs(a - b).max() for a, b in zip(exact, found, strict=True)] for found in (together, apart)]
    assert max(errors[0]) <= 1.5 * max(errors[1])


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_what_devices_divide_stays_apart(axis_type):
    mesh = jax.make_mesh((1,), ("tensor",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        layer = NSAAttention(
            4, WIDTH, num_kv_heads=2, sharding={"heads": "tensor", "kv_heads": "tensor"}, rngs=nnx.Rngs(0)
        )

        assert num_products(joined.projected_together, layer, jnp.asarray(X, jnp.float32)) == 8 + 1
