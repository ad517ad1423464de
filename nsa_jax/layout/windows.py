"""The tokens of each compression block, taken out of the keys or values of a row."""

import functools

import jax
import jax.numpy as jnp

from nsa_jax.array_checks import check_arrays
from nsa_jax.array_typing import Array, Bool, Float, Int, Int32
from nsa_jax.config import NSAConfig, check_config
from nsa_jax.layout.blocks import num_compression_blocks
from nsa_jax.layout.sequences import compression_block_starts, count_below


def token_windows(
    x: Float[Array, "B S K H"], config: NSAConfig, segment_ids: Int[Array, "B S"] | None = None
) -> Float[Array, "B C l K H"]:
    """Gathers the `l` tokens of each compression block.

    Args:
      x: keys or values of the tokens of each row.
      config: block structure.
      segment_ids: sequence of each token; None if every row is one sequence.

    Returns:
      The tokens of each block in the order of the row, in the dtype of `x`; zeros in the unused block slots
      at the end of a packed row.

    Raises:
      TypeError: an argument is of the wrong kind, or an array of the wrong kind of dtype.
      ValueError: a shape is not as above.

    Gradients:
      Deterministic, like the forward pass: neither of them scatters.
    """
    check_config(config)
    check_arrays(token_windows, x=x, segment_ids=segment_ids)
    if segment_ids is not None:
        return windows_at(x, *compression_block_starts(segment_ids, config), config)
    strides, num_blocks = token_strides(x, config), num_compression_blocks(x.shape[1], config)
    parts = range(config.compression_block_size // config.compression_stride)
    return jnp.concatenate([strides[:, j : j + num_blocks] for j in parts], axis=2)


def token_strides(x: Float[Array, "B S K H"], config: NSAConfig) -> Float[Array, "B n d K H"]:
    """Cuts rows into strides of `d` tokens, without tokens that are in no compression block.

    In rows of one sequence each, block `j` is the `l / d` strides from number `j` on.
    """
    batch, length, *rest = x.shape
    stride = config.compression_stride
    number = length // stride if num_compression_blocks(length, config) else 0
    return x[:, : number * stride].reshape(batch, number, stride, *rest)


def first_tokens(
    per_token: Int[Array, "B S"], config: NSAConfig, segment_ids: Int[Array, "B S"] | None = None
) -> Int[Array, "B C"]:
    """Picks the entry of the first token of each compression block."""
    if segment_ids is not None:
        starts, _ = compression_block_starts(segment_ids, config)
        return jnp.take_along_axis(per_token, starts, axis=1)
    num_blocks = num_compression_blocks(per_token.shape[1], config)
    return per_token[:, : num_blocks * config.compression_stride : config.compression_stride]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def windows_at(
    x: Float[Array, "B S K H"], starts: Int32[Array, "B m"], exists: Bool[Array, "B m"], config: NSAConfig
) -> Float[Array, "B m l K H"]:
    """Gathers `l` tokens from each of `starts` on.

    Args:
      x: keys or values of consecutive tokens.
      starts: index of the first token of each block, ascending and at least a stride apart.
      exists: whether a block exists; those that do not are the last. Their windows are zeros.
      config: block structure.
    """
    return _windows_forward(x, starts, exists, config)[0]


def _windows_forward(x, starts, exists, config):
    batch, num_blocks = starts.shape
    size = config.compression_block_size
    tokens = starts[:, :, None] + jnp.arange(size, dtype=jnp.int32)[None, None]
    windows = jax.vmap(lambda row, index: row[index])(x, tokens.reshape(batch, -1))
    windows = windows.reshape(batch, num_blocks, size, *x.shape[2:])
    token = jnp.arange(x.shape[1], dtype=jnp.int32)
    return jnp.where(exists[:, :, None, None, None], windows, 0), (token, starts, exists)


def _windows_backward(config, residuals, cotangent):
    """Adds, for each token, the cotangents at its places in the blocks, by gathers.

    A scatter-add would sum them in no fixed order.
    """
    token, starts, exists = residuals
    length = token.shape[0]
    batch, num_blocks, size, *rest = cotangent.shape
    total = jnp.zeros_like(cotangent, shape=(batch, length, *rest))
    if num_blocks == 0:
        return total, None, None
    starts = jnp.where(exists, starts, length)
    begun = count_below(starts, token[None] + 1)
    places = cotangent.reshape(batch, num_blocks * size, *rest)
    for j in range(1, size // config.compression_stride + 1):
        block = jnp.maximum(begun - j, 0)
        offset = token[None] - jnp.take_along_axis(starts, block, axis=1)
        held = (begun >= j) & (offset < size)
        index = block * size + jnp.clip(offset, 0, size - 1)
        gathered = jax.vmap(lambda row, index: row[index])(places, index)
        total += jnp.where(held[:, :, None, None], gathered, 0)
    return total, None, None


windows_at.defvjp(_windows_forward, _windows_backward)
