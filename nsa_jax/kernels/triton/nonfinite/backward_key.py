"""Recomputes gradients of keys and values that are not finite, key by key.

grid = (ceil(S / 64), B K): one program reads the gradients of 64 keys. They are ceil(S / 64) apart, so that
neighbouring bad keys go to different programs. For each key whose gradients are not all finite it loops over
the queries, 32 tokens and one head a step, and loads the rows of those that see the key. It stops as soon as
no number of the gradients is finite, because further terms cannot change that.

Why each branch alone: one search of three takes as long, since all must be read, and the gradients of the
first branch would wait for those of the last. Several devices send them meanwhile.

Where all is finite: reads `B S K (H + V) itemsize` bytes (134 MB at 64k, K = 4, 128/128; 37 us measured).
"""

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Float
from nsa_jax.kernels.triton.launch import launch, named
from nsa_jax.kernels.triton.loading import Rows, load_rows, store_rows
from nsa_jax.kernels.triton.nonfinite.branches import (
    AllRanges,
    Branch,
    BranchArrays,
    RowArrays,
    Saved,
    arguments_of,
    keys_in_slot,
    of_branch,
)
from nsa_jax.kernels.triton.pieces import (
    LOG2_E,
    Dim,
    KeyGradients,
    Pieces,
    nonfinite_rows,
    row_products,
    scaled,
    zeros,
)
from nsa_jax.kernels.triton.sizes.nonfinite import RECOMPUTED_KEYS_OF_A_PROGRAM, RECOMPUTED_TOKENS
from nsa_jax.kernels.triton.softmax import load_lse


def recompute_key_gradients(
    d_key: Float[Array, "B S K H"],
    d_value: Float[Array, "B S K V"],
    query: Float[Array, "B T N H"],
    branches: Sequence[Branch],
    saved: Saved,
    *,
    which: int,
    scale: float,
) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K V"]]:
    """Recomputes in place what is not finite in the gradients of branch number `which`, and returns them.

    `saved` is of this branch alone, with the gates of all.
    """
    (batch, num_keys, num_kv_heads, _), branch = d_key.shape, branches[which]
    if num_keys == 0:
        return d_key, d_value
    (*_, limits, blocks), constants = arguments_of(query, branches, scale)
    updated, () = launch(
        recompute_key_gradients_kernel, query, branch.key, branch.value, limits, blocks,
        saved.lse[0], saved.delta[0], saved.d_out, saved.gates,
        out=(), in_place=dict(d_key=d_key, d_value=d_value),
        grid=(triton.cdiv(num_keys, RECOMPUTED_KEYS_OF_A_PROGRAM), batch * num_kv_heads), num_stages=1,
        KEYS=RECOMPUTED_KEYS_OF_A_PROGRAM, TOKENS=RECOMPUTED_TOKENS, num_keys=num_keys, WHICH=which,
        **(constants | dict(BRANCH=branch.visible.branch)),
    )  # fmt: skip
    return updated["d_key"], updated["d_value"]


class _Options(NamedTuple):
    """KV heads, query heads of one, tokens of a step, `Dim`s, and the scale."""

    KV_HEADS: tl.constexpr
    G: tl.constexpr
    TOKENS: tl.constexpr
    KEY: tl.constexpr
    VALUE: tl.constexpr
    SCALE: tl.constexpr


@triton.jit
def _add_column_sums(total, weights, x):
    """`total + sum of weights x` over the rows of x."""
    first = total.first + tl.sum(weights[:, None] * x.first.to(tl.float32), 0)[None, :]
    if x.second is None:
        second = None
    else:
        second = total.second + tl.sum(weights[:, None] * x.second.to(tl.float32), 0)[None, :]
    return Pieces(first, second)


@triton.jit
def _add_rows(sums, k, v, arrays, rows, WHICH: tl.constexpr, OPTIONS):
    """Adds what some rows contribute to the gradients of one key of branch number WHICH."""
    at = rows.first + rows.offset
    q = load_rows(arrays.query, rows, OPTIONS.KEY)
    d_out = load_rows(arrays.d_out, rows, OPTIONS.VALUE)
    p = tl.exp2(row_products(q, k) * (OPTIONS.SCALE * LOG2_E) - load_lse(arrays.lse, rows))
    dp = row_products(d_out, v)
    weighted = p
    if arrays.gates is not None:
        gate = tl.load(arrays.gates + at * 3 + WHICH, mask=rows.inside, other=0.0).to(tl.float32)
        weighted = p * gate
        dp = dp * gate
    shift = tl.load(arrays.delta + at, mask=rows.inside, other=0.0)
    ds = tl.where(rows.inside, p * (dp - shift), 0.0)
    dk = _add_column_sums(sums.dk, ds, q)
    return KeyGradients(dk, _add_column_sums(sums.dv, tl.where(rows.inside, weighted, 0.0), d_out))


@triton.jit
def _some_finite(x):
    """Whether any number of the row `[1, _]` is finite: 1 or 0."""
    some = tl.max((x.first * 0.0 == 0.0).to(tl.int32))
    if x.second is not None:
        some = some | tl.max((x.second * 0.0 == 0.0).to(tl.int32))
    return some


@triton.jit
def _recompute_key(
    column, b, kv_head, d_key, d_value, keys, arrays, ranges, WHICH: tl.constexpr, OPTIONS
):  # fmt: skip
    """Stores the gradients of one key of branch number WHICH and of its value."""
    KV_HEADS: tl.constexpr = OPTIONS.KV_HEADS
    num_queries = ranges.num_queries
    visible: tl.constexpr = of_branch(ranges, WHICH)
    one = tl.arange(0, 1)
    this = Rows((b * keys.num_keys + column) * KV_HEADS + kv_head, one, one == 0)
    k = load_rows(keys.key, this, OPTIONS.KEY)
    v = load_rows(keys.value, this, OPTIONS.VALUE)
    sums = KeyGradients(zeros(1, OPTIONS.KEY), zeros(1, OPTIONS.VALUE))
    first = 0
    more = 1
    while (first < num_queries) & (more != 0):
        token = first + tl.arange(0, OPTIONS.TOKENS)
        sees = token < 0
        for slot in range(visible.SLOTS):
            at = b * num_queries + token
            start, end = keys_in_slot(visible, at, at * KV_HEADS + kv_head, slot, token < num_queries)
            sees = sees | ((start <= column) & (column < end))
        if tl.max(sees.to(tl.int32), 0) != 0:
            for head in range(OPTIONS.G):
                row = (b * num_queries + first) * (KV_HEADS * OPTIONS.G) + kv_head * OPTIONS.G + head
                rows = Rows(row, tl.arange(0, OPTIONS.TOKENS) * (KV_HEADS * OPTIONS.G), sees)
                sums = _add_rows(sums, k, v, arrays, rows, WHICH, OPTIONS)
            more = _some_finite(sums.dk) | _some_finite(sums.dv)
        first += OPTIONS.TOKENS
    store_rows(d_key, this, scaled(sums.dk, OPTIONS.SCALE), OPTIONS.KEY)
    store_rows(d_value, this, sums.dv, OPTIONS.VALUE)


@triton.jit(repr=named("nsa_{BRANCH}_recompute_key_gradients"))
def recompute_key_gradients_kernel(
    d_key, d_value, query, key, value, limits, blocks, lse, delta, d_out, gates, num_queries, num_keys,
    BRANCH: tl.constexpr, WHICH: tl.constexpr, OF_BLOCKS: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK: tl.constexpr, KV_HEADS: tl.constexpr, G: tl.constexpr, KEYS: tl.constexpr, TOKENS: tl.constexpr,
    H0: tl.constexpr, H1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Recomputes the gradients of those of KEYS keys where some number is not finite."""
    OPTIONS: tl.constexpr = _Options(KV_HEADS, G, TOKENS, Dim(H0, H1), Dim(V0, V1), SCALE)
    b = (tl.program_id(1) // KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(1) % KV_HEADS
    apart = tl.num_programs(0)
    c = tl.arange(0, KEYS)
    first_row = (b * num_keys + tl.program_id(0)) * KV_HEADS + kv_head
    mine = Rows(first_row, c.to(tl.int64) * apart * KV_HEADS, tl.program_id(0) + c * apart < num_keys)
    wrong = nonfinite_rows(load_rows(d_key, mine, OPTIONS.KEY))
    wrong = wrong | nonfinite_rows(load_rows(d_value, mine, OPTIONS.VALUE))
    if tl.max(wrong.to(tl.int32), 0) == 0:
        return
    keys: tl.constexpr = BranchArrays(key, value, num_keys)
    arrays: tl.constexpr = RowArrays(query, d_out, lse, delta, gates)
    queries = (tl.num_programs(1) // KV_HEADS).to(tl.int64) * num_queries
    ranges: tl.constexpr = AllRanges(limits, queries, num_queries, blocks, OF_BLOCKS, SLOTS, BLOCK)
    for i in range(KEYS):
        if tl.max((wrong & (c == i)).to(tl.int32), 0) != 0:
            column = tl.program_id(0) + i * apart
            _recompute_key(column, b, kv_head, d_key, d_value, keys, arrays, ranges, WHICH, OPTIONS)
