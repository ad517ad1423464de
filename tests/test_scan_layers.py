"""The example that scans a stack of layers: what it computes, and that depth costs no compile time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from modules import abstract, randomised
from selector_examples import Recent

pytest.importorskip("optax", reason="the example needs the extra `train`")

from examples import scan_layers
from examples.scan_layers import Layer, ScannedLayers

DEPTH = 2


@pytest.fixture
def _one_branch(monkeypatch):
    """A scan does not know what is in a layer, and NSA of one branch is quick to compile."""
    attention = functools.partial(scan_layers.NSAAttention, branches=("slc",), selector=Recent)
    monkeypatch.setattr(scan_layers, "NSAAttention", attention)


def drawn() -> tuple[np.ndarray, np.ndarray]:
    """Input and target in float64, so that layers compute in it and no selection hangs on rounding."""
    return tuple(np.random.default_rng(0).standard_normal((2, 2, 40, scan_layers.WIDTH)))


def with_gradients(layers, x, target):
    """Output, and the gradients of the loss with respect to the parameters and to `x`."""
    graph, state = nnx.split(layers)

    def loss(state, x):
        out = nnx.merge(graph, state)(x)
        return jnp.square(out - target).mean(), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(state, x)
    return out, *gradients


def one_by_one(layers, x, target):
    """The same of a list of layers, by one program that runs a layer and pulls back through it."""
    graph, _ = nnx.split(layers[0])

    @jax.jit
    def run(state, x, d_out):
        out, pull_back = jax.vjp(lambda state, x: nnx.merge(graph, state)(x), state, x)
        return out, *pull_back(d_out)

    states, inputs = [nnx.state(layer) for layer in layers], [x]
    for state in states:
        inputs.append(run(state, inputs[-1], jnp.zeros_like(x))[0])
    out = inputs.pop()
    d_x, gradients = 2 * (out - target) / out.size, []
    for state, x in reversed([*zip(states, inputs, strict=True)]):
        _, gradient, d_x = run(state, x, d_x)
        gradients.insert(0, gradient)
    return out, gradients, d_x


def test_scanned_layers_compute_what_a_loop_over_them_does():
    x, target = drawn()
    with jax.enable_x64(True):
        scanned = randomised(abstract(ScannedLayers, DEPTH), 0.3)
        out, of_layers, of_x = one_by_one(nnx.jit(ScannedLayers.unstacked)(scanned), x, target)
        expected = jax.tree.map(lambda *each: np.stack(each), *of_layers)
        result = with_gradients(scanned, x, target)
        out, of_x, expected, result = jax.tree.map(np.asarray, (out, of_x, expected, result))

    scanned_out, of_stacked, scanned_of_x = result
    # 5000 eps of float64, for sums of some 50 terms one after the other.
    np.testing.assert_allclose(scanned_out, out, rtol=0, atol=1e-12 * np.abs(out).max())
    np.testing.assert_allclose(scanned_of_x, of_x, rtol=0, atol=1e-12 * np.abs(of_x).max())
    found, wanted = nnx.to_pure_dict(of_stacked["layers"]), nnx.to_pure_dict(expected)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for name, gradient in jax.tree.leaves_with_path(wanted):
        (other,) = (leaf for path, leaf in jax.tree.leaves_with_path(found) if path == name)
        # Parameters are float32: rounding may set two equal sums apart by one eps.
        error = np.abs(other - gradient).max()
        assert error <= np.finfo(np.float32).eps * np.abs(gradient).max(), jax.tree_util.keystr(name)


@pytest.mark.usefixtures("_one_branch")
def test_layers_of_a_stack_start_differently():
    def kernels():
        layers = ScannedLayers(DEPTH, rngs=nnx.Rngs(0)).unstacked()
        return [layer.attention.query_proj.kernel[...] for layer in layers]

    first, second = jax.jit(kernels)()

    assert first.shape == (scan_layers.WIDTH, 4, 8)
    assert not np.array_equal(first, second)


@pytest.mark.usefixtures("_one_branch")
@pytest.mark.parametrize("remat", [False, True], ids=["stored", "rematerialised"])
def test_depth_costs_no_compile_time(monkeypatch, remat):
    """Traces of the body, and lines of the program that XLA compiles, are the same for 2 and 6 layers."""
    traces, plain = [], Layer.__call__
    monkeypatch.setattr(Layer, "__call__", lambda self, x: traces.append(x.shape) or plain(self, x))
    x, target = (jnp.asarray(each, jnp.float32) for each in drawn())

    lines = {}
    for depth in (2, 6):
        graph, state = nnx.split(abstract(ScannedLayers, depth, remat=remat))
        traces.clear()
        lowered = jax.jit(
            jax.value_and_grad(lambda state, x: scan_layers.loss_of(nnx.merge(graph, state), x, target))  # noqa: B023
        ).lower(state, x)
        lines[depth] = len(lowered.as_text().splitlines())
        assert traces == [x.shape]

    assert lines[2] == lines[6]


def test_without_remat_the_backward_pass_stores_more():
    x, target = (jnp.asarray(each, jnp.float32) for each in drawn())

    def stored(remat):
        graph, state = nnx.split(abstract(ScannedLayers, 6, remat=remat))
        _, pullback = jax.eval_shape(
            lambda state: jax.vjp(
                lambda state: scan_layers.loss_of(nnx.merge(graph, state), x, target), state
            ),
            state,
        )
        return sum(leaf.size for leaf in jax.tree.leaves(pullback))

    assert stored(True) < stored(False) / 2


def test_the_example_runs(monkeypatch, capsys):
    """With a product in place of the attention, with which the step is traced alone."""
    x, target = (jnp.asarray(each, jnp.float32) for each in drawn())

    def step():
        layers = ScannedLayers(DEPTH, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(layers, scan_layers.optax.adam(1e-3), wrt=nnx.Param)
        return scan_layers.train_step(layers, optimizer, x, target)

    assert nnx.eval_shape(step).shape == ()

    def product(heads, width, *, num_kv_heads, config, rngs):
        return nnx.Linear(width, width, rngs=rngs)

    monkeypatch.setattr(scan_layers, "NSAAttention", product)
    scan_layers.main([])

    for line, depth in zip(capsys.readouterr().out.splitlines(), (2, 6), strict=True):
        assert line.startswith(f"{depth} layers: compiled in ")
        *_, first, _, last = line.split()
        assert float(last) < float(first)
