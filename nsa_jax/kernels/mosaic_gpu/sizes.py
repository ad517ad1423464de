"""Sizes of the kernels' tiles and pipelines. Does not import Pallas."""

from typing import NamedTuple

SHARED_BYTES = 227 * 1024  # that one program may have on Hopper
CONSUMERS = 2  # warpgroups that compute; one more loads
ROWS = 64  # rows of a warpgroup: the height of a wgmma
MOST_KEYS = 64  # keys of a step of d_query
MOST_HEADS = 16  # query heads of a KV head
FEWEST_ROWS = 4  # of a query token: then the members of a warpgroup fit into 16 bits
MOST_STAGES = 8
BARRIER_BYTES = 1024  # all that a kernel holds beside what is counted
FEWEST_GATHERED = 8  # rows of a token that is copied alone: a tile in shared memory is 8 rows high
_MOST_MATRIX_REGISTERS = 192  # of a thread: with more in matrices, the compiler spills
FORWARD_KEYS = 128  # of a step of the forward
FEWEST_FORWARD_KEYS = 3 * FORWARD_KEYS  # fewer than 511 were not measured
DIMS = ((64, 64), (128, 128), (192, 128))  # of keys and values
RANGE_DIMS = (128, 128)  # where forward and key gradients of ranges are faster than Triton's
REGISTERS = (240, 24)  # a thread of a consumer, and of the producer


class StepSizes(NamedTuple):
    """Sizes of a kernel that holds queries while keys pass by.

    Attributes:
      keys: keys of a step.
      box: keys that a copy takes for a step. A box begins at a multiple of 8, and a product sums over 16 keys
        at a time. So a block that begins elsewhere takes a box of 16 keys more.
      stages: steps whose keys and values fit into the pipeline.
      query_in_registers: whether products read the queries from registers, and not from shared memory.
    """

    keys: int
    box: int
    stages: int
    query_in_registers: bool


def padded_rows(heads_per_kv_head: int) -> int:
    """Rows of a query token: its heads of a KV head, as a power of two."""
    return max(FEWEST_ROWS, 1 << (heads_per_kv_head - 1).bit_length())


def gathered_rows(heads_per_kv_head: int) -> int:
    """Rows of a query token that is copied alone."""
    return max(FEWEST_GATHERED, padded_rows(heads_per_kv_head))


def row_numbers(of_token: int, gated: bool) -> int:
    """Float32 numbers of a token, 2 or 3 a row: whole lines of 128 bytes, as copies want."""
    return -(-(2 + gated) * of_token // 32) * 32


def tile_tokens(heads_per_kv_head: int) -> int:
    """Query tokens of a tile, all consumers together."""
    return CONSUMERS * ROWS // padded_rows(heads_per_kv_head)


def gradient_sizes(key_dim: int, value_dim: int, block_size: int, *, aligned: bool) -> StepSizes:
    """Sizes of the gradient of the queries; the pipeline takes what queries and cotangents leave."""
    keys = min(block_size, MOST_KEYS)
    box = keys if aligned else keys + 16
    held = CONSUMERS * ROWS * 2 * (key_dim + value_dim)
    stages = (SHARED_BYTES - BARRIER_BYTES - held) // (box * 2 * (key_dim + value_dim))
    registers = key_dim // 2 + box + (key_dim + value_dim) // 4  # gradient, products, operands
    in_registers = key_dim == value_dim and registers <= _MOST_MATRIX_REGISTERS
    return StepSizes(keys, box, min(stages, MOST_STAGES), in_registers)


def forward_sizes(key_dim: int, value_dim: int) -> StepSizes:
    """Sizes of the forward of a range; the pipeline takes what queries and outputs leave."""
    held = CONSUMERS * ROWS * 2 * (key_dim + value_dim)
    stages = (SHARED_BYTES - BARRIER_BYTES - held) // (FORWARD_KEYS * 2 * (key_dim + value_dim))
    return StepSizes(FORWARD_KEYS, FORWARD_KEYS, min(stages, MOST_STAGES), query_in_registers=True)


class KeySizes(NamedTuple):
    """Sizes of the gradients of keys and values.

    Attributes:
      of_token: rows of a query token.
      tokens: query tokens of a step.
      numbers: float32 numbers of a token, such as its log-sum-exps.
      stages: steps whose rows fit into the pipeline; even, so that each place always has the same reader.
    """

    of_token: int
    tokens: int
    numbers: int
    stages: int

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return self.of_token * self.tokens


def key_sizes(
    key_dim: int, value_dim: int, heads_per_kv_head: int, *, gated: bool, query_parts: bool
) -> KeySizes:
    """Sizes of the gradients of keys and values; the pipeline takes what keys leave of the shared memory."""
    of_token = gathered_rows(heads_per_kv_head)
    rows = ROWS if key_dim + value_dim <= 256 else ROWS // 2  # more than that does not fit into the registers
    numbers = row_numbers(of_token, gated)
    held = 2 * ROWS * (key_dim + value_dim)
    if query_parts:
        held += CONSUMERS * 2 * rows * (ROWS + key_dim)
    step = 2 * rows * (key_dim + value_dim) + 4 * numbers * rows // of_token
    stages = min((SHARED_BYTES - BARRIER_BYTES - held) // step, MOST_STAGES)
    return KeySizes(of_token, rows // of_token, numbers, stages // 2 * 2)
