"""Chooses the next token from the logits: the likeliest, or a draw, also from the likelier ones alone."""

import jax
import jax.numpy as jnp

from nsa_jax.array_checks import check_arrays
from nsa_jax.array_typing import Array, Bool, Float, Int, Int32, PRNGKeyArray
from nsa_jax.generate.checks import check_keys
from nsa_jax.generate.keys import mappable
from nsa_jax.generate.parameters import check_draw
from nsa_jax.generate.penalties import column

type Number = float | Float[Array, ""] | Float[Array, " B"]
type Count = int | Int[Array, ""] | Int[Array, " B"]


def sample(
    logits: Float[Array, "B vocab"],
    keys: PRNGKeyArray,
    *,
    temperature: Number | None = None,
    top_k: Count | None = None,
    top_p: Number | None = None,
    min_p: Number | None = None,
) -> Int32[Array, " B"]:
    """Chooses one token for each row.

    Parameters are one number for all rows, or an array with one for each.

    Args:
      logits: logits of the next token, of any float dtype.
      keys: one typed key for each row. A draw depends only on the key and the logits of its row. Keys of
        another kind than JAX's default are turned into such keys first.
      temperature: divides the logits before anything else; above 0. None takes the most likely token, and so
        does a row whose number in an array is 0.
      top_k: see `truncate`, applied after the temperature.
      top_p: see `truncate`, applied after the temperature.
      min_p: see `truncate`, applied after the temperature.

    Returns:
      Token ids. Without a temperature, the lowest of equally likely ids.

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: shapes do not fit, or a Python number is out of range.

    Numerics:
      Computes in float32, or in float64 for float64 logits. The largest logit is subtracted before the
      division, so that no temperature overflows.
    """
    sizes = check_arrays(sample, logits=logits)
    check_keys(keys, sizes["B"])
    check_draw(sizes["B"], temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    if temperature is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    likeliest = jnp.argmax(logits, axis=-1) if jnp.ndim(temperature) else None
    logits = logits.astype(jnp.float64 if logits.dtype == jnp.float64 else jnp.float32)
    divisor = jnp.maximum(column(temperature, logits), jnp.finfo(logits.dtype).tiny)  # below it, 0 / 0
    logits = (logits - logits.max(axis=-1, keepdims=True)) / divisor
    logits = truncate(logits, top_k=top_k, top_p=top_p, min_p=min_p)
    token = jax.vmap(jax.random.categorical)(mappable(keys), logits)
    if likeliest is not None:
        token = jnp.where(temperature == 0, likeliest, token)
    return token.astype(jnp.int32)


def truncate(
    logits: Float[Array, "B vocab"],
    *,
    top_k: Count | None = None,
    top_p: Number | None = None,
    min_p: Number | None = None,
) -> Float[Array, "B vocab"]:
    """Excludes unlikely tokens by setting their logits to `-inf`.

    Args:
      logits: logits of the next token.
      top_k: keeps the `k` most likely tokens, `k` at least 1; of equally likely tokens the lower ids.
      top_p: keeps the smallest set of most likely tokens whose probabilities add up to at least this number
        (arXiv:1904.09751), among those that `top_k` left; above 0, and 1 keeps all.
      min_p: excludes tokens that have less than this share of the largest probability (arXiv:2407.01082);
        above 0 and at most 1, or 0 for a row of an array that keeps all.

    Returns:
      Logits of the same shape and dtype. At least one token of each row is kept.

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: `logits` has not two axes, or a Python number is out of range.
    """
    sizes = check_arrays(truncate, logits=logits)
    check_draw(sizes["B"], top_k=top_k, top_p=top_p, min_p=min_p)
    keep = _ranked_high(logits, top_k, top_p)
    if min_p is not None:
        least = logits.max(axis=-1, keepdims=True) + jnp.log(column(min_p, logits))
        keep &= logits >= least
    return logits if keep is True else jnp.where(keep, logits, -jnp.inf)


def _ranked_high(
    logits: Float[Array, "B vocab"], top_k: Count | None, top_p: Number | None
) -> Bool[Array, "B vocab"] | bool:
    """Whether `top_k` and `top_p` keep each token; True where none is given."""
    if top_k is None and top_p is None:
        return True
    vocab = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None]
    order = jnp.argsort(logits, axis=-1, descending=True, stable=True).astype(jnp.int32)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    kept = jnp.full_like(order[..., 0], logits.shape[-1])
    if top_k is not None:
        kept = jnp.minimum(kept, top_k)
    if top_p is not None:
        probability = jax.nn.softmax(jnp.where(vocab < kept[:, None], ranked, -jnp.inf), axis=-1)
        before = jnp.pad(jnp.cumsum(probability, axis=-1)[:, :-1], ((0, 0), (1, 0)))
        enough = (before < column(top_p, logits)).sum(axis=-1, dtype=jnp.int32)
        kept = jnp.where(top_p < 1, jnp.clip(enough, 1, kept), kept)
    # The kept tokens are a prefix of the ranking. Comparing with its last entry finds them, so the sort need
    # not be undone.
    last = kept[:, None] - 1
    last_logit = jnp.take_along_axis(ranked, last, axis=-1)
    last_token = jnp.take_along_axis(order, last, axis=-1)
    return (logits > last_logit) | ((logits == last_logit) & (vocab <= last_token))
