"""Models of other libraries are loaded as they are: every family, every format, and what must be refused."""

import functools
import http.server
import importlib
import json
import pathlib
import re
import shutil
import threading
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from messages import has_form, refused
from pretrained_files import FAMILIES, fields_of, logits, tensors_of, write_folder, write_gguf

from nsa_jax import nn
from nsa_jax.model.abstract import parameters

for name in ("safetensors", "gguf", "tokenizers", "huggingface_hub"):
    pytest.importorskip(name, reason="nsa_jax.pretrained needs the extra `pretrained`")

from nsa_jax.pretrained import gguf_file, load, loading  # noqa: E402
from nsa_jax.pretrained.families import read_fields  # noqa: E402

IDS = np.random.default_rng(1).integers(0, 29, (2, 19))
TOKENS = [
    "<|end|>",
    "<|user|>",
    *"abcdehlo12.",
    "Ġ",
    "Ċ",
    "he",
    "ll",
    "hell",
    "hello",
    "Ġhello",
    "12",
    ".hello",
]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", ". hello"]
KINDS = [3, 4, *[1] * (len(TOKENS) - 2)]


def made(tmp_path, family="llama", **changes):
    fields = fields_of(family, **changes)
    return write_folder(tmp_path / "model", fields, tensors_of(fields)), fields


def equal_weights(one, other):
    first, second = nn.weights(one), nn.weights(other)
    assert first.keys() == second.keys()
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name], name)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_family(tmp_path, family):
    folder, fields = made(tmp_path, family)

    model, tokenizer = load(folder, implementation="xla")

    expected = logits(fields, tensors_of(fields), IDS)
    error = np.abs(np.asarray(jax.jit(lambda ids: model(ids))(IDS)) - expected).max()
    assert error < 2e-5 * np.abs(expected).max()
    assert tokenizer is None


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["safetensors", "quantised GGUF"])
def test_the_host_holds_the_model_and_one_tensor_more(tmp_path, monkeypatch, form, param_dtype):
    """Of equal tensors, so that one that is held too long counts. JAX may keep or copy what it is given."""
    sizes = dict(hidden_size=256, intermediate_size=256, num_attention_heads=8, num_key_value_heads=8)
    fields = fields_of("llama", vocab_size=256, **sizes)
    tensors = tensors_of(fields)
    if form == "safetensors":
        folder = write_folder(tmp_path / "model", fields, tensors, files=4)
    else:
        quantised = [name for name, tensor in tensors.items() if tensor.ndim == 2]
        folder = write_gguf(tmp_path / "model.gguf", fields, tensors, quantised=quantised)
    expected, _ = load(folder, param_dtype=param_dtype)  # what is imported and compiled does not count
    monkeypatch.setattr(gguf_file, "AT_ONCE", 48 * 256)  # rows that divide neither a tensor nor a head
    right, before, copied, most = jax.device_put, [], 0, 0

    def put(own, *rest):
        nonlocal copied, most
        before[:] = before or [tracemalloc.get_traced_memory()[0] - own.nbytes]
        most = max(most, copied + tracemalloc.get_traced_memory()[1] - before[0])
        array = jax.block_until_ready(right(own, *rest))
        copied += own.nbytes * (array.unsafe_buffer_pointer() != own.ctypes.data)
        most = max(most, copied + tracemalloc.get_traced_memory()[0] - before[0])
        tracemalloc.reset_peak()
        return array

    monkeypatch.setattr(jax, "device_put", put)
    tracemalloc.start()
    try:
        model, _ = load(folder, param_dtype=param_dtype)
    finally:
        tracemalloc.stop()

    held, largest = sum(value.nbytes for value in parameters(model).values()), 4 * 256**2
    assert held > 3e6 / (2 if param_dtype == "bfloat16" else 1)
    assert held <= most < held + 1.4 * largest  # and what Python keeps of the files
    equal_weights(model, expected)


SPELLINGS = {
    "new": dict(
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", factor=3.0, rope_theta=700.0),
            sliding_attention=dict(rope_type="default", rope_theta=90.0),
        )
    ),
    "a longer context": dict(
        rope_scaling=dict(rope_type="linear", factor=3.0),
        rope_parameters=dict(
            full_attention=dict(rope_theta=700.0), sliding_attention=dict(rope_theta=90.0)
        ),
    ),
    "bases beside": dict(
        rope_theta=700.0, rope_local_base_freq=90.0,
        rope_parameters=dict(full_attention=dict(rope_type="linear", factor=3.0), sliding_attention={}),
    ),
    "one of two": dict(
        rope_local_base_freq=90.0,
        rope_parameters=dict(full_attention=dict(rope_type="linear", factor=3.0, rope_theta=700.0)),
    ),
    "old": dict(
        rope_theta=700.0, rope_local_base_freq=90.0, rope_scaling=dict(rope_type="linear", factor=3.0)
    ),
}  # fmt: skip


@pytest.mark.parametrize("rope", SPELLINGS.values(), ids=SPELLINGS)
def test_a_rotation_of_gemma_is_the_same_in_every_spelling(rope):
    """`test_pretrained_transformers` reads them, too."""
    fields = fields_of("gemma 3 by layer") | dict(rope_parameters=None) | rope
    config = read_fields(fields, dtype="float32", param_dtype="float32")

    assert config.rope_base == (700.0, 90.0)
    assert config.rope_scaling == (nn.LinearScaling(3.0), None)


def test_gemma_has_bases_of_its_own():
    fields = fields_of("gemma 3 by layer") | dict(rope_parameters=None)

    assert read_fields(fields, dtype="float32", param_dtype="float32").rope_base == (1e6, 1e4)


def test_the_rotary_base_may_be_another(tmp_path):
    folder, fields = made(tmp_path)

    model, _ = load(folder, rope_base=400.0, implementation="xla")

    expected = logits(fields | {"rope_theta": 400.0}, tensors_of(fields), IDS)
    error = np.abs(np.asarray(jax.jit(lambda ids: model(ids))(IDS)) - expected).max()
    assert error < 2e-5 * np.abs(expected).max()
    with refused(ValueError, "rope_base"):
        load(folder, rope_base=-1.0)


def test_shards_are_read_in_the_dtype_asked_for(tmp_path):
    folder, fields = made(tmp_path)
    tensors = tensors_of(fields)
    tensors |= {  # what old copies have beside the weights
        "lm_head.weight": tensors["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
    }
    half = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()}
    shards = write_folder(tmp_path / "shards", fields, half, files=3)

    model, _ = load(shards, dtype="bfloat16", param_dtype="bfloat16")

    whole, _ = load(folder, dtype="bfloat16", param_dtype="bfloat16")
    assert (model.config.dtype, model.config.param_dtype) == ("bfloat16", "bfloat16")
    assert {value.dtype for value in nn.weights(model).values()} == {jnp.dtype("bfloat16")}
    equal_weights(model, whole)


GGUF = {
    "llama": {},
    "llama 3": {},
    "llama with biases and linear scaling": {},
    "qwen2": {},
    "qwen3": {},
}


@pytest.mark.parametrize("family", GGUF)
def test_a_gguf_file_is_the_folder_it_was_made_of(tmp_path, family):
    folder, fields = made(tmp_path, family, rms_norm_eps=2.0**-17)
    file = write_gguf(tmp_path / "model.gguf", fields, tensors_of(fields))

    model, tokenizer = load(file)

    expected, _ = load(folder)
    assert model.config == expected.config
    assert tokenizer is None
    equal_weights(model, expected)


def test_a_quantised_tensor_is_its_codes_times_their_scale(tmp_path):
    folder, fields = made(tmp_path)
    name = "model.layers.1.self_attn.q_proj.weight"
    file = write_gguf(tmp_path / "model.gguf", fields, tensors_of(fields), quantised=[name])
    blocks = tensors_of(fields)[name].reshape(-1, 32)
    scale = (np.abs(blocks).max(1, keepdims=True) / 127).astype(np.float16).astype(np.float32)

    (model, _), (exact, _) = load(file), load(folder)

    kernel, expected = (each.layers[1].attention.query_proj.kernel[...] for each in (model, exact))
    error = np.abs(np.asarray(kernel - expected))
    assert 0 < error.max() < 0.51 * scale.max()


def test_a_name_is_downloaded(tmp_path, monkeypatch):
    folder, _ = made(tmp_path)
    asked = []

    def download(name, *, allow_patterns):
        asked.append((name, allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)

    model, _ = load("someone/small-model")

    assert model.config.vocab_size == 29
    (first, (name, patterns)) = asked
    assert first == ("someone/small-model", ["config.json"])
    assert name == "someone/small-model"
    wanted = {"config.json", "model.safetensors", "model-00001-of-00002.safetensors", "tokenizer.json"}
    assert all(any(pathlib.PurePath(file).match(each) for each in patterns) for file in wanted)
    assert not any(pathlib.PurePath("consolidated.safetensors").match(each) for each in patterns)


def test_a_model_that_cannot_be_loaded_is_not_downloaded(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="mixtral")))

    def download(name, *, allow_patterns):
        assert allow_patterns == ["config.json"]
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)

    with refused(ValueError, "model_type of config.json must be .*, got 'mixtral'. Load"):
        load("someone/experts")


def test_a_download_that_fails_is_one_sentence(monkeypatch):
    def download(name, *, allow_patterns):
        raise OSError("401 Client Error.\nmore lines")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)

    with refused(ValueError, "got 'someone/gone': '401 Client Error.'. Check its name"):
        load("someone/gone")


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_weights_are_read_into_their_sharding(tmp_path, kind):
    folder, fields = made(tmp_path, "qwen2")
    file = write_gguf(tmp_path / "model.gguf", fields, tensors_of(fields))
    axes = dict(heads="tensor", kv_heads="tensor", mlp="tensor", vocab=None, model=None)

    with jax.set_mesh(jax.make_mesh((1,), ("tensor",))):
        model, _ = load(folder if kind == "folder" else file, sharding=axes)

    attention = model.layers[1].attention
    specs = [x[...].sharding.spec for x in (attention.key_proj.kernel, attention.key_proj.bias)]
    assert [tuple(spec) for spec in specs] == [(None, "tensor", None), ("tensor", None)]
    equal_weights(model, load(folder)[0])


def test_a_sharding_without_a_mesh_is_refused(tmp_path):
    folder, _ = made(tmp_path)

    with refused(ValueError, "needs its mesh in context, got none for {'heads': 'tensor'}. Call"):
        load(folder, sharding=dict(heads="tensor"))


def written(tokenizer, folder):
    tokenizer.save(str(folder / "tokenizer.json"))


def byte_level(more=()):
    import tokenizers

    vocabulary = {token: number for number, token in enumerate([*TOKENS, *more])}
    merges = [tuple(pair.split()) for pair in MERGES]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens([TOKENS[0]])
    made.add_tokens([TOKENS[1]])
    return made


def test_the_tokenizer_comes_along(tmp_path):
    folder, _ = made(tmp_path)
    written(byte_level(), folder)

    _, tokenizer = load(folder)

    assert tokenizer.encode("hello hello").ids == [TOKENS.index("hello"), TOKENS.index("Ġhello")]


def test_a_tokenizer_neither_cuts_nor_fills_up(tmp_path):
    """Files of trained models often say so of their training; transformers does it only if it is asked."""
    folder, _ = made(tmp_path)
    tokenizer = byte_level()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(pad_id=0)
    written(tokenizer, folder)

    _, tokenizer = load(folder)

    found = tokenizer.encode_batch_fast(["hello hello hello", "hello"])
    assert [len(each.ids) for each in found] == [3, 1]


CUTS = {  # of numbers, and of a point before a word
    "gpt-2": (["12"], [".", "hello"]),
    "smollm": (["1", "2"], [".", "hello"]),
    "llama-bpe": (["12"], [".hello"]),
    "qwen2": (["1", "2"], [".hello"]),
}


@pytest.mark.parametrize("pre", CUTS)
def test_a_gguf_file_describes_its_tokenizer(tmp_path, pre):
    _, fields = made(tmp_path)
    bpe = (TOKENS, MERGES, KINDS, pre)
    more = {"tokenizer.ggml.bos_token_id": 0}
    file = write_gguf(tmp_path / "model.gguf", fields, tensors_of(fields), bpe=bpe, more=more)

    _, tokenizer = load(file)

    begins, (number, word) = [TOKENS[0]] if pre == "llama-bpe" else [], CUTS[pre]
    found = tokenizer.encode("<|user|>hello12\n \n hello.hello<|end|>")
    spaces = ["Ċ", "Ġ", "Ċ", "Ġhello"]
    assert found.tokens == [*begins, TOKENS[1], "hello", *number, *spaces, *word, TOKENS[0]]
    assert tokenizer.decode(found.ids) == "<|user|>hello12\n \n hello.hello"


def test_a_tokenizer_of_another_kind_is_none_with_a_warning(tmp_path):
    _, fields = made(tmp_path)
    bpe = (TOKENS, MERGES, KINDS, "dbrx")
    file = write_gguf(tmp_path / "model.gguf", fields, tensors_of(fields), bpe=bpe)

    with pytest.warns(UserWarning, match="got model='gpt2' and pre='dbrx'. Load the one"):
        assert load(file)[1] is None


GEMMA = dict(model_type="gemma3_text", architectures=["Gemma3ForCausalLM"], hidden_act=None)
FIELDS = {
    "family": (dict(model_type="gemma2"), "model_type of config.json must be one of"),
    "no family": (dict(model_type=None), "got None. Load"),
    "task": (dict(architectures=["LlamaForSequenceClassification"]), "architectures of config.json must be"),
    "experts": (dict(num_local_experts=8), "known for 'llama', got num_local_experts=8. Pass ignore="),
    "soft cap": (dict(final_logit_softcapping=30.0), "got final_logit_softcapping=30.0. Pass"),
    "bias of the MLP": (dict(mlp_bias=True), "got mlp_bias=True. Pass"),
    "activation": (dict(hidden_act="gelu"), "hidden_act of config.json must be 'silu', got 'gelu'. Load"),
    "quantised": (dict(quantization_config={"bits": 4}), "got quantization_config="),
    "part of a head": (dict(partial_rotary_factor=0.5), "got partial_rotary_factor=0.5. Pass"),
    "rotation": (dict(rope_scaling=dict(rope_type="longrope")), "got rope_type='longrope'. Load"),
    "setting of it": (
        dict(rope_scaling=dict(type="linear", factor=2.0, mscale=0.7)),
        "got rope_scaling.mscale=0.7. Load",
    ),
    "no setting of it": (dict(rope_scaling=dict(type="linear")), "got none for factor. Add it"),
    "base of the rotation": (dict(rope_theta=0), "rope_base must be"),
    "base of Gemma": (
        GEMMA | dict(rope_theta=0, layer_types=["full_attention"] * 2), "rope_base.* must be"
    ),
    "rotation by kind": (
        dict(rope_parameters=dict(full_attention=dict(rope_theta=1.0))),
        "got rope_scaling.full_attention=",
    ),
    "no size": (dict(hidden_size=None), "got no hidden_size. Load"),
    "kind of a size": (dict(num_hidden_layers="2"), "num_layers must be an int, got str. Pass"),
    "heads": (dict(num_key_value_heads=3), "num_kv_heads must divide num_heads, got 3 and 4. Give"),
    "kind of a layer": (
        dict(
            model_type="qwen3", architectures=["Qwen3ForCausalLM"], use_sliding_window=True, sliding_window=4,
            layer_types=["linear_attention"] * 2,
        ),
        r"layer_types of config.json must be a list of .*, got \['linear_attention', 'linear_attention'\]. L",
    ),
    "activation of Gemma": (
        GEMMA | dict(hidden_activation="gelu"),
        "hidden_activation of config.json must be 'gelu_pytorch_tanh', got 'gelu'. Load",
    ),
    "no window of Gemma": (GEMMA | dict(sliding_window=None), "sliding_window of config.json must be a num"),
    "no order of Gemma": (
        GEMMA | dict(use_bidirectional_attention=True), "got use_bidirectional_attention=True. Pass"
    ),
    "rotation of Gemma": (
        GEMMA | dict(rope_parameters=dict(rope_type="linear", factor=2.0)),
        "rope_parameters of config.json must be mappings of .'full_attention', 'sliding_attention'.*, got",
    ),
    "kind of Gemma": (GEMMA | dict(model_type="gemma3"), "model_type of config.json must be one of"),
    "tensors": (dict(num_hidden_layers=1), "got 9 extra .*model.layers.1"),
    "missing tensors": (dict(tie_word_embeddings=False), r"got 1 missing \(lm_head.weight\). Load"),
    "shapes": (dict(intermediate_size=60), r"of another shape .*\(64, 32\) for \(60, 32\)"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "told"), FIELDS.values(), ids=FIELDS.keys())
def test_what_does_not_fit_is_refused_by_its_field(tmp_path, changes, told):
    folder, fields = made(tmp_path)
    (folder / "config.json").write_text(json.dumps(fields | changes))

    with refused((ValueError, TypeError), told):
        load(folder)


@pytest.mark.parametrize(
    "family",
    ["llama with yarn", "mistral", "qwen3 with windows and biases", "gemma 3", "gemma 3 by layer"],
)
def test_nonsense_in_a_field_is_one_error_or_changes_nothing(tmp_path, monkeypatch, family):
    once = functools.cache(loading.abstract_transformer)  # what changes nothing is not traced again
    monkeypatch.setattr(loading, "abstract_transformer", once)
    folder, fields = made(tmp_path, family)
    more = {"qwen3": dict(max_window_layers=1), "gemma": dict(layer_types=None)}.get(family.split()[0], {})
    fields |= more | dict(rope_theta=100.0) | ({} if "llama" in family else dict(sliding_window=4))
    (folder / "config.json").write_text(json.dumps(fields))
    load(folder)  # a field that is refused would hide all others
    rope = fields.get("rope_parameters")
    places = [(name,) for name in fields] + [("rope_parameters", name) for name in rope or ()]
    wrong = []
    for *into, name in places:
        for value in ("x", -1, 0.5, [], {}, [[]], {"a": {}}, True, 10**400):
            changed = json.loads(json.dumps(fields))
            (changed[into[0]] if into else changed)[name] = value
            (folder / "config.json").write_text(json.dumps(changed))
            try:
                load(folder)
            except (TypeError, ValueError) as error:
                if not has_form(str(error)):
                    wrong.append(f"{name}={value!r:.20}: {type(error).__name__}: {error}")
            except Exception as error:
                wrong.append(f"{name}={value!r:.20}: {type(error).__name__}: {error}")

    assert not wrong, "\n".join(wrong)


def test_a_field_that_is_known_to_change_nothing_may_be_ignored(tmp_path):
    folder, fields = made(tmp_path)
    (folder / "config.json").write_text(json.dumps(fields | dict(note="mine", unsloth_version="1")))

    with refused(ValueError, "got note='mine'. Pass ignore=\\('note',\\)"):
        load(folder)
    assert load(folder, ignore=("note",))[0].config.num_layers == 2


SETTINGS = {
    "experts": ({".expert_count": 8}, "got llama.expert_count=8. Pass ignore="),
    "heads of values": ({".attention.value_length": 4}, "got llama.attention.value_length=4"),
    "unknown": ({".attention.sliding_window": 4}, "got llama.attention.sliding_window=4"),
    "rotation": ({".rope.scaling.type": "longrope"}, "got rope_type='longrope'"),
}


@pytest.mark.parametrize(("more", "told"), SETTINGS.values(), ids=SETTINGS.keys())
def test_a_setting_of_gguf_that_does_not_fit_is_refused(tmp_path, more, told):
    _, fields = made(tmp_path)
    file = write_gguf(tmp_path / "model.gguf", fields, tensors_of(fields), more=more)

    with refused(ValueError, told):
        load(file)


def test_an_architecture_of_gguf_that_is_unknown_is_refused(tmp_path):
    fields = fields_of("llama") | dict(model_type="gemma2")
    file = write_gguf(tmp_path / "model.gguf", fields, tensors_of(fields))

    with refused(ValueError, "general.architecture must be one of .*, got 'gemma2'"):
        load(file)


def test_frequencies_of_gguf_that_are_not_those_of_llama_3_are_refused(tmp_path):
    fields = fields_of(
        "llama 3", rope_scaling=FAMILIES["llama 3"]["rope_scaling"] | dict(high_freq_factor=9.0)
    )
    file = write_gguf(tmp_path / "model.gguf", fields, tensors_of(fields))

    with refused(ValueError, "rope_freqs.weight must be those of Llama 3.1"):
        load(file)


def cut(path, keep):
    path.write_bytes(path.read_bytes()[:keep])


BROKEN = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "got no config.json in"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "got no model.safetensors.index"),
    "config": (lambda folder: cut(folder / "config.json", 40), "must be whole, got .* at .*config.json"),
    "a list": (lambda folder: (folder / "config.json").write_text("[]"), "got 'a list' at"),
    "deep": (lambda folder: (folder / "config.json").write_text("[" * 100_000), "must be whole, got"),
    "a folder": (
        lambda folder: [(folder / "config.json").unlink(), (folder / "config.json").mkdir()],
        "must be whole, got .*s a directory",
    ),
    "header": (lambda folder: cut(folder / "model.safetensors", 100), "must be whole, got .*model.safetens"),
    "end": (lambda folder: cut(folder / "model.safetensors", -8), "must be whole, got .*model.safetensors"),
    "tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{}"), "got .* at .*tokenizer.json"),
}  # fmt: skip


@pytest.mark.parametrize(("harm", "told"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_folder_is_one_error(tmp_path, harm, told):
    folder, _ = made(tmp_path)
    harm(folder)

    with refused(ValueError, told):
        load(folder)


def test_a_shard_that_is_missing_and_an_index_without_a_map_are_one_error(tmp_path):
    fields = fields_of("llama")
    folder = write_folder(tmp_path / "shards", fields, tensors_of(fields), files=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with refused(ValueError, "got 'no such file' at .*00002-of"):
        load(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with refused(ValueError, "an index must map tensors to files"):
        load(folder)


def test_integers_are_no_weights(tmp_path):
    folder, fields = made(tmp_path)
    tensors = tensors_of(fields)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int8)
    write_folder(folder, fields, tensors)

    with refused(ValueError, "got I8 of 'model.norm.weight'. Load"):
        load(folder)


@pytest.mark.parametrize("keep", [3, 60, 900, -64])
def test_a_gguf_file_that_was_cut_is_one_error(tmp_path, keep):
    fields = fields_of("llama")
    file = write_gguf(tmp_path / "model.gguf", fields, tensors_of(fields))
    cut(file, keep)

    with refused(ValueError, "a GGUF file must be whole, got .*model.gguf"):
        load(file)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path):
    folder, _ = made(tmp_path)
    tokenizer = byte_level()
    tokenizer.add_tokens([f"more{number}" for number in range(29 - len(TOKENS))])
    written(tokenizer, folder)
    load(folder)
    tokenizer.add_tokens(["one too many"])  # as Gemma 3 has, which no text holds
    written(tokenizer, folder)

    with pytest.warns(UserWarning, match="vocab_size of 29, got the added tokens one too many beyond it. L"):
        assert load(folder)[1].encode("one too many").ids == [29]
    written(byte_level([f"word{number}" for number in range(30 - len(TOKENS))]), folder)
    with refused(ValueError, "below the vocab_size of the model, 29, got 29. Load"):
        load(folder)


SOURCES = {
    "kind": (3, TypeError, "source must be a path or a name, got int"),
    "nothing": ("no-such-folder", ValueError, "got 'no-such-folder'. Check the path"),
    "no file": ("a/b.gguf", ValueError, "got 'a/b.gguf'. Check the path"),
    "another file": (__file__, ValueError, "source must be a folder, a .gguf file"),
}


@pytest.mark.parametrize(("source", "error", "told"), SOURCES.values(), ids=SOURCES.keys())
def test_a_source_that_is_none_is_refused(source, error, told):
    with refused(error, told):
        load(source)


@pytest.mark.parametrize("changes", [dict(dtype="int8"), dict(param_dtype=None), dict(implementation="cuda")])
def test_wrong_options_are_refused(tmp_path, changes):
    with refused(ValueError, re.escape(next(iter(changes)))):
        load(tmp_path, **changes)


@pytest.mark.parametrize("name", ["safetensors", "tokenizers", "gguf", "huggingface_hub"])
def test_a_package_that_is_missing_is_named_with_its_command(tmp_path, monkeypatch, name):
    folder, fields = made(tmp_path)
    written(byte_level(), folder)
    file = write_gguf(tmp_path / "model.gguf", fields, tensors_of(fields))
    source = dict(gguf=file, huggingface_hub="someone/model").get(name, folder)
    find = importlib.import_module

    def without(wanted, *args):
        if wanted.split(".")[0] == name:
            raise ImportError(f"No module named {wanted!r}")
        return find(wanted, *args)

    monkeypatch.setattr(importlib, "import_module", without)

    with refused(ImportError, rf"needs the package {name}, got .* pip install 'nsa_jax\[pretrained\]'"):
        load(source)


def test_a_copy_of_the_folder_is_not_written_to(tmp_path):
    folder, _ = made(tmp_path)
    shutil.copytree(folder, tmp_path / "copy")
    model, _ = load(folder)
    shutil.rmtree(folder)

    equal_weights(model, load(tmp_path / "copy")[0])


class Hub(http.server.BaseHTTPRequestHandler):
    """What `huggingface_hub` asks the hub for: the files of a repository, and each of them."""

    folder: pathlib.Path
    asked: list[str]

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET(False)

    def do_GET(self, body=True):
        path, files = self.path.partition("?")[0], [file.name for file in sorted(self.folder.iterdir())]
        commit, name = "a" * 40, path.rpartition("/")[2]
        if path == "/api/models/someone/small/revision/main":
            siblings = [dict(rfilename=name) for name in files]
            content = json.dumps(dict(id="someone/small", sha=commit, siblings=siblings)).encode()
        elif path == f"/api/models/someone/small/tree/{commit}":
            sizes = {name: (self.folder / name).stat().st_size for name in files}
            tree = [dict(type="file", path=name, size=size, oid="b" * 40) for name, size in sizes.items()]
            content = json.dumps(tree).encode()
        elif path.startswith(f"/someone/small/resolve/{commit}/") and name in files:
            content = (self.folder / name).read_bytes()
            self.asked += [name] if body else []
        else:
            self.send_error(404)
            return
        self.send_response(200)
        headers = {"ETag": f'"{hash(content)}"', "X-Repo-Commit": commit, "Content-Length": len(content)}
        for key, value in (headers | {"Content-Type": "application/json"}).items():
            self.send_header(key, str(value))
        self.end_headers()
        if body:
            self.wfile.write(content)


def test_a_repository_is_downloaded_from_a_hub(tmp_path, monkeypatch):
    import huggingface_hub

    folder, fields = made(tmp_path)
    write_folder(folder, fields, tensors_of(fields), files=2)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"the same again, which nobody needs")
    handler = type("Here", (Hub,), dict(folder=folder, asked=[]))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    where = dict(endpoint=f"http://127.0.0.1:{server.server_port}", cache_dir=tmp_path / "cache")
    download = functools.partial(huggingface_hub.snapshot_download, **where)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)

    try:
        model, _ = load("someone/small")
        with refused(ValueError, "can be downloaded, got 'someone/other': "):
            load("someone/other")
    finally:
        server.shutdown()
        server.server_close()

    equal_weights(model, load(folder)[0])
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert sorted(handler.asked) == ["config.json", *shards, "model.safetensors.index.json"]
