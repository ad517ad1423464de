"""The files of a text, and the documents in them."""

import hashlib
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from nsa_jax.adopt.command_line import InputError
from nsa_jax.generate.text import lone_surrogate


def parts(path: pathlib.Path) -> list[pathlib.Path]:
    """The file, or all files of a folder in a fixed order."""
    return sorted(part for part in path.rglob("*") if part.is_file()) if path.is_dir() else [path]


def digests(paths: Sequence[pathlib.Path]) -> list[list[str]]:
    """Name and SHA-256 of each file; of a folder, the SHA-256 of its files' digests in order.

    Raises:
      InputError: one cannot be read.
    """
    found = []
    for path in paths:
        try:
            each = [_digest(part) for part in parts(path)]
        except OSError as error:
            raise InputError(
                f"--text must be files that can be read, got {str(path)!r} ({error.strerror}). Check "
                "the path."
            ) from error
        whole = hashlib.sha256(b"".join(each)).digest() if path.is_dir() else each[0]
        found.append([path.name, whole.hex()])
    return found


def _digest(path: pathlib.Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def documents(path: pathlib.Path, field: str) -> Iterator[str]:
    """The documents that are not blank.

    A file that ends in `.jsonl` or `.ndjson` has a document in each line, under `field`, and a folder is a
    dataset of Hugging Face with such a column. Any other file is a document.

    Raises:
      InputError: it cannot be read as such.
    """
    try:
        for text in _texts(path, field):
            if text.strip():
                yield text
    except UnicodeDecodeError as error:
        raise InputError(
            f"--text must be files of UTF-8, got {path.name!r} ({error.reason}). Convert it."
        ) from error


def _texts(path: pathlib.Path, field: str) -> Iterator[str]:
    if path.is_dir():
        for number, row in enumerate(_dataset(path, field)):
            yield _checked(row[field], f"row {number}", path, field)
        return
    with path.open(encoding="utf-8-sig") as file:  # a byte order mark is no text
        if path.suffix.lower() not in (".jsonl", ".ndjson"):
            yield file.read()
            return
        for number, line in enumerate(file):
            if line.strip():
                yield _checked(_of_line(line, field), f"line {number + 1}", path, field)


def _of_line(line: str, field: str) -> Any:
    try:
        return json.loads(line)[field]
    except (ValueError, KeyError, TypeError, RecursionError):  # the last for lists a thousand deep
        return None


def _checked(text: Any, place: str, path: pathlib.Path, field: str) -> str:
    if not isinstance(text, str):
        raise InputError(
            f"a document must be a string in the field {field!r}, got another in {place} of {path.name!r}. "
            "Name its field by --field, or leave it out."
        )
    if found := lone_surrogate(text):
        raise InputError(
            f"a document must be Unicode, got {found} in {place} of {path.name!r}. Leave it out, or correct "
            "it."
        )
    return text


def _dataset(path: pathlib.Path, field: str) -> Any:
    """Rows with this field, read lazily."""
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            f"a folder of text needs the package datasets, got {path.name!r} and {error}. Install it with: "
            "pip install datasets."
        ) from error
    try:
        found = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise InputError(
            f"a folder of text must be what Dataset.save_to_disk wrote, got {path.name!r} "
            f"({' '.join(str(error).split()).rstrip('.')}). Pass that, or files."
        ) from error
    if isinstance(found, datasets.DatasetDict):
        raise InputError(
            f"a folder of text must be one dataset, got {path.name!r} with {', '.join(found)}. Pass the "
            "folders in it."
        )
    if field not in found.column_names:
        raise InputError(
            f"a dataset must have the column {field!r}, got {', '.join(found.column_names)} in "
            f"{path.name!r}. Name another by --field."
        )
    return found.select_columns(field)
