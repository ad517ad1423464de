"""How far a result is from the exact one, as a share of its error budget.

The budget is the package's (`nsa_jax.budget`): twice the error of the same maths in the input's own
precision, and `8 eps` of the largest value. Gradients are differences. Where a query sees one key they are
zero but for rounding: there the largest value is that of the terms. Along a row values shrink, as the average
of more and more keys does: in 16 bits, late outputs of 64k tokens are less than `8 eps` of the first one. So
stretches of a row have budgets of their own.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.inputs import of_query
from nsa_jax.array_typing import Array
from nsa_jax.budget import distance, size

TINY = 1e-300  # makes 0 of a budget of 0 green and anything else red
SHORTEST = 32  # tokens of the first and the last stretch: the error of a few numbers may be small by luck

# Of a part: how far a result, and the same maths in its precision, are from the exact one; how large that is.
type Errors = Callable[[Any], tuple[float, ...]]


class Expected(NamedTuple):
    """What results should be, by name, in float64 on the host, or on a device as computed.

    Attributes:
      same: computed in the input's precision.
      exact: computed in float64.
      terms: of gradients that are differences, as large as what they are a difference of; on the host.
    """

    same: Any
    exact: Any
    terms: Any = None


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Largest error of a check as a share of its budget, and where it was."""

    share: float
    where: str

    @property
    def green(self) -> bool:
        """Whether speed may be reported."""
        return self.share <= 1.0

    def __str__(self) -> str:
        return f"{'green' if self.green else 'RED'}: error {self.share:.2f} of its budget in {self.where}"


NOTHING = Verdict(0.0, "nothing")


def worst(first: Verdict, *others: Verdict) -> Verdict:
    """The one that takes most of its budget, the first of equal ones."""
    return max(first, *others, key=lambda verdict: verdict.share) if others else first


def stretches(length: int) -> list[slice]:
    """Tokens that share a budget: from both ends to the middle each stretch is twice as long as the last."""
    ends, size = [0], SHORTEST
    while 2 * (ends[-1] + size) < length:
        ends.append(ends[-1] + size)
        size *= 2
    edges = sorted({*ends, *(length - end for end in ends)})
    return [slice(first, last) for first, last in itertools.pairwise(edges)]


def judge(
    got: Mapping[str, Any], expected: Expected, positions: np.ndarray, whole: Collection[str] = ()
) -> Verdict:
    """Compares results by name with the exact ones.

    Args:
      got: what a program returned; axis 1 is that of tokens.
      expected: what it should be.
      positions: tokens of what has a row for each query; others have all tokens.
      whole: names of results without an axis of tokens, which have one budget.
    """
    verdict = NOTHING
    for name, found in got.items():
        eps = float(jnp.finfo(found.dtype).eps)
        same, exact = expected.same[name], expected.exact[name]
        if found.shape != exact.shape:
            return Verdict(np.inf, f"the shape of {name}")
        errors_in = (_on_host if isinstance(exact, np.ndarray) else _on_device)(found, same, exact)
        terms = None if expected.terms is None else expected.terms[name]
        for part in [slice(None)] if name in whole else stretches(found.shape[1]):
            at = (...,) if name in whole else (slice(None), part)
            off, rounding, largest = errors_in(at)
            budget = 2 * rounding + 8 * eps * max(largest, 0.0 if terms is None else size(terms[at]))
            assert np.isfinite(budget), name
            share = off / (budget + TINY)
            if share > verdict.share:
                verdict = Verdict(share, name if name in whole else f"{name} {_span(name, part, positions)}")
    return verdict


def _on_host(found: Any, same: np.ndarray, exact: np.ndarray) -> Errors:
    found = np.asarray(found, np.float64)
    return lambda at: (distance(found[at], exact[at]), distance(same[at], exact[at]), size(exact[at]))


def _on_device(found: Any, same: Array, exact: Array) -> Errors:
    """The same of large arrays, of which the host gets three numbers for each token."""
    with jax.enable_x64(True):
        of_tokens = [np.asarray(x) for x in _errors_of_tokens(found, same, exact)]
    return lambda at: tuple(float(x[at].max()) for x in of_tokens)


@jax.jit
def _errors_of_tokens(found: Array, same: Array, exact: Array) -> tuple[Array, Array, Array]:
    def apart(x: Array) -> Array:
        x = x.astype(exact.dtype)
        distance = jnp.where(x == exact, 0, jnp.abs(x - exact))
        return _largest(jnp.where(jnp.isnan(distance), jnp.inf, distance))

    return apart(found), apart(same), _largest(jnp.where(jnp.isfinite(exact), jnp.abs(exact), 0))


def sizes_of_tokens(x: np.ndarray | Array) -> np.ndarray:
    """The size of an array at each token; that of the host as it is."""
    if isinstance(x, np.ndarray):
        return x
    with jax.enable_x64(True):
        return np.asarray(jax.jit(lambda x: _largest(jnp.where(jnp.isfinite(x), jnp.abs(x), 0)))(x))


def _largest(x: Array) -> Array:
    """Along all axes but that of tokens."""
    return x.max(axis=[axis for axis in range(x.ndim) if axis != 1], keepdims=True)


def _span(name: str, part: slice, positions: np.ndarray) -> str:
    first, last = part.start, part.stop - 1
    return f"{positions[first]} to {positions[last]}" if of_query(name) else f"{first} to {last}"
