"""Selected attention backward, gradients of keys and values: key blocks outside, their queries inside.

Source: the gradients of Eq. 12. grid = (items, block / keys): an item is up to `item` of the queries that
chose one block (`lists.items`), and a program takes one item and `keys` keys of the block. It holds these
keys, their values and both gradients. Each step gathers `rows` rows: a few tokens times the query heads of
the KV head, whose `G H` numbers are contiguous for each token. Where heads do not divide the rows of a step,
a token may have its heads in two steps, so no row is padding.

With `keys_first`, logits have keys as rows. So probabilities and their gradients, which multiply from the
left, stay in registers; with queries as rows they are transposed in shared memory.

Why this order: the two sums stay in registers. Tokens ascend in an item, and the longest items start first,
so few multiprocessors wait for others at the end. Queries that do not see the
whole block, mostly those inside it, come first; only their loop is masked.

No atomics: each item of a block with several items stores float32 partial sums. A second kernel, grid =
(blocks, B K, block / 16), in packed rows for 16 blocks each, adds them in the order of the items and writes
them into `d_key` and `d_value`, which already hold the blocks with one item. So all runs give the same bits.

Registers: `keys (H + V + 2 rows) / 128` floats a thread at 4 warps (192 at 64 keys, 64 rows, 128/128). Shared
memory: `(steps rows + keys) (H + V) itemsize`, and `2 rows keys itemsize` where queries are rows. Hopper has
two steps there, with three stages as with two, because the first of three loads tokens (98 KB in bfloat16
with the numbers of rows, so two programs per SM); Blackwell has three.
Partial sums: `4 block (H + V)` bytes a slot, at most `2 P / item` slots for `P = B K T R` pairs of a query
and a block (0.27 GB at 64k tokens and items of 2048).
Floor at 64k, 16 blocks of 64, 64 heads, 128/128: 4.4 TFLOP, 5.5 ms at 800 TFLOP/s; bytes from L2:
`2 G (H + V)` a pair, 34 GB.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import triton
import triton.language as tl

from nsa_jax import layout
from nsa_jax.array_typing import Array, Float
from nsa_jax.kernels.triton.backward import Backward
from nsa_jax.kernels.triton.dims import padded_heads, split_dim, tokens_of
from nsa_jax.kernels.triton.launch import launch, like, named
from nsa_jax.kernels.triton.loading import Rows, load_rows, store_rows
from nsa_jax.kernels.triton.pieces import (
    LOG2_E,
    Dim,
    KeyGradients,
    Pieces,
    add_product,
    added,
    inner,
    precision,
    scaled,
    zeros,
)
from nsa_jax.kernels.triton.selected.item_table import ITEM_FIELDS
from nsa_jax.kernels.triton.selected.items import BlockItems
from nsa_jax.kernels.triton.selected.unions import last_rows
from nsa_jax.kernels.triton.sizes.selected import SelectedKeySizes
from nsa_jax.kernels.triton.softmax import load_lse


def selected_key_gradients(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    items: BlockItems,
    placement: layout.Placement,
    given: Backward,
    delta: Float[Array, "B T N"],
    *,
    scale: float,
    sizes: SelectedKeySizes,
) -> tuple[Array, Array, Array, Array]:
    """Gradients of the keys and values, as `join_items` takes them.

    Args:
      query, key, value, given, delta, scale: see `selected_query_gradient`.
      items: the queries of each block, without codes.
      placement: where each query stands; plain rows are faster than packed ones.
      sizes: tile sizes.
    """
    num_queries, num_heads, key_dim = query.shape[1:]
    num_keys, num_kv_heads, value_dim = value.shape[1:]
    heads, block_size = num_heads // num_kv_heads, placement.config.selection_block_size
    keys = min(sizes.keys, block_size)
    assert block_size % keys == 0
    (h0, h1), (v0, v1) = split_dim(key_dim), split_dim(value_dim)
    partials = max(items.num_partials, 1)
    dims: dict[str, Any] = dict(BLOCK=block_size, KV_HEADS=num_kv_heads, H0=h0, H1=h1, V0=v0, V1=v1)
    return launch(
        selected_key_gradients_kernel,
        query, key, value, items.tokens, items.items, last_rows(placement), given.lse, delta,
        given.d_out, given.gate,
        out=(like(query, (partials, block_size, key_dim), "float32"),
             like(query, (partials, block_size, value_dim), "float32"), like(key), like(value)),
        grid=(items.items.shape[0], block_size // keys), num_warps=sizes.num_warps,
        num_stages=sizes.num_stages,
        num_queries=num_queries, num_keys=num_keys, FIELDS=ITEM_FIELDS, G=heads,
        ROWS=tokens_of(sizes.rows, heads) * padded_heads(heads), KEYS=keys,
        KEYS_FIRST=sizes.keys_first, SCALE=float(scale), PRECISION=precision(query.dtype),
        WIDE=num_queries * num_heads * max(key_dim, value_dim) >= 2**31, **dims,
    )  # fmt: skip


# Of the blocks of packed rows, whose numbers are mostly unused, a program looks at so many.
PACKED_NUMBERS = 16


def join_items[Values: (Array, None)](
    items: BlockItems,
    part_key: Float[Array, "slots block H"],
    part_value: Values,
    d_key: Float[Array, "B S K H"],
    d_value: Values,
) -> tuple[Float[Array, "B S K H"], Values]:
    """Gradients of all keys, and of their values `[B, S, K, V]` if there are any, from what the items wrote.

    It adds up the partial sums of blocks with several items, in order, and puts 0 where no item wrote.
    """
    if items.num_partials:
        heads, num_blocks = items.partials.shape
        block_size = part_key.shape[1]
        numbers = 1 if items.written is None else PACKED_NUMBERS
        (h0, h1), (v0, v1) = (split_dim((d_key if x is None else x).shape[3]) for x in (d_key, d_value))
        updated, () = launch(
            add_partials_kernel, part_key, part_value, items.slots, items.partials,
            items.starts, items.limits, out=(), in_place=dict(d_key=d_key, d_value=d_value),
            grid=(triton.cdiv(num_blocks, numbers), heads, block_size // 16), num_keys=d_key.shape[1],
            num_blocks=num_blocks, BLOCK=block_size, NUMBERS=numbers, KV_HEADS=d_key.shape[2],
            H0=h0, H1=h1, V0=v0, V1=v1,
        )  # fmt: skip
        d_key, d_value = updated["d_key"], updated["d_value"]
    if items.written is not None:
        d_key = jnp.where(items.written[..., None], d_key, 0)
        d_value = None if d_value is None else jnp.where(items.written[..., None], d_value, 0)
    return d_key, d_value


class KeyTile(NamedTuple):
    """Keys of a block and their values; `rows` are their row indices."""

    k: Pieces
    v: Pieces
    rows: tl.tensor


class Gathered(NamedTuple):
    """The arrays from which the rows of an item are gathered: row `i` is head `i % G` of pair `i // G`.

    Attributes:
      query, d_out, lse, delta, gate: one row for each token and head; gate is None where it is 1.
      last_keys: last key that each query of the batch row sees.
      tokens: the token of each pair of a query and a block, see `BlockItems`.
      first, end: the item's pairs.
      first_row: row of the batch row's first token and the KV head's first query head.
      NUM_HEADS: N.
      G: query heads of a KV head.
      ROWS: rows of a step.
      STEP: what a loop adds in a step: if `G` divides the rows, pairs of the list, else rows of the item.
      KEY, VALUE: `Dim` of keys and values.
      WIDE: whether offsets within a row of the batch need 64 bits.
    """

    query: tl.tensor
    d_out: tl.tensor
    lse: tl.tensor
    delta: tl.tensor
    gate: tl.tensor | None
    last_keys: tl.tensor
    tokens: tl.tensor
    first: tl.tensor
    end: tl.tensor
    first_row: tl.tensor
    NUM_HEADS: tl.constexpr
    G: tl.constexpr
    ROWS: tl.constexpr
    STEP: tl.constexpr
    KEY: tl.constexpr
    VALUE: tl.constexpr
    WIDE: tl.constexpr


@triton.jit
def _add_steps(
    sums, held, source, low, high, SCALE: tl.constexpr, PRECISION: tl.constexpr, KEYS_FIRST: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Adds steps of the item to the sums, see `Gathered.STEP`; `low` begins a step."""
    ROW_AXIS: tl.constexpr = 0 if KEYS_FIRST else 1
    r = tl.arange(0, source.ROWS)
    for i in tl.range(low, high, source.STEP):
        if source.ROWS % source.G == 0:
            pair = i + r // source.G
            head = r % source.G
        else:
            pair = source.first + (i + r) // source.G
            head = (i + r) % source.G
        inside = pair < source.end
        token = tl.load(source.tokens + pair, mask=inside, other=0)
        if source.WIDE:
            token = token.to(tl.int64)
        rows = Rows(source.first_row, token * source.NUM_HEADS + head, inside)
        q = load_rows(source.query, rows, source.KEY)
        d_out = load_rows(source.d_out, rows, source.VALUE)
        if KEYS_FIRST:
            logits = inner(held.k, q, PRECISION)
            dp = inner(held.v, d_out, PRECISION)
        else:
            logits = inner(q, held.k, PRECISION)
            dp = inner(d_out, held.v, PRECISION)
        p = tl.exp2(logits * (SCALE * LOG2_E) - tl.expand_dims(load_lse(source.lse, rows), ROW_AXIS))
        if CAUSAL:
            last_key = tl.load(source.last_keys + token, mask=inside, other=-1)
            seen = tl.expand_dims(held.rows, 1 - ROW_AXIS) <= tl.expand_dims(last_key, ROW_AXIS)
            p = tl.where(seen, p, 0.0)
        # Each load forms its addresses: if two share them, they are held in the meantime and more spills.
        shift = tl.expand_dims(
            tl.load(source.delta + rows.first + rows.offset, mask=inside, other=0.0), ROW_AXIS
        )
        if source.gate is not None:
            gate = tl.expand_dims(
                tl.load(source.gate + rows.first + rows.offset, mask=inside, other=0.0), ROW_AXIS
            )
            weighted = (p * gate).to(d_out.first.dtype)
            dp = dp * gate
        else:
            weighted = p.to(d_out.first.dtype)
        if not KEYS_FIRST:
            weighted = tl.trans(weighted)
        dv = add_product(weighted, d_out, sums.dv, PRECISION)
        ds = (p * (dp - shift)).to(q.first.dtype)
        if not KEYS_FIRST:
            ds = tl.trans(ds)
        sums = KeyGradients(add_product(ds, q, sums.dk, PRECISION), dv)
    return sums


@triton.jit(repr=named("nsa_selected_key_gradients"))
def selected_key_gradients_kernel(
    query, key, value, tokens, items, last_keys, lse, delta, d_out, gate, part_key, part_value, d_key,
    d_value, num_queries, num_keys, FIELDS: tl.constexpr, BLOCK: tl.constexpr, KV_HEADS: tl.constexpr,
    G: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, KEYS_FIRST: tl.constexpr,
    H0: tl.constexpr, H1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, SCALE: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Gradients of `KEYS` keys of an item's block, or partial sums where the block has several items."""
    KEY: tl.constexpr = Dim(H0, H1)
    VALUE: tl.constexpr = Dim(V0, V1)
    items += tl.program_id(0) * FIELDS
    both = tl.load(items)
    if both < 0:
        return
    within = tl.program_id(1) * KEYS
    start = tl.load(items + 1) + within
    limit = tl.load(items + 2)
    first = tl.load(items + 3)
    masked = tl.load(items + 4)
    end = tl.load(items + 5)
    slot = tl.load(items + 6)
    b = (both // KV_HEADS).to(tl.int64)
    kv_head = both % KV_HEADS
    n = tl.arange(0, KEYS)
    keys = Rows((b * num_keys + start) * KV_HEADS + kv_head, n * KV_HEADS, start + n < num_keys)
    held = KeyTile(load_rows(key, keys, KEY), load_rows(value, keys, VALUE), start + n)
    STEP: tl.constexpr = ROWS // G if ROWS % G == 0 else ROWS
    if ROWS % G == 0:
        low, unmasked, high = first, masked, end
    else:
        low, unmasked, high = 0, (masked - first) * G, (end - first) * G
    source: tl.constexpr = Gathered(
        query, d_out, lse, delta, gate, last_keys + b * num_queries, tokens, first, end,
        first_row=b * num_queries * (KV_HEADS * G) + kv_head * G,
        NUM_HEADS=KV_HEADS * G, G=G, ROWS=ROWS, STEP=STEP, KEY=KEY, VALUE=VALUE, WIDE=WIDE,
    )  # fmt: skip
    sums = KeyGradients(zeros(KEYS, KEY), zeros(KEYS, VALUE))
    middle = low + tl.cdiv(unmasked - low, STEP) * STEP
    sums = _add_steps(sums, held, source, low, middle, SCALE, PRECISION, KEYS_FIRST, CAUSAL=True)
    sums = _add_steps(sums, held, source, middle, high, SCALE, PRECISION, KEYS_FIRST, CAUSAL=False)
    dk = scaled(sums.dk, SCALE)
    if slot < 0:
        mine = Rows(keys.first, keys.offset, start + n < limit)
        store_rows(d_key, mine, dk, KEY)
        store_rows(d_value, mine, sums.dv, VALUE)
    else:
        part = Rows(slot.to(tl.int64) * BLOCK + within, n, n >= 0)
        store_rows(part_key, part, dk, KEY)
        store_rows(part_value, part, sums.dv, VALUE)


@triton.jit
def _add_slots(part, slot, count, within, BLOCK: tl.constexpr, DIM):
    """Adds up the partial sums of 16 keys of a block, in the order of the slots."""
    n = tl.arange(0, 16)
    total = zeros(16, DIM)
    for i in range(count):
        total = added(total, load_rows(part, Rows((slot + i) * BLOCK + within, n, n >= 0), DIM))
    return total


@triton.jit(repr=named("nsa_selected_add_partials"))
def add_partials_kernel(
    d_key, d_value, part_key, part_value, slots, partials, starts, limits,
    num_keys, num_blocks, BLOCK: tl.constexpr, NUMBERS: tl.constexpr, KV_HEADS: tl.constexpr,
    H0: tl.constexpr, H1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
):  # fmt: skip
    """Gradients of 16 keys of each of NUMBERS blocks that has several items."""
    KEY: tl.constexpr = Dim(H0, H1)
    VALUE: tl.constexpr = Dim(V0, V1)
    first = tl.program_id(0) * NUMBERS
    b = tl.program_id(1) // KV_HEADS
    kv_head = tl.program_id(1) % KV_HEADS
    counts = partials + tl.program_id(1) * num_blocks
    number = first + tl.arange(0, NUMBERS)
    if tl.max(tl.load(counts + number, mask=number < num_blocks, other=0), 0) == 0:
        return
    n = tl.arange(0, 16)
    within = tl.program_id(2) * 16
    for block in tl.range(first, tl.minimum(first + NUMBERS, num_blocks)):
        count = tl.load(counts + block)
        if count > 0:
            key = tl.load(starts + b * num_blocks + block) + within
            mine = key + n < tl.load(limits + b * num_blocks + block)
            to = Rows((b.to(tl.int64) * num_keys + key) * KV_HEADS + kv_head, n * KV_HEADS, mine)
            slot = tl.load(slots + tl.program_id(1) * num_blocks + block).to(tl.int64)
            store_rows(d_key, to, _add_slots(part_key, slot, count, within, BLOCK, KEY), KEY)
            if part_value is not None:
                store_rows(d_value, to, _add_slots(part_value, slot, count, within, BLOCK, VALUE), VALUE)
