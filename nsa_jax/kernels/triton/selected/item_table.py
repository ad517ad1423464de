"""How the pairs of each block are cut into items, from where the pairs of each group begin (`items`).

Two kernels. The first, grid = (1,), counts the items of each group and adds the numbers up: one program takes
4096 blocks at a time, range after range, then 4096 groups at a time, 8 numbers a thread. Then grid =
(ceil(items / 32),): a program finds the groups of 32 items by a binary search, and their places by comparing
them with all groups of their chunk, 128 at a time; it writes the seven numbers of each.
`36 items + 28 groups` bytes.

Items of a chunk that have the most pairs come first: programs start in that order, so those that run last are
short, and few multiprocessors wait for them. At 8k tokens and K = 4 an item is compared with 512 groups.

Why one program: groups are few in plain rows (1024 at 8k tokens, K = 8; 4096 at 64k, K = 4), and each has
six numbers, two of which are sums over all before. XLA makes seven programs of it, which took 28 to 31 us at
8k. It does so where groups are many, as in packed rows, which may have one for each token (`items`).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Int32
from nsa_jax.kernels.triton.launch import launch, like, named

ITEM_FIELDS = 7
ITEMS_OF_A_PROGRAM = 32
STEP = 4096  # blocks, then groups, of a step of the first kernel
MOST_GROUPS = 2**15  # that one program counts
# With more groups, which packed rows mostly have, items stay in the order of the groups.
MOST_ORDERED = 2**13
GROUPS_AT_ONCE = 128  # with which an item is compared


class ItemCounts(NamedTuple):
    """How many items there are.

    Attributes:
      ends: of each group, number of the items up to its last.
      lasts: pairs of the last item of each group, -1 where it has none.
      of_group: first slot for partial sums of each group, or -1.
      slots, partials: first slot of each block, and their number, 0 where it has at most one item.
    """

    ends: Int32[Array, " groups"]
    lasts: Int32[Array, " groups"]
    of_group: Int32[Array, " groups"]
    slots: Int32[Array, "heads blocks"]
    partials: Int32[Array, "heads blocks"]


def count_items(
    bounds: Int32[Array, " bounds"], heads: int, ranges: int, num_blocks: int, *, item: int, fill: bool
) -> ItemCounts:
    """Counts the items of at most `item` pairs of each group.

    Args:
      bounds: two numbers of each group in turn, its first pair and the end of its masked ones; then the
        number of all pairs.
      heads, ranges, num_blocks: a group is a block of a range of a head.
      item: most pairs of an item.
      fill: whether a block without pairs gets an item in its first range.
    """
    groups = heads * ranges * num_blocks
    of_groups, of_blocks = like(bounds, (groups,)), like(bounds, (heads, num_blocks))
    *counts, _ = launch(
        count_items_kernel, bounds, out=(of_groups, of_groups, of_groups, of_blocks, of_blocks, of_groups),
        grid=(1,), num_warps=16, heads=heads, ranges=ranges, num_blocks=num_blocks, item=item, FILL=fill,
        BLOCKS=min(STEP, triton.next_power_of_2(heads * num_blocks)),
        GROUPS=min(STEP, triton.next_power_of_2(groups)),
    )  # fmt: skip
    return ItemCounts(*counts)


def item_table(
    bounds: Int32[Array, " bounds"],
    counts: ItemCounts,
    starts: Int32[Array, "B blocks"],
    limits: Int32[Array, "B blocks"],
    ranges: int,
    *,
    item: int,
    num_items: int,
    of_chunk: int,
) -> Int32[Array, "items 7"]:
    """`BlockItems.items`, `num_items` of them; `starts` and `limits` are those of `BlockItems`.

    `of_chunk` consecutive groups are a chunk, whose items lie together.
    """
    heads, num_blocks = counts.slots.shape
    groups = counts.ends.size
    return launch(
        item_table_kernel, bounds, counts.ends, counts.lasts, counts.of_group, starts, limits,
        out=like(bounds, (num_items, ITEM_FIELDS)), grid=(triton.cdiv(num_items, ITEMS_OF_A_PROGRAM),),
        groups=groups, group_of_a_head=ranges * num_blocks, num_blocks=num_blocks, item=item,
        num_items=num_items, of_chunk=of_chunk, KV_HEADS=heads // starts.shape[0], STEPS=groups.bit_length(),
        SIZE=ITEMS_OF_A_PROGRAM, FIELDS=ITEM_FIELDS, ORDERED=groups <= MOST_ORDERED, AT_ONCE=GROUPS_AT_ONCE,
    )  # fmt: skip


@triton.jit
def _items_of(bounds, group, exists, item):
    """How many items the pairs of groups make."""
    first = tl.load(bounds + 2 * group, mask=exists, other=0)
    end = tl.load(bounds + 2 * group + 2, mask=exists, other=0)
    return tl.where(end > first, (end - first - 1) // item + 1, 0)


@triton.jit(repr=named("nsa_count_items"))
def count_items_kernel(
    bounds, ends, lasts, of_group, slots, partials, numbers, heads, ranges, num_blocks, item,
    FILL: tl.constexpr, BLOCKS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """All counts; `numbers` are the items of each group, between the two loops."""
    i = tl.arange(0, BLOCKS)
    before = 0  # slots of the blocks before
    for first in range(0, heads * num_blocks, BLOCKS):
        block = first + i
        exists = block < heads * num_blocks
        # of the block's group in the first range; those of the others are `num_blocks` apart
        group = block // num_blocks * (ranges * num_blocks) + block % num_blocks
        total = tl.zeros([BLOCKS], tl.int32)
        for number in range(ranges):
            total += _items_of(bounds, group + number * num_blocks, exists, item)
        partial = tl.where(total > 1, total, 0)
        slot = before + tl.cumsum(partial, 0) - partial
        before += tl.sum(partial, 0)
        tl.store(slots + block, slot, mask=exists)
        tl.store(partials + block, partial, mask=exists)
        for number in range(ranges):
            here = group + number * num_blocks
            found = _items_of(bounds, here, exists, item)
            tl.store(of_group + here, tl.where(total > 1, slot, -1), mask=exists)
            slot += found
            if FILL:
                found = tl.where((number == 0) & (total == 0), 1, found)
            tl.store(numbers + here, found, mask=exists)
    tl.debug_barrier()  # other threads have stored the numbers
    j = tl.arange(0, GROUPS)
    items = 0
    for first in range(0, heads * ranges * num_blocks, GROUPS):
        group = first + j
        exists = group < heads * ranges * num_blocks
        found = tl.load(numbers + group, mask=exists, other=0)
        tl.store(ends + group, items + tl.cumsum(found, 0), mask=exists)
        low = tl.load(bounds + 2 * group, mask=exists, other=0)
        pairs = tl.load(bounds + 2 * group + 2, mask=exists, other=0) - low
        tl.store(lasts + group, tl.where(found > 0, pairs - (found - 1) * item, -1), mask=exists)
        items += tl.sum(found, 0)


@triton.jit
def count_below(ascending, length, than, STEPS: tl.constexpr):
    """How many of `length` ascending integers are smaller than each of `than`, by a binary search."""
    low = than * 0
    high = low + length
    for _ in range(STEPS):
        middle = low + (high - low) // 2
        below = tl.load(ascending + middle, mask=low < high, other=0) < than
        low, high = tl.where(below & (low < high), middle + 1, low), tl.where(below, high, middle)
    return low


@triton.jit
def _places(ends, lasts, number, group, is_last, pairs, exists, groups, of_chunk, AT_ONCE: tl.constexpr):
    """Where items lie if those with the most pairs come first in their chunk.

    All items are full but the last of each group. So a full one only leaves its place to those after which it
    came, and a last one counts back from the end of the chunk.

    `number`, `group`, `is_last` and `pairs` are of each item: where it lies in the order of the groups, its
    group, whether it is the last of that, and how many pairs it has.
    """
    first = group // of_chunk * of_chunk
    past = tl.minimum(first + of_chunk, groups)
    behind = tl.zeros([number.shape[0], AT_ONCE], tl.int32)
    low = tl.min(tl.where(exists, first, groups), 0)
    high = tl.max(tl.where(exists, past, 0), 0)
    for begin in range(low, high, AT_ONCE):
        other = begin + tl.arange(0, AT_ONCE)
        last = tl.load(lasts + other, mask=other < high, other=-1)[None, :]
        other = other[None, :]
        earlier = other < group[:, None]
        passed = tl.where(is_last[:, None], last + earlier.to(tl.int32) <= pairs[:, None], earlier)
        of_chunk_here = (other >= first[:, None]) & (other < past[:, None]) & (last >= 0)
        behind += (passed & of_chunk_here).to(tl.int32)
    end = tl.load(ends + past - 1, mask=exists, other=0)
    return tl.where(is_last, end, number) - tl.sum(behind, 1)


@triton.jit(repr=named("nsa_item_table"))
def item_table_kernel(
    bounds, ends, lasts, of_group, starts, limits, items, groups, group_of_a_head, num_blocks, item,
    num_items, of_chunk, KV_HEADS: tl.constexpr, STEPS: tl.constexpr, SIZE: tl.constexpr,
    FIELDS: tl.constexpr, ORDERED: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The fields of SIZE items."""
    number = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    group = count_below(ends, groups, number + 1, STEPS)
    exists = group < groups
    before = tl.load(ends + group - 1, mask=exists & (group > 0), other=0)
    index = number - before  # among the items of the group
    first = tl.load(bounds + 2 * group, mask=exists, other=0) + index * item
    masked = tl.load(bounds + 2 * group + 1, mask=exists, other=0)
    last = tl.load(bounds + 2 * group + 2, mask=exists, other=0)
    end = first + tl.minimum(item, last - first)  # `first + item` may exceed 32 bits
    slot = tl.load(of_group + group, mask=exists, other=-1)
    head = group // group_of_a_head
    block = head // KV_HEADS * num_blocks + group % num_blocks
    inside = number < num_items
    if ORDERED:
        is_last = end == last
        place = _places(
            ends, lasts, number, group, is_last, end - first, exists, groups, of_chunk, AT_ONCE
        )  # fmt: skip
        number = tl.where(exists, place, number)
    to = items + number.to(tl.int64) * FIELDS
    tl.store(to, tl.where(exists, head, -1), mask=inside)
    tl.store(to + 1, tl.load(starts + block, mask=exists, other=0), mask=inside)
    tl.store(to + 2, tl.load(limits + block, mask=exists, other=0), mask=inside)
    tl.store(to + 3, first, mask=inside)
    tl.store(to + 4, tl.minimum(tl.maximum(masked, first), end), mask=inside)
    tl.store(to + 5, end, mask=inside)
    tl.store(to + 6, tl.where(slot >= 0, slot + index, -1), mask=inside)
