"""The best blocks of every query (Eq. 11), exact: the top-n kernel of every block selection.

grid = (tokens of the chunk, batch rows of the chunk times K), one warp a program. A program reads its row of
scores in pieces of `COLUMNS` and keeps the best blocks so far in registers. While the piece's largest score
beats the worst kept one, it takes that one's place. Of equal scores in the piece the lower block goes first,
and of equal kept scores the higher block is replaced, so ties go to the lower block. Initial and local blocks
are in slots that nothing can replace. In the end the slots are sorted. There are at least 32 slots, so a warp
reduces them, like the columns, with its instruction for 32 integers.

Floor at 64k tokens and 4 KV heads: 0.5 GB of scores, 0.17 ms at 3 TB/s. A row of 512 blocks takes some 30
rounds of 33 instructions; with the code around them that is 0.35 G warp instructions, 0.35 ms.
"""

import triton
import triton.language as tl

from nsa_jax.kernels.triton.launch import named
from nsa_jax.kernels.triton.pieces import LARGEST_FLOAT, LARGEST_INT


@triton.jit(repr=named("nsa_best_blocks"))
def best_blocks_kernel(
    scores, position, chunk, chosen,
    batch, num_queries, num_blocks,
    CHUNKS_PER_ROW: tl.constexpr, CHUNK_ROWS: tl.constexpr, CHUNK_TOKENS: tl.constexpr,
    KV_HEADS: tl.constexpr, BLOCK: tl.constexpr,
    SELECTED: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr,
    ROW: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr, SIGNED: tl.constexpr,
):  # fmt: skip
    """Blocks `[CHUNK_ROWS, CHUNK_TOKENS, K, SELECTED]` of the chunk, from its scores.

    `scores` is None where all chosen blocks are forced or all blocks fit: then only the position matters.
    Scores are those of `importance_kernel`, from 0 up, where NaN counts as 0; or `SIGNED`, where NaN counts
    as `-inf`, and infinite scores as the largest finite numbers.
    """
    number = tl.load(chunk)
    row_of_chunk = tl.program_id(1) // KV_HEADS
    k = tl.program_id(1) % KV_HEADS
    b = (number // CHUNKS_PER_ROW) * CHUNK_ROWS + row_of_chunk
    in_chunk = tl.program_id(0)
    token = (number % CHUNKS_PER_ROW) * CHUNK_TOKENS + in_chunk
    exists = (token < num_queries) & (b < batch)
    at = tl.load(position + b.to(tl.int64) * num_queries + token, mask=exists, other=-1)

    # Candidates are blocks 0 .. count - 1: `initial` ones, free ones up to `local_start`, local ones.
    current = tl.where(at >= 0, at // BLOCK, -1)
    count = tl.minimum(current + 1, num_blocks)
    initial = tl.minimum(count, INITIAL)
    local_start = tl.minimum(tl.maximum(current - LOCAL + 1, initial), count)
    forced = initial + count - local_start
    fit = count <= SELECTED  # then all are taken, and no scores were computed
    slot = tl.arange(0, SLOTS)
    free = -1 - slot  # all different, so that one slot at a time is replaced
    block = tl.where(slot < initial, slot, tl.where(slot < forced, local_start + slot - initial, free))
    block = tl.where(fit, tl.where(slot < count, slot, free), block)
    if scores is not None:
        # Scores are compared by their bits, which order floats from 0 up: a warp reduces integers in one
        # instruction. Replaceable slots hold NONE, below any score; fixed slots hold LARGEST_INT.
        NONE: tl.constexpr = -LARGEST_INT if SIGNED else -1
        kept = tl.where((slot >= forced) & (slot < SELECTED) & (not fit), NONE, LARGEST_INT)
        source = scores + (tl.program_id(1).to(tl.int64) * CHUNK_TOKENS + in_chunk) * ROW
        column = tl.arange(0, COLUMNS)
        for first in range(0, tl.where(fit, 0, local_start), COLUMNS):
            j = first + column
            near = j // 4 * 4 < local_start  # the same for 4 neighbours, so that loads stay 16 bytes wide
            score = tl.load(source + j, mask=near, other=0.0)
            if SIGNED:
                score = tl.minimum(tl.maximum(score, -LARGEST_FLOAT), LARGEST_FLOAT)
                bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)  # -0 counts as 0
                score = tl.where(bits < 0, bits ^ LARGEST_INT, bits)  # the more, the less the others
            else:
                score = tl.where(score > 0.0, score, 0.0).to(tl.int32, bitcast=True)  # NaN counts as 0
            score = tl.where((j >= initial) & (j < local_start), score, NONE)
            largest = tl.max(score, 0)
            worst = tl.min(kept, 0)
            while largest > worst:
                where = tl.min(tl.where(score == largest, column, LARGEST_INT), 0)
                order = tl.where(kept == worst, block, -LARGEST_INT)
                given = order == tl.max(order, 0)
                kept = tl.where(given, largest, kept)
                block = tl.where(given, first + where, block)
                score = tl.where(column == where, NONE, score)
                largest = tl.max(score, 0)
                worst = tl.min(kept, 0)
    ascending = tl.sort(tl.where(block >= 0, block, LARGEST_INT))
    target = chosen + ((row_of_chunk.to(tl.int64) * CHUNK_TOKENS + in_chunk) * KV_HEADS + k) * SELECTED
    tl.store(target + slot, tl.where(ascending < LARGEST_INT, ascending, -1), mask=slot < SELECTED)
