"""Where the kernel of a product with the input of a layer is, on a mesh of devices."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding

type SomeMesh = Mesh | AbstractMesh | None


class Place(NamedTuple):
    """Mesh axes over which a kernel `[D, ...]` is divided: its rows, and the first axis of its columns.

    Without a mesh each device has all of it.
    """

    mesh: SomeMesh = None
    rows: Any = None
    columns: Any = None

    @property
    def row_parts(self) -> int:
        """In how many parts the rows are divided."""
        return self._parts(self.rows)

    @property
    def column_parts(self) -> int:
        """In how many parts the columns are divided."""
        return self._parts(self.columns)

    def _parts(self, names: Any) -> int:
        names = names if isinstance(names, tuple) else (names,)
        return math.prod(self.mesh.shape[name] for name in names if self.mesh and name)

    def by_each_device(self, function: Callable[..., Any], given: Any, made: Any) -> Callable[..., Any]:
        """A function that each device calls with its own parts of arrays, divided as these specs say."""
        if self.mesh is None:
            return function
        mesh = self.mesh
        names = mesh.explicit_axes if isinstance(mesh, AbstractMesh) else mesh.axis_names
        return jax.shard_map(function, mesh=mesh, in_specs=given, out_specs=made, axis_names=set(names))


def place_of(kernel: nnx.Variable[Any], bias: nnx.Variable[Any] | None = None) -> Place | None:
    """Where a kernel is.

    None if another axis is divided, too, or the bias is not divided as the columns. While tracing also if it
    may be divided over axes that are not explicit, as nothing tells of these.
    """
    found = _divided(kernel)
    if found is None:
        return None
    mesh, (rows, columns, *others) = found[0], (*found[1], None, None)
    if any(others) or (bias is not None and _divided(bias) != _in_one_form(mesh, (columns,))):
        return None
    return Place(mesh, rows, columns)


def _divided(parameter: nnx.Variable[Any]) -> tuple[SomeMesh, tuple[Any, ...]] | None:
    """Mesh and axes by which a parameter is divided, none if it is not; None if that is not known."""
    value = parameter.get_value()
    if isinstance(value, jax.core.Tracer):
        sharding = jax.typeof(value).sharding
        named = {*(parameter.get_metadata("out_sharding", ()) or ()), None}
        is_known = named <= {None, *sharding.mesh.explicit_axes}
        return _in_one_form(sharding.mesh, sharding.spec) if is_known else None
    sharding = getattr(value, "sharding", None)  # NumPy arrays have none
    is_typed = jax.typeof(value).sharding.mesh.explicit_axes  # also over an axis of one device
    if sharding is None or (sharding.is_fully_replicated and not is_typed):
        return None, ()
    return _in_one_form(sharding.mesh, sharding.spec) if isinstance(sharding, NamedSharding) else None


def _in_one_form(mesh: SomeMesh, axes: Iterable[Any]) -> tuple[SomeMesh, tuple[Any, ...]]:
    """Axes without None at their end, and no mesh if there are none."""
    axes = tuple(axes)
    while axes and axes[-1] is None:
        axes = axes[:-1]
    return mesh if axes else None, axes
