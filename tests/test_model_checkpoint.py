"""Checkpoints: `restore` gives what `save` was given, and a save that fails loses nothing."""

import dataclasses
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from messages import refused
from modules import MODEL, abstract, randomised

from nsa_jax.config import NSAConfig
from nsa_jax.model import Transformer, restore, restore_training, save

CONFIG = dataclasses.replace(MODEL, num_layers=1, tie_embeddings=False)


def make_model(seed=0, **changes):
    return randomised(abstract(Transformer, dataclasses.replace(CONFIG, **changes)), seed=seed)


def assert_same(model, other):
    assert model.config == other.config
    flat, other_flat = (nnx.to_flat_state(nnx.state(each)) for each in (model, other))
    for (path, variable), (other_path, other_variable) in zip(flat, other_flat, strict=True):
        assert path == other_path
        assert variable.get_value().dtype == other_variable.get_value().dtype
        np.testing.assert_array_equal(variable.get_value(), other_variable.get_value(), str(path))


MIXED = dict(num_layers=2, attention=("window", "nsa"), window_size=(3, None), rope_base=(100.0, 1e6))


@pytest.mark.parametrize(
    "changes", [{}, dict(param_dtype="bfloat16"), dict(attention="dense", tie_embeddings=True), MIXED]
)
def test_a_model_comes_back_bit_for_bit(tmp_path, changes):
    model = make_model(**changes)

    save(tmp_path / "new" / "folder", model)

    assert_same(restore(tmp_path / "new" / "folder"), model)
    assert_same(restore(tmp_path / "new" / "folder", model.config), model)


def test_training_state_comes_back_bit_for_bit(tmp_path):
    model = make_model()
    optimizer = nnx.state(nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param))
    draw = np.random.default_rng(1).integers
    training = {
        "optimizer": jax.tree.map(lambda leaf: jnp.asarray(draw(9, size=leaf.shape), leaf.dtype), optimizer),
        "step": 7,
        "rate": 0.1,
        "key": jax.random.key_data(jax.random.key(3)),
        "order": np.arange(5, dtype=np.int32),
        "half": jnp.arange(3, dtype=jnp.bfloat16),
    }
    like = training | {"optimizer": optimizer, "step": 0, "rate": 0.0, "order": np.zeros(5, np.int32)}

    save(tmp_path, model, training=training)
    restored = restore_training(tmp_path, like)

    assert_same(restore(tmp_path), model)
    assert jax.tree.structure(restored) == jax.tree.structure(training)
    for leaf, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(training), strict=True):
        assert type(leaf) is type(expected)
        assert getattr(leaf, "dtype", None) == getattr(expected, "dtype", None)
        np.testing.assert_array_equal(leaf, expected)


def test_the_newest_checkpoint_counts_and_replaces_the_one_before(tmp_path):
    for seed in range(3):
        save(tmp_path, make_model(seed), training={"step": seed})

    assert_same(restore(tmp_path), make_model(2))
    assert restore_training(tmp_path, {"step": 0}) == {"step": 2}
    assert len(list(tmp_path.iterdir())) == 1
    (tmp_path / "2026").mkdir()  # somebody else's
    assert_same(restore(tmp_path), make_model(2))


def test_dtype_and_remat_may_differ(tmp_path):
    save(tmp_path, make_model())

    model = restore(tmp_path, dataclasses.replace(CONFIG, dtype="bfloat16", remat=True))

    assert model.config.dtype == "bfloat16"
    assert model.layers[0].mlp.up_proj.kernel.dtype == jnp.float32


OTHERS = {
    "width": (dict(model_dim=16), r"got model_dim=16 where it has model_dim=12\. Pass"),
    "kind and depth": (dict(attention="dense", num_layers=2), "got num_layers=2, attention='dense' where"),
    "blocks": (dict(nsa=NSAConfig(window_size=7)), r"got nsa=.*window_size=7.*\) where it has nsa=N"),
    "bases of layers": (
        dict(num_layers=2, rope_base=(1e4, 1e6)),
        r"got num_layers=2, rope_base=\(10000\.0, 1000000\.0\) where it has",
    ),
    "parameters": (dict(param_dtype="bfloat16"), "got param_dtype='bfloat16' where it has param_dtype='fl"),
}


@pytest.mark.parametrize(("changes", "message"), OTHERS.values(), ids=OTHERS.keys())
def test_a_checkpoint_of_another_configuration_is_one_clear_error(tmp_path, changes, message):
    save(tmp_path, make_model())

    with refused(ValueError, f"config must be that of the checkpoint, {message}"):
        restore(tmp_path, dataclasses.replace(CONFIG, **changes))


def test_a_config_that_is_none_of_a_model(tmp_path):
    save(tmp_path, make_model())

    with refused(TypeError, r"config must be a TransformerConfig, got NSAConfig\. Pass None"):
        restore(tmp_path, NSAConfig())


def test_nothing_to_restore(tmp_path):
    file = tmp_path / "file"
    file.write_text("not a checkpoint")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other" / "2026").mkdir(parents=True)

    for path in (tmp_path / "missing", tmp_path / "empty", tmp_path / "other", file):
        with refused(FileNotFoundError, r"path must hold a checkpoint that save wrote, got .* Check it"):
            restore(path)
        with refused(FileNotFoundError, "path must hold a checkpoint"):
            restore_training(path, {})


def test_wrong_training_state(tmp_path):
    save(tmp_path / "without", make_model())
    save(tmp_path / "with", make_model(), training={"step": 3, "moment": jnp.ones(4)})

    with refused(ValueError, r"restore_training needs a checkpoint saved with training=\.\.\., got .*"):
        restore_training(tmp_path / "without", {"step": 0})
    for like in (
        {"step": 0},
        {"step": 0, "moment": jnp.ones(5)},
        {"step": 0, "moment": jnp.ones(3)},
        {"step": 0, "moment": jnp.ones(4), "more": 1},
    ):
        with refused(ValueError, "like must have the structure, shapes and dtypes that were saved, got"):
            restore_training(tmp_path / "with", like)


def test_a_refused_save_leaves_what_was_there(tmp_path):
    save(tmp_path, make_model(0), training={"step": 3})

    with refused(ValueError, r"training must hold arrays and numbers, got str at 'a\.name'\. Convert"):
        save(tmp_path, make_model(1), training={"a": {"name": "run 1"}})

    assert_same(restore(tmp_path), make_model(0))
    assert restore_training(tmp_path, {"step": 0}) == {"step": 3}


def test_a_save_that_was_cut_off_leaves_what_was_there(tmp_path):
    """A process died before its rename; the next save succeeds."""
    save(tmp_path, make_model(0))
    (tmp_path / "1.orbax-checkpoint-tmp" / "model").mkdir(parents=True)
    assert_same(restore(tmp_path), make_model(0))

    save(tmp_path, make_model(2))
    assert_same(restore(tmp_path), make_model(2))
    assert len(list(tmp_path.iterdir())) == 1


def test_restoring_into_a_sharding(tmp_path):
    mesh = jax.make_mesh((1,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    save(tmp_path, make_model())

    with jax.set_mesh(mesh):
        model = restore(tmp_path, sharding={"heads": "tensor", "vocab": "tensor"})

    assert_same(model, make_model())
    kernel = model.layers[0].attention.query_proj.kernel.get_value()
    assert kernel.sharding == jax.NamedSharding(mesh, jax.P(None, "tensor", None))


def test_orbax_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)

    for call in (
        lambda: save(tmp_path, make_model()),
        lambda: restore(tmp_path),
        lambda: restore_training(tmp_path, {}),
    ):
        with refused(ImportError, r"checkpoints need orbax-checkpoint, got .*\. Install it with: pip"):
            call()
    assert os.listdir(tmp_path) == []
