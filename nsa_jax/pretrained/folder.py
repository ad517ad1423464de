"""Reads a folder of Hugging Face: `config.json`, safetensors in one file or several, `tokenizer.json`."""

import functools
import json
import pathlib
from typing import Any, NoReturn

import numpy as np

from nsa_jax.pretrained.extra import package
from nsa_jax.pretrained.source import FLOATS, Source, Stored

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
GENERATION, TOKENIZER_CONFIG = "generation_config.json", "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def read_folder(folder: pathlib.Path) -> Source:
    """Opens what a folder holds. Raises ValueError if something is missing or broken."""
    fields = read_config(folder)
    if (folder / WEIGHTS).exists():
        files = [folder / WEIGHTS]
    else:
        index = read_json(folder / INDEX).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
            raise ValueError(
                f"an index must map tensors to files, got no such weight_map in {str(folder / INDEX)!r}. "
                "Load a whole copy of the model."
            )
        files = [folder / name for name in sorted(set(index.values()))]
    tensors: dict[str, Stored] = {}
    for file in files:
        tensors |= _tensors(file)
    return Source(fields, tensors, _tokenizer(folder / TOKENIZER))


def read_config(folder: pathlib.Path) -> dict[str, Any]:
    """The fields of `config.json`. Raises ValueError if it is missing or broken."""
    return read_json(folder / CONFIG)


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """What a file of JSON holds. Raises ValueError if it is missing, broken or no dict."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"the folder of a model must hold {CONFIG} and {WEIGHTS} or {INDEX}, got no {file.name} in "
            f"{str(file.parent)!r}. Name the folder that has them."
        ) from None
    except (OSError, ValueError, RecursionError) as error:  # of the file, JSON or UTF-8
        broken(file, error)
    if not isinstance(values, dict):
        broken(file, f"a {type(values).__name__}")
    return values


def _tensors(file: pathlib.Path) -> dict[str, Stored]:
    safetensors = package("safetensors")
    try:
        opened = safetensors.safe_open(file, framework="numpy")
    except FileNotFoundError:
        broken(file, "no such file")
    except (safetensors.SafetensorError, OSError) as error:
        broken(file, error)
    found = {}
    for name in opened.keys():  # noqa: SIM118 (not a dict)
        part = opened.get_slice(name)
        if part.get_dtype() not in FLOATS:
            raise ValueError(
                f"tensors must be of a dtype among {FLOATS}, got {part.get_dtype()} of {name!r}. Load a copy "
                "that is not quantised."
            )
        found[name] = Stored(tuple(part.get_shape()), functools.partial(_read, file, opened, name))
    return found


def _read(file: pathlib.Path, opened: Any, name: str) -> list[np.ndarray]:
    try:
        return [opened.get_tensor(name)]
    except package("safetensors").SafetensorError as error:
        broken(file, error)


def _tokenizer(file: pathlib.Path) -> Any:
    if not file.exists():
        return None
    try:
        tokenizer = package("tokenizers").Tokenizer.from_file(str(file))
    except ImportError:
        raise
    except Exception as error:  # the package raises nothing more special
        broken(file, error)
    # The file may say how texts were cut and filled up in training. As in `transformers`, only a caller does.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def broken(file: pathlib.Path, found: object) -> NoReturn:
    """Raises the ValueError for a file that holds such a thing."""
    raise ValueError(
        f"the files of a model must be whole, got {str(found).splitlines()[0]!r} at {str(file)!r}. Load "
        "another copy of the model."
    ) from None
