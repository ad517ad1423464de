"""Random modules on the mesh in context, made without compiling their initialisers."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from modules import randomised


def drawn(make: Callable[[], nnx.Module], scale: float = 0.3) -> Any:
    """The module with random parameters, each where it belongs on the mesh in context, if there is one.

    The values are those of `modules.randomised`, so they are the same on every mesh.
    """
    graph, state = nnx.split(randomised(nnx.eval_shape(make), scale))
    for _, variable in nnx.to_flat_state(state):
        if spec := variable.get_metadata("out_sharding", ()):
            # From NumPy, since JAX compiles a program for each shape to cut what lies on a device.
            variable.set_value(jax.device_put(np.asarray(variable.get_value()), PartitionSpec(*spec)))
    return nnx.merge(graph, state)
