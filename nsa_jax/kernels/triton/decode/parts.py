"""What the kernels of a decode step share: the query rows of a KV head, and softmaxes that come in parts.

A KV head has R query rows: T new tokens times G query heads, `r = token * G + head`. Several programs divide
the keys of a branch, and each stores its part of the softmax. The parts of all branches are in two float32
arrays: `out` `[B, K, PARTS, R, V]`, and the largest logits and totals, `sums` `[B, K, PARTS, 2, R]`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from nsa_jax.kernels.triton.decode.rounding import times
from nsa_jax.kernels.triton.loading import load_at, store_at
from nsa_jax.kernels.triton.pieces import Pieces, add_product, cast, inner, scaled
from nsa_jax.kernels.triton.softmax import LOWEST, Softmax


class NewTokens(NamedTuple):
    """The tokens that a batch row gains in a step: `number`, from `start` on; `fits` if there was room."""

    start: tl.tensor
    number: tl.tensor
    fits: tl.tensor


class QueryRows(NamedTuple):
    """Some query rows of a KV head: number, new token, offset in `[T, N]`, and whether the row exists."""

    number: tl.tensor
    token: tl.tensor
    offset: tl.tensor
    inside: tl.tensor


@triton.jit
def admit(lengths, num_tokens, b, T: tl.constexpr, MAX_LENGTH: tl.constexpr):
    """The new tokens of batch row `b`: all, or none if there is no room for all."""
    start = tl.load(lengths + b)
    if num_tokens is None:
        wanted = T
    else:
        wanted = tl.minimum(tl.maximum(tl.load(num_tokens + b), 0), T)
    fits = start + wanted <= MAX_LENGTH
    return NewTokens(start, tl.where(fits, wanted, 0), fits)


@triton.jit
def store_placed(placed, b, tokens):
    """Stores the `NewTokens` of batch row `b` for the next kernel."""
    tl.store(placed + 3 * b, tokens.start)
    tl.store(placed + 3 * b + 1, tokens.number)
    tl.store(placed + 3 * b + 2, tokens.fits.to(tl.int32))


@triton.jit
def load_placed(placed, b):
    """What `store_placed` stored for batch row `b`."""
    return NewTokens(tl.load(placed + 3 * b), tl.load(placed + 3 * b + 1), tl.load(placed + 3 * b + 2) != 0)


@triton.jit
def num_blocks(length, SIZE: tl.constexpr, STRIDE: tl.constexpr):
    """Number of compression blocks that are complete in a row of this length."""
    return tl.where(length >= SIZE, (length - SIZE) // STRIDE + 1, 0)


@triton.jit
def query_rows(first, ROWS: tl.constexpr, T: tl.constexpr, G: tl.constexpr, KV_HEADS: tl.constexpr):
    """Query rows `first .. first + ROWS - 1` of a KV head."""
    number = first + tl.arange(0, ROWS)
    token = number // G
    return QueryRows(number, token, token * (KV_HEADS * G) + number % G, number < T * G)


@triton.jit
def rows_of_token(token, ROWS: tl.constexpr, G: tl.constexpr, KV_HEADS: tl.constexpr):
    """The query rows of one new token, padded to ROWS."""
    head = tl.arange(0, ROWS)
    return QueryRows(token * G + head, token + head * 0, token * (KV_HEADS * G) + head, head < G)


@triton.jit
def load_query(query, b, kv_head, rows, T: tl.constexpr, G: tl.constexpr, KV_HEADS: tl.constexpr, DIM):
    """Some rows of `query`, which is `[B, T, N, H]`."""
    WIDTH: tl.constexpr = DIM.D0 + DIM.D1
    start = query + (b.to(tl.int64) * (T * KV_HEADS * G) + kv_head * G) * WIDTH
    return load_at(start, rows.offset * WIDTH, rows.inside, DIM)


@triton.jit
def attend(state, q, k, v, scales, seen, scale, PRECISION: tl.constexpr):
    """The state after a tile of keys, and their `exp2(logit - largest)`; all rows see the keys in `seen`.

    Keys and values of a quantised cache have `Scales`.
    """
    if scales.key is not None:
        k = cast(k, q.first.dtype)
    logits = inner(q, k, PRECISION) * scale
    if scales.key is not None:
        logits *= scales.key[None, :]
    logits = tl.where(seen[None, :], logits, float("-inf"))
    top = tl.maximum(state.largest, tl.max(logits, 1))
    p = tl.exp2(logits - top[:, None])
    decay = tl.exp2(state.largest - top)
    out = scaled(state.out, decay[:, None])
    weights = p
    if scales.value is not None:
        if q.first.dtype == tl.float16:  # in which small weights would lose bits
            v = times(v, scales.value, q.first.dtype)
        else:
            v = cast(v, q.first.dtype)
            weights = p * scales.value[None, :]
    out = add_product(weights.to(v.first.dtype), v, out, PRECISION)
    return Softmax(out, top, state.total * decay + tl.sum(p, 1)), p


@triton.jit
def add_value(out, weight, v):
    """`out` plus one value `[1, V]` times its weight, where that is not 0; so an unseen NaN stays out."""
    x0 = out.first + tl.where(weight[:, None] != 0.0, weight[:, None] * v.first.to(tl.float32), 0.0)
    if v.second is None:
        x1 = None
    else:
        x1 = out.second + tl.where(weight[:, None] != 0.0, weight[:, None] * v.second.to(tl.float32), 0.0)
    return Pieces(x0, x1)


@triton.jit
def store_part(out, sums, bk, part, PARTS: tl.constexpr, R: tl.constexpr, rows, state, DIM):
    """Stores a softmax as part number `part` of KV head `bk`, counted over the batch."""
    at = bk.to(tl.int64) * PARTS + part
    tl.store(sums + at * (2 * R) + rows.number, state.largest, mask=rows.inside)
    tl.store(sums + at * (2 * R) + R + rows.number, state.total, mask=rows.inside)
    WIDTH: tl.constexpr = DIM.D0 + DIM.D1
    store_at(out + at * (R * WIDTH), rows.number * WIDTH, state.out, rows.inside, DIM)


class Parts(NamedTuple):
    """The parts of some rows: values `[ROWS * PADDED, D]`, largest logits and totals `[ROWS, PADDED]`."""

    out: Pieces
    largest: tl.tensor
    total: tl.tensor


@triton.jit
def load_parts(out, sums, bk, row, inside, PARTS: tl.constexpr, PADDED: tl.constexpr, R: tl.constexpr, DIM):
    """All parts of the rows that are `inside`; from PARTS on they are empty."""
    part = tl.arange(0, PADDED)
    there = inside[:, None] & (part < PARTS)[None, :]
    at = (bk.to(tl.int64) * PARTS + part)[None, :]
    of_row = tl.reshape(at * R + row[:, None], [row.shape[0] * PADDED])
    x = load_at(out, of_row * (DIM.D0 + DIM.D1), tl.reshape(there, [row.shape[0] * PADDED]), DIM)
    largest = tl.load(sums + at * (2 * R) + row[:, None], mask=there, other=LOWEST)
    total = tl.load(sums + at * (2 * R) + R + row[:, None], mask=there, other=0.0)
    return Parts(x, largest, total)


@triton.jit
def ranks(bits, live, LENGTH: tl.constexpr):
    """The rank of each number: how many are larger, or equal and earlier. From `live` on all must be -1.

    Number and index make one integer, so one comparison decides. The comparisons form a table, of which at
    most 128 rows are held at a time. It is summed along its first axis, so each thread adds its own numbers.
    """
    ROWS: tl.constexpr = LENGTH if LENGTH < 128 else 128
    PIECES: tl.constexpr = LENGTH // ROWS
    x = (bits.to(tl.int64) << 32) - tl.arange(0, LENGTH)
    if PIECES == 1:
        rank = tl.sum((x[:, None] > x[None, :]).to(tl.int32), 0)
    else:
        pieces = tl.reshape(x, [PIECES, ROWS])
        number = tl.arange(0, PIECES)[:, None]
        rank = tl.zeros([LENGTH], tl.int32)
        for i in tl.range(0, tl.cdiv(live, ROWS)):
            piece = tl.sum(tl.where(number == i, pieces, 0), 0)
            rank += tl.sum((piece[:, None] > x[None, :]).to(tl.int32), 0)
    return rank
