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


def bucketed(count: int) -> int:
    """The smallest bucket that holds `count`: the next multiple of 64, or at most an eighth more."""
    power = 1 << (count - 1).bit_length()  # the smallest power of two that holds `count`
    step = max(SMALLEST, power // (2 * STEPS))
    return -(-count // step) * step


def default_chunk(batch: int, width: int) -> int:
    """Number of tokens per row to prefill at once: all or equal chunks, so that the last one is full, too."""
    most = max(PREFILL_TOKENS // batch, FEWEST_OF_A_ROW)
    return -(-width // -(-width // most))


def equal_part(length: int, most: int) -> int:
    """Number of tokens of equal parts of `length`, as few as possible: with one more, each fills a bucket.

    That is the token which may be pending before a part. Buckets are those of at most `most`.
    """
    number = max(-(-length // (most - 1)), 1)
    return min(bucketed(-(-length // number) + 1), most) - 1


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
