"""`save` refuses what `restore` could not bring back, before it writes anything."""

import dataclasses
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import refused
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


def deleted(array):
    array.delete()
    return array


def donated():
    return changed(lambda model: deleted(model.final_norm.scale.get_value()))


def of_config(**changes):
    return make_model(config=dataclasses.replace(CONFIG, **changes))


def with_parameter(path, name, value):
    return changed(put(path, name, lambda: nnx.Param(value)))


def without_a_kernel():
    return changed(lambda model: delattr(model.layers[0].mlp.up_proj, "kernel"))


def with_layers(change):
    return changed(lambda model: setattr(model, "layers", nnx.List(change(list(model.layers)))))


OTHER_CONFIG = dataclasses.replace(CONFIG, num_layers=3, tie_embeddings=False)
NO_MODELS = {
    "no model": (lambda: {"layers": 2}, "model must be a Transformer, got dict"),
    "another module": (lambda: make_model().layers[0], "model must be a Transformer, got DecoderLayer"),
    "a subclass": (lambda: make_model(Mine), "model must be a Transformer, got Mine"),
    "no config": (lambda: changed(put("", "config", NSA)), "must be a TransformerConfig, got NSAConfig"),
    "a dtype for its name": (lambda: of_config(dtype=jnp.float32), "strings, got dtype=<class 'jax.numpy.f"),
    "a NumPy number": (lambda: of_config(rope_base=np.float32(1)), "got rope_base=np.float32(1.0)"),
}
OTHER_MODELS = {
    "config": (
        lambda: changed(put("", "config", OTHER_CONFIG)),
        "got 10 missing (layers.2.attention.key_proj.",
    ),
    "shape": (
        lambda: with_parameter("layers.0.mlp.up_proj", "kernel", jnp.ones((12, 40))),
        "got 1 of another shape (layers.0.mlp.up_proj.kernel: (12, 40) for (12, 32)). Build",
    ),
    "dtype": (
        lambda: with_parameter("final_norm", "scale", jnp.ones(12, jnp.bfloat16)),
        "got 1 of another dtype (final_norm.scale: bfloat16 for float32). Build",
    ),
    "extra": (lambda: with_parameter("", "temperature", jnp.ones(1)), "got 1 extra (temperature). Build"),
    "missing": (without_a_kernel, "got 1 missing (layers.0.mlp.up_proj.kernel). Build"),
    "one layer twice": (lambda: with_layers(lambda x: x[:1] * 2), "got 9 missing (layers.1.attention.key_pr"),
    "one layer more": (lambda: with_layers(lambda x: x + x[:1]), "got others at model.layers. Build"),
    "window": (lambda: with_loaded(other_attention(window_size=7)), "at model.layers.1.attention. Build"),
    "base": (
        lambda: changed(put("layers.0.attention", "rotary", lambda: Rotary(500.0, None))),
        "got others at model.layers.0.attention. Build",
    ),
    "dropout": (
        lambda: changed(put("layers.0", "dropout", lambda: nnx.Dropout(0.1))),
        "got others at model.layers.0. Build",
    ),
    "abstract": (lambda: with_attention(other_attention()), "got a ShapeDtypeStruct at layers.1.attention.k"),
    "donated": (donated, "got a deleted array at final_norm.scale. Save it outside"),
}
BAD = {name: (*row, TypeError) for name, row in NO_MODELS.items()}
BAD |= {name: (*row, ValueError) for name, row in OTHER_MODELS.items()}


@pytest.mark.parametrize(("make", "told", "error"), BAD.values(), ids=BAD.keys())
def test_a_model_that_could_not_come_back_is_refused(tmp_path, make, told, error):
    with refused(error, re.escape(told)):
        save(tmp_path, make())

    assert os.listdir(tmp_path) == []


BAD_TRAINING = {
    "nothing": ({}, "training must hold an array or a number, got none. Leave it out."),
    "one path twice": ({"a": {"b": 1}, "a.b": 2}, "the paths of training must differ, got 'a.b' twice."),
    "a random key": (lambda: {"key": jax.random.key(0)}, "must hold numbers, got key<fry> at 'key'."),
    "text": ({"name": np.array(["a"])}, "training must hold numbers, got <U1 at 'name'."),
    "a huge number": ({"n": 2**70}, "training must hold numbers, got object at 'n'."),
    "an empty array": ({"x": np.zeros((0, 3))}, "arrays that are not empty, got shape (0, 3) at 'x'."),
    "donated": (lambda: {"x": deleted(jnp.ones(3))}, "training must hold arrays, got a donated one at 'x'."),
}


@pytest.mark.parametrize(("training", "told"), BAD_TRAINING.values(), ids=BAD_TRAINING.keys())
def test_training_state_that_could_not_come_back_is_refused(tmp_path, training, told):
    with refused(ValueError, re.escape(told)):
        save(tmp_path, make_model(), training=training() if callable(training) else training)

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
