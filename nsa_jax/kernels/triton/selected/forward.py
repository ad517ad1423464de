"""Selected attention forward: a tile of neighbouring queries loops over the union of their blocks.

Source: Eq. 12. grid = (ceil(T / tokens), B K): one program per `tokens` neighbouring queries times the query
heads of a KV head, `rows` rows in all (4 tokens x 16 heads = 64: one wgmma). It loads the keys and values of
a block once for all of them. Rows of a query that did not choose the block get a bias of -inf, one number a
row.

Why this order: only blocks that reach beyond a query of the tile need the causal mask. Mostly that is the
block in which the tile lies, so they come last in the list. With `peel` the very last step runs before the
loops, which frees registers; then come the steps without the mask, then the others. The masked loop is left
out where each tile is known to lie in one block and a block is one step. The programs of a KV head run one
after the other, so its keys and values stay in L2.

Registers: `rows (keys + V) / 128` floats a thread at 4 warps (96 at 64 rows, 64 keys, V = 128). Shared
memory: `(rows H + keys max(H, V)) itemsize` at one stage (32 KB in bfloat16): four programs per SM at 128
registers. Floor at 64k, 16 blocks of 64, 64 heads, 128/128: 2.2 TFLOP if neighbours choose the same blocks,
2.7 ms at 800 TFLOP/s. Where the union of 4 tokens has 18.6 blocks, masked rows add to that. Bytes from L2:
`2 block (H + V)` per block of a list, 40 GB with 18.6 blocks.

Asked for the probabilities of the slots, a program keeps two numbers for each row and slot, `rows R / 64`
registers a thread more: the first key of the slot's block, and the sum over the block in the scale of the
row's online softmax.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Float, Int32
from nsa_jax.config import NSAConfig
from nsa_jax.kernels.triton.dims import split_dim
from nsa_jax.kernels.triton.gpu import has_tma
from nsa_jax.kernels.triton.launch import launch, like, named
from nsa_jax.kernels.triton.loading import (
    Keys,
    key_tiles,
    load_keys,
    load_rows,
    query_tile,
    store_rows,
)
from nsa_jax.kernels.triton.pieces import LOG2_E, Dim, inner, precision, scaled
from nsa_jax.kernels.triton.selected.unions import UnionLists, rows_of_listed_tile
from nsa_jax.kernels.triton.sizes.selected import SelectedForwardSizes, weighing_registers
from nsa_jax.kernels.triton.softmax import Softmax, add_keys, natural_lse, no_keys


class Selections(NamedTuple):
    """The blocks that each query selected, -1 for none, and the first key of its sequence."""

    blocks: Int32[Array, "B T K R"]
    sequence_start: Int32[Array, "B T"]


def attend_selected(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    lists: UnionLists,
    config: NSAConfig,
    scale: float,
    *,
    one_block: bool = False,
    may_rest: bool = False,
    sizes: SelectedForwardSizes,
    selections: Selections | None = None,
) -> tuple[Array, ...]:
    """Attention of each query over its blocks; where a key is not finite, before `recompute_forward`.

    Args:
      query, key, value, config, scale: see `nsa_jax.selected_attention`.
      lists: the merged blocks of each tile of `rows_of_listed_tile(sizes.rows, N // K)`.
      one_block: whether the queries of every tile are known to lie in one block.
      may_rest: whether counts below 0 say that nothing shall be written.
      sizes: tile sizes.
      selections: the blocks of each query, if their probabilities are asked for.

    Returns:
      `(out, lse)`: lse natural and float32; 0 and -inf where a query sees nothing. With `selections` also the
      probability of each block `[B, T, K, R]`, summed over the query heads of a KV head.
    """
    batch, num_queries, num_heads, key_dim = query.shape
    num_keys, num_kv_heads, value_dim = value.shape[1:]
    heads, block_size = num_heads // num_kv_heads, config.selection_block_size
    (tokens, row_heads, rows), keys = rows_of_listed_tile(sizes.rows, heads), min(sizes.keys, block_size)
    tiles, size = lists.starts.shape[2:]
    assert tiles == triton.cdiv(num_queries, tokens), f"lists of {tiles} tiles, sizes of {tokens} tokens"
    assert block_size % keys == 0
    (h0, h1), (v0, v1) = split_dim(key_dim), split_dim(value_dim)
    tma = has_tma()
    out = [like(query, (*query.shape[:3], value_dim)), like(query, query.shape[:3], "float32")]
    registers, more = sizes.registers, dict[str, Any](probabilities=None, R=0, PADDED_R=0, PADDED_TOKENS=0)
    if selections is not None:
        registers = weighing_registers(sizes, heads)
        out.append(like(query, selections.blocks.shape, "float32"))
        slots = selections.blocks.shape[3]
        more = dict(
            R=slots, PADDED_R=triton.next_power_of_2(slots), PADDED_TOKENS=triton.next_power_of_2(tokens)
        )
    return launch(
        selected_forward_kernel, query, *key_tiles(key, keys, tma), *key_tiles(value, keys, tma),
        lists.starts, lists.members, lists.counts, lists.unmasked, lists.rows, *(selections or (None, None)),
        out=tuple(out),
        grid=(tiles, batch * num_kv_heads), num_warps=sizes.num_warps, num_stages=sizes.num_stages,
        registers=registers,
        num_queries=num_queries, num_keys=num_keys, ENTRIES=size,
        KV_HEADS=num_kv_heads, G=heads, ROW_HEADS=row_heads, TOKENS=tokens, ROWS=rows, KEYS=keys,
        STEPS=block_size // keys, H0=h0, H1=h1, V0=v0, V1=v1, SCALE=float(scale),
        PEEL=sizes.peel, ONE_BLOCK=sizes.peel and one_block, MAY_REST=may_rest,
        PRECISION=precision(query.dtype), TMA=tma, **more,
    )  # fmt: skip


class Entries(NamedTuple):
    """The `UnionLists` entries of one tile of queries, as kernels take them.

    Attributes:
      starts: first key of each block.
      members: bit `i` says whether token `i` of the tile chose the block.
      STEPS: steps of a block.
      KEYS: keys of a step.
    """

    starts: tl.tensor
    members: tl.tensor
    STEPS: tl.constexpr
    KEYS: tl.constexpr


class Steps(NamedTuple):
    """Steps of a program: `0 .. free - 1` need no causal mask, `free .. last - 1` do."""

    free: tl.tensor
    last: tl.tensor


class Step(NamedTuple):
    """First keys of a step and of its block, and which rows chose the block."""

    start: tl.tensor
    block: tl.tensor
    member: tl.tensor


class Attending(NamedTuple):
    """What a program knows after some steps.

    Attributes:
      softmax: the state of each row.
      shares: sums of `exp2(logit - softmax.largest)` over the keys of the block in each slot, `[rows, R]`;
        None if nobody asked for them.
    """

    softmax: Softmax
    shares: tl.tensor | None


@triton.jit
def load_step(entries, step, exists, token):
    """Step number `step`; if it does not exist, no row is a member."""
    block = tl.load(entries.starts + step // entries.STEPS, mask=exists, other=0)
    start = block + (step % entries.STEPS) * entries.KEYS
    member = tl.load(entries.members + step // entries.STEPS, mask=exists, other=0)
    return Step(start, block, ((member >> token) & 1) != 0)


@triton.jit
def _attend_entry(
    q, before, keys, values, step, row, slots,
    SCALE: tl.constexpr, PRECISION: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Adds the keys of a step to what was `before`; `row` is the last key that each row may see.

    `slots` are the first keys of the blocks of each row, or None.
    """
    state = before.softmax
    bias = tl.where(step.member, 0.0, float("-inf"))
    k = load_keys(keys, step.start)
    logits = inner(q, k, PRECISION)
    if CAUSAL:
        seen = (step.start + tl.arange(0, keys.ROWS))[None, :] <= row[:, None]
        logits = tl.where(seen, logits * (SCALE * LOG2_E), float("-inf"))
        top = tl.maximum(state.largest, tl.max(logits, 1) + bias)
        p = tl.exp2(logits - (top - bias)[:, None])
    else:
        extreme = tl.max(logits, 1) if SCALE >= 0 else tl.min(logits, 1)
        top = tl.maximum(state.largest, extreme * (SCALE * LOG2_E) + bias)
        p = tl.exp2(logits * (SCALE * LOG2_E) - (top - bias)[:, None])
    if slots is None:
        shares = None
    else:
        shares = before.shares * tl.exp2(state.largest - top)[:, None]
        shares += tl.where(slots == step.block, tl.sum(p, 1)[:, None], 0.0)
    return Attending(add_keys(state, p, top, values, step.start, PRECISION), shares)


@triton.jit(repr=named("nsa_selected_forward"))
def selected_forward_kernel(
    query, keys0, keys1, values0, values1, starts, members, counts, unmasked, last_keys,
    blocks, sequence_starts, out, lse, probabilities, num_queries, num_keys, ENTRIES: tl.constexpr,
    KV_HEADS: tl.constexpr, G: tl.constexpr, ROW_HEADS: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STEPS: tl.constexpr,
    H0: tl.constexpr, H1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, SCALE: tl.constexpr,
    PEEL: tl.constexpr, ONE_BLOCK: tl.constexpr, MAY_REST: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, R: tl.constexpr, PADDED_R: tl.constexpr, PADDED_TOKENS: tl.constexpr,
):  # fmt: skip
    """Outputs and log-sum-exps of a tile of queries, and probabilities of their R slots."""
    KEY: tl.constexpr = Dim(H0, H1)
    VALUE: tl.constexpr = Dim(V0, V1)
    tile = query_tile(tl.program_id(0), num_queries, KV_HEADS, G, ROW_HEADS, TOKENS, ROWS)
    b, head, rows = tile.b, tile.kv_head, tile.rows
    keys: tl.constexpr = Keys(keys0, keys1, b, head, num_keys, KV_HEADS, KEYS, KEY, TMA)
    values: tl.constexpr = Keys(values0, values1, b, head, num_keys, KV_HEADS, KEYS, VALUE, TMA)
    this = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    if MAY_REST:  # noqa: SIM102 (one is known at compile time, the other is not)
        if tl.load(counts + this) < 0:
            return
    q = load_rows(query, rows, KEY)
    row = tl.load(last_keys + tile.first_query + tile.first_token + tile.token, mask=rows.inside, other=-1)

    entries: tl.constexpr = Entries(starts + this * ENTRIES, members + this * ENTRIES, STEPS, KEYS)
    count = tl.load(counts + this)
    steps = steps_of(count, unmasked + this, STEPS, PEEL, ONE_BLOCK)
    if blocks is None:
        slots = None
        found = Attending(no_keys(ROWS, VALUE), None)
    else:
        at = tile.first_query + tile.first_token
        slots = slots_of_rows(blocks, sequence_starts, at, tile, KV_HEADS, STEPS * KEYS, R, PADDED_R)
        shares = tl.zeros([ROWS, PADDED_R], tl.float32)
        found = Attending(no_keys(ROWS, VALUE), shares)
    if PEEL:
        step = load_step(entries, steps.last, count > 0, tile.token)
        found = _attend_entry(q, found, keys, values, step, row, slots, SCALE, PRECISION, CAUSAL=True)
    for i in tl.range(0, steps.free):
        step = load_step(entries, i, True, tile.token)
        found = _attend_entry(q, found, keys, values, step, row, slots, SCALE, PRECISION, CAUSAL=False)
    if STEPS > 1 or not ONE_BLOCK:
        for i in tl.range(steps.free, steps.last):
            step = load_step(entries, i, True, tile.token)
            found = _attend_entry(q, found, keys, values, step, row, slots, SCALE, PRECISION, CAUSAL=True)

    state = found.softmax
    sees = state.total != 0  # also true where the total is NaN
    tl.store(lse + rows.first + rows.offset, natural_lse(state, sees), mask=rows.inside)
    part = 1 / tl.where(sees, state.total, 1.0)
    store_rows(out, rows, scaled(state.out, part[:, None]), VALUE)
    if probabilities is not None:
        shares = found.shares * part[:, None]
        token = tl.arange(0, PADDED_TOKENS)[:, None]
        slot = tl.arange(0, PADDED_R)[None, :]
        inside = tile.first_token + token < num_queries
        if TOKENS == PADDED_TOKENS:
            of_tokens = tl.sum(shares.reshape(TOKENS, ROW_HEADS, PADDED_R), 1)
        else:
            inside = inside & (token < TOKENS)
            of_tokens = tl.zeros([PADDED_TOKENS, PADDED_R], tl.float32)
            for h in tl.static_range(ROW_HEADS):
                row_of = tl.minimum(token * ROW_HEADS + h, ROWS - 1) + 0 * slot
                of_tokens += tl.gather(shares, row_of, 0)
        first = (tile.first_query + tile.first_token) * KV_HEADS + head
        kept = inside & (slot < R)
        tl.store(probabilities + first * R + token * (KV_HEADS * R) + slot, of_tokens, mask=kept)


@triton.jit
def slots_of_rows(
    blocks, sequence_starts, at, tile, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr,
    PADDED_R: tl.constexpr,
):  # fmt: skip
    """First key of the block in each slot of each row that exists, else -1; `at` is the first query."""
    slot = tl.arange(0, PADDED_R)[None, :]
    pointer = blocks + (at * KV_HEADS + tile.kv_head) * R
    inside = tile.rows.inside[:, None] & (slot < R)
    block = tl.load(pointer + tile.token[:, None] * (KV_HEADS * R) + slot, mask=inside, other=-1)
    start = tl.load(sequence_starts + at + tile.token, mask=tile.rows.inside, other=0)
    return tl.where(block >= 0, start[:, None] + block * BLOCK, -1)


@triton.jit
def steps_of(count, unmasked, STEPS: tl.constexpr, PEEL: tl.constexpr, ONE_BLOCK: tl.constexpr):
    """`Steps` of a list of `count` blocks; with PEEL without the last one, which runs before the loops."""
    last = tl.maximum(count * STEPS - 1, 0) if PEEL else count * STEPS
    if ONE_BLOCK:
        free = tl.maximum(count - 1, 0) * STEPS
    else:
        free = tl.minimum(tl.load(unmasked) * STEPS, last)
    return Steps(free, last)
