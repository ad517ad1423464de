"""The sizes that a program of `generate` is compiled for: calls of many sizes share each of them."""

SMALLEST = 64
STEPS = 8  # from one power of two to the next

# Prompt tokens of all rows together that are prefilled at once: they bound the memory beside the cache, and
# keep a GPU busy.
PREFILL_TOKENS = 8192
FEWEST_OF_A_ROW = 512


def bucketed(count: int) -> int:
    """The least bucket that holds `count`: at most an eighth more, or a multiple of 64."""
    power = 1 << (count - 1).bit_length()  # the least one that holds `count`
    step = max(SMALLEST, power // (2 * STEPS))
    return -(-count // step) * step


def prefill_chunk(batch: int, width: int) -> int:
    """Tokens of a row to prefill at once: all of them, or equal parts, so that the last one is full too."""
    most = max(PREFILL_TOKENS // batch, FEWEST_OF_A_ROW)
    return -(-width // -(-width // most))
