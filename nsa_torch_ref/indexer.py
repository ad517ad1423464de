"""Selection by an indexer: small queries and keys whose products score the blocks."""

import torch
from torch import Tensor

from nsa_torch_ref import masks
from nsa_torch_ref.attention import accumulation_dtype, place_queries
from nsa_torch_ref.masks import NSAConfig


def block_scores(
    query_index: Tensor,
    key_index: Tensor,
    *,
    weights: Tensor | None = None,
    config: NSAConfig,
    query_positions: Tensor | None = None,
    segment_ids: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Scores `[B, T, K, M]`: of each block the largest score of its tokens `s <= t`, -inf without any.

    A token scores the largest `scale q.k` of the J index queries `[B, T, K, J, E]` and its key `[B, S, I, E]`
    (arXiv:2606.13392) or, with `weights` `[B, T, K, J]`, the sum of `w relu(scale q.k)` (DeepSeek V3.2). I is
    K, or 1 for a key that all KV heads share.
    """
    segment_ids, query_positions = place_queries(
        query_index, key_index.shape[1], segment_ids, query_positions
    )
    dtype = accumulation_dtype(query_index.dtype)
    scale = query_index.shape[-1] ** -0.5 if scale is None else scale
    keys = key_index.to(dtype).expand(-1, -1, query_index.shape[2], -1)
    of_heads = torch.einsum("btkje,bske->btkjs", query_index.to(dtype), keys) * scale
    # `max` sends the gradient to the first of equal numbers; `amax` would divide it.
    if weights is None:
        of_tokens = of_heads.max(dim=3).values
    else:
        of_tokens = (weights.to(dtype)[..., None] * of_heads.relu()).sum(dim=3)
    inside = masks.block_mask(segment_ids, query_positions, config)[:, :, None]
    return of_tokens[:, :, :, None].masked_fill(~inside, -torch.inf).max(dim=-1).values
