"""A model taken apart into arrays and the rest, so that a call of a compiled program costs little.

JAX hashes what is static in each call, and takes all other arguments apart. For the graph and the state of a
model of 18 layers that takes 10 ms of processor time, longer than the device needs for a chunk of steps.
"""

import functools
from typing import Any

import jax
from flax import nnx

from nsa_jax.array_typing import Array


class Structure:
    """All of a model but its arrays. Its hash is computed once."""

    def __init__(self, graphdef: nnx.GraphDef, tree: Any) -> None:
        self._parts = (graphdef, tree)
        self._hash = hash(self._parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Structure) and self._hash == other._hash and self._parts == other._parts

    def model(self, arrays: tuple[Array, ...]) -> Any:
        """The model with these arrays."""
        graphdef, tree = self._parts
        return nnx.merge(graphdef, jax.tree.unflatten(tree, arrays))


def split(model: Any) -> tuple[Structure, tuple[Array, ...]]:
    """The structure of a model, and its arrays as they are now."""
    graphdef, state = nnx.split(model)
    arrays, tree = jax.tree.flatten(state)
    return _known(graphdef, tree), tuple(arrays)


def is_concrete(x: Any) -> bool:
    """Whether it is an array of JAX with values, not one that is traced."""
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)


def are_whole(arrays: tuple[Array, ...]) -> bool:
    """Whether each device has all of each array, as far as that is known: while tracing, it is not."""
    return all(x.sharding.is_fully_replicated for x in arrays if is_concrete(x))


@functools.lru_cache(maxsize=32)
def _known(graphdef: nnx.GraphDef, tree: Any) -> Structure:
    """One object for all that are equal, as a comparison takes as long as a hash."""
    return Structure(graphdef, tree)
