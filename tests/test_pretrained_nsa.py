"""A dense model becomes one of NSA that computes the same where it can. Both are compared and saved."""

import dataclasses
import functools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import refused
from pretrained_files import FAMILIES, GEMMA, fields_of, logits, tensors_of, write_folder

from nsa_jax import NSAConfig, block_scores, nn
from nsa_jax.generate import generate
from nsa_jax.model import Transformer, TransformerConfig
from nsa_jax.model.abstract import abstract_transformer, fill, parameters
from nsa_jax.nn import IndexerConfig, LinearScaling

for name in ("safetensors", "gguf", "tokenizers", "huggingface_hub"):
    pytest.importorskip(name, reason="nsa_jax.pretrained needs the extra `pretrained`")

from nsa_jax.pretrained import compare, comparison, load, save, to_nsa  # noqa: E402

COVERING = NSAConfig(
    compression_block_size=4,
    compression_stride=2,
    selection_block_size=4,
    num_selected_blocks=6,
    window_size=5,
)
SPARSE = dataclasses.replace(COVERING, num_selected_blocks=3)
SIZES = dict(vocab_size=29, num_layers=2, model_dim=16, mlp_dim=24, norm_epsilon=1e-5)
IDS = np.random.default_rng(1).integers(0, 29, (3, 21))


def dense_model(heads=4, kv_heads=2, **options):
    config = TransformerConfig(
        **SIZES | dict(num_heads=heads, num_kv_heads=kv_heads, attention="dense") | options
    )
    return nnx.merge(*parts_of(config))


@functools.cache
def parts_of(config):
    """Graph and state of a model with random parameters."""
    model = abstract_transformer(config, implementation="xla")
    rng, arrays = np.random.default_rng(0), {}
    for name, value in parameters(model).items():
        drawn = (1 if len(value.shape) == 1 else 0.4) * rng.standard_normal(value.shape)
        arrays[name] = jnp.asarray(drawn, value.dtype)
    fill(model, arrays)
    return nnx.split(model)


@nnx.jit
def forward(model, ids):
    return model(ids)


def run(model, ids=IDS):
    return np.asarray(forward(model, ids))


GATES = dict(initial_gates=(1e-7, 1 - 1e-7, 1e-7))
ALONE = dict(branches=("slc",), selector=IndexerConfig(dim=4))


def test_blocks_that_cover_everything_are_dense_attention():
    """With all branches; a model as Gemma has one alone."""
    options = dict(num_layers=1, head_dim=6, qkv_bias=True, normalize_qk=True, rope_base=100.0)
    dense = dense_model(6, 2, **options)
    expected = run(dense)

    model = to_nsa(dense, nsa=COVERING, implementation="xla", rngs=nnx.Rngs(0), **GATES)

    assert np.abs(run(model) - expected).max() < 1e-5 * np.abs(expected).max()


def test_a_model_as_gemma_keeps_its_windows_and_all_else():
    """Layers of two kinds, each with its rotation; they write as in one forward pass."""
    options = dict(
        num_layers=2, head_dim=8, attention=("window", "dense"), window_size=(5, None),
        rope_base=(50.0, 5000.0), rope_scaling=(None, LinearScaling(4.0)), scale=0.3,
        normalize_qk=True, post_norms=True, activation="gelu_tanh", embedding_scale=4.0,
    )  # fmt: skip
    dense = dense_model(4, 1, **options)
    expected = run(dense)

    model = to_nsa(dense, nsa=COVERING, selector="indexer", branches=("slc",), rngs=nnx.Rngs(0))

    assert model.config.attention == ("window", "nsa")
    assert model.config.rope_scaling == dense.config.rope_scaling
    assert np.abs(run(model) - expected).max() < 1e-5 * np.abs(expected).max()
    prompts = IDS[:, :15]
    written = generate(model, prompts, max_new_tokens=6).tokens
    last = run(dense, np.concatenate([prompts, written], axis=1))[:, -7:-1]
    np.testing.assert_array_equal(last.argmax(-1), written)


def assert_copied(weights, held):
    """Each branch has the keys and values of the dense model."""
    for name, value in weights.items():
        for branch in ("cmp", "slc", "win"):
            own = re.sub("(key|value)_", rf"\1_{branch}_", name)
            np.testing.assert_array_equal(held[own], value, own)


def test_weights_are_those_of_the_dense_model_and_new_ones_are_drawn():
    dense = dense_model(
        num_layers=1, qkv_bias=True, normalize_qk=True, tie_embeddings=False, rope_scaling=LinearScaling(2.0)
    )
    options = dict(nsa=SPARSE, share_keys_values=False, compression="mlp", selector=IndexerConfig())

    model = to_nsa(dense, rngs=nnx.Rngs(7), **options)

    held = nn.weights(model)
    assert_copied(nn.weights(dense), held)
    assert np.std(held["layers.0.attention.compressor_key.kernel_in"]) > 0.05
    assert np.std(held["layers.0.attention.selector.key_proj.kernel"]) > 0.05
    assert not np.any(held["layers.0.attention.gate.kernel_out"])
    gates = jax.nn.sigmoid(held["layers.0.attention.gate.bias_out"])
    np.testing.assert_allclose(gates, np.broadcast_to((0.02, 0.96, 0.02), (4, 3)), rtol=1e-5)
    changed = options | dict(attention="nsa", initial_gates=(0.02, 0.96, 0.02))
    assert model.config == dataclasses.replace(dense.config, **changed)
    other = nn.weights(to_nsa(dense, rngs=nnx.Rngs(8)))
    assert np.any(other["layers.0.attention.gate.kernel_in"] != held["layers.0.attention.gate.kernel_in"])


@pytest.mark.parametrize("options", [dict(branches=("slc",)), {}], ids=["alone", "all"])
def test_an_indexer_begins_as_the_heads_of_the_dense_model(options):
    """A block has the largest product of a slow half of a query head and of a key, in the layer's scale."""
    dense = dense_model(6, 2, head_dim=8, rope_base=100.0, rope_scaling=LinearScaling(2.0), scale=0.7)
    model = to_nsa(dense, nsa=SPARSE, selector="indexer", implementation="xla", rngs=nnx.Rngs(0), **options)
    assert model.config.selector == IndexerConfig(num_heads=3, dim=4, shared_key=False, slow_pairs=True)

    @nnx.jit
    def of_layer(layer, x):
        (query, _), key = layer.selector.project(x, None, None, jnp.broadcast_to(jnp.arange(21), x.shape[:2]))
        operands = layer.operands(x)
        return block_scores(query, key, config=SPARSE), operands.query, operands.key_slc

    x = np.random.default_rng(2).standard_normal((2, 21, 16)).astype(np.float32)
    for layer in model.layers:
        found, query, key = map(np.asarray, of_layer(layer.attention, x))
        slow = [2, 3, 6, 7]  # of pairs (0, 4), (1, 5), (2, 6), (3, 7)
        expected = np.full(found.shape, -np.inf)
        for b, t, kv, block in np.ndindex(found.shape):
            heads, tokens = (
                query[b, t, 3 * kv : 3 * kv + 3],
                key[b, 4 * block : min(4 * block + 4, t + 1), kv],
            )
            if len(tokens):
                expected[b, t, kv, block] = 0.7 * (heads[:, slow] @ tokens[:, slow].T).max()
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_head_whose_pairs_cannot_be_halved_has_no_copy():
    with refused(ValueError, 'selector="indexer" needs heads whose width is a multiple of 4, got 6'):
        to_nsa(dense_model(head_dim=6), nsa=SPARSE, selector="indexer", rngs=nnx.Rngs(0))


def test_weights_are_copied_so_that_a_step_may_donate_them():
    """Those of each of two layers."""
    dense = dense_model()
    model = to_nsa(dense, nsa=SPARSE, share_keys_values=False, rngs=nnx.Rngs(0))

    held, new = parameters(dense), parameters(model)

    assert_copied(held, new)
    places = [value.unsafe_buffer_pointer() for value in [*held.values(), *new.values()]]
    assert len(set(places)) == len(places)


def test_several_rotary_bases_are_not_replaced_by_one(tmp_path):
    bases = dict(attention=("window", "dense"), window_size=(7, None), rope_base=(10.0, 20.0))
    model = to_nsa(dense_model(**bases), rngs=nnx.Rngs(0))
    save(model, tmp_path / "model")

    again = load(tmp_path / "model")[0]
    assert again.config.rope_base == (10.0, 20.0)
    jax.tree.map(np.testing.assert_array_equal, nn.weights(again), nn.weights(model))
    with refused(ValueError, "rope_base must be left out for a model whose layers have bases of their own"):
        load(tmp_path / "model", rope_base=30.0)


def config_of(dense, **options):
    """The configuration of the new model, whose parameters are not drawn."""
    return nnx.eval_shape(lambda: to_nsa(dense, **options, rngs=nnx.Rngs(0))).config


def test_window_layers_stay_and_kinds_may_be_chosen():
    dense = dense_model(attention=("window", "dense"), window_size=(7, None))
    windows = dense_model(attention="window", window_size=7)

    assert config_of(dense).attention == ("window", "nsa")
    assert config_of(dense).window_size == (7, None)
    assert config_of(windows, attention="nsa").window_size is None
    mixed = config_of(windows, attention=("nsa", "window"))
    assert (mixed.attention, mixed.window_size) == (("nsa", "window"), (None, 7))
    of_nsa = dense_model(attention=("window", "dense"), nsa=COVERING)  # the window is that of its blocks
    assert config_of(of_nsa, nsa=NSAConfig()).window_size == (5, None)
    assert config_of(dense_model(), attention=("dense", "nsa")).attention == ("dense", "nsa")


def test_branches_bring_their_gates():
    config = config_of(dense_model(), branches=("win", "slc"), selector="given")

    assert config.branches == ("slc", "win")
    assert config.initial_gates == (0.96, 0.02)


def test_every_weight_keeps_its_sharding_or_gets_the_one_asked_for():
    axes = dict(heads="tensor", kv_heads="tensor")
    with jax.set_mesh(jax.make_mesh((1,), ("tensor",))):
        plain = to_nsa(dense_model(), nsa=SPARSE, sharding=axes, rngs=nnx.Rngs(0))
        again = nnx.state(plain.layers[0].attention, nnx.Param)

    assert tuple(again["key_proj"]["kernel"][...].sharding.spec) == (None, "tensor", None)
    assert tuple(again["gate"]["bias_out"][...].sharding.spec) == ("tensor", None)


def donated():
    model = nnx.clone(dense_model())
    model.final_norm.scale.set_value(model.final_norm.scale + 0)
    model.final_norm.scale.get_value().delete()
    return model


WRONG = {
    "donated": (lambda: to_nsa(donated(), rngs=nnx.Rngs(0)), ValueError, "arrays, got a donated one"),
    "no model": (lambda: to_nsa(3, rngs=nnx.Rngs(0)), TypeError, "model must be a Transformer, got int"),
    "NSA": (
        lambda: to_nsa(to_nsa(dense_model(), rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0)),
        ValueError,
        "dense and window layers only, got attention='nsa'. Pass",
    ),
    "windows": (
        lambda: to_nsa(dense_model(attention="window"), rngs=nnx.Rngs(0)),
        ValueError,
        "a new model must have an NSA layer, got attention='window'",
    ),
    "layers": (
        lambda: to_nsa(dense_model(), attention=("nsa",), rngs=nnx.Rngs(0)),
        ValueError,
        "attention must have one value for each layer, got 1",
    ),
    "gates": (
        lambda: to_nsa(dense_model(), initial_gates=(0, 1, 0), rngs=nnx.Rngs(0)),
        ValueError,
        r"initial_gates must be .*, got \(0, 1, 0\). Pass",
    ),
    "rngs": (lambda: to_nsa(dense_model(), rngs=0), TypeError, "rngs must be nnx.Rngs, got int"),
    "flag": (
        lambda: to_nsa(dense_model(), share_keys_values="no", rngs=nnx.Rngs(0)),
        TypeError,
        "share_keys_values must be True or False, got str",
    ),
    "abstract": (
        lambda: to_nsa(
            nnx.eval_shape(lambda: Transformer(dense_model().config, rngs=nnx.Rngs(0))), rngs=nnx.Rngs(0)
        ),
        TypeError,
        "model must hold arrays, got ShapeDtypeStruct at embed.embedding. Call",
    ),
    "compare none": (lambda: compare(None, dense_model(), IDS), TypeError, "dense must be a Transformer"),
    "compare vocabularies": (
        lambda: compare(dense_model(), dense_model(vocab_size=30), IDS),
        ValueError,
        "both models must have one vocabulary, got 29 and 30",
    ),
    "compare one token": (
        lambda: compare(dense_model(), dense_model(), IDS[:, :1]),
        ValueError,
        r"rows of at least two tokens, got shape \(3, 1\)",
    ),
    "compare lists": (lambda: compare(*[dense_model()] * 2, [[1, 2]]), TypeError, "tokens must be an array"),
    "compare ids": (lambda: compare(*[dense_model()] * 2, IDS + 20), ValueError, "tokens must be"),
    "compare floats": (lambda: compare(*[dense_model()] * 2, IDS + 0.5), ValueError, "must be integers"),
    "stretches": (
        lambda: compare(dense_model(), dense_model(), IDS, stretches=0),
        ValueError,
        "stretches must be at least 1",
    ),
    "save none": (lambda: save(3, "x"), TypeError, "model must be a Transformer, got int"),
    "save a rotation": (
        lambda: save(dense_model(rope_base=(1e4, 2e4)), "x"),
        ValueError,
        r"got rope_base=\(10000.0, 20000.0\). Save it by nsa_jax.model.save",
    ),
    "save a scale": (lambda: save(dense_model(scale=0.5), "x"), ValueError, "got scale=0.5. Save"),
    "save biases": (lambda: save(dense_model(out_bias=True), "x"), ValueError, "got .*out_bias=True"),
    "save windows": (
        lambda: save(dense_model(attention=("window", "window"), window_size=(3, 4)), "x"),
        ValueError,
        r"window_size=\(3, 4\)",
    ),
    "save fields": (lambda: save(dense_model(), "x", fields=dict(a=IDS)), TypeError, "fields must be plain"),
    "save a field twice": (
        lambda: save(dense_model(), "x", fields=dict(vocab_size=30)),
        ValueError,
        "fields must be others than the configuration has, got 'vocab_size'. Leave",
    ),
    "save tokenizer": (lambda: save(dense_model(), "x", tokenizer="a"), TypeError, "tokenizer must have a m"),
    "save bytes": (lambda: save(dense_model(), "x", file_bytes=0), ValueError, "file_bytes must be at le"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "told"), WRONG.values(), ids=WRONG.keys())
def test_wrong_calls_are_refused(tmp_path, monkeypatch, call, error, told):
    monkeypatch.chdir(tmp_path)

    with refused(error, told):
        call()
    assert list(tmp_path.iterdir()) == []


def test_a_comparison_is_that_of_all_logits(monkeypatch):
    dense = dense_model(num_layers=1, dropout_rate=0.5)  # which is off in a comparison
    model = to_nsa(dense, nsa=SPARSE, implementation="xla", rngs=nnx.Rngs(0), **ALONE)

    programs = comparison._compare_row._cache_size()
    monkeypatch.setattr(comparison, "CHUNK", 6)
    found = compare(dense, model, IDS, stretches=3)
    assert comparison._compare_row._cache_size() == programs + 1  # for all rows

    losses, choices = [], []
    for each in (dense, model):
        each.eval()
        exact = run(each)[:, :-1].astype(np.float64)
        picked = np.take_along_axis(exact, IDS[:, 1:, None], -1)[..., 0]
        losses.append(np.log(np.exp(exact).sum(-1)) - picked)
        choices.append(exact.argmax(-1))
    parts = [slice(0, 7), slice(7, 14), slice(14, 20)]
    assert found.starts == (0, 7, 14)
    np.testing.assert_allclose((found.dense_loss, found.loss), [x.mean() for x in losses], rtol=1e-5)
    for told, loss in ((found.dense_losses, losses[0]), (found.losses, losses[1])):
        np.testing.assert_allclose(told, [loss[:, part].mean() for part in parts], rtol=1e-5)
    assert found.agreement == np.mean(choices[0] == choices[1])
    assert 0 < found.agreement < 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_dense_model_goes_back_to_the_names_it_came_with(tmp_path, family):
    fields = fields_of(family)
    tensors = tensors_of(fields)
    model, _ = load(write_folder(tmp_path / "theirs", fields, tensors))

    save(model, tmp_path / "ours", fields=dict(max_position_embeddings=64, eos_token_id=2))

    from safetensors.numpy import load_file

    written = load_file(tmp_path / "ours" / "model.safetensors")
    assert written.keys() == tensors.keys()
    sums = 2.0**-24 if fields["model_type"] == GEMMA else 0  # of 1 and a norm's numbers, rounded to float32
    for name, value in tensors.items():
        np.testing.assert_allclose(written[name], value, rtol=0, atol=sums if "norm" in name else 0)
    told = json.loads((tmp_path / "ours" / "config.json").read_text())
    again, _ = load(tmp_path / "ours")
    expected = model.config if model.config.head_dim else dataclasses.replace(model.config, head_dim=8)
    assert again.config == expected
    theirs = "llama" if family == "mistral without window" else fields["model_type"]  # the same
    assert (told["eos_token_id"], told["model_type"]) == (2, theirs)
    np.testing.assert_allclose(  # the oracle reads what was written
        logits(told, written, IDS[:1, :9]), logits(fields, tensors, IDS[:1, :9]), rtol=1e-12, atol=20 * sums
    )


def test_a_model_of_nsa_comes_back_from_a_folder_of_several_files(tmp_path):
    options = dict(selector=IndexerConfig(dim=8, weighted=True), compression="mlp")
    dense = dense_model(rope_scaling=LinearScaling(2.0), param_dtype="bfloat16")
    model = to_nsa(dense, nsa=SPARSE, attention=("dense", "nsa"), rngs=nnx.Rngs(3), **options)

    save(model, tmp_path / "model", file_bytes=4000)
    again, tokenizer = load(tmp_path / "model", param_dtype="bfloat16")

    assert len(list((tmp_path / "model").glob("model-*.safetensors"))) > 2
    modes = {path.stat().st_mode for path in (tmp_path / "model").iterdir()}
    assert modes == {(tmp_path / "model" / "config.json").stat().st_mode}  # whoever reads one reads all
    assert again.config == model.config
    assert tokenizer is None
    weights = nn.weights(again)
    for name, value in nn.weights(model).items():
        np.testing.assert_array_equal(weights[name], value, name)


def test_a_tokenizer_is_saved_beside_the_model(tmp_path):
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 28}, unk_token="a"))

    save(dense_model(), tmp_path, tokenizer=tokenizer)

    assert load(tmp_path)[1].to_str() == tokenizer.to_str()


def test_a_folder_that_holds_a_model_is_not_written_to(tmp_path):
    save(dense_model(), tmp_path)
    held = (tmp_path / "model.safetensors").read_bytes()

    with refused(ValueError, "folder must be new, or hold no model"):
        save(dense_model(), tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == held


OF_NO_FAMILY = {
    "scale": dict(scale=0.7),
    "norms": dict(post_norms=True),
    "activation": dict(activation="gelu_tanh"),
    "embeddings": dict(embedding_scale=4.0),
    "bases": dict(rope_base=(100.0, 50.0)),
    "scalings": dict(rope_scaling=(None, LinearScaling(2.0))),
}


@pytest.mark.parametrize("options", OF_NO_FAMILY.values(), ids=OF_NO_FAMILY)
def test_an_option_that_no_family_has_is_never_lost(tmp_path, options):
    ((name, value),) = options.items()
    with refused(ValueError, f"to be saved, got .*{name}={re.escape(repr(value))}"):
        save(dense_model(**options), tmp_path / "model")
    assert not (tmp_path / "model").exists()


GEMMA_LIKE = dict(
    head_dim=8, attention=("window", "dense"), window_size=(5, None), rope_base=(50.0, 5000.0), scale=0.25,
    normalize_qk=True, post_norms=True, activation="gelu_tanh", embedding_scale=4.0,
)  # fmt: skip
NO_GEMMA = {
    "scale of 0": dict(scale=0.0),
    "scale below 0": dict(scale=-0.5),
    "scale of no whole number": dict(scale=0.3),
    "activation": dict(activation="silu"),
    "embeddings": dict(embedding_scale=3.0),
    "scaled windows": dict(rope_scaling=(LinearScaling(2.0), None)),
    "biases of some": dict(qkv_bias=True),
    "full layers of two kinds": dict(attention=("dense", "dense"), window_size=None, rope_base=(50.0, 5e3)),
}


@pytest.mark.parametrize("options", NO_GEMMA.values(), ids=NO_GEMMA)
def test_a_model_that_is_almost_gemma_is_not_saved_as_it(tmp_path, options):
    name, value = list(options.items())[-1]
    told = "post_norms=True" if value == "silu" else f"{name}={re.escape(repr(value))}"
    with refused(ValueError, f"to be saved, got .*{told}"):
        save(dense_model(**GEMMA_LIKE | options), tmp_path / "model")


def test_gemma_without_windows_names_none(tmp_path):
    options = dict(attention="dense", window_size=None, rope_base=5000.0)
    save(dense_model(**GEMMA_LIKE | options), tmp_path / "model")

    told = json.loads((tmp_path / "model" / "config.json").read_text())
    again, _ = load(tmp_path / "model", implementation="xla")

    assert "sliding_window" not in told  # `transformers` wants a number
    expected = run(dense_model(**GEMMA_LIKE | options))
    assert np.abs(run(again) - expected).max() < 1e-5 * np.abs(expected).max()


def test_what_matters_to_nsa_alone_does_not_matter_here(tmp_path):
    options = dict(selector=IndexerConfig(dim=4), initial_gates=(0.1, 0.8, 0.1), rope_base=(100.0, 100.0))
    save(dense_model(**options), tmp_path / "model")

    again, _ = load(tmp_path / "model", implementation="xla")

    assert (again.config.attention, again.config.rope_base) == ("dense", 100.0)
    np.testing.assert_array_equal(run(again), run(dense_model(rope_base=100.0, head_dim=4)))


def test_a_full_disk_is_one_sentence_and_leaves_no_model(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.numpy.save_file", full)

    with refused(OSError, "folder must take a whole model, got '.*No space left"):
        save(dense_model(), tmp_path / "model")
    assert not (tmp_path / "model" / "config.json").exists()


def test_a_disk_that_is_full_at_the_tokenizer_is_one_sentence(tmp_path):
    """The package raises a bare Exception."""
    import tokenizers

    (tmp_path / "tokenizer.json").mkdir()
    with refused(OSError, "folder must take a whole model, got '.*s a directory"):
        save(dense_model(), tmp_path, tokenizer=tokenizers.Tokenizer(tokenizers.models.BPE()))
    assert not (tmp_path / "config.json").exists()


def test_a_configuration_of_a_later_version_is_one_error(tmp_path):
    save(to_nsa(dense_model(), rngs=nnx.Rngs(0)), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"remat"', '"later"'))

    with refused(ValueError, "must hold what nsa_jax.pretrained.save wrote, got TypeError: .*later"):
        load(tmp_path)


def test_the_loss_of_a_uniform_model_is_the_logarithm_of_the_vocabulary():
    dense = dense_model()
    dense.final_norm.scale[...] = jnp.zeros(16)

    found = compare(dense, dense, IDS)

    assert math.isclose(found.loss, math.log(29), rel_tol=1e-6)
    assert found.agreement == 1
