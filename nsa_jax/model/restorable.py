"""Checks that a checkpoint can be restored. `save` calls them before it writes anything."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nsa_jax.config import NSAConfig
from nsa_jax.model.config import TransformerConfig
from nsa_jax.model.transformer import Transformer
from nsa_jax.nn.parameters import by_path, listed

PLAIN = int | float | str | NSAConfig | None  # what a checkpoint holds of a configuration
# Settings that change how and where a module computes, not what. `restore` sets them again.
FREE_SETTINGS = ("dtype", "precision", "implementation", "deterministic", "context")
_REMEDY = "Build the model from its config, or save nsa_jax.nn.weights of it yourself."


def check_model(model: Transformer) -> None:
    """Raises unless `restore` can rebuild exactly this model from its configuration and parameters.

    Raises:
      TypeError: it is not a `Transformer`, or its configuration holds something that JSON cannot.
      ValueError: its parameters or modules are not those of its configuration, or its parameters are not
        arrays that can be read, for example because they were donated.
    """
    if type(model) is not Transformer:
        raise TypeError(f"model must be a Transformer, got {type(model).__name__}. {_REMEDY}")
    config = model.config
    if type(config) is not TransformerConfig:
        raise TypeError(f"model.config must be a TransformerConfig, got {type(config).__name__}. {_REMEDY}")
    values = _values("", config)
    if config.rope_scaling is not None:
        values |= _values("rope_scaling.", values.pop("rope_scaling"))
    if odd := [f"{name}={value!r}" for name, value in values.items() if not isinstance(value, PLAIN)]:
        raise TypeError(
            f"model.config must hold plain numbers and strings, got {', '.join(odd)}. Build the model with, "
            'for example, dtype="bfloat16" or int(size); if it has functions of yours, save '
            "nsa_jax.nn.weights of it, and load them into one that is built by the same code."
        )
    for name, variable in by_path(nnx.state(model, nnx.Param)).items():
        if kind := _without_numbers(variable.get_value()):
            raise ValueError(
                f"model must hold its parameters as arrays, got a {kind} at {name}. Save it outside jit, "
                "after it was created and before its arrays are donated."
            )
    found = _parts(model)
    expected = _parts(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    names = [*expected, *(name for name in found if name not in expected)]
    if changed := [name for name in names if found.get(name) != expected.get(name)]:
        outermost = listed([name for name in changed if name.rpartition(".")[0] not in changed])
        raise ValueError(f"model must be as its config says, got others at {outermost}. {_REMEDY}")


def check_training(named: dict[str, Any]) -> None:
    """Raises ValueError unless Orbax can store and restore all leaves."""
    if not named:
        raise ValueError("training must hold an array or a number, got none. Leave it out.")
    for name, leaf in named.items():
        dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
        donated = isinstance(leaf, jax.Array) and leaf.is_deleted()
        is_number = jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool)
        if donated or not is_number or np.size(leaf) == 0:
            got = "a donated array" if donated else f"{dtype} of shape {np.shape(leaf)}"
            raise ValueError(
                f"training must hold numbers and arrays of them, got {got} at {name!r}. Save what the step "
                "returned, convert it (random keys with jax.random.key_data), or drop it."
            )


def _without_numbers(value: Any) -> str | None:
    """Says what a value is instead of an array, or returns None for an array that can be read."""
    if isinstance(value, jax.core.Tracer) or not isinstance(value, jax.Array | np.ndarray):
        return type(value).__name__
    return "deleted array" if isinstance(value, jax.Array) and value.is_deleted() else None


def _values(prefix: str, of: Any) -> dict[str, Any]:
    return {prefix + field.name: getattr(of, field.name) for field in dataclasses.fields(of)}


def _parts(model: Transformer) -> dict[str, Any]:
    """Shape and dtype of each parameter, and kind and settings of each module, by their paths."""
    parameters = by_path(nnx.state(model, nnx.Param))
    values = {name: variable.get_value() for name, variable in parameters.items()}
    return {name: (x.shape, x.dtype) for name, x in values.items()} | dict(_modules(model, "model"))


def _modules(module: nnx.Module, path: str) -> Iterator[tuple[str, Any]]:
    """Functions are settings in our modules only: in Flax's they are initializers, and no two are equal."""
    ours = type(module).__module__.partition(".")[0] == "nsa_jax"
    own = {name: value for name, value in vars(module).items() if not name.startswith("_pytree")}
    modules = {name: value for name, value in own.items() if isinstance(value, nnx.Module)}
    others = {name: x for name, x in own.items() if name not in (*modules, *FREE_SETTINGS)}
    settings = {
        name: value
        for name, value in others.items()
        if isinstance(value, PLAIN | tuple)
        or (ours and callable(value) and not isinstance(value, nnx.Variable))
    }
    yield path, (type(module), settings)
    for name, child in modules.items():
        yield from _modules(child, f"{path}.{name}")
