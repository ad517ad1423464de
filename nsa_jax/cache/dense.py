"""Decoding of dense and window layers: how a cache is made, and the two steps that extend it.

A dense layer keeps all tokens. A window layer keeps a ring, in which token `s` lies in slot `s mod size`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nsa_jax import arguments, attention, dispatch
from nsa_jax.array_typing import Array, DType, Float, Int
from nsa_jax.cache import checks
from nsa_jax.config import NSAConfig
from nsa_jax.dispatch import Implementation
from nsa_jax.layout import DenseCache, Run, Runs, slots
from nsa_jax.layout.appending import append_dense
from nsa_jax.layout.quantised import fields, held, like, widened, zeros
from nsa_jax.sharding.explicit import per_shard
from nsa_jax.sharding.steps import DENSE_STEP


class DenseStep(NamedTuple):
    """Result of `dense_prefill` and of `dense_decode_step`.

    Attributes:
      out: attention output of the new tokens.
      cache: the cache with the new tokens in it.
    """

    out: Float[Array, "B T N V"]
    cache: DenseCache


def init_dense_cache(
    batch: int,
    max_length: int,
    *,
    num_kv_heads: int,
    key_dim: int,
    value_dim: int,
    dtype: DType,
    window_size: int | None = None,
    step_capacity: int = 8,
) -> DenseCache:
    """Makes an empty cache of a dense layer, or of a window layer if `window_size` is given.

    Args:
      batch: number of rows.
      max_length: most tokens that a row can hold, prompt and new tokens together. If it is at least
        `window_size`, the cache is a ring, which is never full, and `max_length` no longer matters.
      num_kv_heads: KV heads, `K`.
      key_dim: width of a key, `H`.
      value_dim: width of a value, `V`.
      dtype: dtype of keys and values, see `init_cache`.
      window_size: tokens that a query sees, its own included; None for all. The steps must be given the same.
      step_capacity: most tokens that one `dense_decode_step` can append to a row of a ring.

    Returns:
      A cache in which every row has length 0. Its arrays hold `window_size + step_capacity - 1` tokens if it
      is a ring, otherwise `max_length`.

    Raises:
      TypeError: `window_size` or another size is not an int.
      ValueError: a size is below 1 or above 2^30, or `dtype` is none of those of a cache.
    """
    sizes = dict(batch=batch, max_length=max_length, num_kv_heads=num_kv_heads, key_dim=key_dim)
    checks.check_new_cache(dtype, **sizes, value_dim=value_dim, step_capacity=step_capacity)
    _check_window(window_size)
    if window_size is None or window_size > max_length:
        length = max_length
    else:
        length = window_size + step_capacity - 1
    arrays = {
        name: zeros((batch, length, num_kv_heads, dim), dtype)
        for name, dim in (("key", key_dim), ("value", value_dim))
    }
    return DenseCache(
        **fields(arrays),
        lengths=jnp.zeros(batch, jnp.int32),
        overflowed=jnp.zeros(batch, bool),
    )


def dense_prefill(
    cache: DenseCache,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    *,
    window_size: int | None = None,
    num_tokens: Int[Array, " B"] | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> DenseStep:
    """Appends a prompt, or a chunk of one, to every row and attends from each of its tokens.

    It attends by `nsa_jax.window_attention`. Chunk after chunk gives the same result as the whole prompt at
    once. A chunk may be longer than a ring: it attends to the earlier content of the ring and to itself.
    `scale` and `implementation` are those of `nsa_jax.compressed_attention`.

    Args:
      cache: an empty cache, or the one that an earlier step returned.
      query: rotated queries of the new tokens; `N` is a multiple of `K`.
      key: rotated keys of the new tokens.
      value: values of the new tokens.
      window_size: the same as for `init_dense_cache`.
      num_tokens: how many of the `T` tokens of each row are real, 0 .. `T`; the others are padding on the
        right. All are real by default.

    Returns:
      `DenseStep(out, cache)`. `out` has the query's dtype and is 0 for padding. Under `jit`, a row without
      room for all its new tokens keeps what it held, gets output 0, and its `overflowed` is set.

    Raises:
      TypeError, ValueError, NotImplementedError: as in `prefill`, of these arguments.

    Numerics:
      As in `nsa_jax.window_attention`.

    Gradients:
      With respect to `query`, `key` and `value`; a cache in 8 bits refuses those of `key` and `value`
      (NotImplementedError).
    """
    _check_operands(dense_prefill, cache, query, key, value, window_size, num_tokens)
    checks.check_room(cache.lengths, cache.max_length(window_size), query.shape[1], num_tokens)
    operands = dict(cache=cache, query=query, key=key, value=value, num_tokens=num_tokens)
    options = dict(window_size=window_size, scale=scale, implementation=implementation)
    return DenseStep(*per_shard(_prefill, DENSE_STEP, **jax.tree.map(jnp.asarray, operands), **options))


def _prefill(
    cache: DenseCache,
    query: Array,
    key: Array,
    value: Array,
    num_tokens: Array | None,
    window_size: int | None,
    scale: float | None,
    implementation: Implementation | None,
) -> tuple[Array, DenseCache]:
    max_length, num_new = cache.max_length(window_size), query.shape[1]
    new = slots.admit(cache.lengths, max_length, num_new, num_tokens)
    window, where = cache.ring_window(window_size), dict[str, Any]()
    written = append_dense(cache, key, value, new)
    arrays: Any
    if window is None:
        arrays, window = (held(written, "key"), held(written, "value")), cache.key.shape[1]
    else:
        first, rings = new.start - window + 1, (held(cache, "key"), held(cache, "value"))
        earlier = tuple(slots.read_ring(ring, first, window - 1) for ring in rings)
        tokens = tuple(map(like, (key, value), rings))
        arrays = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), earlier, tokens)
        where = dict(first_key=first)
    attended = attention.window_attention(
        query,
        *widened(arrays, query.dtype),
        config=NSAConfig(window_size=window),
        query_positions=Runs((Run(num_new, new.start),), num_queries=new.num_tokens),
        scale=scale,
        implementation=implementation,
        **where,
    )
    return attended.out, written


def dense_decode_step(
    cache: DenseCache,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    *,
    window_size: int | None = None,
    num_tokens: Int[Array, " B"] | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> DenseStep:
    """Appends a few tokens to every row, then attends from each of them.

    The step that appends token `t` gives row `t` of a full forward pass, whether the tokens before it came in
    by prompts, chunks or steps. The other arguments are those of `dense_prefill`; all implementations but
    "xla" take at most 8 tokens.

    Args:
      cache: the cache that an earlier step returned. To have it updated in place, donate it or carry it
        through a compiled loop.
      query: rotated queries of the new tokens; if the cache is a ring, `T` is at most `step_capacity`.
      num_tokens: how many of the `T` tokens of each row are real; all by default. A finished row has 0 and is
        left as it is.

    Returns:
      `DenseStep(out, cache)`. `out` has the query's dtype and is 0 for padding. A row without room for all
      its new tokens keeps what it held, gets output 0, and its `overflowed` is set, under `jit` and outside.

    Raises:
      TypeError: as in `dense_prefill`.
      ValueError: as in `dense_prefill`, but for a row without room, or `T` exceeds the step capacity of the
        ring. Lengths and `num_tokens` out of range are found where `decode_step` finds them.
      NotImplementedError: as in `dense_prefill`.

    Numerics:
      As in `nsa_jax.window_attention`.

    Gradients:
      On `xla` as in `dense_prefill`, but none beside a cache in 8 bits; the kernels of `triton` have none.
    """
    _check_operands(dense_decode_step, cache, query, key, value, window_size, num_tokens)
    checks.check_lengths(cache.lengths, cache.max_length(window_size), query.shape[1], num_tokens)
    window = cache.ring_window(window_size)
    if window is not None and query.shape[1] > (capacity := cache.key.shape[1] - window + 1):
        raise ValueError(
            f"a step must not exceed step_capacity, got {query.shape[1]} > {capacity} tokens. Call "
            "dense_prefill, or init_dense_cache with a larger step_capacity."
        )
    operands = dict(cache=cache, query=query, key=key, value=value, num_tokens=num_tokens)
    operands = jax.tree.map(jnp.asarray, operands)
    scale = arguments.resolve_scale(scale, query.shape[-1], query.dtype)
    operands |= dict(window_size=window_size, scale=scale)
    return DenseStep(
        *dispatch.run("dense_decode_step", implementation, (query, cache.key, cache.value), operands)
    )


def check_dense_layer_cache(
    cache: Any, *, batch: int, num_kv_heads: int, key_dim: int, value_dim: int
) -> None:
    """Raises TypeError or ValueError unless `cache` is of a layer of these sizes and has `batch` rows."""
    _check_kind(cache)
    checks.check_arrays(check_dense_layer_cache, dict(cache=cache))
    of_layer = dict(num_kv_heads=num_kv_heads, key_dim=key_dim, value_dim=value_dim)
    checks.check_sizes(cache.key, cache.value, of_layer)
    checks.check_rows(cache.key, batch)


def _check_operands(step, cache, query, key, value, window_size, num_tokens) -> None:
    """Raises TypeError or ValueError unless the arguments of `step` fit together and fit the cache."""
    _check_kind(cache)
    _check_window(window_size)
    holders = dict(cache=cache)
    checks.check_arrays(step, holders, query=query, key=key, value=value, num_tokens=num_tokens)


def _check_kind(cache: Any) -> None:
    if not isinstance(cache, DenseCache):
        raise TypeError(
            f"the cache of a dense layer must be a DenseCache, got {type(cache).__name__}. Pass what the "
            "layer's init_cache gives, or one element of a model's caches."
        )


def _check_window(window_size: int | None) -> None:
    if window_size is not None:
        NSAConfig(window_size=window_size)
