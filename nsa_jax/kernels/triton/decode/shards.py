"""Lengths of a cache whose KV heads are spread over several GPUs."""

from nsa_jax.array_typing import Array, Int
from nsa_jax.kernels.launch import varying_axes
from nsa_jax.layout import DenseCache, NSACache, slots


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
