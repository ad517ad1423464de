"""Selected attention forward in parts: a block of keys stays, the rows that chose it pass by.

Source: Eq. 12. grid = (items,): an item is up to `item` of the queries that chose one block (`items`). A
program holds the block's keys and values, and loops over tiles of `rows` rows, each a token with one query
head. What a row gets from the block is a whole softmax, so nothing is carried from step to step: its
normalised output and its log-sum-exp leave as the part of the query's slot, in the dtype of the query and in
float32. `sum_output_parts` adds the parts up.

Why this order: with few query heads a KV head, a tile of neighbouring queries has many tokens, and most of
its products are of rows that did not choose the block. Here every product is of use. The price is memory
traffic: `R` parts for each row, written and read. Queries that do not see the whole block, mostly those
inside it, come first; only their loop is masked.

Registers: `rows (keys + V) / 128` floats a thread at 4 warps (96 at 64 rows, 64 keys, V = 128). Shared
memory: `(keys (H + V) + stages rows H) itemsize` (48 KB in bfloat16 at one stage: four programs an SM at 128
registers). Floor at 32k tokens, 32 query heads, 8 KV heads, 16 blocks of 64, 128/128: 0.55 TFLOP, 0.7 ms at
800 TFLOP/s; 4.3 GB of parts written, 1.4 ms at 3 TB/s.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Float, Int32
from nsa_jax.kernels.triton.dims import split_dim
from nsa_jax.kernels.triton.launch import launch, like, named
from nsa_jax.kernels.triton.loading import load_rows, store_rows
from nsa_jax.kernels.triton.pieces import LOG2_E, Dim, add_product, inner, precision, scaled, zeros
from nsa_jax.kernels.triton.selected.backward_key import KeyTile
from nsa_jax.kernels.triton.selected.chosen_rows import load_item, load_tile, rows_of_block, rows_that_chose
from nsa_jax.kernels.triton.selected.chunks import Chunks
from nsa_jax.kernels.triton.selected.item_table import ITEM_FIELDS
from nsa_jax.kernels.triton.selected.items import BlockItems
from nsa_jax.kernels.triton.sizes.selected import SelectedPartSizes


def output_parts(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    items: BlockItems,
    last_keys: Int32[Array, "B T"],
    chunks: Chunks,
    chunk: Int32[Array, " 4"],
    *,
    block_size: int,
    slots: int,
    scale: float,
    sizes: SelectedPartSizes,
) -> tuple[Float[Array, "heads queries*R G V"], Float[Array, "heads queries*R G"]]:
    """Outputs and log-sum-exps, these in base 2, of the slots of a chunk of queries, each by itself.

    What belongs to a slot without a block, or with one that the query does not see, is not written.

    Args:
      query, key, value, scale: see `nsa_jax.selected_attention`.
      items: the queries of each block, with codes.
      last_keys: row index of the last key that each query sees.
      chunks, chunk: how the queries are cut, and the row of `Chunks.table`.
      block_size, slots: tokens of a block, and R.
      sizes: tile sizes.
    """
    num_queries, num_heads, key_dim = query.shape[1:]
    num_keys, num_kv_heads, value_dim = value.shape[1:]
    (h0, h1), (v0, v1) = split_dim(key_dim), split_dim(value_dim)
    shape = (chunks.heads, chunks.queries * slots, num_heads // num_kv_heads)
    return launch(
        output_parts_kernel, query, key, value, items.tokens, items.items, chunk, last_keys,
        out=(like(query, (*shape, value_dim)), like(query, shape, "float32")),
        grid=(chunks.most_items(items, slots, sizes.item),), num_warps=sizes.num_warps,
        num_stages=sizes.num_stages, registers=sizes.registers,
        num_queries=num_queries, num_keys=num_keys, chunk_queries=chunks.queries, FIELDS=ITEM_FIELDS,
        BLOCK=block_size, KV_HEADS=num_kv_heads, G=shape[2], R=slots, ROWS=sizes.rows,
        H0=h0, H1=h1, V0=v0, V1=v1, SCALE=float(scale), PRECISION=precision(query.dtype),
        WIDE=num_queries * num_heads * key_dim >= 2**31,
    )  # fmt: skip


class Outputs(NamedTuple):
    """Where the parts go: outputs and log-sum-exps."""

    parts: tl.tensor
    lse: tl.tensor


@triton.jit
def _attend_tiles(
    query, held, chosen, outputs, first, last, KEY, VALUE,
    SCALE: tl.constexpr, PRECISION: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The parts of the tiles from row `first` of the item on, up to row `last`."""
    for i in tl.range(first, last, chosen.ROWS):
        tile = load_tile(chosen, i)
        logits = inner(load_rows(query, tile.rows, KEY), held.k, PRECISION)
        if CAUSAL:
            seen = held.rows[None, :] <= tile.last_key[:, None]
            logits = tl.where(seen, logits * (SCALE * LOG2_E), float("-inf"))
            top = tl.max(logits, 1)
            p = tl.exp2(logits - top[:, None])
        else:
            extreme = tl.max(logits, 1) if SCALE >= 0 else tl.min(logits, 1)
            top = extreme * (SCALE * LOG2_E)
            p = tl.exp2(logits * (SCALE * LOG2_E) - top[:, None])
        total = tl.sum(p, 1)
        out = add_product(p.to(held.v.first.dtype), held.v, zeros(chosen.ROWS, VALUE), PRECISION)
        store_rows(outputs.parts, tile.parts, scaled(out, (1 / total)[:, None]), VALUE)
        at = outputs.lse + tile.parts.first + tile.parts.offset
        tl.store(at, top + tl.log2(total), mask=tile.parts.inside)


@triton.jit(repr=named("nsa_selected_output_parts"))
def output_parts_kernel(
    query, key, value, codes, items, chunk, last_keys, parts, part_lse, num_queries, num_keys, chunk_queries,
    FIELDS: tl.constexpr, BLOCK: tl.constexpr, KV_HEADS: tl.constexpr, G: tl.constexpr, R: tl.constexpr,
    ROWS: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    SCALE: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The parts of one item of a chunk."""
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
    outputs = Outputs(parts, part_lse)
    rows = (item.end - item.first) * G
    middle = tl.cdiv((item.masked - item.first) * G, ROWS) * ROWS
    _attend_tiles(
        query, held, chosen, outputs, 0, middle, KEY, VALUE, SCALE=SCALE, PRECISION=PRECISION, CAUSAL=True
    )
    _attend_tiles(
        query, held, chosen, outputs, middle, rows, KEY, VALUE, SCALE=SCALE, PRECISION=PRECISION, CAUSAL=False
    )
