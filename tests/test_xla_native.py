"""`native_sparse_attention` equals its branches, its selection and its gated sum, forward and backward."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BY_NAME
from programs import MODULES, OPTIONS, Operands, by_brute_force, evaluate, random_cotangents

from nsa_jax.budget import distance, size


def of_the_sum_alone(case):
    """Cotangents that are 0 for every result but the gated sum."""
    return {name: x if name == "out" else np.zeros_like(x) for name, x in random_cotangents(case).items()}


@functools.cache
def program(module, case, config):
    """Output and gradients for a cotangent, operands, and what else the operation is given."""

    def with_gradients(cotangent, operands, given):
        attend = functools.partial(
            MODULES[module].native_sparse_attention, config=config, scale=case.scale,
            segment_ids=case.segment_ids, **given,
        )  # fmt: skip
        out, pull_back = jax.vjp(attend, *operands)
        return out, *pull_back(cotangent)

    return jax.jit(with_gradients, compiler_options=OPTIONS[module])


@pytest.mark.parametrize(
    ("module", "name", "selection"),
    [
        ("reference", "last_queries_of_the_row", "selected"),
        ("xla", "last_queries_of_the_row", "selected"),
        ("xla", "packed_rows_queried_anywhere", "selected"),
        ("xla", "everything_covered", "selected"),  # short rows: the three branches at once
        ("xla", "window_of_one_many_forced", "given"),
    ],
)
def test_whole_is_its_parts(module, name, selection):
    case = BY_NAME[name]
    given, blocks = {}, by_brute_force(name)["blocks"]
    if case.positions is not None:  # else the default: the last of the row
        given["query_positions"] = jnp.asarray(case.query_positions)
    if selection == "given":
        # Other than what would be selected: the query's own block alone.
        blocks = np.concatenate([blocks.max(-1, keepdims=True), np.full_like(blocks[..., 1:], -1)], -1)
        given["block_indices"] = jnp.asarray(blocks, jnp.int32)
    cotangents = of_the_sum_alone(case)
    expected = evaluate("reference", case, block_indices=blocks, cotangents=cotangents)
    with jax.enable_x64(True):
        found = program(module, case, case.config)(cotangents["out"], case.draw(), given)

    for result, array in zip(("out", *(f"d_{operand}" for operand in Operands._fields)), found, strict=True):
        assert distance(np.asarray(array), expected[result]) < 1e-12 * max(1, size(expected[result])), result


@pytest.mark.parametrize(
    ("name", "num_selected_blocks"),
    [("everything_covered", 12), ("last_queries_of_the_row", 4)],  # as above, whose programs these are
    ids=["three_branches_at_once", "branch_by_branch"],
)
def test_gates_of_exactly_zero_have_finite_gradients(name, num_selected_blocks):
    """A gate of 0 still has a gradient, and its branch passes none on to keys and values."""
    case = BY_NAME[name]
    config = dataclasses.replace(case.config, num_selected_blocks=num_selected_blocks)
    operands = case.draw()
    operands.gates[:, ::2, :, 0] = 0
    operands.gates[:, :, 1] = 0
    operands.gates[..., 2] = 0
    cotangent = random_cotangents(case)["out"]

    with jax.enable_x64(True):
        found, expected = (
            program(module, case, config)(cotangent, operands, {}) for module in ("xla", "reference")
        )
    names = ("out", *(f"d_{operand}" for operand in Operands._fields))
    for name, ours, theirs in zip(names, map(np.asarray, found), map(np.asarray, expected), strict=True):
        assert np.isfinite(ours).all(), name
        assert distance(ours, theirs) < 1e-12 * max(1, size(theirs)), name
    assert not np.any(found[1 + Operands._fields.index("key_win")])
    assert np.any(found[-1][..., 2])
