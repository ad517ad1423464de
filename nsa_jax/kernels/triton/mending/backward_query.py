"""Mends gradients of queries that are not finite, query by query.

grid = (ceil(T / 32), B K), as `mending.forward`: the same loops, and one more product a step. What is not
finite in a key or value that a query does not see has spoilt the gradients of all its heads: the first one of
a KV head tells. In the selected branch a product that overflows spoils the whole row of one head: there the
first column of all heads is read, too.

Nothing to mend: reads `B T K H itemsize` bytes (67 MB at 64k, K = 4, H = 128; 17 us).
"""

import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Float
from nsa_jax.kernels.triton.dims import padded_heads, split_dim
from nsa_jax.kernels.triton.launch import launch, like, named
from nsa_jax.kernels.triton.loading import Rows, load_at, load_rows, store_rows
from nsa_jax.kernels.triton.mending.sight import Sight, Slots, keys_in_slot, spoilt_heads
from nsa_jax.kernels.triton.pieces import (
    LOG2_E,
    Dim,
    add_product,
    added,
    inner,
    precision,
    scaled,
    spoiled_rows,
    zeros,
)
from nsa_jax.kernels.triton.softmax import load_lse
from nsa_jax.kernels.triton.tiles import MENDED_HEADS, MENDED_KEYS, MENDED_TOKENS


def mend_query_gradient(
    d_query: Float[Array, "B T N H"],
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    sight: Sight,
    lse: Float[Array, "B T N"],
    delta: Float[Array, "B T N"],
    d_out: Float[Array, "B T N V"],
    weight: Float[Array, "B T N"] | None,
    previous: Float[Array, "B T N H"] | None,
    scale: float,
) -> Float[Array, "B T N H"]:
    """`d_query` where spoilt queries are formed again, in place."""
    batch, num_queries, num_heads, key_dim = query.shape
    num_keys, num_kv_heads, value_dim = value.shape[1:]
    heads = num_heads // num_kv_heads
    (h0, h1), (v0, v1) = split_dim(key_dim), split_dim(value_dim)
    return launch(
        mend_query_gradient_kernel, d_query, query, key, value, sight.start, sight.end, sight.blocks,
        lse, delta, d_out, weight, previous, out=like(d_query), in_place=1,
        grid=(triton.cdiv(num_queries, MENDED_TOKENS), batch * num_kv_heads), num_stages=1,
        num_queries=num_queries, num_keys=num_keys, **sight.constants(),
        KV_HEADS=num_kv_heads, G=heads, PADDED_G=padded_heads(heads), TOKENS=MENDED_TOKENS,
        HEADS=MENDED_HEADS, KEYS=MENDED_KEYS, H0=h0, H1=h1, V0=v0, V1=v1, SCALE=float(scale),
        PRECISION=precision(query.dtype),
    )  # fmt: skip


@triton.jit(repr=named("nsa_{BRANCH}_mend_query_gradient"))
def mend_query_gradient_kernel(
    d_query, query, key, value, starts, ends, blocks, lse, delta, d_out, weight, previous,
    num_queries, num_keys, BRANCH: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr, G: tl.constexpr, PADDED_G: tl.constexpr, TOKENS: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr,
    V0: tl.constexpr, V1: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of TOKENS queries, as far as they are spoilt."""
    KEY: tl.constexpr = Dim(H0, H1)
    VALUE: tl.constexpr = Dim(V0, V1)
    slots: tl.constexpr = Slots(starts, ends, blocks, SLOTS, BLOCK)
    b = (tl.program_id(1) // KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(1) % KV_HEADS
    first_token = tl.program_id(0) * TOKENS
    t = tl.arange(0, TOKENS)
    first_row = ((b * num_queries + first_token) * KV_HEADS + kv_head) * G
    firsts = Rows(first_row, t * (KV_HEADS * G), first_token + t < num_queries)
    spoiled = spoiled_rows(load_rows(d_query, firsts, KEY))
    if blocks is not None:
        spoiled = spoiled | spoilt_heads(d_query, firsts, H0 + H1, G, PADDED_G)
    if tl.max(spoiled.to(tl.int32), 0) == 0:
        return
    for i in range(TOKENS):
        if tl.max((spoiled & (t == i)).to(tl.int32), 0) != 0:
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
                    start, end = keys_in_slot(slots, at, at * KV_HEADS + kv_head, slot, True)
                    for first in range(start, end, KEYS):
                        c = first + tl.arange(0, KEYS)
                        place = (b * num_keys + c) * KV_HEADS + kv_head
                        k = load_at(key, place * (H0 + H1), c < end, KEY)
                        v = load_at(value, place * (V0 + V1), c < end, VALUE)
                        p = tl.exp2(inner(q, k, PRECISION) * (SCALE * LOG2_E) - lse_2[:, None])
                        dp = inner(d_out_rows, v, PRECISION)
                        if weight is not None:
                            gate = tl.load(weight + rows.first + r, mask=rows.inside, other=0.0)
                            dp = dp * gate[:, None]
                        ds = tl.where((c < end)[None, :], p * (dp - shift[:, None]), 0.0)
                        dq = add_product(ds.to(k.first.dtype), k, dq, PRECISION)
                dq = scaled(dq, SCALE)
                if previous is not None:
                    dq = added(dq, load_rows(previous, rows, KEY))
                store_rows(d_query, rows, dq, KEY)
