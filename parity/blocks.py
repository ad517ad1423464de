"""Compares selections, which change abruptly where two scores are equal.

Both sides may be off by the budget of the scores, so a selection is determined where the gap between the
lowest score chosen and the highest rejected exceeds twice that budget. There the sets must be equal;
everywhere they must be well formed.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from nsa_torch_ref import masks
from parity.budget import Row, allowance


@dataclasses.dataclass(frozen=True)
class Selection:
    """The reference's `block_indices` [B, T, K, R], and whether they are `determined` [B, T, K]."""

    block_indices: Tensor
    determined: Tensor
    segment_ids: Tensor
    query_positions: Tensor
    config: Any

    @classmethod
    def of(
        cls,
        scores: Tensor,
        same_scores: Tensor,
        segment_ids: Tensor,
        query_positions: Tensor,
        config: Any,
        eps: float = torch.finfo(torch.float32).eps,
    ) -> "Selection":
        """From reference scores [B, T, K, M] and the same in the input's precision.

        `eps` is that of what the scores are computed from: float32 where queries and keys are exact inputs.
        """
        chosen = masks.top_blocks(scores, segment_ids, query_positions, config)
        gap = score_gap(scores, chosen, segment_ids, query_positions, config)
        determined = gap > 2 * allowance(same_scores, scores, eps=eps)
        return cls(chosen, determined, segment_ids, query_positions, config)

    def comparable(self, values: Tensor) -> Tensor:
        """`values` [B, T, ...] with zeros where the selection of some KV head is not determined."""
        everywhere = self.determined.all(dim=-1)
        return values.masked_fill(~everywhere.unflatten(1, (-1, *[1] * (values.ndim - 2))), 0)

    def judge(self, case: str, dtype: str, found: Tensor) -> list[Row]:
        """Counts selections that differ where they are determined, ill-formed ones, and open ones.

        If more than half are open, agreement on the others says too little, and the case fails.
        """
        if found.shape != self.block_indices.shape:
            note = f"shape {tuple(found.shape)} for {tuple(self.block_indices.shape)}"
            return [Row(case, dtype, "blocks that differ", float("inf"), 0, note)]
        differ = (found != self.block_indices).any(dim=-1) & self.determined
        malformed = ill_formed(found.long(), self.segment_ids, self.query_positions, self.config)
        note = f"of {differ.numel()} selections"
        return [
            Row(case, dtype, "blocks that differ", differ.sum().item(), 0, note),
            Row(case, dtype, "blocks ill formed", malformed.sum().item(), 0),
            Row(case, dtype, "blocks undetermined", (~self.determined).sum().item(), differ.numel() / 2),
        ]


def membership(block_indices: Tensor, num_blocks: int) -> Tensor:
    """[B, T, K, M]: how often each block occurs among the slots."""
    slots = block_indices.masked_fill(block_indices < 0, num_blocks)
    counts = torch.zeros((*slots.shape[:3], num_blocks + 1), dtype=torch.long, device=slots.device)
    return counts.scatter_add(-1, slots, torch.ones_like(slots))[..., :num_blocks]


def score_gap(
    scores: Tensor, chosen: Tensor, segment_ids: Tensor, query_positions: Tensor, config: Any
) -> Tensor:
    """[B, T, K]: lowest score chosen freely minus highest rejected; infinite where there was no choice."""
    kinds = masks.block_kinds(segment_ids, query_positions, config)
    candidate, forced = (kind[:, :, None, :] for kind in kinds)
    taken = membership(chosen, scores.shape[-1]) > 0
    lowest = scores.masked_fill(~taken | forced, torch.inf).amin(dim=-1)
    highest = scores.masked_fill(taken | ~candidate, -torch.inf).amax(dim=-1)
    return lowest - highest


def ill_formed(block_indices: Tensor, segment_ids: Tensor, query_positions: Tensor, config: Any) -> Tensor:
    """[B, T, K]: not ascending with -1 at the end, too few, too many, a forced block missing, the future."""
    kinds = masks.block_kinds(segment_ids, query_positions, config)
    candidate, forced = (kind[:, :, None, :] for kind in kinds)
    count = candidate.sum(dim=-1).clamp(max=config.num_selected_blocks)
    slot = torch.arange(block_indices.shape[-1], device=block_indices.device)
    filled = slot < count[..., None]
    wrong = torch.where(filled, block_indices < 0, block_indices != -1).any(dim=-1)
    wrong |= ((block_indices.diff(dim=-1) <= 0) & filled[..., 1:]).any(dim=-1)
    # A number beyond the last block counts as one more block, which is not a candidate.
    blocks = candidate.shape[-1]
    times = membership(block_indices.clamp(max=blocks), blocks + 1)
    future = (times[..., :blocks] > 0) & ~candidate
    missing = (times[..., :blocks] == 0) & forced
    return wrong | future.any(dim=-1) | missing.any(dim=-1) | (times[..., blocks] > 0)
