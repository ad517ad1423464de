"""The language model: its composition, its names, its kinds of attention, its steps through a cache."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from messages import refused
from modules import MODEL, NSA, abstract, named, randomised
from test_nn_layer import COMPRESSOR_PARAMETERS, LAYER_PARAMETERS

from nsa_jax.model import Transformer
from nsa_jax.nn import DenseAttention, IndexerConfig, NSAAttention

CONFIG = dataclasses.replace(MODEL, nsa=dataclasses.replace(NSA, num_selected_blocks=3, num_local_blocks=1))
DENSE = dataclasses.replace(CONFIG, attention="dense")
LENGTH = 17
TOKENS = jax.ShapeDtypeStruct((2, LENGTH), jnp.int32)


def abstract_model(config=CONFIG, **arguments):
    return abstract(Transformer, config, **arguments)


def make_model(config=CONFIG):
    return randomised(abstract_model(config), scale=0.3)


def tokens(rows=2, length=LENGTH, seed=0):
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, (rows, length))


def paths(model):
    return set(named(nnx.state(model)))


@functools.cache
def float64_model():
    """A model of one NSA layer that is quick to compile, its logits and its selections for `tokens()`."""
    config = dataclasses.replace(
        CONFIG, num_layers=1, dtype="float64", param_dtype="float64", tie_embeddings=False,
        branches=("slc", "win"), selector=IndexerConfig(dim=4),
    )  # fmt: skip
    with jax.enable_x64(True):
        model = make_model(config)
        logits, selections = jax.jit(lambda tokens: (model(tokens), model.inspect(tokens)))(tokens())
    return model, np.asarray(logits), selections


def test_logits_are_those_of_the_written_out_model():
    model, logits, selections = float64_model()
    layer = model.layers[0]

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(scale)

    x = np.asarray(model.embed.embedding)[tokens()]
    normed = norm(x, layer.attention_norm.scale)
    with jax.enable_x64(True):
        attended, selection = jax.jit(lambda x: (layer.attention(x), layer.attention.inspect(x)))(normed)
    x = x + np.asarray(attended)
    gate, up, down = (
        np.asarray(getattr(layer.mlp, f"{name}_proj").kernel) for name in ("gate", "up", "down")
    )
    normed = norm(x, layer.mlp_norm.scale)
    x = x + (normed @ gate / (1 + np.exp(-(normed @ gate))) * (normed @ up)) @ down
    expected = norm(x, model.final_norm.scale) @ np.asarray(model.lm_head.kernel)

    # About 100 additions on the longest chain, of terms at most 10 times the scale of the logits.
    tolerance = 1000 * np.finfo(np.float64).eps * np.abs(expected).max()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance)
    assert len(selections) == 1
    np.testing.assert_array_equal(selections[0].block_indices, selection.block_indices)
    np.testing.assert_allclose(selections[0].gates, selection.gates, rtol=0, atol=tolerance)


def test_steps_of_a_cache_equal_the_full_forward():
    """Ragged prefill in two chunks, then steps in which a row takes 0 to 3 tokens."""
    model, logits, _ = float64_model()
    ids = tokens()
    tolerance = 1000 * np.finfo(np.float64).eps * np.abs(logits).max()
    with jax.enable_x64(True):
        step = jax.jit(model.decode_step)
        prefill = jax.jit(model.prefill)
        cache = model.init_cache(2, LENGTH)
        for counts in ([6, 3], [4, 6]):
            start = np.asarray(cache[0].lengths)
            chunk = np.stack(
                [np.resize(ids[row, start[row] : start[row] + counts[row]], 6) for row in range(2)]
            )
            last, cache = prefill(chunk, cache, np.array(counts))
            for row in range(2):
                expected = logits[row, start[row] + counts[row] - 1]
                np.testing.assert_allclose(last[row], expected, rtol=0, atol=tolerance)
        for counts in ([3, 3], [2, 0], [1, 3]):
            start = np.asarray(cache[0].lengths)
            chunk = np.stack([np.resize(ids[row, start[row] : start[row] + 3], 3) for row in range(2)])
            out, cache = step(chunk, cache, np.array(counts))
            for row, count in enumerate(counts):
                expected = logits[row, start[row] : start[row] + count]
                np.testing.assert_allclose(out[row, :count], expected, rtol=0, atol=tolerance)
    np.testing.assert_array_equal(cache[0].lengths, [16, 15])
    assert len(cache) == 1


def test_steps_with_given_blocks_equal_the_full_forward():
    """Each of two layers has a selection of its own, in a model that computes layers again.

    In one that does not: `test_model_layers`.
    """
    config = dataclasses.replace(CONFIG, branches=("slc",), selector="given")
    model = make_model(dataclasses.replace(config, remat=True))
    ids, shape = tokens(), (2, LENGTH, CONFIG.num_kv_heads, 3)
    blocks = [np.broadcast_to(np.array(one), shape) for one in ([0, 2, -1], [1, 3, 4])]

    run = nnx.jit(lambda model, ids, blocks: model(ids, block_indices=blocks))

    @nnx.jit
    def in_steps(model, ids, blocks):
        first, rest = ([x[:, part] for x in blocks] for part in (np.s_[:12], np.s_[12:]))
        last, cache = model.prefill(ids[:, :12], model.init_cache(2, LENGTH), block_indices=first)
        out, *_ = model.decode_step(ids[:, 12:], cache, block_indices=rest)
        return last, out

    full, of_the_first = run(model, ids, blocks), run(model, ids, 2 * blocks[:1])
    last, out = in_steps(model, ids, blocks)

    assert np.abs(full - of_the_first).max() > 0.1
    np.testing.assert_allclose(last, full[:, 11], rtol=0, atol=1e-4)
    np.testing.assert_allclose(out, full[:, 12:], rtol=0, atol=1e-4)


def test_one_step_of_training_moves_every_parameter():
    """Those of a layer of NSA do by test_nn_attention."""
    model = make_model(dataclasses.replace(DENSE, num_layers=1))
    graph, state = nnx.split(model)
    ids = tokens()

    def loss(state):
        logits = nnx.merge(graph, state)(ids[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()

    @jax.jit
    def step(state):
        value, gradients = jax.value_and_grad(loss)(state)
        return value, jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, state, gradients)

    losses, trained = [], state
    for _ in range(5):
        value, trained = step(trained)
        losses.append(float(value))

    assert losses[-1] < losses[0]
    before = dict(nnx.to_flat_state(state))
    for path, variable in nnx.to_flat_state(trained):
        assert not np.array_equal(variable.get_value(), before[path].get_value()), path


@pytest.mark.parametrize("remat", [False, True])
def test_layers_are_computed_again_where_asked(remat):
    """And gradients stay those without, as test_model_loss shows."""
    graph, state = nnx.split(abstract_model(dataclasses.replace(DENSE, num_layers=1, remat=remat)))

    jaxpr = str(
        jax.make_jaxpr(jax.grad(lambda state, ids: nnx.merge(graph, state)(ids).sum()))(state, TOKENS)
    )

    assert ("remat" in jaxpr or "checkpoint" in jaxpr) == remat


def test_remat_of_nsa_layers_traces():
    graph, state = nnx.split(abstract_model(dataclasses.replace(CONFIG, remat=True)))

    gradients = jax.eval_shape(jax.grad(lambda state, ids: nnx.merge(graph, state)(ids).sum()), state, TOKENS)

    assert jax.tree.map(jnp.shape, gradients) == jax.tree.map(jnp.shape, state)


def test_kinds_of_attention():
    layers = [
        abstract_model(dataclasses.replace(CONFIG, attention=kind)).layers[1].attention
        for kind in ("nsa", "dense", "window")
    ]

    assert [type(layer) for layer in layers] == [NSAAttention, DenseAttention, DenseAttention]
    assert layers[0].config == CONFIG.nsa
    assert layers[1].window is None
    assert layers[2].window.window_size == CONFIG.nsa.window_size


NSA_NAMES = {*LAYER_PARAMETERS, *COMPRESSOR_PARAMETERS}
DENSE_NAMES = {f"{name}_proj.kernel" for name in ("query", "key", "value", "out")}


@pytest.mark.parametrize(
    ("changes", "attention_names"),
    [({}, NSA_NAMES), (dict(attention="dense"), DENSE_NAMES), (dict(attention="window"), DENSE_NAMES)],
    ids=["nsa", "dense", "window"],
)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_parameters_have_the_names_that_checkpoints_rely_on(changes, attention_names, tied):
    model = abstract_model(dataclasses.replace(CONFIG, tie_embeddings=tied, **changes))

    of_a_layer = {f"attention.{name}" for name in attention_names}
    of_a_layer |= {f"mlp.{name}_proj.kernel" for name in ("gate", "up", "down")}
    of_a_layer |= {"attention_norm.scale", "mlp_norm.scale"}
    expected = {f"layers.{index}.{name}" for index in range(2) for name in of_a_layer}
    expected |= {"embed.embedding", "final_norm.scale"} | (set() if tied else {"lm_head.kernel"})
    assert paths(model) == expected


@pytest.mark.parametrize(("dtype", "logits_dtype"), [("bfloat16", "float32"), ("float32", "float32")])
def test_logits_are_float32_at_least(dtype, logits_dtype):
    model = abstract_model(dataclasses.replace(CONFIG, dtype=dtype))

    logits = nnx.eval_shape(lambda model, ids: model(ids), model, TOKENS)

    assert (logits.shape, logits.dtype) == ((2, LENGTH, CONFIG.vocab_size), logits_dtype)
    assert model.layers[0].attention.query_proj.kernel.dtype == jnp.float32
    assert jax.eval_shape(lambda: model.init_cache(1, 8))[0].key_slc.dtype == dtype


def test_gradients_of_a_token_that_comes_often_are_added_up_in_float32():
    token = 3
    tokens = np.full((1, 512), token)

    def gradient(dtype):
        model = make_model(dataclasses.replace(DENSE, num_layers=1, tie_embeddings=False, dtype=dtype))
        return jax.jit(nnx.grad(lambda model: model(tokens).sum()))(model).embed.embedding[token]

    exact = gradient("float32")
    error = jnp.linalg.norm(gradient("bfloat16") - exact) / jnp.linalg.norm(exact)
    # Eight roundings on the way through the layer. A sum in bfloat16 stands still after 256 of the tokens.
    assert error < 8 * jnp.finfo(jnp.bfloat16).eps


def test_default_width_of_the_mlp():
    assert abstract_model().layers[0].mlp.up_proj.kernel.shape == (12, 32)
    assert abstract_model(dataclasses.replace(CONFIG, mlp_dim=7)).layers[0].mlp.up_proj.kernel.shape == (
        12,
        7,
    )
    assert abstract_model(dataclasses.replace(CONFIG, head_dim=5)).layers[0].attention.head_dim == 5


def test_sharding_metadata():
    mesh = jax.make_mesh((1, 1), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = {"model": "fsdp", "heads": "tensor", "mlp": "tensor", "vocab": "tensor"}
    with jax.set_mesh(mesh):
        model = nnx.as_abstract(
            abstract_model(dataclasses.replace(CONFIG, tie_embeddings=False), sharding=sharding)
        )

    assert model.embed.embedding.sharding.spec == jax.P("tensor", "fsdp")
    assert model.lm_head.kernel.sharding.spec == jax.P("fsdp", "tensor")
    assert model.layers[0].mlp.up_proj.kernel.sharding.spec == jax.P("fsdp", "tensor")
    assert model.layers[0].mlp.down_proj.kernel.sharding.spec == jax.P("tensor", "fsdp")
    assert model.layers[1].attention.out_proj.kernel.sharding.spec == jax.P("tensor", None, "fsdp")


def test_a_row_without_tokens_has_finite_logits():
    """In uint8, the index of its last token would be 255."""
    model = randomised(abstract_model(dataclasses.replace(DENSE, num_layers=1)))
    tokens, counts = np.ones((2, 3), np.int32), np.array([0, 3], np.uint8)

    logits, _ = nnx.jit(lambda model, *new: model.prefill(new[0], model.init_cache(2, 8), new[1]))(
        model, tokens, counts
    )

    assert np.isfinite(logits).all()


@pytest.mark.parametrize("kind", ["dense", "window"])
def test_only_nsa_has_a_selection(kind):
    model = abstract_model(dataclasses.replace(CONFIG, attention=kind))

    with refused(NotImplementedError, f"inspect needs NSA layers, got attention='{kind}'. Build"):
        model.inspect(tokens())
    with pytest.raises(NotImplementedError, match="block_indices need NSA layers, got attention="):
        model(tokens(), block_indices=[])


@pytest.mark.parametrize("kind", ["dense", "window"])
def test_only_nsa_layers_take_blocks(kind):
    def fill(layer, x):
        return layer.prefill(x, layer.init_cache(2, 8), block_indices=x)

    layer = abstract_model(dataclasses.replace(CONFIG, attention=kind)).layers[0].attention
    with pytest.raises(NotImplementedError, match="block_indices need NSA layers, got DenseAtt"):
        nnx.eval_shape(fill, layer, jax.ShapeDtypeStruct((2, 3, 12), jnp.float32))
