"""Scores of all blocks in sight by an indexer, with gradients: what a selection is taught by.

Source: `nsa_jax.block_scores`. Three kernels, of which each output is written by one program.

* `nsa_block_scores`, grid (tiles of pairs times groups of key tiles, B), as `index_scores`, whose products it
  uses: groups of key tiles outside, index heads inside. Here tokens after the query are masked, the query's
  own block counts, and beside the score of a block its token is kept, so that no gradient needs the products
  of other tokens again. Floor at 8k queries and keys, 4 KV heads, one index head, E = 128: 34 GFLOP, 0.06 ms;
  scores and tokens, 17 MB.
* `nsa_index_query_gradients`, grid (T K J, B): a program gathers the keys that gave the scores of its query,
  STEP blocks at a time, and adds them up. It writes the gradients of the products, too. Bytes: a key for each
  block in sight, 0.3 GB there, mostly from L2: 0.1 ms.
* `nsa_index_key_gradients`, grid (tiles of COLUMNS keys, K, B): loops over tiles of TOKENS queries, with
  index heads inside. Of a block each query chose one token, so the tile of gradients has a number for each
  query and block, and zeros: `2 J T COLUMNS E` flops a program, 34 GFLOP there.
  Registers: `COLUMNS E / (32 num_warps)` floats a thread, 64.

An H100 takes 0.57 ms for the first at these sizes, and 0.79 for the other two.

Memory: scores, tokens and gradients of products of a call, `(2 + J) B T K M` numbers, and the keys' gradients
of each KV head in float32. Calls are chunks of queries.
"""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from nsa_jax import layout
from nsa_jax.array_typing import Array, Bool, Float, Int32
from nsa_jax.kernels.triton.dims import padded_heads as power_of_two
from nsa_jax.kernels.triton.dims import split_dim
from nsa_jax.kernels.triton.gpu import has_tma
from nsa_jax.kernels.triton.launch import launch, like, named
from nsa_jax.kernels.triton.loading import Keys, key_tiles, load_at, store_at
from nsa_jax.kernels.triton.pieces import (
    LARGEST_INT,
    Dim,
    Pieces,
    add_product,
    added,
    cast,
    precision,
    row_products,
    zeros,
)
from nsa_jax.kernels.triton.selection.index_scores import (
    IndexBlocks,
    IndexQueries,
    Pairs,
    hold_queries,
    score_tokens,
)
from nsa_jax.kernels.triton.sizes import INDEX_PROGRAMS, IndexSizes, index_gradient_tile
from nsa_jax.layout import Placement


def score_blocks(
    query: Float[Array, "B T K J E"],
    keys: Float[Array, "B SE"],
    weights: Float[Array, "B T K J"] | None,
    placement: Placement,
    scale: float,
    *,
    sizes: IndexSizes,
) -> tuple[Float[Array, "B T K M"], Int32[Array, "B T K M"]]:
    """Scores of all blocks, and the token that gave each, -1 where the score is not finite.

    `keys` are `[B, S, E]` in two axes, so that none of them is one of heads.
    """
    batch, num_queries, num_kv_heads, heads, dim = query.shape
    keys = keys.reshape(batch, -1, 1, dim)
    block = placement.config.selection_block_size
    num_blocks = layout.num_selection_blocks(keys.shape[1], placement.config)
    padded = power_of_two(block)
    columns = max(sizes.keys, padded)
    pairs = min(sizes.pairs, max(power_of_two(num_queries * num_kv_heads), 16))
    tiles = -(-num_queries * num_kv_heads // pairs)
    key_tiles_of_row = -(-num_blocks // (columns // padded))
    each = min(max(key_tiles_of_row * tiles * batch // INDEX_PROGRAMS, 1), sizes.key_tiles)
    key_programs = -(-key_tiles_of_row // each)
    tma = has_tma() and padded == block  # else keys are loaded one by one
    first, second = split_dim(dim)
    rows = query.reshape(batch, num_queries * num_kv_heads, heads, dim)
    shape = (batch, num_queries, num_kv_heads, num_blocks)
    scores, tokens = launch(
        block_scores_kernel, *key_tiles(rows, pairs, tma), *key_tiles(keys, columns, tma), weights,
        placement.position, placement.selection_start() if placement.packed else None,
        out=(jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.int32)),
        grid=(tiles * key_programs, batch), num_warps=sizes.num_warps, num_stages=sizes.num_stages,
        num_queries=num_queries, num_keys=keys.shape[1], scale=abs(scale), KV_HEADS=num_kv_heads,
        HEADS=heads, E0=first, E1=second, BLOCK=block, ROW=num_blocks, PAIRS=pairs, COLUMNS=columns,
        PADDED=padded, TILES_EACH=each, KEY_PROGRAMS=key_programs, NEGATIVE=scale < 0,
        PRECISION=precision(query.dtype), TMA=tma,
    )  # fmt: skip
    # Blocks out of sight were not written.
    scores = jnp.where(_in_sight(placement, num_blocks) & ~jnp.isnan(scores), scores, -jnp.inf)
    return scores, jnp.where(jnp.isfinite(scores), tokens, -1)


def _in_sight(placement: Placement, num_blocks: int) -> Bool[Array, "B T 1 M"]:
    last = jnp.where(placement.position < 0, -1, placement.position // placement.config.selection_block_size)
    return jnp.arange(num_blocks, dtype=jnp.int32) <= last[:, :, None, None]


def score_gradients(
    query: Float[Array, "B T K J E"],
    keys: Float[Array, "B SE"],
    weights: Float[Array, "B T K J"] | None,
    tokens: Int32[Array, "B T K M"],
    d_scores: Float[Array, "B T K M"],
    placement: Placement,
    scale: float,
) -> tuple[Array, Float[Array, "B S K E"], Float[Array, "B T K J"] | None]:
    """Gradients of queries, of keys by each KV head in float32, and of weights."""
    batch, num_queries, num_kv_heads, heads, dim = query.shape
    num_blocks = tokens.shape[3]
    keys = keys.reshape(batch, -1, dim)
    first, second = split_dim(dim)
    common: dict[str, Any] = dict(
        num_queries=num_queries, num_keys=keys.shape[1], KV_HEADS=num_kv_heads, HEADS=heads, E0=first,
        E1=second, BLOCK=placement.config.selection_block_size, ROW=num_blocks,
    )  # fmt: skip
    products = jax.ShapeDtypeStruct((batch, num_queries, num_kv_heads, heads, num_blocks), jnp.float32)
    d_query, d_weights, d_products = launch(
        index_query_gradients_kernel, query, keys, weights, tokens, d_scores, placement.position,
        out=(like(query), like(query, query.shape[:4]), products),
        grid=(num_queries * num_kv_heads * heads, batch), num_warps=1, num_stages=2, scale=float(scale),
        STEP=16, **common,
    )  # fmt: skip
    tokens_each, num_warps = index_gradient_tile(query.dtype.itemsize, dim)
    tile = min(tokens_each, max(1 << (placement.config.selection_block_size.bit_length() - 1), 16))
    d_keys = launch(
        index_key_gradients_kernel, query, tokens, d_products, placement.position,
        placement.selection_start() if placement.packed else None,
        out=jax.ShapeDtypeStruct((batch, keys.shape[1], num_kv_heads, dim), jnp.float32),
        grid=(-(-keys.shape[1] // tile), num_kv_heads, batch), num_warps=num_warps, num_stages=1,
        COLUMNS=tile, TOKENS=tokens_each, PRECISION=precision(query.dtype), **common,
    )  # fmt: skip
    return d_query, d_keys, None if weights is None else d_weights


@triton.jit
def _score_seen_blocks(
    queries, keys, pairs, at, start, here, first_tile, scores, tokens, scale, blocks, TILES_EACH: tl.constexpr
):
    """Scores of the pairs that are `here`, in the sequence whose first key is `start`."""
    BLOCKS: tl.constexpr = blocks.COLUMNS // blocks.PADDED
    column = tl.arange(0, blocks.COLUMNS)
    inside = column % blocks.PADDED
    highest = tl.max(tl.where(here, pairs.current, -1), 0)
    last_tile = tl.minimum((highest + BLOCKS) // BLOCKS, first_tile + TILES_EACH)
    if first_tile < last_tile:
        held = hold_queries(queries, pairs)
        for tile in range(first_tile, last_tile):
            local = (tile * BLOCKS + column // blocks.PADDED) * blocks.BLOCK + inside
            total = score_tokens(queries, keys, pairs, held, start, tile, blocks)
            seen = (inside < blocks.BLOCK)[None, :] & (local[None, :] <= at[:, None])
            total = tl.where(seen & (total == total), total, float("-inf"))  # NaN is not itself
            total = total.reshape(pairs.PAIRS, BLOCKS, blocks.PADDED)
            best = tl.max(total, 2)
            order = tl.arange(0, blocks.PADDED)[None, None, :]
            place = tl.min(tl.where(total == best[:, :, None], order, blocks.PADDED), 2)
            block = tile * BLOCKS + tl.arange(0, BLOCKS)
            target = pairs.target[:, None] + block[None, :]
            kept = here[:, None] & (block < pairs.ROW)[None, :]
            tl.store(scores + target, best * scale, mask=kept)
            tl.store(tokens + target, start + block[None, :] * blocks.BLOCK + place, mask=kept)


@triton.jit(repr=named("nsa_block_scores"))
def block_scores_kernel(
    queries0, queries1, keys0, keys1, weights, position, sequence_start, scores, tokens,
    num_queries, num_keys, scale,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr,
    BLOCK: tl.constexpr, ROW: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr,
    PADDED: tl.constexpr, TILES_EACH: tl.constexpr, KEY_PROGRAMS: tl.constexpr, NEGATIVE: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Scores and tokens `[B, T, K, ROW]`; those of blocks out of sight are not written."""
    DIM: tl.constexpr = Dim(E0, E1)
    blocks: tl.constexpr = IndexBlocks(BLOCK, 0, COLUMNS, PADDED)
    b = tl.program_id(1)
    tile = tl.program_id(0) // KEY_PROGRAMS
    first_tile = (tl.program_id(0) % KEY_PROGRAMS) * TILES_EACH
    pair = tile * PAIRS + tl.arange(0, PAIRS)
    exists = pair < num_queries * KV_HEADS
    place = b.to(tl.int64) * num_queries + pair // KV_HEADS
    at = tl.load(position + place, mask=exists, other=-1)
    current = tl.where(at >= 0, at // BLOCK, -1)
    target = (b.to(tl.int64) * (num_queries * KV_HEADS) + pair) * ROW
    pairs: tl.constexpr = Pairs(tile * PAIRS, exists, current, target, num_queries * KV_HEADS, PAIRS, ROW)
    queries: tl.constexpr = IndexQueries(queries0, queries1, weights, b, HEADS, DIM, NEGATIVE, PRECISION, TMA)
    keys: tl.constexpr = Keys(keys0, keys1, b, 0, num_keys, 1, COLUMNS, DIM, TMA)
    sees = at >= 0
    if sequence_start is None:
        _score_seen_blocks(
            queries, keys, pairs, at, 0, sees, first_tile, scores, tokens, scale, blocks, TILES_EACH
        )
    else:
        begin = tl.where(sees, tl.load(sequence_start + place, mask=exists, other=0), LARGEST_INT)
        start = tl.min(begin, 0)
        while start < LARGEST_INT:
            _score_seen_blocks(
                queries, keys, pairs, at, start, begin == start, first_tile, scores, tokens, scale, blocks,
                TILES_EACH,
            )  # fmt: skip
            start = tl.min(tl.where(begin > start, begin, LARGEST_INT), 0)


@triton.jit
def _broadcast_row(x, ROWS: tl.constexpr):
    """One row, ROWS times."""
    zero = tl.zeros([ROWS, 1], tl.float32)
    if x.second is None:
        y = Pieces(x.first.to(tl.float32) + zero, None)
    else:
        y = Pieces(x.first.to(tl.float32) + zero, x.second.to(tl.float32) + zero)
    return y


@triton.jit
def _weighted_sum(x, weight):
    """The sum of the rows of `x` times their weights, as one row; a weight of 0 counts whatever its row."""
    x0 = tl.sum(tl.where(weight[:, None] != 0.0, weight[:, None] * x.first.to(tl.float32), 0.0), 0)[None, :]
    if x.second is None:
        x1 = None
    else:
        x1 = tl.where(weight[:, None] != 0.0, weight[:, None] * x.second.to(tl.float32), 0.0)
        x1 = tl.sum(x1, 0)[None, :]
    return Pieces(x0, x1)


@triton.jit(repr=named("nsa_index_query_gradients"))
def index_query_gradients_kernel(
    query, keys, weights, tokens, d_scores, position, d_query, d_weights, d_products,
    num_queries, num_keys, scale,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr,
    BLOCK: tl.constexpr, ROW: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One index query: its gradient, that of its weight, and those of its products `[B, T, K, J, ROW]`."""
    DIM: tl.constexpr = Dim(E0, E1)
    E: tl.constexpr = E0 + E1
    b = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) % HEADS
    pair = b * (num_queries * KV_HEADS) + tl.program_id(0) // HEADS
    one = tl.zeros([1], tl.int64)
    at = tl.load(position + b * num_queries + tl.program_id(0) // (HEADS * KV_HEADS))
    count = tl.where(at >= 0, at // BLOCK + 1, 0)
    own = _broadcast_row(load_at(query + (pair * HEADS + head) * E, one, one == 0, DIM), STEP)
    if weights is not None:
        weight = tl.load(weights + pair * HEADS + head).to(tl.float32)
    total = zeros(1, DIM)
    of_weight = tl.full((), 0.0, tl.float32)
    for first in tl.range(0, ROW, STEP):
        block = first + tl.arange(0, STEP)
        token = tl.load(tokens + pair * ROW + block, mask=block < count, other=-1)
        used = token >= 0
        given = tl.load(d_scores + pair * ROW + block, mask=used, other=0.0)
        k = load_at(keys + b * num_keys * E, tl.where(used, token, 0).to(tl.int64) * E, used, DIM)
        if weights is not None:
            product = row_products(own, k) * scale
            of_weight += tl.sum(tl.where(used, given * tl.maximum(product, 0.0), 0.0), 0)
            given = tl.where(product > 0, given * weight, 0.0)
        elif HEADS > 1:  # the first head with the largest product
            best = tl.full([STEP], float("-inf"), tl.float32)
            which = tl.zeros([STEP], tl.int32)
            for other in tl.range(0, HEADS):
                q = _broadcast_row(load_at(query + (pair * HEADS + other) * E, one, one == 0, DIM), STEP)
                product = row_products(q, k) * scale
                which = tl.where(product > best, other, which)
                best = tl.where(product > best, product, best)
            given = tl.where(which == head, given, 0.0)
        given = given * scale
        tl.store(d_products + (pair * HEADS + head) * ROW + block, given, mask=block < ROW)
        total = added(total, _weighted_sum(k, given))
    store_at(d_query + (pair * HEADS + head) * E, one, total, one == 0, DIM)
    if weights is not None:
        tl.store(d_weights + pair * HEADS + head, of_weight.to(d_weights.dtype.element_ty))


@triton.jit
def _finite(x):
    """`x`, with 0 for what is not finite: such queries have no gradient, but 0 times NaN is NaN."""
    x0 = tl.where(tl.abs(x.first) < float("inf"), x.first, 0.0)
    if x.second is None:
        y = Pieces(x0, None)
    else:
        y = Pieces(x0, tl.where(tl.abs(x.second) < float("inf"), x.second, 0.0))
    return y


@triton.jit(repr=named("nsa_index_key_gradients"))
def index_key_gradients_kernel(
    query, tokens, d_products, position, sequence_start, d_keys,
    num_queries, num_keys,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr,
    BLOCK: tl.constexpr, ROW: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of COLUMNS neighbouring keys by one KV head."""
    DIM: tl.constexpr = Dim(E0, E1)
    E: tl.constexpr = E0 + E1
    k = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    first_key = tl.program_id(0) * COLUMNS
    key = first_key + tl.arange(0, COLUMNS)
    dtype: tl.constexpr = query.dtype.element_ty
    total = zeros(COLUMNS, DIM)
    for first in tl.range(0, num_queries, TOKENS):
        token = first + tl.arange(0, TOKENS)
        exists = token < num_queries
        at = tl.load(position + b * num_queries + token, mask=exists, other=-1)
        if sequence_start is None:
            start = tl.zeros([TOKENS], tl.int32)
        else:
            start = tl.load(sequence_start + b * num_queries + token, mask=exists & (at >= 0), other=0)
        last = tl.where(at >= 0, start + at, -1)
        if tl.max(last, 0) >= first_key:
            pair = (b * num_queries + token) * KV_HEADS + k
            block = tl.maximum(first_key - start, 0) // BLOCK  # of the first key
            for head in tl.range(0, HEADS):
                row = pair * HEADS + head
                given = tl.zeros([COLUMNS, TOKENS], tl.float32)
                for later in tl.static_range((COLUMNS + BLOCK - 2) // BLOCK + 1):
                    place = block + later
                    source = tl.load(tokens + pair * ROW + place, mask=place * BLOCK <= at, other=-1)
                    inside = (source >= first_key) & (source < first_key + COLUMNS)
                    x = tl.load(d_products + row * ROW + place, mask=inside, other=0.0)
                    given += tl.where(source[None, :] == key[:, None], x[None, :], 0.0)
                q = _finite(load_at(query, row * E, exists, DIM))
                total = add_product(given.to(dtype), cast(q, dtype), total, PRECISION)
    row = ((b * num_keys + key) * KV_HEADS + k) * E
    store_at(d_keys, row, total, key < num_keys, DIM)
