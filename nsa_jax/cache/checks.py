"""What a step refuses: shapes and dtypes at trace time, values where they are concrete."""

import jax
import jax.numpy as jnp

from nsa_jax import layout
from nsa_jax.array_typing import Array, Int
from nsa_jax.cache.state import NSACache, TokenKeysValues
from nsa_jax.config import NSAConfig


def check_operands(
    cache: NSACache, query: Array, tokens: TokenKeysValues, gates: Array, num_tokens: Array | None
) -> None:
    """Raises ValueError unless the new tokens fit one another and the cache."""
    if query.ndim != 4:
        raise ValueError(f"query must be [B, T, N, H], got shape {query.shape}. Add the missing axis.")
    num_new, num_heads = query.shape[1:3]
    batch, _, num_kv_heads, key_dim = cache.key_slc.shape
    value_dim = cache.value_slc.shape[3]
    if num_new < 1:
        raise ValueError(f"a step must have at least one token, got {query.shape=}. Leave the call out.")
    if num_heads % num_kv_heads:
        raise ValueError(
            f"query heads must be a multiple of KV heads, got {num_heads} and {num_kv_heads}. Change either."
        )
    expected = {"query": (query, num_heads, key_dim)}
    for name, array in tokens._asdict().items():
        expected[f"tokens.{name}"] = (array, num_kv_heads, key_dim if name.startswith("key") else value_dim)
    for name, (array, heads, dim) in expected.items():
        if array.shape != (batch, num_new, heads, dim):
            raise ValueError(
                f"{name} must have shape {(batch, num_new, heads, dim)} to fit the cache, got {array.shape}. "
                "Reshape it, or call init_cache with other sizes."
            )
        if array.dtype != cache.key_slc.dtype:
            raise ValueError(
                f"{name} must have the dtype of the cache, got {array.dtype} and {cache.key_slc.dtype}. "
                "Cast it, or call init_cache with its dtype."
            )
    if gates.shape != (batch, num_new, num_heads, 3) or not jnp.issubdtype(gates.dtype, jnp.floating):
        raise ValueError(
            f"gates must be floats of shape {(batch, num_new, num_heads, 3)}, got {gates.dtype} of shape "
            f"{gates.shape}. Pass one for each token, query head and branch."
        )
    if num_tokens is None:
        return
    if num_tokens.shape != (batch,) or not jnp.issubdtype(num_tokens.dtype, jnp.integer):
        raise ValueError(
            f"num_tokens must be integers of shape {(batch,)}, got {num_tokens.dtype} of shape "
            f"{num_tokens.shape}. Pass one number a row."
        )


def step_capacity(cache: NSACache, config: NSAConfig) -> int:
    """Most tokens of a decode step. Raises ValueError if the cache was made with another config."""
    window, raw = cache.key_win_ring.shape[1], cache.key_raw_ring.shape[1]
    capacity = window - config.window_size + 1
    blocks, expected_blocks = cache.key_cmp.shape[1], layout.num_compression_blocks(cache.max_length, config)
    expected_raw = config.compression_block_size + capacity - 1
    if capacity < 1 or (raw, blocks) != (expected_raw, expected_blocks):
        raise ValueError(
            f"a step must have the config of its cache, got rings of {window} and {raw} tokens and {blocks} "
            f"compression blocks for {config}. Pass init_cache the same config."
        )
    return capacity


def check_room(cache: NSACache, num_new: int, num_tokens: Int[Array, " B"] | None) -> None:
    """Raises ValueError unless every row has room, as far as the values are known."""
    remedy = "Call init_cache with a larger max_length."
    if num_tokens is None and num_new > cache.max_length:
        raise ValueError(
            f"a prompt must fit the cache, got {num_new} tokens and max_length={cache.max_length}. {remedy}"
        )
    if isinstance(cache.lengths, jax.core.Tracer) or isinstance(num_tokens, jax.core.Tracer):
        return
    wanted = jnp.full_like(cache.lengths, num_new) if num_tokens is None else num_tokens
    if ((wanted < 0) | (wanted > num_new)).any():
        raise ValueError(
            f"num_tokens must be within 0 .. T, got {wanted.tolist()} with T={num_new}. Pass real lengths."
        )
    if (cache.lengths + wanted > cache.max_length).any():
        raise ValueError(
            f"a prompt must fit the cache, got {wanted.tolist()} tokens for rows that hold "
            f"{cache.lengths.tolist()} of max_length={cache.max_length}. {remedy}"
        )
