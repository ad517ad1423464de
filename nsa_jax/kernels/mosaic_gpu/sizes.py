"""Sizes of the kernels' tiles and rings. Does not import Pallas."""

from typing import NamedTuple

SHARED_BYTES = 227 * 1024  # that one program may have on Hopper
CONSUMERS = 2  # warpgroups that compute, unless sizes say otherwise; one more loads
ROWS = 64  # rows of a warpgroup: the height of a wgmma
MOST_KEYS = 64  # keys of a step
FEWEST_HEADS = 4  # a token has at least so many rows: then the members of a warpgroup fit into 16 bits
MOST_STAGES = 8
_RESERVE = 3 * 1024  # lists and barriers
DIMS = ((64, 64), (128, 128), (192, 128))  # of keys and values
REGISTERS = {2: (240, 24), 3: (160, 24)}  # by consumers: of a thread of a consumer, and of the producer


class ForwardSizes(NamedTuple):
    """Sizes of the forward.

    Attributes:
      keys: keys of a step.
      box: keys that a copy takes for a step. A box begins at a multiple of 8, and a product sums over 32 keys
        at a time. So a block that begins elsewhere takes a box of 32 keys more.
      stages: steps whose keys and values fit into the ring.
      consumers: warpgroups that compute.
      query_buffers: tiles of queries that shared memory holds.
      own_output: whether outputs leave through a buffer of their own, not through that of the queries.
    """

    keys: int
    box: int
    stages: int
    consumers: int
    query_buffers: int
    own_output: bool


def padded_rows(heads_per_kv_head: int) -> int:
    """Rows of a query token: its heads of a KV head, as a power of two."""
    return max(FEWEST_HEADS, 1 << (heads_per_kv_head - 1).bit_length())


def tile_tokens(heads_per_kv_head: int, consumers: int = CONSUMERS) -> int:
    """Query tokens of a tile, all consumers together."""
    return consumers * ROWS // padded_rows(heads_per_kv_head)


def forward_sizes(key_dim: int, value_dim: int, block_size: int, *, aligned: bool, consumers: int = CONSUMERS) -> ForwardSizes:
    """Sizes of the forward; the ring takes what the queries leave of the shared memory."""
    keys = min(block_size, MOST_KEYS)
    box = keys if aligned else keys + 32
    own_output = key_dim != value_dim
    buffers = 1 if own_output or consumers > 2 else 2
    held = consumers * ROWS * 2 * (buffers * key_dim + own_output * value_dim)
    stages = (SHARED_BYTES - _RESERVE - held) // (box * 2 * (key_dim + value_dim))
    return ForwardSizes(keys, box, min(stages, MOST_STAGES), consumers, buffers, own_output)
