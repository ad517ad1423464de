"""Which keys one query sees: one range, or one for each of its blocks."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Float, Int32
from nsa_jax.kernels.triton.dims import split_dim
from nsa_jax.kernels.triton.loading import Rows
from nsa_jax.layout import Placement


class VisibleKeys(NamedTuple):
    """The keys `start .. end - 1` of each query, or those of them that lie in its blocks.

    Attributes:
      branch: name of the branch, in the names of kernels.
      start, end: row indices.
      blocks: block indices, counted from `start`, each at most once, -1 in unused slots; None for all keys.
      block_size: tokens of a block.
    """

    branch: str
    start: Int32[Array, "B T"]
    end: Int32[Array, "B T"]
    blocks: Int32[Array, "B T K R"] | None = None
    block_size: int = 1

    def constants(
        self, query: Float[Array, "B T N H"], value: Float[Array, "B S K V"], scale: float
    ) -> dict[str, Any]:
        """The arguments that all kernels of `nonfinite` share."""
        num_queries, num_heads, key_dim = query.shape[1:]
        num_keys, num_kv_heads, value_dim = value.shape[1:]
        (h0, h1), (v0, v1) = split_dim(key_dim), split_dim(value_dim)
        return dict(
            num_queries=num_queries, num_keys=num_keys, BRANCH=self.branch,
            SLOTS=1 if self.blocks is None else self.blocks.shape[-1], BLOCK=self.block_size,
            KV_HEADS=num_kv_heads, G=num_heads // num_kv_heads,
            H0=h0, H1=h1, V0=v0, V1=v1, SCALE=float(scale),
        )  # fmt: skip


def visible_in_blocks(
    block_indices: Int32[Array, "B T K R"], placement: Placement, num_keys: int
) -> VisibleKeys:
    """The keys that queries see in the blocks that they chose, of `num_keys` keys in all."""
    limits = placement.selection_start(), placement.selection_end(num_keys)
    return VisibleKeys("selected", *limits, block_indices, placement.config.selection_block_size)


class VisibleRanges(NamedTuple):
    """`VisibleKeys` in kernels: each query has SLOTS ranges of keys."""

    starts: tl.tensor
    ends: tl.tensor
    blocks: tl.tensor | None
    SLOTS: tl.constexpr
    BLOCK: tl.constexpr


@triton.jit
def first_heads(first_token, num_queries, KV_HEADS: tl.constexpr, G: tl.constexpr, TOKENS: tl.constexpr):
    """The rows of TOKENS tokens with the first query head of the program's KV head."""
    b = (tl.program_id(1) // KV_HEADS).to(tl.int64)
    token = tl.arange(0, TOKENS)
    first = ((b * num_queries + first_token) * KV_HEADS + tl.program_id(1) % KV_HEADS) * G
    return Rows(first, token * (KV_HEADS * G), first_token + token < num_queries)


@triton.jit
def nonfinite_heads(pointer, rows, WIDTH: tl.constexpr, G: tl.constexpr, PADDED_G: tl.constexpr):
    """For each token: whether any of its G heads from `rows` on has a row that begins with NaN or +inf."""
    head = tl.arange(0, PADDED_G)[None, :]
    inside = rows.inside[:, None] & (head < G)
    number = tl.load(pointer + (rows.first + rows.offset[:, None] + head) * WIDTH, mask=inside, other=0.0)
    wrong = (number * 0.0 != 0.0) & (number != float("-inf"))
    return tl.max(wrong.to(tl.int32), 1) != 0


@triton.jit
def keys_in_slot(visible, query, query_head, slot, exists):
    """Range `(start, end)` of a slot; `query` is `b T + t` and `query_head` is `(b T + t) K + k`."""
    start = tl.load(visible.starts + query, mask=exists, other=0)
    end = tl.load(visible.ends + query, mask=exists, other=0)
    if visible.blocks is not None:
        block = tl.load(visible.blocks + query_head * visible.SLOTS + slot, mask=exists, other=-1)
        start += tl.maximum(block, 0) * visible.BLOCK
        end = tl.where(block >= 0, tl.minimum(end, start + visible.BLOCK), start)
    return start, end
