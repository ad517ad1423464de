"""Checks of options: ints and sequences of them, numbers, switches, names and dtypes."""

import math
import numbers
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

LARGEST_INT = 2**31 - 1  # indices are int32
FLOATS = ("bfloat16", "float16", "float32", "float64")


def check_int(*, low: int | None = None, high: int = LARGEST_INT, **values: Any) -> None:
    """Raises TypeError or ValueError unless the values are ints from `low` to `high`; `low` may be None.

    Ints of NumPy are ints, booleans are not.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError(f"{name} must be an int, got {type(value).__name__}. Pass a whole number.")
        value = int(value)
        if low is not None and value < low:
            raise ValueError(f"{name} must be at least {low}, got {value}. Pass a larger number.")
        if value > high:
            raise ValueError(f"{name} must be at most {high}, got {value}. Pass a smaller number.")


def check_ints(*, low: int | None = None, **values: Any) -> None:
    """Raises TypeError or ValueError unless the values are sequences of ints of at least `low`.

    A vector of NumPy is such a sequence, a string is none.
    """
    for name, value in values.items():
        found = value.tolist() if isinstance(value, np.ndarray) else value
        if isinstance(found, str) or not isinstance(found, Sequence):
            raise TypeError(f"{name} must be a sequence of ints, got {type(value).__name__}. Pass a list.")
        check_int(low=low, **{f"{name}[{i}]": each for i, each in enumerate(found)})


def check_number(**values: Any) -> None:
    """Raises TypeError or ValueError unless the values are finite numbers."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{name} must be a number, got {type(value).__name__}. Pass an int or a float.")
        if not is_finite(value):
            raise ValueError(f"{name} must be finite, got {value}. Pass an ordinary number.")


def check_positive(**values: Any) -> None:
    """Raises TypeError or ValueError unless the values are finite numbers above 0."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{name} must be a number, got {type(value).__name__}. Pass an int or a float.")
        if not (is_finite(value) and float(value) > 0):
            raise ValueError(f"{name} must be finite and above 0, got {value}. Pass a positive number.")


def is_finite(value: numbers.Real) -> bool:
    """Whether a number is finite as a float: an int may be too large for one."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def check_flag(**values: Any) -> None:
    """Raises TypeError unless the values are True or False: a string such as "no" would count as True."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {type(value).__name__}. Pass a bool.")


def check_choice(known: Iterable[str], **values: Any) -> None:
    """Raises ValueError unless the values are among the names that are known."""
    for name, value in values.items():
        if not isinstance(value, str) or value not in known:
            raise ValueError(f"{name} must be one of {tuple(known)}, got {value!r}. Choose one of them.")


def check_function(**values: Any) -> None:
    """Raises TypeError unless the values can be called."""
    for name, value in values.items():
        if not callable(value):
            raise TypeError(f"{name} must be a function, got {type(value).__name__}. Pass a function.")


def dtype_name(value: Any) -> str | None:
    """The name of a dtype that is given in any form; None for what is none."""
    try:
        return None if value is None else jnp.dtype(value).name  # NumPy takes None for float64
    except TypeError:  # no dtype has this name
        return None


def check_dtype(**values: Any) -> None:
    """Raises ValueError unless the values are floating-point dtypes of at least 16 bits, or names of such."""
    check_dtype_among(FLOATS, "floating", **values)


def check_dtype_among(known: tuple[str, ...], kind: str, /, **values: Any) -> None:
    """Raises ValueError unless the values are dtypes that are known, or names of such."""
    for name, value in values.items():
        if dtype_name(value) not in known:
            given = getattr(value, "__name__", repr(value))
            raise ValueError(f"{name} must be {kind}, got {given}. Pass one of {known}.")
