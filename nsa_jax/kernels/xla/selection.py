"""Importance of the selection blocks and the choice of the best (Eq. 8-11), chunk by chunk."""

import jax
import jax.numpy as jnp

from nsa_jax import layout
from nsa_jax.array_typing import Array, Float, Int32
from nsa_jax.config import NSAConfig, Tiles
from nsa_jax.kernels.xla import range_attention as ranges


def choose_blocks(
    query: Float[Array, "B T N H"],
    key_cmp: Float[Array, "B C K H"],
    lse_cmp: Float[Array, "B T N"],
    placed: layout.QueryLayout,
    config: NSAConfig,
    scale: float,
    tiles: Tiles,
    packed: bool,
) -> Int32[Array, "B T K R"]:
    """Selected blocks of every query; only the probabilities of one chunk are ever stored."""
    batch, num_queries, num_heads, _ = query.shape
    num_compressed, num_kv_heads = key_cmp.shape[1:3]
    heads = num_heads // num_kv_heads
    accumulate = jnp.promote_types(query.dtype, jnp.float32)
    num_blocks = max(layout.max_selection_blocks(num_compressed, config), 1)
    tile = ranges.tile_size(num_queries, num_compressed, tiles)

    def choose_chunk(inputs):
        chunk, lse, position, compression_start = inputs
        rows = chunk.query.shape[2]

        def score_tile(index, probabilities):
            first = lowest + index * tile
            visible, (k,) = ranges.read_tile(chunk, first, tile, key_cmp)
            logits = ranges.row_logits(chunk.query, k, accumulate) * scale
            logits = jnp.where(visible[:, None], logits, -jnp.inf)
            weights = jnp.exp(logits - jnp.where(lse == -jnp.inf, 0, lse))
            part = weights.reshape(batch, num_kv_heads, rows // heads, heads, tile).sum(3)
            return ranges.add_tile(probabilities, first, part, axis=3)

        shape = (batch, num_kv_heads, rows // heads, num_compressed)
        probabilities = ranges.zeros_beside(query, shape, accumulate)
        if num_compressed:
            lowest, num_tiles = ranges.tiles_of_chunk(chunk.start, chunk.end, tile)
            probabilities = jax.lax.fori_loop(0, num_tiles, score_tile, probabilities)
        if packed:
            # Block numbers are sequence-local: bring each query's first block to column 0.
            column = compression_start[:, None, :, None] + jnp.arange(num_compressed)
            probabilities = jnp.take_along_axis(probabilities, column, axis=3, mode="fill", fill_value=0)
        return _best(_collect(probabilities, num_blocks, config), position[:, None, :, None], config)

    start, end = placed.compression_range(config)
    chunks = ranges.split_queries(query, start, end, num_kv_heads, tiles)
    lse = ranges.split_queries(lse_cmp[..., None], start, end, num_kv_heads, tiles).query
    size = min(tiles.query_chunk, num_queries)

    def by_chunk(per_token, fill):
        padded = jnp.pad(per_token, ((0, 0), (0, -num_queries % size)), constant_values=fill)
        return padded.reshape(batch, -1, size).swapaxes(0, 1)

    inputs = (chunks, lse, by_chunk(placed.position, -1), by_chunk(placed.compression_start, 0))
    chosen = jax.lax.map(choose_chunk, inputs)  # [chunks, B, K, size, R]
    chosen = chosen.transpose(1, 0, 3, 2, 4).reshape(batch, -1, num_kv_heads, config.num_selected_blocks)
    return chosen[:, :num_queries]


def _collect(
    probabilities: Float[Array, "B K T C"], num_blocks: int, config: NSAConfig
) -> Float[Array, "B K T M"]:
    """Importance of each selection block: weighted sum of the compressed blocks that overlap it (Eq. 9)."""
    stride = config.selection_block_size // config.compression_stride
    weights = layout.overlap_weights(config)
    before, width = -weights[0][0], (num_blocks - 1) * stride + 1
    after = before + weights[-1][0] + width - before - probabilities.shape[-1]
    padded = jnp.pad(probabilities, ((0, 0),) * 3 + ((before, max(after, 0)),))
    parts = (
        weight * jax.lax.slice_in_dim(padded, offset + before, offset + before + width, stride, axis=3)
        for offset, weight in weights
    )
    return sum(parts, start=jnp.zeros((), padded.dtype))


def _best(scores: Float[Array, "B K T M"], position: Array, config: NSAConfig) -> Int32[Array, "B K T R"]:
    """The forced blocks and the best-scored others, ascending, -1 behind; ties go to the lower index."""
    block = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    candidate = block * config.selection_block_size <= position
    ranked = jnp.where(layout.is_forced(block, position, config), jnp.inf, scores)
    ranked = jnp.where(candidate, ranked, -jnp.inf)
    slots = min(config.num_selected_blocks, scores.shape[-1])
    best, chosen = jax.lax.top_k(ranked, slots)
    unused = jnp.iinfo(jnp.int32).max
    chosen = jnp.sort(jnp.where(best > -jnp.inf, chosen.astype(jnp.int32), unused), axis=-1)
    chosen = jnp.where(chosen == unused, -1, chosen)
    return jnp.pad(chosen, ((0, 0),) * 3 + ((0, config.num_selected_blocks - slots),), constant_values=-1)
