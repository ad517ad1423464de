"""How an NSA cache is made, and what a step on it returns."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from nsa_jax import layout
from nsa_jax.array_typing import Array, DType, Float
from nsa_jax.cache import checks
from nsa_jax.config import BRANCHES, Branch, NSAConfig, check_branches, check_config
from nsa_jax.layout import NSACache
from nsa_jax.layout.quantised import fields, zeros
from nsa_jax.option_checks import check_flag


class Step(NamedTuple):
    """Result of `prefill` and of `decode_step`.

    Attributes:
      out: attention output of the new tokens.
      cache: the cache with the new tokens in it.
    """

    out: Float[Array, "B T N V"]
    cache: NSACache


def init_cache(
    batch: int,
    max_length: int,
    *,
    num_kv_heads: int,
    key_dim: int,
    value_dim: int,
    config: NSAConfig,
    dtype: DType,
    raw_dtype: DType | None = None,
    step_capacity: int = 8,
    share_keys_values: bool = False,
    branches: Sequence[Branch] = BRANCHES,
) -> NSACache:
    """Makes an empty cache of an NSA layer.

    Args:
      batch: number of rows.
      max_length: most tokens that a row can hold, prompt and new tokens together.
      num_kv_heads: KV heads, `K`.
      key_dim: width of a key, `H`.
      value_dim: width of a value, `V`.
      config: block structure. The steps must be given the same.
      dtype: dtype of keys and values: a floating one of at least 16 bits, or "int8" or "float8_e4m3fn" for a
        quantised cache, which has about half the bytes of bfloat16.
      raw_dtype: dtype of the keys and values that await compression, which is that of the tokens: by default
        `dtype`. It must be given if `dtype` has 8 bits and there is a compressed branch.
      step_capacity: most tokens that one `decode_step` can append to a row.
      share_keys_values: whether the window branch uses the keys and values of the selection branch. The cache
        then has no window rings, and the steps must be given tokens without `key_win` and `value_win`.
      branches: branches of the layer, "slc" among them. The arrays of the others are None, and the steps must
        be given tokens and gates without them.

    Returns:
      A cache in which every row has length 0. For each row and KV head it stores about `max_length (1 + 1/d)`
      keys and values, plus the rings.

    Raises:
      TypeError: a size is not an int, `config` is not an `NSAConfig`, `share_keys_values` is not a bool, or
        `branches` is not a sequence of names.
      ValueError: a size is below 1 or above 2^30, `dtype` or `raw_dtype` is none of these, or a branch is
        unknown or given twice, or "slc" is absent.
    """
    check_config(config)
    check_flag(share_keys_values=share_keys_values)
    branches = check_branches(branches)
    sizes = dict(batch=batch, max_length=max_length, num_kv_heads=num_kv_heads, key_dim=key_dim)
    checks.check_new_cache(dtype, **sizes, value_dim=value_dim, step_capacity=step_capacity)
    raw_dtype = checks.check_raw_dtype(dtype, raw_dtype, branches)
    num_blocks = layout.num_compression_blocks(int(max_length), config)

    def arrays(name: str, length: int, dtype: DType = dtype) -> dict[str, Array]:
        dims = {f"key_{name}": key_dim, f"value_{name}": value_dim}
        return fields({key: zeros((batch, length, num_kv_heads, dim), dtype) for key, dim in dims.items()})

    compressed = arrays("cmp", num_blocks) | arrays(
        "raw_ring", config.compression_block_size + step_capacity - 1, raw_dtype
    )
    window = arrays("win_ring", config.window_size + step_capacity - 1)
    return NSACache(
        **arrays("slc", max_length),
        **(compressed if "cmp" in branches else dict.fromkeys(compressed)),
        **(window if "win" in branches and not share_keys_values else dict.fromkeys(window)),
        lengths=jnp.zeros(batch, jnp.int32),
        overflowed=jnp.zeros(batch, bool),
    )
