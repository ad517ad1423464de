"""Index arithmetic of the three branches: which keys a query sees, in plain and in packed rows.

Every implementation and the reference take their indices from here, so a row that packs several sequences, a
chunked prefill and a decode step differ only in the numbers below. `nsa_torch_ref` derives the same maps on
its own.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from nsa_jax.array_typing import Array, Bool, Int, Int32
from nsa_jax.config import NSAConfig


class QueryLayout(NamedTuple):
    """Where each query stands. A query that sees nothing has position -1 and only empty ranges.

    Attributes:
      position: index of the query in its own sequence, -1 where it sees nothing.
      sequence_start: row index of the first token of its sequence.
      compression_start: index, among the row's compression blocks, of its sequence's first block.
    """

    position: Int32[Array, "B T"]
    sequence_start: Int32[Array, "B T"]
    compression_start: Int32[Array, "B T"]

    def window_range(self, config: NSAConfig) -> tuple[Int32[Array, "B T"], Int32[Array, "B T"]]:
        """First and one-past-last row index of the keys of the window branch: `max(0, t-w+1) .. t`."""
        end = self.position + 1
        start = jnp.maximum(end - config.window_size, 0)
        return self.sequence_start + start, self.sequence_start + end

    def compression_range(self, config: NSAConfig) -> tuple[Int32[Array, "B T"], Int32[Array, "B T"]]:
        """First and one-past-last index of the visible compression blocks: those with `i d + l - 1 <= t`."""
        visible = num_compression_blocks(self.position + 1, config)
        return self.compression_start, self.compression_start + visible


def num_compression_blocks[L: (int, jax.Array)](length: L, config: NSAConfig) -> L:
    """Number of complete compression blocks in a sequence of `length` tokens (int or integer array)."""
    count = (length - config.compression_block_size) // config.compression_stride + 1
    return max(count, 0) if isinstance(count, int) else jnp.maximum(count, 0)


def num_selection_blocks(length: int, config: NSAConfig) -> int:
    """Number of selection blocks in a sequence of `length` tokens, the last one possibly partial."""
    return -(-length // config.selection_block_size)


def max_selection_blocks(num_compressed: int, config: NSAConfig) -> int:
    """Selection blocks of the longest sequence that has `num_compressed` complete compression blocks."""
    longest = (num_compressed - 1) * config.compression_stride + config.compression_block_size
    return num_selection_blocks(longest + config.compression_stride - 1, config)


def overlap_weights(config: NSAConfig) -> tuple[tuple[int, int], ...]:
    """Weights of Eq. 9 as `(offset, weight)`: block `j` collects `weight * p_cmp[j * l'/d + offset]`.

    The weight is `|cmp_i intersect slc_j| / d`, the shared tokens in strides. For 32 / 16 / 64 the offsets
    -1 .. 3 weigh 1, 2, 2, 2, 1. Our reading of the equation, which as printed is shifted by a whole block.
    """
    strides_per_selection = config.selection_block_size // config.compression_stride
    strides_per_compression = config.compression_block_size // config.compression_stride
    return tuple(
        (offset, min(offset + strides_per_compression, strides_per_selection) - max(offset, 0))
        for offset in range(1 - strides_per_compression, strides_per_selection)
    )


def sequence_starts(segment_ids: Int[Array, "B S"]) -> Int32[Array, "B S"]:
    """Row index of the first token of the run of equal ids that each token belongs to."""
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    is_first = jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1] - 1) != 0
    return jax.lax.cummax(jnp.where(is_first, index, 0), axis=1)


def sequence_positions(segment_ids: Int[Array, "B S"]) -> Int32[Array, "B S"]:
    """Index of each token in its own sequence; counts inside runs of padding (id 0) too."""
    return jnp.arange(segment_ids.shape[1], dtype=jnp.int32) - sequence_starts(segment_ids)


def _blocks_ended(segment_ids: Int[Array, "B S"], config: NSAConfig) -> Int32[Array, "B S"]:
    """Number of compression blocks of the row that end at or before each token."""
    past_first = sequence_positions(segment_ids) - (config.compression_block_size - 1)
    ends = (past_first >= 0) & (past_first % config.compression_stride == 0) & (segment_ids != 0)
    return jnp.cumsum(ends, axis=1, dtype=jnp.int32)


def compression_block_starts(
    segment_ids: Int[Array, "B S"], config: NSAConfig
) -> tuple[Int32[Array, "B C"], Bool[Array, "B C"]]:
    """Row index of the first token of each compression block of a packed row, in sequence order.

    Returns:
      `(starts, exists)`: unused slots lie at the end of the row, with start 0 and `exists` False.
    """
    length = segment_ids.shape[1]
    ended = _blocks_ended(segment_ids, config)
    ordinal = jnp.arange(1, num_compression_blocks(length, config) + 1, dtype=jnp.int32)
    last = jax.vmap(lambda row: jnp.searchsorted(row, ordinal))(ended).astype(jnp.int32)
    exists = last < length
    return jnp.where(exists, last - (config.compression_block_size - 1), 0), exists


def query_layout(
    config: NSAConfig,
    query_positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B S"] | None = None,
) -> QueryLayout:
    """Places queries, given by the row index of their key (-1 = padding), in their sequences."""
    positions = query_positions.astype(jnp.int32)
    if segment_ids is None:
        zero = jnp.zeros_like(positions)
        return QueryLayout(jnp.maximum(positions, -1), zero, zero)
    safe = jnp.maximum(positions, 0)

    def at_query(per_token: Array) -> Array:
        return jnp.take_along_axis(per_token, safe, axis=1)

    start = at_query(sequence_starts(segment_ids))
    sees = (positions >= 0) & (at_query(segment_ids) != 0)
    ended_before = jnp.pad(_blocks_ended(segment_ids, config), ((0, 0), (1, 0)))
    compression_start = jnp.take_along_axis(ended_before, start, axis=1)
    return QueryLayout(jnp.where(sees, positions - start, -1), start, compression_start)


def default_query_positions(batch: int, num_queries: int, num_keys: int) -> Int32[Array, "B T"]:
    """The last `num_queries` of `num_keys` tokens: row indices `S - T .. S - 1`."""
    return jnp.broadcast_to(
        jnp.arange(num_keys - num_queries, num_keys, dtype=jnp.int32), (batch, num_queries)
    )


def is_forced(
    block: Int[Array, "*#shape"], position: Int[Array, "*#shape"], config: NSAConfig
) -> Bool[Array, "*shape"]:
    """Whether selection block `block` is initial or local to the query at sequence index `position`."""
    current = position // config.selection_block_size
    return (block < config.num_initial_blocks) | (block > current - config.num_local_blocks)
