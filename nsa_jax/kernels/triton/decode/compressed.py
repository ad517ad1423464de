"""Attention (Eq. 4) to the compression blocks that were complete before the step, and what scores need.

Grid: the first SHARES times batch rows times KV heads times GROUPS programs of `first_kernel`. A program
takes one part of the compressed keys of a batch row and KV head, for one group of query rows. The tiles that
the row's *current* length fills are divided among the parts, so a long cache that is nearly empty costs
nothing. A tile holds whole selection blocks; each has OWN compressed keys in PADDED columns.

The scores of the selection (Eq. 8-10) come from the same logits, so no key is read twice. For each row and
selection block a tile stores the weighted sum of `exp2(logit - largest)`, a quarter of the logits' bytes, and
for each row the largest logit so far. A compressed key that reaches into the next selection block counts
there too; what reaches beyond the tile is stored apart, as `tails`. If the blocks are given, none of this is
stored.

All rows see all keys here: old blocks are complete for every new token. Why this order: the loop runs over
keys, with all rows of the group at once, so a program loads a key once. The groups of a KV head have
neighbouring numbers, so the later ones find its keys in L2. A part is a run of neighbouring tiles.

Registers: with `keys = TILE_BLOCKS PADDED`, sums and logits are `ROWS (keys + V) / 128` floats a thread at 4
warps (24 at 16 rows, 64 keys, V = 128). `first_kernel` has 137 registers there. Shared memory in 16-bit
dtypes, below 64 rows: `(ROWS H + (STAGES - 1) keys (H + V) + ROWS keys) itemsize` for query, tiles and
probabilities. With 3 stages that is 4 + 64 + 2 = 70 KB, and three programs fit on an H100 multiprocessor.
Without stages there is one tile, of `keys max(H, V)`. At 64 rows Hopper uses wgmma: STAGES tiles,
probabilities in registers, and `4 ROWS TILE_BLOCKS` bytes for the sums of blocks (116 KB). float32 is
multiplied in three parts and needs more. Bytes: the compressed keys and values, 67 MB for 8 rows of 64k
tokens (4 KV heads, 128/128, bfloat16): 16 us at 4.2 TB/s.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from nsa_jax.kernels.triton.decode.pairs import cut_query, joined_sums, load_kept_tile, no_sums
from nsa_jax.kernels.triton.decode.parts import admit, attend, load_query, num_blocks, query_rows, store_part
from nsa_jax.kernels.triton.decode.rounding import Scales, load_scales


@triton.jit
def _block_sums(p, ROWS: tl.constexpr, TILE_BLOCKS: tl.constexpr, OWN: tl.constexpr, PADDED: tl.constexpr,
                SPAN: tl.constexpr):  # fmt: skip
    """`p` `[ROWS, columns]` summed for each selection block (Eq. 9), and what reaches beyond the last one."""
    column = tl.arange(0, PADDED)[None, None, :]
    own = tl.minimum(OWN - column, SPAN).to(tl.float32)  # strides of the key within its own block
    over = tl.maximum(column + SPAN - OWN, 0).to(tl.float32)  # and in the next one
    p = p.reshape(ROWS, TILE_BLOCKS, PADDED)  # p is 0 in padded columns
    sums = tl.sum(p * own, 2)
    block = tl.arange(0, TILE_BLOCKS)[None, :]
    if SPAN > 1:
        tails = tl.sum(p * over, 2)
        if TILE_BLOCKS > 1:
            before = tl.broadcast_to(tl.maximum(block - 1, 0), [ROWS, TILE_BLOCKS])
            sums += tl.where(block > 0, tl.gather(tails, before, 1), 0.0)
        tail = tl.sum(tl.where(block == TILE_BLOCKS - 1, tails, 0.0), 1)
    else:
        tail = tl.zeros([ROWS], tl.float32)
    return sums, tail


class Compressed(NamedTuple):
    """The compressed keys and values, and what is stored for the second launch.

    Attributes:
      key, value: `[B, MAX_BLOCKS, K, D]`.
      scales: theirs `[B, MAX_BLOCKS, K]`, or None.
      out, sums: the parts, see `parts`.
      scores: `[B, K, R, TILES * TILE_BLOCKS]`: sums of the selection blocks.
      tails, tops: `[B, K, R, TILES]`: what reaches beyond a tile, and the largest logit up to it.

    The last three are written only if SCORED.
    """

    key: tl.tensor
    value: tl.tensor
    scales: Scales
    out: tl.tensor
    sums: tl.tensor
    scores: tl.tensor
    tails: tl.tensor
    tops: tl.tensor


class Tiling(NamedTuple):
    """How the compressed keys are divided.

    Attributes:
      MAX_BLOCKS: compressed keys that the cache has room for.
      OWN, PADDED: compressed keys of a selection block, and columns for them.
      TILE_BLOCKS: selection blocks of a tile.
      TILES: tiles of the cache.
      SHARES: parts into which the tiles of a row are divided.
      GROUPS: groups of query rows, each with a program for every part.
      STAGES: stages of the loop: the loads of STAGES - 1 tiles are in flight.
      SCORED: whether the selection needs scores.
    """

    MAX_BLOCKS: tl.constexpr
    OWN: tl.constexpr
    PADDED: tl.constexpr
    TILE_BLOCKS: tl.constexpr
    TILES: tl.constexpr
    SHARES: tl.constexpr
    GROUPS: tl.constexpr
    STAGES: tl.constexpr
    SCORED: tl.constexpr


@triton.jit
def attend_part(pid, batch, cmp, lengths, num_tokens, query, scale, D, X, PRECISION: tl.constexpr):
    """Attends to the tiles of the part that program `pid` takes."""
    KEY: tl.constexpr = D.KEY
    VALUE: tl.constexpr = D.VALUE
    KEY_ROW: tl.constexpr = D.KV_HEADS * (KEY.D0 + KEY.D1)
    VALUE_ROW: tl.constexpr = D.KV_HEADS * (VALUE.D0 + VALUE.D1)
    bk = pid // X.GROUPS % (batch * D.KV_HEADS)
    b = bk // D.KV_HEADS
    kv_head = bk % D.KV_HEADS
    part = pid // (X.GROUPS * batch * D.KV_HEADS)
    rows = query_rows(pid % X.GROUPS * D.ROWS, D.ROWS, D.T, D.G, D.KV_HEADS)
    tokens = admit(lengths, num_tokens, b, D.T, D.MAX_LENGTH)
    q = load_query(query, b, kv_head, rows, D.T, D.G, D.KV_HEADS, KEY)
    q = cut_query(q, cmp.scales.key, KEY)
    visible = tl.where(tokens.number > 0, num_blocks(tokens.start, D.SIZE, D.STRIDE), 0)
    tiles = tl.cdiv(visible, X.TILE_BLOCKS * X.OWN)
    each = tl.cdiv(tiles, X.SHARES)
    first = tl.minimum(part * each, tiles)
    last = tl.minimum(first + each, tiles)

    column = tl.arange(0, X.TILE_BLOCKS * X.PADDED)
    offset = column // X.PADDED * X.OWN + column % X.PADDED
    block = tl.arange(0, X.TILE_BLOCKS)
    row = bk.to(tl.int64) * (D.T * D.G) + rows.number
    keys = cmp.key + b.to(tl.int64) * (X.MAX_BLOCKS * KEY_ROW) + kv_head * (KEY.D0 + KEY.D1)
    values = cmp.value + b.to(tl.int64) * (X.MAX_BLOCKS * VALUE_ROW) + kv_head * (VALUE.D0 + VALUE.D1)
    state = no_sums(D.ROWS, cmp.scales.value, VALUE)
    for tile in tl.range(first, last, num_stages=X.STAGES):
        start = tile * (X.TILE_BLOCKS * X.OWN)
        seen = (column % X.PADDED < X.OWN) & (start + offset < visible)
        tile_of_keys = keys + start.to(tl.int64) * KEY_ROW
        k = load_kept_tile(tile_of_keys, offset, cmp.scales.key, seen, KEY_ROW, KEY, q.first.dtype)
        tile_of_values = values + start.to(tl.int64) * VALUE_ROW
        v = load_kept_tile(tile_of_values, offset, cmp.scales.value, seen, VALUE_ROW, VALUE, q.first.dtype)
        place = (b.to(tl.int64) * X.MAX_BLOCKS + start) * D.KV_HEADS + kv_head
        scales = load_scales(cmp.scales, place, offset * D.KV_HEADS, seen)
        state, p = attend(state, q, k, v, scales, seen, scale, PRECISION)
        if X.SCORED:
            of_blocks, tail = _block_sums(p, D.ROWS, X.TILE_BLOCKS, X.OWN, X.PADDED, D.SIZE // D.STRIDE)
            at = (row * (X.TILES * X.TILE_BLOCKS))[:, None] + (tile * X.TILE_BLOCKS + block)[None, :]
            tl.store(cmp.scores + at, of_blocks, mask=rows.inside[:, None])
            tl.store(cmp.tails + row * X.TILES + tile, tail, mask=rows.inside)
            tl.store(cmp.tops + row * X.TILES + tile, state.largest, mask=rows.inside)
    state = joined_sums(state, cmp.scales.value, VALUE)
    store_part(cmp.out, cmp.sums, bk, part, D.PARTS, D.T * D.G, rows, state, VALUE)
