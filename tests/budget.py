"""How far a result may be from the exact one: the rule of `parity.budget`, for NumPy arrays."""

import numpy as np


def distance(found, exact) -> float:
    """max|found - exact|; 0 between equal infinities, infinite beside a NaN."""
    found, exact = np.asarray(found, np.float64), np.asarray(exact, np.float64)
    assert found.shape == exact.shape, (found.shape, exact.shape)
    with np.errstate(invalid="ignore"):
        apart = np.where(found == exact, 0, np.abs(found - exact))
    return float(np.max(np.where(np.isnan(apart), np.inf, apart), initial=0))


def size(values) -> float:
    """max|values| of those that are finite."""
    values = np.abs(np.asarray(values, np.float64))
    return float(np.max(values[np.isfinite(values)], initial=0))


def allowance(same, exact, eps: float) -> float:
    """`2 * err(the same maths in the result's precision) + 8 eps max|exact|`, eps that of its dtype."""
    return 2 * distance(same, exact) + 8 * eps * size(exact)
