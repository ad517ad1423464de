"""Log-probabilities of new tokens, and of the likeliest ones in their places."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from nsa_jax.array_typing import Array, Float, Int32


class Logprobs(NamedTuple):
    """Natural logarithms of what the model gives to tokens, before a hook, penalties and sampling.

    In float32, or in float64 for float64 logits. After the new tokens of a row all is 0.

    Attributes:
      chosen: that of each new token.
      top_tokens: the `top` likeliest tokens in its place, the likeliest first, the lower of equal ids first.
      top: theirs.
    """

    chosen: Float[Array, "B new"]
    top_tokens: Int32[Array, "B new top"]
    top: Float[Array, "B new top"]


def of_token(logits: Float[Array, "B vocab"], token: Int32[Array, " B"], count: int) -> Logprobs:
    """Those of one token of each row, without the axis of new tokens."""
    logits = logits.astype(jnp.float64 if logits.dtype == jnp.float64 else jnp.float32)
    normalised = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(normalised, token[:, None], axis=1)[:, 0]
    top, tokens = jax.lax.top_k(normalised, count)
    return Logprobs(chosen, tokens.astype(jnp.int32), top)
