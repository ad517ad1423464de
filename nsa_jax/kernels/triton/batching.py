"""`jax.vmap` of a function made of kernels: the mapped axis becomes part of the batch axis."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def folds_vmap[R](function: Callable[..., R]) -> Callable[..., R]:
    """Makes `function` mappable; each array that it takes and returns has the batch as its first axis."""
    mapped = jax.custom_batching.custom_vmap(function)

    @mapped.def_vmap
    def rule(axis_size, is_mapped, *args):
        def fold(x, x_is_mapped):
            x = x if x_is_mapped else jnp.broadcast_to(x, (axis_size, *x.shape))
            return x.reshape(axis_size * x.shape[1], *x.shape[2:])

        results = mapped(*jax.tree.map(fold, args, tuple(is_mapped)))
        results = jax.tree.map(lambda x: x.reshape(axis_size, -1, *x.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    return mapped
