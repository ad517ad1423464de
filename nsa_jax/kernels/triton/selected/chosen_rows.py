"""The rows of the queries that chose one block, for kernels with key blocks outside.

A row is a query token with one of the `G` query heads of a KV head. The pairs of a block (`items`) are cut
into tiles of rows, not of tokens: so a tile is full whatever `G` is, and a token may begin in one tile and
end in the next.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from nsa_jax.kernels.triton.loading import Rows


class Item(NamedTuple):
    """An item as `BlockItems.items` has it.

    Attributes:
      both: `b K + k`.
      b, kv_head: row of the batch, and KV head.
      start: row index of the block's first key.
      limit: limit of the keys whose gradients it may write.
      first, masked, end: its pairs, and where those end that need the causal mask.
      slot: of its partial sums, or -1.
    """

    both: tl.tensor
    b: tl.tensor
    kv_head: tl.tensor
    start: tl.tensor
    limit: tl.tensor
    first: tl.tensor
    masked: tl.tensor
    end: tl.tensor
    slot: tl.tensor


class Chosen(NamedTuple):
    """Where the rows of an item, and the parts of a chunk, lie.

    Attributes:
      codes: `token R + slot` of each pair of a query and a block.
      last_keys: last key that each query of the batch row sees.
      first, end: pairs of the item.
      first_row: row of the batch row's first token and the KV head's first query head.
      first_part: where the parts of the KV head begin among those of the chunk.
      first_code: code of the first of them.
      R: slots of a query.
      G: query heads of a KV head.
      NUM_HEADS: N.
      ROWS: rows of a tile.
      WIDE: whether offsets within a row of the batch need 64 bits.
    """

    codes: tl.tensor
    last_keys: tl.tensor
    first: tl.tensor
    end: tl.tensor
    first_row: tl.tensor
    first_part: tl.tensor
    first_code: tl.tensor
    R: tl.constexpr
    G: tl.constexpr
    NUM_HEADS: tl.constexpr
    ROWS: tl.constexpr
    WIDE: tl.constexpr


class Tile(NamedTuple):
    """A tile of rows: where they lie in `[B T N, D]`, where their parts lie, and the last key each sees."""

    rows: Rows
    parts: Rows
    last_key: tl.tensor


@triton.jit
def load_item(items, number, FIELDS: tl.constexpr, KV_HEADS: tl.constexpr):
    """Item number `number`, which exists."""
    at = items + number * FIELDS
    both = tl.load(at)
    return Item(
        both, (both // KV_HEADS).to(tl.int64), both % KV_HEADS, tl.load(at + 1), tl.load(at + 2),
        tl.load(at + 3), tl.load(at + 4), tl.load(at + 5), tl.load(at + 6),
    )  # fmt: skip


@triton.jit
def rows_of_block(item, num_keys, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Where the keys of an item's block lie in `[B S K, D]`."""
    n = tl.arange(0, BLOCK)
    first = (item.b * num_keys + item.start) * KV_HEADS + item.kv_head
    return Rows(first, n * KV_HEADS, item.start + n < num_keys)


@triton.jit
def rows_that_chose(
    codes, last_keys, item, chunk, num_queries, chunk_queries, R: tl.constexpr, G: tl.constexpr,
    KV_HEADS: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The rows of an item, see `Chosen`; `chunk` is as in `Chunks.table`."""
    lane = (item.both - tl.load(chunk)).to(tl.int64)
    return Chosen(
        codes, last_keys + item.b * num_queries, item.first, item.end,
        first_row=item.b * num_queries * (KV_HEADS * G) + item.kv_head * G,
        first_part=lane * chunk_queries * (R * G), first_code=tl.load(chunk + 1) * R,
        R=R, G=G, NUM_HEADS=KV_HEADS * G, ROWS=ROWS, WIDE=WIDE,
    )  # fmt: skip


@triton.jit
def load_tile(chosen, number):
    """The rows from number `number` of the item on."""
    row = number + tl.arange(0, chosen.ROWS)
    pair = chosen.first + row // chosen.G
    head = row % chosen.G
    inside = pair < chosen.end
    code = tl.load(chosen.codes + pair, mask=inside, other=0)
    token = code // chosen.R
    last_key = tl.load(chosen.last_keys + token, mask=inside, other=-1)
    if chosen.WIDE:
        token = token.to(tl.int64)
    return Tile(
        Rows(chosen.first_row, token * chosen.NUM_HEADS + head, inside),
        Rows(chosen.first_part, (code - chosen.first_code) * chosen.G + head, inside),
        last_key,
    )
