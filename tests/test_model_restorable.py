"""`save` refuses what `restore` could not bring back, before it writes anything."""

import dataclasses
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import has_form
from modules import MODEL, NSA, abstract, named

from nsa_jax import nn
from nsa_jax.model import Transformer, restore, restore_training, save
from nsa_jax.nn.rotary import Rotary

CONFIG = dataclasses.replace(MODEL, attention="window")


def make_model(model=Transformer, config=CONFIG, **arguments):
    """A model with ones for parameters."""
    made = abstract(model, config, **arguments)
    parameters = named(nnx.state(made, nnx.Param))
    nn.load_weights(made, {name: np.ones(leaf.shape, np.float32) for name, leaf in parameters.items()})
    return made


def changed(change, **arguments):
    model = make_model(**arguments)
    change(model)
    return model


def put(path, name, value):
    """A change that sets an attribute of a submodule."""

    def change(model):
        for step in path.split(".") if path else ():
            model = model[int(step)] if step.isdigit() else getattr(model, step)
        setattr(model, name, value() if callable(value) else value)

    return change


def other_attention(**changes):
    config = dataclasses.replace(NSA, **changes)
    return nnx.eval_shape(
        lambda: nn.DenseAttention(
            4, 12, num_kv_heads=2, window_size=config.window_size, dtype="float32", rngs=nnx.Rngs(0)
        )
    )


class Mine(Transformer):
    """A subclass; `restore` would make an instance of its base."""


def with_attention(attention):
    model = make_model()
    model.layers[1].attention = attention
    return model


def with_loaded(attention):
    nn.load_weights(
        attention,
        {name: np.ones(leaf.shape) for name, leaf in nn.weights(make_model().layers[0].attention).items()},
    )
    return with_attention(attention)


def donated():
    model = make_model()
    model.final_norm.scale.get_value().delete()
    return model


BAD = {
    "no model": (lambda: {"layers": 2}, TypeError, "model must be a Transformer, got dict"),
    "another module": (
        lambda: make_model().layers[0],
        TypeError,
        "model must be a Transformer, got DecoderLayer",
    ),
    "a subclass": (lambda: make_model(Mine), TypeError, "model must be a Transformer, got Mine"),
    "no config": (
        lambda: changed(put("", "config", NSA)),
        TypeError,
        "model.config must be a TransformerConfig, got NSAConfig",
    ),
    "a dtype for its name": (
        lambda: make_model(config=dataclasses.replace(CONFIG, dtype=jnp.float32)),
        TypeError,
        "model.config must hold plain numbers and strings, got dtype=<class 'jax.numpy.float32'>",
    ),
    "a NumPy number": (
        lambda: make_model(config=dataclasses.replace(CONFIG, rope_base=np.float32(10000))),
        TypeError,
        "model.config must hold plain numbers and strings, got rope_base=np.float32(10000.0)",
    ),
    "config of another model": (
        lambda: changed(put("", "config", dataclasses.replace(CONFIG, num_layers=3, tie_embeddings=False))),
        ValueError,
        "model must be as its config says, got others at layers.2.attention.key_proj.kernel, ",
    ),
    "shape": (
        lambda: changed(put("layers.0.mlp.up_proj", "kernel", lambda: nnx.Param(jnp.ones((12, 40))))),
        ValueError,
        "got others at layers.0.mlp.up_proj.kernel. Build",
    ),
    "dtype": (
        lambda: changed(put("final_norm", "scale", lambda: nnx.Param(jnp.ones(12, jnp.bfloat16)))),
        ValueError,
        "got others at final_norm.scale. Build",
    ),
    "extra parameter": (
        lambda: changed(put("", "temperature", lambda: nnx.Param(jnp.ones(1)))),
        ValueError,
        "got others at temperature. Build",
    ),
    "missing parameter": (
        lambda: changed(lambda model: delattr(model.layers[0].mlp.up_proj, "kernel")),
        ValueError,
        "got others at layers.0.mlp.up_proj.kernel. Build",
    ),
    "one layer twice": (
        lambda: changed(lambda model: put("", "layers", nnx.List([model.layers[0]] * 2))(model)),
        ValueError,
        "got others at layers.1.attention.key_proj.kernel, ",
    ),
    "one layer more": (
        lambda: changed(lambda model: model.layers.append(model.layers[0])),
        ValueError,
        "model must be as its config says, got others at model.layers. Build",
    ),
    "another window": (
        lambda: with_loaded(other_attention(window_size=7)),
        ValueError,
        "model must be as its config says, got others at model.layers.1.attention. Build",
    ),
    "another base": (
        lambda: changed(put("layers.0.attention", "rotary", lambda: Rotary(500.0, None))),
        ValueError,
        "got others at model.layers.0.attention. Build",
    ),
    "dropout": (
        lambda: changed(put("layers.0", "dropout", lambda: nnx.Dropout(0.1))),
        ValueError,
        "got others at model.layers.0.dropout. Build",
    ),
    "abstract": (
        lambda: with_attention(other_attention()),
        ValueError,
        "model must hold its parameters as arrays, got a ShapeDtypeStruct at layers.1.attention.key_proj",
    ),
    "donated": (
        donated,
        ValueError,
        "model must hold its parameters as arrays, got a deleted array at final_norm.scale. Save it outside",
    ),
}


@pytest.mark.parametrize(("make", "error", "told"), BAD.values(), ids=BAD.keys())
def test_a_model_that_could_not_come_back_is_refused(tmp_path, make, error, told):
    with pytest.raises(error, match=re.escape(told)) as raised:
        save(tmp_path, make())

    assert has_form(str(raised.value))
    assert os.listdir(tmp_path) == []


BAD_TRAINING = {
    "nothing": ({}, "training must hold an array or a number, got none. Leave it out."),
    "one path twice": ({"a": {"b": 1}, "a.b": 2}, "the paths of training must differ, got 'a.b' twice."),
    "a random key": (
        lambda: {"key": jax.random.key(0)},
        "numbers and arrays of them, got key<fry> of shape () at 'key'.",
    ),
    "text": ({"name": np.array(["a"])}, "numbers and arrays of them, got <U1 of shape (1,) at 'name'."),
    "a huge number": ({"n": 2**70}, "numbers and arrays of them, got object of shape () at 'n'."),
    "an empty array": (
        {"x": np.zeros((0, 3))},
        "numbers and arrays of them, got float64 of shape (0, 3) at 'x'.",
    ),
}


@pytest.mark.parametrize(("training", "told"), BAD_TRAINING.values(), ids=BAD_TRAINING.keys())
def test_training_state_that_could_not_come_back_is_refused(tmp_path, training, told):
    with pytest.raises(ValueError, match=re.escape(told)) as raised:
        save(tmp_path, make_model(), training=training() if callable(training) else training)

    assert has_form(str(raised.value))
    assert os.listdir(tmp_path) == []


def test_a_donated_training_state_is_refused(tmp_path):
    moment = jnp.ones(3)
    moment.delete()

    with pytest.raises(ValueError, match=r"got a donated array at 'moment'\. Save"):
        save(tmp_path, make_model(), training={"moment": moment})

    assert os.listdir(tmp_path) == []


def test_what_only_says_how_to_compute_may_differ(tmp_path):
    model = make_model(implementation="xla")
    model.eval()
    model.layers[0].attention.query_proj.precision = jax.lax.Precision.HIGHEST
    model.embed.embedding.set_value(np.full((11, 12), 2, np.float32))

    save(tmp_path, model)

    again = restore(tmp_path)
    np.testing.assert_array_equal(again.embed.embedding[...], 2.0)
    save(tmp_path, again)


def test_numpy_scalars_come_back_as_arrays(tmp_path):
    save(tmp_path, make_model(), training={"loss": np.float32(2.5)})

    restored = restore_training(tmp_path, {"loss": np.float32(0)})

    assert (restored["loss"].shape, restored["loss"].dtype) == ((), np.float32)
    assert restored["loss"] == 2.5
