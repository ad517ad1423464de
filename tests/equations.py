"""The equations of a program, for tests that count them."""

from collections.abc import Iterator
from typing import Any

import jax.extend.core


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a program and of those inside it."""
    for equation in jaxpr.eqns:
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from equations(inner)
        yield equation
