"""Selected attention backward, gradient of the queries: the schedule of the forward.

grid = (ceil(T / tokens), B K): one program per `tokens` neighbouring queries times the query heads of a KV
head. It walks the union of their blocks; p comes back from the stored lse, so a block that a query did not
choose needs no mask either: its rows subtract +inf. `previous`, another branch's gradient, is added
before rounding.

Registers: `rows (2 keys + H) / 128` floats a thread at 4 warps (128 at 64 rows, 64 keys, H = 128). Shared
memory: `(rows + stages keys) (H + V) itemsize` (112 KB in bfloat16 at two stages, with what the last product
still reads): two programs a processor. Dims above 128 take 32 keys a step on Hopper. Floor at 64k, 16 blocks
of 64, 64 heads, 128/128: 3.3 TFLOP where neighbours agree, 4.1 ms at 800 TFLOP/s.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Float
from nsa_jax.config import NSAConfig
from nsa_jax.kernels.triton.block_forward import (
    in_one_block,
    load_entry,
    tile_rows,
)
from nsa_jax.kernels.triton.block_lists import UnionLists
from nsa_jax.kernels.triton.dims import most_stages, padded_heads, split_dim, tokens_of
from nsa_jax.kernels.triton.gpu import has_tma, shared_bytes, target
from nsa_jax.kernels.triton.launch import launch, like
from nsa_jax.kernels.triton.pieces import (
    LOG2_E,
    add_product,
    inner,
    key_tiles,
    load_keys,
    load_rows,
    precision,
    row_shift,
    store_rows,
    zeros,
)


class QuerySizes(NamedTuple):
    """What changes the speed only.

    Attributes:
      rows: tokens times padded query heads of a tile, at least 16.
      keys: keys of a step; divides the block size.
      num_warps: warps of a program.
      num_stages: steps whose loads are in flight.
      peel: whether the last step stands before the loops. On Hopper the copy of the queries in shared memory,
        made for it, then serves the loops too, and no loop holds the queries in registers.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    peel: bool = True

    @classmethod
    def choose(
        cls, heads_per_kv_head: int, key_dim: int, value_dim: int, itemsize: int, block_size: int,
        capability: int = 90,
    ) -> "QuerySizes":  # fmt: skip
        """Sizes by heads, dims, bytes of a float, block size and compute capability (80, 89, 90)."""
        rows = tile_rows(heads_per_kv_head, itemsize)
        wide, room = key_dim + value_dim, shared_bytes(capability)
        keys, num_stages = (min(block_size, 64), 2) if itemsize < 4 else (min(block_size, 32), 1)
        hopper = itemsize < 4 and capability >= 90
        if hopper and rows >= 64 and max(key_dim, value_dim) > 128:
            keys, num_stages = min(block_size, 32), most_stages(key_dim, value_dim)

        def used():  # float32 products split both operands, hence half as much again; wgmma wants d_logits
            d_logits = 2 * rows * keys * itemsize if hopper else 0
            return (rows + num_stages * keys) * wide * (itemsize if itemsize < 4 else 6) + d_logits

        while used() > room and keys > 16:
            keys //= 2
        if used() > room:
            num_stages = 1
        while used() > room and rows > max(16, padded_heads(heads_per_kv_head)):
            rows //= 2
        num_warps = 8 if rows > 64 or (wide > 320 and itemsize < 4 and not hopper) else 4
        if rows == 32 and num_stages == 2:  # few heads: more keys would spill
            keys, num_warps = min(keys, 32), 2
        return cls(rows, keys, num_warps, num_stages, hopper)


def block_query_gradient(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    lists: UnionLists,
    config: NSAConfig,
    out: Float[Array, "B T N V"],
    lse: Float[Array, "B T N"],
    d_out: Float[Array, "B T N V"],
    d_lse: Float[Array, "B T N"] | None,
    weight: Float[Array, "B T N"] | None,
    previous: Float[Array, "B T N H"] | None,
    scale: float,
    *,
    first_position: int | None = None,
    sizes: QuerySizes | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"], Float[Array, "B T N"]]:
    """Gradient of the queries, plus `previous`; with what the rows know.

    Args:
      query, key, value, config, scale, first_position: see `attend_blocks`.
      lists: made with `tokens_of(sizes.rows, N // K)` tokens.
      out, lse: what the forward returned.
      d_out: cotangent of the weighted output.
      d_lse: cotangent of `lse`; None for 0.
      weight: weight of each row in that output, 1 when None.
      previous: a gradient to add, in any float dtype.

    Returns:
      `(d_query, products, delta)`, as `range_query_gradient`.
    """
    batch, num_queries, num_heads, key_dim = query.shape
    num_keys, num_kv_heads, value_dim = value.shape[1:]
    heads, block_size = num_heads // num_kv_heads, config.selection_block_size
    if sizes is None:
        sizes = QuerySizes.choose(heads, key_dim, value_dim, query.dtype.itemsize, block_size, target())
    tokens = tokens_of(sizes.rows, heads)
    tiles, size = lists.starts.shape[2:]
    assert tiles == triton.cdiv(num_queries, tokens), f"lists of {tiles} tiles, sizes of {tokens} tokens"
    assert block_size % sizes.keys == 0
    (h0, h1), (v0, v1) = split_dim(key_dim), split_dim(value_dim)
    tma = has_tma()
    return launch(
        _query_gradient_kernel, query, *key_tiles(key, sizes.keys, tma), *key_tiles(value, sizes.keys, tma),
        lists.starts, lists.members, lists.counts, lists.unmasked, lists.rows,
        out, lse, d_out, d_lse, weight, previous, out=(like(query), like(lse), like(lse)),
        grid=(tiles, batch * num_kv_heads), num_warps=sizes.num_warps, num_stages=sizes.num_stages,
        num_queries=num_queries, num_keys=num_keys, SIZE=size,
        KV_HEADS=num_kv_heads, HEADS=heads, TOKENS=tokens, PADDED_HEADS=padded_heads(heads), KEYS=sizes.keys,
        STEPS=block_size // sizes.keys, H0=h0, H1=h1, V0=v0, V1=v1, SCALE=float(scale),
        PEEL=sizes.peel, ONE_BLOCK=sizes.peel and in_one_block(first_position, tokens, block_size),
        PRECISION=precision(query.dtype), TMA=tma,
    )  # fmt: skip


@triton.jit
def load_lse(pointer, offset, inside):
    """Log-sum-exp in base 2; +inf, which makes every weight 0, where a row sees nothing."""
    lse = tl.load(pointer + offset, mask=inside, other=float("-inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)


@triton.jit
def _add_step(
    q0, q1, do0, do1, dq0, dq1, lse, delta, weight, keys0, keys1, values0, values1, b, kv_head, num_keys,
    start, member, row, KV_HEADS: tl.constexpr, SCALE: tl.constexpr, KEYS: tl.constexpr, H0: tl.constexpr,
    H1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    WEIGHTED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    k0, k1 = load_keys(keys0, keys1, b, start, kv_head, num_keys, KV_HEADS, KEYS, H0, H1, TMA)
    v0, v1 = load_keys(values0, values1, b, start, kv_head, num_keys, KV_HEADS, KEYS, V0, V1, TMA)
    logits = inner(q0, q1, k0, k1, H1, PRECISION)
    dp = inner(do0, do1, v0, v1, V1, PRECISION)
    p = tl.exp2(logits * (SCALE * LOG2_E) - tl.where(member, lse, float("inf"))[:, None])
    if CAUSAL:
        p = tl.where((start + tl.arange(0, KEYS))[None, :] <= row[:, None], p, 0.0)
    if WEIGHTED:
        dp = dp * weight[:, None]
    ds = (p * (dp - delta[:, None])).to(k0.dtype)
    return add_product(ds, k0, k1, dq0, dq1, H1, PRECISION)


@triton.jit
def _query_gradient_kernel(
    query, keys0, keys1, values0, values1, starts, members, counts, unmasked, rows, out, lse, d_out, d_lse,
    weight, previous, d_query, products, delta, num_queries, num_keys,
    SIZE: tl.constexpr, KV_HEADS: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr,
    PADDED_HEADS: tl.constexpr, KEYS: tl.constexpr, STEPS: tl.constexpr,
    H0: tl.constexpr, H1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, SCALE: tl.constexpr,
    PEEL: tl.constexpr, ONE_BLOCK: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    b = tl.program_id(1) // KV_HEADS
    kv_head = tl.program_id(1) % KV_HEADS
    ROWS: tl.constexpr = TOKENS * PADDED_HEADS
    WEIGHTED: tl.constexpr = weight is not None
    r = tl.arange(0, ROWS)
    token = r // PADDED_HEADS
    head = r % PADDED_HEADS
    inside = (tile * TOKENS + token < num_queries) & (head < HEADS)
    first_query = b.to(tl.int64) * num_queries + tile * TOKENS
    first_row = first_query * (KV_HEADS * HEADS) + kv_head * HEADS
    offset = token * (KV_HEADS * HEADS) + head
    q0, q1 = load_rows(query + first_row * (H0 + H1), offset * (H0 + H1), inside, H0, H1)
    do0, do1 = load_rows(d_out + first_row * (V0 + V1), offset * (V0 + V1), inside, V0, V1)
    row = tl.load(rows + first_query + token, mask=inside, other=-1)
    lse_2 = load_lse(lse + first_row, offset, inside)
    sees = lse_2 < float("inf")
    shift, gate = row_shift(out, do0, do1, d_lse, weight, products, delta, first_row, offset, inside, V0, V1)

    this = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tile
    starts += this * SIZE
    members += this * SIZE
    count = tl.load(counts + this)
    last = tl.maximum(count * STEPS - 1, 0) if PEEL else count * STEPS
    dq0, dq1 = zeros(ROWS, H0, H1)
    if PEEL:
        start, member = load_entry(starts, members, last, count > 0, token, KEYS, STEPS)
        dq0, dq1 = _add_step(
            q0, q1, do0, do1, dq0, dq1, lse_2, shift, gate, keys0, keys1, values0, values1,
            b, kv_head, num_keys, start, member, row, KV_HEADS, SCALE, KEYS, H0, H1, V0, V1,
            PRECISION, TMA, WEIGHTED, True,
        )  # fmt: skip
    if ONE_BLOCK:
        free = tl.maximum(count - 1, 0) * STEPS
    else:
        free = tl.minimum(tl.load(unmasked + this) * STEPS, last)
    for i in tl.range(0, free):
        start, member = load_entry(starts, members, i, True, token, KEYS, STEPS)
        dq0, dq1 = _add_step(
            q0, q1, do0, do1, dq0, dq1, lse_2, shift, gate, keys0, keys1, values0, values1,
            b, kv_head, num_keys, start, member, row, KV_HEADS, SCALE, KEYS, H0, H1, V0, V1,
            PRECISION, TMA, WEIGHTED, False,
        )  # fmt: skip
    if STEPS > 1 or not ONE_BLOCK:
        for i in tl.range(free, last):
            start, member = load_entry(starts, members, i, True, token, KEYS, STEPS)
            dq0, dq1 = _add_step(
                q0, q1, do0, do1, dq0, dq1, lse_2, shift, gate, keys0, keys1, values0, values1,
                b, kv_head, num_keys, start, member, row, KV_HEADS, SCALE, KEYS, H0, H1, V0, V1,
                PRECISION, TMA, WEIGHTED, True,
            )  # fmt: skip

    dq0 = tl.where(sees[:, None], dq0 * SCALE, 0.0)
    if H1 > 0:
        dq1 = tl.where(sees[:, None], dq1 * SCALE, 0.0)
    if previous is not None:
        old0, old1 = load_rows(previous + first_row * (H0 + H1), offset * (H0 + H1), inside, H0, H1)
        dq0 += old0
        if H1 > 0:
            dq1 += old1
    store_rows(d_query + first_row * (H0 + H1), offset * (H0 + H1), dq0, dq1, inside, H0, H1)
