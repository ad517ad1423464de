"""Scores of all blocks in sight by an indexer, with gradients: what a selection is taught by.

Source: `nsa_jax.block_scores`. Three kernels, of which each output is written by one program.

* `nsa_block_scores`, grid (tiles of pairs times groups of key tiles, B times heads of keys), as
  `index_scores`, whose products it uses: groups of key tiles outside, index heads inside. Here tokens after
  the query are masked, the query's own block counts, and beside the score of a block its token is kept, so
  that no gradient needs the products of other tokens again. Floor at 8k queries and keys, 4 KV heads, one
  index head, E = 128: 34 GFLOP, 0.06 ms; scores and tokens, 17 MB.
* `nsa_index_query_gradients`, grid (T K, B): a program has the index queries of a pair, padded to 16 rows. It
  gathers the keys that gave their scores, STEP blocks at a time, finds the heads by the products again, and
  adds up. It writes the gradients of the products, too. Bytes: a key for each block in sight, 0.3 GB there,
  mostly from L2: 0.1 ms.
* `nsa_index_key_gradients`, grid (tiles of COLUMNS keys, K, B): loops over tiles of TOKENS queries. Tokens
  and gradients of products lie by block, so that neighbours read neighbours. Of a block each query chose one
  token, so the heads of a query are added up first, and one product of zeros and ones with these sums gives
  them to the keys: `2 T COLUMNS E` flops a program for each block that it touches.
  Registers: `COLUMNS E / (32 num_warps)` floats a thread, 64.

Of a layer of SmolLM2 (4 packed rows of 8192, 9 / 3 heads, E = 32, blocks of 128) an H100 takes 0.14 ms for
the gradients of queries, where one program for each head took 1.57, and 0.35 ms for those of keys.

Memory: scores, tokens and gradients of products of a call, `(2 + J) B T K M` numbers, and the keys' gradients
of each KV head in float32. Calls are chunks of queries.
"""

from typing import NamedTuple

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
    inner,
    precision,
    scaled,
    zeros,
)
from nsa_jax.kernels.triton.selection.index_scores import (
    IndexBlocks,
    IndexQueries,
    Pairs,
    by_heads,
    hold_queries,
    score_tokens,
)
from nsa_jax.kernels.triton.sizes.selection import INDEX_PROGRAMS, IndexSizes, index_gradient_tile
from nsa_jax.layout import Placement


def score_blocks(
    query: Float[Array, "B T K J E"],
    keys: Float[Array, "B ..."],
    weights: Float[Array, "B T K J"] | None,
    placement: Placement,
    scale: float,
    *,
    sizes: IndexSizes,
) -> tuple[Float[Array, "B T K M"], Int32[Array, "B M K T"]]:
    """Scores of all blocks, and the token that gave each block in sight, -1 where the score is not finite.

    `keys` are as in `choose_by_index`.
    """
    batch, num_queries, num_kv_heads, heads, dim = query.shape
    keys = by_heads(keys, dim)
    key_heads = keys.shape[2]
    num_pairs = num_queries * num_kv_heads // key_heads
    block = placement.config.selection_block_size
    num_blocks = layout.num_selection_blocks(keys.shape[1], placement.config)
    padded = power_of_two(block)
    columns = max(sizes.keys, padded)
    pairs = min(sizes.pairs, max(power_of_two(num_pairs), 16))
    tiles = -(-num_pairs // pairs)
    key_tiles_of_row = -(-num_blocks // (columns // padded))
    each = min(max(key_tiles_of_row * tiles * batch * key_heads // INDEX_PROGRAMS, 1), sizes.key_tiles)
    key_programs = -(-key_tiles_of_row // each)
    tma = has_tma() and padded == block  # else keys are loaded one by one
    first, second = split_dim(dim)
    rows = query.reshape(batch, num_pairs, key_heads * heads, dim)
    shape = (batch, num_queries, num_kv_heads, num_blocks)
    shape_of_tokens = (batch, num_blocks, num_kv_heads, num_queries)
    scores, tokens = launch(
        block_scores_kernel, *key_tiles(rows, pairs, tma), *key_tiles(keys, columns, tma), weights,
        placement.position, placement.selection_start() if placement.packed else None,
        out=(jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape_of_tokens, jnp.int32)),
        grid=(tiles * key_programs, batch * key_heads), num_warps=sizes.num_warps,
        num_stages=sizes.num_stages, num_queries=num_queries, num_keys=keys.shape[1], scale=abs(scale),
        KV_HEADS=num_kv_heads, KEY_HEADS=key_heads, HEADS=heads, E0=first, E1=second, BLOCK=block,
        ROW=num_blocks, PAIRS=pairs, COLUMNS=columns, PADDED=padded, TILES_EACH=each,
        KEY_PROGRAMS=key_programs, HELD=heads <= sizes.held_heads, NEGATIVE=scale < 0,
        PRECISION=precision(query.dtype), TMA=tma,
    )  # fmt: skip
    # Blocks out of sight were not written.
    return jnp.where(_in_sight(placement, num_blocks) & ~jnp.isnan(scores), scores, -jnp.inf), tokens


def _in_sight(placement: Placement, num_blocks: int) -> Bool[Array, "B T 1 M"]:
    last = jnp.where(placement.position < 0, -1, placement.position // placement.config.selection_block_size)
    return jnp.arange(num_blocks, dtype=jnp.int32) <= last[:, :, None, None]


def score_gradients(
    query: Float[Array, "B T K J E"],
    keys: Float[Array, "B ..."],
    weights: Float[Array, "B T K J"] | None,
    tokens: Int32[Array, "B M K T"],
    d_scores: Float[Array, "B T K M"],
    placement: Placement,
    scale: float,
) -> tuple[Array, Float[Array, "B S K E"], Float[Array, "B T K J"] | None]:
    """Gradients of queries, of keys by each KV head in float32, and of weights."""
    batch, num_queries, num_kv_heads, heads, dim = query.shape
    keys = by_heads(keys, dim)
    d_query, d_weights, d_products = query_gradients(
        query, keys, weights, tokens, d_scores, placement, scale, by_slot=False
    )
    first, second = split_dim(dim)
    tokens_each, num_warps = index_gradient_tile(query.dtype.itemsize, dim)
    tile = min(tokens_each, max(1 << (placement.config.selection_block_size.bit_length() - 1), 16))
    d_keys = launch(
        index_key_gradients_kernel, query, tokens, d_products, placement.position,
        placement.selection_start() if placement.packed else None,
        out=jax.ShapeDtypeStruct((batch, keys.shape[1], num_kv_heads, dim), jnp.float32),
        grid=(-(-keys.shape[1] // tile), num_kv_heads, batch), num_warps=num_warps, num_stages=1,
        num_queries=num_queries, num_keys=keys.shape[1], KV_HEADS=num_kv_heads, HEADS=heads, E0=first,
        E1=second, BLOCK=placement.config.selection_block_size, ROW=tokens.shape[1], COLUMNS=tile,
        TOKENS=tokens_each, PRECISION=precision(query.dtype),
    )  # fmt: skip
    return d_query, d_keys, d_weights


def query_gradients(
    query: Float[Array, "B T K J E"],
    keys: Float[Array, "B S I E"],
    weights: Float[Array, "B T K J"] | None,
    tokens: Int32[Array, "B ..."],
    d_scores: Float[Array, "B T K M"],
    placement: Placement,
    scale: float,
    *,
    by_slot: bool,
) -> tuple[Array, Float[Array, "B T K J"] | None, Float[Array, "B ..."]]:
    """Gradients of queries and weights, and of the products that gave the scores.

    The scores are those of all blocks, and then `tokens` are `[B, M, K, T]` and the last result `[B, M, K, J,
    T]`; or those of slots: `[B, T, K, R]` and `[B, T, K, R, J]`.
    """
    batch, num_queries, num_kv_heads, heads, dim = query.shape
    row = d_scores.shape[3]
    first, second = split_dim(dim)
    row_bytes = dim * query.dtype.itemsize
    shape = (num_queries, num_kv_heads, row, heads) if by_slot else (row, num_kv_heads, heads, num_queries)
    d_query, d_weights, d_products = launch(
        index_query_gradients_kernel, query, keys, weights, tokens, d_scores, placement.position,
        out=(like(query), like(query, query.shape[:4]),
             jax.ShapeDtypeStruct((batch, *shape), jnp.float32)),
        grid=(num_queries * num_kv_heads, batch), num_stages=2, scale=float(scale),
        num_warps=1 if row_bytes <= 128 else 2 if row_bytes <= 256 else 4, ROWS=max(power_of_two(heads), 16),
        STEP=32, KEY_HEADS=keys.shape[2], BY_SLOT=by_slot, PRECISION=precision(query.dtype),
        num_queries=num_queries, num_keys=keys.shape[1], KV_HEADS=num_kv_heads, HEADS=heads, E0=first,
        E1=second, BLOCK=placement.config.selection_block_size, ROW=row,
    )  # fmt: skip
    return d_query, None if weights is None else d_weights, d_products


class Found(NamedTuple):
    """Where the scores of a tile of pairs go, `[B, T, K, ROW]`, and their tokens, `[B, ROW, K, T]`.

    Attributes:
      scores, tokens: the arrays.
      column: offset of each pair's column of tokens.
      stride: from one block of a column to the next.
    """

    scores: tl.tensor
    tokens: tl.tensor
    column: tl.tensor
    stride: tl.tensor


@triton.jit
def _score_seen_blocks(queries, keys, pairs, at, start, here, first_tile, found, scale, blocks):
    """Scores of the pairs that are `here`, in the sequence whose first key is `start`."""
    BLOCKS: tl.constexpr = blocks.COLUMNS // blocks.PADDED
    column = tl.arange(0, blocks.COLUMNS)
    inside = column % blocks.PADDED
    highest = tl.max(tl.where(here, pairs.current, -1), 0)
    last_tile = tl.minimum((highest + BLOCKS) // BLOCKS, first_tile + blocks.TILES_EACH)
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
            kept = here[:, None] & (block < pairs.ROW)[None, :]
            score = best * scale
            tl.store(found.scores + pairs.target[:, None] + block[None, :], score, mask=kept)
            token = tl.where(tl.abs(score) < float("inf"), start + block[None, :] * blocks.BLOCK + place, -1)
            places = found.column[:, None] + block[None, :].to(tl.int64) * found.stride
            tl.store(found.tokens + places, token, mask=kept)


@triton.jit(repr=named("nsa_block_scores"))
def block_scores_kernel(
    queries0, queries1, keys0, keys1, weights, position, sequence_start, scores, tokens,
    num_queries, num_keys, scale,
    KV_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr,
    BLOCK: tl.constexpr, ROW: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr,
    PADDED: tl.constexpr, TILES_EACH: tl.constexpr, KEY_PROGRAMS: tl.constexpr, HELD: tl.constexpr,
    NEGATIVE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Scores and tokens, see `Found`; those of blocks out of sight are not written."""
    DIM: tl.constexpr = Dim(E0, E1)
    blocks: tl.constexpr = IndexBlocks(BLOCK, 0, COLUMNS, PADDED, TILES_EACH)
    SHARED: tl.constexpr = KV_HEADS // KEY_HEADS  # KV heads of a head of keys
    b = tl.program_id(1) // KEY_HEADS
    key_head = tl.program_id(1) % KEY_HEADS
    tile = tl.program_id(0) // KEY_PROGRAMS
    first_tile = (tl.program_id(0) % KEY_PROGRAMS) * TILES_EACH
    pair = tile * PAIRS + tl.arange(0, PAIRS)
    exists = pair < num_queries * SHARED
    place = b.to(tl.int64) * num_queries + pair // SHARED
    at = tl.load(position + place, mask=exists, other=-1)
    current = tl.where(at >= 0, at // BLOCK, -1)
    target = (place * KV_HEADS + key_head * SHARED + pair % SHARED) * ROW
    pairs: tl.constexpr = Pairs(tile * PAIRS, exists, current, target, num_queries * SHARED, PAIRS, ROW)
    queries: tl.constexpr = IndexQueries(
        queries0, queries1, weights, b, key_head, KEY_HEADS=KEY_HEADS, HEADS=HEADS, HELD=HELD,
        DIM=DIM, NEGATIVE=NEGATIVE, PRECISION=PRECISION, TMA=TMA,
    )  # fmt: skip
    keys: tl.constexpr = Keys(keys0, keys1, b, key_head, num_keys, KEY_HEADS, COLUMNS, DIM, TMA)
    column = (b.to(tl.int64) * (ROW * KV_HEADS) + key_head * SHARED + pair % SHARED) * num_queries
    found: tl.constexpr = Found(scores, tokens, column + pair // SHARED, KV_HEADS * num_queries)
    sees = at >= 0
    if sequence_start is None:
        _score_seen_blocks(queries, keys, pairs, at, 0, sees, first_tile, found, scale, blocks)
    else:
        begin = tl.where(sees, tl.load(sequence_start + place, mask=exists, other=0), LARGEST_INT)
        start = tl.min(begin, 0)
        while start < LARGEST_INT:
            _score_seen_blocks(
                queries, keys, pairs, at, start, begin == start, first_tile, found, scale, blocks
            )
            start = tl.min(tl.where(begin > start, begin, LARGEST_INT), 0)


@triton.jit
def finite(x):
    """`x`, with 0 for what is not finite: it has no gradient and gives none, but 0 times NaN is NaN."""
    x0 = tl.where(tl.abs(x.first) < float("inf"), x.first, 0.0)
    if x.second is None:
        y = Pieces(x0, None)
    else:
        y = Pieces(x0, tl.where(tl.abs(x.second) < float("inf"), x.second, 0.0))
    return y


@triton.jit(repr=named("nsa_index_query_gradients"))
def index_query_gradients_kernel(
    query, keys, weights, tokens, d_scores, position, d_query, d_weights, d_products,
    num_queries, num_keys, scale,
    KV_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr,
    BLOCK: tl.constexpr, ROW: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, BY_SLOT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The index queries of one pair: their gradients, and those of their weights and products.

    Scores are those of the blocks in sight or, BY_SLOT, of ROW slots; see `query_gradients` for the layout.
    """
    DIM: tl.constexpr = Dim(E0, E1)
    E: tl.constexpr = E0 + E1
    dtype: tl.constexpr = query.dtype.element_ty
    b = tl.program_id(1).to(tl.int64)
    pair = b * (num_queries * KV_HEADS) + tl.program_id(0)
    query_token = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    own_keys = keys + (b * num_keys * KEY_HEADS + kv_head // (KV_HEADS // KEY_HEADS)) * E
    if BY_SLOT:
        own_tokens = tokens + pair * ROW
        own_products = d_products + pair * (ROW * HEADS)
        block_stride = 1  # from one score to the next
        product_stride = HEADS
        head_stride = 1
        count = ROW
    else:
        lane = (b * (ROW * KV_HEADS) + kv_head) * num_queries
        own_tokens = tokens + lane + query_token
        own_products = d_products + lane * HEADS + query_token
        block_stride = KV_HEADS * num_queries
        product_stride = KV_HEADS * HEADS * num_queries
        head_stride = num_queries
        at = tl.load(position + b * num_queries + query_token)
        count = tl.where(at >= 0, at // BLOCK + 1, 0)
    step = tl.arange(0, STEP)
    head = tl.arange(0, ROWS)
    exists = head < HEADS
    row = pair * HEADS + head
    q = load_at(query, row * E, exists, DIM)
    # Factors of 16 bits: relative to the largest, so that none is out of their range.
    largest = tl.full((), 0.0, tl.float32)
    for first in tl.range(0, count, STEP):
        block = first + step
        token = tl.load(own_tokens + block.to(tl.int64) * block_stride, mask=block < count, other=-1)
        given = tl.load(d_scores + pair * ROW + block, mask=token >= 0, other=0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(given), 0))
    if weights is not None:
        weight = tl.load(weights + row, mask=exists, other=0.0).to(tl.float32)
        weight = tl.where(tl.abs(weight) < float("inf"), weight, 0.0)  # else no score of the query is finite
        largest *= tl.max(tl.abs(weight), 0)
    shrink = tl.where(largest > 1e-37, 1.0 / largest, 0.0)  # of smaller ones the inverse would be infinite
    total = zeros(ROWS, DIM)
    of_weights = tl.zeros([ROWS], tl.float32)
    for first in tl.range(0, count, STEP):
        block = first + step
        token = tl.load(own_tokens + block.to(tl.int64) * block_stride, mask=block < count, other=-1)
        used = token >= 0
        given = tl.load(d_scores + pair * ROW + block, mask=used, other=0.0)
        k = load_at(own_keys, tl.where(used, token, 0).to(tl.int64) * (KEY_HEADS * E), used, DIM)
        product = inner(q, k, PRECISION) * scale
        if weights is not None:
            of_weights += tl.sum(tl.where(used, given, 0.0)[None, :] * tl.maximum(product, 0.0), 1)
            factor = tl.where(product > 0, weight[:, None], 0.0)
        else:  # the first head with the largest product
            number = tl.where(exists[:, None] & (product == product), product, float("-inf"))
            best = tl.max(number, 0)
            which = tl.min(tl.where(number == best[None, :], head[:, None], ROWS), 0)
            factor = tl.where(head[:, None] == which[None, :], 1.0, 0.0)
        part = given[None, :] * factor
        to = own_products + block.to(tl.int64)[None, :] * product_stride + head[:, None] * head_stride
        tl.store(to, part * scale, mask=exists[:, None] & (block < count)[None, :])
        total = add_product((part * shrink).to(dtype), cast(finite(k), dtype), total, PRECISION)
    store_at(d_query, row * E, scaled(total, largest * scale), exists, DIM)
    if weights is not None:
        tl.store(d_weights + row, of_weights.to(d_weights.dtype.element_ty), mask=exists)


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
        if tl.max(tl.where(start < first_key + COLUMNS, last, -1), 0) >= first_key:
            block = tl.maximum(first_key - start, 0) // BLOCK  # of the first key
            row = ((b * num_queries + token) * KV_HEADS + k) * HEADS
            for later in tl.static_range((COLUMNS + BLOCK - 2) // BLOCK + 1):
                place = block + later
                lane = (b * ROW + place) * KV_HEADS + k
                source = tl.load(tokens + lane * num_queries + token, mask=place * BLOCK <= at, other=-1)
                inside = (source >= first_key) & (source < first_key + COLUMNS)
                part = zeros(TOKENS, DIM)  # of the one key of the block that each query chose
                for head in tl.range(0, HEADS):
                    of_head = (lane * HEADS + head) * num_queries
                    x = tl.load(d_products + of_head + token, mask=inside, other=0.0)
                    q = finite(load_at(query, (row + head) * E, inside, DIM))
                    part = added(part, scaled(cast(q, tl.float32), x[:, None]))
                chosen = tl.where(source[None, :] == key[:, None], 1.0, 0.0).to(dtype)
                total = add_product(chosen, cast(part, dtype), total, PRECISION)
    row = ((b * num_keys + key) * KV_HEADS + k) * E
    store_at(d_keys, row, total, key < num_keys, DIM)
