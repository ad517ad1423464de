"""Scores of the selection blocks by an indexer: the largest score of the tokens of each block.

grid = (tiles of pairs of the chunk times groups of key tiles, batch rows of the chunk times heads of keys). A
pair is a query token with a KV head. Where all KV heads share a head of keys, a tile of `PAIRS` neighbouring
pairs has them all, and needs each tile of keys once; else its pairs are those of one KV head. Groups change
fastest. With few queries, as in a decode step, groups are short, so that enough programs share the keys of a
row.

Loop order: key tiles of the group outside, index heads inside. Of up to `held_heads` index heads
(`sizes.INDEX`) all queries are held, and tiles of keys stream in, `num_stages` in flight. Of more, the keys
of a tile are held, and the queries of each head stream in. Maxima over the tokens of a block are taken in
registers, so `PAIRS x BLOCKS` floats leave for `PAIRS x COLUMNS` products. Shared memory: what is held,
`num_stages` tiles of what streams.

No token is masked. A block with a score of its own ends before the query (later blocks are local, and always
selected), so all of its tokens are visible, and what is scored beyond is never read. Blocks whose length is
no power of two take `PADDED` columns, loaded row by row. A tile with pairs of several sequences makes one
pass for each. Skipped are queries whose blocks all fit, and key tiles whose blocks are local or later for
all pairs of the tile. Memory: the scores of one chunk.

Floor at 64k tokens, 4 KV heads, one index head, E = 128: 2.2 TFLOP, 3.4 ms at 650 TFLOP/s; 8.6 G maxima, 0.6
ms at 64 a clock and SM; keys from L2, 17 GB with 128 pairs a tile, some 3 ms, beside the products. An H100
takes 5.0 ms, top-n and all, as predicted.
"""

from typing import Any, NamedTuple

import jax
import triton
import triton.language as tl

from nsa_jax.array_typing import Array
from nsa_jax.kernels.triton.launch import named
from nsa_jax.kernels.triton.loading import Keys, load_chosen_keys, load_keys
from nsa_jax.kernels.triton.pieces import LARGEST_INT, Dim, Pieces, cast, inner
from nsa_jax.layout import Quantised


class IndexBlocks(NamedTuple):
    """How tiles of keys are cut into blocks.

    Attributes:
      BLOCK: tokens of a selection block.
      LOCAL: selection blocks that are always taken: the query's own and those just before it.
      COLUMNS: keys of a tile, with what pads them.
      PADDED: columns of a selection block.
      TILES_EACH: most tiles of keys that a program takes.
    """

    BLOCK: tl.constexpr
    LOCAL: tl.constexpr
    COLUMNS: tl.constexpr
    PADDED: tl.constexpr
    TILES_EACH: tl.constexpr


class Pairs(NamedTuple):
    """A tile of neighbouring (token, KV head) pairs of one row and head of keys, and where their scores go.

    Attributes:
      first: the first pair of the tile, counted from the first of the row and head of keys.
      exists: whether there is such a pair.
      current: selection block of each pair's token, -1 where it sees nothing.
      target: offset of each pair's row of scores.
      length: pairs of the row and head of keys.
      PAIRS: pairs of a tile.
      ROW: length of a pair's row of scores.
    """

    first: tl.tensor
    exists: tl.tensor
    current: tl.tensor
    target: tl.tensor
    length: tl.tensor
    PAIRS: tl.constexpr
    ROW: tl.constexpr


class IndexQueries(NamedTuple):
    """Queries of an indexer, `[B, T K / I, I, J, E]` for I heads of keys, and the weights of their heads.

    Attributes:
      first, second: where tiles of queries of one head come from, see `Keys`.
      weights: weights `[B, T K / I, I, J]`, or None.
      b: row of the batch.
      key_head: head of keys.
      KEY_HEADS: I, K or 1.
      HEADS: J.
      HELD: whether a program holds the queries of all heads, and keys stream in; else it is the other way.
      DIM: `Dim` of a query.
      NEGATIVE: whether the scale is, so that the smallest product is the best.
      PRECISION, TMA: as everywhere.
    """

    first: tl.tensor
    second: tl.tensor | None
    weights: tl.tensor | None
    b: tl.tensor
    key_head: tl.tensor
    KEY_HEADS: tl.constexpr
    HEADS: tl.constexpr
    HELD: tl.constexpr
    DIM: tl.constexpr
    NEGATIVE: tl.constexpr
    PRECISION: tl.constexpr
    TMA: tl.constexpr


class IndexHead(NamedTuple):
    """A tile of one index head: queries `[PAIRS, E]`, and the weights `[PAIRS]` of the pairs, or None."""

    query: Pieces
    weight: tl.tensor | None


def flat_if_shared(keys: Array | Quantised) -> Any:
    """Index keys as they are divided among devices: `[B, S, K, E]`, or `[B, S E]` if all KV heads share one.

    Axis 2 of an operand is divided with the heads of a call, so what all share has none.
    """
    return jax.tree.map(lambda x: x.reshape(x.shape[0], -1) if x.shape[2] == 1 else x, keys)


def by_heads(keys: Array | Quantised, dim: int) -> Any:
    """The inverse of `flat_if_shared`: `[B, S, I, E]`."""
    if isinstance(keys, Quantised):
        scale = keys.scale[..., None] if keys.scale.ndim == 2 else keys.scale
        return Quantised(by_heads(keys.numbers, dim), scale)
    return keys.reshape(keys.shape[0], -1, 1 if keys.ndim == 2 else keys.shape[2], dim)


@triton.jit
def load_head(queries, pairs, head):
    """The tile of one index head."""
    source: tl.constexpr = Keys(
        queries.first, queries.second, queries.b, queries.key_head * queries.HEADS + head, pairs.length,
        queries.KEY_HEADS * queries.HEADS, pairs.PAIRS, queries.DIM, queries.TMA,
    )  # fmt: skip
    if queries.weights is None:
        weight = None
    else:
        pair = queries.b.to(tl.int64) * pairs.length + pairs.first + tl.arange(0, pairs.PAIRS)
        row = pair * queries.KEY_HEADS + queries.key_head
        weight = tl.load(queries.weights + row * queries.HEADS + head, mask=pairs.exists, other=0.0)
        weight = weight.to(tl.float32)
    return IndexHead(load_keys(source, pairs.first), weight)


@triton.jit
def part_of_head(queries, of_head, k):
    """What one index head gives each token: its product with the query or, with weights, its summand."""
    part = inner(of_head.query, cast(k, of_head.query.first.dtype), queries.PRECISION)
    if queries.NEGATIVE:
        part = -part
    if of_head.weight is not None:
        part = of_head.weight[:, None] * tl.maximum(part, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return part


@triton.jit
def joined(queries, total, part):
    """What the index heads give so far, with that of one more: the sum or, without weights, the largest."""
    return tl.maximum(total, part) if queries.weights is None else total + part


@triton.jit
def hold_queries(queries, pairs):
    """The tiles of queries of all index heads, or nothing where they are loaded for each tile of keys."""
    held = ()
    if queries.HELD:
        for head in tl.static_range(queries.HEADS):
            # Triton knows no starred tuple.
            held = held + (load_head(queries, pairs, head),)  # type: ignore[assignment]  # noqa: RUF005
    return held


@triton.jit
def tile_tokens(tile, blocks):
    """The tokens in the columns of a tile, counted from the first of the sequence."""
    column = tl.arange(0, blocks.COLUMNS)
    block = tile * (blocks.COLUMNS // blocks.PADDED) + column // blocks.PADDED
    return block * blocks.BLOCK + column % blocks.PADDED


@triton.jit
def score_tokens(queries, keys, pairs, held, start, tile, blocks):
    """What all index heads give each token of a tile of keys, `[PAIRS, COLUMNS]`, yet without the scale."""
    if blocks.PADDED == blocks.BLOCK:
        k = load_keys(keys, start + tile * blocks.COLUMNS)
    else:
        column = tl.arange(0, blocks.COLUMNS)
        block = tile * (blocks.COLUMNS // blocks.PADDED) + column // blocks.PADDED
        inside = column % blocks.PADDED
        k = load_chosen_keys(keys, start + block * blocks.BLOCK + inside, inside < blocks.BLOCK)
    if queries.HELD:
        total = part_of_head(queries, held[0], k)
        for head in tl.static_range(1, queries.HEADS):
            total = joined(queries, total, part_of_head(queries, held[head], k))
    else:
        NOTHING: tl.constexpr = float("-inf") if queries.weights is None else 0.0
        total = tl.full([pairs.PAIRS, blocks.COLUMNS], NOTHING, tl.float32)
        for head in range(queries.HEADS):
            total = joined(queries, total, part_of_head(queries, load_head(queries, pairs, head), k))
    return total


@triton.jit
def _score_index_sequence(queries, keys, key_scale, pairs, start, here, first_tile, scores, scale, blocks):
    """Scores of the pairs that are `here`, in the sequence whose first key is `start`."""
    BLOCKS: tl.constexpr = blocks.COLUMNS // blocks.PADDED
    column = tl.arange(0, blocks.COLUMNS)
    of_block = tl.arange(0, BLOCKS)
    highest = tl.max(tl.where(here, pairs.current, -1), 0) - blocks.LOCAL
    last_tile = tl.minimum((highest + BLOCKS) // BLOCKS, first_tile + blocks.TILES_EACH)
    if first_tile < last_tile:
        held = hold_queries(queries, pairs)
        for tile in range(first_tile, last_tile):
            total = score_tokens(queries, keys, pairs, held, start, tile, blocks)
            if key_scale is not None:  # not negative, so the largest product stays the largest
                token = start + tile_tokens(tile, blocks)
                place = (keys.b.to(tl.int64) * keys.length + token) * keys.HEADS + keys.head
                scales = tl.load(key_scale + place, mask=token < keys.length, other=0.0)
                total *= scales[None, :]
            if blocks.PADDED != blocks.BLOCK:
                total = tl.where((column % blocks.PADDED < blocks.BLOCK)[None, :], total, float("-inf"))
            # The maximum drops NaN, unless all are; then the top-n kernel takes it for the lowest score.
            best = tl.max(total.reshape(pairs.PAIRS, BLOCKS, blocks.PADDED), 2) * scale
            block = tile * BLOCKS + of_block
            kept = here[:, None] & (block < pairs.ROW)[None, :]
            tl.store(scores + pairs.target[:, None] + block[None, :], best, mask=kept)


@triton.jit(repr=named("nsa_index_scores"))
def index_scores_kernel(
    queries0, queries1, keys0, keys1, key_scale, weights, position, sequence_start, chunk, scores,
    batch, num_queries, num_keys, scale,
    CHUNKS_PER_ROW: tl.constexpr, CHUNK_ROWS: tl.constexpr, CHUNK_TOKENS: tl.constexpr,
    KV_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr,
    BLOCK: tl.constexpr, SELECTED: tl.constexpr, LOCAL: tl.constexpr, ROW: tl.constexpr,
    PAIRS: tl.constexpr, COLUMNS: tl.constexpr, PADDED: tl.constexpr, TILES_EACH: tl.constexpr,
    KEY_PROGRAMS: tl.constexpr, HELD: tl.constexpr, NEGATIVE: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Scores `[CHUNK_ROWS, K, CHUNK_TOKENS, ROW]` of one chunk, times `scale`, which is not negative.

    Queries and keys come from `key_tiles`, keys in 8 bits with a `key_scale` `[B, S, I]`; `sequence_start` is
    None where rows are not packed.
    """
    DIM: tl.constexpr = Dim(E0, E1)
    blocks: tl.constexpr = IndexBlocks(BLOCK, LOCAL, COLUMNS, PADDED, TILES_EACH)
    number = tl.load(chunk)
    SHARED: tl.constexpr = KV_HEADS // KEY_HEADS  # KV heads of a head of keys
    row_of_chunk = tl.program_id(1) // KEY_HEADS
    key_head = tl.program_id(1) % KEY_HEADS
    b = (number // CHUNKS_PER_ROW) * CHUNK_ROWS + row_of_chunk
    tile = tl.program_id(0) // KEY_PROGRAMS
    first_tile = (tl.program_id(0) % KEY_PROGRAMS) * TILES_EACH
    first_token = (number % CHUNKS_PER_ROW) * CHUNK_TOKENS

    pair = tile * PAIRS + tl.arange(0, PAIRS)  # of the chunk
    in_chunk = pair // SHARED
    token = first_token + in_chunk
    exists = (in_chunk < CHUNK_TOKENS) & (token < num_queries) & (b < batch)
    place = b.to(tl.int64) * num_queries + token
    at = tl.load(position + place, mask=exists, other=-1)
    current = tl.where(at >= 0, at // BLOCK, -1)
    scored = current >= SELECTED
    row = (row_of_chunk * KV_HEADS + key_head * SHARED + pair % SHARED).to(tl.int64)
    target = (row * CHUNK_TOKENS + in_chunk) * ROW
    pairs: tl.constexpr = Pairs(
        first_token * SHARED + tile * PAIRS, exists, current, target, num_queries * SHARED, PAIRS, ROW
    )
    queries: tl.constexpr = IndexQueries(
        queries0, queries1, weights, b, key_head, KEY_HEADS=KEY_HEADS, HEADS=HEADS, HELD=HELD,
        DIM=DIM, NEGATIVE=NEGATIVE, PRECISION=PRECISION, TMA=TMA,
    )  # fmt: skip
    keys: tl.constexpr = Keys(keys0, keys1, b, key_head, num_keys, KEY_HEADS, COLUMNS, DIM, TMA)
    if sequence_start is None:
        _score_index_sequence(queries, keys, key_scale, pairs, 0, scored, first_tile, scores, scale, blocks)
    else:
        begin = tl.where(scored, tl.load(sequence_start + place, mask=exists, other=0), LARGEST_INT)
        start = tl.min(begin, 0)
        while start < LARGEST_INT:
            _score_index_sequence(
                queries, keys, key_scale, pairs, start, begin == start, first_tile, scores, scale, blocks
            )
            start = tl.min(tl.where(begin > start, begin, LARGEST_INT), 0)
