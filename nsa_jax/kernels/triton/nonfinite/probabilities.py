"""Recomputes the probabilities of the slots of a query where one of them is NaN.

grid = (ceil(T / 32), B K): one program for 32 queries of a KV head. In the forward of the selected branch, a
key that is not finite makes the numbers of all rows of a tile NaN. Where a slot is NaN, the program loops
over the keys that this query sees in each of its blocks, 32 a step for 16 heads at a time, and loads no
others.

Where all is finite: reads `4 B T K R` bytes (17 MB at 64k, K = 4, R = 16).
"""

import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Float
from nsa_jax.kernels.triton.launch import launch, named
from nsa_jax.kernels.triton.loading import Rows, load_at, load_rows
from nsa_jax.kernels.triton.nonfinite.branches import (
    AllRanges,
    Branch,
    VisibleKeys,
    arguments_of,
    keys_in_slot,
    of_branch,
)
from nsa_jax.kernels.triton.pieces import LOG2_E, Dim, inner, precision
from nsa_jax.kernels.triton.sizes.nonfinite import RECOMPUTED_HEADS, RECOMPUTED_KEYS, RECOMPUTED_TOKENS
from nsa_jax.kernels.triton.softmax import load_lse


def recompute_probabilities(
    probabilities: Float[Array, "B T K R"],
    lse: Float[Array, "B T N"],
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    visible: VisibleKeys,
    *,
    scale: float,
) -> Float[Array, "B T K R"]:
    """Recomputes in place the slots of queries with NaN, and returns the array; `lse` is right."""
    batch, num_queries, num_kv_heads, slots = probabilities.shape
    (*_, limits, blocks), constants = arguments_of(query, [Branch(key, key, visible)], scale)
    updated, () = launch(
        recompute_probabilities_kernel, query, key, lse, limits, blocks, out=(),
        in_place=dict(probabilities=probabilities),
        grid=(triton.cdiv(num_queries, RECOMPUTED_TOKENS), batch * num_kv_heads), num_stages=1,
        PADDED_SLOTS=triton.next_power_of_2(slots), TOKENS=RECOMPUTED_TOKENS, HEADS=RECOMPUTED_HEADS,
        KEYS=RECOMPUTED_KEYS, PRECISION=precision(query.dtype), num_keys=key.shape[1], **constants,
    )  # fmt: skip
    return updated["probabilities"]


@triton.jit(repr=named("nsa_selected_recompute_probabilities"))
def recompute_probabilities_kernel(
    probabilities, query, key, lse, limits, blocks, num_queries, num_keys,
    BRANCH: tl.constexpr, OF_BLOCKS: tl.constexpr, SLOTS: tl.constexpr, PADDED_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr, KV_HEADS: tl.constexpr, G: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    KEYS: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Recomputes the slots of those of TOKENS queries where one is NaN."""
    DIM: tl.constexpr = Dim(H0, H1)
    queries = (tl.num_programs(1) // KV_HEADS).to(tl.int64) * num_queries
    ranges: tl.constexpr = AllRanges(limits, queries, num_queries, blocks, OF_BLOCKS, SLOTS, BLOCK)
    visible: tl.constexpr = of_branch(ranges, OF_BLOCKS)
    b = (tl.program_id(1) // KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(1) % KV_HEADS
    first_token = tl.program_id(0) * TOKENS
    token = tl.arange(0, TOKENS)
    slots = tl.arange(0, PADDED_SLOTS)
    to = probabilities + ((b * num_queries + first_token) * KV_HEADS + kv_head) * SLOTS
    places = token[:, None] * (KV_HEADS * SLOTS) + slots[None, :]
    inside = (first_token + token < num_queries)[:, None] & (slots < SLOTS)[None, :]
    given = tl.load(to + places, mask=inside, other=0.0)
    wrong = tl.max((given != given).to(tl.int32), 1)
    if tl.max(wrong, 0) == 0:
        return
    for i in range(TOKENS):
        if tl.max(tl.where(token == i, wrong, 0), 0) != 0:
            at = b * num_queries + first_token + i
            found = tl.zeros([PADDED_SLOTS], tl.float32)
            for head in range(0, G, HEADS):
                r = tl.arange(0, HEADS)
                rows = Rows((at * KV_HEADS + kv_head) * G + head, r, head + r < G)
                q = load_rows(query, rows, DIM)
                base = load_lse(lse, rows)
                for slot in range(SLOTS):
                    start, end = keys_in_slot(visible, at, at * KV_HEADS + kv_head, slot, True)
                    for first in range(start, end, KEYS):
                        c = first + tl.arange(0, KEYS)
                        place = (b * num_keys + c) * KV_HEADS + kv_head
                        k = load_at(key, place * (H0 + H1), c < end, DIM)
                        p = tl.exp2(inner(q, k, PRECISION) * (SCALE * LOG2_E) - base[:, None])
                        p = tl.where(rows.inside[:, None] & (c < end)[None, :], p, 0.0)
                        found += tl.where(slots == slot, tl.sum(tl.sum(p, 1), 0), 0.0)
            tl.store(to + i * (KV_HEADS * SLOTS) + slots, found, mask=slots < SLOTS)
