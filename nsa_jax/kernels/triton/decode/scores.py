"""Scores of the selection blocks (Eq. 8-10), a chunk of blocks at a time, and a list of the chunk's best.

Grid: that of `second_kernel`; all shares of a team run it first. They take the chunks in turn, so a short
row, which fills only the first chunks, keeps many shares busy. `score_chunk` reads the sums that `compressed`
stored, adds the compression blocks that the step completes, normalises, and sums over the heads: in this
order, because each head has its own total. The best blocks of the chunk become a list in order, from which
`selected` picks. They are ranked by counting (`ranks`), CHUNK times CHUNK comparisons: searches for the
largest would have to wait for each other.

The numbers of a block's score are first scaled to one largest logit, then added, then normalised. Where all
keys are alike, the numbers added are small integers, so equal scores are equal to the last bit, and ties go
to the lower block.

Registers of its part: the sums of a chunk, and the largest logit that each is relative to:
`2 PADDED_G CHUNK / (32 num_warps)` floats a thread (32 at 16 heads, 128 blocks, 4 warps). To rank, a thread
has `CHUNK / (32 num_warps)` columns of the comparisons (1). Shared memory: up to `512 num_warps` bytes, 2 KB
here, for sums over heads that different warps hold, and later for the `8 CHUNK` bytes of the numbers to rank
(1 KB). `selected` uses the same bytes again. Bytes: 2.4 MB at 8 rows of 64k tokens, from the L2 cache.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from nsa_jax.kernels.triton.decode.parts import num_blocks, ranks
from nsa_jax.kernels.triton.softmax import LOWEST


@triton.jit
def _store_best(best, bits, index, at, SLOTS: tl.constexpr):
    """Stores the SLOTS best of a chunk by rank: bits of the scores (-1: no candidate), then the blocks."""
    rank = ranks(bits, bits.shape[0], bits.shape[0])
    tl.store(best + at * (2 * SLOTS) + rank, bits, mask=rank < SLOTS)
    tl.store(best + at * (2 * SLOTS) + SLOTS + rank, index, mask=rank < SLOTS)


class Scored(NamedTuple):
    """What the first launch stored: `sums` of all parts; the others as in `Compressed` and `Appended`."""

    sums: tl.tensor
    scores: tl.tensor
    tails: tl.tensor
    tops: tl.tensor
    block_logits: tl.tensor


class Chunking(NamedTuple):
    """Sizes of the selection that are known while tracing.

    Attributes:
      T, G, PADDED_G, KV_HEADS: new tokens, query heads of a KV head, padded to a power of two, KV heads.
      SIZE, STRIDE: of compression blocks, in tokens.
      OWN: compressed keys of a selection block.
      BLOCK: tokens of a selection block.
      SELECTED, INITIAL, LOCAL: selected blocks; of these the initial ones and the local ones.
      BLOCKS: compression blocks that the step may complete.
      TILE_BLOCKS, TILES: selection blocks of a tile of `compressed`, and such tiles.
      CMP, PADDED_CMP, PARTS: parts of the compressed branch, padded to a power of two, and of all branches.
      CHUNK_TILES, CHUNKS: tiles of a chunk, and chunks.
      SLOTS: length of a list.
    """

    T: tl.constexpr
    G: tl.constexpr
    PADDED_G: tl.constexpr
    KV_HEADS: tl.constexpr
    SIZE: tl.constexpr
    STRIDE: tl.constexpr
    OWN: tl.constexpr
    BLOCK: tl.constexpr
    SELECTED: tl.constexpr
    INITIAL: tl.constexpr
    LOCAL: tl.constexpr
    BLOCKS: tl.constexpr
    TILE_BLOCKS: tl.constexpr
    TILES: tl.constexpr
    CMP: tl.constexpr
    PADDED_CMP: tl.constexpr
    PARTS: tl.constexpr
    CHUNK_TILES: tl.constexpr
    CHUNKS: tl.constexpr
    SLOTS: tl.constexpr


@triton.jit
def score_chunk(scored, best, tokens, bk, token, chunk, C):
    """Writes a chunk's list to `best` `[B, K, T, CHUNKS, 2, SLOTS]`; none where no score can decide."""
    CHUNK: tl.constexpr = C.CHUNK_TILES * C.TILE_BLOCKS
    SPAN: tl.constexpr = C.SIZE // C.STRIDE
    R: tl.constexpr = C.T * C.G
    head = tl.arange(0, C.PADDED_G)
    inside = head < C.G
    row = token * C.G + head

    # These loads do not depend on the length of the row, so they start before it is known.
    tile = chunk * C.CHUNK_TILES + tl.arange(0, C.CHUNK_TILES)
    block = tl.arange(0, C.TILE_BLOCKS)
    exists = inside[:, None] & (tile < C.TILES)[None, :]
    source = bk.to(tl.int64) * R + row
    at = source[:, None] * C.TILES + tile[None, :]
    tops_here = tl.load(scored.tops + at, mask=exists, other=LOWEST)
    cut = exists & (tile > 0)[None, :]
    tops_before = tl.load(scored.tops + at - 1, mask=cut, other=LOWEST)
    tails_before = tl.load(scored.tails + at - 1, mask=cut, other=0.0)
    given = tl.load(
        scored.scores + at[:, :, None] * C.TILE_BLOCKS + block[None, None, :],
        mask=exists[:, :, None],
        other=0.0,
    )
    part = tl.arange(0, C.PADDED_CMP)[:, None]
    there = (part < C.CMP) & inside[None, :]
    sums = scored.sums + bk.to(tl.int64) * (C.PARTS * 2 * R) + part * (2 * R) + row[None, :]
    largest_of_part = tl.load(sums, mask=there, other=LOWEST)
    total = tl.load(sums + R, mask=there, other=0.0)

    current = (tokens.start + token) // C.BLOCK
    local = current - C.LOCAL + 1
    if (token < tokens.number) & (current >= C.SELECTED) & (chunk * CHUNK < local):
        top = tl.max(largest_of_part, 0)
        lse = top + tl.log2(tl.sum(total * tl.exp2(largest_of_part - top[None, :]), 0))
        lse = tl.where(inside, lse, float("inf"))

        before = num_blocks(tokens.start, C.SIZE, C.STRIDE)
        written = exists & (tile * (C.TILE_BLOCKS * C.OWN) < before)[None, :]
        written_before = cut & ((tile - 1) * (C.TILE_BLOCKS * C.OWN) < before)[None, :]
        # Sums are relative to their tile's top; a tile's first block also gets the tail of the tile before.
        largest = tl.where(written, tops_here, LOWEST)
        largest_before = tl.where(written_before, tops_before, LOWEST)
        top_of_first = tl.maximum(largest, largest_before)
        own_part = tl.exp2(largest - top_of_first)
        tail = tl.where(written_before, tails_before, 0.0) * tl.exp2(largest_before - top_of_first)
        first = (block == 0)[None, None, :]
        x = tl.where(written[:, :, None], given, 0.0)
        x = tl.where(first, x * own_part[:, :, None] + tail[:, :, None], x)
        reference = tl.where(first, top_of_first[:, :, None], largest[:, :, None])
        if (chunk + 1) * CHUNK > before // C.OWN:  # blocks of the chunk may have new compressed keys
            number = tile[:, None] * C.TILE_BLOCKS + block[None, :]
            for j in tl.static_range(C.BLOCKS):
                own = (before + j) // C.OWN
                column = (before + j) % C.OWN
                weight = tl.where(number == own, tl.minimum(C.OWN - column, SPAN), 0)
                weight += tl.where(number == own + 1, tl.maximum(column + SPAN - C.OWN, 0), 0)
                weight = weight.to(tl.float32)[None, :, :]
                logit = tl.load(scored.block_logits + source * C.BLOCKS + j, mask=inside, other=float("-inf"))
                logit = tl.where(weight > 0.0, logit[:, None, None], float("-inf"))
                larger = tl.maximum(reference, logit)
                new = tl.where(weight > 0.0, weight * tl.exp2(logit - larger), 0.0)
                x = x * tl.exp2(reference - larger) + new
                reference = larger
        score = tl.reshape(tl.sum(x * tl.exp2(reference - lse[:, None, None]), 0), [CHUNK])
        j = chunk * CHUNK + tl.arange(0, CHUNK)
        score = tl.where(score > 0.0, score, 0.0)  # NaN counts as 0
        bits = tl.where((j >= C.INITIAL) & (j < local), score.to(tl.int32, bitcast=True), -1)
        _store_best(best, bits, j, (bk * C.T + token) * C.CHUNKS + chunk, C.SLOTS)
