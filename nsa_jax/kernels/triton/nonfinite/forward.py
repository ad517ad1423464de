"""Recomputes outputs and log-sum-exps that are not finite, query by query.

grid = (ceil(T / 32), B K): one program for 32 queries of a KV head. In the main kernels, a value that is not
finite makes its column NaN in all rows of the tiles that read it. In the selected branch, a key that is not
finite makes whole rows NaN, with their log-sum-exps. So it is enough to read the output of the KV head's
first query head and, for blocks, the log-sum-exps of all heads. For each query with a bad number, the program
loops over the keys that it sees, 32 a step for 16 heads at a time; it loads no others.

Of three branches it reads the gated sum alone: a number that is not finite in one of them makes the sum so,
whatever the gates are. Then the query is attended again in all three.

Where all is finite: reads `B T K V itemsize` bytes (67 MB at 64k, K = 4, V = 128; 25 us measured), and for
blocks `4 B T N` of log-sum-exps.
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
    MOST_BRANCHES,
    AllRanges,
    Branch,
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
    cast,
    inner,
    nonfinite_rows,
    precision,
    scaled,
    zeros,
)
from nsa_jax.kernels.triton.sizes import RECOMPUTED_HEADS, RECOMPUTED_KEYS, RECOMPUTED_TOKENS
from nsa_jax.kernels.triton.softmax import Softmax, natural_lse, no_keys


class Outputs(NamedTuple):
    """What the forward of one or three branches wrote.

    Attributes:
      outs: output of each branch. Of three, None where only the sum is wanted.
      lse: log-sum-exps of the branch with blocks; None where none has any, since those of ranges are always
        right.
      total: gated sum of three branches; None for one.
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
        recompute_forward_kernel, query, gates, *operands, out=(), in_place=held,
        grid=(triton.cdiv(num_queries, RECOMPUTED_TOKENS), batch * num_kv_heads), num_stages=1,
        PADDED_G=padded_heads(num_heads // num_kv_heads), TOKENS=RECOMPUTED_TOKENS, HEADS=RECOMPUTED_HEADS,
        KEYS=RECOMPUTED_KEYS, PRECISION=precision(query.dtype), **key_counts(branches), **constants,
    )  # fmt: skip
    outs = tuple(updated[f"out{i}"] for i in range(len(found.outs)))
    return Outputs(outs, updated["lse"], updated["total"])


class _Query(NamedTuple):
    """Some heads of a query that is attended again.

    Attributes:
      q: their rows.
      rows: where they lie in `[B T N, _]`.
      at: `b T + t`.
      b, kv_head: row of the batch, and KV head.
    """

    q: Pieces
    rows: Rows
    at: tl.tensor
    b: tl.tensor
    kv_head: tl.tensor


@triton.jit
def _add_values(state, logits, v, PRECISION: tl.constexpr):
    """Adds keys to the state, given their logits in base 2 and their values."""
    top = tl.maximum(state.largest, tl.max(logits, 1))
    p = tl.exp2(logits - top[:, None])
    decay = tl.exp2(state.largest - top)
    out = add_product(p.to(v.first.dtype), v, scaled(state.out, decay[:, None]), PRECISION)
    return Softmax(out, top, state.total * decay + tl.sum(p, 1))


@triton.jit
def _attend_again(
    total, query, out, lse, gates, key, value, num_keys, ranges, BRANCH: tl.constexpr,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, KEY, VALUE, SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Stores what branch number BRANCH gives, and adds it to the gated sum; one without keys gives 0."""
    rows = query.rows
    result = zeros(HEADS, VALUE)
    if key is not None:
        visible: tl.constexpr = of_branch(ranges, BRANCH)
        state = no_keys(HEADS, VALUE)
        number = 0
        for slot in range(visible.SLOTS):
            start, end = keys_in_slot(visible, query.at, query.at * KV_HEADS + query.kv_head, slot, True)
            number += tl.maximum(end - start, 0)
            for first in range(start, end, KEYS):
                c = first + tl.arange(0, KEYS)
                place = (query.b * num_keys + c) * KV_HEADS + query.kv_head
                k = load_at(key, place * (KEY.D0 + KEY.D1), c < end, KEY)
                v = load_at(value, place * (VALUE.D0 + VALUE.D1), c < end, VALUE)
                logits = inner(query.q, k, PRECISION) * (SCALE * LOG2_E)
                logits = tl.where((c < end)[None, :], logits, float("-inf"))
                state = _add_values(state, logits, v, PRECISION)
        some = number > 0
        if ranges.OF_BLOCKS == BRANCH:
            tl.store(lse + rows.first + rows.offset, natural_lse(state, some), mask=rows.inside)
        part = tl.where(some, 1 / tl.where(some, state.total, 1.0), 0.0)
        result = scaled(state.out, part[:, None])
        if out is not None:
            store_rows(out, rows, result, VALUE)
    if gates is not None:
        gate = tl.load(gates + (rows.first + rows.offset) * 3 + BRANCH, mask=rows.inside, other=0.0)
        rounded = cast(result, query.q.first.dtype)  # as if it had been stored
        total = added(total, scaled(rounded, gate.to(tl.float32)[:, None]))
    return total


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
    KEY: tl.constexpr = Dim(H0, H1)
    VALUE: tl.constexpr = Dim(V0, V1)
    b = (tl.program_id(1) // KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(1) % KV_HEADS
    first_token = tl.program_id(0) * TOKENS
    firsts = first_heads(first_token, num_queries, KV_HEADS, G, TOKENS)
    searched = out0 if total is None else total
    nonfinite = nonfinite_rows(load_rows(searched, firsts, VALUE))
    if blocks is not None:
        nonfinite = nonfinite | nonfinite_heads(lse, firsts, 1, G, PADDED_G)
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
                again = _Query(load_rows(query, rows, KEY), rows, at, b, kv_head)
                result = _attend_again(
                    zeros(HEADS, VALUE), again, out0, lse, gates, key0, value0, num_keys0, ranges, 0,
                    KV_HEADS, HEADS, KEYS, KEY, VALUE, SCALE, PRECISION,
                )  # fmt: skip
                if total is not None:
                    result = _attend_again(
                        result, again, out1, lse, gates, key1, value1, num_keys1, ranges, 1,
                        KV_HEADS, HEADS, KEYS, KEY, VALUE, SCALE, PRECISION,
                    )  # fmt: skip
                    result = _attend_again(
                        result, again, out2, lse, gates, key2, value2, num_keys2, ranges, 2,
                        KV_HEADS, HEADS, KEYS, KEY, VALUE, SCALE, PRECISION,
                    )  # fmt: skip
                    store_rows(total, rows, result, VALUE)
