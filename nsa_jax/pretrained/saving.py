"""Saves a model as safetensors: a dense one under the names of Hugging Face, one of NSA under ours."""

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from nsa_jax.model import Transformer
from nsa_jax.model.abstract import parameters
from nsa_jax.model.restorable import check_model
from nsa_jax.model.stored_config import config_as_plain
from nsa_jax.option_checks import check_int
from nsa_jax.pretrained.chat_format import ChatFormat, files_of
from nsa_jax.pretrained.extra import package
from nsa_jax.pretrained.families import write_fields
from nsa_jax.pretrained.folder import CONFIG, INDEX, TOKENIZER, WEIGHTS
from nsa_jax.pretrained.loading import NATIVE, NATIVE_CONFIG
from nsa_jax.pretrained.names import Place, places


def save(
    model: Transformer,
    folder: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    chat_format: ChatFormat | None = None,
    fields: Mapping[str, Any] | None = None,
    file_bytes: int = 5 * 2**30,
) -> None:
    """Saves a model so that `load` reads it back.

    A model of dense and window layers is written as one of its family, and `transformers` loads it. A model
    with NSA layers is written under our names, with our configuration. `nsa_jax.model.save` also keeps what a
    training run needs to resume, and checksums.

    Args:
      model: the model.
      folder: where to write; created if it does not exist. It must not hold a model yet.
      tokenizer: a `tokenizers.Tokenizer` to write beside it.
      chat_format: chat template, special and end tokens to write beside it, of `load_chat_format`.
      fields: more fields of `config.json` for other programs, such as
        `dict(max_position_embeddings=8192, eos_token_id=2)`.
      file_bytes: most bytes of tensors in a file; more than that are written to several.

    Raises:
      TypeError: an argument is of the wrong kind, the configuration of `model` holds a function, or `fields`
        cannot be written as JSON.
      ValueError: `folder` is a file or holds a model; a dense model has options that no family has; or
        `fields` has one that the configuration says.
      OSError: the files cannot be written, for example because the disk is full.
      ImportError: a package of the extra `pretrained` is not installed.

    Examples:
      >>> save(dense, "smollm2", tokenizer=tokenizer, fields=dict(max_position_embeddings=8192))
      >>> AutoModelForCausalLM.from_pretrained("smollm2")  # of transformers
    """
    check_model(model)
    check_int(low=1, high=2**62, file_bytes=file_bytes)
    if not isinstance(chat_format, ChatFormat | None):
        raise TypeError(
            f"chat_format must be a ChatFormat, got {type(chat_format).__name__}. Call load_chat_format."
        )
    if tokenizer is not None and not callable(getattr(tokenizer, "save", None)):
        raise TypeError(
            f"tokenizer must have a method save(path), got {type(tokenizer).__name__}. Pass a "
            "tokenizers.Tokenizer, or leave it out."
        )
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"folder must be a str or os.PathLike, got {type(folder).__name__}. Name a folder.")
    if not isinstance(fields, Mapping | None):
        raise TypeError(f"fields must be a mapping, got {type(fields).__name__}. Pass a dict.")
    folder = pathlib.Path(folder)
    if folder.is_file() or any(folder.glob("*.safetensors")) or (folder / CONFIG).exists():
        raise ValueError(
            f"folder must be new, or hold no model, got {str(folder)!r}. Name another one, or delete that."
        )
    arrays = parameters(model)
    if any(each.attention == "nsa" for each in model.config.per_layer):
        told: dict[str, Any] = {"model_type": NATIVE, NATIVE_CONFIG: config_as_plain(model.config)}
        where = {name: Place(name, value.shape, value.shape) for name, value in arrays.items()}
    else:
        told, where = write_fields(model.config), places(model.config)
    if given := [name for name in fields or () if name in told]:
        raise ValueError(
            f"fields must be others than the configuration has, got {given[0]!r}. Leave it out, or build the "
            "model with another one."
        )
    text = _json(told | dict(fields or {}))
    write = package("safetensors.numpy").save_file
    parts = list(_parts(arrays, file_bytes))
    files = [WEIGHTS] if len(parts) == 1 else [_numbered(number, len(parts)) for number in range(len(parts))]
    with _as_os_error(folder, OSError, package("safetensors").SafetensorError):
        folder.mkdir(parents=True, exist_ok=True)
        index: dict[str, str] = {}
        total = 0
        for file, names in zip(files, parts, strict=True):
            tensors = {where[name].name: _stored(where[name], arrays[name]) for name in names}
            write(tensors, folder / file, metadata={"format": "pt"})  # `transformers` wants to read it
            index |= dict.fromkeys(tensors, file)
            total += sum(tensor.nbytes for tensor in tensors.values())
        if len(files) > 1:
            values = dict(metadata=dict(total_size=total), weight_map=index)
            (folder / INDEX).write_text(_json(values), encoding="utf-8")
    if tokenizer is not None:
        with _as_os_error(folder, Exception):  # the package raises nothing more special
            tokenizer.save(str(folder / TOKENIZER))
    with _as_os_error(folder, OSError):
        for name, content in ({} if chat_format is None else files_of(chat_format)).items():
            (folder / name).write_text(content, encoding="utf-8")
        # Last, because a folder without it is no model.
        (folder / CONFIG).write_text(text, encoding="utf-8")
        for file in files:  # which safetensors keeps from all but their owner
            shutil.copymode(folder / CONFIG, folder / file)


@contextlib.contextmanager
def _as_os_error(folder: pathlib.Path, *errors: type[Exception]) -> Iterator[None]:
    """Turns these errors of the block into an OSError that names the folder."""
    try:
        yield
    except errors as error:
        told = (str(error) or type(error).__name__).splitlines()[0]
        raise OSError(
            f"folder must take a whole model, got {told!r} at {str(folder)!r}. Make room or name another one."
        ) from None


def _json(values: Mapping[str, Any]) -> str:
    try:
        return json.dumps(values, indent=2) + "\n"
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"fields must be plain data, got something else: {error}. Convert it to numbers and strings."
        ) from None


def _parts(arrays: Mapping[str, Any], file_bytes: int) -> Iterator[list[str]]:
    """Names of the parameters of each file, in their order."""
    names: list[str] = []
    held = 0
    for name, value in arrays.items():
        if names and held + value.nbytes > file_bytes:
            yield names
            names, held = [], 0
        names.append(name)
        held += value.nbytes
    yield names


def _numbered(number: int, of: int) -> str:
    return WEIGHTS.replace(".", f"-{number + 1:05}-of-{of:05}.")


def _stored(place: Place, array: Any) -> np.ndarray:
    return np.ascontiguousarray(place.stored(np.asarray(array)))
