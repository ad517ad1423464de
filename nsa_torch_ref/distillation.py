"""What a selection learns from: the probabilities that attention gives to blocks, and the loss."""

import torch
from torch import Tensor

from nsa_torch_ref import masks
from nsa_torch_ref.attention import masked_logits, place_queries
from nsa_torch_ref.masks import NSAConfig


def block_probabilities(
    query: Tensor,
    key: Tensor,
    *,
    config: NSAConfig,
    query_positions: Tensor | None = None,
    segment_ids: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """The probability `[B, T, K, M]` that dense causal attention gives to each block.

    It is summed over the tokens of the block and the query heads of the KV head.
    """
    segment_ids, query_positions = place_queries(query, key.shape[1], segment_ids, query_positions)
    seen = masks.causal_mask(segment_ids, query_positions)[:, :, None]
    return _of_blocks(query, key, seen, masks.block_mask(segment_ids, query_positions, config), scale)


def selected_probabilities(
    query: Tensor,
    key_slc: Tensor,
    block_indices: Tensor,
    *,
    config: NSAConfig,
    query_positions: Tensor | None = None,
    segment_ids: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """The same `[B, T, K, n]` for the selected branch and the blocks in its slots; 0 in unused ones."""
    segment_ids, query_positions = place_queries(query, key_slc.shape[1], segment_ids, query_positions)
    seen = masks.selection_mask(block_indices, segment_ids, query_positions, config)
    inside = masks.block_mask(segment_ids, query_positions, config)
    return masks.at_slots(_of_blocks(query, key_slc, seen, inside, scale), block_indices, 0.0)


def _of_blocks(query: Tensor, key: Tensor, seen: Tensor, inside: Tensor, scale: float | None) -> Tensor:
    """From the keys that are `seen` `[B, T, K or 1, S]`, those of each block `inside` `[B, T, M, S]`."""
    p = masked_logits(query, key, seen, scale).softmax(dim=-1)
    # The softmax of a row that is all -inf is NaN; its probabilities are 0.
    p = p.masked_fill(~seen[:, :, :, None], 0)
    return torch.einsum("btkgs,btms->btkm", p, inside.to(p.dtype))


def selection_loss(scores: Tensor, target: Tensor) -> Tensor:
    """KL divergence `[B, T, K]` of the softmax of scores `[B, T, K, M]` from the target.

    Blocks with score -inf do not count, and the target, which gets no gradient, is divided by its sum over
    the others. Without any, or with a target of 0, the loss is 0.
    """
    unseen = scores == -torch.inf
    mass = target.detach().masked_fill(unseen, 0)
    share = mass / mass.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(mass.dtype).tiny)
    blind = unseen.all(dim=-1, keepdim=True)
    log_softmax = scores.masked_fill(blind, 0).log_softmax(dim=-1).masked_fill(unseen, 0)
    return (torch.xlogy(share, share) - share * log_softmax).sum(dim=-1)
