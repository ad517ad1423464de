"""The first devices of a machine as a mesh of one axis, for benchmarks that spread a model over several."""

import contextlib
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks.command_line import InputError

AXIS = "devices"


def check(count: int) -> None:
    """Raises InputError unless the machine has so many devices."""
    if count > jax.device_count():
        raise InputError(
            f"--devices must be at most the {jax.device_count()} of this machine, got {count}. "
            "Pass a smaller number."
        )


def mesh(count: int) -> Mesh:
    """A mesh of the first `count` devices."""
    return jax.make_mesh((count,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])


def in_context(count: int) -> contextlib.AbstractContextManager[Any]:
    """A context with a mesh of the first `count` devices; with none for a single one."""
    if count == 1:
        return contextlib.nullcontext()
    return jax.set_mesh(mesh(count))


def put(tree: Any, spec: PartitionSpec) -> Any:
    """Puts arrays onto the mesh in context."""
    return jax.device_put(tree, NamedSharding(jax.sharding.get_mesh(), spec))
