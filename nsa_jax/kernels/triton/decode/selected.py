"""Selected attention of one new token (Eq. 11, 12): each share of the team takes some of the blocks.

Grid: that of `second_kernel`; all shares of a team run it, when all have written their lists. Every share
ranks the lists of `scores` itself, by counting: this takes less time than waiting for another program to tell
it its blocks. Why this order: ranking comes before the loop, because the loads of the first step need its
result. Then the loop runs over blocks, with all query heads of the KV head at once, so a key is loaded once.
Blocks that are given need no ranking: they come in the order of their slots, and one that an earlier slot has
already counts as none.

Registers of its part: sums and logits, `ROWS (COLUMNS + V) / (32 num_warps)` floats a thread with
`COLUMNS = STEP PADDED_BLOCK` (24 at 16 rows, 64 keys, V = 128, 4 warps), and ranks and blocks of the
candidates, `2 LISTS SLOTS / (32 num_warps)` integers (2). Shared memory in 16-bit dtypes, below 64 rows:
`(ROWS H + (STAGES - 1) COLUMNS (H + V) + ROWS COLUMNS) itemsize` for query, tiles and probabilities, 70 KB
(4 + 64 + 2) with 3 stages and 38 KB with 2. Before the loop, `8 LISTS SLOTS` bytes of the same memory hold
the numbers to rank (1 KB).

Ranking: LISTS times SLOTS candidates against each other, 128 x 128 for 64k tokens. Bytes: the keys and values
of the selected blocks, 17 MB at 8 rows, 4 us at 4.2 TB/s.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from nsa_jax.kernels.triton.decode.pairs import joined_sums, load_kept_tile, no_sums
from nsa_jax.kernels.triton.decode.parts import attend, ranks, store_part
from nsa_jax.kernels.triton.decode.rounding import Scales, load_scales


class Selected(NamedTuple):
    """What the branch reads and writes.

    Attributes:
      key, value: `[B, MAX_LENGTH, K, D]`.
      scales: theirs `[B, MAX_LENGTH, K]`, or None.
      given: `[B, T, K, SELECTED]`, blocks to attend to, -1 for none, in any order; None to take the best.
      best: `[B, K, T, LISTS, 2, SLOTS]`, see `scores`; read if no blocks are given.
      chosen: `[B, T, K, SELECTED]`, the blocks that were attended to, -1 for none.
      out, sums: the parts, see `parts`.
    """

    key: tl.tensor
    value: tl.tensor
    scales: Scales
    given: tl.tensor | None
    best: tl.tensor
    chosen: tl.tensor
    out: tl.tensor
    sums: tl.tensor


class SelectedDims(NamedTuple):
    """Sizes of the branch that are known while tracing.

    Attributes:
      T, G, KV_HEADS: new tokens, query heads of a KV head, KV heads.
      MAX_LENGTH, WIDE: tokens of the cache; whether offsets in a row of it may need 64 bits.
      BLOCK, PADDED_BLOCK: tokens of a selection block, and columns for them.
      SELECTED, INITIAL, LOCAL: selected blocks; of these the initial ones and the local ones.
      CHUNK, LISTS, SLOTS: blocks whose best ones form a list, number of lists, and length of a list.
      SHARES, FIRST, PARTS: shares of the team, the number of their first part, parts of all branches.
      STEP, ROWS: blocks of a step of the loop, query rows.
      STAGES: stages of the loop: the loads of STAGES - 1 steps are in flight.
      KEY, VALUE: `Dim`s.
    """

    T: tl.constexpr
    G: tl.constexpr
    KV_HEADS: tl.constexpr
    MAX_LENGTH: tl.constexpr
    WIDE: tl.constexpr
    BLOCK: tl.constexpr
    PADDED_BLOCK: tl.constexpr
    SELECTED: tl.constexpr
    INITIAL: tl.constexpr
    LOCAL: tl.constexpr
    CHUNK: tl.constexpr
    LISTS: tl.constexpr
    SLOTS: tl.constexpr
    SHARES: tl.constexpr
    FIRST: tl.constexpr
    PARTS: tl.constexpr
    STEP: tl.constexpr
    STAGES: tl.constexpr
    ROWS: tl.constexpr
    KEY: tl.constexpr
    VALUE: tl.constexpr


@triton.jit
def attend_selected(selected, q, rows, tokens, bk, token, share, scale, S, PRECISION: tl.constexpr):
    """Attends to the SLOTS / SHARES blocks of one share, STEP at a time."""
    b = bk // S.KV_HEADS
    kv_head = bk % S.KV_HEADS
    KEY: tl.constexpr = S.KEY
    VALUE: tl.constexpr = S.VALUE
    H: tl.constexpr = KEY.D0 + KEY.D1
    V: tl.constexpr = VALUE.D0 + VALUE.D1
    FORCED: tl.constexpr = S.INITIAL + S.LOCAL if selected.given is None else 0
    EACH: tl.constexpr = S.SLOTS // S.SHARES
    COLUMNS: tl.constexpr = S.STEP * S.PADDED_BLOCK

    exists = token < tokens.number
    at = tokens.start + token
    count = tl.where(exists, at // S.BLOCK + 1, 0)
    if selected.given is None:
        # Slots: the initial blocks, the local ones, then others by rank; while all blocks fit, all in order.
        local = count - S.LOCAL
        fit = count <= S.SELECTED
        x = tl.arange(0, S.LISTS * S.SLOTS)
        source = (bk * S.T + token) * S.LISTS + x // S.SLOTS
        bits = tl.load(selected.best + source * (2 * S.SLOTS) + x % S.SLOTS)
        index = tl.load(selected.best + source * (2 * S.SLOTS) + S.SLOTS + x % S.SLOTS)
        candidate = (x // S.SLOTS * S.CHUNK < local) & (x % S.SLOTS < S.SELECTED - FORCED)
        bits = tl.where(candidate & (count > S.SELECTED), bits, -1)
        # Lists are in the order of their blocks, so of equal scores the earlier one has the lower block.
        live = tl.cdiv(tl.maximum(local, 0), S.CHUNK) * S.SLOTS  # in lists that may have candidates
        rank = tl.where(bits >= 0, ranks(bits, live, S.LISTS * S.SLOTS), S.LISTS * S.SLOTS)
    else:
        rank = tl.arange(0, S.SLOTS)
        given = selected.given + ((b * S.T + token) * S.KV_HEADS + kv_head) * S.SELECTED
        index = tl.load(given + rank, mask=rank < S.SELECTED, other=-1)
        repeats = tl.zeros([S.SLOTS], tl.int32)
        PIECE: tl.constexpr = min(S.SLOTS, 16)
        for start in tl.range(0, S.SLOTS, PIECE):
            before = start + tl.arange(0, PIECE)
            earlier = tl.load(given + before, mask=before < S.SELECTED, other=-1)
            same = (earlier[:, None] == index[None, :]) & (before[:, None] < rank[None, :])
            repeats += tl.sum(same.to(tl.int32), 0)
        index = tl.where((index >= 0) & (index < count) & (repeats == 0), index, -1)

    column = tl.arange(0, COLUMNS)
    in_block = column % S.PADDED_BLOCK
    keys = selected.key + (b.to(tl.int64) * (S.MAX_LENGTH * S.KV_HEADS) + kv_head) * H
    values = selected.value + (b.to(tl.int64) * (S.MAX_LENGTH * S.KV_HEADS) + kv_head) * V
    row = b.to(tl.int64) * (S.MAX_LENGTH * S.KV_HEADS) + kv_head
    state = no_sums(S.ROWS, selected.scales.value, VALUE)
    # The end is not a constant: if Triton knew that the loop runs once, it would load values after keys.
    end = tl.where(tokens.number >= 0, EACH, 0)
    for first in tl.range(0, end, S.STEP, num_stages=S.STAGES):
        slot = share * EACH + first + column // S.PADDED_BLOCK
        block = slot
        if selected.given is None:
            block = tl.where(slot < S.INITIAL, slot, local + slot - S.INITIAL)
        for u in tl.static_range(S.STEP):
            found = tl.sum(tl.where(rank == share * EACH + first + u - FORCED, index, 0), 0)
            block = tl.where((column // S.PADDED_BLOCK == u) & (slot >= FORCED), found, block)
        if selected.given is None:
            block = tl.where(fit, tl.where(slot < count, slot, -1), block)
        block = tl.where(slot < S.SELECTED, block, -1)
        to = selected.chosen + ((b * S.T + token) * S.KV_HEADS + kv_head) * S.SELECTED
        tl.store(to + slot, block, mask=(in_block == 0) & (slot < S.SELECTED))
        key = block * S.BLOCK + in_block
        seen = (block >= 0) & (in_block < S.BLOCK) & (key <= at)
        if S.WIDE:
            key = key.to(tl.int64)
        k = load_kept_tile(keys, key, selected.scales.key, seen, S.KV_HEADS * H, KEY, q.first.dtype)
        v = load_kept_tile(values, key, selected.scales.value, seen, S.KV_HEADS * V, VALUE, q.first.dtype)
        scales = load_scales(selected.scales, row, key * S.KV_HEADS, seen)
        state, _ = attend(state, q, k, v, scales, seen, scale, PRECISION)
    state = joined_sums(state, selected.scales.value, VALUE)
    store_part(selected.out, selected.sums, bk, S.FIRST + share, S.PARTS, S.T * S.G, rows, state, VALUE)
