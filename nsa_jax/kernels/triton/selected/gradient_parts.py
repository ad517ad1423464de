"""Selected attention backward in parts: one kernel with key blocks outside forms all three gradients.

Source: the gradients of Eq. 12. grid = (items,), as in `forward_parts`. A program holds the block's keys and
values and the sums of their gradients, and loops over tiles of `rows` rows that chose the block. Each step
gathers queries and output gradients and makes five products. What the block adds to the gradient of a query
leaves as the part of its slot, in the dtype of the query; `sum_query_parts` adds these up. Sums of keys and
values leave as in `backward_key`: at the item's end, and where a block has several items as partial sums in
float32, which are added in order.

Why this order: see `forward_parts`. The products are five instead of the seven of two kernels, and none is of
rows that did not choose the block.

Registers: `(keys (H + V) + rows (2 keys + H)) / 128` floats a thread at 4 warps (256 at 64 rows, 64 keys,
128/128; the compiler reuses those of the logits). Shared memory: `(stages rows (H + V) + keys (H + V) + 2
rows keys) itemsize`. Floor at 32k tokens, 32 query heads, 8 KV heads, 16 blocks of 64, 128/128: 1.4 TFLOP,
1.7 ms at 800 TFLOP/s; 4.3 GB of parts written, 1.4 ms at 3 TB/s.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Float, Int32
from nsa_jax.kernels.triton.backward import Backward
from nsa_jax.kernels.triton.dims import split_dim
from nsa_jax.kernels.triton.launch import launch, like, named
from nsa_jax.kernels.triton.loading import Rows, load_rows, store_rows
from nsa_jax.kernels.triton.pieces import (
    LOG2_E,
    Dim,
    KeyGradients,
    add_product,
    inner,
    precision,
    scaled,
    zeros,
)
from nsa_jax.kernels.triton.selected.backward_key import KeyTile
from nsa_jax.kernels.triton.selected.chosen_rows import load_item, load_tile, rows_of_block, rows_that_chose
from nsa_jax.kernels.triton.selected.chunks import Chunks
from nsa_jax.kernels.triton.selected.item_table import ITEM_FIELDS
from nsa_jax.kernels.triton.selected.items import BlockItems
from nsa_jax.kernels.triton.sizes.selected import SelectedPartSizes
from nsa_jax.kernels.triton.softmax import load_lse


def gradient_parts(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    items: BlockItems,
    last_keys: Int32[Array, "B T"],
    given: Backward,
    delta: Float[Array, "B T N"],
    sums: tuple[Array, Array, Array, Array],
    chunks: Chunks,
    chunk: Int32[Array, " 4"],
    *,
    block_size: int,
    slots: int,
    scale: float,
    sizes: SelectedPartSizes,
) -> tuple[Float[Array, "heads queries*R G H"], tuple[Array, Array, Array, Array]]:
    """Parts of the queries' gradients of a chunk, and the sums of the gradients of keys and values.

    Args:
      query, key, value, items, last_keys, chunks, chunk, block_size, slots, scale, sizes: see
        `forward_parts.output_parts`.
      given, delta: see `backward_query.selected_query_gradient`.
      sums: `part_key`, `part_value`, `d_key` and `d_value` as `backward_key.join_items` takes them, in which
        the sums of the items of other chunks stay.
    """
    num_queries, num_heads, key_dim = query.shape[1:]
    num_keys, num_kv_heads, value_dim = value.shape[1:]
    (h0, h1), (v0, v1) = split_dim(key_dim), split_dim(value_dim)
    shape = (chunks.heads, chunks.queries * slots, num_heads // num_kv_heads, key_dim)
    names = ("part_key", "part_value", "d_key", "d_value")
    updated, parts = launch(
        gradient_parts_kernel, query, key, value, items.tokens, items.items, chunk, last_keys, given.lse,
        delta, given.d_out, given.gate, out=like(query, shape),
        in_place=dict(zip(names, sums, strict=True)),
        grid=(chunks.most_items(items, slots, sizes.item),), num_warps=sizes.num_warps,
        num_stages=sizes.num_stages, registers=sizes.registers,
        num_queries=num_queries, num_keys=num_keys, chunk_queries=chunks.queries, FIELDS=ITEM_FIELDS,
        BLOCK=block_size, KV_HEADS=num_kv_heads, G=shape[2], R=slots, ROWS=sizes.rows,
        H0=h0, H1=h1, V0=v0, V1=v1, SCALE=float(scale), PRECISION=precision(query.dtype),
        WIDE=num_queries * num_heads * max(key_dim, value_dim) >= 2**31,
    )  # fmt: skip
    return parts, tuple(updated[name] for name in names)


class Gathered(NamedTuple):
    """The arrays from which rows are gathered, and the parts; gate is None where it is 1."""

    query: tl.tensor
    d_out: tl.tensor
    lse: tl.tensor
    delta: tl.tensor
    gate: tl.tensor | None
    parts: tl.tensor


@triton.jit
def _add_tiles(
    sums, held, chosen, source, first, last, KEY, VALUE,
    SCALE: tl.constexpr, PRECISION: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Adds the tiles from row `first` of the item on, up to row `last`, and stores their parts."""
    for i in tl.range(first, last, chosen.ROWS):
        tile = load_tile(chosen, i)
        rows = tile.rows
        at = rows.first + rows.offset
        q = load_rows(source.query, rows, KEY)
        d_out = load_rows(source.d_out, rows, VALUE)
        logits = inner(q, held.k, PRECISION)
        dp = inner(d_out, held.v, PRECISION)
        p = tl.exp2(logits * (SCALE * LOG2_E) - load_lse(source.lse, rows)[:, None])
        if CAUSAL:
            p = tl.where(held.rows[None, :] <= tile.last_key[:, None], p, 0.0)
        shift = tl.load(source.delta + at, mask=rows.inside, other=0.0)[:, None]
        if source.gate is not None:
            gate = tl.load(source.gate + at, mask=rows.inside, other=0.0)[:, None]
            weighted = (p * gate).to(d_out.first.dtype)
            dp = dp * gate
        else:
            weighted = p.to(d_out.first.dtype)
        dv = add_product(tl.trans(weighted), d_out, sums.dv, PRECISION)
        ds = (p * (dp - shift)).to(q.first.dtype)
        dk = add_product(tl.trans(ds), q, sums.dk, PRECISION)
        sums = KeyGradients(dk, dv)
        dq = add_product(ds, held.k, zeros(chosen.ROWS, KEY), PRECISION)
        store_rows(source.parts, tile.parts, scaled(dq, SCALE), KEY)
    return sums


@triton.jit(repr=named("nsa_selected_gradient_parts"))
def gradient_parts_kernel(
    part_key, part_value, d_key, d_value, query, key, value, codes, items, chunk, last_keys, lse, delta,
    d_out, gate, parts, num_queries, num_keys, chunk_queries,
    FIELDS: tl.constexpr, BLOCK: tl.constexpr, KV_HEADS: tl.constexpr, G: tl.constexpr, R: tl.constexpr,
    ROWS: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    SCALE: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The parts of one item of a chunk, and the gradients of its keys or partial sums of them."""
    KEY: tl.constexpr = Dim(H0, H1)
    VALUE: tl.constexpr = Dim(V0, V1)
    number = tl.load(chunk + 2) + tl.program_id(0)
    if number >= tl.load(chunk + 3):
        return
    item = load_item(items, number, FIELDS, KV_HEADS)
    keys = rows_of_block(item, num_keys, KV_HEADS, BLOCK)
    token = item.start + tl.arange(0, BLOCK)
    held = KeyTile(load_rows(key, keys, KEY), load_rows(value, keys, VALUE), token)
    chosen: tl.constexpr = rows_that_chose(
        codes, last_keys, item, chunk, num_queries, chunk_queries, R=R, G=G, KV_HEADS=KV_HEADS, ROWS=ROWS,
        WIDE=WIDE,
    )  # fmt: skip
    source = Gathered(query, d_out, lse, delta, gate, parts)
    sums = KeyGradients(zeros(BLOCK, KEY), zeros(BLOCK, VALUE))
    rows = (item.end - item.first) * G
    middle = tl.cdiv((item.masked - item.first) * G, ROWS) * ROWS
    sums = _add_tiles(
        sums, held, chosen, source, 0, middle, KEY, VALUE, SCALE=SCALE, PRECISION=PRECISION, CAUSAL=True
    )
    sums = _add_tiles(
        sums, held, chosen, source, middle, rows, KEY, VALUE, SCALE=SCALE, PRECISION=PRECISION, CAUSAL=False
    )
    dk = scaled(sums.dk, SCALE)
    if item.slot < 0:
        mine = Rows(keys.first, keys.offset, token < item.limit)
        store_rows(d_key, mine, dk, KEY)
        store_rows(d_value, mine, sums.dv, VALUE)
    else:
        n = tl.arange(0, BLOCK)
        part = Rows(item.slot.to(tl.int64) * BLOCK, n, n >= 0)
        store_rows(part_key, part, dk, KEY)
        store_rows(part_value, part, sums.dv, VALUE)
