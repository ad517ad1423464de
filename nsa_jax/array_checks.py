"""Checks of arrays against the shapes and dtypes in annotations, and of values that the host knows."""

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nsa_jax.array_typing import Array, Bool, Float, Float32, Int32
from nsa_jax.option_checks import FLOATS, LARGEST_INT


def check_arrays(owner: Callable[..., Any], **arrays: Any) -> dict[str, int]:
    """Checks arrays by the annotations of the function or class that they are given to.

    Returns:
      The size of each letter in the annotations.

    Raises:
      TypeError, ValueError: as `bind_shapes` and `check_dtypes`.
    """
    annotations = annotations_of(owner)
    sizes = bind_shapes(annotations, arrays)
    check_dtypes(annotations, arrays)
    return sizes


def bind_shapes(annotations: "Annotations", arrays: Mapping[str, Any]) -> dict[str, int]:
    """Finds the size of each letter in `annotations` from the shapes of `arrays`.

    An array may be None if its annotation allows it.

    Raises:
      TypeError: something is not an array.
      ValueError: an array has the wrong number of axes, or one letter has two sizes.
    """
    sizes: dict[str, int] = {}
    origin: dict[str, str] = {}
    for name, array in arrays.items():
        annotation, optional = annotations[name]
        axes = annotation.dim_str.split()
        if array is None and optional:
            continue
        if not isinstance(array, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
            raise TypeError(f"{name} must be an array, got {type(array).__name__}. Pass a jax.Array.")
        if len(array.shape) != len(axes):
            raise ValueError(
                f"{name} must have {len(axes)} axes [{', '.join(axes)}], got shape {tuple(array.shape)}. "
                "Reshape or transpose it."
            )
        for axis, size in zip(axes, array.shape, strict=True):
            expected = int(axis) if axis.isdigit() else sizes.setdefault(axis, size)
            if size != expected:
                source = "by definition" if axis.isdigit() else f"in {origin[axis]}"
                raise ValueError(
                    f"axis {axis} of {name} must be {expected} ({source}), got shape {tuple(array.shape)}. "
                    f"Pass {name} as [{', '.join(axes)}]."
                )
            origin.setdefault(axis, name)
    return sizes


type Annotations = Mapping[str, tuple[Any, bool]]


def annotations_of(owner: Callable[..., Any]) -> Annotations:
    """The jaxtyping annotation of each array of a function or a class, and whether it may be None."""
    return _annotations_of(owner)


# Separate from `annotations_of` because type checkers let a cached function take hashable types only.
@functools.cache
def _annotations_of(owner: Any) -> Annotations:
    if isinstance(owner, type):
        annotated = inspect.get_annotations(owner)
    else:
        annotated = {name: x.annotation for name, x in inspect.signature(owner).parameters.items()}
    found = {}
    for name, annotation in annotated.items():
        parts = typing.get_args(annotation) or (annotation,)
        if shaped := [part for part in parts if hasattr(part, "dim_str")]:
            found[name] = (shaped[0], type(None) in parts)
    return found


def check_dtypes(annotations: Annotations, arrays: Mapping[str, Any]) -> None:
    """Raises unless each array has the kind of dtype that its annotation names.

    Queries, keys and values must also share one dtype; gates, kernels, weights, log-sum-exps, scores, targets
    and what belongs to a teacher may have their own.

    Raises:
      TypeError: an array has another kind of dtype, or a float type that is not supported.
      ValueError: queries, keys and values differ in dtype, or an integer is too large, see `check_integers`.
    """
    present = {name: array for name, array in arrays.items() if array is not None}
    kinds = {name: annotations[name][0].dtype for name in present}
    floats = {name: x for name, x in present.items() if kinds[name] is Float}
    check_floats(**{name: x for name, x in floats.items() if not _own_dtype(name)})
    for name, array in present.items():
        if name in floats:
            check_floats(**{name: array})
        elif kinds[name] in _EXACT:
            if array.dtype != (expected := _EXACT[kinds[name]]):
                raise TypeError(f"{name} must be {expected}, got {array.dtype}. Cast it.")
        else:
            check_integers(**{name: array})


_EXACT = {Int32: "int32", Bool: "bool", Float32: "float32"}


def _own_dtype(name: str) -> bool:
    return name.startswith(("gates", "kernel", "lse", "weights", "scores", "target", "teacher"))


def check_floats(**arrays: Array) -> None:
    """Raises TypeError or ValueError unless all arrays are of one dtype, a float of at least 16 bits."""
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(
                f"{name} must be floating point, got {array.dtype}. Cast it, for example to bfloat16."
            )
        if array.dtype.name not in FLOATS:
            raise TypeError(f"{name} must be one of {FLOATS}, got {array.dtype}. Cast it to bfloat16.")
    firsts = dict[Any, str]()  # the first array of each dtype
    for name, array in arrays.items():
        firsts.setdefault(array.dtype, name)
    if len(firsts) > 1:
        got = ", ".join(f"{name} {dtype}" for dtype, name in firsts.items())
        raise ValueError(
            f"queries, keys and values must have one dtype, got {got}. Cast them to the same dtype."
        )


def check_integers(**arrays: Any) -> None:
    """Raises unless all arrays hold integers that fit into 32 bits, which indices have.

    Raises:
      TypeError: an array does not hold integers.
      ValueError: a value is known on the host and would wrap around in int32.
    """
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(f"{name} must be an integer array, got {array.dtype}. Cast it to int32.")
        if jnp.iinfo(array.dtype).max > LARGEST_INT:
            check_values(-LARGEST_INT - 1, LARGEST_INT, **{name: array})


def check_cu_seqlens(cu_seqlens: Any) -> None:
    """Raises TypeError or ValueError unless `cu_seqlens` are integers for one row or for several."""
    if not isinstance(cu_seqlens, jax.Array | np.ndarray):
        raise TypeError(f"cu_seqlens must be an array, got {type(cu_seqlens).__name__}. Pass a jax.Array.")
    check_integers(cu_seqlens=cu_seqlens)
    if cu_seqlens.ndim not in (1, 2) or cu_seqlens.shape[-1] < 1:
        raise ValueError(
            f"cu_seqlens must be [n + 1] or [B, n + 1], got shape {cu_seqlens.shape}. Pass one row, or a "
            "batch."
        )


def check_values(low: int, high: int, **arrays: Any) -> None:
    """Raises ValueError if a value is known on the host and not within `low` .. `high`."""
    for name, array in arrays.items():
        values = None if array is None else on_host(array)
        if values is not None and values.size and (values.min() < low or values.max() > high):
            raise ValueError(
                f"{name} must be within {low} .. {high}, got values from {values.min()} to {values.max()}. "
                "Check how they are made."
            )


def check_ids(name: str, ids: Array | np.ndarray, counts: Array | None, vocab_size: int) -> None:
    """Raises ValueError if the host knows a token `ids [B, T]` that is not in the vocabulary.

    Of each row the first `counts [B]` are tokens, and the others padding, which may be anything.
    """
    values = on_host(ids)
    if counts is not None and values is not None:
        real = on_host(counts)
        values = None if real is None else values[np.arange(values.shape[1]) < real[:, None]]
    if values is not None:
        check_values(0, vocab_size - 1, **{name: values})


def on_host(array: Array | np.ndarray) -> np.ndarray | None:
    """The values of an array that the host has: of one in NumPy, or in JAX on a CPU.

    Others are unknown while tracing, or would have to be waited for, which no check is worth.
    """
    if isinstance(array, np.ndarray):
        return array
    if isinstance(array, jax.core.Tracer) or not isinstance(array, jax.Array):
        return None
    if array.is_fully_addressable and all(device.platform == "cpu" for device in array.devices()):
        return np.asarray(array)
    return None
