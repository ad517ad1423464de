"""The decode step of a dense or window layer: attention to the cache in parts, and the sum of the parts.

Grid of `dense_kernel`: x = batch rows times KV heads times groups of query rows, which append; then PARTS
times as many, which attend to the old tokens. A group is one tile of the KV head's query rows (new tokens
times query heads); one tile usually holds all, and then each key is read once. The tiles that the row's
*current* length fills are divided among the parts, so a long cache that is nearly empty costs nothing. Grid
of `dense_merge_kernel`: x = batch rows times new tokens times query heads.

The programs that append the new tokens also attend to them, as a part of their own, and take them from the
operands, so no program waits for what they write. In a ring their part also has the T - 1 old tokens at the
edge of the window, which the first new tokens see and the last do not. So only this part needs a mask, for
the values too: all rows see all other old tokens.

Bytes: `S (H + V)` numbers a row and KV head. With 4 KV heads of 128/128 in bfloat16, at 64k tokens, that is
0.134, 1.07 and 4.29 GB for 1, 8 and 32 rows: 32, 256 and 1023 us at 4.2 TB/s. A program holds the sums of at
least 16 rows in registers, and STAGES - 1 tiles of `TILE (H + V)` numbers in shared memory (STAGES where
wgmma multiplies 64 rows). With 16 rows an H100 multiprocessor has room for four programs of two stages
(38912 bytes, 108 registers) or for three of three stages (71680 bytes, 140 registers).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from nsa_jax.kernels.triton.decode.pairs import cut_query, joined_sums, load_kept_tile, no_sums
from nsa_jax.kernels.triton.decode.parts import (
    add_value,
    admit,
    attend,
    load_parts,
    load_placed,
    load_query,
    query_rows,
    store_part,
    store_placed,
)
from nsa_jax.kernels.triton.decode.rounding import Scales, as_kept, load_scales, store_kept, times
from nsa_jax.kernels.triton.launch import named
from nsa_jax.kernels.triton.loading import load_at
from nsa_jax.kernels.triton.pieces import Dim, Pieces, inner
from nsa_jax.kernels.triton.softmax import LOWEST, Softmax, no_keys


class Held(NamedTuple):
    """Keys and values of the cache with their scales, updated in place, and those of the new tokens."""

    key: tl.tensor
    value: tl.tensor
    scales: Scales
    new_key: tl.tensor
    new_value: tl.tensor


class Kept(NamedTuple):
    """An array of the cache, and its scales, which are None if it is not quantised."""

    array: tl.tensor
    scales: tl.tensor | None


class DenseDims(NamedTuple):
    """Sizes of a step that are known while tracing.

    Attributes:
      T, G, KV_HEADS: new tokens, query heads of a KV head, KV heads.
      SIZE: slots of a row; token `s` lies in slot `s mod SIZE`.
      WINDOW: tokens that a query sees, if the cache is a ring; 0 if a query sees all.
      PARTS: parts of a row's old tokens; the new ones are one more part.
      TILE: keys of a step of the loop.
      ROWS: query rows of a program.
      STAGES: stages of the loop: the loads of STAGES - 1 tiles are in flight.
      KEY, VALUE: `Dim`s.
    """

    T: tl.constexpr
    G: tl.constexpr
    KV_HEADS: tl.constexpr
    SIZE: tl.constexpr
    WINDOW: tl.constexpr
    PARTS: tl.constexpr
    TILE: tl.constexpr
    ROWS: tl.constexpr
    STAGES: tl.constexpr
    KEY: tl.constexpr
    VALUE: tl.constexpr


@triton.jit
def _together(x, y):
    """The sum of two tiles; in each row at least one of them is 0."""
    if x.second is None:
        z = Pieces(x.first + y.first, None)
    else:
        z = Pieces(x.first + y.first, x.second + y.second)
    return z


@triton.jit
def _load_new(new, kept, b, kv_head, token, column, is_new, at_edge, D, DIM):
    """The tokens of some columns: the first T columns are new tokens, the others are old ones in the ring.

    In a quantised cache the new ones are as it will keep them.
    """
    WIDTH: tl.constexpr = DIM.D0 + DIM.D1
    x = load_at(new, ((b * D.T + column) * D.KV_HEADS + kv_head) * WIDTH, is_new, DIM)
    x = as_kept(x, kept.scales, kept.array, x.first.dtype)
    if D.WINDOW > 0:
        slot = tl.where(at_edge, token, 0) % D.SIZE
        row = (b.to(tl.int64) * D.SIZE + slot) * D.KV_HEADS + kv_head
        y = load_at(kept.array, row * WIDTH, at_edge, DIM)
        if kept.scales is not None:
            y = times(y, tl.load(kept.scales + row, mask=at_edge, other=0.0), x.first.dtype)
        x = _together(x, y)
    return x


@triton.jit
def _attend_new(held, query, found, tokens, bk, group, scale, D, PRECISION: tl.constexpr):
    """Appends the new tokens to KV head `bk`; attends from a group of rows to them and the window's edge."""
    b = bk // D.KV_HEADS
    kv_head = bk % D.KV_HEADS
    KEY: tl.constexpr = D.KEY
    VALUE: tl.constexpr = D.VALUE
    H: tl.constexpr = KEY.D0 + KEY.D1
    V: tl.constexpr = VALUE.D0 + VALUE.D1
    COLUMNS: tl.constexpr = 2 * D.T - 1 if D.WINDOW > 0 else D.T
    PADDED: tl.constexpr = triton.next_power_of_2(COLUMNS) if COLUMNS > 16 else 16
    c = tl.arange(0, PADDED)
    is_new = c < tokens.number
    token = tl.where(c < D.T, tokens.start + c, tokens.start - D.WINDOW + 1 + c - D.T)
    at_edge = (c >= D.T) & (c < COLUMNS) & (token >= 0) & (token < tokens.start) & (tokens.number > 0)
    scales = held.scales
    keys: tl.constexpr = Kept(held.key, scales.key)
    values: tl.constexpr = Kept(held.value, scales.value)
    k = _load_new(held.new_key, keys, b, kv_head, token, c, is_new, at_edge, D, KEY)
    new_v = load_at(held.new_value, ((b * D.T + c) * D.KV_HEADS + kv_head) * V, is_new, VALUE)

    rows = query_rows(group * D.ROWS, D.ROWS, D.T, D.G, D.KV_HEADS)
    q = load_query(query, b, kv_head, rows, D.T, D.G, D.KV_HEADS, KEY)
    at = (tokens.start + rows.token)[:, None]
    seen = (is_new | at_edge)[None, :] & (token[None, :] <= at)
    if D.WINDOW > 0:
        seen &= token[None, :] > at - D.WINDOW
    logits = tl.where(seen, inner(q, k, PRECISION) * scale, float("-inf"))
    top = tl.maximum(tl.max(logits, 1), LOWEST)
    p = tl.exp2(logits - top[:, None])
    x = no_keys(D.ROWS, VALUE).out
    for j in tl.static_range(COLUMNS):
        one = tl.full([1], j, tl.int32)
        its_token = tl.sum(tl.where(c == j, token, 0), 0)
        new = (one < D.T) & (one < tokens.number)
        edge = tl.sum(tl.where(c == j, at_edge.to(tl.int32), 0), 0) + tl.zeros([1], tl.int32) > 0
        v = _load_new(held.new_value, values, b, kv_head, its_token, one, new, edge, D, VALUE)
        x = add_value(x, tl.sum(tl.where(c[None, :] == j, p, 0.0), 1), v)
    state = Softmax(x, top, tl.sum(p, 1))
    store_part(found.out, found.sums, bk, D.PARTS, D.PARTS + 1, D.T * D.G, rows, state, VALUE)

    written = is_new & (group == 0)
    slot = (b.to(tl.int64) * D.SIZE + (tokens.start + c) % D.SIZE) * D.KV_HEADS + kv_head
    if scales.key is not None:  # what is rounded already must not be rounded again
        k = load_at(held.new_key, ((b * D.T + c) * D.KV_HEADS + kv_head) * H, is_new, KEY)
    store_kept(held.key, scales.key, 0, slot, k, written, H, KEY)
    store_kept(held.value, scales.value, 0, slot, new_v, written, V, VALUE)
    if (group == 0) & (kv_head == 0):
        store_placed(found.placed, b, tokens)


@triton.jit
def _attend_old(held, query, found, tokens, bk, group, part, scale, D, PRECISION: tl.constexpr):
    """Attends from a group of rows to one part of the old tokens, which all rows see."""
    b = bk // D.KV_HEADS
    kv_head = bk % D.KV_HEADS
    KEY: tl.constexpr = D.KEY
    VALUE: tl.constexpr = D.VALUE
    KEY_ROW: tl.constexpr = D.KV_HEADS * (KEY.D0 + KEY.D1)
    VALUE_ROW: tl.constexpr = D.KV_HEADS * (VALUE.D0 + VALUE.D1)
    rows = query_rows(group * D.ROWS, D.ROWS, D.T, D.G, D.KV_HEADS)
    q = load_query(query, b, kv_head, rows, D.T, D.G, D.KV_HEADS, KEY)
    q = cut_query(q, held.scales.key, KEY)
    if D.WINDOW > 0:
        oldest = tl.maximum(tokens.start - D.WINDOW + D.T, 0)
    else:
        oldest = 0
    count = tl.where(tokens.number > 0, tl.maximum(tokens.start - oldest, 0), 0)
    tiles = tl.cdiv(count, D.TILE)
    keys = held.key + b.to(tl.int64) * (D.SIZE * KEY_ROW) + kv_head * (KEY.D0 + KEY.D1)
    values = held.value + b.to(tl.int64) * (D.SIZE * VALUE_ROW) + kv_head * (VALUE.D0 + VALUE.D1)
    i = tl.arange(0, D.TILE)
    state = no_sums(D.ROWS, held.scales.value, VALUE)
    for tile in tl.range(part * tiles // D.PARTS, (part + 1) * tiles // D.PARTS, num_stages=D.STAGES):
        first = tile * D.TILE
        seen = first + i < count
        head = b.to(tl.int64) * (D.SIZE * D.KV_HEADS) + kv_head
        if D.WINDOW > 0:
            slot = ((oldest + first + i) % D.SIZE).to(tl.int64)
            k = load_kept_tile(keys, slot, held.scales.key, seen, KEY_ROW, KEY, q.first.dtype)
            v = load_kept_tile(values, slot, held.scales.value, seen, VALUE_ROW, VALUE, q.first.dtype)
            scales = load_scales(held.scales, head, slot * D.KV_HEADS, seen)
        else:
            tile_of_keys = keys + first.to(tl.int64) * KEY_ROW
            k = load_kept_tile(tile_of_keys, i, held.scales.key, seen, KEY_ROW, KEY, q.first.dtype)
            tile_of_values = values + first.to(tl.int64) * VALUE_ROW
            v = load_kept_tile(tile_of_values, i, held.scales.value, seen, VALUE_ROW, VALUE, q.first.dtype)
            head += first.to(tl.int64) * D.KV_HEADS
            scales = load_scales(held.scales, head, i * D.KV_HEADS, seen)
        state, _ = attend(state, q, k, v, scales, seen, scale, PRECISION)
    state = joined_sums(state, held.scales.value, VALUE)
    store_part(found.out, found.sums, bk, part, D.PARTS + 1, D.T * D.G, rows, state, VALUE)


class Found(NamedTuple):
    """What the merge reads: `placed` `[B, 3]`, the `NewTokens` of each row; and the parts, see `parts`."""

    placed: tl.tensor
    out: tl.tensor
    sums: tl.tensor


@triton.jit(repr=named("nsa_step_dense"))
def dense_kernel(
    key, value, key_scale, value_scale,
    lengths, num_tokens, new_key, new_value, query,
    placed, out, sums,
    scale, batch, max_length, D: tl.constexpr, GROUPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One part of a batch row and KV head, for one group of query rows. In place: keys and values."""
    held = Held(key, value, Scales(key_scale, value_scale), new_key, new_value)
    found = Found(placed, out, sums)
    group = tl.program_id(0) % GROUPS
    bk = tl.program_id(0) // GROUPS % (batch * D.KV_HEADS)
    turn = tl.program_id(0) // (GROUPS * batch * D.KV_HEADS)
    tokens = admit(lengths, num_tokens, bk // D.KV_HEADS, D.T, max_length)
    if turn == 0:
        _attend_new(held, query, found, tokens, bk, group, scale, D, PRECISION)
    else:
        _attend_old(held, query, found, tokens, bk, group, turn - 1, scale, D, PRECISION)


@triton.jit(repr=named("nsa_step_dense_merge"))
def dense_merge_kernel(
    lengths, overflowed,
    placed, parts, sums,
    out,
    T: tl.constexpr, G: tl.constexpr, KV_HEADS: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr,
    V0: tl.constexpr, V1: tl.constexpr,
):  # fmt: skip
    """`out` `[B, T, N, V]`; 0 for a token that was not appended. In place: lengths and overflows."""
    head = tl.program_id(0) % (KV_HEADS * G)
    token = tl.program_id(0) // (KV_HEADS * G) % T
    b = tl.program_id(0) // (KV_HEADS * G * T)
    tokens = load_placed(placed, b)
    VALUE: tl.constexpr = Dim(V0, V1)
    row = token * G + head % G
    one = tl.zeros([1], tl.int32) + row
    own = load_parts(parts, sums, b * KV_HEADS + head // G, one, one >= 0, PARTS, PADDED, T * G, VALUE)
    largest = tl.reshape(own.largest, [PADDED])
    weight = tl.exp2(largest - tl.max(largest, 0))
    total = tl.sum(tl.reshape(own.total, [PADDED]) * weight, 0)
    weight *= 1.0 / tl.where(total == 0.0, 1.0, total)
    exists = token < tokens.number
    to = out + tl.program_id(0).to(tl.int64) * (V0 + V1)
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(
        to + tl.arange(0, V0), tl.where(exists, tl.sum(own.out.first * weight[:, None], 0), 0.0).to(dtype)
    )
    if V1 > 0:
        tl.store(
            to + V0 + tl.arange(0, V1),
            tl.where(exists, tl.sum(own.out.second * weight[:, None], 0), 0.0).to(dtype),
        )
    if (head == 0) & (token == 0):
        tl.store(lengths + b, tokens.start + tokens.number)
        tl.store(overflowed + b, True, mask=tokens.fits == 0)
