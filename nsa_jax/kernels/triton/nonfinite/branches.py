"""The branches whose results are searched together: their keys, and which of these each query sees."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Float, Int32
from nsa_jax.kernels.triton.dims import split_dim
from nsa_jax.kernels.triton.loading import Rows, load_at
from nsa_jax.layout import Placement

MOST_BRANCHES = 3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class VisibleKeys:
    """The keys `start .. end - 1` of each query, or those of them that lie in its blocks.

    Attributes:
      branch: name of the branch, in the names of kernels.
      start, end: row indices.
      blocks: block indices, counted from `start`, each at most once, -1 in unused slots; None for all keys.
      block_size: tokens of a block.
    """

    branch: str = dataclasses.field(metadata={"static": True})
    start: Int32[Array, "B T"]
    end: Int32[Array, "B T"]
    blocks: Int32[Array, "B T K R"] | None = None
    block_size: int = dataclasses.field(default=1, metadata={"static": True})


class Branch(NamedTuple):
    """Keys and values of a branch, and which of them each query sees."""

    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K V"]
    visible: VisibleKeys


def visible_in_blocks(
    block_indices: Int32[Array, "B T K R"], placement: Placement, num_keys: int
) -> VisibleKeys:
    """The keys that queries see in the blocks that they chose, of `num_keys` keys in all."""
    limits = placement.selection_start(), placement.selection_end(num_keys)
    return VisibleKeys("selected", *limits, block_indices, placement.config.selection_block_size)


def arguments_of(
    query: Float[Array, "B T N H"], branches: Sequence[Branch], scale: float
) -> tuple[tuple[Array | None, ...], dict[str, Any]]:
    """What all kernels of `nonfinite` are told of one or three branches, of which at most one has blocks.

    Returns:
      Operands: key and value of each of three branches, None where there is none or it has no keys; the
      limits `[2 branches, B, T]`, start and end of one branch after the other; the blocks or None. And the
      constants by name.
    """
    with_blocks = [i for i, branch in enumerate(branches) if branch.visible.blocks is not None]
    assert len(with_blocks) <= 1
    of_blocks = with_blocks[0] if with_blocks else -1
    visible = branches[max(of_blocks, 0)].visible
    limits = jnp.stack([x for branch in branches for x in (branch.visible.start, branch.visible.end)])
    absent = (None, None)
    arrays = [(x.key, x.value) if x.key.shape[1] else absent for x in branches]
    arrays += [absent] * (MOST_BRANCHES - len(branches))
    num_queries, num_heads, key_dim = query.shape[1:]
    num_kv_heads, value_dim = branches[0].value.shape[2:]
    (h0, h1), (v0, v1) = split_dim(key_dim), split_dim(value_dim)
    operands = (*(x for pair in arrays for x in pair), limits, visible.blocks)
    return operands, dict(
        num_queries=num_queries, BRANCH=visible.branch if len(branches) == 1 else "native",
        OF_BLOCKS=of_blocks, SLOTS=1 if visible.blocks is None else visible.blocks.shape[-1],
        BLOCK=visible.block_size, KV_HEADS=num_kv_heads, G=num_heads // num_kv_heads,
        H0=h0, H1=h1, V0=v0, V1=v1, SCALE=float(scale),
    )  # fmt: skip


def key_counts(branches: Sequence[Branch]) -> dict[str, int]:
    """The numbers of keys, as arguments of the kernels."""
    numbers = [branch.key.shape[1] for branch in branches] + [0] * (MOST_BRANCHES - len(branches))
    return {f"num_keys{i}": number for i, number in enumerate(numbers)}


class Saved(NamedTuple):
    """What gradients need beside queries and keys, of all branches or of the one that is searched.

    Attributes:
      lse: log-sum-exps of each.
      delta: of each, `gate * sum(out * d_out) - d_lse`.
      d_out: cotangent of the output, or of the gated sum.
      gates: of three branches; None for one, whose gate is 1.
    """

    lse: tuple[Float[Array, "B T N"], ...]
    delta: tuple[Float[Array, "B T N"], ...]
    d_out: Float[Array, "B T N V"]
    gates: Float[Array, "B T N 3"] | None = None

    def arguments(self) -> tuple[Array | None, ...]:
        """What the kernel of the queries gets: numbers of each of three branches, `d_out` and `gates`."""
        absent = [None] * (2 * (MOST_BRANCHES - len(self.lse)))
        numbers = [x for pair in zip(self.lse, self.delta, strict=True) for x in pair]
        return *numbers, *absent, self.d_out, self.gates


class AllRanges(NamedTuple):
    """`VisibleKeys` of all branches, in kernels.

    Attributes:
      limits: `[2 branches, queries]`, see `arguments_of`.
      queries, num_queries: queries of all rows of the batch, and of one.
      blocks: those of branch number OF_BLOCKS; None where no branch has any.
      OF_BLOCKS, SLOTS, BLOCK: that branch, blocks of a query, and keys of a block.
    """

    limits: tl.tensor
    queries: tl.tensor
    num_queries: tl.tensor
    blocks: tl.tensor | None
    OF_BLOCKS: tl.constexpr
    SLOTS: tl.constexpr
    BLOCK: tl.constexpr


class VisibleRanges(NamedTuple):
    """`VisibleKeys` of a branch, in kernels: each query has SLOTS ranges of keys."""

    starts: tl.tensor
    ends: tl.tensor
    blocks: tl.tensor | None
    SLOTS: tl.constexpr
    BLOCK: tl.constexpr


class BranchArrays(NamedTuple):
    """Keys and values `[B S K, D]` of a branch, in kernels, and keys of a row; None for none."""

    key: tl.tensor | None
    value: tl.tensor | None
    num_keys: tl.tensor


class RowArrays(NamedTuple):
    """Arrays with one row for each token and head; `gates` has three numbers a row, and is None for 1."""

    query: tl.tensor
    d_out: tl.tensor
    lse: tl.tensor
    delta: tl.tensor
    gates: tl.tensor | None


class Sizes(NamedTuple):
    """What the loops over keys are compiled for.

    Attributes:
      KV_HEADS, G: KV heads, and query heads of one.
      HEADS, KEYS: query heads and keys of a step.
      TOKENS: queries of a program.
      KEY, VALUE: `Dim`s.
      SCALE, PRECISION: of the products.
    """

    KV_HEADS: tl.constexpr
    G: tl.constexpr
    HEADS: tl.constexpr
    KEYS: tl.constexpr
    TOKENS: tl.constexpr
    KEY: tl.constexpr
    VALUE: tl.constexpr
    SCALE: tl.constexpr
    PRECISION: tl.constexpr


class SomeHeads(NamedTuple):
    """Some heads of one query.

    Attributes:
      rows: where they lie in `[B T N, _]`.
      at: `b T + t`.
      b, kv_head: row of the batch, and KV head.
    """

    rows: Rows
    at: tl.tensor
    b: tl.tensor
    kv_head: tl.tensor


@triton.jit
def of_branch(ranges, WHICH: tl.constexpr):
    """What branch number WHICH shows each query."""
    starts = ranges.limits + 2 * WHICH * ranges.queries
    if ranges.OF_BLOCKS == WHICH:
        visible = VisibleRanges(starts, starts + ranges.queries, ranges.blocks, ranges.SLOTS, ranges.BLOCK)
    else:
        visible = VisibleRanges(starts, starts + ranges.queries, None, 1, 1)
    return visible


@triton.jit
def some_heads(i, head, ranges, SIZES):
    """`SomeHeads` of the program's query number `i`, from head number `head` on."""
    b = (tl.program_id(1) // SIZES.KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(1) % SIZES.KV_HEADS
    at = b * ranges.num_queries + tl.program_id(0) * SIZES.TOKENS + i
    r = tl.arange(0, SIZES.HEADS)
    rows = Rows((at * SIZES.KV_HEADS + kv_head) * SIZES.G + head, r, head + r < SIZES.G)
    return SomeHeads(rows, at, b, kv_head)


@triton.jit
def range_in_slot(visible, mine, slot, SIZES):
    """The range of a slot of the query."""
    return keys_in_slot(visible, mine.at, mine.at * SIZES.KV_HEADS + mine.kv_head, slot, True)


@triton.jit
def keys_of_step(arrays, mine, first, end, SIZES):
    """Keys and values of a step from key `first` on, and which of them lie before `end`."""
    c = first + tl.arange(0, SIZES.KEYS)
    place = (mine.b * arrays.num_keys + c) * SIZES.KV_HEADS + mine.kv_head
    k = load_at(arrays.key, place * (SIZES.KEY.D0 + SIZES.KEY.D1), c < end, SIZES.KEY)
    v = load_at(arrays.value, place * (SIZES.VALUE.D0 + SIZES.VALUE.D1), c < end, SIZES.VALUE)
    return k, v, c < end


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
