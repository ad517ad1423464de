"""Chat templates and end tokens are found where others keep them, and saved so that others find them."""

import json

import numpy as np
import pytest
from messages import refused
from pretrained_files import fields_of, tensors_of, write_folder, write_gguf

for name in ("safetensors", "gguf", "tokenizers", "jinja2"):
    pytest.importorskip(name, reason="nsa_jax.pretrained needs the extra `pretrained`")

from nsa_jax.pretrained import ChatFormat, load, load_chat_format, save  # noqa: E402

# In the form of SmolLM2's: a default system message, and lines of control that leave nothing behind.
TEMPLATE = """{%- for message in messages %}
    {%- if loop.first and message.role != "system" %}
        {{- bos_token + "system\\nBe kind." + eos_token + "\\n" }}
    {%- endif %}
    {%- if message.role == "tool" %}
        {{- raise_exception("no tools here") }}
    {%- endif %}
    {{- "<|start|>" + message.role + "\\n" + message["content"] + eos_token + "\\n" }}
{%- endfor %}
{% if add_generation_prompt %}
<|start|>assistant
{% endif %}
"""
WORDS = dict(bos_token="<|start|>", eos_token="<|end|>")
ASKED = [
    dict(role="user", content="Who?"),
    dict(role="assistant", content="I."),
    dict(role="user", content="{{x}}"),
]
TEXT = (
    "<|start|>system\nBe kind.<|end|>\n<|start|>user\nWho?<|end|>\n<|start|>assistant\nI.<|end|>\n"
    "<|start|>user\n{{x}}<|end|>\n<|start|>assistant\n"
)


def made(folder, **files):
    fields = fields_of("llama", **files.pop("config", {}))
    write_folder(folder, fields, tensors_of(fields))
    for name, values in files.items():
        content = values if isinstance(values, str) else json.dumps(values)
        (folder / f"{name}.{'jinja' if name == 'chat_template' else 'json'}").write_text(content)
    return folder


def test_a_conversation_becomes_the_text_of_its_template():
    chat = ChatFormat(TEMPLATE, (2,), WORDS)

    assert chat.prompt(ASKED) == TEXT
    assert chat.prompt([dict(role="system", content="Be brief."), *ASKED]).startswith(
        "<|start|>system\nBe brief"
    )


def test_a_template_has_what_transformers_gives_it():
    template = (
        "{{ strftime_now('%Y')|length }} {{ messages[0]|tojson }}\n"
        "{%- generation %} {{ messages[0].content }}{% endgeneration -%} \n."
    )

    text = ChatFormat(template).prompt([dict(role="user", content="é'<")])

    assert text == """4 {"role": "user", "content": "é'<"} é'<."""


def test_a_template_is_told_that_there_are_no_tools():
    template = "{% if tools is not none %}tools{% endif %}{% if documents is not none %}documents{% endif %}."

    assert ChatFormat(template).prompt([dict(role="user", content="Who?")]) == "."


PLACES = {
    "in the tokenizer": (
        dict(
            tokenizer_config=WORDS | dict(chat_template=TEMPLATE, add_bos_token=True),
            config=dict(eos_token_id=2),
        ),
        ChatFormat(TEMPLATE, (2,), WORDS),
    ),
    "by name, among others": (
        dict(
            tokenizer_config=dict(
                chat_template=[dict(name="tools", template="x"), dict(name="default", template=TEMPLATE)],
                bos_token=dict(content="<|start|>", special=True), eos_token=None,
            ),
            generation_config=dict(eos_token_id=[5, 7]), config=dict(eos_token_id=2),
        ),
        ChatFormat(TEMPLATE, (5, 7), dict(bos_token="<|start|>")),
    ),
    "in a file of its own": (
        dict(chat_template=TEMPLATE, tokenizer_config=dict(chat_template="old"), generation_config={}),
        ChatFormat(TEMPLATE),
    ),
    "nowhere": ({}, ChatFormat()),
}  # fmt: skip


@pytest.mark.parametrize(("files", "expected"), PLACES.values(), ids=PLACES)
def test_the_format_is_found(tmp_path, files, expected):
    assert load_chat_format(made(tmp_path / "model", **files)) == expected


@pytest.mark.parametrize("kind", ["with", "without"])
def test_the_format_of_a_gguf_file_is_found(tmp_path, kind):
    fields, of = fields_of("llama", vocab_size=29), "tokenizer.ggml."
    more = {"tokenizer.chat_template": TEMPLATE, f"{of}bos_token_id": 0, f"{of}eos_token_id": 1}
    words = ["<|start|>", "<|end|>", "<|eot|>", *"abcdefghijklmnopqrstuvwxyz"]
    bpe = words, [], [3, 3, 3, *[1] * 26], "smollm"
    more = more | {f"{of}eot_token_id": 2} if kind == "with" else {}
    file = write_gguf(tmp_path / "model.gguf", fields, tensors_of(fields), more=more, bpe=bpe)

    found = load_chat_format(file)

    assert found == (ChatFormat(TEMPLATE, (1, 2), WORDS) if kind == "with" else ChatFormat())


def test_what_is_saved_is_found_again(tmp_path):
    model, _ = load(made(tmp_path / "dense"))
    chat = ChatFormat(TEMPLATE, (5, 7), WORDS)

    save(model, tmp_path / "one", chat_format=chat)
    save(model, tmp_path / "two", chat_format=ChatFormat())

    assert load_chat_format(tmp_path / "one") == chat
    assert load_chat_format(tmp_path / "two") == ChatFormat()
    assert load(tmp_path / "one")[0].config.vocab_size == 29
    with refused(TypeError, "chat_format must be a ChatFormat, got str"):
        save(model, tmp_path / "three", chat_format=TEMPLATE)


def test_a_repository_is_asked_for_small_files_alone(tmp_path, monkeypatch):
    folder, asked = made(tmp_path / "model", config=dict(eos_token_id=3)), []

    def download(name, *, allow_patterns):
        asked.append((name, sorted(allow_patterns)))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)

    assert load_chat_format("someone/small-model").end_tokens == (3,)
    names = ["chat_template.jinja", "config.json", "generation_config.json", "tokenizer_config.json"]
    assert asked == [("someone/small-model", names)]


BAD = {
    "template": (dict(tokenizer_config=dict(chat_template=3)), "must be whole, got .chat_template=3"),
    "ends": (dict(config=dict(eos_token_id="</s>")), "must be whole, got .*eos_token_id="),
    "json": (dict(tokenizer_config="{"), "the files of a model must be whole"),
}  # fmt: skip


def test_a_template_that_is_no_utf_8_is_refused(tmp_path):
    folder = made(tmp_path / "model")
    (folder / "chat_template.jinja").write_bytes(b"\xff")

    with refused(ValueError, "must be whole, got .*utf-8.* at '.*chat_template.jinja'"):
        load_chat_format(folder)


@pytest.mark.parametrize(("files", "told"), BAD.values(), ids=BAD)
def test_broken_files_are_refused(tmp_path, files, told):
    folder = made(tmp_path / "model", **files)
    with refused(ValueError, told):
        load_chat_format(folder)


WHOLE = ChatFormat(TEMPLATE, (), WORDS)
BAD_TALK = {
    "no template": (ChatFormat(), ASKED, "a conversation needs a chat template, got a model without"),
    "role": (WHOLE, [dict(role="tool", content="3")], "got the error 'no tools here'"),
    "syntax": (ChatFormat("{% if %}"), ASKED, "the chat template must take these messages, got the error"),
    "kind": (WHOLE, [dict(role="user", content=3)], "must take these messages, got"),
    "sandbox": (ChatFormat("{{ messages.append(1) }}"), ASKED, "must take these messages, got the error"),
}  # fmt: skip


@pytest.mark.parametrize(("chat", "messages", "told"), BAD_TALK.values(), ids=BAD_TALK)
def test_what_a_template_does_not_take_is_refused(chat, messages, told):
    with refused(ValueError, told):
        chat.prompt(messages)


def test_the_text_is_that_of_transformers(tmp_path):
    """`tox -e adopt` has it."""
    transformers = pytest.importorskip("transformers", reason="run by `tox -e adopt`")
    import tokenizers

    words = {word: number for number, word in enumerate([*WORDS.values(), *"abcdehlo12. "])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(words, []))
    tokenizer.add_special_tokens(list(WORDS.values()))
    model, _ = load(made(tmp_path / "dense"))
    save(model, tmp_path / "ours", tokenizer=tokenizer, chat_format=ChatFormat(TEMPLATE, (1,), WORDS))

    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")

    assert theirs.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True) == TEXT
    assert theirs.eos_token_id == 1
    assert np.array_equal(theirs("hello<|end|>").input_ids, tokenizer.encode("hello<|end|>").ids)
