"""Block selection (Eq. 8-11): scores the blocks for a chunk of queries, then takes the best of each query.

Blocks are scored by importance or by an indexer, or the scores are given.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nsa_jax import layout
from nsa_jax.array_typing import Array, Float, Int32
from nsa_jax.config import NSAConfig
from nsa_jax.kernels.triton.dims import padded_heads as power_of_two
from nsa_jax.kernels.triton.dims import split_dim
from nsa_jax.kernels.triton.gpu import has_tma, shape_of, target
from nsa_jax.kernels.triton.launch import MOST_PROGRAMS_Y, launch
from nsa_jax.kernels.triton.loading import key_tiles
from nsa_jax.kernels.triton.pieces import LOG2_E, precision
from nsa_jax.kernels.triton.selection import block_scores
from nsa_jax.kernels.triton.selection.best_blocks import best_blocks_kernel
from nsa_jax.kernels.triton.selection.importance import importance_kernel
from nsa_jax.kernels.triton.selection.index_scores import by_heads, index_scores_kernel
from nsa_jax.kernels.triton.sizes import Shape, choose_sizes
from nsa_jax.kernels.triton.sizes.selection import (
    INDEX,
    INDEX_PROGRAMS,
    SELECTION,
    IndexSizes,
    SelectionSizes,
)
from nsa_jax.layout import Placement, Quantised

type Common = dict[str, Any]  # what the kernels of a chunk are told alike
type Score = Callable[[Int32[Array, "1"], Common], Float[Array, "B K T M"]]  # the scores of a chunk


class _Chunks(NamedTuple):
    """How queries are chunked: `rows` whole rows of the batch, or `tokens` tokens of one; `number` chunks."""

    rows: int
    tokens: int
    per_row: int
    number: int


def choose_blocks(
    query: Float[Array, "B T N H"],
    key_cmp: Float[Array, "B C K H"],
    lse_cmp: Float[Array, "B T N"],
    placement: Placement,
    scale: float,
    *,
    sizes: SelectionSizes | None = None,
) -> Int32[Array, "B T K R"]:
    """Selected blocks of every query, ascending, then -1 in unused slots.

    Only the scores of one chunk are in memory at a time. `sizes` are chosen by shape if None.
    """
    assert placement.first_keys.cmp.known == 0, "the selection sees the compressed keys of whole rows"
    config, (num_compressed, num_kv_heads) = placement.config, key_cmp.shape[1:3]
    if sizes is None:
        whole = _padded_strides(config) == _strides(config)
        shape = shape_of(
            query, key_cmp, block_columns=2 * _padded_strides(config), plain=whole and not placement.packed
        )
        sizes = choose_sizes(SELECTION, shape)
    num_blocks = max(layout.max_selection_blocks(num_compressed, config), 1)

    # Tokens of a head are contiguous, as programs load them. Rows that see nothing get inf: exp2(-inf) = 0.
    normalisers = jnp.where(lse_cmp == -jnp.inf, jnp.inf, lse_cmp * LOG2_E.value).swapaxes(1, 2)

    def score(chunk: Int32[Array, "1"], common: Common) -> Float[Array, "B K T M"]:
        return _score(query, key_cmp, normalisers, placement, chunk, scale, sizes, common)

    return _in_chunks(score, placement, num_kv_heads, num_blocks, sizes, sizes.tokens, SIGNED=False)


def choose_by_index(
    query: Float[Array, "B T K J E"],
    keys: Float[Array, "B ..."] | Quantised,
    weights: Float[Array, "B T K J"] | None,
    placement: Placement,
    scale: float,
    *,
    sizes: IndexSizes | None = None,
) -> Int32[Array, "B T K R"]:
    """The same by an indexer; `keys` are as `flat_if_shared` returns them."""
    assert placement.first_keys.slc.known == 0, "the selection sees the index keys of whole rows"
    num_kv_heads, _, dim = query.shape[2:]
    config = placement.config
    keys = by_heads(keys, dim)
    sizes = sizes or _index_sizes(query, config)
    num_blocks = layout.num_selection_blocks(keys.shape[1], config)

    def score(chunk: Int32[Array, "1"], common: Common) -> Float[Array, "B K T M"]:
        return _score_by_index(query, keys, weights, placement, chunk, scale, sizes, common, num_blocks)

    tokens = max(sizes.pairs * keys.shape[2] // num_kv_heads, 1)
    return _in_chunks(score, placement, num_kv_heads, num_blocks, sizes, tokens, SIGNED=True)


def score_blocks(
    query: Float[Array, "B T K J E"],
    keys: Float[Array, "B ..."],
    weights: Float[Array, "B T K J"] | None,
    placement: Placement,
    scale: float,
    *,
    sizes: IndexSizes | None = None,
) -> tuple[Float[Array, "B T K M"], Int32[Array, "B M K T"]]:
    """Scores of all blocks, and the token that gave each, see `block_scores.score_blocks`."""
    sizes = sizes or _index_sizes(query, placement.config)
    return block_scores.score_blocks(query, keys, weights, placement, scale, sizes=sizes)


def _index_sizes(query: Float[Array, "B T K J E"], config: NSAConfig) -> IndexSizes:
    heads, dim = query.shape[3:]
    block = power_of_two(config.selection_block_size)
    return choose_sizes(INDEX, Shape(target(), query.dtype.itemsize, heads, dim, dim, block_columns=block))


def choose_best(
    scores: Float[Array, "B T K M"], placement: Placement, *, sizes: SelectionSizes | None = None
) -> Int32[Array, "B T K R"]:
    """The same by scores that are given."""
    batch, num_queries, num_kv_heads, num_blocks = scores.shape
    if sizes is None:
        sizes = SelectionSizes()
    padded = jnp.pad(scores.astype(jnp.float32), ((0, 0),) * 3 + ((0, _row(num_blocks) - num_blocks),))
    by_head = padded.swapaxes(1, 2)

    def score(chunk: Int32[Array, "1"], common: Common) -> Float[Array, "B K T M"]:
        rows, tokens, per_row = (common[f"CHUNK{x}"] for x in ("_ROWS", "_TOKENS", "S_PER_ROW"))
        batch_row, token = chunk[0] // per_row * rows, chunk[0] % per_row * tokens
        ends = -batch % rows, -num_queries % tokens
        whole = jnp.pad(by_head, ((0, ends[0]), (0, 0), (0, ends[1]), (0, 0)))
        return jax.lax.dynamic_slice(
            whole, (batch_row, 0, token, 0), (rows, num_kv_heads, tokens, by_head.shape[3])
        )

    return _in_chunks(score, placement, num_kv_heads, num_blocks, sizes, sizes.tokens, SIGNED=True)


def _row(num_blocks: int) -> int:
    """Length of a query's row of scores."""
    return -(-num_blocks // 32) * 32


def _in_chunks(
    score: Score,
    placement: Placement,
    num_kv_heads: int,
    num_blocks: int,
    sizes: SelectionSizes | IndexSizes,
    tile_tokens: int,
    **constants: Any,
) -> Int32[Array, "B T K R"]:
    """Scores the blocks of one chunk of queries after the other, and takes the best of each."""
    config, (batch, num_queries) = placement.config, placement.position.shape
    forced = config.num_initial_blocks + config.num_local_blocks
    all_forced = num_blocks <= config.num_selected_blocks or config.num_selected_blocks == forced
    row = _row(num_blocks)
    bytes_per_query = 0 if all_forced else row * 4
    chunks = _split(batch, num_queries, num_kv_heads, bytes_per_query, sizes.buffer_bytes, tile_tokens)

    def choose_chunk(chunk: Int32[Array, "1"]) -> Int32[Array, "B T K R"]:
        common = dict(
            batch=batch, num_queries=num_queries,
            CHUNKS_PER_ROW=chunks.per_row, CHUNK_ROWS=chunks.rows, CHUNK_TOKENS=chunks.tokens,
            KV_HEADS=num_kv_heads, BLOCK=config.selection_block_size,
            SELECTED=config.num_selected_blocks, LOCAL=config.num_local_blocks, ROW=row,
        )  # fmt: skip
        scores = None if all_forced else score(chunk, common)
        of_best = common | constants
        return _choose(scores, placement.position, chunk, num_blocks, config, sizes.best_columns, of_best)

    numbers = jnp.arange(chunks.number, dtype=jnp.int32)[:, None]
    chosen = choose_chunk(numbers[0]) if chunks.number == 1 else jax.lax.map(choose_chunk, numbers)
    rows, tokens = chunks.number // chunks.per_row * chunks.rows, chunks.per_row * chunks.tokens
    chosen = chosen.reshape(rows, tokens, num_kv_heads, config.num_selected_blocks)
    return chosen[:batch, :num_queries]


def _strides(config: NSAConfig) -> int:
    """Compression strides of a selection block."""
    return config.selection_block_size // config.compression_stride


def _padded_strides(config: NSAConfig) -> int:
    """Columns that a selection block takes in a tile of scores: `l' / d`, rounded up to a power of two."""
    return 1 << (_strides(config) - 1).bit_length()


def _split(
    batch: int, num_queries: int, num_kv_heads: int, bytes_per_query: int, buffer_bytes: int, tile_tokens: int
) -> _Chunks:
    """Chunks of whole batch rows if at least one fits, else nearly equal pieces of a row, in whole tiles."""
    room = max(buffer_bytes // max(num_kv_heads * bytes_per_query, 1), 1)
    most_rows = min(room // num_queries, MOST_PROGRAMS_Y // num_kv_heads)
    if most_rows >= 1:
        number = -(-batch // most_rows)
        return _Chunks(-(-batch // number), num_queries, 1, number)
    tokens = max(room // tile_tokens, 1) * tile_tokens
    per_row = -(-num_queries // tokens)
    tokens = -(-num_queries // (per_row * tile_tokens)) * tile_tokens
    return _Chunks(1, tokens, per_row, per_row * batch)


def _score(
    query, key_cmp, normalisers, placement: Placement, chunk, scale, sizes, common
) -> Float[Array, "B K T M"]:
    config = placement.config
    num_heads, num_compressed = query.shape[2], key_cmp.shape[1]
    first, second = split_dim(query.shape[3])
    padded = _padded_strides(config)
    columns = max(sizes.columns, 2 * padded)
    early = config.compression_block_size > config.compression_stride
    # No query needs the scores of the last local blocks, so no program starts there.
    last = max(layout.max_selection_blocks(num_compressed, config) - config.num_local_blocks, 1)
    column_programs = -(-last // ((columns // padded - early) * sizes.column_tiles))
    shape = (common["CHUNK_ROWS"], common["KV_HEADS"], common["CHUNK_TOKENS"], common["ROW"])
    tma = has_tma() and padded == _strides(config)  # else keys are loaded one by one
    return launch(
        importance_kernel,
        *key_tiles(query, sizes.tokens, tma), *key_tiles(key_cmp, columns, tma), normalisers,
        placement.position, placement.compression_start if placement.packed else None, chunk,
        out=jax.ShapeDtypeStruct(shape, jnp.float32),
        grid=(-(-shape[2] // sizes.tokens) * column_programs, shape[0] * shape[1]),
        num_warps=sizes.num_warps, num_stages=sizes.num_stages, registers=sizes.registers,
        num_compressed=num_compressed, scale=scale, NUM_HEADS=num_heads, H0=first, H1=second,
        SIZE=config.compression_block_size, STRIDE=config.compression_stride, TOKENS=sizes.tokens,
        COLUMNS=columns, PADDED=padded, TILES_EACH=sizes.column_tiles, COLUMN_PROGRAMS=column_programs,
        PRECISION=precision(query.dtype), TMA=tma, **common,
    )  # fmt: skip


def _score_by_index(
    query, keys, weights, placement: Placement, chunk, scale, sizes: IndexSizes, common, num_blocks: int
) -> Float[Array, "B K T M"]:
    batch, num_queries, num_kv_heads, heads, dim = query.shape
    first, second = split_dim(dim)
    block = placement.config.selection_block_size
    padded = power_of_two(block)
    columns = max(sizes.keys, padded)
    shape = (common["CHUNK_ROWS"], num_kv_heads, common["CHUNK_TOKENS"], common["ROW"])
    key_heads = keys.shape[2]
    shared = num_kv_heads // key_heads
    pairs = min(sizes.pairs, max(power_of_two(shape[2] * shared), 16))
    tiles = -(-shape[2] * shared // pairs)
    # No query needs the scores of the last local blocks, so no program starts there.
    key_tiles_of_row = -(-max(num_blocks - placement.config.num_local_blocks, 1) // (columns // padded))
    each = min(max(key_tiles_of_row * tiles * shape[0] * key_heads // INDEX_PROGRAMS, 1), sizes.key_tiles)
    key_programs = -(-key_tiles_of_row // each)
    tma = has_tma() and padded == block  # else keys are loaded one by one
    numbers, key_scale = keys if isinstance(keys, Quantised) else (keys, None)
    rows = query.reshape(batch, num_queries * shared, key_heads * heads, dim)
    return launch(
        index_scores_kernel,
        *key_tiles(rows, pairs, tma), *key_tiles(numbers, columns, tma), key_scale, weights,
        placement.position, placement.selection_start() if placement.packed else None, chunk,
        out=jax.ShapeDtypeStruct(shape, jnp.float32),
        grid=(tiles * key_programs, shape[0] * key_heads), num_warps=sizes.num_warps,
        num_stages=sizes.num_stages, num_keys=keys.shape[1], scale=abs(scale), KEY_HEADS=key_heads,
        HEADS=heads, E0=first, E1=second, PAIRS=pairs, COLUMNS=columns, PADDED=padded, TILES_EACH=each,
        KEY_PROGRAMS=key_programs, HELD=heads <= sizes.held_heads, NEGATIVE=scale < 0,
        PRECISION=precision(query.dtype), TMA=tma, **common,
    )  # fmt: skip


def _choose(
    scores, position, chunk, num_blocks, config: NSAConfig, best_columns: int, common
) -> Int32[Array, "B T K R"]:
    shape = (common["CHUNK_ROWS"], common["CHUNK_TOKENS"], common["KV_HEADS"], config.num_selected_blocks)
    return launch(
        best_blocks_kernel, scores, position, chunk,
        out=jax.ShapeDtypeStruct(shape, jnp.int32), grid=(shape[1], shape[0] * shape[2]), num_warps=1,
        num_stages=1, num_blocks=num_blocks, INITIAL=config.num_initial_blocks,
        COLUMNS=min(1 << (num_blocks - 1).bit_length(), best_columns),
        SLOTS=max(1 << (config.num_selected_blocks - 1).bit_length(), 32), **common,
    )  # fmt: skip
