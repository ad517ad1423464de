"""Native Sparse Attention as the paper words it: loops over tokens, one query at a time, in NumPy.

It shares no index arithmetic with `nsa_jax.layout`: sequences are found by walking the row, overlaps by
intersecting sets of tokens, the best blocks by sorting Python tuples.
"""

import dataclasses
import functools
import math

import numpy as np
from cases import Case, Operands


@dataclasses.dataclass(frozen=True)
class Sight:
    """What one query may see: rows of the compressed keys, candidate blocks as token lists, window tokens."""

    compressed: list[int]  # rows of the compressed keys, visible blocks of the query's sequence in order
    blocks: list[list[int]]  # row tokens at or before the query of each candidate selection block
    window: list[int]


def sequences(case: Case, row: int) -> list[list[int]]:
    """Row tokens of each sequence of a row."""
    ids = case.segment_ids
    if ids is None:
        return [list(range(case.num_keys))]
    found: dict[int, list[int]] = {}
    for token, name in enumerate(ids[row].tolist()):
        if name != 0:
            found.setdefault(name, []).append(token)
    return list(found.values())


def sight(case: Case, row: int, position: int) -> Sight:
    """What the query at row token `position` may see; nothing for padding."""
    config = case.config
    compressed_before = 0
    for tokens in sequences(case, row):
        windows = [
            tokens[first : first + config.compression_block_size]
            for first in range(0, len(tokens), config.compression_stride)
        ]
        windows = [window for window in windows if len(window) == config.compression_block_size]
        if position in tokens:
            past = [token for token in tokens if token <= position]
            size = config.selection_block_size
            return Sight(
                [compressed_before + i for i, window in enumerate(windows) if window[-1] <= position],
                [past[first : first + size] for first in range(0, len(past), size)],
                past[-config.window_size :],
            )
        compressed_before += len(windows)
    return Sight([], [], [])


def attend(query, keys, values, scale):
    """`(out, lse)` of softmax attention of one query vector; (0, -inf) without keys."""
    if not len(keys):
        return np.zeros(values.shape[-1]), -math.inf
    logits = keys @ query * scale
    weights = np.exp(logits - logits.max())
    return weights @ values / weights.sum(), math.log(weights.sum()) + logits.max()


def overlap(config, compressed: int, selected: int) -> float:
    """Tokens that a compression block shares with a selection block, in strides."""
    first = compressed * config.compression_stride
    summarised = set(range(first, first + config.compression_block_size))
    first = selected * config.selection_block_size
    return (
        len(summarised & set(range(first, first + config.selection_block_size))) / config.compression_stride
    )


@functools.cache
def overlaps(config, compressed: int, num_blocks: int) -> np.ndarray:
    """`overlap` with each selection block; do not write into it."""
    return np.array([overlap(config, compressed, selected) for selected in range(num_blocks)])


def evaluate(
    case: Case, operands: Operands, block_indices: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Outputs, log-sum-exps, reads, importance and selection, and attention over `block_indices` if given."""
    config = case.config
    batch, num_queries, num_heads, key_dim = operands.query.shape
    num_kv_heads, value_dim = operands.value_slc.shape[2:]
    scale = 1 / math.sqrt(key_dim) if case.scale is None else case.scale
    num_blocks = max(-(-case.num_keys // config.selection_block_size), 1)
    result = {
        **{
            f"out_{branch}": np.zeros((batch, num_queries, num_heads, value_dim))
            for branch in ("cmp", "slc", "win")
        },
        **{f"lse_{branch}": np.zeros((batch, num_queries, num_heads)) for branch in ("cmp", "slc", "win")},
        **{
            f"reads_{branch}": np.zeros((batch, num_queries, num_kv_heads), int)
            for branch in ("cmp", "slc", "win")
        },
        "importance": np.zeros((batch, num_queries, num_kv_heads, num_blocks)),
        "blocks": np.full((batch, num_queries, num_kv_heads, config.num_selected_blocks), -1),
    }
    positions = case.query_positions
    for b, t, kv in np.ndindex(batch, num_queries, num_kv_heads):
        seen = sight(case, b, int(positions[b, t]))
        heads = range(kv * num_heads // num_kv_heads, (kv + 1) * num_heads // num_kv_heads)
        scores = importance(case, operands, seen, b, t, kv, heads, scale, num_blocks)
        chosen = best_blocks(config, scores, len(seen.blocks))
        result["importance"][b, t, kv] = scores
        result["blocks"][b, t, kv, : len(chosen)] = chosen
        if block_indices is not None:
            chosen = [int(j) for j in block_indices[b, t, kv] if 0 <= j < len(seen.blocks)]
        visible = {
            "cmp": seen.compressed,
            "slc": [token for block in chosen for token in seen.blocks[block]],
            "win": seen.window,
        }
        for branch, rows in visible.items():
            keys = getattr(operands, f"key_{branch}")[b, rows, kv]
            values = getattr(operands, f"value_{branch}")[b, rows, kv]
            result[f"reads_{branch}"][b, t, kv] = len(rows)
            for n in heads:
                out, lse = attend(operands.query[b, t, n], keys, values, scale)
                result[f"out_{branch}"][b, t, n], result[f"lse_{branch}"][b, t, n] = out, lse
    branches = [result[f"out_{branch}"] for branch in ("cmp", "slc", "win")]
    result["out"] = sum(operands.gates[..., i, None] * out for i, out in enumerate(branches))
    return result


def importance(case, operands, seen, b, t, kv, heads, scale, num_blocks) -> np.ndarray:
    """Eq. 8-10: probabilities of the visible compressed blocks, by overlap, summed over the heads."""
    scores = np.zeros(num_blocks)
    if not seen.compressed:
        return scores
    for n in heads:
        logits = operands.key_cmp[b, seen.compressed, kv] @ operands.query[b, t, n] * scale
        weights = np.exp(logits - logits.max())
        for i, probability in enumerate(weights / weights.sum()):
            scores += overlaps(case.config, i, num_blocks) * probability
    return scores


def best_blocks(config, scores, num_candidates: int) -> list[int]:
    """Eq. 11: forced blocks first, then by score, then by number."""
    local = range(num_candidates - config.num_local_blocks, num_candidates)
    ranked = sorted(
        range(num_candidates),
        key=lambda j: (not (j < config.num_initial_blocks or j in local), -scores[j], j),
    )
    return sorted(ranked[: config.num_selected_blocks])
