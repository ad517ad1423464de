"""The sizes for which programs of `generate` are compiled. Calls of similar sizes share a program."""

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


def prefill_chunk(batch: int, width: int) -> int:
    """Number of tokens per row to prefill at once: all or equal parts, so that the last one is full, too."""
    most = max(PREFILL_TOKENS // batch, FEWEST_OF_A_ROW)
    return -(-width // -(-width // most))
