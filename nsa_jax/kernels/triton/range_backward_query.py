"""Range attention backward to the queries: the loop of the forward with the saved normaliser.

grid = (ceil(T / tokens), B K), tiles and order as in `range_forward`. A step takes three products: the
logits, the gradients of the probabilities `d_out v^T`, and `d_logits k`. The gate (`weight`), an earlier
branch's gradient (`previous`) and the deltas (`row_shift`) are taken in, so none costs a pass of its own.

Registers: `rows (2 keys + H) / (32 num_warps)` floats a thread and the 16-bit d_logits: 168 at 64 rows, 64
keys, 4 warps. Shared memory: `(rows + keys) (H + V) itemsize` at one stage (64 KB at 128/128, bfloat16: three
programs a processor), `(rows + 2 keys) (H + V) itemsize` and what a product needs at two (112 KB, two
programs), which long loops want. Dims above 128 take 32 keys a step on Hopper, up to 64 heads. Floor at 64k,
64 heads, 128/128: compressed 6.6 TFLOP, 8.2 ms at 800 TFLOP/s; window 1.6 TFLOP, 2.1 ms.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Float, Int32
from nsa_jax.kernels.triton.dims import most_stages, padded_heads, split_dim, tokens_of
from nsa_jax.kernels.triton.gpu import has_tma, target
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
from nsa_jax.kernels.triton.range_tiles import NOTHING_KNOWN, Edges, is_seen, range_of, tile_limits


class RangeQuerySizes(NamedTuple):
    """What changes the speed only; see `RangeForwardSizes`."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    registers: int | None = None
    peel: bool = True

    @classmethod
    def choose(
        cls, heads_per_kv_head: int, key_dim: int, value_dim: int, itemsize: int, front: bool,
        capability: int = 90,
    ) -> "RangeQuerySizes":  # fmt: skip
        """Sizes as `RangeForwardSizes.choose` has them."""
        largest = max(key_dim, value_dim)
        wide = largest > 128
        if itemsize == 4 and capability == 90 and largest <= 64:
            return cls(64, 32, 4, 1, peel=False)
        if itemsize == 4:
            return cls(16 if wide else 32, 32, 4, 1, peel=False)
        if capability == 90 and heads_per_kv_head > 64:
            return cls(64, 32 if min(key_dim, value_dim) > 128 else 64, 8, 2)
        if capability == 90 and wide:
            return cls(64, 32, 4, most_stages(key_dim, value_dim))
        if capability == 90 and front:  # for three programs a processor, or four; long loops do without
            return cls(64, 64, 4, 1, 128 if largest <= 64 else 168)
        if capability == 90:
            return cls(64, 64, 4, 2)
        return cls(64, 32 if wide or capability == 89 else 64, 4, 1 if wide else 2, peel=False)


def range_query_gradient(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    start: Int32[Array, "B T"],
    end: Int32[Array, "B T"],
    out: Float[Array, "B T N V"],
    lse: Float[Array, "B T N"],
    d_out: Float[Array, "B T N V"],
    d_lse: Float[Array, "B T N"] | None,
    weight: Float[Array, "B T N"] | None,
    previous: Float[Array, "B T N H"] | None,
    scale: float,
    *,
    edges: Edges = NOTHING_KNOWN,
    sizes: RangeQuerySizes | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"], Float[Array, "B T N"]]:
    """`scale p (weight d_out v^T - delta) k`, plus `previous`, added in float32; with what the rows know.

    Args:
      query, key, value, start, end, scale, edges: as `attend_ranges` had them.
      out, lse: what it returned.
      d_out: gradient of the gated sum, or of `out` where `weight` is None.
      d_lse: gradient of `lse`; None for 0.
      weight: gate of this branch.
      previous: gradient from other branches.
      sizes: overrides the choice.

    Returns:
      `(d_query, products, delta)`. For each row, in float32: `products` is the sum of `out * d_out` over V,
      which is the gradient of the gate, and `delta = weight products - d_lse`.
    """
    batch, num_queries, num_heads, key_dim = query.shape
    num_keys, num_kv_heads, value_dim = value.shape[1:]
    heads = num_heads // num_kv_heads
    if sizes is None:
        sizes = RangeQuerySizes.choose(heads, key_dim, value_dim, query.dtype.itemsize, edges.front, target())
    tokens = tokens_of(sizes.rows, heads)
    edge_tiles = edges.of_tiles(tokens, sizes.keys)
    tail = edge_tiles["TAIL"]
    known = edges.first_position is not None
    tma = has_tma()
    (h0, h1), (v0, v1) = split_dim(key_dim), split_dim(value_dim)
    return launch(
        _query_gradient_kernel, query, *key_tiles(key, sizes.keys, tma), *key_tiles(value, sizes.keys, tma),
        *key_tiles(key, tail, tma), *key_tiles(value, tail, tma),
        None if known else start, None if known else end, out, lse, d_out, d_lse, weight, previous,
        out=(like(query), like(lse), like(lse)),
        grid=(triton.cdiv(num_queries, tokens), batch * num_kv_heads),
        num_warps=sizes.num_warps, num_stages=sizes.num_stages, registers=sizes.registers,
        num_queries=num_queries, num_keys=num_keys, KV_HEADS=num_kv_heads, HEADS=heads, TOKENS=tokens,
        PADDED_HEADS=padded_heads(heads), KEYS=sizes.keys, H0=h0, H1=h1, V0=v0, V1=v1, SCALE=float(scale),
        PEEL=sizes.peel, **edge_tiles, **edges.constants(), PRECISION=precision(query.dtype), TMA=tma,
    )  # fmt: skip


@triton.jit
def _add_tile(
    q0, q1, do0, do1, dq0, dq1, lse, delta, weight, keys0, keys1, values0, values1, b, head, length,
    first, start, count, SCALE: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
    H0: tl.constexpr, H1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, WEIGHTED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    k0, k1 = load_keys(keys0, keys1, b, first, head, length, HEADS, KEYS, H0, H1, TMA)
    v0, v1 = load_keys(values0, values1, b, first, head, length, HEADS, KEYS, V0, V1, TMA)
    logits = inner(q0, q1, k0, k1, H1, PRECISION)
    dp = inner(do0, do1, v0, v1, V1, PRECISION)
    p = tl.exp2(logits * (SCALE * LOG2_E) - lse[:, None])
    if WEIGHTED:
        dp = dp * weight[:, None]
    ds = p * (dp - delta[:, None])
    if MASKED:
        ds = tl.where(is_seen(first, start, count, KEYS), ds, 0.0)
    return add_product(ds.to(k0.dtype), k0, k1, dq0, dq1, H1, PRECISION)


@triton.jit
def _query_gradient_kernel(
    query, keys0, keys1, values0, values1, tail_keys0, tail_keys1, tail_values0, tail_values1, starts, ends,
    out, lse, d_out, d_lse, weight, previous, d_query, products, delta, num_queries, num_keys,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, PADDED_HEADS: tl.constexpr,
    KEYS: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    SCALE: tl.constexpr, TAIL: tl.constexpr, FRONT: tl.constexpr, REST: tl.constexpr, PEEL: tl.constexpr,
    FIRST: tl.constexpr, WINDOW: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b = tl.program_id(1) // KV_HEADS
    kv_head = tl.program_id(1) % KV_HEADS
    ROWS: tl.constexpr = TOKENS * PADDED_HEADS
    r = tl.arange(0, ROWS)
    token = r // PADDED_HEADS
    head = r % PADDED_HEADS
    first_token = tile * TOKENS
    inside = (first_token + token < num_queries) & (head < HEADS)
    first_query = b.to(tl.int64) * num_queries
    if FIRST is None:
        starts += first_query
        ends += first_query
    first_row = (first_query + first_token) * (KV_HEADS * HEADS) + kv_head * HEADS
    offset = token * (KV_HEADS * HEADS) + head

    q0, q1 = load_rows(query + first_row * (H0 + H1), offset * (H0 + H1), inside, H0, H1)
    do0, do1 = load_rows(d_out + first_row * (V0 + V1), offset * (V0 + V1), inside, V0, V1)
    start, end = range_of(first_token + token, inside, starts, ends, FIRST, WINDOW, SIZE, STRIDE)
    count = tl.maximum(end - start, 0)
    sees = count > 0
    # exp2(x - inf) = 0: rows that see nothing take no part, also in tiles without a mask.
    normaliser = tl.load(lse + first_row + offset, mask=sees, other=float("inf")) * LOG2_E
    shift, gate = row_shift(out, do0, do1, d_lse, weight, products, delta, first_row, offset, inside, V0, V1)
    low, full_low, full_high, high = tile_limits(
        first_token, num_queries, starts, ends, FIRST, WINDOW, SIZE, STRIDE, TOKENS, KEYS, KEYS
    )

    dq0, dq1 = zeros(ROWS, H0, H1)
    if PEEL:
        dq0, dq1 = _add_tile(
            q0, q1, do0, do1, dq0, dq1, normaliser, shift, gate,
            tail_keys0, tail_keys1, tail_values0, tail_values1,
            b, kv_head, num_keys, full_high, start, count, SCALE, KV_HEADS, TAIL, H0, H1, V0, V1,
            PRECISION, TMA, weight is not None, True,
        )  # fmt: skip
        if FRONT:
            dq0, dq1 = _add_tile(
                q0, q1, do0, do1, dq0, dq1, normaliser, shift, gate, keys0, keys1, values0, values1,
                b, kv_head, num_keys, full_low - KEYS, start, count, SCALE, KV_HEADS, KEYS, H0, H1, V0, V1,
                PRECISION, TMA, weight is not None, True,
            )  # fmt: skip
    for first in tl.range(full_low, full_high, KEYS):
        dq0, dq1 = _add_tile(
            q0, q1, do0, do1, dq0, dq1, normaliser, shift, gate, keys0, keys1, values0, values1,
            b, kv_head, num_keys, first, start, count, SCALE, KV_HEADS, KEYS, H0, H1, V0, V1,
            PRECISION, TMA, weight is not None, False,
        )  # fmt: skip
    if REST or not PEEL:
        for first in tl.range(low, full_low - PEEL * KEYS, KEYS):
            dq0, dq1 = _add_tile(
                q0, q1, do0, do1, dq0, dq1, normaliser, shift, gate, keys0, keys1, values0, values1,
                b, kv_head, num_keys, first, start, count, SCALE, KV_HEADS, KEYS, H0, H1, V0, V1,
                PRECISION, TMA, weight is not None, True,
            )  # fmt: skip
        for first in tl.range(full_high + PEEL * TAIL, high, KEYS):
            dq0, dq1 = _add_tile(
                q0, q1, do0, do1, dq0, dq1, normaliser, shift, gate, keys0, keys1, values0, values1,
                b, kv_head, num_keys, first, start, count, SCALE, KV_HEADS, KEYS, H0, H1, V0, V1,
                PRECISION, TMA, weight is not None, True,
            )  # fmt: skip

    dq0 = tl.where(sees[:, None], dq0 * SCALE, 0.0)
    if H1 > 0:
        dq1 = tl.where(sees[:, None], dq1 * SCALE, 0.0)
    if previous is not None:
        other0, other1 = load_rows(previous + first_row * (H0 + H1), offset * (H0 + H1), inside, H0, H1)
        dq0 += other0.to(tl.float32)
        if H1 > 0:
            dq1 += other1.to(tl.float32)
    store_rows(d_query + first_row * (H0 + H1), offset * (H0 + H1), dq0, dq1, inside, H0, H1)
