"""Reads the parameters of a module as NumPy arrays by name, and sets them from such arrays."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nsa_jax.array_typing import Array

LISTED = 3  # an error lists at most this many names of each kind, because a model has hundreds


def weights(module: nnx.Module) -> dict[str, np.ndarray]:
    """Returns copies of all parameters of a module, by name.

    Args:
      module: an `NSAAttention`, a `Transformer`, or any other module with `nnx.Param`s.

    Returns:
      NumPy arrays in the dtypes of the parameters. A name is the path of the parameter in the module, joined
      by dots, as in checkpoints: `query_proj.kernel`, `layers.0.attention.out_proj.kernel`.

    Raises:
      TypeError: the module is none, or does not hold arrays because it is abstract or traced.

    Examples:
      >>> nsa_jax.nn.weights(layer)["gate.bias_in"].shape
      (128,)
    """
    _check_module(module)
    parameters = by_path(nnx.state(module, nnx.Param))
    named = {name: parameter.get_value() for name, parameter in parameters.items()}
    _check_arrays(named, "Call it outside jit, on a module that has been created or loaded")
    return {name: np.array(value) for name, value in named.items()}


def load_weights(module: nnx.Module, weights: Mapping[str, np.ndarray | Array]) -> None:
    """Sets all parameters of a module to copies of the given arrays, the counterpart of `nsa_jax.nn.weights`.

    Args:
      module: any module with `nnx.Param`s; it is changed in place and keeps its dtypes and shardings. It may
        be abstract, as made by `nnx.eval_shape`, so that no initial parameters are computed. If an abstract
        module has shardings, its mesh must be in context.
      weights: one array for each parameter, by the names that `nsa_jax.nn.weights` gives.

    Raises:
      TypeError: something is not an array, or is an integer array for a floating-point parameter or the other
        way round.
      ValueError: parameters are missing, extra or of another shape, or a mesh is missing. Nothing is set
        then.

    Examples:
      >>> nsa_jax.nn.load_weights(layer, dict(np.load("layer.npz")))
    """
    _check_module(module)
    state = nnx.state(module, nnx.Param)
    parameters = by_path(state)
    present = {name: parameter.get_value() for name, parameter in parameters.items()}
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights must map names to arrays, got {type(weights).__name__}. Pass a dict.")
    _check_arrays(weights, "Convert them, for example with np.asarray, outside jit")
    weights = {name: _without_void(value) for name, value in weights.items()}
    check_names_and_shapes(present, weights)
    _check_kinds(present, weights)
    places = {name: sharding_of(value) for name, value in present.items()}
    for name, parameter in parameters.items():
        # Copied, because JAX may use the memory of a NumPy array instead of copying it.
        own = np.array(weights[name], dtype=present[name].dtype)
        parameter.set_value(jax.device_put(own, places[name]))
    nnx.update(module, state)


def by_path(state: nnx.State) -> dict[str, nnx.Variable]:
    """The variables of a state of parameters or gradients, by their paths, joined by dots."""
    return {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}


def check_names_and_shapes(wanted: Mapping[str, Array], given: Mapping[str, np.ndarray | Array]) -> None:
    """Raises ValueError unless `given` has the names and shapes of `wanted`."""
    problems = differences(wanted, given)
    if problems:
        raise ValueError(
            f"weights must be those of the module, got {', '.join(problems)}. Rename or convert them, or "
            "create the module with other arguments."
        )


def differences(wanted: Mapping[str, Array], given: Mapping[str, np.ndarray | Array]) -> list[str]:
    """How `given` differs from `wanted`: "2 missing (a, b)", "1 extra (c)", "1 of another shape (...)"."""
    shapes = {name: (tuple(given[name].shape), tuple(wanted[name].shape)) for name in wanted if name in given}
    found = {
        "missing": [name for name in wanted if name not in given],
        "extra": [name for name in given if name not in wanted],
        "of another shape": [
            f"{name}: {got} for {needed}" for name, (got, needed) in shapes.items() if got != needed
        ],
    }
    return [f"{len(names)} {kind} ({listed(names)})" for kind, names in found.items() if names]


def listed(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def sharding_of(value: Array | jax.ShapeDtypeStruct) -> jax.sharding.Sharding | None:
    """The sharding that a new array for this parameter needs; None for the default device.

    Raises:
      TypeError: the parameter is traced.
      ValueError: the parameter is abstract and sharded, and no mesh is in context.
    """
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"weights must be loaded outside jit, got a module that holds {type(value).__name__}. Load them "
            "before the compiled function is called."
        )
    if isinstance(value, jax.Array):
        return value.sharding if value.committed else None
    if not isinstance(value.sharding, jax.NamedSharding):
        return value.sharding
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        raise ValueError(
            "an abstract module with shardings needs its mesh in context, got none. Call it inside "
            "`with jax.set_mesh(mesh):`."
        )
    return jax.NamedSharding(mesh, value.sharding.spec)


def _check_module(module: Any) -> None:
    if not isinstance(module, nnx.Module):
        raise TypeError(f"module must be an nnx.Module, got {type(module).__name__}. Pass a layer or model.")


def _check_arrays(named: Mapping[str, Any], remedy: str) -> None:
    for name, value in named.items():
        if not isinstance(value, np.ndarray | np.generic | jax.Array) or isinstance(value, jax.core.Tracer):
            raise TypeError(f"weights must be arrays, got {type(value).__name__} at {name}. {remedy}.")


def _without_void(array: np.ndarray | Array) -> np.ndarray | Array:
    """NumPy's files hold bfloat16 as two bytes without a meaning; no other floating dtype becomes that."""
    return array.view(jnp.bfloat16) if array.dtype == np.dtype("V2") else array


def _check_kinds(present: Mapping[str, Array], given: Mapping[str, np.ndarray | Array]) -> None:
    for name, value in present.items():
        is_floating = [jnp.issubdtype(array.dtype, jnp.floating) for array in (value, given[name])]
        if is_floating[0] != is_floating[1]:
            raise TypeError(
                f"weights must be floating point where the parameters are, and only there, got "
                f"{given[name].dtype} at {name} for {value.dtype}. Convert them."
            )
