"""A decode step of an NSA layer by plain loops in NumPy and float64: for tests of the kernels.

It shares no index arithmetic with `nsa_jax.layout`, and it compresses and rotates by its own formulas.
"""

import math
from typing import NamedTuple

import numpy as np
from brute_force import attend, best_blocks, overlaps

from nsa_jax.cache import Compression, NSACache


class Step(NamedTuple):
    """What a step gives: its output, the cache after it, and the blocks that each token reads, or -1."""

    out: np.ndarray
    cache: NSACache
    blocks: np.ndarray


def append(held: NSACache, tokens, num_tokens, config, compress) -> NSACache:
    """The cache in float64, with the first `num_tokens[b]` tokens of row `b` or, if they do not fit, none."""
    arrays = {name: copied(x) for name, x in held._asdict().items()}
    names = {"key_slc": "key_slc", "value_slc": "value_slc", "key_raw_ring": "key_cmp"}
    names |= {"value_raw_ring": "value_cmp", "key_win_ring": "key_win", "value_win_ring": "value_win"}
    capacity = held.key_slc.shape[1]
    for b, (start, number) in enumerate(zip(held.lengths, num_tokens, strict=True)):
        if start + number > capacity:
            arrays["overflowed"][b] = True
            continue
        for at in range(start, start + number):
            for name, token in names.items():
                if (array := arrays[name]) is not None:
                    store(arrays, name, (b, at % array.shape[1]), getattr(tokens, token)[b, at - start])
            first = at + 1 - config.compression_block_size
            if compress is not None and first >= 0 and first % config.compression_stride == 0:
                slots = np.arange(first, at + 1) % arrays["key_raw_ring"].shape[1]
                key, value = (arrays[f"{x}_raw_ring"][b, slots] for x in ("key", "value"))
                block = first // config.compression_stride
                key, value = compressed(compress, key, value, first)
                store(arrays, "key_cmp", (b, block), key)
                store(arrays, "value_cmp", (b, block), value)
        arrays["lengths"][b] += number
    return NSACache(**arrays)


def store(arrays, name: str, place, token) -> None:
    """Writes a token `[K, D]`; in a quantised cache as the nearest numbers, and their scales."""
    if (scales := arrays.get(f"{name}_scale")) is None:
        arrays[name][place] = token
        return
    token, numbers = np.float64(token), arrays[name]
    most = 127 if numbers.dtype == np.int8 else 448
    for head, vector in enumerate(token):
        scale = np.float32(max(abs(vector)) / most)
        scales[(*place, head)] = scale if np.isfinite(vector).all() else np.nan
        nearest = vector / scale if 0 < scale < np.inf else 0 * vector
        if most == 127:
            nearest = np.rint(nearest)
        numbers[(*place, head)] = np.where(np.isfinite(nearest), nearest, 0).astype(numbers.dtype)


def read(cache: NSACache, name: str) -> np.ndarray:
    """An array of a cache as the numbers that it stands for."""
    array, scale = getattr(cache, name), getattr(cache, f"{name}_scale", None)
    return array if scale is None else np.float64(array) * np.float64(scale)[..., None]


def copied(x) -> np.ndarray | None:
    """A copy, of floats in float64."""
    return None if x is None else np.array(x, np.float64 if x.dtype.kind == "f" else None)


def compressed(compress, key, value, first: int) -> tuple[np.ndarray, np.ndarray]:
    """One key and one value for each head, from those of `l` tokens `[l, K, D]` that start at `first`."""
    if not isinstance(compress, Compression):
        found = compress(key[None, None], value[None, None], np.array([[first]]))
        return tuple(x[0, 0] for x in found)
    key, value = by_mlp(compress.key, key), by_mlp(compress.value, value)
    if compress.rotation is not None:
        ticks, rest, magnitude = (np.float64(x) for x in compress.rotation)
        angle = first * (ticks / 2**32 * 2 * math.pi + rest)
        left, right, others = np.split(key, [angle.size, 2 * angle.size], axis=-1)
        cos, sin = magnitude * np.cos(angle), magnitude * np.sin(angle)
        key = np.concatenate([left * cos - right * sin, right * cos + left * sin, others], axis=-1)
    return key, value


def by_mlp(mlp, window) -> np.ndarray:
    """The mean of the tokens, and what an MLP adds to it."""
    mean = window.mean(0)
    if mlp is None:
        return mean
    position_embedding, kernel_in, bias_in, kernel_out, bias_out = (np.float64(x) for x in mlp)
    x = (window + position_embedding[:, None]).swapaxes(0, 1)
    x = x.reshape(len(x), -1) @ kernel_in + bias_in
    gelu = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return mean + gelu @ kernel_out + bias_out


def decode_step(held, query, tokens, gates, num_tokens, blocks, config, compress) -> Step:
    """The step, token by token and head by head; `blocks` are given, or None if scores choose them."""
    after = append(held, tokens, num_tokens, config, compress)
    batch, num_new, num_heads, key_dim = query.shape
    kv_heads, value_dim = after.value_slc.shape[2:]
    scale, size = key_dim**-0.5, config.selection_block_size
    out = np.zeros((batch, num_new, num_heads, value_dim))
    chosen = np.full((batch, num_new, kv_heads, config.num_selected_blocks), -1)
    for b, t, k in np.ndindex(batch, num_new, kv_heads):
        at = held.lengths[b] + t
        if at >= after.lengths[b]:
            continue
        heads = range(k * num_heads // kv_heads, (k + 1) * num_heads // kv_heads)
        queries = np.float64(query[b, t, heads])
        candidates = at // size + 1
        rows = {"win": range(max(at + 1 - config.window_size, 0), at + 1)}
        if after.key_cmp is not None:
            strides = (at + 1 - config.compression_block_size) // config.compression_stride
            rows["cmp"] = range(max(strides + 1, 0))
        if blocks is None:
            scores = np.zeros(candidates)
            for i, share in enumerate(shares(queries, read(after, "key_cmp")[b, rows["cmp"], k], scale)):
                scores += share * overlaps(config, i, after.key_slc.shape[1] // size + 2)[:candidates]
            mine = best_blocks(config, scores, candidates)
        else:
            mine = sorted({int(j) for j in blocks[b, t, k] if 0 <= j < candidates})
        chosen[b, t, k, : len(mine)] = mine
        rows["slc"] = [s for j in mine for s in range(j * size, min((j + 1) * size, at + 1))]
        for n in heads:
            of_branch = []
            for branch in after.branches(gates):
                key, value = keys_values(after, branch, b, rows[branch], k)
                of_branch.append(attend(np.float64(query[b, t, n]), key, value, scale)[0])
            weights = [1.0] if gates is None else np.float64(gates[b, t, n])
            out[b, t, n] = sum(x * y for x, y in zip(weights, of_branch, strict=True))
    return Step(out, after, chosen)


def shares(queries, keys, scale) -> np.ndarray:
    """The probability of each compressed key, summed over the query heads of a KV head."""
    if not len(keys):
        return np.zeros(0)
    logits = queries @ keys.T * scale
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)).sum(0)


def keys_values(cache: NSACache, branch: str, row: int, tokens, head: int) -> list[np.ndarray]:
    """Those of a branch; the window branch reads the selected one's if they share them."""
    name = f"{branch}_ring" if branch == "win" and not cache.shares_keys_values else branch
    name = "slc" if name == "win" else name
    arrays = [read(cache, f"{x}_{name}")[row, :, head] for x in ("key", "value")]
    return [x[np.array(tokens, int) % len(x)] for x in arrays]
