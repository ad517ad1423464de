"""Recomputes gradients of queries that are not finite, query by query.

grid = (ceil(T / 32), B K): the loops of `nonfinite.forward`, with one more product a step. A number that is
not finite in a key or value that a query does not see makes the gradients of all its heads NaN, so it is
enough to read the first query head of each KV head. In the selected branch, a product that overflows makes
the whole row of one head NaN, so there the first column of every head is read too. The gradient of three
branches is their sum, so it is searched once.

Where all is finite: reads `B T K H itemsize` bytes (67 MB at 64k, K = 4, H = 128; 22 us measured), and for
blocks 32 bytes of each head (134 MB at 64 heads).
"""

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Float
from nsa_jax.kernels.triton.dims import padded_heads
from nsa_jax.kernels.triton.launch import launch, named
from nsa_jax.kernels.triton.loading import Rows, load_at, load_rows, store_rows
from nsa_jax.kernels.triton.nonfinite.branches import (
    AllRanges,
    Branch,
    Saved,
    arguments_of,
    first_heads,
    key_counts,
    keys_in_slot,
    nonfinite_heads,
    of_branch,
)
from nsa_jax.kernels.triton.pieces import (
    LOG2_E,
    Dim,
    Pieces,
    add_product,
    added,
    inner,
    nonfinite_rows,
    precision,
    scaled,
    zeros,
)
from nsa_jax.kernels.triton.sizes import RECOMPUTED_HEADS, RECOMPUTED_KEYS, RECOMPUTED_TOKENS
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


class _Rows(NamedTuple):
    """Some heads of a query whose gradient is formed again.

    Attributes:
      q, d_out: their rows, and the cotangents of their outputs.
      rows: where they lie in `[B T N, _]`.
      at: `b T + t`.
      b, kv_head: row of the batch, and KV head.
    """

    q: Pieces
    d_out: Pieces
    rows: Rows
    at: tl.tensor
    b: tl.tensor
    kv_head: tl.tensor


@triton.jit
def _add_branch(
    total, mine, gates, key, value, lse, delta, num_keys, ranges, BRANCH: tl.constexpr,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, KEY, VALUE, SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`total` plus the gradient from branch number BRANCH; one without keys adds nothing."""
    if key is not None:
        rows = mine.rows
        lse_2 = load_lse(lse, rows)
        shift = tl.load(delta + rows.first + rows.offset, mask=rows.inside, other=0.0)
        dq = zeros(HEADS, KEY)
        visible: tl.constexpr = of_branch(ranges, BRANCH)
        for slot in range(visible.SLOTS):
            start, end = keys_in_slot(visible, mine.at, mine.at * KV_HEADS + mine.kv_head, slot, True)
            for first in range(start, end, KEYS):
                c = first + tl.arange(0, KEYS)
                place = (mine.b * num_keys + c) * KV_HEADS + mine.kv_head
                k = load_at(key, place * (KEY.D0 + KEY.D1), c < end, KEY)
                v = load_at(value, place * (VALUE.D0 + VALUE.D1), c < end, VALUE)
                p = tl.exp2(inner(mine.q, k, PRECISION) * (SCALE * LOG2_E) - lse_2[:, None])
                dp = inner(mine.d_out, v, PRECISION)
                if gates is not None:
                    gate = tl.load(
                        gates + (rows.first + rows.offset) * 3 + BRANCH, mask=rows.inside, other=0.0
                    )
                    dp = dp * gate.to(tl.float32)[:, None]
                ds = tl.where((c < end)[None, :], p * (dp - shift[:, None]), 0.0)
                dq = add_product(ds.to(k.first.dtype), k, dq, PRECISION)
        total = added(total, scaled(dq, SCALE))
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
    VALUE: tl.constexpr = Dim(V0, V1)
    b = (tl.program_id(1) // KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(1) % KV_HEADS
    first_token = tl.program_id(0) * TOKENS
    firsts = first_heads(first_token, num_queries, KV_HEADS, G, TOKENS)
    nonfinite = nonfinite_rows(load_rows(d_query, firsts, KEY))
    if blocks is not None:
        nonfinite = nonfinite | nonfinite_heads(d_query, firsts, H0 + H1, G, PADDED_G)
    if tl.max(nonfinite.to(tl.int32), 0) == 0:
        return
    number = (tl.num_programs(1) // KV_HEADS).to(tl.int64) * num_queries
    ranges: tl.constexpr = AllRanges(limits, number, blocks, OF_BLOCKS, SLOTS, BLOCK)
    for i in range(TOKENS):
        if tl.max((nonfinite & (tl.arange(0, TOKENS) == i)).to(tl.int32), 0) != 0:
            at = b * num_queries + first_token + i
            for head in range(0, G, HEADS):
                r = tl.arange(0, HEADS)
                rows = Rows((at * KV_HEADS + kv_head) * G + head, r, head + r < G)
                q, cotangents = load_rows(query, rows, KEY), load_rows(d_out, rows, VALUE)
                mine = _Rows(q, cotangents, rows, at, b, kv_head)
                dq = _add_branch(
                    zeros(HEADS, KEY), mine, gates, key0, value0, lse0, delta0, num_keys0, ranges, 0,
                    KV_HEADS, HEADS, KEYS, KEY, VALUE, SCALE, PRECISION,
                )  # fmt: skip
                dq = _add_branch(
                    dq, mine, gates, key1, value1, lse1, delta1, num_keys1, ranges, 1,
                    KV_HEADS, HEADS, KEYS, KEY, VALUE, SCALE, PRECISION,
                )  # fmt: skip
                dq = _add_branch(
                    dq, mine, gates, key2, value2, lse2, delta2, num_keys2, ranges, 2,
                    KV_HEADS, HEADS, KEYS, KEY, VALUE, SCALE, PRECISION,
                )  # fmt: skip
                store_rows(d_query, rows, dq, KEY)
