"""Errors of each dtype within the budget of the design, and equal block sets where the scores leave no doubt.

A quantity may be off by `2 * err(the reference in the input's precision) + 8 eps(dtype) * max|reference|`,
both errors against the reference in float64 on the same, already rounded operands. A quantity has the eps of
its own dtype: log-sum-exps and scores are float32 whatever the operands are.
"""

import functools

import brute_force
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import PLAIN, Operands
from programs import evaluate, importance, random_cotangents, settled

from nsa_jax.budget import distance, size

DTYPES = ("float32", "bfloat16")  # float16 has no code of its own; test_parity has it
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def rounded(tree, dtype):
    """To what `dtype` can hold, as float64."""
    return jax.tree.map(lambda x: np.asarray(x.astype(dtype), np.float64), tree)


@functools.cache
def results(module, dtype, precision):
    """Of a module that computes in `precision` on operands that `dtype` holds exactly."""
    operands, cotangents = (rounded(x, jnp.dtype(dtype)) for x in (PLAIN.draw(), random_cotangents(PLAIN)))
    return evaluate(module, PLAIN, precision, operands=operands, cotangents=cotangents)


@every_dtype
def test_results_keep_the_dtypes_of_their_operands(dtype):
    found = results("xla", dtype, dtype)
    for name, x in found.items():
        if name == "blocks":
            assert x.dtype == np.int32
        else:
            assert x.dtype == (np.float32 if name.startswith("lse") else jnp.dtype(dtype)), name


@pytest.mark.parametrize(
    "name", [*random_cotangents(PLAIN), *(f"d_{operand}" for operand in Operands._fields)]
)
@every_dtype
def test_errors_stay_within_the_budget(dtype, name):
    exact = results("reference", dtype, "float64")[name]
    same = results("reference", dtype, dtype)[name]
    found = results("xla", dtype, dtype)[name]
    budget = 2 * distance(same, exact) + 8 * float(jnp.finfo(found.dtype).eps) * size(exact)

    assert distance(found, exact) <= budget


@every_dtype
def test_selections_agree_where_the_scores_leave_no_doubt(dtype):
    operands = rounded(PLAIN.draw(), jnp.dtype(dtype))
    exact = brute_force.evaluate(PLAIN, operands)
    scores, expected = exact["importance"], exact["blocks"]
    error = distance(importance(PLAIN, operands, dtype), scores)
    sure = settled(PLAIN, scores, 2 * error + 8 * float(np.finfo(np.float32).eps) * size(scores))

    assert sure.mean() > 0.95
    for module in ("reference", "xla"):
        found = results(module, dtype, dtype)["blocks"]
        assert found[sure].tolist() == expected[sure].tolist()
