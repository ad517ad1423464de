"""Where the tokens of a step go: which rows have room, and the scatters and gathers that follow from it.

A write is one scatter for rows of any length, which XLA does in place. A `dynamic_update_slice` would be one
operation a row, and would shift a chunk whose padding sticks out of the array.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from nsa_jax.array_typing import Array, Bool, Int, Int32
from nsa_jax.config import NSAConfig
from nsa_jax.layout.blocks import blocks_of_step, num_compression_blocks


class Admitted(NamedTuple):
    """The tokens of a step that found room: `num_tokens[b]` of them, the first with index `start[b]`."""

    start: Int32[Array, " B"]
    num_tokens: Int32[Array, " B"]
    fits: Bool[Array, " B"]


def admit(
    lengths: Int32[Array, " B"], max_length: int, num_new: int, num_tokens: Int[Array, " B"] | None
) -> Admitted:
    """Admits all new tokens of a row, or none where they do not all fit."""
    wanted = jnp.full_like(lengths, num_new)
    if num_tokens is not None:
        wanted = jnp.clip(num_tokens.astype(jnp.int32), 0, num_new)
    fits = lengths + wanted <= max_length
    return Admitted(lengths, jnp.where(fits, wanted, 0), fits)


def write(buffer: Array, new: Array, slot: Int32[Array, "B T"], valid: Bool[Array, "B T"]) -> Array:
    """Puts `new[b, t]` into `buffer[b, slot[b, t]]` where valid."""
    size = buffer.shape[1]
    if size == 0:
        return buffer
    # What is not valid goes beyond the end, each to a slot of its own: the indices are unique as promised.
    slot = jnp.where(valid, slot, size + jnp.arange(new.shape[1], dtype=jnp.int32)[None])
    target = buffer.at[_rows(buffer), slot]
    written = target.set(new, mode="drop", unique_indices=True, wrap_negative_indices=False)
    # Else XLA may fuse the write into what reads the buffer, which makes it a second buffer: at 32k tokens a
    # step on a CPU then copied the compressed keys four times and took 1.6 times as long.
    return jax.lax.optimization_barrier(written)


def write_ring(ring: Array, new: Array, admitted: Admitted) -> Array:
    """Puts the admitted tokens into the ring: the last of them, if it is shorter than their number."""
    kept = min(ring.shape[1], new.shape[1])
    offset = jnp.maximum(admitted.num_tokens - kept, 0)[:, None] + jnp.arange(kept, dtype=jnp.int32)[None]
    if kept < new.shape[1]:
        new = new.at[_rows(new), offset].get(mode="promise_in_bounds")
    slot = (admitted.start[:, None] + offset) % ring.shape[1]
    return write(ring, new, slot, offset < admitted.num_tokens[:, None])


def read_ring(ring: Array, first: Int32[Array, " B"], length: int) -> Array:
    """Tokens `first .. first + length - 1` in order; any numbers for those that the ring does not hold."""
    token = first[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
    return ring.at[_rows(ring), token % ring.shape[1]].get(mode="promise_in_bounds")


class CompletedBlocks(NamedTuple):
    """As many blocks as the new tokens of a step could complete: their numbers, and which are complete."""

    number: Int32[Array, "B blocks"]
    complete: Bool[Array, "B blocks"]


def completed_blocks(new: Admitted, num_new: int, config: NSAConfig) -> CompletedBlocks:
    """The blocks that end in the admitted ones of `num_new` tokens."""
    offset = jnp.arange(blocks_of_step(num_new, config), dtype=jnp.int32)[None]
    block = num_compression_blocks(new.start, config)[:, None] + offset
    return CompletedBlocks(block, block < num_compression_blocks(new.start + new.num_tokens, config)[:, None])


def block_windows(
    recent: Array, blocks: CompletedBlocks, start: Int32[Array, " B"], config: NSAConfig
) -> Array:
    """The `l` tokens of each block, `[B, blocks, l, ...]`; `recent` are the new ones and `l - 1` before.

    A block that is not complete ends beyond them: it takes any window, so that nothing is read out of bounds.
    """
    size, num_new = config.compression_block_size, recent.shape[1] - config.compression_block_size + 1
    if num_new == 1:
        return recent[:, None]
    first = blocks.number * config.compression_stride - start[:, None] + size - 1
    token = jnp.clip(first, 0, num_new - 1)[:, :, None] + jnp.arange(size, dtype=jnp.int32)[None, None]
    return recent.at[_rows(recent)[:, :, None], token].get(mode="promise_in_bounds")


def _rows(array: Array) -> Int32[Array, "B 1"]:
    return jnp.arange(array.shape[0], dtype=jnp.int32)[:, None]
