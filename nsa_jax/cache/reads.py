"""How many keys a decode step reads: counted, and by the paper's formula."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nsa_jax import attention, layout
from nsa_jax.array_typing import Array, Attended, Float, Int, Int32
from nsa_jax.cache import checks
from nsa_jax.config import NSAConfig, check_config
from nsa_jax.dispatch import EVERYWHERE
from nsa_jax.layout import NSACache, Run, Runs
from nsa_jax.layout.quantised import held, widened
from nsa_jax.option_checks import check_int


class Reads(NamedTuple):
    """Number of keys that each branch gathered, per query and KV head.

    Attributes:
      cmp: compressed keys; each counts as one.
      slc: keys of the selected branch.
      win: keys of the window branch.
    """

    cmp: Int32[Array, "B T K"]
    slc: Int32[Array, "B T K"]
    win: Int32[Array, "B T K"]


def count_reads(
    cache: NSACache,
    query: Float[Array, "B T N H"],
    *,
    config: NSAConfig,
    num_tokens: Int[Array, " B"] | None = None,
    scale: float | None = None,
) -> Reads:
    """Counts the keys that the last `decode_step` or `prefill` read, by the masks of `xla` (Eq. 7-12).

    It chooses the blocks again, and then attends with queries and keys that are 0. All visible keys have the
    logit 0 then, so the log-sum-exp is the logarithm of their number. `config` and `scale` are those of the
    step. A step that was given `block_indices` read other blocks than it counts.

    Args:
      cache: the cache that the step returned.
      query: the queries that the step was given.
      num_tokens: how many of the `T` tokens of each row the step appended; all by default. A row that had no
        room for them appended 0.

    Returns:
      `Reads(cmp, slc, win)`, exact up to 2^18 keys in a branch; 0 for padding.

    Raises:
      TypeError, ValueError: as in `decode_step`.
      NotImplementedError: the cache has no compressed branch, by which it could choose again.
    """
    checks.check_kind(cache)
    checks.check_arrays(count_reads, dict(cache=cache), query=query, num_tokens=num_tokens)
    checks.step_capacity(cache, config)
    if cache.key_cmp is None:
        raise NotImplementedError(
            "count_reads needs a cache of all branches, got one without a compressed branch. Use the "
            "block_indices that were chosen."
        )
    checks.check_lengths(cache.lengths, cache.max_length, query.shape[1], num_tokens)
    key_cmp = widened(held(cache, "key_cmp"), query.dtype)
    query, num_tokens, key_cmp = jax.tree.map(jnp.asarray, (query, num_tokens, key_cmp))
    batch, num_new, num_kv_heads = *query.shape[:2], cache.key_slc.shape[2]
    first = jnp.asarray(cache.lengths) - (num_new if num_tokens is None else num_tokens.astype(jnp.int32))
    queries = Runs((Run(num_new, first),), num_queries=num_tokens)
    where: dict[str, Any] = dict(config=config, query_positions=queries, implementation=EVERYWHERE)
    blocks = attention.select_blocks(query, key_cmp, scale=scale, **where)

    def zeros(length: int) -> Array:
        return jnp.zeros((batch, length, num_kv_heads, 1), query.dtype)

    def number(attended: Attended) -> Int32[Array, "B T K"]:
        return jnp.round(jnp.exp(attended.lse)).astype(jnp.int32)

    history = config.window_size - 1
    zero, cmp, slc = zeros(num_new), zeros(key_cmp.shape[1]), zeros(cache.max_length)
    win = zeros(history + num_new)
    return Reads(
        cmp=number(attention.compressed_attention(zero, cmp, cmp, **where)),
        slc=number(attention.selected_attention(zero, slc, slc, blocks, **where)),
        win=number(attention.window_attention(zero, win, win, first_key=first - history, **where)),
    )


def expected_reads(length: int, config: NSAConfig) -> int:
    """Number of keys that one decode step reads by the paper's formula.

    The formula behind Table 4 of the paper is `((S - l)//d + 1) + n l' + min(w, S)`. It charges `n` whole
    blocks even if fewer exist or the last one is partial. So it is an upper bound of what `Reads` counts, and
    it may be far above `length`.

    Args:
      length: tokens of the sequence, `S`, the new one included.
      config: block structure.

    Returns:
      Keys per query and KV head, all branches together; a compressed key counts as one.

    Raises:
      TypeError: `length` is not an int, or `config` is not an `NSAConfig`.
      ValueError: `length` is negative.
    """
    check_int(low=0, length=length)
    check_config(config)
    length = int(length)  # an unsigned int of NumPy would wrap in `length - l`
    selected = config.num_selected_blocks * config.selection_block_size
    return layout.num_compression_blocks(length, config) + selected + min(config.window_size, length)
