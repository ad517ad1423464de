"""The `xla` implementation against the oracle in float64: outputs, selections and gradients."""

import numpy as np
import pytest
from cases import BY_NAME, Operands
from programs import BRANCHES, by_brute_force, cached, disagreements

every_case = pytest.mark.parametrize("name", BY_NAME)
RESULTS = ("out", *(f"{kind}_{branch}" for kind in ("out", "lse") for branch in BRANCHES))
GRADIENTS = tuple(f"d_{name}" for name in Operands._fields)


@every_case
def test_outputs_and_selection_equal_the_reference(name):
    found, expected = cached("xla", name), cached("reference", name)

    assert found["blocks"].tolist() == expected["blocks"].tolist()
    assert disagreements(found, expected, only=RESULTS) == {}


@every_case
def test_gradients_equal_the_reference(name):
    """Of all operands, under random cotangents of every output and log-sum-exp; infinite ones included."""
    found, expected = cached("xla", name), cached("reference", name)

    assert disagreements(found, expected, only=GRADIENTS) == {}
    assert all(np.isfinite(found[gradient]).all() for gradient in GRADIENTS)


@every_case
def test_queries_that_see_nothing_get_exactly_zero(name):
    found, expected = cached("xla", name), by_brute_force(name)
    for branch in BRANCHES:
        blind = expected[f"lse_{branch}"] == -np.inf

        assert not found[f"out_{branch}"][blind].any()
        assert (found[f"lse_{branch}"][blind] == -np.inf).all()
    blind = (expected["reads_win"] == 0).any(-1)
    assert not found["out"][blind].any()
    assert not found["d_query"][blind].any()
