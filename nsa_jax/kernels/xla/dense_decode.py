"""A decode step of a dense or window layer in plain JAX: writes the tokens, then attends to the cache."""

import jax
import jax.numpy as jnp

from nsa_jax import layout
from nsa_jax.array_typing import Array, Float, Int
from nsa_jax.config import NSAConfig
from nsa_jax.kernels.xla import chunks, masked, operations
from nsa_jax.layout import DenseCache, Run, Runs, slots
from nsa_jax.layout.appending import append_dense
from nsa_jax.layout.quantised import held, widened


def dense_decode_step(
    cache: DenseCache,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    num_tokens: Int[Array, " B"] | None,
    window_size: int | None,
    scale: float,
) -> tuple[Float[Array, "B T N V"], DenseCache]:
    """Appends the tokens, then attends from each of them."""
    new = slots.admit(cache.lengths, cache.max_length(window_size), query.shape[1], num_tokens)
    # Written first and read afterwards, so that XLA need not keep both the old and the new arrays.
    cache = append_dense(cache, key, value, new)
    window = cache.ring_window(window_size)
    if window is None:
        return _attend_whole(query, cache, new, scale), cache
    return _attend_ring(query, cache, new, window, scale), cache


def _attend_whole(query, cache, new, scale):
    """Attends to whole rows, as window attention whose window is the capacity.

    It works tile by tile, up to the length of the longest row.
    """
    num_new, num_keys = query.shape[1], cache.key.shape[1]
    placement = layout.place(
        NSAConfig(window_size=num_keys),
        batch=query.shape[0],
        num_queries=num_new,
        num_keys=num_keys,
        query_positions=Runs((Run(num_new, new.start),), num_queries=new.num_tokens),
    )
    key, value = held(cache, "key"), held(cache, "value")
    return operations.window_attention(query, key, value, placement, scale).out


def _attend_ring(query, cache, new, window, scale):
    """Attends to all slots of the ring in place, under a mask: a softmax does not depend on their order."""
    num_new, num_heads = query.shape[1:3]
    size, num_kv_heads = cache.key.shape[1:3]
    last = (new.start + new.num_tokens - 1)[:, None]
    token = last - (last - jnp.arange(size, dtype=jnp.int32)) % size  # below 0 for a slot that is still empty
    offset = jnp.arange(num_new, dtype=jnp.int32)
    position = jnp.where(offset < new.num_tokens[:, None], new.start[:, None] + offset, -1)[..., None]
    token = token[:, None]
    visible = (token >= 0) & (token <= position) & (token > position - window)
    visible = chunks.of_rows(visible[:, None], num_heads // num_kv_heads)
    rows = chunks.split_rows(query, num_kv_heads, num_new)[0]
    key, value = widened((held(cache, "key"), held(cache, "value")), query.dtype)

    def attend(attend_keys):
        out, _ = masked.normalised(attend_keys(rows, key, value, visible, scale))
        return out

    if masked.are_few(rows):
        out = attend(masked.attend_few)
        # Hidden keys or values that are not finite spoil this result. That is rare; attend again, with care.
        clean = jnp.isfinite(out).all(axis=-1, keepdims=True)
        out = jax.lax.cond(
            clean.all(), lambda: out, lambda: jnp.where(clean, out, attend(masked.attend_tile))
        )
    else:
        out = attend(masked.attend_tile)
    return chunks.join_rows(out[None].astype(query.dtype), num_new, num_heads)
