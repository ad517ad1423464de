"""Where the tokens of a step go: which rows have room, and the scatters and gathers that follow from it.

A write is one scatter for rows of any length, which XLA does in place. A `dynamic_update_slice` would be one
operation a row, and would shift a chunk whose padding sticks out of the array.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from nsa_jax.array_typing import Array, Bool, Int, Int32


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


def _rows(array: Array) -> Int32[Array, "B 1"]:
    return jnp.arange(array.shape[0], dtype=jnp.int32)[:, None]
