"""Recomputes gradients of queries that are not finite, query by query.

grid = (ceil(T / 32), B K): the loops of `nonfinite.forward`, with one more product a step. A number that is
not finite in a key or value that a query does not see makes the gradients of all its heads NaN, so it is
enough to read the first query head of each KV head. In the selected branch, a product that overflows makes
the whole row of one head NaN, so there the first column of every head is read too. The gradient of three
branches is their sum: it is searched once, and formed again in all three.

Where all is finite: reads `B T K H itemsize` bytes (67 MB at 64k, K = 4, H = 128; 22 us measured), and for
blocks 32 bytes of each head (134 MB at 64 heads).
"""

from collections.abc import Sequence

import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Float
from nsa_jax.kernels.triton.dims import padded_heads
from nsa_jax.kernels.triton.launch import launch, named
from nsa_jax.kernels.triton.loading import load_rows, store_rows
from nsa_jax.kernels.triton.nonfinite.branches import (
    AllRanges,
    Branch,
    BranchArrays,
    RowArrays,
    Saved,
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
    inner,
    nonfinite_rows,
    precision,
    scaled,
    zeros,
)
from nsa_jax.kernels.triton.sizes.nonfinite import RECOMPUTED_HEADS, RECOMPUTED_KEYS, RECOMPUTED_TOKENS
from nsa_jax.kernels.triton.softmax import load_lse


def recompute_query_gradient(
    d_query: Float[Array, "B T N H"],
    query: Float[Array, "B T N H"],
    branches: Sequence[Branch],
    saved: Saved,
    *,
    scale: float,
) -> Float[Array, "B T N H"]:
    """Recomputes in place what is not finite in `d_query`, the sum over the branches, and returns it."""
    batch, num_queries, num_heads, _ = query.shape
    num_kv_heads = branches[0].key.shape[2]
    operands, constants = arguments_of(query, branches, scale)
    updated, () = launch(
        recompute_query_gradient_kernel, query, *operands, *saved.arguments(),
        out=(), in_place=dict(d_query=d_query),
        grid=(triton.cdiv(num_queries, RECOMPUTED_TOKENS), batch * num_kv_heads), num_stages=1,
        PADDED_G=padded_heads(num_heads // num_kv_heads), TOKENS=RECOMPUTED_TOKENS, HEADS=RECOMPUTED_HEADS,
        KEYS=RECOMPUTED_KEYS, PRECISION=precision(query.dtype), **key_counts(branches), **constants,
    )  # fmt: skip
    return updated["d_query"]


@triton.jit
def _add_branch(total, mine, of_rows, arrays, ranges, WHICH: tl.constexpr, SIZES):
    """`total` plus the gradient from branch number WHICH; one without keys adds nothing."""
    if arrays.key is not None:
        rows = mine.rows
        q = load_rows(of_rows.query, rows, SIZES.KEY)
        cotangent = load_rows(of_rows.d_out, rows, SIZES.VALUE)
        lse_2 = load_lse(of_rows.lse, rows)
        shift = tl.load(of_rows.delta + rows.first + rows.offset, mask=rows.inside, other=0.0)
        dq = zeros(SIZES.HEADS, SIZES.KEY)
        visible: tl.constexpr = of_branch(ranges, WHICH)
        for slot in range(visible.SLOTS):
            start, end = range_in_slot(visible, mine, slot, SIZES)
            for first in range(start, end, SIZES.KEYS):
                k, v, inside = keys_of_step(arrays, mine, first, end, SIZES)
                p = tl.exp2(inner(q, k, SIZES.PRECISION) * (SIZES.SCALE * LOG2_E) - lse_2[:, None])
                dp = inner(cotangent, v, SIZES.PRECISION)
                if of_rows.gates is not None:
                    at = (rows.first + rows.offset) * 3 + WHICH
                    gate = tl.load(of_rows.gates + at, mask=rows.inside, other=0.0)
                    dp = dp * gate.to(tl.float32)[:, None]
                ds = tl.where(inside[None, :], p * (dp - shift[:, None]), 0.0)
                dq = add_product(ds.to(k.first.dtype), k, dq, SIZES.PRECISION)
        total = added(total, scaled(dq, SIZES.SCALE))
    return total


@triton.jit(repr=named("nsa_{BRANCH}_recompute_query_gradient"))
def recompute_query_gradient_kernel(
    d_query, query, key0, value0, key1, value1, key2, value2, limits, blocks,
    lse0, delta0, lse1, delta1, lse2, delta2, d_out, gates,
    num_queries, num_keys0, num_keys1, num_keys2, BRANCH: tl.constexpr, OF_BLOCKS: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr, KV_HEADS: tl.constexpr, G: tl.constexpr,
    PADDED_G: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
    H0: tl.constexpr, H1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Recomputes the gradients of those of TOKENS queries where some number is not finite."""
    KEY: tl.constexpr = Dim(H0, H1)
    SIZES: tl.constexpr = Sizes(KV_HEADS, G, HEADS, KEYS, TOKENS, KEY, Dim(V0, V1), SCALE, PRECISION)
    arrays0: tl.constexpr = BranchArrays(key0, value0, num_keys0)
    arrays1: tl.constexpr = BranchArrays(key1, value1, num_keys1)
    arrays2: tl.constexpr = BranchArrays(key2, value2, num_keys2)
    of_rows0: tl.constexpr = RowArrays(query, d_out, lse0, delta0, gates)
    of_rows1: tl.constexpr = RowArrays(query, d_out, lse1, delta1, gates)
    of_rows2: tl.constexpr = RowArrays(query, d_out, lse2, delta2, gates)
    firsts = first_heads(tl.program_id(0) * TOKENS, num_queries, KV_HEADS, G, TOKENS)
    wrong = nonfinite_rows(load_rows(d_query, firsts, KEY))
    if blocks is not None:
        wrong = wrong | nonfinite_heads(d_query, firsts, H0 + H1, G, PADDED_G)
    if tl.max(wrong.to(tl.int32), 0) == 0:
        return
    queries = (tl.num_programs(1) // KV_HEADS).to(tl.int64) * num_queries
    ranges: tl.constexpr = AllRanges(limits, queries, num_queries, blocks, OF_BLOCKS, SLOTS, BLOCK)
    for i in range(TOKENS):
        if tl.max((wrong & (tl.arange(0, TOKENS) == i)).to(tl.int32), 0) != 0:
            for head in range(0, G, HEADS):
                mine = some_heads(i, head, ranges, SIZES)
                dq = zeros(HEADS, KEY)
                dq = _add_branch(dq, mine, of_rows0, arrays0, ranges, 0, SIZES)
                dq = _add_branch(dq, mine, of_rows1, arrays1, ranges, 1, SIZES)
                dq = _add_branch(dq, mine, of_rows2, arrays2, ranges, 2, SIZES)
                store_rows(d_query, mine.rows, dq, KEY)
