"""The sizes for which programs of generation are compiled. Calls of similar sizes share a program."""

import jax
import jax.numpy as jnp
import numpy as np

from nsa_jax.array_typing import Array

SMALLEST = 64
STEPS = 8  # number of buckets from one power of two to the next

# Number of prompt tokens, of all rows together, that are prefilled at once. It bounds the memory needed in
# addition to the cache, and is large enough to keep a GPU busy.
PREFILL_TOKENS = 8192
FEWEST_OF_A_ROW = 512
TOKENS_OF_A_CALL = 1024  # about so many are read in the time that one more call costs: 3 ms on an H100


def bucketed(count: int) -> int:
    """The smallest bucket that holds `count`: the next multiple of 64, or at most an eighth more."""
    power = 1 << (count - 1).bit_length()  # the smallest power of two that holds `count`
    step = max(SMALLEST, power // (2 * STEPS))
    return -(-count // step) * step


def default_chunk(batch: int, width: int) -> int:
    """Number of tokens per row to prefill at once: all or equal chunks, so that the last one is full, too."""
    most = max(PREFILL_TOKENS // batch, FEWEST_OF_A_ROW)
    return -(-width // -(-width // most))


def parts(length: int, most: int) -> list[int]:
    """Sizes of the parts in which a row's tokens are read: powers of two, so that few programs are needed.

    The last tokens are read in fewer parts, or with less room behind them, whatever costs less.
    """
    largest = 1 << (most.bit_length() - 1)
    number, left = divmod(length, largest)
    sizes = [largest] * number
    while left > 0:
        size = min(max(1 << (left - 1).bit_length(), SMALLEST), largest)
        sizes.append(size if size - left <= TOKENS_OF_A_CALL else size // 2)
        left -= sizes[-1]
    return sizes


def width(num_tokens: int, max_length: int | None) -> int:
    """The bucket of prompts of `num_tokens`, no wider than prompts and cache require."""
    most = bucketed(num_tokens)
    return most if max_length is None else min(most, max(num_tokens, int(max_length)))


def chunk(batch: int, width: int, given: int | None) -> int:
    """Number of tokens per row to prefill at once, as `given` or by default."""
    return int(min(given or default_chunk(batch, width), width))


def widened(tokens: Array | np.ndarray, width: int) -> Array | np.ndarray:
    """Pads token ids with zeros on the right. NumPy arrays stay on the host and need no program."""
    pad = jnp.pad if isinstance(tokens, jax.Array) else np.pad
    return pad(tokens, ((0, 0), (0, width - tokens.shape[1])))
