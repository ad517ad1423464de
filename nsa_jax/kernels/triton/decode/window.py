"""Window attention of one new token (Eq. 4), in parts; and the last writes to the cache.

Grid: that of `second_kernel`; the last SHARES programs of a team run it. They are free first: where a team
has more programs than there are chunks of scores, the last have none. It reads the ring, or the selection
arrays if the branches share keys and values; both have the new tokens by then. Why this order: a share takes
a run of neighbouring tokens, TILE at a time from the oldest on, and skips the tiles before the first token of
the sequence. All query heads of the KV head are attended from at once, so a key is loaded once.

The new compressed blocks and the lengths are written here, in the second launch, because programs of the
first one still read the arrays that they go into.

Registers of its part: sums and logits, `ROWS (TILE + V) / (32 num_warps)` floats a thread (24 at 16 rows, 64
keys, V = 128, 4 warps). Shared memory in 16-bit dtypes, below 64 rows:
`(ROWS H + (STAGES - 1) TILE (H + V) + ROWS TILE) itemsize` for query, tiles and probabilities, 38 KB
(4 + 32 + 2) with 2 stages. Eight shares of a window of 512 have one tile each. Bytes: WINDOW keys and values
a row and KV head, 8 MB at 8 rows; further new tokens of a row find them in L2.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from nsa_jax.kernels.triton.decode.pairs import joined_sums, load_kept_tile, no_sums
from nsa_jax.kernels.triton.decode.parts import attend, num_blocks, store_part
from nsa_jax.kernels.triton.decode.rounding import Scales, load_scales, store_kept
from nsa_jax.kernels.triton.loading import load_at


class Window(NamedTuple):
    """Keys and values of the ring or selection arrays, their scales, and the parts, see `parts`."""

    key: tl.tensor
    value: tl.tensor
    scales: Scales
    out: tl.tensor
    sums: tl.tensor


class Lacking(NamedTuple):
    """Arrays of the cache that are still to be updated, in place, and the new blocks that go into them."""

    key_cmp: tl.tensor | None
    value_cmp: tl.tensor | None
    scales: Scales
    lengths: tl.tensor
    overflowed: tl.tensor
    block_key: tl.tensor
    block_value: tl.tensor


class WindowDims(NamedTuple):
    """Sizes of the window that are known while tracing.

    Attributes:
      T, G, KV_HEADS: new tokens, query heads of a KV head, KV heads.
      RING: slots of a row; token `s` lies in slot `s mod RING`.
      WINDOW: tokens that a query sees.
      SHARES: shares of the team that attend to the window, each to a part of it.
      FIRST, PARTS: number of their first part, parts of all branches.
      TILE, ROWS: keys of a step of the loop, query rows.
      STAGES: stages of the loop: the loads of STAGES - 1 steps are in flight.
      MAX_BLOCKS, SIZE, STRIDE: compression blocks that the cache has room for, and their size and stride.
      BLOCKS: compression blocks that the step may complete.
      KEY, VALUE: `Dim`s.
    """

    T: tl.constexpr
    G: tl.constexpr
    KV_HEADS: tl.constexpr
    RING: tl.constexpr
    WINDOW: tl.constexpr
    SHARES: tl.constexpr
    FIRST: tl.constexpr
    PARTS: tl.constexpr
    TILE: tl.constexpr
    ROWS: tl.constexpr
    STAGES: tl.constexpr
    MAX_BLOCKS: tl.constexpr
    SIZE: tl.constexpr
    STRIDE: tl.constexpr
    BLOCKS: tl.constexpr
    KEY: tl.constexpr
    VALUE: tl.constexpr


@triton.jit
def attend_window(window, q, rows, tokens, bk, token, share, scale, W, PRECISION: tl.constexpr):
    """One part of the window of one new token."""
    b = bk // W.KV_HEADS
    kv_head = bk % W.KV_HEADS
    KEY: tl.constexpr = W.KEY
    VALUE: tl.constexpr = W.VALUE
    EACH: tl.constexpr = (W.WINDOW + W.SHARES - 1) // W.SHARES
    at = tokens.start + token
    base = b.to(tl.int64) * (W.RING * W.KV_HEADS) + kv_head
    state = no_sums(W.ROWS, window.scales.value, VALUE)
    # Starts at the first tile with a token of the sequence; a token that was not appended sees none.
    first_tile = tl.maximum(W.WINDOW - 1 - at - share * EACH, 0) // W.TILE * W.TILE
    end = tl.where(token < tokens.number, EACH, 0)
    for first in tl.range(first_tile, end, W.TILE, num_stages=W.STAGES):
        i = first + tl.arange(0, W.TILE)
        key = at - W.WINDOW + 1 + share * EACH + i
        seen = (token < tokens.number) & (i < EACH) & (key >= 0) & (key <= at)
        place = base + (tl.where(seen, key, 0) % W.RING).to(tl.int64) * W.KV_HEADS
        k = load_kept_tile(window.key, place, window.scales.key, seen, KEY.D0 + KEY.D1, KEY, q.first.dtype)
        v = load_kept_tile(
            window.value, place, window.scales.value, seen, VALUE.D0 + VALUE.D1, VALUE, q.first.dtype
        )
        scales = load_scales(window.scales, 0, place, seen)
        state, _ = attend(state, q, k, v, scales, seen, scale, PRECISION)
    state = joined_sums(state, window.scales.value, VALUE)
    store_part(window.out, window.sums, bk, W.FIRST + share, W.PARTS, W.T * W.G, rows, state, VALUE)


@triton.jit
def _write_blocks(block, cmp, scales, b, kv_head, before, after, W, DIM):
    """Writes the blocks that the step has completed into the cache."""
    WIDTH: tl.constexpr = DIM.D0 + DIM.D1
    PADDED: tl.constexpr = triton.next_power_of_2(W.BLOCKS)
    c = tl.arange(0, PADDED)
    complete = (c < W.BLOCKS) & (before + c < after)
    x = load_at(block, ((b * W.BLOCKS + c) * W.KV_HEADS + kv_head) * WIDTH, complete, DIM)
    to = (b.to(tl.int64) * W.MAX_BLOCKS + before) * W.KV_HEADS + kv_head
    store_kept(cmp, scales, to, c * W.KV_HEADS, x, complete, WIDTH, DIM)


@triton.jit
def complete_cache(lacking, tokens, b, kv_head, W):
    """Writes the new blocks of one KV head; with the first head also the length of the row."""
    if lacking.key_cmp is not None:
        before = num_blocks(tokens.start, W.SIZE, W.STRIDE)
        after = num_blocks(tokens.start + tokens.number, W.SIZE, W.STRIDE)
        key, value = lacking.scales.key, lacking.scales.value
        _write_blocks(lacking.block_key, lacking.key_cmp, key, b, kv_head, before, after, W, W.KEY)
        _write_blocks(lacking.block_value, lacking.value_cmp, value, b, kv_head, before, after, W, W.VALUE)
    if kv_head == 0:
        tl.store(lacking.lengths + b, tokens.start + tokens.number)
        tl.store(lacking.overflowed + b, True, mask=tokens.fits == 0)
