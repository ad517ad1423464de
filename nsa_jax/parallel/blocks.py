"""Compressed keys and values of rows whose tokens lie on several devices.

A compression block belongs to the run of its last token. With block starts that are at least a stride apart,
a run of `chunk` tokens ends at most `chunk / d` blocks, so it has that many slots. In a plain row it fills
all of them, but for the first run of the row, which lacks the first `l/d - 1`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from nsa_jax import layout
from nsa_jax.array_typing import Array, Float, Int, Int32
from nsa_jax.compression import Compress, compress_blocks
from nsa_jax.config import NSAConfig
from nsa_jax.parallel.shards import Shards


class Rows(NamedTuple):
    """Index arrays of whole rows, in the order of the row, which every device has.

    Attributes:
      positions: rotary position of each token; None for its index in its sequence.
      segment_ids: sequence of each token; None if every row is one sequence.
    """

    positions: Int[Array, "B S"] | None
    segment_ids: Int[Array, "B S"] | None


class Slots(NamedTuple):
    """The block slots of all runs of packed rows, in the order of the row.

    Attributes:
      starts: row index of the first token of the block in a slot.
      block: number of that block among the blocks of the row; -1 for an empty slot.
      slot: for each block of the row its slot; -1 where the row has no such block.
    """

    starts: Int32[Array, "B slots"]
    block: Int32[Array, "B slots"]
    slot: Int32[Array, "B C"]


def halo_of_blocks(config: NSAConfig, packed: bool) -> int:
    """How many tokens of the run before a block may hold. In a packed row it may end at any token."""
    return config.compression_block_size - (1 if packed else config.compression_stride)


def gather_compressed(
    keys_values: tuple[Float[Array, "B runs halo+chunk K H"], Float[Array, "B runs halo+chunk K V"]],
    shards: Shards,
    compress: Compress,
    config: NSAConfig,
    rows: Rows,
) -> tuple[Float[Array, "B C K H"], Float[Array, "B C K V"]]:
    """Compresses the blocks that end on this device and gathers those of all devices.

    Args:
      keys_values: tokens of the runs of this device, each run after its halo of `halo_of_blocks` tokens.
      shards: how rows lie on the devices.
      compress: maps windows and the rotary positions of their first tokens to compressed keys and values.
      config: block structure.
      rows: what is known of whole rows.

    Returns:
      Compressed keys and values of whole rows, as one device would compute them.
    """
    positions, segment_ids = rows
    batch, runs = keys_values[0].shape[:2]
    per_run, size = shards.chunk // config.compression_stride, config.compression_block_size
    first_held = shards.numbers()[:, None] * shards.chunk - halo_of_blocks(config, segment_ids is not None)
    slots = None
    if segment_ids is None:
        starts = first_held + jnp.arange(per_run, dtype=jnp.int32) * config.compression_stride
        starts = jnp.broadcast_to(starts, (batch, runs, per_run))
        windows = [jax.vmap(lambda x: layout.token_windows(x, config), 1, 1)(x) for x in keys_values]
    else:
        slots = packed_slots(segment_ids, shards, config)
        starts, block = (
            jnp.take(x.reshape(batch, -1, per_run), shards.numbers(), axis=1)
            for x in (slots.starts, slots.block)
        )
        held = jnp.where(block >= 0, starts - first_held, 0)
        at_starts = jax.vmap(lambda *x: layout.windows_at(*x, config), 1, 1)
        windows = [at_starts(x, held, block >= 0) for x in keys_values]
    first = jnp.maximum(starts.reshape(batch, runs * per_run), 0)
    if positions is None and segment_ids is not None:
        positions = layout.sequence_positions(segment_ids)
    first_positions = first if positions is None else jnp.take_along_axis(positions, first, axis=1)
    key_windows, value_windows = (x.reshape(batch, runs * per_run, size, *x.shape[4:]) for x in windows)
    compressed = compress_blocks(compress, key_windows, value_windows, first_positions)
    key, value = shards.gather(*map(shards.split, compressed))
    if slots is not None:
        return _compact(key, slots), _compact(value, slots)
    missing = size // config.compression_stride - 1  # blocks that would begin before the row
    return key[:, missing:], value[:, missing:]


def packed_slots(segment_ids: Int[Array, "B S"], shards: Shards, config: NSAConfig) -> Slots:
    """Finds the slots of the blocks of packed rows; `segment_ids` are those of whole rows."""
    size, stride = config.compression_block_size, config.compression_stride
    starts, exists = layout.compression_block_starts(segment_ids, config)
    per_run, num_blocks = shards.chunk // stride, starts.shape[1]
    run = jnp.where(exists, (starts + size - 1) // shards.chunk, 0)
    ended = layout.blocks_ended(segment_ids, config)[:, shards.chunk - 1 :: shards.chunk]
    before = jnp.pad(ended, ((0, 0), (1, 0)))  # [B, num_runs + 1]: blocks that end before each run
    number = jnp.arange(num_blocks, dtype=jnp.int32)[None]
    slot = run * per_run + number - jnp.take_along_axis(before, run, axis=1)
    block = before[:, :-1, None] + jnp.arange(per_run, dtype=jnp.int32)
    block = jnp.where(block < before[:, 1:, None], block, -1).reshape(starts.shape[0], -1)
    return Slots(_taken(starts, block), block, jnp.where(exists, slot, -1))


@jax.custom_vjp
def _compact(x: Float[Array, "B slots K X"], slots: Slots) -> Float[Array, "B C K X"]:
    """Moves the blocks of a row to its first places; zeros where it has no more blocks."""
    return _compact_forward(x, slots)[0]


def _compact_forward(x, slots):
    return _taken(x, slots.slot), slots


def _compact_backward(slots, cotangent):
    # A gather, like the forward pass: each slot has one block at most.
    return _taken(cotangent, slots.block), None


_compact.defvjp(_compact_forward, _compact_backward)


def _taken(x: Array, index: Int32[Array, "B n"]) -> Array:
    """`x[b, index[b, i]]`, zeros where an index is -1."""
    if x.shape[1] == 0:
        return jnp.zeros_like(x, shape=(*index.shape, *x.shape[2:]))
    taken = jax.vmap(lambda row, at: row[at])(x, jnp.maximum(index, 0))
    return jnp.where(index.reshape(*index.shape, *(1,) * (x.ndim - 2)) >= 0, taken, 0)
