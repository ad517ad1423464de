"""Options of the attention in `TransformerConfig`: in every layer, its cache, training, checkpoints."""

import dataclasses
import json
import os
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import refused
from small_layer import CONFIG as NSA
from small_layer import WeightedSum, fixed_gate, turn_first_pair

from nsa_jax import nn
from nsa_jax.model import Transformer, TransformerConfig, restore, save
from nsa_jax.nn import Compressor, Gate, LinearScaling, Llama3Scaling, YarnScaling

CONFIG = TransformerConfig(
    vocab_size=11, num_layers=2, model_dim=12, num_heads=4, num_kv_heads=2, head_dim=5, nsa=NSA
)
LENGTH = 17


YARN = YarnScaling(4.0, 24, beta_fast=3.0, beta_slow=0.2)
PLAIN = dict(
    initial_gates=(0.02, 0.96, 0.02),
    qkv_bias=True,
    normalize_qk=True,
    post_norms=True,
    norm_epsilon=0.1,
    activation="gelu_tanh",
    embedding_scale=3.0,
    scale=0.7,
    dropout_rate=0.5,
    rope_base=100.0,
    rope_scaling=YARN,
    share_keys_values=True,
)
FUNCTIONS = dict(compressor=WeightedSum, gate=fixed_gate, rotary=turn_first_pair)


def abstract_model(**changes):
    config = dataclasses.replace(CONFIG, **changes)
    return nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))


def make_model(**changes):
    """A model with random parameters, made without compiling their initialisers."""
    model = abstract_model(**changes)
    state = nnx.state(model, nnx.Param)
    for seed, (_, variable) in enumerate(nnx.to_flat_state(state)):
        leaf = variable.get_value()
        numbers = np.random.default_rng(seed).standard_normal(leaf.shape)
        numbers *= 1 if numbers.ndim == 1 else 0.3
        variable.set_value(jnp.asarray(numbers.astype(leaf.dtype)))
    nnx.update(model, state)
    nnx.reseed(model, default=0)
    return model


def tokens(rows=2):
    return np.random.default_rng(0).integers(0, CONFIG.vocab_size, (rows, LENGTH))


@pytest.mark.parametrize("kind", ["nsa", "dense", "window"])
def test_options_reach_every_layer(kind):
    plain, functions = (abstract_model(attention=kind, **options) for options in (PLAIN, FUNCTIONS))

    for layer in (each.attention for each in plain.layers):
        assert (layer.scale, layer.dropout.rate) == (0.7, 0.5)
        assert (layer.rotary.base, layer.rotary.scaling) == (100.0, YARN)
        assert layer.query_norm.scale.shape == layer.key_norm.scale.shape == (5,)
        assert layer.query_norm.epsilon == layer.key_norm.epsilon == 0.1
        biases = [getattr(layer, f"{name}_proj").bias for name in ("query", "key", "value", "out")]
        assert [bias is not None for bias in biases] == [True, True, True, False]
    for model, epsilon in ((plain, 0.1), (functions, 1e-6)):
        held = model.layers[1]
        norms = [model.final_norm, held.attention_norm, held.mlp_norm]
        if model is plain:
            norms += [held.attention_post_norm, held.mlp_post_norm]
        assert {norm.epsilon for norm in norms} == {epsilon}
        assert held.mlp.activation == ("gelu_tanh" if model is plain else "silu")
    for layer in (each.attention for each in functions.layers):
        assert layer.rotary is turn_first_pair
        if kind == "nsa":
            assert isinstance(layer.compressor_key, WeightedSum)
            assert isinstance(layer.compressor_value, WeightedSum)
            assert not isinstance(layer.gate, Gate)


def test_dropout_in_training_only():
    """Of a layer that is computed again; one that is not drops in `test_a_restored_model_drops_anew`."""
    options = dict(attention="dense", num_layers=1, remat=True)
    model, without = (make_model(**options, dropout_rate=rate) for rate in (0.5, 0.0))
    cotangent = np.random.default_rng(1).standard_normal((2, LENGTH, CONFIG.vocab_size)).astype(np.float32)

    def total(model, ids):
        return (model(ids) * cotangent).sum()

    train = nnx.jit(nnx.value_and_grad(total))
    (first, gradient), (second, _) = train(model, tokens()), train(model, tokens())
    model.eval()
    evaluated, expected = nnx.jit(lambda *models: [total(each, tokens()) for each in models])(model, without)

    assert first != second
    assert np.any(gradient.layers[0].attention.out_proj.kernel.get_value())
    assert evaluated == expected
    assert first != evaluated


@pytest.mark.parametrize("branches", [("cmp", "slc", "win"), ("slc", "win")], ids="+".join)
def test_gates_start_as_told_whatever_the_input_and_learn(branches):
    told = (0.02, 0.96, 0.02)[-len(branches) :]
    selector = "importance" if "cmp" in branches else "given"
    options = dict(num_kv_heads=2, config=NSA, branches=branches, selector=selector, initial_gates=told)
    made = nnx.jit(lambda: nn.NSAAttention(4, 12, **options, rngs=nnx.Rngs(0)).gate)()
    x = np.random.default_rng(0).standard_normal((2, LENGTH, 12)).astype(np.float32)

    @nnx.jit
    def run(gate):
        return gate(x), nnx.grad(lambda gate: (gate(x) * np.arange(len(told))).sum())(gate)

    gates, gradient = run(made)

    np.testing.assert_allclose(gates, np.broadcast_to(told, gates.shape), rtol=1e-6)
    assert np.all(np.asarray(gradient.bias_out[...])[:, 1:] != 0)
    assert np.any(np.asarray(gradient.kernel_out[...]) != 0)


def test_a_layer_may_have_biases_but_for_its_output():
    of = [
        abstract_model(attention=kind, qkv_bias=True, out_bias=out).layers[0].attention
        for kind in ("nsa", "dense", "window")
        for out in (False, True)
    ]

    assert [layer.out_proj.bias is not None for layer in of] == [False, True] * 3
    assert all(layer.query_proj.bias.shape == (4, 5) for layer in of)


def test_inspection_drops_nothing():
    model = make_model(
        attention=("dense", "nsa"), dropout_rate=0.5, branches=("slc",), selector=nn.IndexerConfig(dim=4)
    )
    inspect = nnx.jit(lambda model, ids: model.inspect(ids))

    first, again = inspect(model, tokens()), inspect(model, tokens())

    assert len(first) == 1
    jax.tree.map(np.testing.assert_array_equal, first, again)


WRONG = {
    "gates": (dict(initial_gates=(0.1, 0.8)), ValueError, r"each of 3 branches, got \(0.1, 0.8\). Pass"),
    "gate and its start": (
        dict(gate=fixed_gate, initial_gates=(0.1, 0.8, 0.1)),
        ValueError,
        "initial_gates must be left out",
    ),
    "gates of one branch": (
        dict(branches=("slc",), selector="given", initial_gates=(0.9,)),
        ValueError,
        "got initial_gates with branches",
    ),
    "activation": (dict(activation="gelu"), ValueError, "one of .*'gelu_tanh'.*, got 'gelu'"),
    "embeddings": (
        dict(embedding_scale=0.0),
        ValueError,
        "embedding_scale must be finite and above 0, got 0",
    ),
    "scalings": (
        dict(rope_scaling=[YARN]),
        ValueError,
        "rope_scaling must have one value for each layer, got",
    ),
    "kind of a scaling": (dict(rope_scaling=[YARN, 2.0]), TypeError, "rope_scaling must be one of Linear"),
    "epsilon": (dict(norm_epsilon=0), ValueError, "norm_epsilon must be finite and above 0, got 0. Pass"),
    "rotary": (dict(rotary=turn_first_pair, rope_base=5e5), ValueError, "rope_scaling must be left out"),
    "gate": (dict(gate=jnp.tanh), TypeError, "called as gate.* got tanh. Pass"),
    "both": (dict(compressor=Compressor, compression="mean"), ValueError, "got compression='mean'. Leave"),
}


@pytest.mark.parametrize(("changes", "error", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_options_are_errors_of_the_configuration(changes, error, message):
    with refused(error, message):
        dataclasses.replace(CONFIG, **changes)


@pytest.mark.parametrize(
    "scaling",
    [YARN, (None, LinearScaling(2.5)), (Llama3Scaling(), YARN)],
    ids=["one for all", "one of two", "two"],
)
def test_options_come_back_from_a_checkpoint(tmp_path, scaling):
    model = make_model(**PLAIN | dict(attention=("nsa", "dense"), rope_scaling=scaling))

    save(tmp_path, model)
    restored = restore(tmp_path)

    assert restored.config == model.config
    weights, expected = nn.weights(restored), nn.weights(model)
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(weights[name], value, name)
    again = restore(tmp_path, dataclasses.replace(model.config, dropout_rate=0.0))
    assert again.layers[0].attention.dropout.rate == 0


def test_a_restored_model_drops_anew_in_each_layer(tmp_path):
    model = make_model(attention="dense", dropout_rate=0.5)
    save(tmp_path, model)
    ids, run = tokens(), nnx.jit(lambda model, ids: model(ids))

    restored, again = restore(tmp_path), restore(tmp_path)
    keys = [jax.random.key_data(layer.attention.dropout.rngs.key[...]).tolist() for layer in restored.layers]
    first, other = run(restored, ids), run(again, ids)
    save(tmp_path, restored)

    assert keys[0] != keys[1]
    np.testing.assert_array_equal(first, other)
    assert (run(restored, ids) != first).any()


def config_file(path):
    """The configuration of a checkpoint, to be changed: from here on it has no checksums, as before them."""
    (sums,) = path.glob("*/checksums")
    shutil.rmtree(sums)
    (file,) = [each for each in path.glob("*/config/*") if "rope_base" in each.read_text()]
    return file


def test_a_checkpoint_of_0_1_0_has_the_defaults(tmp_path):
    """It was written before there were options."""
    save(tmp_path, make_model())
    file, later = config_file(tmp_path), [*PLAIN.keys() - {"rope_base"}, *FUNCTIONS, "window_size"]
    values = json.loads(file.read_text())
    file.write_text(json.dumps({name: value for name, value in values.items() if name not in later}))

    assert values.keys() > set(later)
    assert restore(tmp_path).config == CONFIG


def test_a_scaling_of_a_later_version_is_one_clear_error(tmp_path):
    save(tmp_path, make_model(rope_scaling=LinearScaling(2)))
    file = config_file(tmp_path)
    file.write_text(file.read_text().replace("linear", "spiral"))

    told = r"must be one of \('linear', 'llama3', 'yarn'\), got 'spiral'\. Load"
    with refused(ValueError, told):
        restore(tmp_path)


def identity(heads):
    return heads


def with_part(place, name, value, **changes):
    model = make_model(**changes)
    setattr(getattr(model.layers[1], place), name, value)
    return model


FLOAT32 = LinearScaling(np.float32(2))
OTHERS = "modules of its config, got others at model.layers.1.attention. Build"
UNSAVABLE = {
    "functions": (lambda: make_model(**FUNCTIONS), TypeError, "got compressor, gate, rotary. Save"),
    "scaling": (lambda: make_model(rope_scaling=FLOAT32), TypeError, "got rope_scaling.factor=np.float32("),
    "scaling of a layer": (
        lambda: make_model(rope_scaling=(None, FLOAT32)),
        TypeError,
        "got rope_scaling.factor=np.float32(",
    ),
    "scaling of two": (
        lambda: make_model(rope_scaling=(FLOAT32, LinearScaling(4.0))),
        TypeError,
        "got rope_scaling.factor=np.float32(",
    ),
    "number of a layer": (
        lambda: make_model(rope_base=(np.float32(2), 1e4)),
        TypeError,
        "got rope_base=(np.float32(2.0), 10000.0). Build",
    ),
    "rotary of a layer": (lambda: with_part("attention", "rotary", turn_first_pair), ValueError, OTHERS),
    "norm of a layer": (lambda: with_part("attention", "query_norm", identity), ValueError, OTHERS),
}


@pytest.mark.parametrize(("make", "error", "told"), UNSAVABLE.values(), ids=UNSAVABLE.keys())
def test_what_a_checkpoint_cannot_hold_is_refused_by_name(tmp_path, make, error, told):
    with refused(error, re.escape(told)):
        save(tmp_path, make())
    assert os.listdir(tmp_path) == []
