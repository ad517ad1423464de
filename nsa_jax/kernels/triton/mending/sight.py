"""What one query sees, key by key: one range of keys, or one for each of its blocks."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Int32
from nsa_jax.layout import Placement


class Sight(NamedTuple):
    """The keys `start .. end - 1` of each query, or those of them that lie in its blocks.

    Attributes:
      branch: name of the branch, in the names of kernels.
      start, end: row indices.
      blocks: blocks from `start` on, each at most once, -1 in unused slots; None where all keys are seen.
      block_size: tokens of a block.
    """

    branch: str
    start: Int32[Array, "B T"]
    end: Int32[Array, "B T"]
    blocks: Int32[Array, "B T K R"] | None = None
    block_size: int = 1

    def constants(self) -> dict[str, Any]:
        """What the kernels are told."""
        slots = 1 if self.blocks is None else self.blocks.shape[-1]
        return dict(BRANCH=self.branch, SLOTS=slots, BLOCK=self.block_size)


def sight_of_blocks(block_indices: Int32[Array, "B T K R"], placement: Placement, num_keys: int) -> Sight:
    """What queries see of the blocks that they chose among `num_keys` keys."""
    limits = placement.selection_start(), placement.selection_end(num_keys)
    return Sight("selected", *limits, block_indices, placement.config.selection_block_size)


class Slots(NamedTuple):
    """`Sight` in kernels, where SLOTS ranges belong to a query."""

    starts: tl.tensor
    ends: tl.tensor
    blocks: tl.tensor | None
    SLOTS: tl.constexpr
    BLOCK: tl.constexpr


@triton.jit
def spoilt_heads(pointer, rows, WIDTH: tl.constexpr, G: tl.constexpr, PADDED_G: tl.constexpr):
    """Of which tokens the first number `[WIDTH]` is NaN or +inf, in any of the G heads from `rows` on."""
    head = tl.arange(0, PADDED_G)[None, :]
    inside = rows.inside[:, None] & (head < G)
    number = tl.load(pointer + (rows.first + rows.offset[:, None] + head) * WIDTH, mask=inside, other=0.0)
    wrong = (number * 0.0 != 0.0) & (number != float("-inf"))
    return tl.max(wrong.to(tl.int32), 1) != 0


@triton.jit
def keys_in_slot(slots, query, query_head, slot, exists):
    """`(start, end)` of the keys in a slot of query `b T + t` and KV head, `(b T + t) K + k`."""
    start = tl.load(slots.starts + query, mask=exists, other=0)
    end = tl.load(slots.ends + query, mask=exists, other=0)
    if slots.blocks is not None:
        block = tl.load(slots.blocks + query_head * slots.SLOTS + slot, mask=exists, other=-1)
        start += tl.maximum(block, 0) * slots.BLOCK
        end = tl.where(block >= 0, tl.minimum(end, start + slots.BLOCK), start)
    return start, end
