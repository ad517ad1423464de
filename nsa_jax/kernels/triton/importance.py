"""Importance of the selection blocks (Eq. 8-10): the score kernel of the block selection.

Grid: x = token tiles of the chunk times groups of column tiles (groups change fastest, so that the query
tile stays in L2), y = batch rows of the chunk times KV heads. A program holds the keys of one column tile and
loops over the G query heads, whose `exp2(q k - lse)` it adds up in registers; then it masks the sum once and
adds the columns of each block.

Columns: a block has r = l'/d compressed keys of its own, the power of two `PADDED` >= r of columns here (more
than r only in odd configurations, whose keys are then loaded row by row). What the last keys of a block share
with the next one reaches it from the left: a tile begins one block early, and that block is stored by the
tile before it. Columns count from the sequence's first compressed key: a tile of tokens of several sequences
makes one pass for each.

Nothing is stored where the selection needs no scores: queries whose blocks all fit, and blocks among or
behind the local ones. Memory: the scores of one chunk. Floor at 64k tokens, 64 heads on 4 KV heads, H = 128,
l/d/l' = 32/16/64 with the 1/31 that tiles share: 2.3 TFLOP (2.3 ms at 990 TFLOP/s) and 8.9 G exponentials
(2.4 ms at 16 a clock and SM); queries from L2, 18 GB.
"""

import triton
import triton.language as tl

from nsa_jax.kernels.triton.pieces import LARGEST_INT, LOG2_E, inner, load_keys


@triton.jit
def _score_sequence(
    q0_source, q1_source, k0_source, k1_source, normalisers, scores, b, k,
    start, here, current, visible, exists, first_token, first_tile, num_queries, num_compressed, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, LOCAL: tl.constexpr, ROW: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, PADDED: tl.constexpr, TILES_EACH: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Scores of the queries that are `here`, in the sequence whose first compressed key is `start`."""
    DIM: tl.constexpr = H0 + H1
    G: tl.constexpr = HEADS // KV_HEADS
    OWN: tl.constexpr = BLOCK // STRIDE  # compressed keys that begin in a block
    SPAN: tl.constexpr = SIZE // STRIDE  # strides that a compressed key covers
    BLOCKS: tl.constexpr = COLUMNS // PADDED
    EARLY: tl.constexpr = 1 if SPAN > 1 else 0
    column = tl.arange(0, COLUMNS)
    block = tl.arange(0, BLOCKS)
    offset = tl.arange(0, PADDED)[None, None, :]
    main_weight = tl.where(offset < OWN, tl.minimum(SPAN, OWN - offset), 0).to(tl.float32)
    tail_weight = tl.maximum(offset + SPAN - OWN, 0).to(tl.float32)
    highest = tl.max(tl.where(here, current, -1), 0) - LOCAL
    last_tile = tl.minimum(highest // (BLOCKS - EARLY) + 1, first_tile + TILES_EACH)
    for column_tile in range(first_tile, last_tile):
        first_block = column_tile * (BLOCKS - EARLY) - EARLY
        if PADDED == OWN:
            local = first_block * OWN + column
            inside = local >= 0
            k0, k1 = load_keys(
                k0_source, k1_source, b, start + first_block * OWN, k, num_compressed,
                KV_HEADS, COLUMNS, H0, H1, TMA,
            )  # fmt: skip
        else:
            local = (first_block + column // PADDED) * OWN + column % PADDED
            inside = (local >= 0) & (column % PADDED < OWN)
            source = b.to(tl.int64) * num_compressed + start + local
            source = k0_source + (source[:, None] * KV_HEADS + k) * DIM
            readable = (inside & (start + local < num_compressed))[:, None]
            k0 = tl.load(source + tl.arange(0, H0)[None, :], mask=readable, other=0.0)
            k1 = k0
            if H1 > 0:
                k1 = tl.load(source + H0 + tl.arange(0, H1)[None, :], mask=readable, other=0.0)
        total = tl.zeros([TOKENS, COLUMNS], tl.float32)
        for head in range(G):
            n = k * G + head
            q0, q1 = load_keys(
                q0_source, q1_source, b, first_token, n, num_queries, HEADS, TOKENS, H0, H1, TMA
            )
            row = (b.to(tl.int64) * HEADS + n) * num_queries + first_token + tl.arange(0, TOKENS)
            normaliser = tl.load(normalisers + row, mask=exists, other=float("inf"))
            logits = inner(q0, q1, k0, k1, H1, PRECISION)
            total += tl.exp2(logits * (scale * LOG2_E) - normaliser[:, None])
        seen = inside[None, :] & (local[None, :] < visible[:, None])
        columns = tl.where(seen, total, 0.0).reshape(TOKENS, BLOCKS, PADDED)
        importance = tl.sum(columns * main_weight, 2)
        if EARLY == 1:
            tail = tl.sum(columns * tail_weight, 2)
            left = tl.broadcast_to(tl.maximum(block - 1, 0)[None, :], [TOKENS, BLOCKS])
            importance += tl.gather(tail, left, 1)
        kept = here[:, None] & ((block >= EARLY) & (first_block + block < ROW))[None, :]
        target = tl.arange(0, TOKENS)[:, None] * ROW + (first_block + block)[None, :]
        tl.store(scores + target, importance, mask=kept)


@triton.jit
def importance_kernel(
    q0_source, q1_source, k0_source, k1_source, normalisers, position, compression_start, chunk, scores,
    batch, num_queries, num_compressed, scale,
    CHUNKS_PER_ROW: tl.constexpr, CHUNK_ROWS: tl.constexpr, CHUNK_TOKENS: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
    SELECTED: tl.constexpr, LOCAL: tl.constexpr, ROW: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, PADDED: tl.constexpr, TILES_EACH: tl.constexpr,
    GROUPS: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Scores `[CHUNK_ROWS, K, CHUNK_TOKENS, ROW]` of one chunk; queries and keys by `key_tiles`."""
    number = tl.load(chunk)
    row_of_chunk = tl.program_id(1) // KV_HEADS
    k = tl.program_id(1) % KV_HEADS
    b = (number // CHUNKS_PER_ROW) * CHUNK_ROWS + row_of_chunk
    tile = tl.program_id(0) // GROUPS
    first_tile = (tl.program_id(0) % GROUPS) * TILES_EACH
    first_token = (number % CHUNKS_PER_ROW) * CHUNK_TOKENS + tile * TOKENS

    token = first_token + tl.arange(0, TOKENS)
    exists = (token < num_queries) & (b < batch)
    place = b.to(tl.int64) * num_queries + token
    at = tl.load(position + place, mask=exists, other=-1)
    current = tl.where(at >= 0, at // BLOCK, -1)
    scored = current >= SELECTED
    visible = tl.where(at >= SIZE - 1, (at - (SIZE - 1)) // STRIDE + 1, 0)
    scores += (tl.program_id(1).to(tl.int64) * CHUNK_TOKENS + tile * TOKENS) * ROW
    if compression_start is None:
        _score_sequence(
            q0_source, q1_source, k0_source, k1_source, normalisers, scores, b, k,
            0, scored, current, visible, exists, first_token, first_tile,
            num_queries, num_compressed, scale, HEADS, KV_HEADS, H0, H1, SIZE, STRIDE, BLOCK, LOCAL, ROW,
            TOKENS, COLUMNS, PADDED, TILES_EACH, PRECISION, TMA,
        )  # fmt: skip
    else:
        begin = tl.where(scored, tl.load(compression_start + place, mask=exists, other=0), LARGEST_INT)
        start = tl.min(begin, 0)
        while start < LARGEST_INT:
            _score_sequence(
                q0_source, q1_source, k0_source, k1_source, normalisers, scores, b, k,
                start, begin == start, current, visible, exists, first_token, first_tile,
                num_queries, num_compressed, scale, HEADS, KV_HEADS, H0, H1, SIZE, STRIDE, BLOCK, LOCAL, ROW,
                TOKENS, COLUMNS, PADDED, TILES_EACH, PRECISION, TMA,
            )  # fmt: skip
            start = tl.min(tl.where(begin > start, begin, LARGEST_INT), 0)
