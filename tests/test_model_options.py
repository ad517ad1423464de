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
from messages import has_form
from small_layer import CONFIG as NSA
from small_layer import WeightedSum, fixed_gate

from nsa_jax import nn
from nsa_jax.model import Transformer, TransformerConfig, restore, save
from nsa_jax.nn import Compressor, Gate, LinearScaling, Llama3Scaling, YarnScaling

CONFIG = TransformerConfig(
    vocab_size=11, num_layers=2, model_dim=12, num_heads=4, num_kv_heads=2, head_dim=5, nsa=NSA
)
LENGTH = 17


def turn_first_pair(heads, positions):
    angle = 0.25 * positions[:, :, None].astype(heads.dtype)
    first, second = heads[..., 0], heads[..., 1]
    turned = (
        first * jnp.cos(angle) - second * jnp.sin(angle),
        second * jnp.cos(angle) + first * jnp.sin(angle),
    )
    return jnp.concatenate([jnp.stack(turned, axis=-1), heads[..., 2:]], axis=-1)


YARN = YarnScaling(4.0, 24, beta_fast=3.0, beta_slow=0.2)
PLAIN = dict(
    normalize_qk=True,
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
        variable.set_value(jnp.asarray((1 if numbers.ndim == 1 else 0.3) * numbers, leaf.dtype))
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
    for layer in (each.attention for each in functions.layers):
        assert layer.rotary is turn_first_pair
        if kind == "nsa":
            assert isinstance(layer.compressor_key, WeightedSum)
            assert isinstance(layer.compressor_value, WeightedSum)
            assert not isinstance(layer.gate, Gate)


@pytest.mark.parametrize("options", [PLAIN, FUNCTIONS], ids=["plain", "functions"])
def test_steps_of_a_cache_equal_the_full_forward(options):
    """The steps run in training mode, in which a forward would drop outputs; a step must not."""
    ids, counts = tokens(), np.array([6, 9])
    with jax.enable_x64(True):
        model = make_model(num_layers=1, dtype="float64", param_dtype="float64", **options)
        model.eval()
        logits = np.asarray(jax.jit(model)(ids))
        model.train()

        @jax.jit
        def run(ids):
            first, cache = model.prefill(ids[:, :9], model.init_cache(2, LENGTH), counts)
            outs = []
            for _ in range(2):
                new = jnp.take_along_axis(ids, cache[0].lengths[:, None] + jnp.arange(3), axis=1)
                out, cache = model.decode_step(new, cache)
                outs.append(out)
            return first, jnp.concatenate(outs, axis=1)

        first, steps = run(jnp.asarray(ids))

    # About 100 additions on the longest chain, of terms at most 10 times the scale of the logits.
    tolerance = 1000 * np.finfo(np.float64).eps * np.abs(logits).max()
    for row, count in enumerate(counts):
        np.testing.assert_allclose(first[row], logits[row, count - 1], rtol=0, atol=tolerance)
        np.testing.assert_allclose(steps[row], logits[row, count : count + 6], rtol=0, atol=tolerance)


@pytest.mark.parametrize("remat", [False, True], ids=["stored", "remat"])
def test_dropout_in_training_only(remat):
    model, without = (make_model(attention="dense", remat=remat, dropout_rate=rate) for rate in (0.5, 0.0))
    cotangent = np.random.default_rng(1).standard_normal((2, LENGTH, CONFIG.vocab_size)).astype(np.float32)

    @nnx.jit
    def run(model, ids):
        return nnx.value_and_grad(lambda model: (model(ids) * cotangent).sum())(model)

    (first, gradient), (second, _) = run(model, tokens()), run(model, tokens())
    model.eval()
    evaluated, _ = run(model, tokens())

    assert first != second
    assert np.any(gradient.layers[0].attention.out_proj.kernel.get_value())
    assert evaluated == run(without, tokens())[0]
    assert first != evaluated


def test_inspection_drops_nothing():
    model = make_model(dropout_rate=0.5)
    inspect = nnx.jit(lambda model, ids: model.inspect(ids))

    first, again = inspect(model, tokens()), inspect(model, tokens())

    assert len(first) == 2
    jax.tree.map(np.testing.assert_array_equal, first, again)


WRONG = {
    "scale": (dict(scale=float("nan")), ValueError, "scale must be finite, got nan. Pass"),
    "kind of scale": (dict(scale=jnp.ones(())), TypeError, "scale must be a Python number, got"),
    "dropout": (dict(dropout_rate=1.0), ValueError, "dropout_rate must be at least 0 and below 1, got 1.0"),
    "kind of dropout": (dict(dropout_rate="a"), TypeError, "dropout_rate must be a number, got str. Pass"),
    "scaling": (
        dict(rope_scaling={"factor": 2}),
        TypeError,
        "rope_scaling must be one of .* got dict. Build",
    ),
    "rotary": (dict(rotary="none"), TypeError, "rotary must be a function, got str. Pass"),
    "rotary and base": (
        dict(rotary=turn_first_pair, rope_base=5e5),
        ValueError,
        "rope_base and rope_scaling must be left out",
    ),
    "gate": (dict(gate=jnp.tanh), TypeError, "called as gate.* got tanh. Pass"),
    "compressor": (dict(compressor="mean"), TypeError, "called as compressor.* got str. Pass"),
    "compressor and compression": (
        dict(compressor=Compressor, compression="mean"),
        ValueError,
        "compression must be left out .* got compression='mean'. Leave",
    ),
}


@pytest.mark.parametrize(("changes", "error", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_options_are_errors_of_the_configuration(changes, error, message):
    with pytest.raises(error, match=message) as raised:
        dataclasses.replace(CONFIG, **changes)
    assert has_form(str(raised.value))


@pytest.mark.parametrize(
    "scaling", [None, LinearScaling(2.5), Llama3Scaling(), YARN], ids=lambda scaling: type(scaling).__name__
)
def test_options_come_back_from_a_checkpoint(tmp_path, scaling):
    model = make_model(**PLAIN | dict(rope_scaling=scaling))

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
    file, later = config_file(tmp_path), [*PLAIN.keys() - {"rope_base"}, *FUNCTIONS]
    values = json.loads(file.read_text())
    file.write_text(json.dumps({name: value for name, value in values.items() if name not in later}))

    assert values.keys() > set(later)
    assert restore(tmp_path).config == CONFIG


def test_a_scaling_of_a_later_version_is_one_clear_error(tmp_path):
    save(tmp_path, make_model(rope_scaling=LinearScaling(2)))
    file = config_file(tmp_path)
    file.write_text(file.read_text().replace("linear", "spiral"))

    told = r"must be one of \('linear', 'llama3', 'yarn'\), got 'spiral'\. Load"
    with pytest.raises(ValueError, match=told) as raised:
        restore(tmp_path)
    assert has_form(str(raised.value))


def identity(heads):
    return heads


def with_part(place, name, value, **changes):
    model = make_model(**changes)
    setattr(getattr(model.layers[1], place), name, value)
    return model


UNSAVABLE = {
    "rotary": (
        lambda: make_model(rotary=turn_first_pair),
        TypeError,
        "plain numbers and strings, got rotary=<function turn_first_pair",
    ),
    "gate": (lambda: make_model(gate=fixed_gate), TypeError, "plain numbers and strings, got gate=<function"),
    "compressor": (
        lambda: make_model(compressor=WeightedSum),
        TypeError,
        "plain numbers and strings, got compressor=<class",
    ),
    "all": (lambda: make_model(**FUNCTIONS), TypeError, "got compressor=<class"),
    "number of a scaling": (
        lambda: make_model(rope_scaling=LinearScaling(np.float32(2))),
        TypeError,
        "plain numbers and strings, got rope_scaling.factor=np.float32(2.0). Build",
    ),
    "rotary of a layer": (
        lambda: with_part("attention", "rotary", turn_first_pair),
        ValueError,
        "as its config says, got others at model.layers.1.attention. Build",
    ),
    "scaling of a layer": (
        lambda: with_part("attention", "rotary", make_model(rope_scaling=YARN).layers[0].attention.rotary),
        ValueError,
        "as its config says, got others at model.layers.1.attention. Build",
    ),
    "norm of a layer": (
        lambda: with_part("attention", "query_norm", identity),
        ValueError,
        "as its config says, got others at model.layers.1.attention. Build",
    ),
    "dropout of a layer": (
        lambda: with_part("attention", "dropout", nnx.Dropout(0.25)),
        ValueError,
        "as its config says, got others at model.layers.1.attention.dropout. Build",
    ),
}


@pytest.mark.parametrize(("make", "error", "told"), UNSAVABLE.values(), ids=UNSAVABLE.keys())
def test_what_a_checkpoint_cannot_hold_is_refused_by_name(tmp_path, make, error, told):
    with pytest.raises(error, match=re.escape(told)) as raised:
        save(tmp_path, make())
    assert has_form(str(raised.value))
    assert os.listdir(tmp_path) == []
