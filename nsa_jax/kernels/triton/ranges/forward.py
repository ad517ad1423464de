"""Range attention forward (Eq. 4): a tile of queries loops over the keys that at least one of them sees.

grid = (ceil(T / tokens), B K): one program per `tokens` neighbouring queries with all query heads of a KV
head, `rows` rows in all (4 tokens x 16 heads = 64; 21 tokens x 3 heads and an empty row). In the middle of
the loop every query sees every key, and nothing is masked; only the steps at its ends compare. For a window
the middle ends with the range of the first query; the other queries see at most tokens - 1 keys more, which
one step of 16 keys covers, of 32 with 3 heads. Where ranges begin at 0 and a step has 128 keys, the last step
has 64, and so has the first if 64 keys are left over from the whole steps. In the causal case late queries
see the most keys, so they start first. Programs of one KV head follow each other, so its keys and values stay
in L2.

Registers of a thread: `rows (keys + V) / (32 num_warps)` floats, and the probabilities in 16 bits. At 64
rows, 64 keys, 4 warps and V = 128 these are 32 + 64 and 16; 128 in all, so four programs fit on a
multiprocessor. At 128 keys it is 164, and three fit. Shared memory: `(rows H + keys max(H, V)) itemsize` at
one stage (32 and 48 KB), because it never holds keys and values at the same time. Floor at 64k, 64 heads,
128/128: compressed 4.4 TFLOP, 5.5 ms at 800 TFLOP/s; window 1.1 TFLOP, 1.4 ms, plus 3 % for masked positions
inside tiles. L2 reads `keys (H + V) itemsize` per step: 68 GB compressed.
"""

import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Float
from nsa_jax.kernels.triton.dims import split_dim
from nsa_jax.kernels.triton.gated_sum import gated_rows
from nsa_jax.kernels.triton.gpu import has_tma, shape_of
from nsa_jax.kernels.triton.launch import launch, like, named
from nsa_jax.kernels.triton.loading import (
    Keys,
    key_tiles,
    load_keys,
    load_rows,
    query_tile,
    store_rows,
)
from nsa_jax.kernels.triton.pieces import LOG2_E, Dim, inner, kept, precision, scaled
from nsa_jax.kernels.triton.ranges.edges import KeyRanges, Ranges, is_seen, key_limits, run_of, seen_by
from nsa_jax.kernels.triton.sizes import choose_sizes
from nsa_jax.kernels.triton.sizes.ranges import RANGE_FORWARD, RangeQuerySizes
from nsa_jax.kernels.triton.softmax import add_keys, natural_lse, no_keys


def attend_ranges(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    ranges: KeyRanges,
    others: tuple[Float[Array, "B T N V"], Float[Array, "B T N V"], Float[Array, "B T N 3"]] | None = None,
    *,
    scale: float,
    sizes: RangeQuerySizes | None = None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Attention of each query over its range of keys.

    Args:
      query, key, value, ranges, scale: as in `ranges.attend_ranges`.
      others: outputs of the compressed and the selected branch, and the gates; then `out` is the gated sum.
      sizes: used instead of those that `choose_sizes` would take.

    Returns:
      `(out, lse)`; lse is natural and float32. A query that sees nothing gets 0 and -inf.
    """
    batch, num_queries, num_heads, key_dim = query.shape
    num_keys, num_kv_heads, value_dim = value.shape[1:]
    heads = num_heads // num_kv_heads
    if sizes is None:
        shape = shape_of(query, key, value, **ranges.edges.known_shape(), gated=others is not None)
        sizes = choose_sizes(RANGE_FORWARD, shape)
    if scale <= 0:  # the kernel takes the largest product for the largest logit
        query, scale = (-query, -scale) if scale < 0 else (query * 0, 1.0)
    assert sizes.peel or not sizes.halve
    tokens, row_heads, rows = ranges.rows_of_tile(sizes.rows, heads)
    edges, loaded = ranges.kernel_operands(tokens)
    end_steps = edges.end_steps(tokens, sizes.keys, sizes.halve)
    tail = end_steps["TAIL"]
    (h0, h1), (v0, v1) = split_dim(key_dim), split_dim(value_dim)
    tma = has_tma()
    return launch(
        range_forward_kernel, query, *key_tiles(key, sizes.keys, tma), *key_tiles(value, sizes.keys, tma),
        *key_tiles(key, tail, tma), *key_tiles(value, tail, tma),
        *loaded, *(others or (None, None, None)),
        out=(like(query, (batch, num_queries, num_heads, value_dim)),
             like(query, (batch, num_queries, num_heads), "float32")),
        grid=(triton.cdiv(num_queries, tokens), batch * num_kv_heads),
        num_warps=sizes.num_warps, num_stages=sizes.num_stages, registers=sizes.registers,
        num_queries=num_queries, num_keys=num_keys, KV_HEADS=num_kv_heads, G=heads,
        ROW_HEADS=row_heads, TOKENS=tokens, ROWS=rows, KEYS=sizes.keys, H0=h0, H1=h1, V0=v0, V1=v1,
        SCALE=float(scale), PEEL=sizes.peel, **end_steps, **edges.constants(),
        PRECISION=precision(query.dtype), TMA=tma,
    )  # fmt: skip


@triton.jit
def _attend_step(
    q, state, keys, values, first, seen, SCALE: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr
):
    """The softmax state after a step over the keys from `first` on."""
    k = load_keys(keys, first)
    logits = inner(q, k, PRECISION)
    if MASKED:
        logits = tl.where(is_seen(first, seen, keys.ROWS), logits, float("-inf"))
    top = tl.maximum(state.largest, tl.max(logits, 1) * (SCALE * LOG2_E))
    p = tl.exp2(logits * (SCALE * LOG2_E) - top[:, None])
    return add_keys(state, p, top, values, first, PRECISION)


@triton.jit(repr=named("nsa_{BRANCH}_forward"))
def range_forward_kernel(
    query, keys0, keys1, values0, values1, tail_keys0, tail_keys1, tail_values0, tail_values1, starts, ends,
    runs, out_cmp, out_slc, gates, out, lse, num_queries, num_keys,
    KV_HEADS: tl.constexpr, G: tl.constexpr, ROW_HEADS: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
    H0: tl.constexpr, H1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    SCALE: tl.constexpr, TAIL: tl.constexpr, FRONT: tl.constexpr, REST: tl.constexpr, PEEL: tl.constexpr,
    BRANCH: tl.constexpr, FIRST: tl.constexpr, RUN_LENGTH: tl.constexpr, CLIPPED: tl.constexpr,
    WINDOW: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Outputs and log-sum-exps of a tile of queries."""
    KEY: tl.constexpr = Dim(H0, H1)
    VALUE: tl.constexpr = Dim(V0, V1)
    tile = query_tile(
        tl.num_programs(0) - 1 - tl.program_id(0), num_queries, KV_HEADS, G, ROW_HEADS, TOKENS, ROWS
    )
    b, head, rows = tile.b, tile.kv_head, tile.rows
    keys: tl.constexpr = Keys(keys0, keys1, b, head, num_keys, KV_HEADS, KEYS, KEY, TMA)
    values: tl.constexpr = Keys(values0, values1, b, head, num_keys, KV_HEADS, KEYS, VALUE, TMA)
    tail_keys: tl.constexpr = Keys(tail_keys0, tail_keys1, b, head, num_keys, KV_HEADS, TAIL, KEY, TMA)
    tail_values: tl.constexpr = Keys(
        tail_values0, tail_values1, b, head, num_keys, KV_HEADS, TAIL, VALUE, TMA
    )
    run = run_of(tile, runs, num_queries, FIRST, RUN_LENGTH)
    ranges: tl.constexpr = Ranges(
        starts, ends, tile.first_query, num_keys, RUN_LENGTH, CLIPPED, WINDOW, SIZE, STRIDE
    )

    q = load_rows(query, rows, KEY)
    seen = seen_by(tile.first_token + tile.token, rows.inside, ranges, run)
    limits = key_limits(tile.first_token, num_queries, ranges, run, TOKENS, ROWS, KEYS, TAIL)
    state = no_keys(ROWS, VALUE)
    if PEEL:
        state = _attend_step(
            q, state, tail_keys, tail_values, limits.full_high, seen, SCALE, PRECISION, MASKED=True
        )
        if FRONT:
            state = _attend_step(
                q, state, keys, values, limits.full_low - KEYS, seen, SCALE, PRECISION, MASKED=True
            )
        elif TAIL < KEYS:  # noqa: SIM102 (one is known at compile time, the other is not)
            if limits.full_low > limits.low:
                state = _attend_step(
                    q, state, tail_keys, tail_values, limits.low, seen, SCALE, PRECISION, MASKED=False
                )
    for first in tl.range(limits.full_low, limits.full_high, KEYS):
        state = _attend_step(q, state, keys, values, first, seen, SCALE, PRECISION, MASKED=False)
    FRONT_KEYS: tl.constexpr = KEYS if PEEL else 0  # done by the steps above
    TAIL_KEYS: tl.constexpr = TAIL if PEEL else 0
    if REST or not PEEL:
        for first in tl.range(limits.low, limits.full_low - FRONT_KEYS, KEYS):
            state = _attend_step(q, state, keys, values, first, seen, SCALE, PRECISION, MASKED=True)
        for first in tl.range(limits.full_high + TAIL_KEYS, limits.high, KEYS):
            state = _attend_step(q, state, keys, values, first, seen, SCALE, PRECISION, MASKED=True)

    sees = seen.count > 0
    tl.store(lse + rows.first + rows.offset, natural_lse(state, sees), mask=rows.inside)
    part = tl.where(sees, 1 / tl.where(sees, state.total, 1.0), 0.0)
    result = kept(scaled(state.out, part[:, None]), sees[:, None])
    if gates is not None:
        result = gated_rows(result, out_cmp, out_slc, gates, rows, VALUE)
    store_rows(out, rows, result, VALUE)
