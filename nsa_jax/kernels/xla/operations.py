"""The operations of `nsa_jax.attention` in plain JAX: chunked, differentiable, on any platform.

Each differs from the public one of the same name in that nothing is defaulted or validated any more and that
the keys read by each query and KV head come as one more result. That the queries are known to be consecutive
(`first_position`) makes no difference here.
"""

from functools import partial

import jax
import jax.numpy as jnp

from nsa_jax import layout
from nsa_jax.array_typing import Array, Float, Int, Int32
from nsa_jax.config import NSAConfig, Tiles
from nsa_jax.kernels.xla.block_attention import BlockLists, ItemSizes, block_attention
from nsa_jax.kernels.xla.range_attention import range_attention
from nsa_jax.kernels.xla.selection import choose_blocks

type Attended = tuple[Float[Array, "B T N V"], Float[Array, "B T N"], Int32[Array, "B T K"]]


@partial(jax.jit, static_argnames=("config", "scale", "tiles", "first_position"))
def compressed_attention(
    query: Float[Array, "B T N H"],
    key_cmp: Float[Array, "B C K H"],
    value_cmp: Float[Array, "B C K V"],
    *,
    config: NSAConfig,
    query_positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B S"] | None,
    scale: float,
    tiles: Tiles,
    first_position: int | None,
) -> Attended:
    """Attention over the visible compressed blocks (Eq. 7): one range of blocks a query."""
    placed = layout.query_layout(config, query_positions, segment_ids)
    return _attend_range(query, key_cmp, value_cmp, placed.compression_range(config), scale, tiles)


@partial(jax.jit, static_argnames=("config", "scale", "tiles", "first_position"))
def select_blocks(
    query: Float[Array, "B T N H"],
    key_cmp: Float[Array, "B C K H"],
    *,
    config: NSAConfig,
    lse_cmp: Float[Array, "B T N"] | None,
    query_positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B S"] | None,
    scale: float,
    tiles: Tiles,
    first_position: int | None,
) -> Int32[Array, "B T K R"]:
    """The blocks that each query attends (Eq. 8-11)."""
    placed = layout.query_layout(config, query_positions, segment_ids)
    if lse_cmp is None:
        ranges = placed.compression_range(config)
        _, lse_cmp, _ = _attend_range(query, key_cmp, key_cmp[..., :0], ranges, scale, tiles)
    return choose_blocks(
        query, key_cmp, lse_cmp, placed, config, scale, tiles, packed=segment_ids is not None
    )


@partial(jax.jit, static_argnames=("config", "scale", "tiles", "first_position"))
def selected_attention(
    query: Float[Array, "B T N H"],
    key_slc: Float[Array, "B S K H"],
    value_slc: Float[Array, "B S K V"],
    block_indices: Int[Array, "B T K R"],
    *,
    config: NSAConfig,
    query_positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B S"] | None,
    scale: float,
    tiles: Tiles,
    first_position: int | None,
) -> Attended:
    """Attention over the tokens `s <= t` of the selected blocks (Eq. 12)."""
    batch, num_queries, num_heads, _ = query.shape
    block_size = config.selection_block_size
    missing = ((0, 0), (0, max(block_size - key_slc.shape[1], 0)), (0, 0), (0, 0))
    key_slc, value_slc = jnp.pad(key_slc, missing), jnp.pad(value_slc, missing)
    num_keys, num_kv_heads = key_slc.shape[1:3]
    heads = num_heads // num_kv_heads

    def flatten(x):
        return x.swapaxes(1, 2).reshape(batch * num_kv_heads * x.shape[1], *x.shape[3:])

    placed = layout.query_layout(config, query_positions, segment_ids)
    row_start = jnp.arange(batch, dtype=jnp.int32)[:, None] * num_keys
    head = jnp.arange(num_kv_heads, dtype=jnp.int32)
    first = (row_start + placed.sequence_start)[:, :, None] * num_kv_heads + head
    starts = first[..., None] + block_indices * (block_size * num_kv_heads)
    # A block that begins after its query holds nothing to see: drop it, and its item with it.
    useful = (block_indices >= 0) & (block_indices * block_size <= placed.position[:, :, None, None])
    blocks = BlockLists(
        flatten(jnp.where(useful, starts, -1)),
        flatten(first + (placed.position[:, :, None] + 1) * num_kv_heads),
    )
    blocks_per_sequence = layout.num_selection_blocks(num_keys, config)
    if segment_ids is not None:
        blocks_per_sequence = min(blocks_per_sequence + num_queries, num_keys)
    sizes = ItemSizes.choose(
        num_rows=batch * num_kv_heads * num_queries,
        slots=block_indices.shape[-1],
        width=heads * max(query.shape[-1], value_slc.shape[-1]),
        block_size=block_size,
        rows_per_sequence=num_queries,
        blocks_per_sequence=blocks_per_sequence,
        tiles=tiles,
    )
    grouped = query.reshape(batch, num_queries, num_kv_heads, heads, -1)
    keys, values = (x.reshape(batch * num_keys, *x.shape[2:]) for x in (key_slc, value_slc))
    rows = block_attention(flatten(grouped), keys, values, blocks, scale, sizes)
    out, lse, reads = (x.reshape(batch, num_kv_heads, num_queries, *x.shape[1:]).swapaxes(1, 2) for x in rows)
    return out.reshape(batch, num_queries, num_heads, -1), lse.reshape(batch, num_queries, num_heads), reads


@partial(jax.jit, static_argnames=("config", "scale", "tiles", "first_position"))
def window_attention(
    query: Float[Array, "B T N H"],
    key_win: Float[Array, "B S K H"],
    value_win: Float[Array, "B S K V"],
    *,
    config: NSAConfig,
    query_positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B S"] | None,
    scale: float,
    tiles: Tiles,
    first_position: int | None,
) -> Attended:
    """Attention over the last `w` tokens, the query's own included: one range of keys a query."""
    placed = layout.query_layout(config, query_positions, segment_ids)
    return _attend_range(query, key_win, value_win, placed.window_range(config), scale, tiles)


@jax.jit
def gated_sum(
    out_cmp: Float[Array, "B T N V"],
    out_slc: Float[Array, "B T N V"],
    out_win: Float[Array, "B T N V"],
    gates: Float[Array, "B T N 3"],
) -> Float[Array, "B T N V"]:
    """`g_cmp * o_cmp + g_slc * o_slc + g_win * o_win` (Eq. 5), summed in float32 or wider."""
    accumulate = jnp.promote_types(out_cmp.dtype, jnp.float32)
    gates = gates.astype(accumulate)
    branches = (out_cmp, out_slc, out_win)
    weighted = (gates[..., i, None] * branch.astype(accumulate) for i, branch in enumerate(branches))
    total = sum(weighted, start=jnp.zeros((), accumulate))
    return total.astype(out_cmp.dtype)


@partial(jax.jit, static_argnames=("config", "scale", "tiles", "first_position"))
def native_sparse_attention(
    query: Float[Array, "B T N H"],
    key_cmp: Float[Array, "B C K H"],
    value_cmp: Float[Array, "B C K V"],
    key_slc: Float[Array, "B S K H"],
    value_slc: Float[Array, "B S K V"],
    key_win: Float[Array, "B S K H"],
    value_win: Float[Array, "B S K V"],
    gates: Float[Array, "B T N 3"],
    *,
    config: NSAConfig,
    block_indices: Int[Array, "B T K R"] | None,
    query_positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B S"] | None,
    scale: float,
    tiles: Tiles,
    first_position: int | None,
) -> Float[Array, "B T N V"]:
    """The three branches and their gated sum (Eq. 5)."""
    arguments = dict(
        config=config,
        query_positions=query_positions,
        segment_ids=segment_ids,
        scale=scale,
        tiles=tiles,
        first_position=first_position,
    )
    out_cmp, lse_cmp, _ = compressed_attention(query, key_cmp, value_cmp, **arguments)
    if block_indices is None:
        fixed = jax.lax.stop_gradient((query, key_cmp, lse_cmp))
        block_indices = select_blocks(*fixed[:2], lse_cmp=fixed[2], **arguments)
    out_slc, _, _ = selected_attention(query, key_slc, value_slc, block_indices, **arguments)
    out_win, _, _ = window_attention(query, key_win, value_win, **arguments)
    return gated_sum(out_cmp, out_slc, out_win, gates)


def _attend_range(query, key, value, start_end, scale, tiles) -> Attended:
    out, lse, reads = range_attention(query, key, value, *start_end, scale, tiles)
    return out, lse, jnp.repeat(reads[..., None], key.shape[2], axis=2)
