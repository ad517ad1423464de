"""What JAX must be told inside a `shard_map`: over which manual axes of the mesh an array differs."""

from typing import Any

import jax
import jax.numpy as jnp

from nsa_jax.array_typing import Array, Int
from nsa_jax.layout import DenseCache, NSACache, slots


def varying_axes(array: Array) -> frozenset[str]:
    """The mesh axes over which an array differs, under `shard_map`."""
    return getattr(getattr(jax.typeof(array), "manual_axis_type", None), "varying", frozenset())


def vary(array: Array, axes: frozenset[str]) -> Array:
    """Lets an array vary over more axes; the transpose sums over them."""
    missing = axes - varying_axes(array)
    return jax.lax.pcast(array, tuple(sorted(missing)), to="varying") if missing else array


def varying_alike(operands: Any) -> Any:
    """Inside `shard_map`, makes floating-point operands vary over every axis over which one of them varies.

    So the gradient of an operand that the devices share, such as the keys of queries that are sharded by
    their tokens, is the sum of what the devices find: the transpose of the cast is that sum.
    """
    arrays = [x for x in jax.tree.leaves(operands) if isinstance(x, jax.Array)]
    axes = frozenset[str]().union(*map(varying_axes, arrays))

    def alike(x: Any) -> Any:
        return vary(x, axes) if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(alike, operands) if axes else operands


def alike_in_shards[C: (NSACache, DenseCache)](
    cache: C, given: C, num_tokens: Int[Array, " B"] | None, num_new: int, max_length: int
) -> C:
    """The cache with lengths and overflows that JAX knows to be the same on all shards of KV heads.

    Args:
      cache: after the step, as the kernels have written it.
      given: before the step.
      num_tokens, num_new, max_length: of the step, as `slots.admit` takes them.
    """
    arrays = (given.lengths, given.overflowed, num_tokens)
    axes = frozenset[str]().union(*(varying_axes(x) for x in arrays if x is not None))
    if varying_axes(cache.lengths) <= axes:
        return cache
    new = slots.admit(given.lengths, max_length, num_new, num_tokens)
    return cache._replace(lengths=new.start + new.num_tokens, overflowed=given.overflowed | ~new.fits)
