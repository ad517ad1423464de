"""A stand-in for `nsa_jax.cache.dense_decode_step` with the same signature, until that is here."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from nsa_jax.array_typing import Array, Bool, DType, Float, Int32


class DenseCache(NamedTuple):
    """Keys and values of `lengths[b]` tokens a row, in arrays of fixed capacity."""

    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K V"]
    lengths: Int32[Array, " B"]
    overflowed: Bool[Array, " B"]


def init_dense_cache(
    batch: int, max_length: int, *, num_kv_heads: int, key_dim: int, value_dim: int, dtype: DType
) -> DenseCache:
    """An empty cache."""
    shape = (batch, max_length, num_kv_heads)
    key, value = (jnp.zeros((*shape, dim), dtype) for dim in (key_dim, value_dim))
    return DenseCache(key, value, jnp.zeros(batch, jnp.int32), jnp.zeros(batch, bool))


def dense_decode_step(
    cache: DenseCache, query: Array, key: Array, value: Array, *, implementation: str | None = None
) -> tuple[Array, DenseCache]:
    """Appends the tokens and attends from each of them to all tokens up to itself."""
    batch, num_new, num_heads, dim = query.shape
    index = cache.lengths[:, None] + jnp.arange(num_new)
    row = jnp.arange(batch)[:, None]
    keys, values = cache.key.at[row, index].set(key), cache.value.at[row, index].set(value)
    grouped = query.reshape(batch, num_new, key.shape[2], -1, dim)
    logits = jnp.einsum("btkgh,bskh->bkgts", grouped, keys, preferred_element_type=jnp.float32)
    visible = jnp.arange(keys.shape[1]) <= index[:, None, None, :, None]
    weights = jax.nn.softmax(jnp.where(visible, logits * dim**-0.5, -jnp.inf), axis=-1)
    out = jnp.einsum("bkgts,bskv->btkgv", weights.astype(values.dtype), values)
    out = out.reshape(batch, num_new, num_heads, -1).astype(query.dtype)
    return out, cache._replace(key=keys, value=values, lengths=cache.lengths + num_new)
