"""Selected attention forward: a tile of queries walks the union of its blocks.

grid = (ceil(T / tokens), B K): one program per `tokens` neighbouring queries times the query heads of a KV
head, `rows` rows in all (4 tokens x 16 heads = 64: one wgmma). Keys and values of a block are loaded once for
all of them; a block that a query did not choose gets a bias of -inf for its rows, which costs one number a
row. Only blocks that reach beyond a query of the tile, mostly its own, need the causal mask: they end the
list. The last step of all runs first, as straight-line code; then those without the mask; then the rest with
it, which there is none of where the tile lies in one block (`first_position`). Head-major order keeps one KV
head's keys and values in L2.

Registers: `rows (keys + V) / 128` floats a thread at 4 warps (96 at 64 rows, 64 keys, V = 128). Shared
memory: `(rows H + keys max(H, V)) itemsize` at one stage (32 KB in bfloat16): four programs a processor at
128 registers. Floor at 64k, 16 blocks of 64, 64 heads, 128/128: 2.2 TFLOP where neighbours agree, 2.7 ms at
800 TFLOP/s; union 18.6 instead of 16 blocks and masked rows on top. Bytes from L2: `2 keys (H + V)` per union
entry, 16 GB with a union of 4 tokens in 18.6 blocks.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Float
from nsa_jax.config import NSAConfig
from nsa_jax.kernels.triton.block_lists import UnionLists
from nsa_jax.kernels.triton.dims import most_registers, padded_heads, split_dim, tokens_of
from nsa_jax.kernels.triton.gpu import has_tma, shared_bytes, target
from nsa_jax.kernels.triton.launch import launch, like
from nsa_jax.kernels.triton.pieces import (
    LN_2,
    LOG2_E,
    LOWEST,
    add_product,
    inner,
    key_tiles,
    load_keys,
    load_rows,
    precision,
    store_rows,
    zeros,
)


class ForwardSizes(NamedTuple):
    """What changes the speed only.

    Attributes:
      rows: tokens times padded query heads of a tile, at least 16.
      keys: keys of a step; divides the block size.
      num_warps: warps of a program.
      num_stages: steps whose loads are in flight.
      registers: most registers of a thread; None leaves it to the compiler.
      peel: whether the last step stands before the loops. On Hopper the copy of the queries in shared memory,
        made for it, then serves the loops too, and no loop holds the queries in registers.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    registers: int | None = None
    peel: bool = True

    @classmethod
    def choose(
        cls, heads_per_kv_head: int, key_dim: int, value_dim: int, itemsize: int, block_size: int,
        capability: int = 90,
    ) -> "ForwardSizes":  # fmt: skip
        """Sizes by heads, dims, bytes of a float, block size and compute capability (80, 89, 90)."""
        rows = tile_rows(heads_per_kv_head, itemsize)
        wide, room = key_dim + value_dim, shared_bytes(capability)
        keys = min(block_size, 64 if itemsize < 4 else 32)
        if itemsize < 4 and capability >= 90 and rows == 64:
            return cls(rows, keys, 4, 1, most_registers(value_dim))
        if itemsize < 4 and capability >= 90 and rows < 64:  # few heads, without wgmma
            return cls(rows, keys, 1 if max(key_dim, value_dim) <= 128 else 2, 1)
        num_stages = 1 if capability >= 90 or itemsize == 4 else 2

        def used():  # float32 products split both operands, hence half as much again
            return (rows * key_dim + num_stages * keys * wide) * (itemsize if itemsize < 4 else 6)

        while used() > room and keys > 16:
            keys //= 2
        num_warps = 8 if rows > 64 or wide > 384 else 4 if rows == 64 or itemsize == 4 else 1
        peel = itemsize < 4 and capability >= 90  # without wgmma it costs registers
        return cls(rows, keys, num_warps, num_stages, peel=peel)


def tile_rows(heads_per_kv_head: int, itemsize: int) -> int:
    """Tokens times padded query heads of a tile of queries: 64 for one wgmma, of at most 32 tokens.

    float32 takes 16: its products, three for one, are what binds, so masked ones cost most.
    """
    heads = padded_heads(heads_per_kv_head)
    return max(16 if itemsize == 4 else min(64, 32 * heads), heads)


def in_one_block(first_position: int | None, tokens: int, block_size: int) -> bool:
    """Whether the queries of every tile lie in one block, hence only a list's last entry needs the mask.

    `first_position` is that of the first query where all of them are neighbours in one sequence, else None.
    """
    return first_position is not None and first_position % tokens == 0 and block_size % tokens == 0


def attend_blocks(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    lists: UnionLists,
    config: NSAConfig,
    scale: float,
    *,
    first_position: int | None = None,
    sizes: ForwardSizes | None = None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Attention of each query over its blocks, `lists` made with `tokens_of(sizes.rows, N // K)` tokens.

    Args:
      query, key, value, lists, config, scale: as above.
      first_position: of the first query, where the queries are neighbours in one sequence that begins at key
        0; None where that is not known.
      sizes: tile sizes, chosen when None.

    Returns:
      `(out, lse)`: lse natural and float32; 0 and -inf where a query sees nothing.
    """
    batch, num_queries, num_heads, key_dim = query.shape
    num_keys, num_kv_heads, value_dim = value.shape[1:]
    heads, block_size = num_heads // num_kv_heads, config.selection_block_size
    if sizes is None:
        sizes = ForwardSizes.choose(heads, key_dim, value_dim, query.dtype.itemsize, block_size, target())
    tokens = tokens_of(sizes.rows, heads)
    tiles, size = lists.starts.shape[2:]
    assert tiles == triton.cdiv(num_queries, tokens), f"lists of {tiles} tiles, sizes of {tokens} tokens"
    assert block_size % sizes.keys == 0
    (h0, h1), (v0, v1) = split_dim(key_dim), split_dim(value_dim)
    tma = has_tma()
    return launch(
        _attend_blocks_kernel, query, *key_tiles(key, sizes.keys, tma), *key_tiles(value, sizes.keys, tma),
        lists.starts, lists.members, lists.counts, lists.unmasked, lists.rows,
        out=(like(query, (batch, num_queries, num_heads, value_dim)),
             like(query, (batch, num_queries, num_heads), "float32")),
        grid=(tiles, batch * num_kv_heads), num_warps=sizes.num_warps, num_stages=sizes.num_stages,
        registers=sizes.registers,
        num_queries=num_queries, num_keys=num_keys, SIZE=size,
        KV_HEADS=num_kv_heads, HEADS=heads, TOKENS=tokens, PADDED_HEADS=padded_heads(heads), KEYS=sizes.keys,
        STEPS=block_size // sizes.keys, H0=h0, H1=h1, V0=v0, V1=v1, SCALE=float(scale),
        PEEL=sizes.peel, ONE_BLOCK=sizes.peel and in_one_block(first_position, tokens, block_size),
        PRECISION=precision(query.dtype), TMA=tma,
    )  # fmt: skip


@triton.jit
def load_entry(starts, members, step, exists, token, KEYS: tl.constexpr, STEPS: tl.constexpr):
    """First key of a step, and which rows chose its block; no row where the step does not exist."""
    start = tl.load(starts + step // STEPS, mask=exists, other=0) + (step % STEPS) * KEYS
    member = tl.load(members + step // STEPS, mask=exists, other=0)
    return start, ((member >> token) & 1) != 0


@triton.jit
def _attend_step(
    q0, q1, out0, out1, largest, total, keys0, keys1, values0, values1, b, kv_head, num_keys, start, member,
    row, KV_HEADS: tl.constexpr, SCALE: tl.constexpr, KEYS: tl.constexpr, H0: tl.constexpr,
    H1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    bias = tl.where(member, 0.0, float("-inf"))
    k0, k1 = load_keys(keys0, keys1, b, start, kv_head, num_keys, KV_HEADS, KEYS, H0, H1, TMA)
    logits = inner(q0, q1, k0, k1, H1, PRECISION)
    if CAUSAL:
        seen = (start + tl.arange(0, KEYS))[None, :] <= row[:, None]
        logits = tl.where(seen, logits * (SCALE * LOG2_E), float("-inf"))
        top = tl.maximum(largest, tl.max(logits, 1) + bias)
        p = tl.exp2(logits - (top - bias)[:, None])
    else:
        extreme = tl.max(logits, 1) if SCALE >= 0 else tl.min(logits, 1)
        top = tl.maximum(largest, extreme * (SCALE * LOG2_E) + bias)
        p = tl.exp2(logits * (SCALE * LOG2_E) - (top - bias)[:, None])
    decay = tl.exp2(largest - top)
    total = total * decay + tl.sum(p, 1)
    out0 = out0 * decay[:, None]
    if V1 > 0:
        out1 = out1 * decay[:, None]
    v0, v1 = load_keys(values0, values1, b, start, kv_head, num_keys, KV_HEADS, KEYS, V0, V1, TMA)
    out0, out1 = add_product(p.to(v0.dtype), v0, v1, out0, out1, V1, PRECISION)
    return out0, out1, top, total


@triton.jit
def _attend_blocks_kernel(
    query, keys0, keys1, values0, values1, starts, members, counts, unmasked, rows, out, lse, num_queries,
    num_keys, SIZE: tl.constexpr, KV_HEADS: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr,
    PADDED_HEADS: tl.constexpr, KEYS: tl.constexpr, STEPS: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr,
    V0: tl.constexpr, V1: tl.constexpr, SCALE: tl.constexpr, PEEL: tl.constexpr, ONE_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    b = tl.program_id(1) // KV_HEADS
    kv_head = tl.program_id(1) % KV_HEADS
    ROWS: tl.constexpr = TOKENS * PADDED_HEADS
    r = tl.arange(0, ROWS)
    token = r // PADDED_HEADS
    head = r % PADDED_HEADS
    inside = (tile * TOKENS + token < num_queries) & (head < HEADS)
    first_query = b.to(tl.int64) * num_queries + tile * TOKENS
    first_row = first_query * (KV_HEADS * HEADS) + kv_head * HEADS
    offset = token * (KV_HEADS * HEADS) + head
    q0, q1 = load_rows(query + first_row * (H0 + H1), offset * (H0 + H1), inside, H0, H1)
    row = tl.load(rows + first_query + token, mask=inside, other=-1)

    this = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tile
    starts += this * SIZE
    members += this * SIZE
    count = tl.load(counts + this)
    last = tl.maximum(count * STEPS - 1, 0) if PEEL else count * STEPS
    largest = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out0, out1 = zeros(ROWS, V0, V1)
    if PEEL:
        start, member = load_entry(starts, members, last, count > 0, token, KEYS, STEPS)
        out0, out1, largest, total = _attend_step(
            q0, q1, out0, out1, largest, total, keys0, keys1, values0, values1, b, kv_head, num_keys, start,
            member, row, KV_HEADS, SCALE, KEYS, H0, H1, V0, V1, PRECISION, TMA, True,
        )  # fmt: skip
    if ONE_BLOCK:
        free = tl.maximum(count - 1, 0) * STEPS
    else:
        free = tl.minimum(tl.load(unmasked + this) * STEPS, last)
    for i in tl.range(0, free):
        start, member = load_entry(starts, members, i, True, token, KEYS, STEPS)
        out0, out1, largest, total = _attend_step(
            q0, q1, out0, out1, largest, total, keys0, keys1, values0, values1, b, kv_head, num_keys, start,
            member, row, KV_HEADS, SCALE, KEYS, H0, H1, V0, V1, PRECISION, TMA, False,
        )  # fmt: skip
    if STEPS > 1 or not ONE_BLOCK:
        for i in tl.range(free, last):
            start, member = load_entry(starts, members, i, True, token, KEYS, STEPS)
            out0, out1, largest, total = _attend_step(
                q0, q1, out0, out1, largest, total, keys0, keys1, values0, values1, b, kv_head, num_keys,
                start, member, row, KV_HEADS, SCALE, KEYS, H0, H1, V0, V1, PRECISION, TMA, True,
            )  # fmt: skip

    sees = total != 0  # of queries that are not a number, too
    part = 1 / tl.where(sees, total, 1.0)
    natural = tl.where(sees, (largest + tl.log2(total)) * LN_2, float("-inf"))
    tl.store(lse + first_row + offset, natural, mask=inside)
    out0 = out0 * part[:, None]
    if V1 > 0:
        out1 = out1 * part[:, None]
    store_rows(out + first_row * (V0 + V1), offset * (V0 + V1), out0, out1, inside, V0, V1)
