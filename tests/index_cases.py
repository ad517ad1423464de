"""Operands of an indexer for the cases of the suite, and what loops over single tokens make of them."""

import math
from typing import NamedTuple

import brute_force
import numpy as np
from cases import Case


class Indexed(NamedTuple):
    """The float arrays of `select_by_index`."""

    query: np.ndarray  # [B, T, K, J, E]
    key: np.ndarray  # [B, S, I, E], where I is K or 1
    weights: np.ndarray | None  # [B, T, K, J]


def draw(case: Case, *, heads: int = 1, dim: int = 8, weighted: bool = False, shared: bool = True) -> Indexed:
    """Standard normal operands in float64; weights of both signs."""
    rng = case.generator(f"index {heads} {dim}")
    batch, queries = case.query_positions.shape
    rows = (batch, queries, case.num_kv_heads, heads)
    return Indexed(
        rng.standard_normal((*rows, dim)),
        rng.standard_normal((batch, case.num_keys, 1 if shared else case.num_kv_heads, dim)),
        rng.standard_normal(rows) if weighted else None,
    )


def token_score(query, key, weights, scale) -> tuple[float, list[float]]:
    """The score of one token, and the scaled product of each index head."""
    products = [float(scale * (head @ key)) for head in query]
    if weights is None:
        score = max(-math.inf if math.isnan(x) else x for x in products)
    else:
        score = sum(w * (x if math.isnan(x) else max(x, 0.0)) for w, x in zip(weights, products, strict=True))
    return (-math.inf if math.isnan(score) else score), products


class Loops(NamedTuple):
    """What the loops give; `gradients` of query, key and weights, if there is a cotangent."""

    scores: np.ndarray
    blocks: np.ndarray
    gradients: tuple[np.ndarray | None, ...]


def by_loops(case: Case, given: Indexed, cotangent: np.ndarray | None = None) -> Loops:
    """Scores, selection and gradients, one query, block and token at a time."""
    query, key, weights = given
    scale = query.shape[-1] ** -0.5 if case.scale is None else case.scale
    rows, size = query.shape[:3], case.config.selection_block_size
    scores = np.full((*rows, -(-case.num_keys // size)), -math.inf)
    found = tuple(None if x is None else np.zeros_like(x) for x in given)
    for b, t, k in np.ndindex(rows):
        seen = brute_force.sight(case, b, int(case.query_positions[b, t])).blocks
        i = min(k, key.shape[2] - 1)  # its head of keys
        own = query[b, t, k], None if weights is None else weights[b, t, k]
        for j, tokens in enumerate(seen):
            each = [token_score(own[0], key[b, s, i], own[1], scale) for s in tokens]
            best = max(score for score, _ in each)
            scores[b, t, k, j] = best
            if cotangent is None or not math.isfinite(best):
                continue
            place = next(i for i, (score, _) in enumerate(each) if score == best)
            given_here, products = cotangent[b, t, k, j], each[place][1]
            for head, product in enumerate(products):
                if weights is None and head != products.index(best):
                    continue
                factor = given_here * scale
                if weights is not None:
                    found[2][b, t, k, head] += given_here * max(product, 0)
                    factor *= own[1][head] * (product > 0)
                if factor == 0:  # a relu hides what need not be finite
                    continue
                found[0][b, t, k, head] += factor * key[b, tokens[place], i]
                found[1][b, tokens[place], i] += factor * own[0][head]
    return Loops(scores, best_of(case, scores), found)


class Slots(NamedTuple):
    """Blocks to score, `[B, T, K, R]`, and which slots repeat an earlier one."""

    blocks: np.ndarray
    repeated: np.ndarray


def slots_of(case: Case, given: Indexed) -> Slots:
    """Blocks by chance: some unused, out of sight, beyond the row, or twice."""
    shape = (*given.query.shape[:3], case.config.num_selected_blocks)
    num_blocks = -(-case.num_keys // case.config.selection_block_size)
    blocks = case.generator("slots").integers(-1, num_blocks + 1, shape, np.int32)
    equal = blocks[..., :, None] == blocks[..., None, :]
    return Slots(blocks, (equal & np.tri(shape[-1], k=-1, dtype=bool)).any(-1) & (blocks >= 0))


def slots_by_loops(
    case: Case, given: Indexed, blocks: np.ndarray
) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray | None, ...]]:
    """Scores of the slots, a cotangent that is 0 where they are not finite, and the gradients for it."""
    scores = by_loops(case, given).scores
    found, of_all = np.full(blocks.shape, -math.inf), np.zeros_like(scores)
    cotangent = case.generator("cotangent of slots").standard_normal(blocks.shape)
    for b, t, k in np.ndindex(blocks.shape[:3]):
        for slot, block in enumerate(blocks[b, t, k]):
            if 0 <= block < scores.shape[3] and block not in blocks[b, t, k, :slot]:
                found[b, t, k, slot] = scores[b, t, k, block]
                of_all[b, t, k, block] = cotangent[b, t, k, slot]
    cotangent = np.where(np.isfinite(found), cotangent, 0)
    return found, cotangent, by_loops(case, given, of_all).gradients


def best_of(case: Case, scores: np.ndarray) -> np.ndarray:
    """The best blocks by given scores; NaN is the lowest, and infinity the largest finite number."""
    most = np.finfo(scores.dtype).max
    scores = np.clip(np.where(np.isnan(scores), -most, scores), -most, most)
    blocks = np.full((*scores.shape[:3], case.config.num_selected_blocks), -1)
    for b, t, k in np.ndindex(scores.shape[:3]):
        seen = brute_force.sight(case, b, int(case.query_positions[b, t])).blocks
        chosen = brute_force.best_blocks(case.config, scores[b, t, k], len(seen))
        blocks[b, t, k, : len(chosen)] = chosen
    return blocks
