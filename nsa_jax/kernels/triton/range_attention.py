"""Attention in which every query sees one range of keys: its kernels, and what needs none."""

import jax.numpy as jnp

from nsa_jax.array_typing import Array, Float, Int
from nsa_jax.kernels.triton import range_forward
from nsa_jax.kernels.triton.range_backward_key import range_key_gradients
from nsa_jax.kernels.triton.range_backward_query import range_query_gradient
from nsa_jax.kernels.triton.range_tiles import Edges


def attend_ranges(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    start: Int[Array, "B T"],
    end: Int[Array, "B T"],
    *,
    scale: float,
    edges: Edges,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """`(out, lse)` of each query over keys `start .. end - 1`; `edges` is what is known of these."""
    if key.shape[1] == 0:
        rows = query.shape[:3]
        return jnp.zeros((*rows, value.shape[-1]), query.dtype), jnp.full(rows, -jnp.inf, jnp.float32)
    return range_forward.attend_ranges(query, key, value, start, end, scale, edges=edges)


def range_gradients(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    start: Int[Array, "B T"],
    end: Int[Array, "B T"],
    lse: Float[Array, "B T N"],
    delta: Float[Array, "B T N"],
    d_out: Float[Array, "B T N V"],
    *,
    weight: Float[Array, "B T N"] | None,
    previous: Float[Array, "B T N H"] | None,
    scale: float,
    edges: Edges,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K V"]]:
    """Gradients of query, key and value where the cotangent of the output is `weight * d_out`.

    Args:
      query, key, value, start, end, scale, edges: see `attend_ranges`.
      lse: what it returned.
      delta: `weight * sum(out * d_out)` over V, less the cotangent of `lse`.
      d_out: cotangent of the output, before the weight.
      weight: one factor a row, None for 1.
      previous: gradient of the query from elsewhere, which is added; None for none.
    """
    if key.shape[1] == 0:
        d_query = jnp.zeros_like(query) if previous is None else previous
        return d_query, jnp.zeros_like(key), jnp.zeros_like(value)
    shared = (query, key, value, start, end, lse, delta, d_out, weight)
    d_query = range_query_gradient(*shared, previous, scale, edges=edges)
    return d_query, *range_key_gradients(*shared, scale)
