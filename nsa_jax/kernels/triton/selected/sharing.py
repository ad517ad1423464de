"""How many blocks neighbouring queries share, which decides between keys outside and queries outside."""

import jax.numpy as jnp

from nsa_jax.array_typing import Array, Bool, Int

SAMPLED_TILES = 64  # of neighbours in a row of the batch


def shares_less(block_indices: Int[Array, "B T K R"], tokens: int, than: float) -> Bool[Array, ""]:
    """Whether `tokens` neighbours make fewer than `than` choices for each block that some of them chose.

    It is the mean over a sample of tiles; 1 is the least, where they share nothing, `tokens` the most.
    """
    batch, num_queries, num_kv_heads, slots = block_indices.shape
    tiles = num_queries // tokens
    found = block_indices[:, : tiles * tokens].reshape(batch, tiles, tokens, num_kv_heads, slots)
    found = found[:, :: max(1, tiles // SAMPLED_TILES)].swapaxes(2, 3).reshape(-1, tokens * slots)
    before = jnp.tri(tokens * slots, k=-1, dtype=bool)
    again = ((found[:, :, None] == found[:, None, :]) & before).any(axis=2)
    choices, distinct = (found >= 0).sum(), ((found >= 0) & ~again).sum()
    return choices < than * distinct
