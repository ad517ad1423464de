"""Writes the new tokens into the cache; forms the compression blocks they complete (Eq. 7), attends to them.

Runs in the last programs of `first_kernel`, one for each batch row and KV head. The selection arrays and the
rings are updated in place. All new tokens are loaded before anything is stored in the cache: a store might
alias a later load, which would then wait for it.

`compressed` attends only to blocks that were complete before the step. Those that the step completes are a
part of their own here. `second_kernel` writes them into the cache, when no program reads its compressed keys
any more. So these programs and those of `compressed` need not wait for each other, and share a launch. Some
new tokens see a new block and others do not, so only this part needs a mask, for the values too. A program
moves only a few rows, so latency limits it. A cache without a compressed branch gains tokens alone.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from nsa_jax.kernels.triton.decode.forming import (
    mean_of_block,
    turned,
    with_output_layer,
)
from nsa_jax.kernels.triton.decode.parts import (
    add_value,
    load_query,
    num_blocks,
    query_rows,
    store_part,
    store_placed,
)
from nsa_jax.kernels.triton.decode.rounding import Scales, as_kept, store_kept
from nsa_jax.kernels.triton.loading import load_at, store_at
from nsa_jax.kernels.triton.pieces import inner
from nsa_jax.kernels.triton.softmax import LOWEST, Softmax, no_keys


class Appending(NamedTuple):
    """Arrays of the cache, updated in place, and the new tokens.

    Raw keys and values are None without a compressed branch; those of the window without that branch, or if
    it shares those of the selected branch. A quantised cache has scales; new blocks are then attended to as
    they will be kept.
    """

    key_slc: tl.tensor
    value_slc: tl.tensor
    key_raw: tl.tensor | None
    value_raw: tl.tensor | None
    key_win: tl.tensor | None
    value_win: tl.tensor | None
    scales_slc: Scales
    scales_win: Scales
    new_key_cmp: tl.tensor | None
    new_value_cmp: tl.tensor | None
    new_key_slc: tl.tensor
    new_value_slc: tl.tensor
    new_key_win: tl.tensor | None
    new_value_win: tl.tensor | None


class Appended(NamedTuple):
    """What `second_kernel` reads.

    Attributes:
      placed: `[B, 3]`: the `NewTokens` of each batch row.
      key, value: `[B, BLOCKS, K, D]`: the new blocks; only those that the step completes are written.
      logits: `[B, K, R, BLOCKS]` in base 2, -inf where a row does not see the block.
      out, sums: the parts, see `parts`.
      arrivals: `[B, K, T]`, the counters of the teams of `second_kernel`, set to 0.
    """

    placed: tl.tensor
    key: tl.tensor
    value: tl.tensor
    logits: tl.tensor
    out: tl.tensor
    sums: tl.tensor
    arrivals: tl.tensor


class StepDims(NamedTuple):
    """Sizes of a step that are known while tracing.

    Attributes:
      T, G, KV_HEADS: new tokens, query heads of a KV head, KV heads.
      MAX_LENGTH, RAW, RING: tokens of the selection arrays, of the ring of raw tokens, of the window's ring.
      SIZE, STRIDE: of compression blocks, in tokens.
      BLOCKS: compression blocks that the new tokens may complete; 0 without a compressed branch.
      ROWS: query rows that a program attends from at a time.
      PARTS: parts of all branches.
      PAIRS: pairs of dimensions that the rotation turns.
      KEY_UNITS, VALUE_UNITS, HIDDEN_PARTS: hidden units of the MLPs, and parts of their sums.
      KEY, VALUE: `Dim`s.
    """

    T: tl.constexpr
    G: tl.constexpr
    KV_HEADS: tl.constexpr
    MAX_LENGTH: tl.constexpr
    RAW: tl.constexpr
    RING: tl.constexpr
    SIZE: tl.constexpr
    STRIDE: tl.constexpr
    BLOCKS: tl.constexpr
    ROWS: tl.constexpr
    PARTS: tl.constexpr
    PAIRS: tl.constexpr
    KEY_UNITS: tl.constexpr
    VALUE_UNITS: tl.constexpr
    HIDDEN_PARTS: tl.constexpr
    KEY: tl.constexpr
    VALUE: tl.constexpr


@triton.jit
def _form(arrays, forming, found, tokens, b, kv_head, block, j, D):
    """Forms and stores `block`, number `j` of those that the step completes."""
    KEY: tl.constexpr = D.KEY
    VALUE: tl.constexpr = D.VALUE
    H: tl.constexpr = KEY.D0 + KEY.D1
    place = (b * D.BLOCKS + j) * D.KV_HEADS + kv_head
    k = mean_of_block(arrays.key_raw, arrays.new_key_cmp, b, kv_head, tokens, block, KEY, D)
    v = mean_of_block(arrays.value_raw, arrays.new_value_cmp, b, kv_head, tokens, block, VALUE, D)
    if forming.hidden is not None:
        UNITS: tl.constexpr = D.KEY_UNITS + D.VALUE_UNITS
        hidden = forming.hidden + place.to(tl.int64) * (D.HIDDEN_PARTS * UNITS)
        if D.KEY_UNITS > 0:
            k = with_output_layer(k, hidden, forming.key, KEY, D.KEY_UNITS, D.HIDDEN_PARTS, UNITS)
        if D.VALUE_UNITS > 0:
            hidden += D.KEY_UNITS
            v = with_output_layer(v, hidden, forming.value, VALUE, D.VALUE_UNITS, D.HIDDEN_PARTS, UNITS)
    one = tl.zeros([1], tl.int32) + place
    store_at(found.key, one * H, k, one >= 0, KEY)
    store_at(found.value, one * (VALUE.D0 + VALUE.D1), v, one >= 0, VALUE)
    if forming.turning.ticks is not None:
        tl.debug_barrier()
        k = turned(found.key + place * H, block * D.STRIDE, forming.turning, KEY, D.PAIRS)
        tl.debug_barrier()
        store_at(found.key, one * H, k, one >= 0, KEY)


@triton.jit
def append_row(arrays, forming, found, query, tokens, bk, part, scale, D, PRECISION: tl.constexpr):
    """Appends to KV head `bk`, counted over the batch; forms its new blocks and attends to them: a `part`."""
    b = bk // D.KV_HEADS
    kv_head = bk % D.KV_HEADS
    KEY: tl.constexpr = D.KEY
    VALUE: tl.constexpr = D.VALUE
    H: tl.constexpr = KEY.D0 + KEY.D1
    V: tl.constexpr = VALUE.D0 + VALUE.D1
    R: tl.constexpr = D.T * D.G
    ATTENDING: tl.constexpr = R if D.BLOCKS > 0 else 0
    PADDED_T: tl.constexpr = triton.next_power_of_2(D.T)
    PADDED_BLOCKS: tl.constexpr = triton.next_power_of_2(D.BLOCKS) if D.BLOCKS > 16 else 16
    if kv_head == 0:
        store_placed(found.placed, b, tokens)
    i = tl.arange(0, PADDED_T)
    tl.store(found.arrivals + bk * D.T + i, 0, mask=i < D.T)
    new = i < tokens.number
    source = (b * D.T + i) * D.KV_HEADS + kv_head
    k_slc = load_at(arrays.new_key_slc, source * H, new, KEY)
    v_slc = load_at(arrays.new_value_slc, source * V, new, VALUE)
    if D.BLOCKS > 0:
        k_raw = load_at(arrays.new_key_cmp, source * H, new, KEY)
        v_raw = load_at(arrays.new_value_cmp, source * V, new, VALUE)
    if arrays.key_win is not None:
        k_win = load_at(arrays.new_key_win, source * H, new, KEY)
        v_win = load_at(arrays.new_value_win, source * V, new, VALUE)

    if D.BLOCKS > 0:
        # The blocks that end in these tokens. Their older tokens are in ring slots that these do not take.
        before = num_blocks(tokens.start, D.SIZE, D.STRIDE)
        after = num_blocks(tokens.start + tokens.number, D.SIZE, D.STRIDE)
        c = tl.arange(0, PADDED_BLOCKS)
        complete = (c < D.BLOCKS) & (before + c < after)
        place = (b * D.BLOCKS + c) * D.KV_HEADS + kv_head
        if forming.given_key is None:
            for j in tl.range(0, after - before):
                _form(arrays, forming, found, tokens, b, kv_head, before + j, j, D)
        else:
            k = load_at(forming.given_key, place * H, complete, KEY)
            v = load_at(forming.given_value, place * V, complete, VALUE)
            store_at(found.key, place * H, k, complete, KEY)
            store_at(found.value, place * V, v, complete, VALUE)
        tl.debug_barrier()
        k = load_at(found.key, place * H, complete, KEY)
        k = as_kept(k, arrays.scales_slc.key, arrays.key_slc, k.first.dtype)

    row = (b.to(tl.int64) * D.MAX_LENGTH + tokens.start) * D.KV_HEADS + kv_head
    scales = arrays.scales_slc
    store_kept(arrays.key_slc, scales.key, row, i * D.KV_HEADS, k_slc, new, H, KEY)
    store_kept(arrays.value_slc, scales.value, row, i * D.KV_HEADS, v_slc, new, V, VALUE)
    if D.BLOCKS > 0:
        slot = (b.to(tl.int64) * D.RAW + (tokens.start + i) % D.RAW) * D.KV_HEADS + kv_head
        store_at(arrays.key_raw, slot * H, k_raw, new, KEY)
        store_at(arrays.value_raw, slot * V, v_raw, new, VALUE)
    if arrays.key_win is not None:
        slot = (b.to(tl.int64) * D.RING + (tokens.start + i) % D.RING) * D.KV_HEADS + kv_head
        scales = arrays.scales_win
        store_kept(arrays.key_win, scales.key, 0, slot, k_win, new, H, KEY)
        store_kept(arrays.value_win, scales.value, 0, slot, v_win, new, V, VALUE)

    for first in tl.static_range(0, ATTENDING, D.ROWS):
        rows = query_rows(first, D.ROWS, D.T, D.G, D.KV_HEADS)
        q = load_query(query, b, kv_head, rows, D.T, D.G, D.KV_HEADS, KEY)
        ends = num_blocks(tokens.start + rows.token + 1, D.SIZE, D.STRIDE)
        seen = complete[None, :] & (before + c[None, :] < ends[:, None])
        logits = tl.where(seen, inner(q, k, PRECISION) * scale, float("-inf"))
        top = tl.maximum(tl.max(logits, 1), LOWEST)
        p = tl.exp2(logits - top[:, None])
        x = no_keys(D.ROWS, VALUE).out
        for j in tl.static_range(D.BLOCKS):
            one = tl.zeros([1], tl.int32) + ((b * D.BLOCKS + j) * D.KV_HEADS + kv_head)
            v = load_at(found.value, one * V, (before + j < after) & (one >= 0), VALUE)
            v = as_kept(v, arrays.scales_slc.value, arrays.value_slc, v.first.dtype)
            x = add_value(x, tl.sum(tl.where(c[None, :] == j, p, 0.0), 1), v)
        store_part(found.out, found.sums, bk, part, D.PARTS, R, rows, Softmax(x, top, tl.sum(p, 1)), VALUE)
        at = (bk * R + rows.number)[:, None] * D.BLOCKS + c[None, :]
        tl.store(found.logits + at, logits, mask=rows.inside[:, None] & (c < D.BLOCKS)[None, :])
