"""How a conversation becomes text, and which tokens end an answer: what others keep beside a model."""

import dataclasses
import functools
import json
import os
import pathlib
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from nsa_jax.pretrained.extra import package
from nsa_jax.pretrained.folder import CONFIG, GENERATION, TEMPLATE, TOKENIZER_CONFIG, broken, read_json
from nsa_jax.pretrained.gguf_file import read_metadata
from nsa_jax.pretrained.loading import found_source


@dataclasses.dataclass(frozen=True)
class ChatFormat:
    """What `load_chat_format` finds, and `save` writes.

    Attributes:
      template: the chat template, in Jinja; None if the source has none, as for models that only continue
        a text.
      end_tokens: ids of the tokens that end a text or an answer.
      special_tokens: special tokens by the names that a template uses, such as `bos_token`.
    """

    template: str | None = None
    end_tokens: tuple[int, ...] = ()
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def prompt(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of a conversation, up to where the next answer begins.

        It has its special tokens in it, so encode it with `add_special_tokens=False`.

        Args:
          messages: each with a `role`, such as "system", "user" and "assistant", and its `content`.

        Raises:
          ValueError: there is no template, or it takes no such conversation.
          ImportError: jinja2, of the extra `pretrained`, is not installed.
        """
        if self.template is None:
            raise ValueError(
                "a conversation needs a chat template, got a model without one. Use a model that was trained "
                "to answer, or continue a text."
            )
        sandbox = package("jinja2.sandbox")
        # All of this is as in `transformers`, for which templates are written. The tags that mark an answer,
        # for training, do nothing here.
        template = re.sub(r"{%(-?)\s*(?:end)?generation\s*(-?)%}", r"{%\1 set _ = 0 \2%}", self.template)
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals |= dict(raise_exception=_raise, strftime_now=time.strftime)
        environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
        try:
            return environment.from_string(template).render(
                messages=[dict(each) for each in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self.special_tokens,
            )
        except Exception as error:  # a template is a program
            told = str(error).rstrip(".") or type(error).__name__
            raise ValueError(
                f"the chat template must take these messages, got the error {told!r}. Use the roles that the "
                "model knows, each in its turn."
            ) from None


def load_chat_format(source: str | os.PathLike[str]) -> ChatFormat:
    """Finds the chat template, the special tokens and the end tokens of a model.

    Args:
      source: what `load` takes.

    Returns:
      The format; empty where the source says nothing.

    Raises:
      TypeError, ValueError, ImportError: as in `load`, for the files that it reads.

    Examples:
      >>> chat = load_chat_format("HuggingFaceTB/SmolLM2-135M-Instruct")
      >>> text = chat.prompt([dict(role="user", content="Who are you?")])
      >>> batcher.submit(tokenizer.encode(text, add_special_tokens=False).ids, eos_id=chat.end_tokens, ...)
    """
    path = found_source(source, [CONFIG, GENERATION, TOKENIZER_CONFIG, TEMPLATE])
    return _of_folder(path) if path.is_dir() else _of_gguf(path)


def files_of(chat: ChatFormat) -> dict[str, str]:
    """What `save` writes beside a model, by the names of the files."""
    fields: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **chat.special_tokens}
    if chat.template is not None:
        fields["chat_template"] = chat.template
    files = {TOKENIZER_CONFIG: fields}
    if chat.end_tokens:
        files[GENERATION] = {"eos_token_id": list(chat.end_tokens)}
    return {name: json.dumps(values, indent=2) + "\n" for name, values in files.items()}


def _of_folder(folder: pathlib.Path) -> ChatFormat:
    def optional(name: str) -> dict[str, Any]:
        return read_json(folder / name) if (folder / name).exists() else {}

    words, ends = optional(TOKENIZER_CONFIG), None
    for name in (GENERATION, CONFIG):
        ends = optional(name).get("eos_token_id") if ends is None else ends
    template = words.get("chat_template")
    if (folder / TEMPLATE).exists():
        try:
            template = (folder / TEMPLATE).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            broken(folder / TEMPLATE, error)
    if isinstance(template, list):  # several by name
        template = {each.get("name"): each.get("template") for each in template}.get("default")
    special = {}
    for name, word in words.items():
        word = word.get("content") if isinstance(word, dict) else word
        if name.endswith("_token") and isinstance(word, str):
            special[name] = word
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if not isinstance(template, str | None) or not all(isinstance(each, int) for each in ends):
        broken(folder, f"chat_template={template!r} and eos_token_id={ends}")
    return ChatFormat(template, tuple(ends), special)


def _of_gguf(file: pathlib.Path) -> ChatFormat:
    metadata = read_metadata(file)
    words, prefix = metadata.get("tokenizer.ggml.tokens", []), "tokenizer.ggml."
    ids = {name: metadata.get(f"{prefix}{name}_token_id") for name in ("bos", "eos", "eot")}
    known = {name: number for name, number in ids.items() if number is not None and number < len(words)}
    ends = dict.fromkeys(known[name] for name in ("eos", "eot") if name in known)
    special = {f"{name}_token": words[known[name]] for name in ("bos", "eos") if name in known}
    return ChatFormat(metadata.get("tokenizer.chat_template"), tuple(ends), special)


def _raise(message: str) -> None:
    raise package("jinja2").TemplateError(message)
