"""The branches of Native Sparse Attention (arXiv:2502.11089) as masked `scaled_dot_product_attention`.

Arguments and results mean the same as in the functions of the same names in `nsa_jax`. The layout is
`[B, T, N, H]`. Outputs are computed in the dtype of the inputs; for a float32 or float64 reference of 16-bit
inputs, cast the inputs up. The logits, softmax and importance that decide the selection, and every lse, are
float32 at least. A query that sees no key gets output 0, lse -inf and finite gradients.
"""

import torch
from torch import Tensor
from torch.nn import functional

from nsa_torch_ref import masks
from nsa_torch_ref.masks import NSAConfig


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float64 for float64 inputs, otherwise float32."""
    return torch.promote_types(dtype, torch.float32)


def place_queries(
    query: Tensor, length: int, segment_ids: Tensor | None, query_positions: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Fills in the defaults: one sequence per row, and the queries are its last T tokens."""
    batch, queries = query.shape[:2]
    if segment_ids is None:
        segment_ids = torch.ones((batch, length), dtype=torch.long, device=query.device)
    if query_positions is None:
        query_positions = torch.arange(length - queries, length, device=query.device).expand(batch, queries)
    return segment_ids.long(), query_positions.long()


def masked_logits(query: Tensor, key: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """Scaled logits `[B, T, K, G, X]` in the dtype of sums; -inf outside `mask` `[B, T, K or 1, X]`."""
    dtype, kv_heads = accumulation_dtype(query.dtype), key.shape[2]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    grouped = query.to(dtype).unflatten(2, (kv_heads, -1))
    logits = torch.einsum("btkgh,bxkh->btkgx", grouped, key.to(dtype)) * scale
    return logits.masked_fill(~mask[:, :, :, None, :], -torch.inf)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attends under a boolean mask `[B, T, K or 1, X]` (Eq. 1 and 2).

    Returns:
      Output `[B, T, N, V]`, and natural-log-sum-exp `[B, T, N]`.
    """
    kv_heads = key.shape[2]
    mask = mask.expand(-1, -1, kv_heads, -1)
    blind = ~mask.any(dim=-1, keepdim=True)
    # Some SDPA kernels give NaN for a row without keys, forward or backward. So such a row sees all keys
    # here, and its result is dropped.
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
    """The compressed branch (Eq. 7). A row has T tokens unless `segment_ids` gives its length."""
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
    """Importance `[B, T, K, M]` of each selection block (Eq. 8-10).

    The softmax over the visible compressed blocks, collected by the selection blocks that they overlap.
    """
    length = query.shape[1] if segment_ids is None else segment_ids.shape[1]
    segment_ids, query_positions = place_queries(query, length, segment_ids, query_positions)
    mask = masks.compression_mask(segment_ids, query_positions, config)
    p_cmp = masked_logits(query, key_cmp, mask[:, :, None, :], scale).softmax(dim=-1)
    # The softmax of a row that is all -inf is NaN; its importance is 0.
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
    """The blocks `[B, T, K, n]` that each query attends (Eq. 11), without gradient.

    Block numbers count from the start of the query's sequence. They are ascending, with -1 in the unused
    slots.
    """
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
    """The selected branch (Eq. 12): attends to the tokens of the selected blocks up to the query."""
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
    """The window branch (section 3.3.3): attends to the last w tokens, the query's own included."""
    segment_ids, query_positions = place_queries(query, key_win.shape[1], segment_ids, query_positions)
    mask = masks.window_mask(segment_ids, query_positions, config)
    return attend(query, key_win, value_win, mask[:, :, None, :], scale)


def gated_sum(out_cmp: Tensor | None, out_slc: Tensor, out_win: Tensor | None, gates: Tensor) -> Tensor:
    """Adds the branches, weighted by `gates` `[B, T, N, P]` in the order cmp, slc, win (Eq. 5).

    `P` is 3, or the number of branches if some are absent: None.
    """
    outs = [out for out in (out_cmp, out_slc, out_win) if out is not None]
    branches = torch.stack(outs, dim=-1).to(accumulation_dtype(out_slc.dtype))
    return (branches * gates[:, :, :, None, :]).sum(dim=-1).to(out_slc.dtype)


def native_sparse_attention(
    query: Tensor,
    key_cmp: Tensor | None,
    value_cmp: Tensor | None,
    key_slc: Tensor,
    value_slc: Tensor,
    key_win: Tensor | None,
    value_win: Tensor | None,
    gates: Tensor | None,
    *,
    config: NSAConfig,
    block_indices: Tensor | None = None,
    query_positions: Tensor | None = None,
    segment_ids: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """The branches and their gated sum (Eq. 5).

    `key_cmp` holds compressed and then rotated keys. `block_indices` is a selection to use instead of
    choosing one. Keys and values of cmp and of win may be None: that branch is absent. `gates` are None if
    the selected branch is alone.
    """
    segment_ids, query_positions = place_queries(query, key_slc.shape[1], segment_ids, query_positions)
    where = dict(config=config, query_positions=query_positions, segment_ids=segment_ids, scale=scale)
    if block_indices is None:
        block_indices = select_blocks(query, key_cmp, **where)
    out_cmp = out_win = None
    out_slc, _ = selected_attention(query, key_slc, value_slc, block_indices, **where)
    if key_cmp is not None:
        out_cmp, _ = compressed_attention(query, key_cmp, value_cmp, **where)
    if key_win is not None:
        out_win, _ = window_attention(query, key_win, value_win, **where)
    return out_slc if gates is None else gated_sum(out_cmp, out_slc, out_win, gates)
