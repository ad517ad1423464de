"""Attention of branches, searched for what is not finite (`nonfinite`): one alone, or three with their sum.

The kernels of a branch leave their results as they are. What searches them looks at one branch here, or at
all three at once, where it need only read their sum.
"""

from collections.abc import Callable
from typing import NamedTuple

from nsa_jax.array_typing import Array, Float, Int32
from nsa_jax.kernels.triton.backward import Backward, BranchGradients
from nsa_jax.kernels.triton.nonfinite import (
    Branch,
    Outputs,
    RowNumbers,
    Saved,
    recompute_forward,
    recompute_key_gradients,
    recompute_probabilities,
    recompute_query_gradient,
    visible_in_blocks,
)
from nsa_jax.kernels.triton.ranges import (
    KeyRanges,
    attend_ranges,
    causal_ranges,
    compression_ranges,
    range_gradients,
    window_ranges,
)
from nsa_jax.kernels.triton.selected import attend_selected
from nsa_jax.layout import Placement

type SelectedGradients = Callable[..., BranchGradients]  # as `selected.selected_gradients`


class BranchKeysValues(NamedTuple):
    """Keys and values of the three branches."""

    key_cmp: Float[Array, "B C K H"]
    value_cmp: Float[Array, "B C K V"]
    key_slc: Float[Array, "B S K H"]
    value_slc: Float[Array, "B S K V"]
    key_win: Float[Array, "B W K H"]
    value_win: Float[Array, "B W K V"]


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
    return found.outs[0], found.lse, *_probabilities(probabilities, found.lse, query, branch, scale)


def differentiate_blocks(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    block_indices: Int32[Array, "B T K R"],
    placement: Placement,
    given: Backward,
    *,
    scale: float,
    gradients: SelectedGradients,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K V"]]:
    """Gradients of query, key and value of the selected branch, by `gradients`."""
    arrays = query, key, value, block_indices, placement
    found = gradients(*arrays, given, scale=scale)
    branch = Branch(key, value, visible_in_blocks(block_indices, placement, key.shape[1]))
    return _repair_one(found, query, branch, given, scale)


def repair_outputs(
    found: Outputs,
    probabilities: tuple[Float[Array, "B T K R"], ...],
    query: Float[Array, "B T N H"],
    keys_values: BranchKeysValues,
    gates: Float[Array, "B T N 3"] | None,
    block_indices: Int32[Array, "B T K R"] | None,
    placement: Placement,
    *,
    scale: float,
) -> tuple[Outputs, tuple[Float[Array, "B T K R"], ...]]:
    """What three branches gave, or their sum with these gates; and the probabilities of slots, if any."""
    branches = _branches(keys_values, block_indices, placement)
    found = recompute_forward(found, query, branches, gates, scale=scale)
    return found, _probabilities(probabilities, found.lse, query, branches[1], scale)


def repair_query_gradient(
    d_query: Float[Array, "B T N H"],
    saved: Saved,
    query: Float[Array, "B T N H"],
    keys_values: BranchKeysValues,
    block_indices: Int32[Array, "B T K R"] | None,
    placement: Placement,
    *,
    scale: float,
) -> Float[Array, "B T N H"]:
    """The gradient of the query, a sum over three branches."""
    branches = _branches(keys_values, block_indices, placement)
    return recompute_query_gradient(d_query, query, branches, saved, scale=scale)


def repair_key_gradients(
    d_key: Float[Array, "B S K H"],
    d_value: Float[Array, "B S K V"],
    numbers: RowNumbers,
    query: Float[Array, "B T N H"],
    keys_values: BranchKeysValues,
    block_indices: Int32[Array, "B T K R"] | None,
    placement: Placement,
    *,
    which: int,
    scale: float,
) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K V"]]:
    """Those of the keys and values of branch number `which` of three."""
    branches = _branches(keys_values, block_indices, placement)
    return recompute_key_gradients(d_key, d_value, query, branches, numbers, which=which, scale=scale)


def _repair_one(found, query, branch, given, scale):
    assert given.gate is None, "the output is a branch's own, else see `repair_query_gradient`"
    assert given.previous is None, "the gradient is of this branch alone"
    saved = Saved((given.lse,), (found.delta,), given.d_out)
    d_query = recompute_query_gradient(found.query, query, [branch], saved, scale=scale)
    numbers = RowNumbers(given.lse, found.delta, given.d_out)
    d_keys = recompute_key_gradients(
        found.key, found.value, query, [branch], numbers, which=0, scale=scale
    )  # fmt: skip
    return d_query, *d_keys


def _probabilities(probabilities, lse, query, branch, scale):
    return tuple(
        recompute_probabilities(x, lse, query, branch.key, branch.visible, scale) for x in probabilities
    )


def _branches(
    keys_values: BranchKeysValues, block_indices: Int32[Array, "B T K R"] | None, placement: Placement
) -> tuple[Branch, Branch, Branch]:
    key_cmp, value_cmp, key_slc, value_slc, key_win, value_win = keys_values
    if block_indices is None:
        selected = causal_ranges(placement, key_slc.shape[1]).visible
    else:
        selected = visible_in_blocks(block_indices, placement, key_slc.shape[1])
    return (
        Branch(key_cmp, value_cmp, compression_ranges(placement, key_cmp.shape[1]).visible),
        Branch(key_slc, value_slc, selected),
        Branch(key_win, value_win, window_ranges(placement, key_win.shape[1]).visible),
    )
