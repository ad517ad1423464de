"""Selected attention of one new token, its blocks shared out over programs.

Grid: x = parts times new tokens times KV heads times batch rows. Every program ranks the lists of
`second_kernel` by counting, as that does: which blocks are its own is found sooner than another launch would
tell it.

Ranking: LISTS times SLOTS candidates against each other, 128 x 128 for 64k tokens. Bytes: the keys and values
of the selected blocks, 17 MB at 8 rows, 4 us at 4.2 TB/s.
"""

import triton
import triton.language as tl

from nsa_jax.kernels.triton.decode.parts import (
    QueryRows,
    attend,
    load_placed,
    load_query,
    ranks,
    store_part,
)
from nsa_jax.kernels.triton.launch import named
from nsa_jax.kernels.triton.loading import load_at
from nsa_jax.kernels.triton.pieces import Dim
from nsa_jax.kernels.triton.softmax import no_keys


@triton.jit(repr=named("nsa_step_selected"))
def selected_kernel(
    out, sums,
    placed, query, key_slc, value_slc, best,
    chosen,
    scale, T: tl.constexpr, G: tl.constexpr, KV_HEADS: tl.constexpr, MAX_LENGTH: tl.constexpr,
    BLOCK: tl.constexpr, SELECTED: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr,
    WIDE: tl.constexpr, CHUNK: tl.constexpr, LISTS: tl.constexpr, SLOTS: tl.constexpr,
    ALL: tl.constexpr, FIRST: tl.constexpr, SHARES: tl.constexpr, PADDED_BLOCK: tl.constexpr,
    STEP: tl.constexpr, ROWS: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr, V0: tl.constexpr,
    V1: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One share of SLOTS / SHARES blocks, STEP at a time. In place: the parts.

    `chosen` `[B, T, K, SELECTED]`, -1 for none.
    """
    share = tl.program_id(0) % SHARES
    token = tl.program_id(0) // SHARES % T
    bk = tl.program_id(0) // (SHARES * T)
    b = bk // KV_HEADS
    kv_head = bk % KV_HEADS
    KEY: tl.constexpr = Dim(H0, H1)
    VALUE: tl.constexpr = Dim(V0, V1)
    H: tl.constexpr = H0 + H1
    V: tl.constexpr = V0 + V1
    FORCED: tl.constexpr = INITIAL + LOCAL
    EACH: tl.constexpr = SLOTS // SHARES
    COLUMNS: tl.constexpr = STEP * PADDED_BLOCK

    x = tl.arange(0, LISTS * SLOTS)
    source = (bk * T + token) * LISTS + x // SLOTS
    bits = tl.load(best + source * (2 * SLOTS) + x % SLOTS)
    index = tl.load(best + source * (2 * SLOTS) + SLOTS + x % SLOTS)
    head = tl.arange(0, ROWS)
    rows = QueryRows(token * G + head, token + head * 0, token * (KV_HEADS * G) + head, head < G)
    q = load_query(query, b, kv_head, rows, T, G, KV_HEADS, KEY)
    tokens = load_placed(placed, b)

    # Slots: the initial blocks, the local ones, then the others by rank; all of them while they fit.
    exists = token < tokens.number
    at = tokens.start + token
    count = tl.where(exists, at // BLOCK + 1, 0)
    local = count - LOCAL
    fit = count <= SELECTED
    candidate = (x // SLOTS * CHUNK < local) & (x % SLOTS < SELECTED - FORCED) & (count > SELECTED)
    bits = tl.where(candidate, bits, -1)
    # Of equal scores the earlier one has the lower block: lists follow one another as their blocks do.
    live = tl.cdiv(tl.maximum(local, 0), CHUNK) * SLOTS  # in lists of blocks that exist
    rank = tl.where(bits >= 0, ranks(bits, live, LISTS * SLOTS), LISTS * SLOTS)

    column = tl.arange(0, COLUMNS)
    in_block = column % PADDED_BLOCK
    keys = key_slc + (b.to(tl.int64) * (MAX_LENGTH * KV_HEADS) + kv_head) * H
    values = value_slc + (b.to(tl.int64) * (MAX_LENGTH * KV_HEADS) + kv_head) * V
    state = no_keys(ROWS, VALUE)
    for first in tl.range(0, EACH, STEP, num_stages=1):
        slot = share * EACH + first + column // PADDED_BLOCK
        block = tl.where(slot < INITIAL, slot, local + slot - INITIAL)
        for u in tl.static_range(STEP):
            found = tl.sum(tl.where(rank == share * EACH + first + u - FORCED, index, 0), 0)
            block = tl.where((column // PADDED_BLOCK == u) & (slot >= FORCED), found, block)
        block = tl.where(fit, tl.where(slot < count, slot, -1), block)
        block = tl.where(slot < SELECTED, block, -1)
        to = chosen + ((b * T + token) * KV_HEADS + kv_head) * SELECTED
        tl.store(to + slot, block, mask=(in_block == 0) & (slot < SELECTED))
        key = block * BLOCK + in_block
        seen = (block >= 0) & (in_block < BLOCK) & (key <= at)
        if WIDE:
            key = key.to(tl.int64)
        k = load_at(keys, key * (KV_HEADS * H), seen, KEY)
        v = load_at(values, key * (KV_HEADS * V), seen, VALUE)
        state, _ = attend(state, q, k, v, seen, scale, PRECISION)
    store_part(out, sums, bk, FIRST + share, ALL, T * G, rows, state, VALUE)
