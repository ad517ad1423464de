"""Checks of sampling parameters: numbers for all rows, or arrays with one for each."""

import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nsa_jax.array_checks import on_host
from nsa_jax.option_checks import LARGEST_INT, check_int

LARGEST_FLOAT = float(np.finfo(np.float32).max)


def check_sampling(temperature: Any, top_k: Any, top_p: Any) -> None:
    """Raises TypeError or ValueError unless the parameters are in range and have a use."""
    for name, number in (("temperature", temperature), ("top_p", 1.0 if top_p is None else top_p)):
        if isinstance(number, bool) or not isinstance(number, numbers.Real):
            raise TypeError(f"{name} must be a number, got {type(number).__name__}. Pass a float.")
    if not 0 <= temperature <= LARGEST_FLOAT:
        raise ValueError(f"temperature must be finite and at least 0, got {temperature}. Pass 0 for greedy.")
    if top_k is not None:
        check_int(low=1, top_k=top_k)
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}. Pass None to keep all tokens.")
    if temperature == 0 and (top_k is not None or top_p is not None):
        raise ValueError(
            f"top_k and top_p must come with a temperature above 0, got {temperature=}, {top_k=} and "
            f"{top_p=}. Set a temperature, or leave them out."
        )


def check_greedy(*, top_k: Any, top_p: Any, min_p: Any, **others: Any) -> None:
    """Raises ValueError if a parameter is given that has no use without a temperature."""
    given = dict(top_k=top_k, top_p=top_p, min_p=min_p)
    if useless := [name for name, x in given.items() if x is not None]:
        raise ValueError(
            f"{', '.join(useless)} must come with a temperature above 0, got temperature=0. Set a "
            "temperature, or leave them out."
        )


class _Range(NamedTuple):
    """Numbers that a parameter may be: from `low` on, or above it if it is `open`, to `high`."""

    low: float
    high: float
    open: bool = False

    def holds(self, x: Any) -> Any:
        return ((x > self.low) if self.open else (x >= self.low)) & (x <= self.high)

    def __str__(self) -> str:
        return f"{'above' if self.open else 'at least'} {self.low:.3g} and at most {self.high:.3g}"


_PARAMETERS = {
    "temperature": _Range(0, LARGEST_FLOAT),
    "top_k": _Range(1, LARGEST_INT),
    "top_p": _Range(0, 1, open=True),
    "min_p": _Range(0, 1),
    "repetition_penalty": _Range(0, LARGEST_FLOAT, open=True),
    "presence_penalty": _Range(-LARGEST_FLOAT, LARGEST_FLOAT),
}

# With these numbers, parameters change nothing.
NEUTRAL = dict(
    temperature=0.0, top_k=LARGEST_INT, top_p=1.0, min_p=0.0, repetition_penalty=1.0, presence_penalty=0.0
)


def as_row(name: str, number: float) -> np.ndarray:
    """A parameter as an array with the number of one row."""
    return np.full(1, number, np.int32 if name == "top_k" else np.float64)


def check_parameter(name: str, given: Any, batch: int) -> Any:
    """Returns a sampling parameter as a Python number, an array with one for each row, or None.

    Raises:
      TypeError: it is something else.
      ValueError: a number is out of range, or there is not one for each row.
    """
    if given is None and name != "temperature":  # it is 0 for none
        return None
    whole, allowed = name == "top_k", _PARAMETERS[name]
    if isinstance(given, jax.Array | np.ndarray) and given.ndim:
        if given.shape != (batch,):
            raise ValueError(
                f"{name} must be one number, or one per row, got {given.shape=} and {batch=}. Pass [B]."
            )
        kinds = (jnp.integer,) if whole else (jnp.integer, jnp.floating)
        if not any(jnp.issubdtype(given.dtype, kind) for kind in kinds):
            raise TypeError(f"{name} must hold {'ints' if whole else 'numbers'}, got {given.dtype}. Cast it.")
        values = on_host(given)
        if values is not None and not allowed.holds(values).all():
            raise ValueError(f"{name} must be {allowed}, got {values.tolist()}. Call np.clip.")
        return given.astype(jnp.int32 if whole else float)
    kind: Any = numbers.Integral if whole else numbers.Real
    if isinstance(given, bool) or not isinstance(given, kind):
        raise TypeError(
            f"{name} must be {'an int' if whole else 'a number'}, or an array with one for each row, got "
            f"{type(given).__name__}. Pass a number."
        )
    if not allowed.holds(given):
        raise ValueError(f"{name} must be {allowed}, got {given}. Pass None to leave it out.")
    return int(given) if whole else float(given)


def check_draw(
    batch: int, *, temperature: Any = None, top_k: Any = None, top_p: Any = None, min_p: Any = None
) -> None:
    """Raises TypeError or ValueError unless each is None, an array `[]` or `[batch]`, or in its range."""
    floats: dict[str, tuple[Any, float]] = dict(
        temperature=(temperature, LARGEST_FLOAT), top_p=(top_p, 1), min_p=(min_p, 1)
    )
    for name, (number, most) in floats.items():
        if number is None or _is_array(number, jnp.floating, batch):
            continue
        is_number = isinstance(number, numbers.Real) and not isinstance(number, bool)
        if not is_number:
            raise TypeError(
                f"{name} must be a number or an array, [] or [B], got {type(number).__name__}. Pass a float."
            )
        if not 0 < number <= most:
            raise ValueError(
                f"{name} must be above 0 and at most {most:.3g}, got {number}. Pass None to leave it out."
            )
    if top_k is not None and not _is_array(top_k, jnp.integer, batch):
        check_int(low=1, top_k=top_k)


def _is_array(number: Any, kind: Any, batch: int) -> bool:
    is_array = isinstance(number, jax.Array | np.ndarray)
    return is_array and number.shape in ((), (batch,)) and jnp.issubdtype(number.dtype, kind)
