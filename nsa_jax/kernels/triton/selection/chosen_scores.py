"""Scores of the blocks that each query chose, by an indexer, with gradients: what their attention teaches.

Source: `nsa_jax.block_scores` with `block_indices`. Two kernels of its own, and `nsa_index_query_gradients`
of `block_scores`, which then loops over slots. A block of keys stays, and the queries that chose it pass by:
the pairs of a block and a query are sorted by block, and cut into items (`selected.items`).

* `nsa_chosen_scores`, grid (items,): a program holds the keys of a block and loops over tiles of ROWS
  queries, index heads inside. It writes the score of each pair, and the token that gave it, to the slot.
* `nsa_chosen_key_gradients`, grid (items, BLOCK / KEYS): a program loops over the same tiles for KEYS keys of
  a block. Of the block each query chose one token, so the heads of a query are added up first, and one
  product of zeros and ones with these sums gives them to the keys. Sums leave at the item's end, and where a
  block has several items as partial sums, which are added in order.

Why this order: beside all blocks, `R` of `M` are scored, and every product is of use. With queries outside, a
tile of neighbours would score the union of their blocks.

Registers: `ROWS BLOCK / 128` floats a thread for scores (64 for blocks of 128), `(KEYS + ROWS) E / 128` for
gradients of keys (at most 128). Shared memory of scores: `(BLOCK + 2 ROWS) E itemsize`, 64 KB for blocks of
128 with E = 128 in bfloat16. Memory: a score, a token and J gradients of products for each pair, 4 bytes
each, its code, and partial sums, `8 BLOCK E` bytes for each ITEM pairs. Floor for 32k tokens of SmolLM2 (3 KV
heads, J = 3, E = 32, 13 slots of 128): 1.3 M pairs, 31 GFLOP; 0.25 GB of queries, gathered from L2.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from nsa_jax.array_typing import Array, DType, Float, Int32
from nsa_jax.kernels.triton.dims import split_dim
from nsa_jax.kernels.triton.gpu import target
from nsa_jax.kernels.triton.launch import launch, like, named
from nsa_jax.kernels.triton.loading import Rows, load_at, load_rows, store_rows
from nsa_jax.kernels.triton.pieces import Dim, add_product, added, cast, inner, precision, scaled, zeros
from nsa_jax.kernels.triton.selected.backward_key import join_items
from nsa_jax.kernels.triton.selected.chosen_rows import load_item
from nsa_jax.kernels.triton.selected.item_table import ITEM_FIELDS
from nsa_jax.kernels.triton.selected.items import BlockItems, invert
from nsa_jax.kernels.triton.selected.unions import last_rows
from nsa_jax.kernels.triton.selection.block_scores import finite, query_gradients
from nsa_jax.kernels.triton.selection.index_scores import by_heads
from nsa_jax.kernels.triton.sizes.selection import CHOSEN_STAGES, chosen_gradient_tile, chosen_score_rows
from nsa_jax.layout import Placement

ITEM = 1024  # most pairs of an item


def score_chosen(
    query: Float[Array, "B T K J E"],
    keys: Float[Array, "B ..."],
    weights: Float[Array, "B T K J"] | None,
    block_indices: Int32[Array, "B T K R"],
    placement: Placement,
    scale: float,
) -> tuple[Float[Array, "B T K R"], Int32[Array, "B T K R"]]:
    """Scores of the chosen blocks, and the token that gave each, -1 where the score is not finite.

    `keys` are as in `choose_by_index`.
    """
    num_queries, num_kv_heads, heads, dim = query.shape[1:]
    keys = by_heads(keys, dim)
    items = _items(block_indices, placement, keys.shape[1])
    first, second = split_dim(dim)
    size = placement.config.selection_block_size
    scores, tokens = launch(
        chosen_scores_kernel, query, keys, weights, items.tokens, items.items, last_rows(placement),
        out=(like(block_indices, dtype="float32"), like(block_indices)),
        grid=(items.items.shape[0],), num_warps=8 if query.dtype == jnp.float32 else 4,
        num_stages=CHOSEN_STAGES, num_queries=num_queries, num_keys=keys.shape[1], scale=abs(scale),
        FIELDS=ITEM_FIELDS, KV_HEADS=num_kv_heads, KEY_HEADS=keys.shape[2], HEADS=heads, E0=first, E1=second,
        BLOCK=size, R=block_indices.shape[3],
        ROWS=chosen_score_rows(query.dtype.itemsize, dim, size, target()), NEGATIVE=scale < 0,
        PRECISION=precision(query.dtype),
    )  # fmt: skip
    at = placement.position[:, :, None, None]
    written = (block_indices >= 0) & (block_indices * size <= at)
    # Infinity times a scale of 0 is NaN.
    return jnp.where(written & ~jnp.isnan(scores), scores, -jnp.inf), jnp.where(written, tokens, -1)


def chosen_gradients(
    query: Float[Array, "B T K J E"],
    keys: Float[Array, "B ..."],
    weights: Float[Array, "B T K J"] | None,
    block_indices: Int32[Array, "B T K R"],
    tokens: Int32[Array, "B T K R"],
    d_scores: Float[Array, "B T K R"],
    placement: Placement,
    scale: float,
) -> tuple[Array, Float[Array, "B S K E"], Float[Array, "B T K J"] | None]:
    """Gradients of queries, of keys by each KV head in float32, and of weights."""
    batch, num_queries, num_kv_heads, heads, dim = query.shape
    keys = by_heads(keys, dim)
    d_query, d_weights, d_products = query_gradients(
        query, keys, weights, tokens, d_scores, placement, scale, by_slot=True
    )
    items = _items(block_indices, placement, keys.shape[1])
    first, second = split_dim(dim)
    size = placement.config.selection_block_size
    d_products, peak = _in_range(d_products, query.dtype)
    tile, rows = chosen_gradient_tile(dim)
    tile = min(tile, size)
    parts = jax.ShapeDtypeStruct((max(items.num_partials, 1), size, dim), jnp.float32)
    part_keys, d_keys = launch(
        chosen_key_gradients_kernel, query, tokens, d_products, items.tokens, items.items,
        out=(parts, jax.ShapeDtypeStruct((batch, keys.shape[1], num_kv_heads, dim), jnp.float32)),
        grid=(items.items.shape[0], size // tile), num_warps=4, num_stages=1, num_queries=num_queries,
        num_keys=keys.shape[1], FIELDS=ITEM_FIELDS, KV_HEADS=num_kv_heads, HEADS=heads, E0=first, E1=second,
        BLOCK=size, KEYS=tile, R=block_indices.shape[3], ROWS=rows, PRECISION=precision(query.dtype),
    )  # fmt: skip
    d_keys, _ = join_items(items, part_keys, None, d_keys, None)
    return d_query, d_keys * peak, d_weights


def _in_range(
    d_products: Float[Array, "B T K R J"], dtype: DType
) -> tuple[Float[Array, "B T K R J"], Float[Array, "#B 1 #K 1"]]:
    """Gradients of products, in float16 divided by the largest of each row and KV head; and what divides."""
    if dtype != jnp.float16:
        return d_products, jnp.ones((1, 1, 1, 1), jnp.float32)
    largest = jnp.abs(d_products).max(axis=(1, 3, 4), keepdims=True)
    peak = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)
    return d_products / peak, peak[..., 0]


def _items(block_indices: Int32[Array, "B T K R"], placement: Placement, num_keys: int) -> BlockItems:
    """The queries of each block, with the slots that they have it in."""
    return invert(block_indices, placement, num_keys, item=ITEM, range_queries=block_indices.shape[1])


@triton.jit
def _load_pairs(
    codes, item, first, num_queries, KV_HEADS: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """A tile of an item: which pairs exist, and their places in `[B T]`, `[B T K]` and `[B T K R]`."""
    number = first + tl.arange(0, ROWS)
    inside = number < item.end
    code = tl.load(codes + number, mask=inside, other=0)
    token = item.b * num_queries + code // R
    pair = token * KV_HEADS + item.kv_head
    return inside, token, pair, pair * R + code % R


@triton.jit(repr=named("nsa_chosen_scores"))
def chosen_scores_kernel(
    query, keys, weights, codes, items, last_keys, scores, tokens, num_queries, num_keys, scale,
    FIELDS: tl.constexpr, KV_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr,
    E0: tl.constexpr, E1: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr,
    NEGATIVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores and tokens of the pairs of an item; those of slots without a block in sight are not written."""
    DIM: tl.constexpr = Dim(E0, E1)
    E: tl.constexpr = E0 + E1
    item = load_item(items, tl.program_id(0), FIELDS, KV_HEADS)
    if item.both < 0:
        return
    n = tl.arange(0, BLOCK)
    first_key = (item.b * num_keys + item.start) * KEY_HEADS + item.kv_head // (KV_HEADS // KEY_HEADS)
    here = Rows(first_key, n * KEY_HEADS, item.start + n < num_keys)
    k = cast(load_rows(keys, here, DIM), query.dtype.element_ty)
    for first in tl.range(item.first, item.end, ROWS):
        inside, token, pair, to = _load_pairs(codes, item, first, num_queries, KV_HEADS, R, ROWS)
        last_key = tl.load(last_keys + token, mask=inside, other=-1)
        NOTHING: tl.constexpr = float("-inf") if weights is None else 0.0
        total = tl.full([ROWS, BLOCK], NOTHING, tl.float32)
        for head in tl.range(0, HEADS):
            part = inner(load_at(query, (pair * HEADS + head) * E, inside, DIM), k, PRECISION)
            if NEGATIVE:
                part = -part
            if weights is None:
                total = tl.maximum(total, part)
            else:
                weight = tl.load(weights + pair * HEADS + head, mask=inside, other=0.0).to(tl.float32)
                total += weight[:, None] * tl.maximum(part, 0.0, propagate_nan=tl.PropagateNan.ALL)
        seen = (item.start + n)[None, :] <= last_key[:, None]
        total = tl.where(seen & (total == total), total, float("-inf"))  # NaN is not itself
        best = tl.max(total, 1)
        place = tl.min(tl.where(total == best[:, None], n[None, :], BLOCK), 1)
        score = best * scale
        tl.store(scores + to, score, mask=inside)
        tl.store(tokens + to, tl.where(tl.abs(score) < float("inf"), item.start + place, -1), mask=inside)


@triton.jit(repr=named("nsa_chosen_key_gradients"))
def chosen_key_gradients_kernel(
    query, tokens, d_products, codes, items, part_keys, d_keys, num_queries, num_keys,
    FIELDS: tl.constexpr, KV_HEADS: tl.constexpr, HEADS: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of KEYS keys of an item's block by one KV head, or partial sums of them."""
    DIM: tl.constexpr = Dim(E0, E1)
    E: tl.constexpr = E0 + E1
    item = load_item(items, tl.program_id(0), FIELDS, KV_HEADS)
    if item.both < 0:
        return
    dtype: tl.constexpr = query.dtype.element_ty
    n = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    total = zeros(KEYS, DIM)
    for first in tl.range(item.first, item.end, ROWS):
        inside, _, pair, at = _load_pairs(codes, item, first, num_queries, KV_HEADS, R, ROWS)
        source = tl.load(tokens + at, mask=inside, other=-1)
        used = source >= 0
        part = zeros(ROWS, DIM)  # of the one key of the block that each query chose
        for head in tl.range(0, HEADS):
            x = tl.load(d_products + at * HEADS + head, mask=used, other=0.0)
            q = finite(load_at(query, (pair * HEADS + head) * E, used, DIM))
            part = added(part, scaled(cast(q, tl.float32), x[:, None]))
        chosen = tl.where(source[None, :] == (item.start + n)[:, None], 1.0, 0.0).to(dtype)
        total = add_product(chosen, cast(part, dtype), total, PRECISION)
    if item.slot < 0:
        row = (item.b * num_keys + item.start) * KV_HEADS + item.kv_head
        store_rows(d_keys, Rows(row, n * KV_HEADS, item.start + n < item.limit), total, DIM)
    else:
        store_rows(part_keys, Rows(item.slot.to(tl.int64) * BLOCK, n, n >= 0), total, DIM)
