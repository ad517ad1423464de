"""The best blocks of every query (Eq. 11), exact: the top-n kernel of the block selection.

Grid: x = tokens of the chunk by `ROWS`, y = batch rows of the chunk times KV heads. A program holds the
scores of its rows in registers (the first `COLUMNS` blocks; longer rows are read again in every round).

Scores are not negative, so their bits as integers have their order. The free slots go to the scores above
the n-th largest, and to those equal to it from the left as long as slots remain. That value is found by
bisection on the bits, not by n rounds of argmax. It ends once a bound has just n scores at or above it: some
12 rounds of two operations a score where scores differ (estimate), at most 31 where the n-th is a tie. A
running count then gives each chosen block its slot in ascending order; initial and local blocks stand before
and behind: no sort.

Floor at 64k tokens and 4 KV heads: 0.5 GB of scores, 0.18 ms at 3 TB/s; some 0.5 G warp instructions, 0.5 ms.
"""

import triton
import triton.language as tl


@triton.jit
def _read_keys(source, first, lowest, end, needed, COLUMNS: tl.constexpr):
    """Order-preserving integers of the scores in columns `first ..`; -1 for what cannot be chosen."""
    j = first + tl.arange(0, COLUMNS)[None, :]
    near = (j // 4 * 4 < end) & needed  # the same for 4 neighbours, so that loads stay 16 bytes wide
    score = tl.load(source + j, mask=near, other=0.0)
    bits = tl.where(score > 0.0, score, 0.0).to(tl.int32, bitcast=True)  # NaN counts as 0
    return tl.where((j >= lowest) & (j < end), tl.where(needed, bits, 0), -1)


@triton.jit
def best_blocks_kernel(
    scores, position, chunk, chosen,
    batch, num_queries, num_blocks,
    CHUNKS_PER_ROW: tl.constexpr, CHUNK_ROWS: tl.constexpr, CHUNK_TOKENS: tl.constexpr,
    KV_HEADS: tl.constexpr, BLOCK: tl.constexpr,
    SELECTED: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr,
    ROW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Blocks `[CHUNK_ROWS, CHUNK_TOKENS, K, SELECTED]` of the chunk, from `scores` of `importance_kernel`.

    `scores` is None where every choice is forced or all blocks fit: nothing but the position matters then.
    """
    number = tl.load(chunk)
    row_of_chunk = tl.program_id(1) // KV_HEADS
    k = tl.program_id(1) % KV_HEADS
    b = (number // CHUNKS_PER_ROW) * CHUNK_ROWS + row_of_chunk
    in_chunk = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = (number % CHUNKS_PER_ROW) * CHUNK_TOKENS + in_chunk
    exists = (token < num_queries) & (b < batch)
    at = tl.load(position + b.to(tl.int64) * num_queries + token, mask=exists, other=-1)

    # Candidates are blocks 0 .. count-1: `initial` ones, free ones up to `local_start`, local ones.
    current = tl.where(at >= 0, at // BLOCK, -1)
    count = tl.minimum(current + 1, num_blocks)
    initial = tl.minimum(count, INITIAL)
    local_start = tl.minimum(tl.maximum(current - LOCAL + 1, initial), count)
    candidates = local_start - initial
    slots = SELECTED - initial - (count - local_start)
    taken = tl.minimum(candidates, slots)
    writes = in_chunk < CHUNK_TOKENS
    target = chosen + ((row_of_chunk.to(tl.int64) * CHUNK_TOKENS + in_chunk) * KV_HEADS + k) * SELECTED

    lowest = initial[:, None]
    end = local_start[:, None]
    needed = (current >= SELECTED)[:, None]
    source = target[:, None]
    if scores is not None:
        source = scores + (tl.program_id(1).to(tl.int64) * CHUNK_TOKENS + in_chunk)[:, None] * ROW
        keys = _read_keys(source, 0, lowest, end, needed, COLUMNS)
    else:
        j = tl.arange(0, COLUMNS)[None, :]
        keys = tl.where((j >= lowest) & (j < end), 0, -1)
    tiles = tl.max(local_start, 0) // COLUMNS + 1

    # The n-th largest key: at least `slots` keys are >= low, fewer are >= high.
    low = tl.zeros([ROWS], tl.int32)
    if scores is not None:
        at_low = candidates
        high = tl.max(keys, 1)
        if TILES > 1:
            for tile in range(1, tiles):
                high = tl.maximum(
                    high, tl.max(_read_keys(source, tile * COLUMNS, lowest, end, needed, COLUMNS), 1)
                )
        high += 1
        open_rows = (at_low > slots) & (high - low > 1)
        while tl.max(open_rows.to(tl.int32), 0) > 0:
            middle = low + (high - low) // 2
            at_middle = tl.sum((keys >= middle[:, None]).to(tl.int32), 1)
            if TILES > 1:
                for tile in range(1, tiles):
                    more = _read_keys(source, tile * COLUMNS, lowest, end, needed, COLUMNS)
                    at_middle += tl.sum((more >= middle[:, None]).to(tl.int32), 1)
            up = open_rows & (at_middle >= slots)
            high = tl.where(open_rows & (at_middle < slots), middle, high)
            low = tl.where(up, middle, low)
            at_low = tl.where(up, at_middle, at_low)
            open_rows = (at_low > slots) & (high - low > 1)

    above = tl.sum((keys > low[:, None]).to(tl.int32), 1)
    if TILES > 1:
        for tile in range(1, tiles):
            more = _read_keys(source, tile * COLUMNS, lowest, end, needed, COLUMNS)
            above += tl.sum((more > low[:, None]).to(tl.int32), 1)
    equal = slots - above  # slots for keys equal to the n-th

    # Both running counts in one number: keys above in the high bits, equal ones in the low 20.
    before = tl.zeros([ROWS], tl.int32)
    for tile in range(tiles):
        if TILES > 1:  # noqa: SIM102 (known when compiling, unlike `tile`)
            if tile > 0:
                keys = _read_keys(source, tile * COLUMNS, lowest, end, needed, COLUMNS)
        is_above = keys > low[:, None]
        is_equal = keys == low[:, None]
        steps = tl.where(is_above, 1048576, is_equal.to(tl.int32))
        running = before[:, None] + tl.cumsum(steps, 1)
        before += tl.sum(steps, 1)
        equal_rank = running & 1048575
        rank = (running >> 20) + tl.minimum(equal_rank, equal[:, None]) - 1
        is_chosen = is_above | (is_equal & (equal_rank <= equal[:, None]))
        is_chosen = is_chosen & (rank < taken[:, None]) & writes[:, None]
        j = tile * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        tl.store(target[:, None] + lowest + rank, j + tl.zeros_like(rank), mask=is_chosen)

    slot = tl.arange(0, SLOTS)[None, :]
    behind = slot - (initial + taken)[:, None]
    local = local_start[:, None] + behind
    value = tl.where(slot < lowest, slot, tl.where(local < count[:, None], local, -1))
    outside = (slot < lowest) | (behind >= 0)
    tl.store(target[:, None] + slot, value, mask=outside & (slot < SELECTED) & writes[:, None])
