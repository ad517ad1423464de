"""Builds the tokenizer that a GGUF file describes, where that is byte-level BPE (`gpt2`)."""

import warnings
from collections.abc import Mapping
from typing import Any

from nsa_jax.pretrained.extra import package

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# How text is cut into words before BPE, by `tokenizer.ggml.pre`: a pattern, or GPT-2's own.
_PATTERNS = {"llama-bpe": _WORDS + r"\p{N}{1,3}" + _REST, "qwen2": _WORDS + r"\p{N}" + _REST}
_GPT2 = ("gpt-2", "smollm")
_CONTROL, _USER = 3, 4  # kinds of tokens


def read_tokenizer(metadata: Mapping[str, Any]) -> Any:
    """The tokenizer as a `tokenizers.Tokenizer`, or None if it cannot be built faithfully.

    Warns:
      UserWarning: there is a tokenizer, and it is of a kind that is not built here.
    """
    of = {
        name.removeprefix("tokenizer.ggml."): value
        for name, value in metadata.items()
        if name.startswith("tokenizer.ggml.")
    }
    if "tokens" not in of:
        return None
    kind, pre = of.get("model"), of.get("pre")
    if kind != "gpt2" or pre not in (*_PATTERNS, *_GPT2) or "merges" not in of:
        warnings.warn(
            f"the tokenizer of a GGUF file must be byte-level BPE cut as one of {(*_PATTERNS, *_GPT2)}, got "
            f"model={kind!r} and pre={pre!r}. Load the one of the original model, by "
            "tokenizers.Tokenizer.from_file or from_pretrained; here it is None.",
            stacklevel=4,
        )
        return None
    tokenizers = package("tokenizers")
    tokens, merges = of["tokens"], [tuple(pair.split(" ")) for pair in of["merges"]]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={token: number for number, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=pre == "llama-bpe",
        )
    )
    tokenizer.pre_tokenizer = _cut(tokenizers, pre)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = tokenizers.normalizers.NFC()
    for number, token_kind in enumerate(of.get("token_type", ())):
        if token_kind in (_CONTROL, _USER):
            added = tokenizers.AddedToken(tokens[number], special=token_kind == _CONTROL, normalized=False)
            add = tokenizer.add_special_tokens if token_kind == _CONTROL else tokenizer.add_tokens
            add([added])
    if of.get("add_bos_token", pre == "llama-bpe") and "bos_token_id" in of:
        bos = tokens[of["bos_token_id"]]
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, of["bos_token_id"])]
        )
    return tokenizer


def _cut(tokenizers: Any, pre: str) -> Any:
    of = tokenizers.pre_tokenizers
    if pre == "gpt-2":
        return of.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        return of.Sequence([of.Digits(individual_digits=True), of.ByteLevel(add_prefix_space=False)])
    split = of.Split(tokenizers.Regex(_PATTERNS[pre]), behavior="isolated")
    return of.Sequence([split, of.ByteLevel(add_prefix_space=False, use_regex=False)])
