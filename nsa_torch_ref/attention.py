"""The branches of Native Sparse Attention (arXiv:2502.11089) as masked `scaled_dot_product_attention`.

Layout is [B, T, N, H]. Values are computed in the dtype that is passed in; for an f32 or f64 reference of
16-bit inputs, upcast the inputs. What decides the selection (logits, softmax, importance) and every lse is
float32 at least. A query that sees no key gets output 0, lse -inf and finite gradients.
"""

import torch
from torch import Tensor
from torch.nn import functional

from nsa_torch_ref import masks
from nsa_torch_ref.masks import NSAConfig


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64 inputs, float32 for everything below."""
    return torch.promote_types(dtype, torch.float32)


def place_queries(
    query: Tensor, length: int, segment_ids: Tensor | None, query_positions: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Fill in the defaults: one sequence per row, and the queries are its last T tokens."""
    batch, queries = query.shape[:2]
    if segment_ids is None:
        segment_ids = torch.ones((batch, length), dtype=torch.long, device=query.device)
    if query_positions is None:
        query_positions = torch.arange(length - queries, length, device=query.device).expand(batch, queries)
    return segment_ids.long(), query_positions.long()


def masked_logits(query: Tensor, key: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """[B, T, K, G, X]: scaled products, accumulated wide; -inf where `mask` [B, T, K or 1, X] is False."""
    dtype, kv_heads = accumulation_dtype(query.dtype), key.shape[2]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    grouped = query.to(dtype).unflatten(2, (kv_heads, -1))
    logits = torch.einsum("btkgh,bxkh->btkgx", grouped, key.to(dtype)) * scale
    return logits.masked_fill(~mask[:, :, :, None, :], -torch.inf)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    """SDPA under a boolean mask [B, T, K or 1, X]. Returns out [B, T, N, V] and natural-log lse [B, T, N]."""
    kv_heads = key.shape[2]
    mask = mask.expand(-1, -1, kv_heads, -1)
    blind = ~mask.any(dim=-1, keepdim=True)
    # A row without any key is NaN in some SDPA kernels, forward or backward: let it see all, drop the result.
    padded = mask | blind
    per_head = query.shape[2] // kv_heads
    out = functional.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=padded.repeat_interleave(per_head, dim=2).transpose(1, 2),
        scale=scale,
        enable_gqa=True,
    )
    lse = masked_logits(query, key, padded, scale).logsumexp(dim=-1).masked_fill(blind, -torch.inf)
    return out.transpose(1, 2).masked_fill(blind.repeat_interleave(per_head, dim=2), 0), lse.flatten(2)


def compressed_attention(
    query: Tensor,
    key_cmp: Tensor,
    value_cmp: Tensor,
    *,
    config: NSAConfig,
    query_positions: Tensor | None = None,
    segment_ids: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The compressed branch of Eq. 5. The row has T tokens unless `segment_ids` tells its length."""
    length = query.shape[1] if segment_ids is None else segment_ids.shape[1]
    segment_ids, query_positions = place_queries(query, length, segment_ids, query_positions)
    mask = masks.compression_mask(segment_ids, query_positions, config)
    return attend(query, key_cmp, value_cmp, mask[:, :, None, :], scale)


def importance_scores(
    query: Tensor,
    key_cmp: Tensor,
    *,
    config: NSAConfig,
    query_positions: Tensor | None = None,
    segment_ids: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """[B, T, K, M], Eq. 8-10: the softmax over visible compressed blocks, shared out to selection blocks."""
    length = query.shape[1] if segment_ids is None else segment_ids.shape[1]
    segment_ids, query_positions = place_queries(query, length, segment_ids, query_positions)
    mask = masks.compression_mask(segment_ids, query_positions, config)
    p_cmp = masked_logits(query, key_cmp, mask[:, :, None, :], scale).softmax(dim=-1)
    # The softmax of a row that is -inf throughout is NaN; its importance is 0.
    p_cmp = p_cmp.masked_fill(~mask[:, :, None, None, :], 0)
    return masks.importance(p_cmp, segment_ids, config)


def select_blocks(
    query: Tensor,
    key_cmp: Tensor,
    *,
    config: NSAConfig,
    query_positions: Tensor | None = None,
    segment_ids: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """[B, T, K, n], Eq. 11: block numbers in the query's sequence, ascending, -1 at the end. No gradient."""
    length = query.shape[1] if segment_ids is None else segment_ids.shape[1]
    segment_ids, query_positions = place_queries(query, length, segment_ids, query_positions)
    scores = importance_scores(
        query.detach(),
        key_cmp.detach(),
        config=config,
        query_positions=query_positions,
        segment_ids=segment_ids,
        scale=scale,
    )
    return masks.top_blocks(scores, segment_ids, query_positions, config)


def selected_attention(
    query: Tensor,
    key_slc: Tensor,
    value_slc: Tensor,
    block_indices: Tensor,
    *,
    config: NSAConfig,
    query_positions: Tensor | None = None,
    segment_ids: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Eq. 12: attention over the tokens of the selected blocks up to the query."""
    segment_ids, query_positions = place_queries(query, key_slc.shape[1], segment_ids, query_positions)
    mask = masks.selection_mask(block_indices, segment_ids, query_positions, config)
    return attend(query, key_slc, value_slc, mask, scale)


def window_attention(
    query: Tensor,
    key_win: Tensor,
    value_win: Tensor,
    *,
    config: NSAConfig,
    query_positions: Tensor | None = None,
    segment_ids: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Section 3.3.3: attention over the last w tokens, the query's own included."""
    segment_ids, query_positions = place_queries(query, key_win.shape[1], segment_ids, query_positions)
    mask = masks.window_mask(segment_ids, query_positions, config)
    return attend(query, key_win, value_win, mask[:, :, None, :], scale)


def gated_sum(out_cmp: Tensor, out_slc: Tensor, out_win: Tensor, gates: Tensor) -> Tensor:
    """Eq. 5: `gates` [B, T, N, 3] in the order cmp, slc, win; summed in the accumulation dtype."""
    branches = torch.stack((out_cmp, out_slc, out_win), dim=-1).to(accumulation_dtype(out_cmp.dtype))
    return (branches * gates[:, :, :, None, :]).sum(dim=-1).to(out_cmp.dtype)


def native_sparse_attention(
    query: Tensor,
    key_cmp: Tensor,
    value_cmp: Tensor,
    key_slc: Tensor,
    value_slc: Tensor,
    key_win: Tensor,
    value_win: Tensor,
    gates: Tensor,
    *,
    config: NSAConfig,
    block_indices: Tensor | None = None,
    query_positions: Tensor | None = None,
    segment_ids: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """The whole of Eq. 5; compressed keys come compressed and rotated; `block_indices` pins the selection."""
    segment_ids, query_positions = place_queries(query, key_slc.shape[1], segment_ids, query_positions)
    where = dict(config=config, query_positions=query_positions, segment_ids=segment_ids, scale=scale)
    if block_indices is None:
        block_indices = select_blocks(query, key_cmp, **where)
    out_cmp, _ = compressed_attention(query, key_cmp, value_cmp, **where)
    out_slc, _ = selected_attention(query, key_slc, value_slc, block_indices, **where)
    out_win, _ = window_attention(query, key_win, value_win, **where)
    return gated_sum(out_cmp, out_slc, out_win, gates)
