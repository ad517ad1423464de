"""Range attention forward: a tile of neighbouring queries walks the keys that some of them sees.

grid = (ceil(T / tokens), B K): one program per `tokens` queries times the query heads of a KV head, `rows`
rows in all (4 tokens x 16 heads = 64). In the middle every query sees every key and nothing is masked; only
the tiles before and behind it compare. Behind the middle of a window lie the tokens - 1 keys that follow the
first query: a step of 16 keys. Ranges that begin at 0 end in a step of 64 keys, and begin with one where the
whole steps of 128 leave it over. Late queries see most keys in the causal case: they start first. Head-major
order keeps the keys and values of one KV head in L2.

Registers: `rows (keys + V) / (32 num_warps)` floats a thread and the probabilities (64 + 32 + 16 at 64 rows,
64 keys, 4 warps, V = 128): 128 in all, so that four programs share a processor, and 164 and three at 128
keys. Above 128 see `most_registers`. Shared memory: `(rows H + keys max(H, V)) itemsize` at one stage (32 and
48 KB), since keys and values are not there at the same time. Floor at 64k, 64 heads, 128/128: compressed 4.4
TFLOP, 5.5 ms at 800 TFLOP/s; window 1.1 TFLOP, 1.4 ms, 3 % more with what the tiles hold too much. L2 reads
`keys (H + V) itemsize` per step: 68 GB compressed.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Float, Int32
from nsa_jax.kernels.triton.dims import most_registers, padded_heads, split_dim, tokens_of
from nsa_jax.kernels.triton.gpu import has_tma, target
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
from nsa_jax.kernels.triton.range_tiles import NOTHING_KNOWN, Edges, is_seen, range_of, tile_limits


class RangeForwardSizes(NamedTuple):
    """What changes the speed only.

    Attributes:
      rows: query tokens times padded heads of a tile.
      keys: keys of a step.
      num_warps: warps of a program.
      num_stages: steps whose loads are in flight.
      registers: most registers of a thread; None leaves it to the compiler.
      peel: whether the steps at the ends of a tile's keys stand before the loop. With wgmma the copy of the
        queries in shared memory, made for them, then serves the loop too, and it holds no queries in
        registers; without wgmma it is the other way round.
      halve: whether the steps at both ends of ranges that begin at 0 have half as many keys; with `peel`.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    registers: int | None = None
    peel: bool = True
    halve: bool = False

    @classmethod
    def choose(
        cls, heads_per_kv_head: int, key_dim: int, value_dim: int, itemsize: int, front: bool, gated: bool,
        capability: int = 90,
    ) -> "RangeForwardSizes":  # fmt: skip
        """Sizes by heads, dims, bytes of a float, `Edges.front`, `others` or not, and GPU (80, 89, 90)."""
        largest = max(key_dim, value_dim)
        if itemsize == 4 and capability == 90 and largest <= 64:
            return cls(64, 64, 4, 1, peel=False)
        if itemsize == 4:
            return cls(32 if largest <= 128 else 16, 32, 4, 1, peel=False)
        if capability == 90 and heads_per_kv_head > 64:
            return cls(64, 64, 8, 1)
        if capability == 90 and largest <= 192 and value_dim <= 128 and not front:
            return cls(64, 128, 4, 1, 168, halve=True)  # three programs, with half the turns for 128 keys
        if capability == 90:
            return cls(64, 64, 4, 1, most_registers(value_dim, gated))
        wide = largest > 128
        keys = 32 if wide and capability == 89 else 64
        return cls(64 if wide else 128, keys, 4 if wide else 8, 2, peel=False)


def attend_ranges(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    start: Int32[Array, "B T"],
    end: Int32[Array, "B T"],
    scale: float,
    others: tuple[Float[Array, "B T N V"], Float[Array, "B T N V"], Float[Array, "B T N 3"]] | None = None,
    *,
    edges: Edges = NOTHING_KNOWN,
    sizes: RangeForwardSizes | None = None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Attention of each query over keys `start .. end - 1`; `start >= end` sees nothing.

    Args:
      query, key, value, start, end, scale: as above.
      others: outputs of the compressed and the selected branch, and the gates; then `out` is the gated sum.
      edges: what is known of the ranges of neighbouring queries.
      sizes: overrides the choice.

    Returns:
      `(out, lse)`: lse natural and float32; 0 and -inf where a query sees nothing.
    """
    batch, num_queries, num_heads, key_dim = query.shape
    num_keys, num_kv_heads, value_dim = value.shape[1:]
    heads = num_heads // num_kv_heads
    if sizes is None:
        sizes = RangeForwardSizes.choose(
            heads, key_dim, value_dim, query.dtype.itemsize, edges.front, others is not None, target()
        )
    if scale <= 0:  # the kernel looks for the largest product, which must belong to the largest logit
        query, scale = (-query, -scale) if scale < 0 else (query * 0, 1.0)
    assert sizes.peel or not sizes.halve
    tokens = tokens_of(sizes.rows, heads)
    edge_tiles = edges.of_tiles(tokens, sizes.keys, sizes.halve)
    tail = edge_tiles["TAIL"]
    (h0, h1), (v0, v1) = split_dim(key_dim), split_dim(value_dim)
    known = edges.first_position is not None
    tma = has_tma()
    return launch(
        _attend_ranges_kernel, query, *key_tiles(key, sizes.keys, tma), *key_tiles(value, sizes.keys, tma),
        *key_tiles(key, tail, tma), *key_tiles(value, tail, tma),
        None if known else start, None if known else end, *(others or (None, None, None)),
        out=(like(query, (batch, num_queries, num_heads, value_dim)),
             like(query, (batch, num_queries, num_heads), "float32")),
        grid=(triton.cdiv(num_queries, tokens), batch * num_kv_heads),
        num_warps=sizes.num_warps, num_stages=sizes.num_stages, registers=sizes.registers,
        num_queries=num_queries, num_keys=num_keys, KV_HEADS=num_kv_heads, HEADS=heads, TOKENS=tokens,
        PADDED_HEADS=padded_heads(heads), KEYS=sizes.keys, H0=h0, H1=h1, V0=v0, V1=v1, SCALE=float(scale),
        PEEL=sizes.peel, **edge_tiles, **edges.constants(), PRECISION=precision(query.dtype), TMA=tma,
    )  # fmt: skip


@triton.jit
def _attend_tile(
    q0, q1, out0, out1, largest, total, keys0, keys1, values0, values1, b, head, length, first, start, count,
    SCALE: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr,
    V0: tl.constexpr, V1: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    k0, k1 = load_keys(keys0, keys1, b, first, head, length, HEADS, KEYS, H0, H1, TMA)
    logits = inner(q0, q1, k0, k1, H1, PRECISION)
    if MASKED:
        logits = tl.where(is_seen(first, start, count, KEYS), logits, float("-inf"))
    top = tl.maximum(largest, tl.max(logits, 1) * (SCALE * LOG2_E))
    p = tl.exp2(logits * (SCALE * LOG2_E) - top[:, None])
    decay = tl.exp2(largest - top)
    total = total * decay + tl.sum(p, 1)
    out0 = out0 * decay[:, None]
    if V1 > 0:
        out1 = out1 * decay[:, None]
    v0, v1 = load_keys(values0, values1, b, first, head, length, HEADS, KEYS, V0, V1, TMA)
    out0, out1 = add_product(p.to(v0.dtype), v0, v1, out0, out1, V1, PRECISION)
    return out0, out1, top, total


@triton.jit
def _gated_sum(
    out0, out1, out_cmp, out_slc, gates, first_row, offset, inside, V0: tl.constexpr, V1: tl.constexpr
):
    """What `gated_sum` makes of the branches; the window's own output is rounded as if it had been stored."""
    dtype = out_cmp.dtype.element_ty
    gates += first_row * 3
    gate = tl.load(gates + offset * 3 + 2, mask=inside, other=0.0).to(tl.float32)[:, None]
    out0 = gate * out0.to(dtype).to(tl.float32)
    if V1 > 0:
        out1 = gate * out1.to(dtype).to(tl.float32)
    for branch in tl.range(0, 2, num_stages=1):  # not unrolled: two tiles at a time would cost registers
        source = out_cmp
        if branch == 1:
            source = out_slc
        gate = tl.load(gates + offset * 3 + branch, mask=inside, other=0.0).to(tl.float32)[:, None]
        x0, x1 = load_rows(source + first_row * (V0 + V1), offset * (V0 + V1), inside, V0, V1)
        out0 += gate * x0.to(tl.float32)
        if V1 > 0:
            out1 += gate * x1.to(tl.float32)
    return out0, out1


@triton.jit
def _attend_ranges_kernel(
    query, keys0, keys1, values0, values1, tail_keys0, tail_keys1, tail_values0, tail_values1, starts, ends,
    out_cmp, out_slc, gates, out, lse, num_queries, num_keys,
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
    start, end = range_of(first_token + token, inside, starts, ends, FIRST, WINDOW, SIZE, STRIDE)
    count = tl.maximum(end - start, 0)
    low, full_low, full_high, high = tile_limits(
        first_token, num_queries, starts, ends, FIRST, WINDOW, SIZE, STRIDE, TOKENS, KEYS, TAIL
    )

    largest = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out0, out1 = zeros(ROWS, V0, V1)
    if PEEL:
        out0, out1, largest, total = _attend_tile(
            q0, q1, out0, out1, largest, total, tail_keys0, tail_keys1, tail_values0, tail_values1, b,
            kv_head, num_keys, full_high, start, count, SCALE, KV_HEADS, TAIL, H0, H1, V0, V1, PRECISION,
            TMA, True,
        )  # fmt: skip
        if FRONT:
            out0, out1, largest, total = _attend_tile(
                q0, q1, out0, out1, largest, total, keys0, keys1, values0, values1, b, kv_head, num_keys,
                full_low - KEYS, start, count, SCALE, KV_HEADS, KEYS, H0, H1, V0, V1, PRECISION, TMA, True,
            )  # fmt: skip
        elif TAIL < KEYS:  # noqa: SIM102 (one is known when this is compiled, the other is not)
            if full_low > low:
                out0, out1, largest, total = _attend_tile(
                    q0, q1, out0, out1, largest, total, tail_keys0, tail_keys1, tail_values0, tail_values1, b,
                    kv_head, num_keys, low, start, count, SCALE, KV_HEADS, TAIL, H0, H1, V0, V1, PRECISION,
                    TMA, False,
                )  # fmt: skip
    for first in tl.range(full_low, full_high, KEYS):
        out0, out1, largest, total = _attend_tile(
            q0, q1, out0, out1, largest, total, keys0, keys1, values0, values1, b, kv_head, num_keys,
            first, start, count, SCALE, KV_HEADS, KEYS, H0, H1, V0, V1, PRECISION, TMA, False,
        )  # fmt: skip
    if REST or not PEEL:
        for first in tl.range(low, full_low - PEEL * KEYS, KEYS):
            out0, out1, largest, total = _attend_tile(
                q0, q1, out0, out1, largest, total, keys0, keys1, values0, values1, b, kv_head, num_keys,
                first, start, count, SCALE, KV_HEADS, KEYS, H0, H1, V0, V1, PRECISION, TMA, True,
            )  # fmt: skip
        for first in tl.range(full_high + PEEL * TAIL, high, KEYS):
            out0, out1, largest, total = _attend_tile(
                q0, q1, out0, out1, largest, total, keys0, keys1, values0, values1, b, kv_head, num_keys,
                first, start, count, SCALE, KV_HEADS, KEYS, H0, H1, V0, V1, PRECISION, TMA, True,
            )  # fmt: skip

    sees = count > 0
    part = tl.where(sees, 1 / tl.where(sees, total, 1.0), 0.0)
    natural = tl.where(sees, (largest + tl.log2(total)) * LN_2, float("-inf"))
    tl.store(lse + first_row + offset, natural, mask=inside)
    out0 = tl.where(sees[:, None], out0 * part[:, None], 0.0)
    if V1 > 0:
        out1 = tl.where(sees[:, None], out1 * part[:, None], 0.0)
    if gates is not None:
        out0, out1 = _gated_sum(out0, out1, out_cmp, out_slc, gates, first_row, offset, inside, V0, V1)
    store_rows(out + first_row * (V0 + V1), offset * (V0 + V1), out0, out1, inside, V0, V1)
