"""Writes the new tokens of a step to the cache by XLA scatters, and forms the blocks that they complete."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nsa_jax.array_typing import Array, DType, Float
from nsa_jax.compression import Compress, compress_blocks
from nsa_jax.config import NSAConfig
from nsa_jax.layout import slots
from nsa_jax.layout.cache import DenseCache, NSACache, TokenKeysValues
from nsa_jax.layout.quantised import Quantised, fields, held, like, widened


class Ring(NamedTuple):
    """A ring of the cache and what a step does with it.

    Attributes:
      name: field of `NSACache`.
      array: the ring.
      new: new tokens for it, rounded as it is.
      history: number of earlier tokens that a token needs from it.
    """

    name: str
    array: Float[Array, "B ring K D"] | Quantised
    new: Float[Array, "B T K D"] | Quantised
    history: int


def rings(cache: NSACache, tokens: TokenKeysValues, config: NSAConfig) -> Iterator[Ring]:
    """The rings of the cache: none for a branch that is absent, or a window that shares keys and values."""
    window, raw = config.window_size - 1, config.compression_block_size - 1
    if cache.key_win_ring is not None and cache.value_win_ring is not None:
        assert tokens.key_win is not None
        assert tokens.value_win is not None
        for name, new in (("key_win_ring", tokens.key_win), ("value_win_ring", tokens.value_win)):
            ring = held(cache, name)
            yield Ring(name, ring, like(new, ring), window)
    if cache.key_raw_ring is not None and cache.value_raw_ring is not None:
        assert tokens.key_cmp is not None
        assert tokens.value_cmp is not None
        yield Ring("key_raw_ring", cache.key_raw_ring, tokens.key_cmp, raw)
        yield Ring("value_raw_ring", cache.value_raw_ring, tokens.value_cmp, raw)


def append(
    cache: NSACache,
    tokens: TokenKeysValues,
    recent: dict[str, Any],
    new: slots.Admitted,
    config: NSAConfig,
    compress: Compress | None,
) -> NSACache:
    """Writes the new tokens to the selection arrays and the blocks they complete to the compressed ones.

    `recent` holds, for each ring by name, the tokens that the ring's history requires followed by the new
    ones.
    """
    offset = jnp.arange(tokens.key_slc.shape[1], dtype=jnp.int32)[None]
    index, valid = new.start[:, None] + offset, offset < new.num_tokens[:, None]
    if cache.key_cmp is not None and cache.value_cmp is not None:
        blocks = slots.completed_blocks(new, offset.shape[1], config)
        key_cmp, value_cmp = _compress(recent, blocks, new, offset.shape[1], config, compress)
        written = dict(
            key_cmp=slots.write(held(cache, "key_cmp"), key_cmp, *blocks),
            value_cmp=slots.write(held(cache, "value_cmp"), value_cmp, *blocks),
        )
        cache = cache._replace(**fields(written))
    written = dict(
        key_slc=slots.write(held(cache, "key_slc"), tokens.key_slc, index, valid),
        value_slc=slots.write(held(cache, "value_slc"), tokens.value_slc, index, valid),
    )
    return cache._replace(
        **fields(written),
        lengths=new.start + new.num_tokens,
        overflowed=cache.overflowed | ~new.fits,
    )


def _compress(recent, blocks, new, num_new, config, compress):
    """Compressed keys and values of the blocks; arbitrary numbers for blocks that are not complete."""

    def run(*key_value):
        keys, values = (slots.block_windows(x, blocks, new.start, config) for x in key_value)
        return compress_blocks(compress, keys, values, blocks.number * config.compression_stride)

    def run_if_any(*key_value):
        zeros = [jnp.zeros_like(x) for x in jax.eval_shape(run, *key_value)]
        return jax.lax.cond(blocks.complete.any(), run, lambda *_: tuple(zeros), *key_value)

    key_value = recent["key_raw_ring"], recent["value_raw_ring"]
    if num_new >= config.compression_stride:  # then nearly every step completes a block
        return run(*key_value)
    return jax.lax.platform_dependent(*key_value, cpu=run_if_any, default=run)


def window_tokens(
    cache: NSACache, recent: dict[str, Any], new: slots.Admitted, num_new: int, history: int, dtype: DType
) -> tuple[Array, Array]:
    """Keys and values of the new tokens and of the `history` tokens before them; quantised ones as `dtype`.

    If the branches share keys and values, they are read from the selection arrays. These count as a ring that
    is as large as the capacity, so no token in it was overwritten.
    """
    if not cache.shares_keys_values:
        window = recent["key_win_ring"], recent["value_win_ring"]
    else:
        whole = held(cache, "key_slc"), held(cache, "value_slc")
        window = tuple(slots.read_ring(x, new.start - history, history + num_new) for x in whole)
    return widened(window, dtype)


def append_dense(cache: DenseCache, key: Array, value: Array, new: slots.Admitted) -> DenseCache:
    """Appends the admitted tokens to the cache. A ring keeps only the last of them if they do not all fit."""
    arrays = dict(key=held(cache, "key"), value=held(cache, "value"))
    tokens = dict(key=key, value=value)
    written = {name: slots.write_ring(x, like(tokens[name], x), new) for name, x in arrays.items()}
    return DenseCache(
        **fields(written),
        lengths=new.start + new.num_tokens,
        overflowed=cache.overflowed | ~new.fits,
    )
