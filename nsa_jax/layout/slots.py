"""Which rows have room for the tokens of a step, and the scatters and gathers that store and read them.

A write is one scatter for rows of any length, which XLA does in place. `dynamic_update_slice` would take one
operation per row, and would shift a chunk whose padding reaches beyond the end of the array.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nsa_jax.array_typing import Array, Bool, Float, Int, Int32
from nsa_jax.config import NSAConfig
from nsa_jax.layout.blocks import blocks_of_step, num_compression_blocks
from nsa_jax.layout.cache import NSACache, TokenKeysValues
from nsa_jax.layout.quantised import Quantised, quantised


class Admitted(NamedTuple):
    """The tokens of a step that have room.

    Attributes:
      start: index of the first new token of each row.
      num_tokens: number of admitted tokens of each row.
      fits: whether the row had room for all its tokens; if not, none is admitted.
    """

    start: Int32[Array, " B"]
    num_tokens: Int32[Array, " B"]
    fits: Bool[Array, " B"]


def admit(
    lengths: Int32[Array, " B"], max_length: int, num_new: int, num_tokens: Int[Array, " B"] | None
) -> Admitted:
    """Admits all new tokens of a row if they fit, otherwise none of them."""
    wanted = jnp.full_like(lengths, num_new)
    if num_tokens is not None:
        wanted = jnp.clip(num_tokens.astype(jnp.int32), 0, num_new)
    fits = lengths + wanted <= max_length
    return Admitted(lengths, jnp.where(fits, wanted, 0), fits)


def write(buffer: Any, new: Any, slot: Int32[Array, "B T"], valid: Bool[Array, "B T"]) -> Any:
    """Writes `new[b, t]` to `buffer[b, slot[b, t]]` where `valid[b, t]`, rounded if that is `Quantised`."""
    if isinstance(buffer, Quantised):
        new = new if isinstance(new, Quantised) else quantised(new, buffer.numbers.dtype)
        return Quantised(*(write(x, y, slot, valid) for x, y in zip(buffer, new, strict=True)))
    size = buffer.shape[1]
    if size == 0:
        return buffer
    # Invalid tokens get distinct slots beyond the end, where they are dropped. So all indices are unique, as
    # `unique_indices` promises.
    slot = jnp.where(valid, slot, size + jnp.arange(new.shape[1], dtype=jnp.int32)[None])
    target = buffer.at[_rows(buffer), slot]
    written = target.set(new, mode="drop", unique_indices=True, wrap_negative_indices=False)
    # Without the barrier, XLA may fuse the write into the operations that read the buffer, and then needs a
    # second buffer: at 32k tokens, a step on a CPU copied the compressed keys four times and took 1.6 times
    # as long.
    return jax.lax.optimization_barrier(written)


def write_ring(ring: Any, new: Any, admitted: Admitted) -> Any:
    """Writes the admitted tokens to the ring; only the last of them if the ring is too short for all."""
    if isinstance(ring, Quantised):
        return Quantised(*(write_ring(x, y, admitted) for x, y in zip(ring, new, strict=True)))
    kept = min(ring.shape[1], new.shape[1])
    offset = jnp.maximum(admitted.num_tokens - kept, 0)[:, None] + jnp.arange(kept, dtype=jnp.int32)[None]
    if kept < new.shape[1]:
        new = new.at[_rows(new), offset].get(mode="promise_in_bounds")
    slot = (admitted.start[:, None] + offset) % ring.shape[1]
    return write(ring, new, slot, offset < admitted.num_tokens[:, None])


def read_ring(ring: Any, first: Int32[Array, " B"], length: int) -> Any:
    """Reads tokens `first .. first + length - 1` in order; arbitrary numbers for tokens not in the ring."""
    if isinstance(ring, Quantised):
        return Quantised(*(read_ring(x, first, length) for x in ring))
    token = first[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
    return ring.at[_rows(ring), token % ring.shape[1]].get(mode="promise_in_bounds")


class CompletedBlocks(NamedTuple):
    """The compression blocks that the new tokens of a step may have completed.

    Attributes:
      number: number of each block in its row.
      complete: whether the block is complete.
    """

    number: Int32[Array, "B blocks"]
    complete: Bool[Array, "B blocks"]


def completed_blocks(new: Admitted, num_new: int, config: NSAConfig) -> CompletedBlocks:
    """Finds the blocks that end in the admitted tokens, of `num_new` new ones."""
    offset = jnp.arange(blocks_of_step(num_new, config), dtype=jnp.int32)[None]
    block = num_compression_blocks(new.start, config)[:, None] + offset
    return CompletedBlocks(block, block < num_compression_blocks(new.start + new.num_tokens, config)[:, None])


def block_windows(
    recent: Array, blocks: CompletedBlocks, start: Int32[Array, " B"], config: NSAConfig
) -> Array:
    """Gathers the `l` tokens of each block, `[B, blocks, l, ...]`.

    `recent` holds the new tokens and the `l - 1` tokens before them. A block that is not complete would reach
    beyond them; it gets some other window instead, so that nothing is read out of bounds.
    """
    size, num_new = config.compression_block_size, recent.shape[1] - config.compression_block_size + 1
    if num_new == 1:
        return recent[:, None]
    first = blocks.number * config.compression_stride - start[:, None] + size - 1
    token = jnp.clip(first, 0, num_new - 1)[:, :, None] + jnp.arange(size, dtype=jnp.int32)[None, None]
    return recent.at[_rows(recent)[:, :, None], token].get(mode="promise_in_bounds")


def windows_of_step(
    cache: NSACache, tokens: TokenKeysValues, num_tokens: Int[Array, " B"] | None, config: NSAConfig
) -> tuple[Float[Array, "B blocks l K H"], Float[Array, "B blocks l K V"], Int32[Array, "B blocks"]]:
    """The keys and values of the blocks that a step may complete, and the first position of each block."""
    num_new, history = tokens.key_slc.shape[1], config.compression_block_size - 1
    new = admit(cache.lengths, cache.max_length, num_new, num_tokens)
    blocks = completed_blocks(new, num_new, config)

    def windows(ring, token):
        recent = jnp.concatenate([read_ring(ring, new.start - history, history), token], axis=1)
        return block_windows(recent, blocks, new.start, config)

    key_windows = windows(cache.key_raw_ring, tokens.key_cmp)
    value_windows = windows(cache.value_raw_ring, tokens.value_cmp)
    return key_windows, value_windows, blocks.number * config.compression_stride


def _rows(array: Array) -> Int32[Array, "B 1"]:
    return jnp.arange(array.shape[0], dtype=jnp.int32)[:, None]
