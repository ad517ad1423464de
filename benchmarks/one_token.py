"""Selected attention with one query token a program, as in public kernels: the baseline of ours.

Nothing is shared between tokens. The G query heads of a KV head are padded to the 16 rows of the smallest
matrix product. Tiles are loaded as in our kernels, so only the schedule differs.

* Forward, grid = (T, B K): one program per query token and KV head. It reads the token's blocks one after the
  other and attends with the token's heads.
* Gradient of the queries, grid = (T, B K): programs and loop as in the forward.
* Gradients of keys and values, grid = (items,): an item is up to `item` of the tokens that selected one block
  of a KV head. A program holds the block with both gradients, and goes through the tokens one by one. Lists
  of tokens and sums over items are those of our kernels (`items`, `join_items`); there are no atomics.

Public kernels have one program for each block, which is an `item` of T. But every token selects block 0: its
program would run long after all others.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from nsa_jax import layout
from nsa_jax.array_typing import Array, Float, Int
from nsa_jax.config import NSAConfig
from nsa_jax.kernels.triton.dims import padded_heads, split_dim
from nsa_jax.kernels.triton.gpu import has_tma
from nsa_jax.kernels.triton.launch import launch, like, named
from nsa_jax.kernels.triton.loading import Keys, Rows, key_tiles, load_keys, load_rows, store_rows
from nsa_jax.kernels.triton.pieces import (
    LOG2_E,
    Dim,
    KeyGradients,
    add_product,
    inner,
    precision,
    scaled,
    zeros,
)
from nsa_jax.kernels.triton.selected.backward_key import join_items
from nsa_jax.kernels.triton.selected.item_table import ITEM_FIELDS
from nsa_jax.kernels.triton.selected.items import invert
from nsa_jax.kernels.triton.softmax import add_keys, load_lse, natural_lse, no_keys


class Settings(NamedTuple):
    """What a tuning run varies: `(num_warps, num_stages)` of each kernel, and the most tokens of an item.

    These were the fastest on an H100 with 1 to 8 heads of 128 and 32k tokens. The key gradients with one
    program a block (`item` of T) took 2 to 8 times as long as with 1024, `(num_warps, num_stages)` alike.
    """

    forward: tuple[int, int] = (2, 2)
    query: tuple[int, int] = (4, 3)
    key: tuple[int, int] = (4, 3)
    item: int = 1024


def selected_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    block_indices: Int[Array, "B T K R"],
    *,
    config: NSAConfig,
    settings: Settings = Settings(),  # noqa: B008 (immutable)
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """`(out, lse)` as `nsa_jax.attention.selected_attention`, of the last `T` of `S` tokens."""
    return _selected_attention(query, key, value, block_indices, config, settings)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _selected_attention(query, key, value, block_indices, config, settings):
    batch, num_queries, num_heads, _ = query.shape
    num_warps, num_stages = settings.forward
    return launch(
        one_token_forward_kernel, query, *_tiles(key, value, config), block_indices,
        out=(like(query, (batch, num_queries, num_heads, value.shape[3])),
             like(query, (batch, num_queries, num_heads), "float32")),
        grid=(num_queries, batch * key.shape[2]), num_warps=num_warps, num_stages=num_stages,
        SLOTS=block_indices.shape[3], TMA=has_tma(), **_sizes(query, key, value, config),
    )  # fmt: skip


def _forward(query, key, value, block_indices, config, settings):
    results = _selected_attention(query, key, value, block_indices, config, settings)
    return results, (query, key, value, block_indices, *results)


def _backward(config, settings, residuals, cotangents):
    *operands, out, lse = residuals
    d_out, d_lse = cotangents
    delta = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(-1) - d_lse
    given = *operands, lse, delta, d_out
    return query_gradient(given, config, settings), *key_gradients(given, config, settings), None


_selected_attention.defvjp(_forward, _backward)


def query_gradient(given, config, settings):
    """Gradient of the queries; `delta`, `[B, T, N]`, is `out . d_out - d_lse` of each row."""
    query, key, value, block_indices, lse, delta, d_out = given
    num_warps, num_stages = settings.query
    return launch(
        one_token_query_gradient_kernel, query, *_tiles(key, value, config), block_indices, lse, delta, d_out,
        out=like(query), grid=(query.shape[1], query.shape[0] * key.shape[2]), num_warps=num_warps,
        num_stages=num_stages, SLOTS=block_indices.shape[3], TMA=has_tma(),
        **_sizes(query, key, value, config),
    )  # fmt: skip


def key_gradients(given, config, settings):
    """Gradients of the keys and of the values, with the lists of tokens that they need."""
    query, key, value, block_indices, lse, delta, d_out = given
    batch, num_queries = query.shape[:2]
    num_keys, block = key.shape[1], config.selection_block_size
    placement = layout.place(config, batch=batch, num_queries=num_queries, num_keys=num_keys)
    items = invert(block_indices, placement, num_keys, item=settings.item)
    slots = max(items.num_partials, 1)
    num_warps, num_stages = settings.key
    sums = launch(
        one_token_key_gradients_kernel, query, key, value, items.tokens, items.items, lse, delta, d_out,
        out=(like(query, (slots, block, key.shape[3]), "float32"),
             like(query, (slots, block, value.shape[3]), "float32"), like(key), like(value)),
        grid=(items.items.shape[0],), num_warps=num_warps, num_stages=num_stages, num_queries=num_queries,
        FIELDS=ITEM_FIELDS, **_sizes(query, key, value, config),
    )  # fmt: skip
    return join_items(items, *sums)


def _tiles(key, value, config):
    block, tma = config.selection_block_size, has_tma()
    return *key_tiles(key, block, tma), *key_tiles(value, block, tma)


def _sizes(query, key, value, config):
    """What all kernels are given."""
    num_keys, num_kv_heads, key_dim = key.shape[1:]
    heads = query.shape[2] // num_kv_heads
    (h0, h1), (v0, v1) = split_dim(key_dim), split_dim(value.shape[3])
    return dict(
        num_keys=num_keys, first_position=num_keys - query.shape[1], BLOCK=config.selection_block_size,
        KV_HEADS=num_kv_heads, G=heads, ROWS=max(padded_heads(heads), 16), H0=h0, H1=h1, V0=v0, V1=v1,
        SCALE=key_dim**-0.5, PRECISION=precision(query.dtype),
    )  # fmt: skip


@triton.jit(repr=named("one_token_forward"))
def one_token_forward_kernel(
    query, keys0, keys1, values0, values1, block_indices, out, lse, num_keys, first_position,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr, KV_HEADS: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr,
    H0: tl.constexpr, H1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, SCALE: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Outputs and log-sum-exps of one token."""
    KEY: tl.constexpr = Dim(H0, H1)
    VALUE: tl.constexpr = Dim(V0, V1)
    b = tl.program_id(1) // KV_HEADS
    kv_head = tl.program_id(1) % KV_HEADS
    token = tl.program_id(0)
    position = first_position + token
    keys: tl.constexpr = Keys(keys0, keys1, b, kv_head, num_keys, KV_HEADS, BLOCK, KEY, TMA)
    values: tl.constexpr = Keys(values0, values1, b, kv_head, num_keys, KV_HEADS, BLOCK, VALUE, TMA)
    head = tl.arange(0, ROWS)
    at = (b.to(tl.int64) * tl.num_programs(0) + token) * KV_HEADS + kv_head
    block_indices += at * SLOTS
    rows = Rows(at * G, head, head < G)
    q = load_rows(query, rows, KEY)
    state = no_keys(ROWS, VALUE)
    for slot in tl.range(0, SLOTS):
        start = tl.load(block_indices + slot) * BLOCK
        seen = (start >= 0) & (start + tl.arange(0, BLOCK) <= position)
        first = tl.maximum(start, 0)
        logits = inner(q, load_keys(keys, first), PRECISION) * (SCALE * LOG2_E)
        logits = tl.where(seen[None, :], logits, float("-inf"))
        top = tl.maximum(state.largest, tl.max(logits, 1))
        state = add_keys(state, tl.exp2(logits - top[:, None]), top, values, first, PRECISION)
    sees = state.total > 0
    tl.store(lse + rows.first + head, natural_lse(state, sees), mask=rows.inside)
    part = 1 / tl.where(sees, state.total, 1.0)
    store_rows(out, rows, scaled(state.out, part[:, None]), VALUE)


@triton.jit(repr=named("one_token_query_gradient"))
def one_token_query_gradient_kernel(
    query, keys0, keys1, values0, values1, block_indices, lse, delta, d_out, d_query, num_keys,
    first_position, SLOTS: tl.constexpr, BLOCK: tl.constexpr, KV_HEADS: tl.constexpr, G: tl.constexpr,
    ROWS: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    SCALE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Gradient of the queries of one token."""
    KEY: tl.constexpr = Dim(H0, H1)
    VALUE: tl.constexpr = Dim(V0, V1)
    b = tl.program_id(1) // KV_HEADS
    kv_head = tl.program_id(1) % KV_HEADS
    token = tl.program_id(0)
    position = first_position + token
    keys: tl.constexpr = Keys(keys0, keys1, b, kv_head, num_keys, KV_HEADS, BLOCK, KEY, TMA)
    values: tl.constexpr = Keys(values0, values1, b, kv_head, num_keys, KV_HEADS, BLOCK, VALUE, TMA)
    head = tl.arange(0, ROWS)
    at = (b.to(tl.int64) * tl.num_programs(0) + token) * KV_HEADS + kv_head
    block_indices += at * SLOTS
    rows = Rows(at * G, head, head < G)
    q = load_rows(query, rows, KEY)
    d_out_rows = load_rows(d_out, rows, VALUE)
    lse_2 = load_lse(lse, rows)[:, None]
    shift = tl.load(delta + rows.first + head, mask=rows.inside, other=0.0)[:, None]
    dq = zeros(ROWS, KEY)
    for slot in tl.range(0, SLOTS):
        start = tl.load(block_indices + slot) * BLOCK
        seen = (start >= 0) & (start + tl.arange(0, BLOCK) <= position)
        first = tl.maximum(start, 0)
        k = load_keys(keys, first)
        p = tl.exp2(inner(q, k, PRECISION) * (SCALE * LOG2_E) - lse_2)
        p = tl.where(seen[None, :], p, 0.0)
        ds = p * (inner(d_out_rows, load_keys(values, first), PRECISION) - shift)
        dq = add_product(ds.to(k.first.dtype), k, dq, PRECISION)
    store_rows(d_query, rows, scaled(dq, SCALE), KEY)


@triton.jit(repr=named("one_token_key_gradients"))
def one_token_key_gradients_kernel(
    query, key, value, tokens, items, lse, delta, d_out, part_key, part_value, d_key, d_value,
    num_queries, num_keys, first_position, FIELDS: tl.constexpr,
    BLOCK: tl.constexpr, KV_HEADS: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr,
    H0: tl.constexpr, H1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of one block, or partial sums where the block has several items; keys are rows of tiles."""
    KEY: tl.constexpr = Dim(H0, H1)
    VALUE: tl.constexpr = Dim(V0, V1)
    items += tl.program_id(0) * FIELDS
    both = tl.load(items)
    if both < 0:
        return
    start = tl.load(items + 1)
    slot = tl.load(items + 6)
    b = (both // KV_HEADS).to(tl.int64)
    kv_head = both % KV_HEADS
    n = tl.arange(0, BLOCK)
    block = Rows((b * num_keys + start) * KV_HEADS + kv_head, n * KV_HEADS, start + n < num_keys)
    k = load_rows(key, block, KEY)
    v = load_rows(value, block, VALUE)
    sums = KeyGradients(zeros(BLOCK, KEY), zeros(BLOCK, VALUE))
    head = tl.arange(0, ROWS)
    for pair in tl.range(tl.load(items + 3), tl.load(items + 5)):
        token = tl.load(tokens + pair)
        rows = Rows(((b * num_queries + token) * KV_HEADS + kv_head) * G, head, head < G)
        q = load_rows(query, rows, KEY)
        d_out_rows = load_rows(d_out, rows, VALUE)
        shift = tl.load(delta + rows.first + head, mask=rows.inside, other=0.0)[None, :]
        p = tl.exp2(inner(k, q, PRECISION) * (SCALE * LOG2_E) - load_lse(lse, rows)[None, :])
        p = tl.where((start + n <= first_position + token)[:, None], p, 0.0)
        ds = p * (inner(v, d_out_rows, PRECISION) - shift)
        dk = add_product(ds.to(q.first.dtype), q, sums.dk, PRECISION)
        dv = add_product(p.to(q.first.dtype), d_out_rows, sums.dv, PRECISION)
        sums = KeyGradients(dk, dv)
    dk = scaled(sums.dk, SCALE)
    if slot < 0:
        store_rows(d_key, block, dk, KEY)
        store_rows(d_value, block, sums.dv, VALUE)
    else:
        part = Rows(slot.to(tl.int64) * BLOCK, n, n >= 0)
        store_rows(part_key, part, dk, KEY)
        store_rows(part_value, part, sums.dv, VALUE)
