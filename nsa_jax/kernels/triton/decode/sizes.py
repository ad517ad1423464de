"""How the work of a decode step is divided, for an NSA layer and for a dense one. It changes only the speed.

`docs/kernel_log.md`, "Decode steps", has the measurements that chose the sizes. Does not import Triton.
"""

from typing import NamedTuple

from nsa_jax.kernels.triton.sizes import KIB, SHARED_BYTES


class StepShape(NamedTuple):
    """What the sizes of a decode step depend on.

    Attributes:
      gpu: AMPERE, ADA or HOPPER.
      float_bytes: of one number of the query, 2 or 4.
      kv_heads: KV heads of all batch rows together.
      num_new: new tokens of a row.
      heads: query heads of a KV head.
      dims: key and value dim together.
      own: compressed keys of a selection block.
      blocks: selection blocks of the cache.
      slots: selected blocks, padded to a power of two.
      block_size: tokens of a selection block, padded to a power of two, at least 16.
      quantised: whether the cache holds 8 bits of a number.
      processors: multiprocessors of the GPU.
    """

    gpu: int
    float_bytes: int
    kv_heads: int
    num_new: int
    heads: int
    dims: int
    own: int
    blocks: int
    slots: int
    block_size: int
    quantised: bool
    processors: int


class StepSizes(NamedTuple):
    """How the work of a decode step is divided.

    With `n` stages a loop has the loads of `n - 1` steps in flight.

    Attributes:
      rows: query rows (new tokens times heads) of a program of the compressed branch.
      groups: groups of so many rows that a KV head has.
      keys: keys of a step of the loop, in the compressed branch and in the window.
      list_blocks: selection blocks whose best ones form a list.
      cmp_parts: programs that divide the compressed keys of a row, KV head and group.
      cmp_warps, cmp_stages: warps of such a program, and stages of its loop.
      shares: programs of a team, which do the rest of the work for a new token and KV head.
      share_warps: warps of a share.
      registers: most registers of a thread of a share, so that at least 512 threads fit on a
        multiprocessor; None for no limit.
      win_parts, win_stages: shares that attend to the window, and stages of their loop.
      slc_blocks, slc_stages: selected blocks of a step, and stages of the loop.
    """

    rows: int
    groups: int
    keys: int
    list_blocks: int
    cmp_parts: int
    cmp_warps: int
    cmp_stages: int
    shares: int
    share_warps: int
    registers: int | None
    win_parts: int
    win_stages: int
    slc_blocks: int
    slc_stages: int


REGISTERS = 64 * KIB  # of a multiprocessor
STEP_ROWS = 64
STEP_PROGRAMS = 256  # enough to fill a GPU: nearly two for each of the 132 multiprocessors of an H100
STEP_SHARES = 4  # of a team at least, where so many blocks are selected
STEP_CANDIDATES = 256  # in the lists of a new token and KV head; a share ranks them against each other
STEP_LIST_BLOCKS = (128, 1024)  # for a list: the fewest, and the most that a program ranks


def step_sizes(shape: StepShape) -> StepSizes:
    """Sizes for a decode step: the work is divided until it fills `STEP_PROGRAMS` programs.

    That of a team's shares fills twice as many where the cache is in 8 bits.
    """

    def share(programs: int, most: int, all_programs: int = STEP_PROGRAMS) -> int:
        return min(_power_below(max(all_programs // programs, 1)), most)

    rows = shape.num_new * shape.heads
    padded = max(_power_above(min(rows, STEP_ROWS)), 16)
    groups = -(-rows // padded)
    room = SHARED_BYTES[shape.gpu] // 2
    width = shape.dims * (6 if shape.float_bytes == 4 else 2)  # float32 is multiplied in three parts

    def stages(keys: int, ahead: bool) -> int:
        # A selection block may have more keys than two stages have room for: then nothing is loaded ahead.
        fitting = SHARED_BYTES[shape.gpu] // ((keys + 2) * shape.dims * shape.float_bytes)
        return max(min(3 if ahead and 3 * keys * width <= room else 2, fitting), 1)

    keys = max(min(64, _power_below(room // (2 * width))), _power_above(shape.own), 16)
    list_blocks = max(step_list_blocks(shape.blocks, shape.slots), keys // _power_above(shape.own))
    tokens = shape.kv_heads * shape.num_new
    # The shares of a team wait for each other: all must run at once, even if each fills a multiprocessor.
    # A step on 8 bits waits for its own arithmetic, not for bytes: twice as many programs overlap it.
    programs = 2 * STEP_PROGRAMS if shape.quantised else STEP_PROGRAMS
    shares = min(max(share(tokens, 16, programs), STEP_SHARES), shape.slots, _power_below(shape.processors))
    few = shares * tokens <= STEP_PROGRAMS
    # In 8 bits many heads, or wide ones, would spill under the limit, so it begins later for them.
    limited = shares * tokens > (programs if shape.heads > 32 or shape.dims > 256 else STEP_PROGRAMS)
    at_once = max(_power_below(max(room // (width * shape.block_size), 1)), 1)
    slc_blocks = min(shape.slots // shares, at_once, max(64 // shape.block_size, 1))
    compressed = shape.blocks * shape.own
    most_parts = 32 if shape.quantised else 64  # in 8 bits a tile takes less time than one more part to merge
    alone = shares * tokens <= shape.processors  # a share has a multiprocessor to itself
    eight = shape.float_bytes == 4 or (shape.quantised and alone)
    share_warps = max(list_blocks // 32, 8 if eight else 4)
    threads = max(32 * share_warps, 512)
    return StepSizes(
        rows=padded,
        groups=groups,
        keys=keys,
        list_blocks=list_blocks,
        cmp_parts=min(share(shape.kv_heads * groups, most_parts), _power_above(-(-compressed // keys))),
        cmp_warps=4,
        cmp_stages=stages(keys, ahead=shape.kv_heads > 8),
        shares=shares,
        share_warps=share_warps,
        registers=REGISTERS // threads if limited and shape.float_bytes == 2 else None,
        win_parts=min(shares, 8),
        win_stages=stages(keys, ahead=False),
        slc_blocks=slc_blocks,
        slc_stages=stages(slc_blocks * shape.block_size, ahead=few and shares * slc_blocks < shape.slots),
    )


def step_list_blocks(blocks: int, slots: int) -> int:
    """Selection blocks for a list, so that the lists of `blocks` hold at most `STEP_CANDIDATES` slots."""
    lists = max(STEP_CANDIDATES // slots, 1)
    return max(_power_above(-(-blocks // lists)), STEP_LIST_BLOCKS[0], slots)


class HiddenSizes(NamedTuple):
    """How the work of a compressor's hidden layer is divided in a decode step.

    Attributes:
      rows: blocks of a program.
      units: hidden units of a program.
      parts: programs that divide the tokens of a block.
      stages: of the loop, see `StepSizes`; a step takes `hidden_depth` dimensions of a token.
    """

    rows: int
    units: int
    parts: int
    stages: int


def hidden_sizes(blocks: int, tokens: int) -> HiddenSizes:
    """Sizes for `blocks` of `tokens` tokens: 256 units make 64 programs, each with 32 KB of weights."""
    rows = max(min(_power_above(blocks), 32), 16)
    return HiddenSizes(rows=rows, units=32, parts=min(_power_below(tokens), 8), stages=2)


def hidden_depth(dim: int, float_bytes: int) -> int:
    """Dimensions of a token that are multiplied at a time: a power of two that divides `dim`."""
    most = 32 if float_bytes == 4 else 128  # float32 is multiplied in three parts
    return min(dim & -dim, most)


class DenseStepShape(NamedTuple):
    """What the sizes of a dense or window layer's step depend on; the first six as in `StepShape`.

    Attributes:
      slots: tokens of the cache.
    """

    gpu: int
    float_bytes: int
    kv_heads: int
    num_new: int
    heads: int
    dims: int
    slots: int


class DenseStepSizes(NamedTuple):
    """How the work of such a step is divided.

    Attributes:
      rows: query rows (new tokens times heads) of a program.
      groups: groups of so many rows that a KV head has.
      keys: keys of a step of the loop.
      parts: programs that divide the keys of a row, KV head and group.
      num_warps, num_stages: warps of a program, and stages of its loop, see `StepSizes`.
    """

    rows: int
    groups: int
    keys: int
    parts: int
    num_warps: int
    num_stages: int


DENSE_PARTS = 33  # times 4 KV heads: the 132 multiprocessors of an H100
DENSE_TILES = 16  # of a part at least, unless that leaves multiprocessors idle
DENSE_PROGRAMS = 16 * 132  # beyond this, parts cost more than their even load saves
DENSE_STAGES = 2  # four programs fit on a multiprocessor; one stage more where there are at most two programs
DENSE_ROW_BYTES = 40 * KIB  # of a program's rows as operands; with more, the sums spill


def dense_step_sizes(shape: DenseStepShape) -> DenseStepSizes:
    """Sizes for such a step: one row fills an H100 evenly, two programs a multiprocessor; many nearly do."""
    rows = shape.num_new * shape.heads
    width = shape.dims * (6 if shape.float_bytes == 4 else 2)  # float32 is multiplied in three parts
    most = max(min(STEP_ROWS, _power_below(DENSE_ROW_BYTES // width)), 16)
    padded = max(_power_above(min(rows, most)), 16)
    groups = -(-rows // padded)
    room = SHARED_BYTES[shape.gpu] // 2
    keys = max(min(64, _power_below(room // ((DENSE_STAGES + 1) * width))), 16)
    tiles = -(-shape.slots // keys)
    filling = 2 * 132 // (shape.kv_heads * groups)
    most_parts = DENSE_PROGRAMS // (shape.kv_heads * groups)
    parts = max(min(max(filling, min(DENSE_PARTS, most_parts, tiles // DENSE_TILES)), tiles), 1)
    few = parts <= filling and (DENSE_STAGES + 1) * keys * width <= room
    return DenseStepSizes(
        rows=padded,
        groups=groups,
        keys=keys,
        parts=parts,
        num_warps=4,
        num_stages=DENSE_STAGES + few,
    )


def _power_above(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def _power_below(number: int) -> int:
    return 1 << (max(number, 1).bit_length() - 1)
