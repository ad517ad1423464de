"""Memory that kernels will fill, from a launch that does nothing.

grid = (1,). `jax.lax.empty` waits for nothing, so XLA may reserve the memory of all layers before it runs the
first: 163 MB a layer for the gradients of 4 rows of 8192 tokens with 9 query heads of 64. The results of a
launch need no memory before its operand is there.
"""

from typing import Any

import jax
import triton

from nsa_jax.array_typing import Array
from nsa_jax.kernels.triton.launch import launch, named
from nsa_jax.sharding.manual import vary, varying_axes

MOST = 5  # arrays of a launch
_NONE = jax.ShapeDtypeStruct((1,), "int8")  # in the place of an array that nobody wants


def undefined(*shapes: jax.ShapeDtypeStruct, after: Array, vary_as: Any) -> tuple[Array, ...]:
    """Up to `MOST` arrays whose values are anything, which take no memory before `after` is computed.

    Under `shard_map` they vary as the arrays of the pytree `vary_as` do.
    """
    out = shapes + (_NONE,) * (MOST - len(shapes))
    found = launch(undefined_kernel, after, out=out, grid=(1,), num_warps=1)
    axes = frozenset[str]().union(*(varying_axes(x) for x in jax.tree.leaves(vary_as)))
    return tuple(vary(x, axes) for x in found[: len(shapes)])


@triton.jit(repr=named("nsa_undefined"))
def undefined_kernel(after, array_0, array_1, array_2, array_3, array_4):
    """Writes nothing."""
