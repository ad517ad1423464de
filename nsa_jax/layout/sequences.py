"""The sequences of a packed row: where each begins, and where its compression blocks are."""

import jax
import jax.numpy as jnp

from nsa_jax.array_typing import Array, Bool, Int, Int32
from nsa_jax.config import NSAConfig
from nsa_jax.layout.blocks import num_compression_blocks


def sequence_starts(segment_ids: Int[Array, "B S"]) -> Int32[Array, "B S"]:
    """For each token, the row index of the first token of its run of equal ids."""
    index = _row_index(segment_ids)
    # Comparing neighbours is safe for narrow unsigned ids, whose differences would wrap.
    is_first = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return jax.lax.cummax(jnp.where(is_first, index, 0), axis=1)


def sequence_positions(segment_ids: Int[Array, "B S"]) -> Int32[Array, "B S"]:
    """Index of each token in its own sequence. Runs of padding (id 0) are counted like sequences."""
    return _row_index(segment_ids) - sequence_starts(segment_ids)


def blocks_ended(segment_ids: Int[Array, "B S"], config: NSAConfig) -> Int32[Array, "B S"]:
    """For each token, the number of compression blocks of the row that end at or before it."""
    past_first = sequence_positions(segment_ids) - (config.compression_block_size - 1)
    ends = (past_first >= 0) & (past_first % config.compression_stride == 0) & (segment_ids != 0)
    return jnp.cumsum(ends, axis=1, dtype=jnp.int32)


def compression_block_starts(
    segment_ids: Int[Array, "B S"], config: NSAConfig
) -> tuple[Int32[Array, "B C"], Bool[Array, "B C"]]:
    """Row index of the first token of each compression block of a packed row, in sequence order.

    Returns:
      `(starts, exists)`. Unused slots are at the end of the row; their start is 0 and `exists` is False.
    """
    length = segment_ids.shape[1]
    ended = blocks_ended(segment_ids, config)
    ordinal = jnp.arange(1, num_compression_blocks(length, config) + 1, dtype=jnp.int32)[None]
    last = count_below(ended, ordinal)
    exists = last < length
    return jnp.where(exists, last - (config.compression_block_size - 1), 0), exists


def count_below(ascending: Int32[Array, "B S"], limits: Int32[Array, "#B n"]) -> Int32[Array, "B n"]:
    """For each limit, how many entries of its ascending row are less.

    `jnp.searchsorted` does the same, but JAX 0.11 fails on it inside a `shard_map` over some of the axes.
    """
    length = ascending.shape[1]
    # On explicit axes of a mesh, sums take the sharding of `ascending` where zeros and selections would not.
    count = jnp.zeros_like(limits) + jnp.zeros_like(ascending[:, :1]).sum(axis=1, keepdims=True)
    for bit in reversed(range(length.bit_length())):
        more = count + (1 << bit)
        last = jnp.take_along_axis(ascending, jnp.minimum(more, length) - 1, axis=1)
        count += ((more <= length) & (last < limits)).astype(jnp.int32) << bit
    return count


def returning_ids(segment_ids: Int[Array, "B S"]) -> Int[Array, "B S_minus_1"]:
    """The ids that have several runs in their row, which none but 0 may have; in no order, among zeros."""
    is_first = jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1] - 1) != 0
    runs = jnp.sort(jnp.where(is_first, segment_ids, 0), axis=1)
    return jnp.where(runs[:, 1:] == runs[:, :-1], runs[:, 1:], 0)


def _row_index(segment_ids: Int[Array, "B S"]) -> Int32[Array, "1 S"]:
    return jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None]
