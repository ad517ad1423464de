"""How far apart two results may be, and the row of the table that says so.

A quantity may be off by `2 * err(the same maths in the input's precision) + 8 eps(dtype) max|reference|`, err
being the largest distance from the reference and eps that of the quantity's own dtype. The reference is
`nsa_torch_ref` in float64 for every input dtype: an lse of 16-bit inputs is a float32, which a float32
reference could not judge. "The same maths" is `nsa_torch_ref` on the inputs as they are.

The largest error may hide that all of a result is a little off. So the mean error of the selected branch in
16-bit has a bound of its own, `MEAN_OF_SELECTION`.
"""

import dataclasses
import math

import torch
from torch import Tensor

# Rounding a number between 1/2 and 1 to bfloat16 is wrong by 2^-10 on average, and few outputs of the cases
# are larger. With xla the shortest cases, whose outputs are the largest, take three quarters of this.
MEAN_OF_SELECTION = 1e-3
SELECTION = "slc out"


@dataclasses.dataclass(frozen=True)
class Row:
    """One quantity of one case: what was found and what was allowed. Counts have no mean."""

    case: str
    dtype: str
    quantity: str
    error: float
    budget: float
    note: str = ""
    mean: float | None = None
    mean_budget: float = math.inf

    @property
    def passed(self) -> bool:
        """Whether the errors are within their budgets; NaN never is."""
        return self.error <= self.budget and (self.mean is None or self.mean <= self.mean_budget)

    @property
    def used(self) -> float:
        """Share of the budget that the error takes."""
        if self.error == 0:
            return 0.0
        return self.error / self.budget if self.budget else math.inf


def largest(values: Tensor) -> float:
    """max|values|, 0 for no values, NaN where there is one."""
    return values.abs().max().item() if values.numel() else 0.0


def distance(found: Tensor, reference: Tensor) -> float:
    """max|found - reference|; infinite where shapes differ or an infinity stands on one side only."""
    return math.inf if found.shape != reference.shape else largest(difference(found, reference))


def mean_distance(found: Tensor, reference: Tensor) -> float:
    """The mean of |found - reference|, 0 for no values; shapes are equal."""
    return difference(found, reference).abs().mean().item() if found.numel() else 0.0


def difference(found: Tensor, reference: Tensor) -> Tensor:
    """Found - reference in float64, 0 where both are the same infinity."""
    found, reference = found.double(), reference.double()
    same_infinity = found.isinf() & (found == reference)
    return (found - reference).masked_fill(same_infinity, 0)


def allowance(same: Tensor, reference: Tensor, terms: float = 0.0, eps: float | None = None) -> float:
    """The budget of a quantity whose value in the input's precision is `same`.

    `terms` replaces max|reference| where the quantity is zero by identity: the size of the terms that cancel.
    """
    size = max(largest(reference[reference.isfinite()]), terms)
    eps = torch.finfo(same.dtype).eps if eps is None else eps
    return 2 * distance(same, reference) + 8 * eps * size


def farther(first: Tensor, second: Tensor, reference: Tensor) -> Tensor:
    """Elementwise the one of two evaluations of the same maths that lies farther from the reference.

    A gradient of few elements may be accurate by luck; this takes the worse of several orders of summation.
    """
    return torch.where((first - reference).abs() < (second - reference).abs(), second, first)


def judge(
    case: str,
    dtype: str,
    quantity: str,
    found: Tensor,
    same: Tensor,
    reference: Tensor,
    terms: float = 0.0,
) -> Row:
    """The row of one quantity. A result in another dtype than `same` fails, however near it is."""
    budget = allowance(same, reference, terms)
    if found.shape != reference.shape:
        note = f"shape {tuple(found.shape)} for {tuple(reference.shape)}"
        return Row(case, dtype, quantity, math.inf, budget, note)
    if found.dtype != same.dtype:
        return Row(case, dtype, quantity, math.inf, budget, f"{found.dtype} for {same.dtype}")
    mean_budget = MEAN_OF_SELECTION if quantity == SELECTION and found.itemsize == 2 else math.inf
    error, mean = distance(found, reference), mean_distance(found, reference)
    return Row(case, dtype, quantity, error, budget, mean=mean, mean_budget=mean_budget)
