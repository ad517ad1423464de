"""The items of the selection by plain loops: for tests of the kernels and of the lists."""

import numpy as np

from nsa_jax.kernels.triton.selected.items import BlockItems


def items_by_loops(
    block_indices, row_starts, last_rows, *, block, num_keys, item, packed, range_queries=None
) -> tuple[BlockItems, list]:
    """What the kernels of the keys' gradients read of `invert`; its other fields are empty.

    With `range_queries`, `tokens` are `token R + slot`, and the items of each range of queries follow each
    other. The second result has, for each block with several items, row of the batch, KV head, first key,
    limit of the keys, first slot and number of slots.
    """
    batch, length, kv_heads, slots_of_query = block_indices.shape
    pairs: dict[tuple[int, int, int], list[int]] = {}
    slot_of = {}
    for b, t, k, r in np.ndindex(*block_indices.shape):
        if block_indices[b, t, k, r] >= 0:
            start = int(row_starts[b, t] + block_indices[b, t, k, r] * block)
            pairs.setdefault((b, k, start), []).append(t)
            slot_of[b, k, start, t] = r
    if not packed:
        for b, k, start in np.ndindex(batch, kv_heads, -(-num_keys // block)):
            pairs.setdefault((b, k, start * block), [])
    ranges = -(-length // (range_queries or length))
    cut, slots, partials = {}, 0, []
    for (b, k, start), queries in sorted(pairs.items()):
        ends = [
            last_rows[b, t] + 1
            for t in range(length)
            if queries and row_starts[b, t] == row_starts[b, queries[0]]
        ]
        limit = min(start + block, int(max(ends))) if packed else num_keys
        pieces = []
        for r in range(ranges):
            mine = [t for t in queries if t // (range_queries or length) == r]
            order = sorted(mine, key=lambda t: (last_rows[b, t] >= start + block - 1, t))
            pieces += [(r, order[i : i + item]) for i in range(0, len(order), item)]
        several = len(pieces) > 1
        if several:
            partials.append((b, k, start, limit, slots, len(pieces)))
        for r, piece in pieces or [(0, [])]:
            cut.setdefault((b, k, r), []).append((start, limit, piece, slots if several else -1))
            slots += several
    tokens, items, bounds = [], [], [0]
    for b, k, r in np.ndindex(batch, kv_heads, ranges):
        for start, limit, piece, slot in cut.get((b, k, r), ()):
            first = len(tokens)
            masked = sum(last_rows[b, t] < start + block - 1 for t in piece)
            items.append((b * kv_heads + k, start, limit, first, first + masked, first + len(piece), slot))
            coded = [t * slots_of_query + slot_of[b, k, start, t] for t in piece]
            tokens += piece if range_queries is None else coded
        bounds.append(len(items))
    items.append((-1, 0, 0, 0, 0, 0, -1))
    none = np.zeros(0, np.int32)
    arrays = np.array(tokens, np.int32), np.array(items, np.int32)
    return BlockItems(*arrays, none, none, none, none, None, slots, np.array(bounds, np.int32)), partials


def add_items(items: BlockItems, partials: list, part, gradient, block: int) -> np.ndarray:
    """Gradient of all keys [B, S, K, D], by loops: 0 where no item wrote, sums where several did."""
    total = np.zeros(gradient.shape)
    for head, start, limit, _, _, _, slot in items.items:
        b, k = divmod(int(head), gradient.shape[2])
        if head >= 0 and slot < 0:
            end = min(limit, start + block)
            total[b, start:end, k] = gradient[b, start:end, k]
    for b, k, start, limit, slot, count in partials:
        end = min(limit, start + block)
        total[b, start:end, k] = part[slot : slot + count].sum(0)[: end - start]
    return total
