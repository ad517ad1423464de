"""Selectors as a user may write them."""

import dataclasses

import jax.numpy as jnp
from flax import nnx

import nsa_jax
from nsa_jax.nn import token_windows


class Recent:
    """The most recent blocks."""

    def __init__(self, in_features, num_kv_heads, config, *, rngs):
        self.num_kv_heads = num_kv_heads

    def project(self, x, query, key_slc, positions):
        return (), ()

    def choose(self, queries, keys, at, *, config, **where):
        size, slots = config.selection_block_size, config.num_selected_blocks
        first = jnp.maximum(at // size - slots + 1, 0)
        blocks = first[..., None] + jnp.arange(slots)
        blocks = jnp.where(blocks * size <= at[..., None], blocks, -1)
        return jnp.repeat(blocks[:, :, None], self.num_kv_heads, axis=2)


class Random(Recent):
    """Blocks that only the place of a query and its KV head decide, some of them twice or in the future."""

    def choose(self, queries, keys, at, *, config, **where):
        heads, slots = jnp.arange(self.num_kv_heads), jnp.arange(config.num_selected_blocks)
        mixed = at[..., None, None] * 7919 + heads[:, None] * 104729 + slots * 1299709
        most = at[..., None, None] // config.selection_block_size + 2
        return jnp.where(at[..., None, None] < 0, -1, mixed % most)


class BlockMeans(Recent):
    """MoBA: blocks by the product of the query and the mean of the keys, summed over heads of a KV head."""

    def project(self, x, query, key_slc, positions):
        of_kv_head = query.reshape(*query.shape[:2], self.num_kv_heads, -1, query.shape[-1])
        return of_kv_head.sum(3), key_slc  # the sum of the products with a key is the product of the sum

    def choose(self, queries, keys, at, *, config, segment_ids, **where):
        size = config.selection_block_size
        blocks = dataclasses.replace(config, compression_block_size=size, compression_stride=size)
        means = token_windows(keys, blocks, segment_ids).mean(2)
        return nsa_jax.select_blocks(queries, means, config=blocks, segment_ids=segment_ids, **where)


class Loudest(nnx.Module):
    """The blocks with the tokens of the largest learned numbers, which it keeps in the cache."""

    def __init__(self, in_features, num_kv_heads, config, *, rngs):
        self.kernel = nnx.Param(rngs.params.normal((in_features, num_kv_heads)))

    def project(self, x, query, key_slc, positions):
        return {}, {"loud": jnp.einsum("btd,dk->btk", x, self.kernel[...]), "position": positions}

    def choose(self, queries, keys, at, *, config, segment_ids, **where):
        assert segment_ids is None
        size, slots = config.selection_block_size, config.num_selected_blocks
        length = keys["loud"].shape[1]
        token = jnp.arange(length)
        sees = token <= at[..., None]
        loud = jnp.where(sees[:, :, None], keys["loud"].swapaxes(1, 2)[:, None], -jnp.inf)
        loud = jnp.pad(loud, ((0, 0),) * 3 + ((0, -length % size),), constant_values=-jnp.inf)
        best = loud.reshape(*loud.shape[:3], -1, size).max(-1)
        order = jnp.argsort(-best, axis=-1)[..., :slots]
        heard = jnp.take_along_axis(best, order, axis=-1) > -jnp.inf
        blocks = jnp.sort(jnp.where(heard, order, length))
        return jnp.where(blocks == length, -1, blocks)
