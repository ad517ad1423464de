"""Penalties for tokens that a text has already."""

import jax
import jax.numpy as jnp

from nsa_jax.array_typing import Array, Bool, Float, Int32


def marked(
    had: Bool[Array, "B vocab"], tokens: Int32[Array, "B T"], counts: Int32[Array, " B"]
) -> Bool[Array, "B vocab"]:
    """Adds the first `counts` tokens of each row to those that it has had."""

    def mark(had: Array, tokens: Array, count: Array) -> Array:
        real = jnp.arange(tokens.size, dtype=jnp.int32) < count
        return had.at[jnp.where(real, tokens, had.size)].set(True, mode="drop")

    return jax.vmap(mark)(had, tokens, counts)


def repetition(
    logits: Float[Array, "B vocab"], had: Bool[Array, "B vocab"], penalty: Array | float
) -> Float[Array, "B vocab"]:
    """Divides positive logits of the tokens that a row has had by `penalty`, and multiplies others by it."""
    penalty = column(penalty, logits)
    return jnp.where(had, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def presence(
    logits: Float[Array, "B vocab"], had: Bool[Array, "B vocab"], penalty: Array | float
) -> Float[Array, "B vocab"]:
    """Subtracts `penalty` from the logits of the tokens that a row has had."""
    return jnp.where(had, logits - column(penalty, logits), logits)


def column(number: Array | float, logits: Float[Array, "B vocab"]) -> Array | float:
    """A parameter of each row as a column beside its logits; one for all rows stays as it is."""
    return jnp.asarray(number, logits.dtype)[:, None] if jnp.ndim(number) == 1 else number
