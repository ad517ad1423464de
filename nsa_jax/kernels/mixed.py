"""The operations with the selected branch from `kernels.mosaic_gpu`, all else from `kernels.triton`.

This is what `implementation="mosaic_gpu"` means. The lists of blocks are Triton kernels, and so is what
computes results again that are not finite.
"""

from functools import partial

import jax.numpy as jnp

from nsa_jax.array_typing import Array, Float, Int, Int32
from nsa_jax.kernels.lists.ring import RingLists, ring_lists
from nsa_jax.kernels.lists.unions import last_rows, union_lists
from nsa_jax.kernels.mosaic_gpu import sizes
from nsa_jax.kernels.mosaic_gpu.selected_forward import selected_forward
from nsa_jax.kernels.mosaic_gpu.unstable import best_form
from nsa_jax.kernels.triton import operations
from nsa_jax.kernels.triton.blocks import block_gradients
from nsa_jax.kernels.triton.nonfinite import recompute_forward, visible_in_blocks
from nsa_jax.kernels.triton.operations import (
    BlockKernels,
    compressed_attention,
    decode_step,
    dense_decode_step,
    gated_sum,
    select_blocks,
    window_attention,
)
from nsa_jax.layout import Placement

__all__ = (
    "compressed_attention",
    "decode_step",
    "dense_decode_step",
    "gated_sum",
    "native_sparse_attention",
    "select_blocks",
    "selected_attention",
    "window_attention",
)


def attend_blocks(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    block_indices: Int32[Array, "B T K R"],
    placement: Placement,
    *,
    scale: float,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """As `triton.blocks.attend_blocks`."""
    size, aligned = placement.config.selection_block_size, not placement.packed
    heads = query.shape[2] // key.shape[2]
    tokens = sizes.tile_tokens(heads)
    tile = sizes.forward_sizes(query.shape[3], value.shape[3], size, aligned=aligned)
    lists = _ring_lists(block_indices, placement, key.shape[1], tokens, tile.keys, tile.stages)
    out, lse = selected_forward(
        query, key, value, lists, last_rows(placement), scale=scale, block_size=size, form=best_form(),
        aligned=aligned, one_block=placement.tile_in_one_block(tokens),
    )  # fmt: skip
    visible = visible_in_blocks(block_indices, placement, key.shape[1])
    return recompute_forward(out, lse, query, key, value, visible, scale)


def _ring_lists(
    block_indices: Int[Array, "B T K R"],
    placement: Placement,
    num_keys: int,
    tokens: int,
    keys: int,
    longest_gap: int,
) -> RingLists:
    """The lists of tiles of `tokens` queries, in steps of `keys` keys."""
    steps = placement.config.selection_block_size // keys
    if steps > 1:  # a block is several steps: as if the query had chosen smaller blocks
        parts = block_indices[..., None] * steps + jnp.arange(steps, dtype=jnp.int32)
        parts = jnp.where(block_indices[..., None] >= 0, parts, -1)
        block_indices = parts.reshape(*block_indices.shape[:3], -1)
    unions = union_lists(block_indices, placement, num_keys, tokens=tokens, block_size=keys)
    return ring_lists(unions, tokens=tokens, warpgroups=sizes.CONSUMERS, longest_gap=longest_gap)


_KERNELS = BlockKernels(attend_blocks, block_gradients)
selected_attention = partial(operations.selected_attention, kernels=_KERNELS)
native_sparse_attention = partial(operations.native_sparse_attention, kernels=_KERNELS)
