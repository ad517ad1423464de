"""How far a result may be from the exact one.

A result may be off by `2 * err(the same maths in the result's precision) + 8 eps max|exact|`. The first term
is the rounding that the inputs and the maths bring with them, the second the rounding of the result itself.
"""

import numpy as np

from nsa_jax.array_typing import Array


def distance(found: np.ndarray | Array, exact: np.ndarray | Array) -> float:
    """max|found - exact|; 0 between equal infinities, infinite beside a NaN or for another shape."""
    found, exact = np.asarray(found, np.float64), np.asarray(exact, np.float64)
    if found.shape != exact.shape:
        return float("inf")
    with np.errstate(invalid="ignore"):
        apart = np.where(found == exact, 0, np.abs(found - exact))
    return float(np.max(np.where(np.isnan(apart), np.inf, apart), initial=0))


def size(values: np.ndarray | Array) -> float:
    """max|values| of those that are finite."""
    values = np.abs(np.asarray(values, np.float64))
    return float(np.max(values[np.isfinite(values)], initial=0))


def allowance(same: np.ndarray | Array, exact: np.ndarray | Array, eps: float) -> float:
    """The budget of a result, from the same maths in its precision and from the exact result.

    Args:
      same: what the same maths gives in the precision of the result.
      exact: the result in float64.
      eps: that of the dtype of the result.

    Raises:
      ValueError: their shapes differ, so nothing could be over the budget.
    """
    if np.shape(same) != np.shape(exact):
        raise ValueError(
            f"same and exact must have one shape, got {np.shape(same)} and {np.shape(exact)}. "
            "Pass results of one function."
        )
    return 2 * distance(same, exact) + 8 * eps * size(exact)
