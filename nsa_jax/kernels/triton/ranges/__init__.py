"""Attention in which every query sees one range of keys (Eq. 4).

These are the compressed and the window branch, and the selected branch of rows that are so short that every
query selects all blocks.
"""

from collections.abc import Callable

import jax.numpy as jnp

from nsa_jax.array_typing import Array, Float
from nsa_jax.kernels.triton.backward import Backward, BranchGradients
from nsa_jax.kernels.triton.ranges import forward
from nsa_jax.kernels.triton.ranges.backward_key import range_key_gradients
from nsa_jax.kernels.triton.ranges.backward_query import range_query_gradient
from nsa_jax.kernels.triton.ranges.edges import (
    KeyRanges,
    causal_ranges,
    compression_ranges,
    window_ranges,
)

__all__ = [
    "KeyRanges",
    "attend_ranges",
    "causal_ranges",
    "compression_ranges",
    "range_gradients",
    "window_ranges",
]


def attend_ranges(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    ranges: KeyRanges,
    *,
    scale: float,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """`(out, lse)` of each query over its range of keys; not searched for what is not finite."""
    if key.shape[1] == 0:
        rows = query.shape[:3]
        return jnp.zeros((*rows, value.shape[-1]), query.dtype), jnp.full(rows, -jnp.inf, jnp.float32)
    return forward.attend_ranges(query, key, value, ranges, scale=scale)


def range_gradients(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    ranges: KeyRanges,
    given: Backward,
    *,
    scale: float,
    query_gradient: Callable[..., tuple[Array, Array, Array]] = range_query_gradient,
    key_gradients: Callable[..., tuple[Array, Array]] = range_key_gradients,
) -> BranchGradients:
    """Gradients of such a branch; not searched for what is not finite.

    Args:
      query, key, value, ranges, scale: see `attend_ranges`.
      given: what it returned, searched, and the cotangents.
      query_gradient: computes that of the queries, as the default does.
      key_gradients: computes those of keys and values, as the default does.
    """
    if key.shape[1] == 0:
        d_query = jnp.zeros_like(query) if given.previous is None else given.previous
        nothing = jnp.zeros_like(given.lse)
        return BranchGradients(d_query, jnp.zeros_like(key), jnp.zeros_like(value), nothing, nothing)
    operands = (query, key, value, ranges)
    d_query, products, delta = query_gradient(*operands, given, scale=scale)
    d_keys = key_gradients(*operands, given, delta, scale=scale)
    return BranchGradients(d_query, *d_keys, products, delta)
