"""Merges the selected blocks of a few neighbouring queries into one list, each block once.

grid = (ceil(T / tokens), B K): one program per tile of `tokens` queries and KV head. In registers it sorts
the tile's `tokens R` pairs of a token and a block by first key, then token. A scan joins the tokens of equal
blocks into a bit mask; the last pair of each block has the whole mask, and these pairs are stored side by
side. `8 tokens R` bytes a tile, `8 B K T R` in all (34 MB at 64k, K = 4, R = 16). Floor: to write these bytes
and to read half as many.

Why tiles: neighbours share blocks. The longer the tile, the fewer loads of keys for each query, but where
neighbours do not share, the more products are masked away.
"""

from typing import NamedTuple

import jax.numpy as jnp
import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Bool, Int, Int32
from nsa_jax.kernels.triton.dims import TileRows, rows_of_tile
from nsa_jax.kernels.triton.launch import launch, like, named
from nsa_jax.layout import Placement

NO_PAIR: tl.constexpr = tl.constexpr(2147483647)  # sorts behind all pairs of a token and a block
PAIRS_OF_A_WARP = 64  # pairs that each warp sorts; at most 8 warps


class UnionLists(NamedTuple):
    """Blocks of each tile of queries, ascending by first key; entries from the count on are arbitrary.

    Attributes:
      starts: row index of the block's first key.
      members: bit `i` says whether the tile's `i`-th query chose the block.
      counts: number of blocks of the tile.
      unmasked: how many leading blocks end at or before every query of the tile that sees anything.
      rows: row index of the last key that a query sees, -1 where it sees nothing.
    """

    starts: Int32[Array, "B K tiles size"]
    members: Int32[Array, "B K tiles size"]
    counts: Int32[Array, "B K tiles"]
    unmasked: Int32[Array, "B K tiles"]
    rows: Int32[Array, "B T"]


def rows_of_listed_tile(rows: int, heads_per_kv_head: int) -> TileRows:
    """Rows of a tile that has a list of blocks, packed if it then has at least a quarter more tokens.

    A longer tile has a longer list, so with less to gain the products of more blocks cost more than padding.
    """
    packed, padded = (rows_of_tile(rows, heads_per_kv_head, packed=x) for x in (True, False))
    return packed if 4 * packed.tokens >= 5 * padded.tokens else padded


def last_rows(placement: Placement) -> Int32[Array, "B T"]:
    """Row index of the last key that each query sees, its own; -1 where it sees nothing."""
    assert placement.first_keys.slc.known == 0, "the selected branch holds whole rows"
    return jnp.where(placement.position >= 0, placement.sequence_start + placement.position, -1)


def union_lists(
    block_indices: Int[Array, "B T K R"],
    placement: Placement,
    num_keys: int,
    *,
    tokens: int,
    block_size: int | None = None,
    unless: Bool[Array, ""] | None = None,
) -> UnionLists:
    """Merges the blocks of each tile of `tokens` neighbouring queries, 1 to 32.

    A block that begins after its query is dropped, because the query sees none of its keys.
    `block_size` is that of the indices, where it is not `selection_block_size`. With `unless`, and where it
    is true, nothing is merged: counts are -1, all else is arbitrary.
    """
    batch, num_queries, num_kv_heads, slots = block_indices.shape
    if not 1 <= tokens <= 32:
        raise ValueError(f"tokens must be 1 to 32, got {tokens}. Pass those of rows_of_listed_tile(...).")
    if num_keys * tokens >= NO_PAIR.value:
        raise NotImplementedError(
            "the Triton kernels need the number of keys times the tokens of a tile to be below 2^31, got "
            f"{num_keys} * {tokens}. Use implementation='xla'."
        )
    rows = last_rows(placement)
    tiles = triton.cdiv(num_queries, tokens)
    padded_slots, padded_tokens = triton.next_power_of_2(slots), triton.next_power_of_2(tokens)
    entries = like(rows, (batch, num_kv_heads, tiles, tokens * slots))
    per_tile = like(rows, entries.shape[:3])
    starts, members, counts, unmasked = launch(
        union_lists_kernel, block_indices.astype(jnp.int32), rows, placement.sequence_start,
        None if unless is None else unless.astype(jnp.int32),
        out=(entries, entries, per_tile, per_tile),
        grid=(tiles, batch * num_kv_heads),
        num_warps=max(1, min(8, padded_tokens * padded_slots // PAIRS_OF_A_WARP)),
        num_queries=num_queries, KV_HEADS=num_kv_heads, SLOTS=slots, PADDED_SLOTS=padded_slots, TOKENS=tokens,
        PADDED_TOKENS=padded_tokens,
        BLOCK=block_size or placement.config.selection_block_size,
    )  # fmt: skip
    return UnionLists(starts, members, counts, unmasked, rows)


@triton.jit
def _join(start_a, members_a, start_b, members_b):
    return start_b, tl.where(start_a == start_b, members_a | members_b, members_b)


@triton.jit(repr=named("nsa_union_lists"))
def union_lists_kernel(
    block_indices, rows, sequence_starts, unless, starts, members, counts, unmasked, num_queries,
    KV_HEADS: tl.constexpr, SLOTS: tl.constexpr, PADDED_SLOTS: tl.constexpr, TOKENS: tl.constexpr,
    PADDED_TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The list of one tile of queries and KV head."""
    tile = tl.program_id(0)
    this = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tile
    if unless is not None and tl.load(unless) != 0:
        tl.store(counts + this, -1)
        return
    b = tl.program_id(1) // KV_HEADS
    head = tl.program_id(1) % KV_HEADS
    SIZE: tl.constexpr = PADDED_TOKENS * PADDED_SLOTS
    i = tl.arange(0, SIZE)
    token = i // PADDED_SLOTS
    slot = i % PADDED_SLOTS
    query = tile * TOKENS + token
    inside = query < num_queries
    if PADDED_TOKENS > TOKENS:
        inside = inside & (token < TOKENS)
    at = b.to(tl.int64) * num_queries + query
    row = tl.load(rows + at, mask=inside, other=-1)
    block = tl.load(
        block_indices + (at * KV_HEADS + head) * SLOTS + slot, mask=inside & (slot < SLOTS), other=-1
    )
    start = tl.load(sequence_starts + at, mask=inside, other=0) + block * BLOCK
    pairs = tl.sort(tl.where((block >= 0) & (start <= row), start * TOKENS + token, NO_PAIR))
    start = pairs // TOKENS
    start, member = tl.associative_scan((start, 1 << (pairs % TOKENS)), 0, _join)
    ends = (pairs != NO_PAIR) & (
        (start != tl.gather(start, tl.minimum(i + 1, SIZE - 1), 0)) | (i == SIZE - 1)
    )
    end = ends.to(tl.int32)
    to = this * (TOKENS * SLOTS) + tl.cumsum(end, 0) - 1
    tl.store(starts + to, start, mask=ends)
    tl.store(members + to, member, mask=ends)
    tl.store(counts + this, tl.sum(end, 0))
    first_row = tl.min(tl.where(row >= 0, row, NO_PAIR), 0)
    tl.store(unmasked + this, tl.sum((ends & (start + (BLOCK - 1) <= first_row)).to(tl.int32), 0))
