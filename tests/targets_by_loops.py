"""What a selection is taught from, by loops over queries, heads and blocks, in NumPy.

It shares no index arithmetic with `nsa_jax.layout`: `brute_force.sight` finds what a query sees.
"""

import math

import brute_force
import numpy as np
from cases import Case


def _scale(case: Case) -> float:
    return 1 / math.sqrt(case.key_dim) if case.scale is None else case.scale


def _heads(case: Case):
    """Each query with each KV head, and the query heads of that KV head."""
    positions = case.query_positions
    heads = case.num_heads // case.num_kv_heads
    for b, t, kv in np.ndindex(*positions.shape, case.num_kv_heads):
        yield b, t, kv, range(kv * heads, (kv + 1) * heads), brute_force.sight(case, b, int(positions[b, t]))


def _of_blocks(query, keys, blocks, scale, lse) -> list[float]:
    """The probability of each block, a list of tokens, under `lse`, or under that of all blocks."""
    logits = [[float(query @ keys[token]) * scale for token in block] for block in blocks]
    if lse is None and any(logits):
        largest = max(x for block in logits for x in block)
        lse = largest + math.log(sum(math.exp(x - largest) for block in logits for x in block))
    return [sum(math.exp(x - lse) for x in block) for block in logits]


def block_probabilities(case: Case, query, key, reduce="sum", lse=None) -> np.ndarray:
    """[B, T, K, M]."""
    num_blocks = -(-case.num_keys // case.config.selection_block_size)
    found = np.zeros((*case.query_positions.shape, case.num_kv_heads, num_blocks))
    for b, t, kv, heads, seen in _heads(case):
        each = [
            _of_blocks(
                query[b, t, n],
                key[b, :, kv],
                seen.blocks,
                _scale(case),
                None if lse is None else lse[b, t, n],
            )
            for n in heads
        ]
        found[b, t, kv, : len(seen.blocks)] = getattr(np, reduce)(each, axis=0)
    return found


def selected_probabilities(case: Case, query, key, block_indices, reduce="sum", lse=None) -> np.ndarray:
    """[B, T, K, R]."""
    found = np.zeros(block_indices.shape)
    for b, t, kv, heads, seen in _heads(case):
        chosen = block_indices[b, t, kv].tolist()
        slots = [i for i, j in enumerate(chosen) if 0 <= j < len(seen.blocks) and j not in chosen[:i]]
        blocks = [seen.blocks[chosen[i]] for i in slots]
        each = [
            _of_blocks(
                query[b, t, n], key[b, :, kv], blocks, _scale(case), None if lse is None else lse[b, t, n]
            )
            for n in heads
        ]
        found[b, t, kv, slots] = getattr(np, reduce)(each, axis=0)
    return found


def importance_scores(case: Case, importance: np.ndarray) -> np.ndarray:
    """[B, T, K, M], from the importance that `brute_force.evaluate` finds."""
    found = np.full(importance.shape, -np.inf)
    for b, t, kv, _, seen in _heads(case):
        for j in range(len(seen.blocks)):
            found[b, t, kv, j] = math.log(max(importance[b, t, kv, j], np.finfo(np.float64).tiny))
    return found


def selection_loss(scores: np.ndarray, target: np.ndarray) -> np.ndarray:
    """[B, T, K]."""
    found = np.zeros(scores.shape[:-1])
    for index in np.ndindex(found.shape):
        seen = [j for j, score in enumerate(scores[index]) if score != -math.inf]
        mass = sum(target[index][j] for j in seen)
        if mass == 0:
            continue
        largest = max(scores[index][j] for j in seen)
        lse = largest + math.log(sum(math.exp(scores[index][j] - largest) for j in seen))
        for j in seen:
            share = target[index][j] / mass
            if share > 0:
                found[index] += share * (math.log(share) - (scores[index][j] - lse))
    return found
