"""An empty cache, and what a step returns."""

from typing import NamedTuple

import jax.numpy as jnp

from nsa_jax import layout
from nsa_jax.array_typing import Array, DType, Float
from nsa_jax.cache import checks
from nsa_jax.config import NSAConfig
from nsa_jax.layout import NSACache, Reads


class Step(NamedTuple):
    """Attention output [B, T, N, V] of the new tokens, and the cache that holds them."""

    out: Float[Array, "B T N V"]
    cache: NSACache


class CountedStep(NamedTuple):
    """`Step`, and what each branch gathered."""

    out: Float[Array, "B T N V"]
    cache: NSACache
    reads: Reads


def expected_reads(length: int, config: NSAConfig) -> int:
    """Reads of one decode step at `length` tokens by the paper: `((S - l)//d + 1) + n l' + min(w, S)`.

    The formula behind Table 4. It charges `n` whole blocks where fewer exist and where the last is partial,
    so it bounds what `Reads` counts, and may exceed `length` tokens by far.
    """
    selected = config.num_selected_blocks * config.selection_block_size
    return layout.num_compression_blocks(length, config) + selected + min(config.window_size, length)


def init_cache(
    batch: int,
    max_length: int,
    *,
    num_kv_heads: int,
    key_dim: int,
    value_dim: int,
    config: NSAConfig,
    dtype: DType,
    step_capacity: int = 8,
    share_keys_values: bool = False,
) -> NSACache:
    """An empty cache.

    Args:
      batch: rows.
      max_length: most tokens that a row can hold, prompt and new tokens together.
      num_kv_heads: `K`.
      key_dim: `H`.
      value_dim: `V`.
      config: block sizes; the steps must be given the same.
      dtype: of keys and values.
      step_capacity: most tokens that a row can gain in one `decode_step`.
      share_keys_values: whether the window branch has the keys and values of the selection branch, which
        spares its rings. The steps must then be given tokens without `key_win` and `value_win`.

    Returns:
      A cache of length 0 in every row. A row and KV head takes `max_length (1 + 1/d)` keys and values, and
      the rings.

    Raises:
      ValueError: a size is below 1, or `dtype` is not a floating point type.
    """
    sizes = dict(batch=batch, max_length=max_length, num_kv_heads=num_kv_heads, key_dim=key_dim)
    checks.check_new_cache(dtype, **sizes, value_dim=value_dim, step_capacity=step_capacity)

    def arrays(name: str, length: int) -> dict[str, Array]:
        dims = {f"key_{name}": key_dim, f"value_{name}": value_dim}
        return {key: jnp.zeros((batch, length, num_kv_heads, dim), dtype) for key, dim in dims.items()}

    window = arrays("win_ring", config.window_size + step_capacity - 1)
    return NSACache(
        **arrays("slc", max_length),
        **arrays("cmp", layout.num_compression_blocks(max_length, config)),
        **(dict.fromkeys(window) if share_keys_values else window),
        **arrays("raw_ring", config.compression_block_size + step_capacity - 1),
        lengths=jnp.zeros(batch, jnp.int32),
        overflowed=jnp.zeros(batch, bool),
    )
