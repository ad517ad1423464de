"""Which keys each query sees: dense boolean masks, derived from the formulas of arXiv:2502.11089.

Rows may be packed: `segment_ids` `[B, S]` has one contiguous run per non-zero id, and 0 is padding.
`query_positions` `[B, T]` are the row indices of the queries; -1 marks a padding query. Block numbers count
from the first token of the query's sequence. None of this is meant to be fast.
"""

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class NSAConfig:
    """The block structure, with the paper's defaults. Any object with these attributes can take its place.

    Attributes:
      compression_block_size: `l`, tokens of a compression block.
      compression_stride: `d`, tokens from one compression block to the next.
      selection_block_size: `l'`, tokens of a selection block.
      num_selected_blocks: `n`, most blocks that a query selects.
      window_size: `w`, tokens of the window.
      num_initial_blocks: blocks at the start that are always selected.
      num_local_blocks: blocks up to the query's own that are always selected.
    """

    compression_block_size: int = 32
    compression_stride: int = 16
    selection_block_size: int = 64
    num_selected_blocks: int = 16
    window_size: int = 512
    num_initial_blocks: int = 1
    num_local_blocks: int = 2


def num_compression_blocks(length: int, config: NSAConfig) -> int:
    """Number of complete blocks `[i d, i d + l)` in a sequence of `length` tokens."""
    if length < config.compression_block_size:
        return 0
    return (length - config.compression_block_size) // config.compression_stride + 1


def sequence_starts(segment_ids: Tensor) -> Tensor:
    """For each token, `[B, S]`: the row index at which its run of equal ids begins."""
    index = torch.arange(segment_ids.shape[1], device=segment_ids.device)
    begins = torch.ones_like(segment_ids, dtype=torch.bool)
    begins[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    return torch.where(begins, index, 0).cummax(dim=1).values


def at(values: Tensor, index: Tensor, absent: int) -> Tensor:
    """`values[b, index[b, x]]`, or `absent` where the index is negative."""
    return values.gather(1, index.clamp(min=0)).masked_fill(index < 0, absent)


def same_sequence(segment_ids: Tensor, query_positions: Tensor, index: Tensor) -> Tensor:
    """Mask `[B, T, X]`: whether the token at row index `index[b, x]` (-1 = none) is in query t's sequence."""
    of_query = at(segment_ids, query_positions, 0)[:, :, None]
    return (of_query != 0) & (of_query == at(segment_ids, index, 0)[:, None, :])


def causal_mask(segment_ids: Tensor, query_positions: Tensor) -> Tensor:
    """Mask `[B, T, S]` of the tokens `s <= t` of the query's sequence."""
    token = torch.arange(segment_ids.shape[1], device=segment_ids.device).expand(segment_ids.shape)
    past = token[:, None, :] <= query_positions[:, :, None]
    return past & same_sequence(segment_ids, query_positions, token)


def window_mask(segment_ids: Tensor, query_positions: Tensor, config: NSAConfig) -> Tensor:
    """Mask `[B, T, S]` of the tokens `t - w + 1 .. t` of the query's sequence."""
    token = torch.arange(segment_ids.shape[1], device=segment_ids.device)
    age = query_positions[:, :, None] - token
    return causal_mask(segment_ids, query_positions) & (age < config.window_size)


def compression_starts(segment_ids: Tensor, config: NSAConfig) -> Tensor:
    """Row index `[B, C]` at which each compression block starts, sequence after sequence; -1 in unused slots.

    A token starts a block iff its index in its sequence is a multiple of d, and it and the l - 1 tokens after
    it belong to that sequence.
    """
    length, size = segment_ids.shape[1], config.compression_block_size
    count = num_compression_blocks(length, config)
    if count == 0:
        return segment_ids.new_empty((segment_ids.shape[0], 0), dtype=torch.long)
    index = torch.arange(length, device=segment_ids.device)
    begins = (segment_ids != 0) & ((index - sequence_starts(segment_ids)) % config.compression_stride == 0)
    begins[:, : length - size + 1] &= segment_ids[:, : length - size + 1] == segment_ids[:, size - 1 :]
    begins[:, length - size + 1 :] = False
    order = begins.logical_not().int().argsort(dim=1, stable=True)[:, :count]
    return torch.where(begins.gather(1, order), order, -1)


def compression_mask(segment_ids: Tensor, query_positions: Tensor, config: NSAConfig) -> Tensor:
    """Mask `[B, T, C]`: block i is visible iff its last token, `i d + l - 1`, is not after the query."""
    starts = compression_starts(segment_ids, config)
    last = (starts + config.compression_block_size - 1)[:, None, :]
    return same_sequence(segment_ids, query_positions, starts) & (last <= query_positions[:, :, None])


def num_selection_blocks(length: int, config: NSAConfig) -> int:
    """Number of blocks `[j l', (j + 1) l')` that cover `length` tokens; the last one may be partial."""
    return -(-length // config.selection_block_size)


def overlap_weights(segment_ids: Tensor, config: NSAConfig) -> Tensor:
    """Weights `[B, C, M]` of Eq. 9: `|cmp_i intersect slc_j| / d`, both in the sequence of block i."""
    starts = compression_starts(segment_ids, config)
    first = starts - at(sequence_starts(segment_ids), starts, 0)
    blocks = torch.arange(num_selection_blocks(segment_ids.shape[1], config), device=segment_ids.device)
    left, right = blocks * config.selection_block_size, (blocks + 1) * config.selection_block_size
    last = first + config.compression_block_size
    shared = torch.minimum(last[:, :, None], right) - torch.maximum(first[:, :, None], left)
    return (shared.clamp(min=0) // config.compression_stride).masked_fill(starts[:, :, None] < 0, 0)


def importance(p_cmp: Tensor, segment_ids: Tensor, config: NSAConfig) -> Tensor:
    """Importance `[B, T, K, M]` from the probabilities `p_cmp` `[B, T, K, G, C]` (Eq. 9 and 10).

    Heads and blocks are added one by one in ascending order, so that exact ties stay exact.
    """
    weights = overlap_weights(segment_ids, config).to(p_cmp.dtype)
    batch, queries, kv_heads, _, blocks = p_cmp.shape
    shared = p_cmp.new_zeros((batch, queries, kv_heads, blocks))
    for p in p_cmp.unbind(dim=3):
        shared = shared + p
    scores = p_cmp.new_zeros((batch, queries, kv_heads, weights.shape[-1]))
    for i in range(blocks):
        scores = scores + shared[..., i, None] * weights[:, None, None, i, :]
    return scores


def block_kinds(segment_ids: Tensor, query_positions: Tensor, config: NSAConfig) -> tuple[Tensor, Tensor]:
    """Two masks `[B, T, M]`: block j is a candidate (its first token is `<= t`), and block j is forced."""
    index = query_positions - at(sequence_starts(segment_ids), query_positions, 0)
    index = index.masked_fill(at(segment_ids, query_positions, 0) == 0, -1)[:, :, None]
    blocks = torch.arange(num_selection_blocks(segment_ids.shape[1], config), device=segment_ids.device)
    candidate = blocks * config.selection_block_size <= index
    current = index.div(config.selection_block_size, rounding_mode="floor")
    forced = (blocks < config.num_initial_blocks) | (current - blocks < config.num_local_blocks)
    return candidate, candidate & forced


def top_blocks(scores: Tensor, segment_ids: Tensor, query_positions: Tensor, config: NSAConfig) -> Tensor:
    """Chooses blocks `[B, T, K, n]`: the forced ones, then the best scores. Ties go to the lower block.

    The result is ascending, with -1 in the unused slots at the end.
    """
    candidate, forced = (kind[:, :, None, :] for kind in block_kinds(segment_ids, query_positions, config))
    ranked = scores.masked_fill(forced, torch.inf).masked_fill(~candidate, -torch.inf)
    chosen = ranked.argsort(dim=-1, descending=True, stable=True)[..., : config.num_selected_blocks]
    unused = scores.shape[-1]
    chosen = chosen.masked_fill(~candidate.expand_as(scores).gather(-1, chosen), unused).sort(dim=-1).values
    chosen = torch.nn.functional.pad(chosen, (0, config.num_selected_blocks - chosen.shape[-1]), value=unused)
    return chosen.masked_fill(chosen == unused, -1)


def block_mask(segment_ids: Tensor, query_positions: Tensor, config: NSAConfig) -> Tensor:
    """Mask `[B, T, M, S]` of the tokens `s <= t` in each block of the query's sequence."""
    token = torch.arange(segment_ids.shape[1], device=segment_ids.device)
    block = (token - sequence_starts(segment_ids)) // config.selection_block_size
    blocks = torch.arange(num_selection_blocks(segment_ids.shape[1], config), device=token.device)
    seen = causal_mask(segment_ids, query_positions)
    return (blocks[:, None] == block[:, None, None, :]) & seen[:, :, None, :]


def at_slots(of_blocks: Tensor, block_indices: Tensor, unused: float) -> Tensor:
    """Of numbers of blocks `[B, T, K, M]` those of the blocks in the slots `[B, T, K, n]`."""
    return of_blocks.gather(-1, block_indices.clamp(min=0).long()).masked_fill(block_indices < 0, unused)


def selection_mask(
    block_indices: Tensor, segment_ids: Tensor, query_positions: Tensor, config: NSAConfig
) -> Tensor:
    """Mask `[B, T, K, S]` of the tokens `s <= t` in the selected blocks of the query's sequence (Eq. 12)."""
    token = torch.arange(segment_ids.shape[1], device=segment_ids.device)
    block = (token - sequence_starts(segment_ids)) // config.selection_block_size
    taken = torch.zeros((), dtype=torch.bool, device=token.device)
    for slot in block_indices.unbind(dim=-1):
        taken = taken | (slot[..., None] == block[:, None, None, :])
    return taken & causal_mask(segment_ids, query_positions)[:, :, None, :]
