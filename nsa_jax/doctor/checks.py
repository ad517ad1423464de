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
from nsa_jax.doctor import operations, steps, targets
from nsa_jax.doctor.subject import CONFIG, Expected, Subject, draw


class Run(NamedTuple):
    """One operation by one implementation in one dtype.

    Attributes:
      operation, implementation, dtype: what ran.
      seconds: with compilation; other runs go on meanwhile.
      errors: of "out", "lse", a gradient like "d_query", or what a step writes: the largest distance from the
        oracle, infinite beside a NaN, and how large it may be. Of "run" alone if it raised.
      why: the exception, if it raised.
    """

    operation: str
    implementation: str
    dtype: str
    seconds: float
    errors: dict[str, tuple[float, float]]
    why: str = ""

    @property
    def wrong(self) -> list[str]:
        """The quantities beyond their budget; NaN is, and everything beyond an infinite one."""
        return [name for name, (error, budget) in self.errors.items() if not error <= budget < math.inf]

    def share(self, quantity: str) -> float:
        """Share of the budget that an error takes."""
        error, budget = self.errors[quantity]
        return error and (error / budget if budget else math.inf)

    @property
    def worst(self) -> str:
        """The quantity that takes the largest share of its budget, of the wrong ones if there are any."""
        return max(self.wrong or self.errors, key=self.share)

    def __str__(self) -> str:
        verdict = "FAIL" if self.wrong else "ok  "
        used = "raised" if self.why else f"{self.share(self.worst):.0%} of the budget ({self.worst})"
        what = f"{self.operation:<24} {self.implementation:<10} {self.dtype:<8}"
        return f"  {verdict} {what} {self.seconds:5.1f} s  {used}"

    def plain(self) -> list[dict[str, Any]]:
        """As JSON has it, which has no infinity: what is not finite is null."""
        what = {name: getattr(self, name) for name in ("operation", "implementation", "dtype")}
        finite = {name: [x if math.isfinite(x) else None for x in pair] for name, pair in self.errors.items()}
        return [
            what | {"quantity": name, "error": error, "budget": budget, "ok": name not in self.wrong,
                    "seconds": round(self.seconds, 2)}
            for name, (error, budget) in finite.items()
        ]  # fmt: skip

    def problem(self) -> str | None:
        """What is wrong, in one line; None if nothing is."""
        if not self.wrong:
            return None
        what = f"{self.operation} as {self.implementation} in {self.dtype}"
        report = "Report it with this output"
        if self.implementation != dispatch.EVERYWHERE:
            report += f", and use implementation={dispatch.EVERYWHERE!r} until then"
        if self.why:
            return f"{what} must run here, got {self.why.rstrip('.')}. {report}."
        error, budget = self.errors[self.worst]
        return (
            f"{what} must agree with the reference within {budget:.1e} in {self.worst}, got {error:.1e} "
            f"(beyond the budget: {', '.join(self.wrong)}). {report}."
        )


def checks(dtypes: Sequence[str], *, only: Sequence[str] = OPERATIONS, seed: int = 0) -> Iterator[Run]:
    """All checks of the operations `only`, as they are done."""
    for dtype in dtypes:
        rng = np.random.default_rng(seed)
        operands = draw(rng, dtype)
        rooms = operations, steps, targets
        every = itertools.chain.from_iterable(room.subjects(operands, rng) for room in rooms)
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
            yield from (each.result() for each in started)
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
) -> Run:
    began, why, errors = time.perf_counter(), "", {"run": (math.inf, 0.0)}
    try:
        found = jax.block_until_ready(subject.run(implementation))
    except Exception as error:  # whatever it is, the operation does not work here, and others may
        why = f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - began
    if not why:
        errors = {name: (distance(found[name], x.exact), x.budget) for name, x in expected().items()}
    return Run(subject.operation, implementation, dtype, seconds, errors, why)
