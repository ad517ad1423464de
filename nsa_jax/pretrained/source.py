"""What every file format gives: fields of a configuration, and tensors that are read when asked."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

FLOATS = ("F16", "BF16", "F32", "F64")  # what parameters are stored as, by the names of safetensors


class Stored(NamedTuple):
    """A tensor in a file.

    Attributes:
      shape: its shape.
      parts: reads it, whole or some rows after the others. The arrays may be views of the file, and their
        dtype any floating one.
    """

    shape: tuple[int, ...]
    parts: Callable[[], Iterable[np.ndarray]]


class Source(NamedTuple):
    """A model in files. Its names are those of Hugging Face, whatever the format.

    Attributes:
      fields: of `config.json`.
      tensors: by their names.
      tokenizer: a `tokenizers.Tokenizer`, or None.
    """

    fields: Mapping[str, Any]
    tensors: Mapping[str, Stored]
    tokenizer: Any
