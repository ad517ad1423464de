"""What goes into a decoding step and comes out of it: cache, new tokens, and how much was read."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from nsa_jax import layout
from nsa_jax.array_typing import Array, Bool, DType, Float, Int32
from nsa_jax.config import NSAConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NSACache:
    """Keys and values of one layer for `B` sequences of differing lengths; made by `init_cache`.

    Row `b` holds one sequence. Its token `s` lies in slot `s` of the selection arrays and in slot
    `s mod size` of a ring. Nothing beyond the row's length is ever read.

    Branches that share keys and values store them once: the window branch reads the last tokens of the
    selection arrays, and its rings are None.

    Attributes:
      key_slc: rotated keys of the selection branch.
      value_slc: their values.
      key_cmp: keys of the complete compression blocks, compressed and then rotated.
      value_cmp: their values.
      key_win_ring: rotated keys of the last `w + step_capacity - 1` tokens; None if they are shared.
      value_win_ring: their values.
      key_raw_ring: keys, not rotated, of the last `l + step_capacity - 1` tokens, for the compression.
      value_raw_ring: their values.
      lengths: number of tokens of each row.
      overflowed: whether a row was ever given more tokens than it had room for.
    """

    key_slc: Float[Array, "B S K H"]
    value_slc: Float[Array, "B S K V"]
    key_cmp: Float[Array, "B C K H"]
    value_cmp: Float[Array, "B C K V"]
    key_win_ring: Float[Array, "B window K H"] | None
    value_win_ring: Float[Array, "B window K V"] | None
    key_raw_ring: Float[Array, "B raw K H"]
    value_raw_ring: Float[Array, "B raw K V"]
    lengths: Int32[Array, " B"]
    overflowed: Bool[Array, " B"]

    @property
    def max_length(self) -> int:
        """Most tokens that a row can hold."""
        return self.key_slc.shape[1]

    @property
    def shares_keys_values(self) -> bool:
        """Whether the window branch reads the keys and values of the selection branch."""
        return self.key_win_ring is None


class TokenKeysValues(NamedTuple):
    """Keys and values of new tokens; `key_cmp` and `value_cmp` neither compressed nor rotated yet.

    Those of the window branch are None if they are those of the selection branch.
    """

    key_cmp: Float[Array, "B T K H"]
    value_cmp: Float[Array, "B T K V"]
    key_slc: Float[Array, "B T K H"]
    value_slc: Float[Array, "B T K V"]
    key_win: Float[Array, "B T K H"] | None = None
    value_win: Float[Array, "B T K V"] | None = None


class Reads(NamedTuple):
    """Keys that each branch gathered, per query and KV head; one compressed key counts one."""

    cmp: Int32[Array, "B T K"]
    slc: Int32[Array, "B T K"]
    win: Int32[Array, "B T K"]


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
    for name, size in (sizes | dict(value_dim=value_dim, step_capacity=step_capacity)).items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}. Pass a positive number.")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype must be floating, got {jnp.dtype(dtype).name}. Pass the dtype of the keys.")

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
