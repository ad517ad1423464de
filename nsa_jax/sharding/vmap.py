"""Lets `jax.vmap` map functions that launch kernels: its axis becomes part of the batch axis."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def folds_vmap[R](function: Callable[..., R], *, alike: int = 0) -> Callable[..., R]:
    """Lets `jax.vmap` map a function that launches kernels: the mapped axis becomes part of the batch axis.

    The first axis of each array that it takes and returns is the batch. The first `alike` arguments have no
    batch axis: all rows share them. If one of those is mapped, the function runs once per mapped element.
    """
    mapped = jax.custom_batching.custom_vmap(function)

    @mapped.def_vmap
    def rule(axis_size, is_mapped, *args):
        def spread(x, x_is_mapped):
            return x if x_is_mapped else jnp.broadcast_to(x, (axis_size, *x.shape))

        if any(jax.tree.leaves(is_mapped[:alike])):
            args = jax.tree.map(spread, args, tuple(is_mapped))
            results = jax.lax.map(lambda one: mapped(*one), args)
            return results, jax.tree.map(lambda _: True, results)

        def fold(x, x_is_mapped):
            x = spread(x, x_is_mapped)
            return x.reshape(axis_size * x.shape[1], *x.shape[2:])

        folded = jax.tree.map(fold, args[alike:], tuple(is_mapped[alike:]))
        results = mapped(*args[:alike], *folded)
        results = jax.tree.map(lambda x: x.reshape(axis_size, x.shape[0] // axis_size, *x.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    return mapped
