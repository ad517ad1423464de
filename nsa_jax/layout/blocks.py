"""Compression and selection blocks of one sequence: how many there are, and how they overlap."""

import jax
import jax.numpy as jnp
import numpy as np

from nsa_jax.array_typing import Array, Bool, Float, Int, Int32
from nsa_jax.config import NSAConfig


def num_compression_blocks[L: (int, jax.Array)](length: L, config: NSAConfig) -> L:
    """Number of complete compression blocks in a sequence of `length` tokens (int or integer array)."""
    count = (length - config.compression_block_size) // config.compression_stride + 1
    return jnp.maximum(count, 0) if isinstance(count, jax.Array | np.ndarray) else max(int(count), 0)


def longest_length(num_compressed: int, config: NSAConfig) -> int:
    """Tokens of the longest sequence that has `num_compressed` complete compression blocks."""
    return num_compressed * config.compression_stride + config.compression_block_size - 1


def num_selection_blocks(length: int, config: NSAConfig) -> int:
    """Number of selection blocks in a sequence of `length` tokens, the last one possibly partial."""
    return -(-length // config.selection_block_size)


def max_selection_blocks(num_compressed: int, config: NSAConfig) -> int:
    """Number of selection blocks in the longest sequence with `num_compressed` compression blocks."""
    return num_selection_blocks(longest_length(num_compressed, config), config)


def overlap_weights(config: NSAConfig) -> tuple[tuple[int, int], ...]:
    """Weights of Eq. 9 as pairs `(offset, weight)`.

    Selection block `j` collects `weight * p_cmp[j * l'/d + offset]`. The weight is `|cmp_i intersect slc_j| /
    d`: the number of shared tokens, counted in strides. For 32 / 16 / 64 the offsets -1 .. 3 have the weights
    1, 2, 2, 2, 1. This is our reading of the equation; as printed, it is shifted by a whole block.
    """
    strides_per_selection = config.selection_block_size // config.compression_stride
    strides_per_compression = config.compression_block_size // config.compression_stride
    return tuple(
        (offset, min(offset + strides_per_compression, strides_per_selection) - max(offset, 0))
        for offset in range(1 - strides_per_compression, strides_per_selection)
    )


def blocks_of_step(num_new: int, config: NSAConfig) -> int:
    """Largest number of compression blocks that `num_new` consecutive tokens can complete."""
    return (num_new - 1) // config.compression_stride + 1


def is_forced(
    block: Int[Array, "*#shape"], position: Int[Array, "*#shape"], config: NSAConfig
) -> Bool[Array, "*shape"]:
    """Whether selection block `block` is initial or local to the query at sequence index `position`.

    Such blocks are always selected. Blocks after the query count as local here; callers exclude them.
    """
    current = position // config.selection_block_size
    return (block < config.num_initial_blocks) | (block > current - config.num_local_blocks)


def distinct_blocks(
    block_indices: Int[Array, "B T K R"], num_keys: int, config: NSAConfig
) -> Int32[Array, "B T K R"]:
    """Selections in which each block exists in a row of `num_keys`, and stands once; other slots become -1.

    Behind this, the first token of a block fits into 32 bits. Of equal slots the first one remains.
    """
    wide = block_indices.astype(jnp.int32) if block_indices.dtype.itemsize < 4 else block_indices
    if isinstance(wide, np.ndarray):  # of JAX, because NumPy cannot compare with a symbolic number of keys
        wide = jnp.asarray(wide.clip(-(wide.dtype.kind == "i"), np.iinfo(np.int32).max).astype(np.int32))
    exists = (wide >= 0) & (wide < num_selection_blocks(num_keys, config))
    blocks = jnp.where(exists, wide, -1).astype(jnp.int32)
    slots = blocks.shape[-1]
    earlier = jnp.tril(jnp.ones((slots, slots), bool), -1)[None, None, None]
    repeated = ((blocks[..., :, None] == blocks[..., None, :]) & earlier).any(axis=-1)
    return jnp.where(repeated, -1, blocks)


def of_slots(scores: Float[Array, "B T K M"], blocks: Int32[Array, "B T K R"]) -> Float[Array, "B T K R"]:
    """The scores of the blocks in the slots, `-inf` where a slot has none."""
    found = jnp.take_along_axis(scores, jnp.maximum(blocks, 0), axis=3)
    return jnp.where(blocks >= 0, found, -jnp.inf)
