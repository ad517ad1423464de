"""The lists of `the selection` by plain loops: for tests of the kernels and of the lists."""

import numpy as np

from nsa_jax.kernels.mosaic_gpu.visits import VisitLists
from nsa_jax.kernels.triton.selected.items import BlockItems


def visit_lists_by_loops(
    block_indices, row_starts, last_rows, *, block, keys, tokens, warpgroups, longest_gap
) -> VisitLists:
    """`visit_lists` in steps of `keys` keys, from blocks [B, T, K, R] and two numbers a query, [B, T]."""
    batch, length, kv_heads, slots = block_indices.shape
    tiles, steps, mine = -(-length // tokens), block // keys, tokens // warpgroups
    shape, size = (batch, kv_heads, tiles), tokens * slots * steps
    fills, visits = np.zeros((*shape, size), np.int64), np.zeros((*shape, warpgroups, size), np.int64)
    counts = np.zeros((*shape, 1 + 2 * warpgroups), np.int64)
    for at in np.ndindex(*shape):
        b, k, tile = at
        queries = range(tile * tokens, min(length, (tile + 1) * tokens))
        members: dict[int, set[int]] = {}
        for t in queries:
            for block_index in block_indices[b, t, k]:
                for step in range(steps):
                    start = int(row_starts[b, t] + block_index * block + step * keys)
                    if block_index >= 0 and start <= last_rows[b, t]:
                        members.setdefault(start, set()).add(t - tile * tokens)
        first_row = min((int(last_rows[b, t]) for t in queries if last_rows[b, t] >= 0), default=2**31)
        masked = [start for start in sorted(members) if start + keys - 1 > first_row]
        order = masked + [start for start in sorted(members) if start not in masked] or [0]
        needed = [0] * len(order)
        counts[(*at, 0)] = len(order)
        for w in range(warpgroups):
            last, own = 0, []
            for place, start in enumerate(order):
                bits = sum(1 << (i - w * mine) for i in members.get(start, ()) if i // mine == w)
                last = place if bits else last
                if (place - last) % longest_gap == 0:
                    own.append(place | bits << 16)
                    needed[place] |= 1 << w
            visits[(*at, w)][: len(own)] = own
            counts[(*at, 1 + 2 * w)] = len(own)
            counts[(*at, 2 + 2 * w)] = sum((x & 0xFFFF) < max(len(masked), 1) for x in own)
        fills[at][: len(order)] = [s << warpgroups | n for s, n in zip(order, needed, strict=True)]
    return VisitLists(*(x.astype(np.uint32).view(np.int32) for x in (fills, visits, counts)))


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
