"""`nsa_torch_ref.loading`: a layer that `nsa_jax.pretrained.save` wrote computes in PyTorch what it did."""

import json

import pytest
from messages import refused

torch = pytest.importorskip("torch", reason="nsa_torch_ref needs the extra `torch`")
pytest.importorskip("safetensors", reason="nsa_jax.pretrained needs the extra `pretrained`")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402

from nsa_jax import NSAConfig  # noqa: E402
from nsa_jax.model import TransformerConfig  # noqa: E402
from nsa_jax.model.abstract import abstract_transformer, fill, parameters  # noqa: E402
from nsa_jax.nn import IndexerConfig, LinearScaling, YarnScaling  # noqa: E402
from nsa_jax.pretrained import save  # noqa: E402
from nsa_torch_ref.loading import load_layers  # noqa: E402
from parity.budget import judge  # noqa: E402

NSA = NSAConfig(
    compression_block_size=8,
    compression_stride=4,
    selection_block_size=8,
    num_selected_blocks=4,
    window_size=12,
    num_local_blocks=1,
)
SIZES = dict(vocab_size=7, model_dim=24, mlp_dim=8, num_heads=4, num_kv_heads=2, nsa=NSA)
MODELS = {
    "all branches": dict(
        num_layers=2, attention=("window", "nsa"), rope_base=(10.0, 100.0), head_dim=10, qkv_bias=True,
        rope_scaling=(LinearScaling(2.0), YarnScaling(4.0, original_length=32)), normalize_qk=True,
        norm_epsilon=1e-3, scale=0.4, share_keys_values=True,
    ),
    "indexer alone": dict(
        num_layers=1, branches=("slc",), out_bias=True, rope_base=50.0,
        selector=IndexerConfig(num_heads=2, dim=6, weighted=True, shared_key=False, slow_pairs=True),
    ),
}  # fmt: skip


def nsa_model(**options):
    """A model whose parameters are all drawn, also those that a new one sets to 0 or 1."""
    model = abstract_transformer(TransformerConfig(**SIZES | options), implementation="xla")
    rng, arrays = np.random.default_rng(0), {}
    for name, value in parameters(model).items():
        drawn = rng.standard_normal(value.shape) * (0.5 if len(value.shape) == 1 else 0.3)
        arrays[name] = jnp.asarray(drawn + name.endswith("norm.scale"), value.dtype)
    fill(model, arrays)
    return model


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS.keys())
def test_a_saved_layer_computes_the_same_in_pytorch(options, tmp_path):
    model = nsa_model(**options)
    save(model, tmp_path / "model", file_bytes=4000)  # several files
    x = np.random.default_rng(1).standard_normal((2, 75, 24)).astype(np.float32)
    last = model.config.num_layers - 1
    found = nnx.jit(lambda layer, x: layer(x))(model.layers[last].attention, x)

    layers = load_layers(tmp_path / "model")

    assert list(layers) == [last]
    with torch.no_grad():
        same = layers[last](torch.from_numpy(x))
        exact = layers[last].double()(torch.from_numpy(x).double())
    row = judge("saved", "float32", "out", torch.from_numpy(np.array(found)), same, exact)
    assert row.passed, row
    assert row.budget < 1e-4 * exact.abs().max()  # both chose the same blocks


def changed(folder, **values):
    """Changes fields of the configuration of the model in a folder."""
    fields = json.loads((folder / "config.json").read_text())
    fields["transformer"] |= values
    (folder / "config.json").write_text(json.dumps(fields))


WRONG = {
    "no model": (
        lambda folder: (folder / "config.json").unlink(),
        "must hold a whole model, got .*No such file.* at '.*config.json'",
    ),
    "a dense model": (
        lambda folder: (folder / "config.json").write_text('{"model_type": "llama"}'),
        "must hold an NSA model of nsa_jax.pretrained.save, got model_type='llama'",
    ),
    "half a file": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"half"),
        "must hold a whole model, got .* at '.*model.safetensors'",
    ),
    "no file": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "must hold a whole model, got .* at '.*index.json'",
    ),
    "an index without a map": (
        lambda folder: [
            (folder / "model.safetensors").unlink(),
            (folder / "model.safetensors.index.json").write_text("{}"),
        ],
        "must hold a whole model, got 'no weight_map' at '.*index.json'",
    ),
    "no options": (
        lambda folder: (folder / "config.json").write_text('{"model_type": "nsa_jax"}'),
        "must hold a whole model, got 'no transformer' at '.*config.json'",
    ),
    "a list": (
        lambda folder: (folder / "config.json").write_text("[]"),
        "must hold a whole model, got 'a list' at '.*config.json'",
    ),
    "more options": (
        lambda folder: changed(folder, qkv_bias=True),
        'got a layer 0 with Missing key.* "query_proj.bias".* Load a whole copy',
    ),
    "an option less": (
        lambda folder: (folder / "config.json").write_text('{"model_type": "nsa_jax", "transformer": {}}'),
        "must hold a whole model, got .KeyError: 'num_layers'. at '.*config.json'",
    ),
    "an option of a later version": (
        lambda folder: changed(folder, nsa={"later": 1}),
        "must hold a whole model, got .TypeError: .*later.* at '.*config.json'",
    ),
    "given blocks": (lambda folder: changed(folder, selector="given"), "must choose its blocks, got sel"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "model"
    save(nsa_model(**MODELS["indexer alone"]), folder)
    return folder


@pytest.mark.parametrize(("spoil", "told"), WRONG.values(), ids=WRONG.keys())
def test_what_is_no_whole_model_is_refused(spoil, told, saved, tmp_path):
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    spoil(tmp_path)

    with refused(ValueError, told):
        load_layers(tmp_path)
