"""Recomputes outputs and log-sum-exps that are not finite, query by query.

grid = (ceil(T / 32), B K): one program for 32 queries of a KV head. In the main kernels, a value that is not
finite makes its column NaN in all rows of the tiles that read it. In the selected branch, a key that is not
finite makes whole rows NaN, with their log-sum-exps. So it is enough to read the output of the KV head's
first query head and, for blocks, the log-sum-exps of all heads. For each query with a bad number, the program
loops over the keys that it sees, 32 a step for 16 heads at a time; it loads no others.

Where all is finite: reads `B T K V itemsize` bytes (67 MB at 64k, K = 4, V = 128; 25 us measured), and for
blocks `4 B T N` of log-sum-exps.
"""

import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Float
from nsa_jax.kernels.triton.dims import padded_heads
from nsa_jax.kernels.triton.gated_sum import gated_rows
from nsa_jax.kernels.triton.launch import launch, named
from nsa_jax.kernels.triton.loading import Rows, load_at, load_rows, store_rows
from nsa_jax.kernels.triton.nonfinite.visible_keys import (
    VisibleKeys,
    VisibleRanges,
    first_heads,
    keys_in_slot,
    nonfinite_heads,
)
from nsa_jax.kernels.triton.pieces import LOG2_E, Dim, add_product, inner, nonfinite_rows, precision, scaled
from nsa_jax.kernels.triton.sizes import RECOMPUTED_HEADS, RECOMPUTED_KEYS, RECOMPUTED_TOKENS
from nsa_jax.kernels.triton.softmax import Softmax, natural_lse, no_keys


def recompute_forward(
    out: Float[Array, "B T N V"],
    lse: Float[Array, "B T N"],
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    visible: VisibleKeys,
    scale: float,
    others: tuple[Float[Array, "B T N V"], Float[Array, "B T N V"], Float[Array, "B T N 3"]] | None = None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Recomputes in place what is not finite in `(out, lse)`, and returns both.

    With `others`, the outputs of two branches and the gates, `out` is the gated sum.
    """
    batch, num_queries, num_heads, _ = query.shape
    num_kv_heads = key.shape[2]
    updated, () = launch(
        recompute_forward_kernel, query, key, value, visible.start, visible.end, visible.blocks,
        *(others or (None, None, None)), out=(), in_place=dict(out=out, lse=lse),
        grid=(triton.cdiv(num_queries, RECOMPUTED_TOKENS), batch * num_kv_heads), num_stages=1,
        PADDED_G=padded_heads(num_heads // num_kv_heads), TOKENS=RECOMPUTED_TOKENS, HEADS=RECOMPUTED_HEADS,
        KEYS=RECOMPUTED_KEYS, PRECISION=precision(query.dtype), **visible.constants(query, value, scale),
    )  # fmt: skip
    return updated["out"], updated["lse"]


@triton.jit
def _add_values(state, logits, v, PRECISION: tl.constexpr):
    """Adds keys to the state, given their logits in base 2 and their values."""
    top = tl.maximum(state.largest, tl.max(logits, 1))
    p = tl.exp2(logits - top[:, None])
    decay = tl.exp2(state.largest - top)
    out = add_product(p.to(v.first.dtype), v, scaled(state.out, decay[:, None]), PRECISION)
    return Softmax(out, top, state.total * decay + tl.sum(p, 1))


@triton.jit(repr=named("nsa_{BRANCH}_recompute_forward"))
def recompute_forward_kernel(
    out, lse, query, key, value, starts, ends, blocks, out_cmp, out_slc, gates,
    num_queries, num_keys, BRANCH: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr, G: tl.constexpr, PADDED_G: tl.constexpr, TOKENS: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr,
    V0: tl.constexpr, V1: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Recomputes outputs and log-sum-exps of those of TOKENS queries where some number is not finite."""
    KEY: tl.constexpr = Dim(H0, H1)
    VALUE: tl.constexpr = Dim(V0, V1)
    visible: tl.constexpr = VisibleRanges(starts, ends, blocks, SLOTS, BLOCK)
    b = (tl.program_id(1) // KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(1) % KV_HEADS
    first_token = tl.program_id(0) * TOKENS
    firsts = first_heads(first_token, num_queries, KV_HEADS, G, TOKENS)
    nonfinite = nonfinite_rows(load_rows(out, firsts, VALUE))
    if blocks is not None:
        nonfinite = nonfinite | nonfinite_heads(lse, firsts, 1, G, PADDED_G)
    if tl.max(nonfinite.to(tl.int32), 0) == 0:
        return
    for i in range(TOKENS):
        if tl.max((nonfinite & (tl.arange(0, TOKENS) == i)).to(tl.int32), 0) != 0:
            at = b * num_queries + first_token + i
            for head in range(0, G, HEADS):
                r = tl.arange(0, HEADS)
                rows = Rows((at * KV_HEADS + kv_head) * G + head, r, head + r < G)
                q = load_rows(query, rows, KEY)
                state = no_keys(HEADS, VALUE)
                number = 0
                for slot in range(SLOTS):
                    start, end = keys_in_slot(visible, at, at * KV_HEADS + kv_head, slot, True)
                    number += tl.maximum(end - start, 0)
                    for first in range(start, end, KEYS):
                        c = first + tl.arange(0, KEYS)
                        place = (b * num_keys + c) * KV_HEADS + kv_head
                        k = load_at(key, place * (H0 + H1), c < end, KEY)
                        v = load_at(value, place * (V0 + V1), c < end, VALUE)
                        logits = inner(q, k, PRECISION) * (SCALE * LOG2_E)
                        logits = tl.where((c < end)[None, :], logits, float("-inf"))
                        state = _add_values(state, logits, v, PRECISION)
                some = number > 0
                if blocks is not None:  # the log-sum-exps of ranges are always right
                    tl.store(lse + rows.first + rows.offset, natural_lse(state, some), mask=rows.inside)
                part = tl.where(some, 1 / tl.where(some, state.total, 1.0), 0.0)
                result = scaled(state.out, part[:, None])
                if gates is not None:
                    result = gated_rows(result, out_cmp, out_slc, gates, rows, VALUE)
                store_rows(out, rows, result, VALUE)
