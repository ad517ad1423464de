"""What every file format gives: fields of a configuration, and tensors that are read when asked."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

FLOATS = ("F16", "BF16", "F32", "F64")  # what parameters are stored as, by the names of safetensors


class Stored(NamedTuple):
    """A tensor in a file.

    Attributes:
      shape: its shape.
      read: reads it. The array may be a view of the file, and its dtype any floating one.
    """

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


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
