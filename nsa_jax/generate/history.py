"""The tokens of each row in one array: those of its prompt and turns, and those that were drawn."""

import jax
import jax.numpy as jnp

from nsa_jax.array_typing import Array, Int32


def begun(
    prompts: Int32[Array, "B P"], lengths: Int32[Array, " B"], max_length: int
) -> Int32[Array, "B S+1"]:
    """Room for `max_length` tokens and one that has no room in the cache; the prompts are in it."""
    none = jnp.zeros_like(lengths, jnp.int32)
    return written(jnp.broadcast_to(none[:, None], (none.size, max_length + 1)), prompts, none, lengths)


def written(
    history: Int32[Array, "B S+1"],
    tokens: Int32[Array, "B T"],
    first: Int32[Array, " B"],
    counts: Int32[Array, " B"],
) -> Int32[Array, "B S+1"]:
    """Writes the first `counts` of `tokens` to places from `first` on."""

    def write(row: Array, tokens: Array, first: Array, count: Array) -> Array:
        number = jnp.arange(tokens.size, dtype=jnp.int32)
        place = jnp.where(number < count, first + number, row.size)
        return row.at[place].set(tokens.astype(row.dtype), mode="drop")

    return jax.vmap(write)(history, tokens, first, counts)


def read(history: Int32[Array, "B S+1"], first: Int32[Array, " B"], count: int) -> Int32[Array, "B count"]:
    """The `count` tokens from `first` on; where there is no such place, some other token."""

    def take(row: Array, first: Array) -> Array:
        return row.at[first + jnp.arange(count, dtype=jnp.int32)].get(mode="clip")

    return jax.vmap(take)(history, first)
