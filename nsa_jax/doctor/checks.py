"""Runs every operation by every implementation that can run here, and compares it with the oracle."""

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

import nsa_jax
from nsa_jax import dispatch
from nsa_jax.budget import distance
from nsa_jax.dispatch import IMPLEMENTATIONS, OPERATIONS
from nsa_jax.doctor import operations, steps
from nsa_jax.doctor.subject import CONFIG, Expected, Subject, draw


class Check(NamedTuple):
    """One quantity of one operation: what was found and what was allowed.

    Attributes:
      operation, implementation, dtype: what ran.
      quantity: "out", "lse", a gradient like "d_query", or what a step writes; "run" if it raised.
      error: largest distance from the oracle; infinite beside a NaN, or if it raised.
      budget: how large it may be.
      seconds: time of the operation with all its quantities and compilation; other checks run meanwhile.
      why: the exception, if it raised.
    """

    operation: str
    implementation: str
    dtype: str
    quantity: str
    error: float
    budget: float
    seconds: float
    why: str = ""

    @property
    def ok(self) -> bool:
        """Whether the error is within its budget; NaN is not, nor is anything within infinity."""
        return self.error <= self.budget < math.inf

    def plain(self) -> dict[str, Any]:
        """As JSON has it. It has no infinity, so a number that is not finite is null."""
        numbers = {
            name: x if math.isfinite(x) else None
            for name, x in (("error", self.error), ("budget", self.budget))
        }
        found = self._asdict() | numbers | {"ok": self.ok, "seconds": round(self.seconds, 2)}
        return {name: value for name, value in found.items() if name != "why"}

    @property
    def used(self) -> float:
        """Share of the budget that the error takes."""
        if self.error == 0:
            return 0.0
        return self.error / self.budget if self.budget else math.inf


def checks(
    dtypes: Sequence[str], *, only: Sequence[str] = OPERATIONS, seed: int = 0
) -> Iterator[list[Check]]:
    """All checks of the operations `only`, as they are done: a list for each run of an operation."""
    for dtype in dtypes:
        rng = np.random.default_rng(seed)
        operands = draw(rng, dtype)
        every = itertools.chain(operations.subjects(operands, rng), steps.subjects(operands, rng))
        pool = ThreadPoolExecutor(max(2, os.cpu_count() or 1))  # compiling is most of the time
        try:
            started = []
            for subject in every:
                if subject.operation in only:
                    # An oracle starts before the checks that wait for it.
                    expected = pool.submit(subject.expect)
                    started += [
                        pool.submit(_check, subject, implementation, dtype, expected.result)
                        for implementation in IMPLEMENTATIONS
                        if _runs(implementation, subject)
                    ]
            for check in started:
                yield check.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _runs(implementation: str, subject: Subject) -> bool:
    """Whether an implementation has an operation of its own that can run here."""
    if dispatch.slower_reason(subject.operation, implementation):
        return False  # for this operation it has the kernels of another one
    arrays = subject.arrays
    return nsa_jax.unsupported_reason(subject.operation, implementation, *arrays, config=CONFIG) is None


def _check(
    subject: Subject, implementation: str, dtype: str, expected: Callable[[], dict[str, Expected]]
) -> list[Check]:
    began = time.perf_counter()
    what = subject.operation, implementation, dtype
    try:
        found = jax.block_until_ready(subject.run(implementation))
    except Exception as error:  # whatever it is, the operation does not work here, and others may
        why = f"{type(error).__name__}: {error}"
        return [Check(*what, "run", math.inf, 0.0, time.perf_counter() - began, why)]
    seconds = time.perf_counter() - began
    return [
        Check(*what, name, distance(found[name], exact), budget, seconds)
        for name, (exact, budget) in expected().items()
    ]


def problem(checks: Sequence[Check]) -> str | None:
    """What is wrong with an operation by one implementation in one dtype, in one line; None if nothing is."""
    bad = [check for check in checks if not check.ok]
    if not bad:
        return None
    worst = max(bad, key=lambda check: check.used)
    what = f"{worst.operation} as {worst.implementation} in {worst.dtype}"
    report = "Report it with this output"
    if worst.implementation != dispatch.EVERYWHERE:
        report += f", and use implementation={dispatch.EVERYWHERE!r} until then"
    if worst.why:
        return f"{what} must run here, got {worst.why.rstrip('.')}. {report}."
    names = ", ".join(check.quantity for check in bad)
    return (
        f"{what} must agree with the reference within {worst.budget:.1e} in {worst.quantity}, got "
        f"{worst.error:.1e} (beyond the budget: {names}). {report}."
    )
