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


@pytest.mark.parametrize(
    ("module", "name", "selection"),
    [
        ("reference", "last_queries_of_the_row", "selected"),
        ("xla", "last_queries_of_the_row", "selected"),
        ("xla", "packed_rows_queried_anywhere", "selected"),
        ("xla", "packed_rows_queried_anywhere", "given"),
        ("xla", "everything_covered", "selected"),  # short rows: the three branches at once
        ("xla", "window_of_one_many_forced", "given"),
    ],
)
def test_whole_is_its_parts(module, name, selection):
    case = BY_NAME[name]
    settings = dict(config=case.config, scale=case.scale, segment_ids=case.segment_ids)
    blocks = by_brute_force(name)["blocks"]
    if case.positions is not None:
        settings["query_positions"] = jnp.asarray(
            case.query_positions
        )  # else the default: the last of the row
    if selection == "given":
        # Other than what would be selected: the query's own block alone.
        blocks = np.concatenate([blocks.max(-1, keepdims=True), np.full_like(blocks[..., 1:], -1)], -1)
        settings["block_indices"] = jnp.asarray(blocks, jnp.int32)
    attend = functools.partial(MODULES[module].native_sparse_attention, **settings)

    def with_gradients(cotangent, *operands):
        out, pull_back = jax.vjp(attend, *operands)
        return out, *pull_back(cotangent)

    cotangents = of_the_sum_alone(case)
    expected = evaluate("reference", case, block_indices=blocks, cotangents=cotangents)
    with jax.enable_x64(True):
        program = jax.jit(with_gradients, compiler_options=OPTIONS[module])
        found = program(jnp.asarray(cotangents["out"]), *map(jnp.asarray, case.draw()))

    for result, array in zip(("out", *(f"d_{operand}" for operand in Operands._fields)), found, strict=True):
        assert distance(np.asarray(array), expected[result]) < 1e-12 * max(1, size(expected[result])), result


@pytest.mark.parametrize(
    ("name", "num_selected_blocks"),
    [("packed_rows", 7), ("last_queries_of_the_row", 4)],
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

    def with_gradients(module, cotangent, *operands):
        attend = functools.partial(
            MODULES[module].native_sparse_attention, config=config, segment_ids=case.segment_ids
        )
        out, pull_back = jax.vjp(attend, *operands)
        return out, *pull_back(cotangent)

    with jax.enable_x64(True):
        found, expected = (
            jax.jit(functools.partial(with_gradients, module), compiler_options=OPTIONS[module])(
                jnp.asarray(cotangent), *map(jnp.asarray, operands)
            )
            for module in ("xla", "reference")
        )
    names = ("out", *(f"d_{operand}" for operand in Operands._fields))
    for name, ours, theirs in zip(names, map(np.asarray, found), map(np.asarray, expected), strict=True):
        assert np.isfinite(ours).all(), name
        assert distance(ours, theirs) < 1e-12 * max(1, size(theirs)), name
    assert not np.any(found[1 + Operands._fields.index("key_win")])
    assert np.any(found[-1][..., 2])
