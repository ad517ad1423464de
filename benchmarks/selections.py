"""Judges selected blocks: by the form of their indices, and by the scores of what was left out."""

import functools

import jax.numpy as jnp
import numpy as np

from benchmarks.inputs import Shape
from benchmarks.verdict import TINY, Verdict
from nsa_jax.config import NSAConfig


def check_form(blocks: np.ndarray, positions: np.ndarray, config: NSAConfig) -> Verdict:
    """Whether indices `[B, T, K, R]` of the queries at `positions` are a selection at all.

    First as many blocks as there are, up to `R`: ascending, each once, none of the future, the forced ones
    among them. Then -1.
    """
    current = (positions // config.selection_block_size)[:, None]
    slot = np.arange(config.num_selected_blocks)
    if blocks.shape[-1] != slot.size:
        return _broken(f"{blocks.shape[-1]} slots for {slot.size}")
    used = np.broadcast_to((slot <= current[..., None]), blocks.shape)
    rules = {
        "an unused slot that is not -1": ~used & (blocks != -1),
        "a block of the future": used & (blocks > current[..., None]),
        "a missing block": used & (blocks < 0),
        "not ascending": used[..., 1:] & (blocks[..., 1:] <= blocks[..., :-1]),
    }
    for rule, breaks in rules.items():
        if breaks.any():
            return _broken(rule)
    # Indices ascend from here on: the first slots hold the initial blocks, the last ones the local blocks.
    first = used & (slot < config.num_initial_blocks) & (blocks != slot)
    from_last = np.minimum(current[..., None], slot.size - 1) - slot
    local = used & (from_last < config.num_local_blocks) & (blocks != current[..., None] - from_last)
    return _broken("a forced block is missing") if (first | local).any() else Verdict(0.0, "block_indices")


def check_scores(
    blocks: np.ndarray, positions: np.ndarray, same: np.ndarray, exact: np.ndarray, shape: Shape
) -> Verdict:
    """Whether no rejected block scores higher than a chosen one, by more than the budget of the scores.

    Args:
      blocks: well-formed indices `[B, T, K, R]`.
      positions: `[T]`.
      same: scores of all blocks `[B, T, K, M]`, in the input's precision.
      exact: the same in float64.
      shape: of the input.
    """
    config = shape.config
    # Scores fall as 1/t, so each query has a budget of its own.
    budget = 2 * np.abs(same - exact).max(-1) + 8 * float(jnp.finfo(shape.dtype).eps) * exact.max(-1)
    block = np.arange(exact.shape[-1])
    current = positions[:, None, None] // config.selection_block_size
    candidate = block <= current
    forced = candidate & ((block < config.num_initial_blocks) | (block > current - config.num_local_blocks))
    each_slot = (blocks[..., i, None] == block for i in range(blocks.shape[-1]))
    chosen = functools.reduce(np.logical_or, each_slot)
    worst_in = np.where(chosen & ~forced, exact, np.inf).min(axis=-1)
    best_out = np.where(candidate & ~chosen, exact, -np.inf).max(axis=-1)
    return Verdict(float((np.maximum(best_out - worst_in, 0) / (budget + TINY)).max()), "block_indices")


def _broken(rule: str) -> Verdict:
    return Verdict(np.inf, f"block_indices: {rule}")
