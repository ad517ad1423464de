"""Selected attention backward, gradient of the queries: the schedule of the forward.

Source: the gradient of Eq. 12. grid = (ceil(T / tokens), B K): one program per `tokens` neighbouring queries
times the query heads of a KV head. It loops over the union of their blocks, as the forward does, so the
gradient stays in registers. The probabilities are computed again from the stored log-sum-exp; a row that did
not choose a block subtracts +inf instead, which makes them 0 without a mask. `previous`, the gradient from
another branch, is added before rounding.

Registers: `rows (2 keys + H) / 128` floats a thread at 4 warps (128 at 64 rows, 64 keys, H = 128). Shared
memory: `(rows + stages keys) (H + V) itemsize`, and `2 rows keys itemsize` for the gradient of the logits,
which wgmma reads from there (112 KB in bfloat16 at two stages: two programs per SM). Floor at 64k, 16 blocks
of 64, 64 heads, 128/128: 3.3 TFLOP if neighbours choose the same blocks, 4.1 ms at 800 TFLOP/s.
"""

import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Float
from nsa_jax.config import NSAConfig
from nsa_jax.kernels.triton.backward import Backward
from nsa_jax.kernels.triton.dims import split_dim
from nsa_jax.kernels.triton.gpu import has_tma
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
from nsa_jax.kernels.triton.selected.forward import Entries, load_step, steps_of
from nsa_jax.kernels.triton.selected.unions import UnionLists, rows_of_listed_tile
from nsa_jax.kernels.triton.sizes.selected import SelectedGradientSizes
from nsa_jax.kernels.triton.softmax import Sources, load_lse, row_numbers


def selected_query_gradient(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    lists: UnionLists,
    config: NSAConfig,
    given: Backward,
    *,
    scale: float,
    one_block: bool = False,
    may_rest: bool = False,
    sizes: SelectedGradientSizes,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"], Float[Array, "B T N"]]:
    """Gradient of the queries plus `previous`, and two numbers of each row that other gradients need.

    Where a key is not finite, it is the one before `recompute_query_gradient`.

    Args:
      query, key, value, config, scale, one_block: see `attend_selected`.
      may_rest: whether counts below 0 say that just the two numbers of each row are wanted.
      lists: the merged blocks of each tile of `rows_of_listed_tile(sizes.rows, N // K)`.
      given: what the forward returned, and the cotangents.
      sizes: tile sizes.

    Returns:
      `(d_query, products, delta)`, as `range_query_gradient`.
    """
    batch, num_queries, num_heads, key_dim = query.shape
    num_keys, num_kv_heads, value_dim = value.shape[1:]
    heads, block_size = num_heads // num_kv_heads, config.selection_block_size
    (tokens, row_heads, rows), keys = rows_of_listed_tile(sizes.rows, heads), min(sizes.keys, block_size)
    tiles, size = lists.starts.shape[2:]
    assert tiles == triton.cdiv(num_queries, tokens), f"lists of {tiles} tiles, sizes of {tokens} tokens"
    assert block_size % keys == 0
    (h0, h1), (v0, v1) = split_dim(key_dim), split_dim(value_dim)
    tma = has_tma()
    return launch(
        selected_query_gradient_kernel, query, *key_tiles(key, keys, tma), *key_tiles(value, keys, tma),
        lists.starts, lists.members, lists.counts, lists.unmasked, lists.rows,
        *given, out=(like(query), like(given.lse), like(given.lse)),
        grid=(tiles, batch * num_kv_heads), num_warps=sizes.num_warps, num_stages=sizes.num_stages,
        registers=sizes.registers,
        num_queries=num_queries, num_keys=num_keys, ENTRIES=size,
        KV_HEADS=num_kv_heads, G=heads, ROW_HEADS=row_heads, TOKENS=tokens, ROWS=rows, KEYS=keys,
        STEPS=block_size // keys, H0=h0, H1=h1, V0=v0, V1=v1, SCALE=float(scale),
        PEEL=sizes.peel, ONE_BLOCK=sizes.peel and one_block, MAY_REST=may_rest,
        PRECISION=precision(query.dtype), TMA=tma,
    )  # fmt: skip


@triton.jit
def _add_entry(
    dq, q, d_out, numbers, keys, values, step, row,
    SCALE: tl.constexpr, PRECISION: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Adds the keys of a step to `dq`, which is not multiplied by the scale yet."""
    k = load_keys(keys, step.start)
    v = load_keys(values, step.start)
    logits = inner(q, k, PRECISION)
    dp = inner(d_out, v, PRECISION)
    p = tl.exp2(logits * (SCALE * LOG2_E) - tl.where(step.member, numbers.lse, float("inf"))[:, None])
    if CAUSAL:
        p = tl.where((step.start + tl.arange(0, keys.ROWS))[None, :] <= row[:, None], p, 0.0)
    if numbers.gate is not None:
        dp = dp * numbers.gate[:, None]
    ds = (p * (dp - numbers.delta[:, None])).to(k.first.dtype)
    return add_product(ds, k, dq, PRECISION)


@triton.jit(repr=named("nsa_selected_query_gradient"))
def selected_query_gradient_kernel(
    query, keys0, keys1, values0, values1, starts, members, counts, unmasked, last_keys, out, lse, d_out,
    d_lse, gate, previous, d_query, products, delta, num_queries, num_keys,
    ENTRIES: tl.constexpr, KV_HEADS: tl.constexpr, G: tl.constexpr, ROW_HEADS: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STEPS: tl.constexpr,
    H0: tl.constexpr, H1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, SCALE: tl.constexpr,
    PEEL: tl.constexpr, ONE_BLOCK: tl.constexpr, MAY_REST: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of queries, and `products` and `delta` of its rows."""
    KEY: tl.constexpr = Dim(H0, H1)
    VALUE: tl.constexpr = Dim(V0, V1)
    tile = query_tile(tl.program_id(0), num_queries, KV_HEADS, G, ROW_HEADS, TOKENS, ROWS)
    b, head, rows = tile.b, tile.kv_head, tile.rows
    keys: tl.constexpr = Keys(keys0, keys1, b, head, num_keys, KV_HEADS, KEYS, KEY, TMA)
    values: tl.constexpr = Keys(values0, values1, b, head, num_keys, KV_HEADS, KEYS, VALUE, TMA)
    sources: tl.constexpr = Sources(out, d_lse, gate, products, delta)
    this = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    if MAY_REST:  # noqa: SIM102 (one is known at compile time, the other is not)
        if tl.load(counts + this) < 0:
            row_numbers(sources, None, load_rows(d_out, rows, VALUE), rows, VALUE)
            return
    q = load_rows(query, rows, KEY)
    d_out_rows = load_rows(d_out, rows, VALUE)
    row = tl.load(last_keys + tile.first_query + tile.first_token + tile.token, mask=rows.inside, other=-1)
    lse_2 = load_lse(lse, rows)
    sees = lse_2 != float("inf")  # a row whose log-sum-exp is NaN sees something
    numbers = row_numbers(sources, lse_2, d_out_rows, rows, VALUE)

    entries: tl.constexpr = Entries(starts + this * ENTRIES, members + this * ENTRIES, STEPS, KEYS)
    count = tl.load(counts + this)
    steps = steps_of(count, unmasked + this, STEPS, PEEL, ONE_BLOCK)
    dq = zeros(ROWS, KEY)
    if PEEL:
        step = load_step(entries, steps.last, count > 0, tile.token)
        dq = _add_entry(
            dq, q, d_out_rows, numbers, keys, values, step, row,
            SCALE=SCALE, PRECISION=PRECISION, CAUSAL=True,
        )  # fmt: skip
    for i in tl.range(0, steps.free):
        step = load_step(entries, i, True, tile.token)
        dq = _add_entry(
            dq, q, d_out_rows, numbers, keys, values, step, row,
            SCALE=SCALE, PRECISION=PRECISION, CAUSAL=False,
        )  # fmt: skip
    if STEPS > 1 or not ONE_BLOCK:
        for i in tl.range(steps.free, steps.last):
            step = load_step(entries, i, True, tile.token)
            dq = _add_entry(
                dq, q, d_out_rows, numbers, keys, values, step, row,
                SCALE=SCALE, PRECISION=PRECISION, CAUSAL=True,
            )  # fmt: skip

    dq = kept(scaled(dq, SCALE), sees[:, None])
    if previous is not None:
        dq = added(dq, load_rows(previous, rows, KEY))
    store_rows(d_query, rows, dq, KEY)
