"""The operations of `nsa_jax.attention` as Triton kernels, each with its backward.

Each differs from the public one of the same name in that nothing is defaulted or validated any more and that
the keys read by each query and KV head come as one more result. `tiles` are sizes of the `xla` implementation
and are ignored; each kernel chooses its own.

What the forward leaves for the backward carries the names of `SAVED_NAMES` (`jax.ad_checkpoint`), so that a
remat policy can keep it: `save_only_these_names(*SAVED_NAMES)` runs no forward kernel twice.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from nsa_jax import layout
from nsa_jax.array_typing import Array, Float, Int, Int32
from nsa_jax.config import NSAConfig, Tiles
from nsa_jax.kernels.triton import gated_sum as gating
from nsa_jax.kernels.triton.batching import folds_vmap
from nsa_jax.kernels.triton.block_attention import attend_blocks, block_gradients
from nsa_jax.kernels.triton.range_attention import attend_ranges, range_gradients
from nsa_jax.kernels.triton.range_tiles import Edges
from nsa_jax.kernels.triton.selection import choose_blocks

SAVED_NAMES = ("nsa_out", "nsa_lse", "nsa_block_indices")

type Attended = tuple[Float[Array, "B T N V"], Float[Array, "B T N"], Int32[Array, "B T K"]]


def _saved(out: Array, lse: Array) -> tuple[Array, Array]:
    return checkpoint_name(out, "nsa_out"), checkpoint_name(lse, "nsa_lse")


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _range_attention(query, key, value, start, end, scale, edges):
    return folds_vmap(partial(attend_ranges, scale=scale, edges=edges))(query, key, value, start, end)


def _range_forward(query, key, value, start, end, scale, edges):
    out, lse = _saved(*_range_attention(query, key, value, start, end, scale, edges))
    return (out, lse), (query, key, value, start, end, out, lse)


def _range_backward(scale, edges, residuals, cotangents):
    def gradients(*arrays):
        return range_gradients(*arrays, weight=None, previous=None, scale=scale, edges=edges)

    *gradients_of_operands, _ = folds_vmap(gradients)(*residuals, *cotangents)
    return *gradients_of_operands, None, None


_range_attention.defvjp(_range_forward, _range_backward)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8))
def _block_attention(query, key, value, block_indices, placed, config, scale, packed, first_position):
    del packed
    attend = partial(attend_blocks, config=config, scale=scale, first_position=first_position)
    return folds_vmap(attend)(query, key, value, block_indices, placed)


def _block_forward(query, key, value, block_indices, placed, *settings):
    out, lse = _saved(*_block_attention(query, key, value, block_indices, placed, *settings))
    return (out, lse), (query, key, value, block_indices, placed, out, lse)


def _block_backward(config, scale, packed, first_position, residuals, cotangents):
    settings = dict(config=config, scale=scale, packed=packed, first_position=first_position)

    def gradients(*arrays):
        return block_gradients(*arrays, weight=None, previous=None, **settings)

    *gradients_of_operands, _ = folds_vmap(gradients)(*residuals, *cotangents)
    return *gradients_of_operands, None, None


_block_attention.defvjp(_block_forward, _block_backward)


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
    del tiles
    placed = layout.query_layout(config, query_positions, segment_ids)
    edges = _compression_edges(config, first_position)
    return _attend_range(query, key_cmp, value_cmp, placed.compression_range(config), scale, edges)


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
    del tiles
    placed = layout.query_layout(config, query_positions, segment_ids)
    edges = Edges(first_position, config.window_size)
    return _attend_range(query, key_win, value_win, placed.window_range(config), scale, edges)


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
    del tiles
    placed = layout.query_layout(config, query_positions, segment_ids)
    if lse_cmp is None:
        limits, edges = placed.compression_range(config), _compression_edges(config, first_position)
        _, lse_cmp = _range_attention(query, key_cmp, key_cmp, *limits, scale, edges)
    blocks = _select(query, key_cmp, lse_cmp, placed, config, scale, packed=segment_ids is not None)
    return checkpoint_name(blocks, "nsa_block_indices")


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
    del tiles
    placed = layout.query_layout(config, query_positions, segment_ids)
    settings = (config, scale, segment_ids is not None, first_position)
    out, lse = _block_attention(query, key_slc, value_slc, block_indices, placed, *settings)
    past = (placed.position + 1)[..., None, None] - block_indices * config.selection_block_size
    visible = jnp.where(block_indices >= 0, jnp.clip(past, 0, config.selection_block_size), 0)
    return out, lse, visible.sum(-1, dtype=jnp.int32)


@jax.jit
def gated_sum(
    out_cmp: Float[Array, "B T N V"],
    out_slc: Float[Array, "B T N V"],
    out_win: Float[Array, "B T N V"],
    gates: Float[Array, "B T N 3"],
) -> Float[Array, "B T N V"]:
    """`g_cmp * o_cmp + g_slc * o_slc + g_win * o_win` (Eq. 5), summed in float32."""
    return _gated_sum(out_cmp, out_slc, out_win, gates)


@jax.custom_vjp
def _gated_sum(out_cmp, out_slc, out_win, gates):
    return folds_vmap(gating.gated_sum)(out_cmp, out_slc, out_win, gates)


def _gated_sum_forward(*operands):
    return _gated_sum(*operands), operands


def _gated_sum_backward(operands, d_out):
    gates = operands[3].astype(jnp.float32)
    d_gates = folds_vmap(gating.gate_gradients)(*operands, d_out)
    d_branches = (gates[..., branch, None] * d_out.astype(jnp.float32) for branch in range(3))
    return *(d_branch.astype(d_out.dtype) for d_branch in d_branches), d_gates


_gated_sum.defvjp(_gated_sum_forward, _gated_sum_backward)


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
    """The three branches and their gated sum (Eq. 5), differentiated as one.

    The backward reads the cotangent of the output itself: gates enter the branches' kernels as a weight of
    each row, so no cotangent of a branch is ever stored, and the branches add up one gradient of the query.
    """
    del tiles
    placed = layout.query_layout(config, query_positions, segment_ids)
    keys_values = (key_cmp, value_cmp, key_slc, value_slc, key_win, value_win)
    settings = (config, scale, segment_ids is not None, first_position)
    return _native(query, *keys_values, gates, block_indices, placed, *settings)


@partial(jax.custom_vjp, nondiff_argnums=(10, 11, 12, 13))
def _native(
    query, key_cmp, value_cmp, key_slc, value_slc, key_win, value_win, gates, block_indices, placed,
    config, scale, packed, first_position,
):  # fmt: skip
    """Where no gradient is asked for, the kernel of the window ends in the gated sum."""
    settings = (config, scale, packed, first_position)
    keys_values = (key_cmp, value_cmp, key_slc, value_slc)
    cmp, slc, _ = _first_two_branches(query, *keys_values, block_indices, placed, *settings)
    attend = partial(attend_ranges, scale=scale, edges=Edges(first_position, config.window_size))
    limits, others = placed.window_range(config), (cmp[0], slc[0], gates)
    return folds_vmap(attend)(query, key_win, value_win, *limits, others)[0]


def _native_forward(
    query, key_cmp, value_cmp, key_slc, value_slc, key_win, value_win, gates, block_indices, placed,
    config, scale, packed, first_position,
):  # fmt: skip
    settings = (config, scale, packed, first_position)
    keys_values = (key_cmp, value_cmp, key_slc, value_slc)
    cmp, slc, block_indices = _first_two_branches(query, *keys_values, block_indices, placed, *settings)
    attend = partial(attend_ranges, scale=scale, edges=Edges(first_position, config.window_size))
    win = _saved(*folds_vmap(attend)(query, key_win, value_win, *placed.window_range(config)))
    out = folds_vmap(gating.gated_sum)(cmp[0], slc[0], win[0], gates)
    return out, (query, *keys_values, key_win, value_win, gates, block_indices, placed, cmp, slc, win)


def _first_two_branches(
    query, key_cmp, value_cmp, key_slc, value_slc, block_indices, placed,
    config, scale, packed, first_position,
):  # fmt: skip
    """`(out, lse)` of the compressed and the selected branch, and the blocks of the latter."""
    attend = partial(attend_ranges, scale=scale, edges=_compression_edges(config, first_position))
    cmp = _saved(*folds_vmap(attend)(query, key_cmp, value_cmp, *placed.compression_range(config)))
    if block_indices is None:
        block_indices = _select(query, key_cmp, cmp[1], placed, config, scale, packed)
        block_indices = checkpoint_name(block_indices, "nsa_block_indices")
    attend = partial(attend_blocks, config=config, scale=scale, first_position=first_position)
    slc = _saved(*folds_vmap(attend)(query, key_slc, value_slc, block_indices, placed))
    return cmp, slc, block_indices


def _native_backward(config, scale, packed, first_position, residuals, d_out):
    (query, key_cmp, value_cmp, key_slc, value_slc, key_win, value_win, gates, block_indices, placed,
     cmp, slc, win) = residuals  # fmt: skip

    def of_ranges(key, value, limits, edges, saved, branch, previous):
        def gradients(query, key, value, start, end, out, lse, d_out, weight, previous):
            operands = (query, key, value, start, end, out, lse, d_out, None)
            return range_gradients(*operands, weight=weight, previous=previous, scale=scale, edges=edges)

        weight = gates[..., branch].astype(jnp.float32)
        return folds_vmap(gradients)(query, key, value, *limits, *saved, d_out, weight, previous)

    def of_blocks(query, key, value, block_indices, placed, out, lse, d_out, weight, previous):
        return block_gradients(
            query, key, value, block_indices, placed, out, lse, d_out, None, weight=weight, previous=previous,
            config=config, scale=scale, packed=packed, first_position=first_position,
        )  # fmt: skip

    limits, edges = placed.compression_range(config), _compression_edges(config, first_position)
    d_query, *d_cmp, d_gate_cmp = of_ranges(key_cmp, value_cmp, limits, edges, cmp, 0, None)
    gate_slc = gates[..., 1].astype(jnp.float32)
    d_query, *d_slc, d_gate_slc = folds_vmap(of_blocks)(
        query, key_slc, value_slc, block_indices, placed, *slc, d_out, gate_slc, d_query
    )
    limits, edges = placed.window_range(config), Edges(first_position, config.window_size)
    d_query, *d_win, d_gate_win = of_ranges(key_win, value_win, limits, edges, win, 2, d_query)
    d_gates = jnp.stack([d_gate_cmp, d_gate_slc, d_gate_win], axis=-1).astype(gates.dtype)
    return d_query, *d_cmp, *d_slc, *d_win, d_gates, None, None


_native.defvjp(_native_forward, _native_backward)


def _compression_edges(config: NSAConfig, first_position: int | None) -> Edges:
    return Edges(first_position, None, config.compression_block_size, config.compression_stride)


def _attend_range(query, key, value, limits, scale, edges) -> Attended:
    out, lse = _range_attention(query, key, value, *limits, scale, edges)
    reads = jnp.maximum(limits[1] - limits[0], 0)
    return out, lse, jnp.repeat(reads[..., None], key.shape[2], axis=2)


def _select(query, key_cmp, lse_cmp, placed, config, scale, packed):
    choose = partial(choose_blocks, config=config, scale=scale, packed=packed)
    return folds_vmap(choose)(query, key_cmp, lse_cmp, placed)
