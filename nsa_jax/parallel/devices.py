"""The devices along an axis of the mesh, and the messages between them."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from nsa_jax.array_typing import Array, Int32


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices along an axis of the mesh, over which a `shard_map` runs.

    Attributes:
      axis: name of the axis.
      count: number of devices.
    """

    axis: str
    count: int

    @classmethod
    def along(cls, axis: str) -> "Devices":
        """Finds the devices.

        Raises:
          TypeError: the axis is not one name.
          ValueError: the call is not inside a `shard_map` over the axis.
        """
        if not isinstance(axis, str):
            raise TypeError(f"axis must be the name of one axis, got {axis!r}. Pass a string.")
        mesh = jax.sharding.get_abstract_mesh()
        if axis not in mesh.manual_axes:
            raise ValueError(
                "context parallelism must run inside jax.shard_map over its axis, got the axis "
                f"{axis!r} where {mesh.manual_axes or 'no axis'} is mapped. Call it inside "
                f"jax.shard_map(..., axis_names={{{axis!r}}}), or use a layer with context_axis."
            )
        return cls(axis, mesh.shape[axis])

    def index(self) -> Int32[Array, ""]:
        """Which of them this device is."""
        return jax.lax.axis_index(self.axis).astype(jnp.int32)

    def all_gather(self, x: Array) -> Array:
        """What all devices have, one after another along axis 1; the transpose is a reduce-scatter."""
        return jax.lax.all_gather(x, self.axis, axis=1, tiled=True)

    def permute(self, x: Array, pairs: Sequence[tuple[int, int]]) -> Array:
        """What the sender among the pairs `(sender, receiver)` has; zeros where none sends."""
        return jax.lax.ppermute(x, self.axis, pairs)
