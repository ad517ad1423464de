"""Window attention of one new token, the window shared out over programs; and what the cache still lacks.

Grid: x = parts times new tokens times KV heads times batch rows. It reads the ring, or the selection arrays
where the branches share keys and values, after the new tokens are in. It stands behind the compressed branch,
which fills the GPU, and beside the selection, which does not: so it writes what had to wait for that branch,
the new compressed blocks and the lengths. Bytes: `w` keys and values a row and KV head, 8 MB at 8 rows, from
L2 for further tokens.
"""

import triton
import triton.language as tl

from nsa_jax.kernels.triton.decode.parts import (
    QueryRows,
    attend,
    load_placed,
    load_query,
    num_blocks,
    store_part,
)
from nsa_jax.kernels.triton.launch import named
from nsa_jax.kernels.triton.loading import load_at, store_at
from nsa_jax.kernels.triton.pieces import Dim
from nsa_jax.kernels.triton.softmax import no_keys


@triton.jit
def _write_blocks(
    block, cmp, b, kv_head, before, after, MAX_BLOCKS: tl.constexpr, KV_HEADS: tl.constexpr,
    BLOCKS: tl.constexpr, DIM,
):  # fmt: skip
    """The complete ones of BLOCKS new blocks into the cache."""
    WIDTH: tl.constexpr = DIM.D0 + DIM.D1
    PADDED: tl.constexpr = triton.next_power_of_2(BLOCKS)
    c = tl.arange(0, PADDED)
    complete = (c < BLOCKS) & (before + c < after)
    x = load_at(block, ((b * BLOCKS + c) * KV_HEADS + kv_head) * WIDTH, complete, DIM)
    to = (b.to(tl.int64) * MAX_BLOCKS + before) * KV_HEADS + kv_head
    store_at(cmp + to * WIDTH, c * (KV_HEADS * WIDTH), x, complete, DIM)


@triton.jit(repr=named("nsa_step_window"))
def window_kernel(
    key_cmp, value_cmp, lengths, overflowed,
    placed, query, key_win, value_win, block_key, block_value, behind,
    out, sums,
    scale, T: tl.constexpr, G: tl.constexpr, KV_HEADS: tl.constexpr, RING: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, BLOCKS: tl.constexpr,
    WINDOW: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    H0: tl.constexpr, H1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One part; token `s` lies in slot `s mod RING`. In place: blocks, lengths and overflows.

    `behind` is of the compressed branch and is not read: it says that the kernel starts behind that one.
    """
    part = tl.program_id(0) % PARTS
    token = tl.program_id(0) // PARTS % T
    bk = tl.program_id(0) // (PARTS * T)
    b = bk // KV_HEADS
    kv_head = bk % KV_HEADS
    KEY: tl.constexpr = Dim(H0, H1)
    VALUE: tl.constexpr = Dim(V0, V1)
    EACH: tl.constexpr = (WINDOW + PARTS - 1) // PARTS
    head = tl.arange(0, ROWS)
    rows = QueryRows(token * G + head, token + head * 0, token * (KV_HEADS * G) + head, head < G)
    q = load_query(query, b, kv_head, rows, T, G, KV_HEADS, KEY)
    tokens = load_placed(placed, b)
    at = tokens.start + token
    base = b.to(tl.int64) * (RING * KV_HEADS) + kv_head
    state = no_keys(ROWS, VALUE)
    # From the first tile that holds a token; a new token that found no room sees none.
    behind_start = tl.maximum(WINDOW - 1 - at - part * EACH, 0) // TILE * TILE
    end = tl.where(token < tokens.number, EACH, 0)
    for first in tl.range(behind_start, end, TILE, num_stages=STAGES):
        i = first + tl.arange(0, TILE)
        key = at - WINDOW + 1 + part * EACH + i
        seen = (token < tokens.number) & (i < EACH) & (key >= 0) & (key <= at)
        place = base + (tl.where(seen, key, 0) % RING).to(tl.int64) * KV_HEADS
        k = load_at(key_win, place * (H0 + H1), seen, KEY)
        v = load_at(value_win, place * (V0 + V1), seen, VALUE)
        state, _ = attend(state, q, k, v, seen, scale, PRECISION)
    store_part(out, sums, bk, part, PARTS, T * G, rows, state, VALUE)
    if (part == 0) & (token == 0):
        before = num_blocks(tokens.start, SIZE, STRIDE)
        after = num_blocks(tokens.start + tokens.number, SIZE, STRIDE)
        _write_blocks(block_key, key_cmp, b, kv_head, before, after, MAX_BLOCKS, KV_HEADS, BLOCKS, KEY)
        _write_blocks(block_value, value_cmp, b, kv_head, before, after, MAX_BLOCKS, KV_HEADS, BLOCKS, VALUE)
        if kv_head == 0:
            tl.store(lengths + b, tokens.start + tokens.number)
            tl.store(overflowed + b, True, mask=tokens.fits == 0)
