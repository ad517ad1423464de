"""Recomputes outputs and log-sum-exps that are not finite, query by query.

grid = (ceil(T / 32), B K): one program for 32 queries of a KV head. In the main kernels, a value that is not
finite makes its column NaN in all rows of the tiles that read it. In the selected branch, a key that is not
finite makes whole rows NaN, with their log-sum-exps. So it is enough to read the outputs of the KV head's
first query head and, for blocks, the log-sum-exps of all heads. For each query with a bad number, the program
loops over the keys that it sees, 32 a step for 16 heads at a time; it loads no others.

Where the outputs of three branches are not kept, it reads their gated sum: a number that is not finite in one
of them makes the sum so, whatever the gates are. Then the query is attended again in all three.

Where all is finite: reads `B T K V itemsize` bytes of each array (67 MB at 64k, K = 4, V = 128; 25 us
measured), and for blocks `4 B T N` of log-sum-exps.
"""

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Float
from nsa_jax.kernels.triton.dims import padded_heads
from nsa_jax.kernels.triton.launch import launch, named
from nsa_jax.kernels.triton.loading import load_rows, store_rows
from nsa_jax.kernels.triton.nonfinite.branches import (
    MOST_BRANCHES,
    AllRanges,
    Branch,
    BranchArrays,
    Sizes,
    arguments_of,
    first_heads,
    key_counts,
    keys_of_step,
    nonfinite_heads,
    of_branch,
    range_in_slot,
    some_heads,
)
from nsa_jax.kernels.triton.pieces import (
    LOG2_E,
    Dim,
    add_product,
    added,
    cast,
    inner,
    nonfinite_rows,
    precision,
    scaled,
    zeros,
)
from nsa_jax.kernels.triton.sizes.nonfinite import RECOMPUTED_HEADS, RECOMPUTED_KEYS, RECOMPUTED_TOKENS
from nsa_jax.kernels.triton.softmax import Softmax, natural_lse, no_keys


class Outputs(NamedTuple):
    """What the forward of one or three branches wrote.

    Attributes:
      outs: output of each branch; None where `total` is there instead.
      lse: log-sum-exps of the branch with blocks; None where none has any, since those of ranges are always
        right.
      total: gated sum of three branches whose outputs are not kept.
    """

    outs: tuple[Float[Array, "B T N V"] | None, ...]
    lse: Float[Array, "B T N"] | None = None
    total: Float[Array, "B T N V"] | None = None


def recompute_forward(
    found: Outputs,
    query: Float[Array, "B T N H"],
    branches: Sequence[Branch],
    gates: Float[Array, "B T N 3"] | None = None,
    *,
    scale: float,
) -> Outputs:
    """Recomputes in place what is not finite in `found`, and returns it; `gates` are those of the sum."""
    batch, num_queries, num_heads, _ = query.shape
    num_kv_heads = branches[0].key.shape[2]
    operands, constants = arguments_of(query, branches, scale)
    outs = (*found.outs, *[None] * (MOST_BRANCHES - len(found.outs)))
    held = dict(total=found.total, **{f"out{i}": out for i, out in enumerate(outs)}, lse=found.lse)
    updated, () = launch(
        recompute_forward_kernel, query, None if found.total is None else gates, *operands,
        out=(), in_place=held,
        grid=(triton.cdiv(num_queries, RECOMPUTED_TOKENS), batch * num_kv_heads), num_stages=1,
        PADDED_G=padded_heads(num_heads // num_kv_heads), TOKENS=RECOMPUTED_TOKENS, HEADS=RECOMPUTED_HEADS,
        KEYS=RECOMPUTED_KEYS, PRECISION=precision(query.dtype), **key_counts(branches), **constants,
    )  # fmt: skip
    outs = tuple(updated[f"out{i}"] for i in range(len(found.outs)))
    return Outputs(outs, updated["lse"], updated["total"])


@triton.jit
def _add_values(state, logits, v, PRECISION: tl.constexpr):
    """Adds keys to the state, given their logits in base 2 and their values."""
    top = tl.maximum(state.largest, tl.max(logits, 1))
    p = tl.exp2(logits - top[:, None])
    decay = tl.exp2(state.largest - top)
    out = add_product(p.to(v.first.dtype), v, scaled(state.out, decay[:, None]), PRECISION)
    return Softmax(out, top, state.total * decay + tl.sum(p, 1))


@triton.jit
def _attend_again(mine, query, arrays, lse, ranges, WHICH: tl.constexpr, SIZES):
    """The output of branch number WHICH; stores its log-sum-exps, if it is the one with blocks."""
    if arrays.key is None:
        result = zeros(SIZES.HEADS, SIZES.VALUE)
    else:
        q = load_rows(query, mine.rows, SIZES.KEY)
        visible: tl.constexpr = of_branch(ranges, WHICH)
        state = no_keys(SIZES.HEADS, SIZES.VALUE)
        seen = 0
        for slot in range(visible.SLOTS):
            start, end = range_in_slot(visible, mine, slot, SIZES)
            seen += tl.maximum(end - start, 0)
            for first in range(start, end, SIZES.KEYS):
                k, v, inside = keys_of_step(arrays, mine, first, end, SIZES)
                logits = inner(q, k, SIZES.PRECISION) * (SIZES.SCALE * LOG2_E)
                logits = tl.where(inside[None, :], logits, float("-inf"))
                state = _add_values(state, logits, v, SIZES.PRECISION)
        some = seen > 0
        if ranges.OF_BLOCKS == WHICH:
            rows = mine.rows
            tl.store(lse + rows.first + rows.offset, natural_lse(state, some), mask=rows.inside)
        part = tl.where(some, 1 / tl.where(some, state.total, 1.0), 0.0)
        result = scaled(state.out, part[:, None])
    return result


@triton.jit
def _repair_branch(wrong, out, query, arrays, lse, ranges, WHICH: tl.constexpr, SIZES):
    """Stores the output of branch number WHICH anew for the tokens where it is wrong."""
    if arrays.key is not None:
        for i in range(SIZES.TOKENS):
            if tl.max((wrong & (tl.arange(0, SIZES.TOKENS) == i)).to(tl.int32), 0) != 0:
                for head in range(0, SIZES.G, SIZES.HEADS):
                    mine = some_heads(i, head, ranges, SIZES)
                    result = _attend_again(mine, query, arrays, lse, ranges, WHICH, SIZES)
                    store_rows(out, mine.rows, result, SIZES.VALUE)


@triton.jit
def _add_gated(total, mine, query, arrays, lse, gates, ranges, WHICH: tl.constexpr, SIZES):
    """`total` plus the output of branch number WHICH times its gate."""
    result = _attend_again(mine, query, arrays, lse, ranges, WHICH, SIZES)
    at = (mine.rows.first + mine.rows.offset) * 3 + WHICH
    gate = tl.load(gates + at, mask=mine.rows.inside, other=0.0).to(tl.float32)
    rounded = cast(result, query.dtype.element_ty)  # as if it had been stored
    return added(total, scaled(rounded, gate[:, None]))


@triton.jit(repr=named("nsa_{BRANCH}_recompute_forward"))
def recompute_forward_kernel(
    total, out0, out1, out2, lse, query, gates, key0, value0, key1, value1, key2, value2, limits, blocks,
    num_queries, num_keys0, num_keys1, num_keys2, BRANCH: tl.constexpr, OF_BLOCKS: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr, KV_HEADS: tl.constexpr, G: tl.constexpr,
    PADDED_G: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
    H0: tl.constexpr, H1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attends again from those of TOKENS queries where some number is not finite."""
    VALUE: tl.constexpr = Dim(V0, V1)
    SIZES: tl.constexpr = Sizes(KV_HEADS, G, HEADS, KEYS, TOKENS, Dim(H0, H1), VALUE, SCALE, PRECISION)
    arrays0: tl.constexpr = BranchArrays(key0, value0, num_keys0)
    arrays1: tl.constexpr = BranchArrays(key1, value1, num_keys1)
    arrays2: tl.constexpr = BranchArrays(key2, value2, num_keys2)
    firsts = first_heads(tl.program_id(0) * TOKENS, num_queries, KV_HEADS, G, TOKENS)
    none = tl.zeros([TOKENS], tl.int1)
    of_heads = none if blocks is None else nonfinite_heads(lse, firsts, 1, G, PADDED_G)
    queries = (tl.num_programs(1) // KV_HEADS).to(tl.int64) * num_queries
    ranges: tl.constexpr = AllRanges(limits, queries, num_queries, blocks, OF_BLOCKS, SLOTS, BLOCK)
    if total is None:
        wrong0 = nonfinite_rows(load_rows(out0, firsts, VALUE)) | (of_heads if OF_BLOCKS == 0 else none)
        wrong1 = none if out1 is None else nonfinite_rows(load_rows(out1, firsts, VALUE))
        wrong2 = none if out2 is None else nonfinite_rows(load_rows(out2, firsts, VALUE))
        wrong1 = wrong1 | (of_heads if OF_BLOCKS == 1 else none)
        if tl.max((wrong0 | wrong1 | wrong2).to(tl.int32), 0) != 0:
            _repair_branch(wrong0, out0, query, arrays0, lse, ranges, 0, SIZES)
            _repair_branch(wrong1, out1, query, arrays1, lse, ranges, 1, SIZES)
            _repair_branch(wrong2, out2, query, arrays2, lse, ranges, 2, SIZES)
    else:
        wrong = nonfinite_rows(load_rows(total, firsts, VALUE)) | of_heads
        if tl.max(wrong.to(tl.int32), 0) != 0:
            for i in range(TOKENS):
                if tl.max((wrong & (tl.arange(0, TOKENS) == i)).to(tl.int32), 0) != 0:
                    for head in range(0, G, HEADS):
                        mine = some_heads(i, head, ranges, SIZES)
                        result = zeros(HEADS, VALUE)
                        result = _add_gated(result, mine, query, arrays0, lse, gates, ranges, 0, SIZES)
                        result = _add_gated(result, mine, query, arrays1, lse, gates, ranges, 1, SIZES)
                        result = _add_gated(result, mine, query, arrays2, lse, gates, ranges, 2, SIZES)
                        store_rows(total, mine.rows, result, VALUE)
