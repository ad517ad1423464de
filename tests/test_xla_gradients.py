"""Gradients against central differences in float64, eps 1e-6, to atol 1e-4 and rtol 1e-3."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BY_NAME, PLAIN, Operands
from programs import cached, evaluate, random_cotangents

from nsa_jax import attention

EPSILON = 1e-6


def objective(case, operands):
    """The sum to differentiate: all finite results times their cotangents. The selection stays as it is."""
    results = evaluate("reference", case, operands=operands)
    return sum(
        (np.where(np.isfinite(results[name]), results[name], 0) * cotangent).sum()
        for name, cotangent in random_cotangents(case).items()
    )


@pytest.mark.parametrize("name", ["plain", "packed_rows_queried_anywhere", "sixty_four_heads_per_kv_head"])
def test_gradients_are_the_slopes_of_the_outputs(name):
    """Of the oracle, which `xla` equals in values and gradients: test_xla_values."""
    case = BY_NAME[name]
    operands, found = case.draw(), cached("reference", name)
    rng = case.generator("directions")
    for operand in Operands._fields:
        whole = getattr(operands, operand)
        one = np.zeros(whole.size)
        one[rng.integers(whole.size)] = 1
        for direction in (rng.standard_normal(whole.shape), one.reshape(whole.shape)):
            moved = [operands._replace(**{operand: whole + step * direction}) for step in (EPSILON, -EPSILON)]
            slope = (objective(case, moved[0]) - objective(case, moved[1])) / (2 * EPSILON)

            assert np.isclose((found[f"d_{operand}"] * direction).sum(), slope, rtol=1e-3, atol=1e-4), operand


def test_each_cotangent_reaches_the_operands():
    """None is dropped. Without those of the log-sum-exps, only gradients of values would stay correct."""
    case = PLAIN
    nothing = jax.tree.map(np.zeros_like, random_cotangents(case))
    total = {f"d_{name}": 0.0 for name in Operands._fields}
    for name, cotangent in random_cotangents(case).items():
        alone = evaluate("xla", case, cotangents=nothing | {name: cotangent})
        branch = name.partition("_")[2]
        reached = {gradient for gradient in total if alone[gradient].any()}
        if name.startswith("lse"):
            assert reached == {"d_query", f"d_key_{branch}"}
        elif branch:
            assert reached == {"d_query", f"d_key_{branch}", f"d_value_{branch}"}
        else:
            assert reached == set(total)
        total = {gradient: x + alone[gradient] for gradient, x in total.items()}

    for gradient, x in total.items():
        assert np.abs(x - cached("xla", "plain")[gradient]).max() < 1e-12, gradient


def test_no_gradient_flows_through_the_selection():
    """Differentiating block indices on purpose gives zeros, not an error."""
    case = PLAIN
    operands = jax.tree.map(jnp.float32, case.draw())

    def count(query, key_cmp, lse_cmp):
        blocks = attention.select_blocks(query, key_cmp, lse_cmp=lse_cmp, config=case.config)
        return (blocks * 1.0).sum()

    lse = jnp.asarray(cached("reference", "plain")["lse_cmp"], jnp.float32)
    gradients = jax.jit(jax.grad(count, argnums=(0, 1, 2)))(operands.query, operands.key_cmp, lse)

    assert not any(gradient.any() for gradient in gradients)
