"""Recomputes gradients of queries that are not finite, query by query.

grid = (ceil(T / 32), B K): the loops of `nonfinite.forward`, with one more product a step. A number that is
not finite in a key or value that a query does not see makes the gradients of all its heads NaN, so it is
enough to read the first query head of each KV head. In the selected branch, a product that overflows makes
the whole row of one head NaN, so there the first column of every head is read too.

Where all is finite: reads `B T K H itemsize` bytes (67 MB at 64k, K = 4, H = 128; 22 us measured), and for
blocks 32 bytes of each head (134 MB at 64 heads).
"""

import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Float
from nsa_jax.kernels.triton.backward import Backward
from nsa_jax.kernels.triton.dims import padded_heads
from nsa_jax.kernels.triton.launch import launch, named
from nsa_jax.kernels.triton.loading import Rows, load_at, load_rows, store_rows
from nsa_jax.kernels.triton.nonfinite.visible_keys import (
    VisibleKeys,
    VisibleRanges,
    first_heads,
    keys_in_slot,
    nonfinite_heads,
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
from nsa_jax.kernels.triton.sizes import RECOMPUTED_HEADS, RECOMPUTED_KEYS, RECOMPUTED_TOKENS
from nsa_jax.kernels.triton.softmax import load_lse


def recompute_query_gradient(
    d_query: Float[Array, "B T N H"],
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    visible: VisibleKeys,
    given: Backward,
    delta: Float[Array, "B T N"],
    *,
    scale: float,
) -> Float[Array, "B T N H"]:
    """Recomputes in place what is not finite in `d_query`, and returns it.

    Arguments as in `range_query_gradient`.
    """
    batch, num_queries, num_heads, _ = query.shape
    num_kv_heads = key.shape[2]
    updated, () = launch(
        recompute_query_gradient_kernel, query, key, value, visible.start, visible.end,
        visible.blocks, given.lse, delta, given.d_out, given.gate, given.previous, out=(),
        in_place=dict(d_query=d_query),
        grid=(triton.cdiv(num_queries, RECOMPUTED_TOKENS), batch * num_kv_heads), num_stages=1,
        PADDED_G=padded_heads(num_heads // num_kv_heads), TOKENS=RECOMPUTED_TOKENS, HEADS=RECOMPUTED_HEADS,
        KEYS=RECOMPUTED_KEYS, PRECISION=precision(query.dtype), **visible.constants(query, value, scale),
    )  # fmt: skip
    return updated["d_query"]


@triton.jit(repr=named("nsa_{BRANCH}_recompute_query_gradient"))
def recompute_query_gradient_kernel(
    d_query, query, key, value, starts, ends, blocks, lse, delta, d_out, gate, previous,
    num_queries, num_keys, BRANCH: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr, G: tl.constexpr, PADDED_G: tl.constexpr, TOKENS: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr,
    V0: tl.constexpr, V1: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Recomputes the gradients of those of TOKENS queries where some number is not finite."""
    KEY: tl.constexpr = Dim(H0, H1)
    VALUE: tl.constexpr = Dim(V0, V1)
    visible: tl.constexpr = VisibleRanges(starts, ends, blocks, SLOTS, BLOCK)
    b = (tl.program_id(1) // KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(1) % KV_HEADS
    first_token = tl.program_id(0) * TOKENS
    firsts = first_heads(first_token, num_queries, KV_HEADS, G, TOKENS)
    nonfinite = nonfinite_rows(load_rows(d_query, firsts, KEY))
    if blocks is not None:
        nonfinite = nonfinite | nonfinite_heads(d_query, firsts, H0 + H1, G, PADDED_G)
    if tl.max(nonfinite.to(tl.int32), 0) == 0:
        return
    for i in range(TOKENS):
        if tl.max((nonfinite & (tl.arange(0, TOKENS) == i)).to(tl.int32), 0) != 0:
            at = b * num_queries + first_token + i
            for head in range(0, G, HEADS):
                r = tl.arange(0, HEADS)
                rows = Rows((at * KV_HEADS + kv_head) * G + head, r, head + r < G)
                q = load_rows(query, rows, KEY)
                d_out_rows = load_rows(d_out, rows, VALUE)
                lse_2 = load_lse(lse, rows)
                shift = tl.load(delta + rows.first + r, mask=rows.inside, other=0.0)
                dq = zeros(HEADS, KEY)
                for slot in range(SLOTS):
                    start, end = keys_in_slot(visible, at, at * KV_HEADS + kv_head, slot, True)
                    for first in range(start, end, KEYS):
                        c = first + tl.arange(0, KEYS)
                        place = (b * num_keys + c) * KV_HEADS + kv_head
                        k = load_at(key, place * (H0 + H1), c < end, KEY)
                        v = load_at(value, place * (V0 + V1), c < end, VALUE)
                        p = tl.exp2(inner(q, k, PRECISION) * (SCALE * LOG2_E) - lse_2[:, None])
                        dp = inner(d_out_rows, v, PRECISION)
                        if gate is not None:
                            of_row = tl.load(gate + rows.first + r, mask=rows.inside, other=0.0)
                            dp = dp * of_row[:, None]
                        ds = tl.where((c < end)[None, :], p * (dp - shift[:, None]), 0.0)
                        dq = add_product(ds.to(k.first.dtype), k, dq, PRECISION)
                dq = scaled(dq, SCALE)
                if previous is not None:
                    dq = added(dq, load_rows(previous, rows, KEY))
                store_rows(d_query, rows, dq, KEY)
