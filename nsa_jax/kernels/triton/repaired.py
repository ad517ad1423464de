"""Attention of one branch, searched for what is not finite (`nonfinite`).

The kernels of a branch leave their results as they are, because three branches are searched together.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

from nsa_jax.array_typing import Array, Float, Int32
from nsa_jax.kernels.triton.backward import Backward, BranchGradients
from nsa_jax.kernels.triton.nonfinite import (
    Branch,
    Outputs,
    Saved,
    recompute_forward,
    recompute_key_gradients,
    recompute_probabilities,
    recompute_query_gradient,
    visible_in_blocks,
)
from nsa_jax.kernels.triton.ranges import KeyRanges, attend_ranges, range_gradients
from nsa_jax.kernels.triton.selected import attend_selected, selected_gradients
from nsa_jax.layout import Placement


class BranchKernels(NamedTuple):
    """Who computes branches and their gradients, where there is a choice.

    Attributes:
      attend_ranges: as `ranges.attend_ranges`.
      range_gradients: as `ranges.range_gradients`.
      selected_gradients: as `selected.selected_gradients`.
    """

    attend_ranges: Callable[..., tuple[Array, Array]]
    range_gradients: Callable[..., BranchGradients]
    selected_gradients: Callable[..., BranchGradients]


BY_TRITON = BranchKernels(attend_ranges, range_gradients, selected_gradients)


def attend_range(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    ranges: KeyRanges,
    *,
    scale: float,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """`(out, lse)` of a branch in which each query sees a range of keys."""
    out, lse = attend_ranges(query, key, value, ranges, scale=scale)
    if key.shape[1] == 0:
        return out, lse
    found = recompute_forward(Outputs((out,)), query, [Branch(key, value, ranges.visible)], scale=scale)
    assert found.outs[0] is not None
    return found.outs[0], lse


def differentiate_range(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    ranges: KeyRanges,
    given: Backward,
    *,
    scale: float,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K V"]]:
    """Gradients of query, key and value of such a branch."""
    found = range_gradients(query, key, value, ranges, given, scale=scale)
    if key.shape[1] == 0:
        return found[:3]
    return _repair_one(found, query, Branch(key, value, ranges.visible), given, scale)


def attend_blocks(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    block_indices: Int32[Array, "B T K R"],
    placement: Placement,
    *,
    scale: float,
    with_probabilities: bool = False,
    before_backward: bool = False,
) -> tuple[Array, ...]:
    """As `selected.attend_selected`."""
    arrays = query, key, value, block_indices, placement
    out, lse, *probabilities = attend_selected(
        *arrays, scale=scale, with_probabilities=with_probabilities, before_backward=before_backward
    )
    branch = Branch(key, value, visible_in_blocks(block_indices, placement, key.shape[1]))
    found = recompute_forward(Outputs((out,), lse), query, [branch], scale=scale)
    assert found.outs[0] is not None
    assert found.lse is not None
    lse = found.lse
    repair = functools.partial(recompute_probabilities, scale=scale)
    return found.outs[0], lse, *(repair(x, lse, query, key, branch.visible) for x in probabilities)


def differentiate_blocks(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    block_indices: Int32[Array, "B T K R"],
    placement: Placement,
    given: Backward,
    *,
    scale: float,
    by: BranchKernels,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K V"]]:
    """Gradients of query, key and value of the selected branch."""
    arrays = query, key, value, block_indices, placement
    found = by.selected_gradients(*arrays, given, scale=scale)
    branch = Branch(key, value, visible_in_blocks(block_indices, placement, key.shape[1]))
    return _repair_one(found, query, branch, given, scale)


def _repair_one(found, query, branch, given, scale):
    assert given.gate is None, "the cotangent is that of the output alone"
    assert given.previous is None, "the gradient is of this branch alone"
    saved = Saved((given.lse,), (found.delta,), given.d_out)
    d_query = recompute_query_gradient(found.query, query, [branch], saved, scale=scale)
    d_keys = found.key, found.value
    return d_query, *recompute_key_gradients(*d_keys, query, [branch], saved, which=0, scale=scale)
