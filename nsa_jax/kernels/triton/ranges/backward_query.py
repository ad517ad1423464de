"""Range attention backward to the queries (Eq. 4): the loop of the forward with the saved log-sum-exp.

grid = (ceil(T / tokens), B K), with the tiles and the order of `ranges.forward`. A step takes three products:
the logits, the gradients of the probabilities `d_out v^T`, and `d_logits k`. The kernel also applies the gate
(`gate`), adds the gradient of the branches before (`previous`) and forms the deltas (`row_numbers`), so
none of these costs a pass of its own.

Registers of a thread: `rows (2 keys + H) / (32 num_warps)` floats and the d_logits in 16 bits, 168 in all at
64 rows, 64 keys, 4 warps. Shared memory: `(rows + keys) (H + V) itemsize` at one stage (64 KB at 128/128 in
bfloat16: three programs on a multiprocessor). At two stages, which pay in long loops, it is `(rows + 2 keys)
(H + V) itemsize` and the operand of a product (112 KB, two programs). Floor at 64k, 64 heads, 128/128:
compressed 6.6 TFLOP, 8.2 ms at 800 TFLOP/s; window 1.6 TFLOP, 2.1 ms.
"""

import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Float
from nsa_jax.kernels.triton.backward import Backward
from nsa_jax.kernels.triton.dims import split_dim
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
from nsa_jax.kernels.triton.pieces import (
    LOG2_E,
    Dim,
    add_product,
    added,
    inner,
    kept,
    precision,
    scaled,
    zeros,
)
from nsa_jax.kernels.triton.ranges.edges import KeyRanges, Ranges, is_seen, key_limits, run_of, seen_by
from nsa_jax.kernels.triton.sizes import choose_sizes
from nsa_jax.kernels.triton.sizes.ranges import RANGE_QUERY_GRADIENT, RangeQuerySizes
from nsa_jax.kernels.triton.softmax import Sources, row_numbers


def range_query_gradient(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    ranges: KeyRanges,
    given: Backward,
    *,
    scale: float,
    sizes: RangeQuerySizes | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"], Float[Array, "B T N"]]:
    """`scale p (gate d_out v^T - delta) k`, plus `previous`, added in float32; and two numbers of each row.

    Args:
      query, key, value, ranges, scale: as given to `attend_ranges`.
      given: what it returned, and the cotangents.
      sizes: used instead of those that `choose_sizes` would take.

    Returns:
      `(d_query, products, delta)`. For each row, in float32: `products` is the sum of `out * d_out` over V,
      which is the gradient of the gate, and `delta = gate products - d_lse`.
    """
    batch, num_queries, num_heads, key_dim = query.shape
    num_keys, num_kv_heads, value_dim = value.shape[1:]
    heads = num_heads // num_kv_heads
    if sizes is None:
        shape = shape_of(query, key, value, **ranges.edges.known_shape())
        sizes = choose_sizes(RANGE_QUERY_GRADIENT, shape)
    tokens, row_heads, rows = ranges.rows_of_tile(sizes.rows, heads)
    edges, loaded = ranges.kernel_operands(tokens)
    end_steps = edges.end_steps(tokens, sizes.keys)
    tail = end_steps["TAIL"]
    tma = has_tma()
    (h0, h1), (v0, v1) = split_dim(key_dim), split_dim(value_dim)
    return launch(
        range_query_gradient_kernel, query,
        *key_tiles(key, sizes.keys, tma), *key_tiles(value, sizes.keys, tma),
        *key_tiles(key, tail, tma), *key_tiles(value, tail, tma),
        *loaded, *given,
        out=(like(query), like(given.lse), like(given.lse)),
        grid=(triton.cdiv(num_queries, tokens), batch * num_kv_heads),
        num_warps=sizes.num_warps, num_stages=sizes.num_stages, registers=sizes.registers,
        num_queries=num_queries, num_keys=num_keys, KV_HEADS=num_kv_heads, G=heads,
        ROW_HEADS=row_heads, TOKENS=tokens, ROWS=rows, KEYS=sizes.keys, H0=h0, H1=h1, V0=v0, V1=v1,
        SCALE=float(scale), PEEL=sizes.peel, **end_steps, **edges.constants(),
        PRECISION=precision(query.dtype), TMA=tma,
    )  # fmt: skip


@triton.jit
def _add_step(
    dq, q, d_out, numbers, keys, values, first, seen,
    SCALE: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`dq`, not scaled yet, plus what the keys from `first` on contribute."""
    k = load_keys(keys, first)
    v = load_keys(values, first)
    logits = inner(q, k, PRECISION)
    dp = inner(d_out, v, PRECISION)
    p = tl.exp2(logits * (SCALE * LOG2_E) - numbers.lse[:, None])
    if numbers.gate is not None:
        dp = dp * numbers.gate[:, None]
    ds = p * (dp - numbers.delta[:, None])
    if MASKED:
        ds = tl.where(is_seen(first, seen, keys.ROWS), ds, 0.0)
    return add_product(ds.to(k.first.dtype), k, dq, PRECISION)


@triton.jit(repr=named("nsa_{BRANCH}_query_gradient"))
def range_query_gradient_kernel(
    query, keys0, keys1, values0, values1, tail_keys0, tail_keys1, tail_values0, tail_values1, starts, ends,
    runs, out, lse, d_out, d_lse, gate, previous, d_query, products, delta, num_queries, num_keys,
    KV_HEADS: tl.constexpr, G: tl.constexpr, ROW_HEADS: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
    H0: tl.constexpr, H1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    SCALE: tl.constexpr, TAIL: tl.constexpr, FRONT: tl.constexpr, REST: tl.constexpr, PEEL: tl.constexpr,
    BRANCH: tl.constexpr, FIRST: tl.constexpr, RUN_LENGTH: tl.constexpr, CLIPPED: tl.constexpr,
    WINDOW: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of queries, and products and delta of its rows."""
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
    d_out_rows = load_rows(d_out, rows, VALUE)
    seen = seen_by(tile.first_token + tile.token, rows.inside, ranges, run)
    sees = seen.count > 0
    # exp2(x - inf) = 0: so rows that see nothing add nothing, even in steps without a mask.
    normaliser = tl.load(lse + rows.first + rows.offset, mask=sees, other=float("inf")) * LOG2_E
    numbers = row_numbers(Sources(out, d_lse, gate, products, delta), normaliser, d_out_rows, rows, VALUE)
    limits = key_limits(tile.first_token, num_queries, ranges, run, TOKENS, ROWS, KEYS, KEYS)

    dq = zeros(ROWS, KEY)
    if PEEL:
        dq = _add_step(
            dq, q, d_out_rows, numbers, tail_keys, tail_values, limits.full_high, seen,
            SCALE=SCALE, PRECISION=PRECISION, MASKED=True,
        )  # fmt: skip
        if FRONT:
            dq = _add_step(
                dq, q, d_out_rows, numbers, keys, values, limits.full_low - KEYS, seen,
                SCALE=SCALE, PRECISION=PRECISION, MASKED=True,
            )  # fmt: skip
    for first in tl.range(limits.full_low, limits.full_high, KEYS):
        dq = _add_step(
            dq, q, d_out_rows, numbers, keys, values, first, seen,
            SCALE=SCALE, PRECISION=PRECISION, MASKED=False,
        )  # fmt: skip
    FRONT_KEYS: tl.constexpr = KEYS if PEEL else 0  # done by the steps above
    TAIL_KEYS: tl.constexpr = TAIL if PEEL else 0
    if REST or not PEEL:
        for first in tl.range(limits.low, limits.full_low - FRONT_KEYS, KEYS):
            dq = _add_step(
                dq, q, d_out_rows, numbers, keys, values, first, seen,
                SCALE=SCALE, PRECISION=PRECISION, MASKED=True,
            )  # fmt: skip
        for first in tl.range(limits.full_high + TAIL_KEYS, limits.high, KEYS):
            dq = _add_step(
                dq, q, d_out_rows, numbers, keys, values, first, seen,
                SCALE=SCALE, PRECISION=PRECISION, MASKED=True,
            )  # fmt: skip

    dq = kept(scaled(dq, SCALE), sees[:, None])
    if previous is not None:
        dq = added(dq, load_rows(previous, rows, KEY))
    store_rows(d_query, rows, dq, KEY)
