"""Importance of the selection blocks (Eq. 8-10): the score kernel of the block selection.

grid = (token tiles of the chunk times groups of column tiles, batch rows of the chunk times K). Groups change
fastest, so the query tile stays in L2. For each column tile of its group, a program holds the compressed keys
of the tile and loops over the G query heads. It adds up their `exp2(q k - lse)` in registers, so the sum over
heads (Eq. 10) moves no memory; then it masks the sum once and adds up the columns of each block (Eq. 9).
Shared memory: the keys and `num_stages` tiles of queries.

Columns: each block has r = l'/d compressed keys of its own. They take `PADDED` columns, r rounded up to a
power of two; where that is more than r, keys are loaded row by row. The last keys of a block reach into the
next block and count there too. So a tile begins one block early; the tile before it stores that block.
Columns are counted from the sequence's first compressed key: a tile with tokens of several sequences makes
one pass for each.

Skipped are queries whose blocks all fit, and column tiles whose blocks are local or later for every query of
the tile. Memory: the scores of one chunk. Floor at 64k tokens, 64 heads on 4 KV heads, H = 128, l/d/l' =
32/16/64, with the 1/31 that tiles compute twice: 2.3 TFLOP (2.3 ms at 990 TFLOP/s) and 8.9 G exponentials
(2.4 ms at 16 a clock and SM); queries from L2, 18 GB.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from nsa_jax.kernels.triton.launch import named
from nsa_jax.kernels.triton.loading import Keys, load_chosen_keys, load_keys
from nsa_jax.kernels.triton.pieces import LARGEST_INT, LOG2_E, Dim, inner


class Blocks(NamedTuple):
    """The block structure, in tokens and columns.

    Attributes:
      SIZE: tokens of a compression block.
      STRIDE: tokens from the start of one compression block to the start of the next.
      BLOCK: tokens of a selection block.
      LOCAL: selection blocks that are always taken: the query's own and those just before it.
      COLUMNS: compressed keys of a tile of scores.
      PADDED: columns of a selection block.
    """

    SIZE: tl.constexpr
    STRIDE: tl.constexpr
    BLOCK: tl.constexpr
    LOCAL: tl.constexpr
    COLUMNS: tl.constexpr
    PADDED: tl.constexpr


class Tokens(NamedTuple):
    """A tile of query tokens, and where their scores go.

    Attributes:
      first: the first token.
      exists: whether there is such a token.
      current: selection block of each token, -1 where it sees nothing.
      visible: number of compressed keys that each token sees.
      scores: pointer to the tile's first score.
      ROW: length of a token's row of scores.
    """

    first: tl.tensor
    exists: tl.tensor
    current: tl.tensor
    visible: tl.tensor
    scores: tl.tensor
    ROW: tl.constexpr


class Heads(NamedTuple):
    """The query heads of a KV head.

    Attributes:
      first, second: where tiles of queries of one head come from, see `Keys`.
      normalisers: log-sum-exps of the compressed branch in base 2, `[B, N, T]`.
      num_queries: T.
      NUM_HEADS: N.
      G: query heads of a KV head.
      TOKENS: query tokens of a tile.
    """

    first: tl.tensor
    second: tl.tensor | None
    normalisers: tl.tensor
    num_queries: tl.tensor
    NUM_HEADS: tl.constexpr
    G: tl.constexpr
    TOKENS: tl.constexpr


@triton.jit
def _score_sequence(
    heads, keys, tokens, start, here, first_tile, scale,
    blocks, TILES_EACH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of the queries that are `here`, in the sequence whose first compressed key is `start`.

    Example: l/d/l' = 32/16/64 and 64 columns. A block has OWN = 4 columns, weighted 2, 2, 2, 1 (Eq. 9). Its
    last key covers SPAN = 2 strides, the second of them in the next block, where it counts with weight 1 (the
    tail). So a tile begins EARLY, one block before the first that it stores, and stores 15 of its 16 blocks.
    """
    OWN: tl.constexpr = blocks.BLOCK // blocks.STRIDE  # compressed keys that begin in a block
    SPAN: tl.constexpr = blocks.SIZE // blocks.STRIDE  # strides that a compressed key covers
    BLOCKS: tl.constexpr = blocks.COLUMNS // blocks.PADDED
    EARLY: tl.constexpr = 1 if SPAN > 1 else 0
    TOKENS: tl.constexpr = heads.TOKENS
    column = tl.arange(0, blocks.COLUMNS)
    block = tl.arange(0, BLOCKS)
    offset = tl.arange(0, blocks.PADDED)[None, None, :]
    main_weight = tl.where(offset < OWN, tl.minimum(SPAN, OWN - offset), 0).to(tl.float32)
    tail_weight = tl.maximum(offset + SPAN - OWN, 0).to(tl.float32)
    highest = tl.max(tl.where(here, tokens.current, -1), 0) - blocks.LOCAL
    last_tile = tl.minimum(highest // (BLOCKS - EARLY) + 1, first_tile + TILES_EACH)
    for column_tile in range(first_tile, last_tile):
        first_block = column_tile * (BLOCKS - EARLY) - EARLY
        if blocks.PADDED == OWN:
            local = first_block * OWN + column
            inside = local >= 0
            k = load_keys(keys, start + first_block * OWN)
        else:
            local = (first_block + column // blocks.PADDED) * OWN + column % blocks.PADDED
            inside = (local >= 0) & (column % blocks.PADDED < OWN)
            k = load_chosen_keys(keys, start + local, inside)
        total = tl.zeros([TOKENS, blocks.COLUMNS], tl.float32)
        for head in range(heads.G):
            n = keys.head * heads.G + head
            q = load_keys(
                Keys(
                    heads.first, heads.second, keys.b, n, heads.num_queries,
                    heads.NUM_HEADS, TOKENS, keys.DIM, keys.TMA,
                ),
                tokens.first,
            )  # fmt: skip
            row = (keys.b.to(tl.int64) * heads.NUM_HEADS + n) * heads.num_queries + tokens.first
            row += tl.arange(0, TOKENS)
            normaliser = tl.load(heads.normalisers + row, mask=tokens.exists, other=float("inf"))
            logits = inner(q, k, PRECISION)
            total += tl.exp2(logits * (scale * LOG2_E) - normaliser[:, None])
        seen = inside[None, :] & (local[None, :] < tokens.visible[:, None])
        columns = tl.where(seen, total, 0.0).reshape(TOKENS, BLOCKS, blocks.PADDED)
        importance = tl.sum(columns * main_weight, 2)
        if EARLY == 1:
            tail = tl.sum(columns * tail_weight, 2)
            left = tl.broadcast_to(tl.maximum(block - 1, 0)[None, :], [TOKENS, BLOCKS])
            importance += tl.gather(tail, left, 1)
        kept = here[:, None] & ((block >= EARLY) & (first_block + block < tokens.ROW))[None, :]
        target = tl.arange(0, TOKENS)[:, None] * tokens.ROW + (first_block + block)[None, :]
        tl.store(tokens.scores + target, importance, mask=kept)


@triton.jit(repr=named("nsa_importance"))
def importance_kernel(
    queries0, queries1, keys0, keys1, normalisers, position, compression_start, chunk, scores,
    batch, num_queries, num_compressed, scale,
    CHUNKS_PER_ROW: tl.constexpr, CHUNK_ROWS: tl.constexpr, CHUNK_TOKENS: tl.constexpr,
    NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
    SELECTED: tl.constexpr, LOCAL: tl.constexpr, ROW: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, PADDED: tl.constexpr, TILES_EACH: tl.constexpr,
    COLUMN_PROGRAMS: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Scores `[CHUNK_ROWS, K, CHUNK_TOKENS, ROW]` of one chunk; queries and keys come from `key_tiles`."""
    DIM: tl.constexpr = Dim(H0, H1)
    blocks: tl.constexpr = Blocks(SIZE, STRIDE, BLOCK, LOCAL, COLUMNS, PADDED)
    number = tl.load(chunk)
    row_of_chunk = tl.program_id(1) // KV_HEADS
    k = tl.program_id(1) % KV_HEADS
    b = (number // CHUNKS_PER_ROW) * CHUNK_ROWS + row_of_chunk
    tile = tl.program_id(0) // COLUMN_PROGRAMS
    first_tile = (tl.program_id(0) % COLUMN_PROGRAMS) * TILES_EACH
    first_token = (number % CHUNKS_PER_ROW) * CHUNK_TOKENS + tile * TOKENS

    token = first_token + tl.arange(0, TOKENS)
    exists = (token < num_queries) & (b < batch)
    place = b.to(tl.int64) * num_queries + token
    at = tl.load(position + place, mask=exists, other=-1)
    current = tl.where(at >= 0, at // BLOCK, -1)
    scored = current >= SELECTED
    visible = tl.where(at >= SIZE - 1, (at - (SIZE - 1)) // STRIDE + 1, 0)
    scores += (tl.program_id(1).to(tl.int64) * CHUNK_TOKENS + tile * TOKENS) * ROW
    tokens: tl.constexpr = Tokens(first_token, exists, current, visible, scores, ROW)
    heads: tl.constexpr = Heads(
        queries0, queries1, normalisers, num_queries, NUM_HEADS, NUM_HEADS // KV_HEADS, TOKENS
    )
    keys: tl.constexpr = Keys(keys0, keys1, b, k, num_compressed, KV_HEADS, COLUMNS, DIM, TMA)
    if compression_start is None:
        _score_sequence(heads, keys, tokens, 0, scored, first_tile, scale, blocks, TILES_EACH, PRECISION)
    else:
        begin = tl.where(scored, tl.load(compression_start + place, mask=exists, other=0), LARGEST_INT)
        start = tl.min(begin, 0)
        while start < LARGEST_INT:
            _score_sequence(
                heads, keys, tokens, start, begin == start, first_tile, scale, blocks, TILES_EACH, PRECISION
            )
            start = tl.min(tl.where(begin > start, begin, LARGEST_INT), 0)
