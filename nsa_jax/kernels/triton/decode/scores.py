"""The scores of the selection blocks (Eq. 8-10), a chunk of them a program, and the chunk's best ones.

Grid: x = chunks times new tokens times KV heads times batch rows. A program reads what `compressed_kernel`
left for its blocks, adds what the blocks that the step completes give, normalises, sums over the heads, and
writes the chunk's best blocks as a list in order, from which `selected_kernel` picks. It ranks by counting
(`ranks`), CHUNK times CHUNK comparisons: rounds of finding the largest would wait for each other.

All numbers that enter a block's score are first brought to one largest logit, then added, then normalised:
with equal keys these are small integers, so equal scores are equal to the last bit and ties go to the lower
block. Bytes: 33 MB at 8 rows of 64k tokens, most of them in the L2 cache.
"""

import triton
import triton.language as tl

from nsa_jax.kernels.triton.decode.parts import load_placed, num_blocks, ranks, whole_sums
from nsa_jax.kernels.triton.launch import named
from nsa_jax.kernels.triton.softmax import LOWEST


@triton.jit
def _store_best(best, bits, index, at, SLOTS: tl.constexpr):
    """Stores the SLOTS best of a chunk by rank: bits of the score, then blocks; -1 is no candidate."""
    rank = ranks(bits, bits.shape[0])
    tl.store(best + at * (2 * SLOTS) + rank, bits, mask=rank < SLOTS)
    tl.store(best + at * (2 * SLOTS) + SLOTS + rank, index, mask=rank < SLOTS)


@triton.jit(repr=named("nsa_step_scores"))
def scores_kernel(
    placed, sums, scores, tails, tops, block_logits, block_sums,
    best,
    T: tl.constexpr, G: tl.constexpr, PADDED_G: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr,
    STRIDE: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr, SELECTED: tl.constexpr,
    INITIAL: tl.constexpr, LOCAL: tl.constexpr, BLOCKS: tl.constexpr, TILE_BLOCKS: tl.constexpr,
    TILES: tl.constexpr, PARTS: tl.constexpr, PADDED_PARTS: tl.constexpr, CHUNK_TILES: tl.constexpr,
    CHUNKS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """`best` `[B, K, T, CHUNKS, 2, SLOTS]`, of the chunks that hold a block that may be chosen freely."""
    CHUNK: tl.constexpr = CHUNK_TILES * TILE_BLOCKS
    SPAN: tl.constexpr = SIZE // STRIDE
    R: tl.constexpr = T * G
    chunk = tl.program_id(0) % CHUNKS
    token = tl.program_id(0) // CHUNKS % T
    bk = tl.program_id(0) // (CHUNKS * T)
    head = tl.arange(0, PADDED_G)
    inside = head < G
    row = token * G + head

    # Loads that need nothing of the row's length are under way before it is known.
    tile = chunk * CHUNK_TILES + tl.arange(0, CHUNK_TILES)
    block = tl.arange(0, TILE_BLOCKS)
    exists = inside[:, None] & (tile < TILES)[None, :]
    source = bk.to(tl.int64) * R + row
    at = source[:, None] * TILES + tile[None, :]
    tops_here = tl.load(tops + at, mask=exists, other=LOWEST)
    cut = exists & (tile > 0)[None, :]
    tops_before = tl.load(tops + at - 1, mask=cut, other=LOWEST)
    tails_before = tl.load(tails + at - 1, mask=cut, other=0.0)
    given = tl.load(
        scores + at[:, :, None] * TILE_BLOCKS + block[None, None, :], mask=exists[:, :, None], other=0.0
    )
    top, total = whole_sums(sums, bk, PARTS, PADDED_PARTS, R, row, inside)
    block_top = tl.load(block_sums + bk.to(tl.int64) * (2 * R) + row, mask=inside, other=LOWEST)
    block_total = tl.load(block_sums + bk.to(tl.int64) * (2 * R) + R + row, mask=inside, other=0.0)

    tokens = load_placed(placed, bk // KV_HEADS)
    current = (tokens.start + token) // BLOCK
    local = current - LOCAL + 1
    if (token < tokens.number) & (current >= SELECTED) & (chunk * CHUNK < local):
        both = tl.maximum(top, block_top)
        lse = both + tl.log2(total * tl.exp2(top - both) + block_total * tl.exp2(block_top - both))
        lse = tl.where(inside, lse, float("inf"))

        before = num_blocks(tokens.start, SIZE, STRIDE)
        written = exists & (tile * (TILE_BLOCKS * OWN) < before)[None, :]
        written_before = cut & ((tile - 1) * (TILE_BLOCKS * OWN) < before)[None, :]
        # Relative to one largest logit of each tile; a tile's first block is also seen by the tile before.
        largest = tl.where(written, tops_here, LOWEST)
        largest_before = tl.where(written_before, tops_before, LOWEST)
        top_of_first = tl.maximum(largest, largest_before)
        own_part = tl.exp2(largest - top_of_first)
        tail = tl.where(written_before, tails_before, 0.0) * tl.exp2(largest_before - top_of_first)
        first = (block == 0)[None, None, :]
        x = tl.where(written[:, :, None], given, 0.0)
        x = tl.where(first, x * own_part[:, :, None] + tail[:, :, None], x)
        reference = tl.where(first, top_of_first[:, :, None], largest[:, :, None])
        if (chunk + 1) * CHUNK > before // OWN:  # the chunk may hold blocks with new compressed keys
            number = tile[:, None] * TILE_BLOCKS + block[None, :]
            for j in tl.static_range(BLOCKS):
                own = (before + j) // OWN
                column = (before + j) % OWN
                weight = tl.where(number == own, tl.minimum(OWN - column, SPAN), 0)
                weight += tl.where(number == own + 1, tl.maximum(column + SPAN - OWN, 0), 0)
                weight = weight.to(tl.float32)[None, :, :]
                logit = tl.load(block_logits + source * BLOCKS + j, mask=inside, other=float("-inf"))
                logit = tl.where(weight > 0.0, logit[:, None, None], float("-inf"))
                larger = tl.maximum(reference, logit)
                new = tl.where(weight > 0.0, weight * tl.exp2(logit - larger), 0.0)
                x = x * tl.exp2(reference - larger) + new
                reference = larger
        score = tl.reshape(tl.sum(x * tl.exp2(reference - lse[:, None, None]), 0), [CHUNK])
        j = chunk * CHUNK + tl.arange(0, CHUNK)
        score = tl.where(score > 0.0, score, 0.0)  # NaN counts as 0
        bits = tl.where((j >= INITIAL) & (j < local), score.to(tl.int32, bitcast=True), -1)
        _store_best(best, bits, j, tl.program_id(0), SLOTS)
