"""Real text as bytes: where it comes from, what is held out, in which order it is read; and its baseline.

The baseline is a bigram: each byte predicted from the byte before it.
"""

import dataclasses
import functools
import hashlib
import pathlib
import platform

import numpy as np

from benchmarks.command_line import InputError
from examples.train_lm.settings import BYTES

HELD_OUT_SHARE = 0.1
PRIOR_STRENGTHS = (0.1, 1.0, 10.0, 100.0, 1000.0)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A text in two parts that do not overlap: its first nine tenths train, its last tenth is held out."""

    name: str
    sha256: str
    training: np.ndarray  # uint8
    held_out: np.ndarray  # uint8

    def batch(self, step: int, *, batch: int, length: int, seed: int) -> np.ndarray:
        """Sequences of `length + 1` bytes for one step, a pure function of its arguments.

        An epoch cuts the training text into sequences from a random offset on and reads them in random order.
        """
        per_epoch = max((len(self.training) - 1) // length - 1, 1)
        rows = []
        for number in range(step * batch, (step + 1) * batch):
            epoch, place = divmod(number, per_epoch)
            start = _epoch_starts(len(self.training), per_epoch, length, seed, epoch)[place]
            rows.append(self.training[start : start + length + 1])
        return np.stack(rows).astype(np.int32)

    def held_out_rows(self, length: int) -> np.ndarray:
        """All whole sequences of the held-out text, `length + 1` bytes each; every byte is predicted once."""
        starts = np.arange((len(self.held_out) - 1) // length) * length
        return self.held_out[starts[:, None] + np.arange(length + 1)].astype(np.int32)


@functools.lru_cache(maxsize=2)
def _epoch_starts(size: int, per_epoch: int, length: int, seed: int, epoch: int) -> np.ndarray:
    rng = np.random.default_rng([seed, epoch])
    offset = rng.integers(size - per_epoch * length)
    return offset + length * rng.permutation(per_epoch)


def load(path: pathlib.Path | None, length: int) -> Corpus:
    """The text of a file, or by default the documentation of the Python language.

    Args:
      path: a UTF-8 file; None for `pydoc_data.topics`, which every CPython ships.
      length: bytes of a sequence, one of which each part must hold.

    Raises:
      InputError: the file cannot be read, is empty, no text, or too short.
    """
    name, text = _python_topics() if path is None else (path.name, _read(path))
    content = text.encode()
    if not content:
        raise InputError(
            f"--data must be a file with text in it, got {str(path)!r} of 0 bytes. Pass another file."
        )
    cut = len(content) - int(len(content) * HELD_OUT_SHARE)
    if len(content) - cut <= length:
        least = int((length + 1) / HELD_OUT_SHARE) + 1
        raise InputError(
            f"--data must be long enough to hold out one sequence of --length {length}, got {len(content)} "
            f"bytes. Pass a text of at least {least} bytes, or a shorter --length."
        )
    array = np.frombuffer(content, np.uint8)
    return Corpus(name, hashlib.sha256(content).hexdigest(), array[:cut], array[cut:])


def bigram_bits_per_byte(training: np.ndarray, held_out: np.ndarray) -> float:
    """Cross entropy of `held_out` after its first byte, under counts of `training`.

    `p(b | a) = (count(ab) + s p(b)) / (count(a) + s)`, smoothed towards byte frequencies (add-one). The prior
    strength `s` is the best of a few on the held-out text itself, which can only favour the baseline.
    """
    pairs = training[:-1].astype(np.int64) * BYTES + training[1:]
    counts = np.bincount(pairs, minlength=BYTES**2).reshape(BYTES, BYTES)
    frequency = (np.bincount(training, minlength=BYTES) + 1) / (len(training) + BYTES)
    losses = []
    for strength in PRIOR_STRENGTHS:
        probability = (counts + strength * frequency) / (counts.sum(1, keepdims=True) + strength)
        losses.append(-np.log2(probability[held_out[:-1], held_out[1:]]).mean())
    return float(min(losses))


def _read(path: pathlib.Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"--data must be a file that can be read, got {str(path)!r} ({error.strerror}). Check the path."
        ) from error
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"--data must be UTF-8 text, got {str(path)!r} with byte 0x{content[error.start]:02x} at offset "
            f"{error.start}. Convert it, for example with iconv."
        ) from error
    if "\0" in text:
        raise InputError(
            f"--data must be text, got {str(path)!r} with a NUL at offset {content.index(0)}. "
            "Pass no binary file."
        )
    return text


def _python_topics() -> tuple[str, str]:
    """The documentation's topics in alphabetical order, each paragraph once.

    Topics contain one another whole. A paragraph that came before is left out, as it would otherwise stand in
    the training part and in the held-out part.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise InputError(
            f"the default text needs the module pydoc_data, got {error}. Pass a file with --data."
        ) from error
    seen: set[str] = set()
    paragraphs = []
    for topic in sorted(topics):
        for paragraph in topics[topic].split("\n\n"):
            if paragraph.strip() and paragraph.strip() not in seen:
                seen.add(paragraph.strip())
                paragraphs.append(paragraph.strip("\n"))
    return f"pydoc_data.topics of Python {platform.python_version()}", "\n\n".join(paragraphs)
