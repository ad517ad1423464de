"""Checks that a checkpoint can be restored. `save` calls them before it writes anything."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nsa_jax.config import NSAConfig
from nsa_jax.model.abstract import parameters
from nsa_jax.model.config import FUNCTIONS, TransformerConfig
from nsa_jax.model.transformer import Transformer
from nsa_jax.nn.parameters import differences, listed
from nsa_jax.nn.selector import SelectorConfig

SETTINGS = bool | int | float | str | tuple | NSAConfig | SelectorConfig | None
# Settings that change how and where a module computes, not what. `restore` sets them again.
FREE_SETTINGS = ("dtype", "precision", "implementation", "deterministic", "context")
_REMEDY = "Build the model from its config, or save nsa_jax.nn.weights of it yourself"


def check_model(model: Transformer) -> None:
    """Raises unless `restore` can rebuild exactly this model from its configuration and parameters.

    Raises:
      TypeError: it is not a `Transformer`, or its configuration holds something that JSON cannot.
      ValueError: its parameters or modules are not those of its configuration, for example because it is
        prepared, or its parameters are not arrays that can be read, for example because they were donated.
    """
    if type(model) is not Transformer:
        raise TypeError(f"model must be a Transformer, got {type(model).__name__}. {_REMEDY}.")
    _check_config(model.config)
    expected = nnx.eval_shape(lambda: Transformer(model.config, rngs=nnx.Rngs(0)))
    _check_parameters(model, expected)
    if changed := list(_changed_modules(model, expected)):
        raise ValueError(
            f"model must have the modules of its config, got others at {listed(changed)}. {_REMEDY}."
        )


def check_training(named: dict[str, Any]) -> None:
    """Raises ValueError unless Orbax can store and restore all leaves."""
    if not named:
        raise ValueError("training must hold an array or a number, got none. Leave it out.")
    for name, leaf in named.items():
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ValueError(
                f"training must hold arrays, got a donated one at {name!r}. Save what the step returned."
            )
        dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
        if not (jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool)):
            raise ValueError(
                f"training must hold numbers, got {dtype} at {name!r}. Convert it, random keys with "
                "jax.random.key_data."
            )
        if np.size(leaf) == 0:
            raise ValueError(
                f"training must hold arrays that are not empty, got shape {np.shape(leaf)} at {name!r}. "
                "Drop it."
            )


def _check_config(config: Any) -> None:
    if type(config) is not TransformerConfig:
        raise TypeError(f"model.config must be a TransformerConfig, got {type(config).__name__}. {_REMEDY}.")
    functions = [name for name in FUNCTIONS if callable(getattr(config, name))]
    if functions:
        raise TypeError(
            f"model.config must hold no functions to be saved, got {', '.join(functions)}. Save "
            "nsa_jax.nn.weights of the model, and load them into one that is built by the same code."
        )
    scalings = [each.rope_scaling for each in config.per_layer if each.rope_scaling is not None]
    values = [(name, value) for name, value in _values(config).items() if name != "rope_scaling"]
    values += [(f"rope_scaling.{name}", value) for each in scalings for name, value in _values(each).items()]
    odd = [
        f"{name}={value!r}"
        for name, value in values
        for each in (value if isinstance(value, tuple) else (value,))
        if not isinstance(each, int | float | str | NSAConfig | SelectorConfig | None)
    ]
    if odd:
        raise TypeError(
            f"model.config must hold plain numbers and strings, got {', '.join(odd)}. Build the model with, "
            'for example, dtype="bfloat16" or int(size).'
        )


def _values(of: Any) -> dict[str, Any]:
    return {field.name: getattr(of, field.name) for field in dataclasses.fields(of)}


def _check_parameters(model: Transformer, expected: Transformer) -> None:
    held, wanted = (parameters(each) for each in (model, expected))
    for name, value in held.items():
        if kind := _without_numbers(value):
            raise ValueError(
                f"model must hold its parameters as arrays, got a {kind} at {name}. Save it outside jit, "
                "after it was created and before its arrays are donated."
            )
    problems = differences(wanted, held)
    if not problems:
        names = [name for name in wanted if held[name].dtype != wanted[name].dtype]
        told = [f"{name}: {held[name].dtype} for {wanted[name].dtype}" for name in names]
        problems = [f"{len(told)} of another dtype ({listed(told)})"] if told else []
    if problems:
        raise ValueError(
            f"model must have the parameters of its config, got {', '.join(problems)}. {_REMEDY}."
        )


def _without_numbers(value: Any) -> str | None:
    """Says what a value is instead of an array, or returns None for an array that can be read."""
    if isinstance(value, jax.core.Tracer) or not isinstance(value, jax.Array | np.ndarray):
        return type(value).__name__
    return "deleted array" if isinstance(value, jax.Array) and value.is_deleted() else None


def _changed_modules(module: nnx.Module, expected: nnx.Module, path: str = "model") -> Iterator[str]:
    """Paths of modules that differ in type, submodules or a setting, outermost first."""
    here, there = _submodules(module), _submodules(expected)
    same_kind = type(module) is type(expected) and here.keys() == there.keys()
    if not same_kind or _settings(module) != _settings(expected):
        yield path
        return
    for name, child in here.items():
        yield from _changed_modules(child, there[name], f"{path}.{name}")


def _submodules(module: nnx.Module) -> dict[str, nnx.Module]:
    return {name: value for name, value in vars(module).items() if isinstance(value, nnx.Module)}


def _settings(module: nnx.Module) -> dict[str, Any]:
    """What a module holds besides parameters and submodules, as far as it can be compared.

    Functions are compared in our modules only. In Flax's modules they are initializers, and no two
    initializers are equal.
    """
    ours = type(module).__module__.partition(".")[0] == "nsa_jax"
    return {
        name: value
        for name, value in vars(module).items()
        if (isinstance(value, SETTINGS) or (ours and _is_function(value)))
        and name not in FREE_SETTINGS
        and not name.startswith("_pytree")
    }


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, nnx.Module | nnx.Variable)
