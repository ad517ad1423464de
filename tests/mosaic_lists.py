"""The lists of a producer and its consumers by plain loops: for tests of the kernels and of the lists."""

import numpy as np

from nsa_jax.kernels.mosaic_gpu.visits import VisitLists


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
