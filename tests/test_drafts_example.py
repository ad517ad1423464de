"""`python -m examples.drafts`: what its rows say, and what it refuses."""

import json

import pytest
from messages import has_form
from pretrained_files import fields_of, tensors_of, write_folder

pytest.importorskip("safetensors", reason="models of others need the extra `pretrained`")
pytest.importorskip("tokenizers", reason="models of others need the extra `pretrained`")
pytest.importorskip("optax", reason="adopt needs the extra `train`")

import tokenizers

from examples import drafts

SIZES = ["--dtype=float32", "--rows", "2", "--drafts", "3", "--context=16", "--new-tokens=12", "--samples=1"]


@pytest.fixture
def run(tmp_path, capsys):
    fields = fields_of("llama", vocab_size=256, num_hidden_layers=1)
    folder = write_folder(tmp_path / "small", fields, tensors_of(fields))
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    text, results = tmp_path / "text.jsonl", tmp_path / "rows.jsonl"
    text.write_text("".join(json.dumps({"text": word * 9}) + "\n" for word in ("dense", "ab", "sparse")))

    def call(*arguments):
        given = [folder, "--text", text, "--results", results, *SIZES, *arguments]
        code = drafts.main(list(map(str, given)))
        return code, results.read_text().splitlines() if results.exists() else [], capsys.readouterr().err

    return call


def test_rows_compare_drafts_with_none_for_both_kinds_of_text(run):
    code, lines, _ = run()

    found = [json.loads(line) for line in lines]
    assert code == 0
    assert [(row["text"], row["drafts"]) for row in found] == [
        (kind, number) for kind in drafts.KINDS for number in (0, 3)
    ]
    for plain, drafted in zip(found[::2], found[1::2], strict=True):
        assert plain["steps"] >= drafted["steps"] >= 3  # a step brings at most four tokens
        assert drafted["same_tokens"] == [12, 12]
        assert drafted["times_as_fast"] == pytest.approx(plain["ms"] / drafted["ms"], rel=0.01)
        assert (plain["times_as_fast"], plain["rows"], plain["model"]) == (1, 2, "small")


def test_too_little_text_and_no_tokenizer_are_refused(run, tmp_path):
    short = run("--context=50")
    (tmp_path / "small" / "tokenizer.json").unlink()
    unknown = run()

    rules = (
        "--text must hold enough documents, got 1 of 2 with 50 tokens",
        "MODEL must have a tokenizer, got ",
    )
    for (code, lines, told), rule in zip((short, unknown), rules, strict=True):
        assert (code, lines) == (2, [])
        assert told.startswith(f"examples.drafts: {rule}")
        assert has_form(told.strip())
