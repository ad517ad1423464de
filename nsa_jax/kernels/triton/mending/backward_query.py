"""Mends gradients of marked tiles of queries, query by query.

grid = (ceil(tiles / 32), B K), as `mending.forward`: the same loops, and one more product a step.
"""

import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Float, Int32
from nsa_jax.kernels.triton.dims import split_dim
from nsa_jax.kernels.triton.launch import launch, like, named
from nsa_jax.kernels.triton.loading import Rows, load_at, load_rows, store_rows
from nsa_jax.kernels.triton.mending.sight import Sight, Slots, keys_in_slot
from nsa_jax.kernels.triton.pieces import (
    LOG2_E,
    Dim,
    add_product,
    added,
    inner,
    precision,
    scaled,
    zeros,
)
from nsa_jax.kernels.triton.softmax import load_lse
from nsa_jax.kernels.triton.tiles import MENDED_HEADS, MENDED_KEYS, MENDED_TILES


def mend_query_gradient(
    d_query: Float[Array, "B T N H"],
    marks: Int32[Array, "B K tiles"],
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
    *,
    tokens: int,
) -> Float[Array, "B T N H"]:
    """`d_query` where the tiles of `tokens` queries whose mark is not 0 are formed again, in place."""
    batch, num_queries, num_heads, key_dim = query.shape
    num_keys, num_kv_heads, value_dim = value.shape[1:]
    num_tiles = marks.shape[-1]
    (h0, h1), (v0, v1) = split_dim(key_dim), split_dim(value_dim)
    return launch(
        mend_query_gradient_kernel, d_query, marks, query, key, value, sight.start, sight.end, sight.blocks,
        lse, delta, d_out, weight, previous, out=like(d_query), in_place=1,
        grid=(triton.cdiv(num_tiles, MENDED_TILES), batch * num_kv_heads), num_stages=1,
        num_queries=num_queries, num_keys=num_keys, num_tiles=num_tiles, **sight.constants(),
        KV_HEADS=num_kv_heads, G=num_heads // num_kv_heads, TILES=MENDED_TILES, TOKENS=tokens,
        HEADS=MENDED_HEADS, KEYS=MENDED_KEYS, H0=h0, H1=h1, V0=v0, V1=v1, SCALE=float(scale),
        PRECISION=precision(query.dtype),
    )  # fmt: skip


@triton.jit(repr=named("nsa_{BRANCH}_mend_query_gradient"))
def mend_query_gradient_kernel(
    d_query, marks, query, key, value, starts, ends, blocks, lse, delta, d_out, weight, previous,
    num_queries, num_keys, num_tiles, BRANCH: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr, G: tl.constexpr, TILES: tl.constexpr, TOKENS: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr,
    V0: tl.constexpr, V1: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries of TILES tiles, as far as they are marked."""
    KEY: tl.constexpr = Dim(H0, H1)
    VALUE: tl.constexpr = Dim(V0, V1)
    slots: tl.constexpr = Slots(starts, ends, blocks, SLOTS, BLOCK)
    marks += tl.program_id(1).to(tl.int64) * num_tiles
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    if tl.max(tl.load(marks + tile, mask=tile < num_tiles, other=0), 0) == 0:
        return
    b = (tl.program_id(1) // KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(1) % KV_HEADS
    for i in range(TILES * TOKENS):
        token = tl.program_id(0) * (TILES * TOKENS) + i
        if tl.load(marks + token // TOKENS, mask=token < num_queries, other=0) != 0:
            at = b * num_queries + token
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
