"""The two steps of decoding: `prefill` appends prompts of any length, `decode_step` a few tokens."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from nsa_jax import attention, layout
from nsa_jax.array_typing import Array, Float, Int
from nsa_jax.cache import checks, slots
from nsa_jax.cache.state import CountedStep, NSACache, Reads, Step, TokenKeysValues
from nsa_jax.config import NSAConfig
from nsa_jax.dispatch import Implementation
from nsa_jax.layout import Run, Runs

type Compress = Callable[[Array, Array, Array], tuple[Array, Array]]


def prefill(
    cache: NSACache,
    query: Float[Array, "B T N H"],
    tokens: TokenKeysValues,
    gates: Float[Array, "B T N 3"],
    *,
    config: NSAConfig,
    compress: Compress,
    num_tokens: Int[Array, " B"] | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> Step:
    """Appends a prompt, or a chunk of one, to every row and attends from each of its tokens.

    The window branch attends over its ring and the chunk together and the ring is written afterwards, so a
    chunk may be longer than the ring. Chunks give what the whole prompt at once gives.

    Args:
      cache: an empty one, or what earlier steps returned.
      query: rotated queries of the new tokens; `N` is a multiple of `K`.
      tokens: their keys and values.
      gates: their gates, in the order cmp, slc, win.
      config: that of `init_cache`.
      compress: `(key_windows [B,m,l,K,H], value_windows [B,m,l,K,V], first_positions [B,m])` to
        `(key_cmp [B,m,K,H], value_cmp [B,m,K,V])`: compresses each window, then rotates the key at the
        position of the window's first token. It is called for windows that are no block, too; what it makes
        of those is dropped.
      num_tokens: how many of the `T` tokens of each row are real, 0 .. `T`; the others are padding on the
        right. All of them by default.
      scale: factor of the logits, `H**-0.5` by default.
      implementation: as in `nsa_jax.attention`.

    Returns:
      `Step(out, cache)`. Out has the query's dtype and is 0 for padding. Under `jit`, a row without room
      for all its new tokens keeps what it held, gets output 0, and its `overflowed` is set.

    Raises:
      TypeError: an argument is not an array, or not of a floating (`num_tokens`: integer) dtype.
      ValueError: shapes, dtypes or `config` do not fit the cache. Where values are concrete also: a row has
        no room for its tokens, or `num_tokens` is out of range. Nothing is written then.

    Numerics: those of the four operations of `nsa_jax.attention`.

    Gradients: None flows through the selection; a cache is meant for inference.
    """
    checks.check_operands(prefill, cache, query, tokens, gates, num_tokens)
    checks.step_capacity(cache, config)
    checks.check_room(cache, query.shape[1], num_tokens)
    cache, query, tokens, gates, num_tokens = jax.tree.map(
        jnp.asarray, (cache, query, tokens, gates, num_tokens)
    )
    new = slots.admit(cache.lengths, cache.max_length, query.shape[1], num_tokens)
    rings, recent = {}, {}
    for name, ring, token, history in _rings(cache, tokens, config):
        earlier = slots.read_ring(ring, new.start - history, history)
        recent[name] = jnp.concatenate([earlier, token], axis=1)
        rings[name] = slots.write_ring(ring, token, new)
    cache = _append(dataclasses.replace(cache, **rings), tokens, recent, new, config, compress)
    out, _ = _attend(cache, query, gates, recent, new, config, scale, implementation, False)
    return Step(out, cache)


@overload
def decode_step(
    cache: NSACache,
    query: Float[Array, "B T N H"],
    tokens: TokenKeysValues,
    gates: Float[Array, "B T N 3"],
    *,
    config: NSAConfig,
    compress: Compress,
    num_tokens: Int[Array, " B"] | None = None,
    count_reads: Literal[False] = False,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> Step: ...


@overload
def decode_step(
    cache: NSACache,
    query: Float[Array, "B T N H"],
    tokens: TokenKeysValues,
    gates: Float[Array, "B T N 3"],
    *,
    config: NSAConfig,
    compress: Compress,
    num_tokens: Int[Array, " B"] | None = None,
    count_reads: Literal[True],
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> CountedStep: ...


def decode_step(
    cache: NSACache,
    query: Float[Array, "B T N H"],
    tokens: TokenKeysValues,
    gates: Float[Array, "B T N 3"],
    *,
    config: NSAConfig,
    compress: Compress,
    num_tokens: Int[Array, " B"] | None = None,
    count_reads: bool = False,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> Step | CountedStep:
    """Appends up to `step_capacity` tokens to every row, compresses the blocks they complete, then attends.

    The step that appends token `t` gives row `t` of a full forward, however the tokens before it came in.
    On a CPU the compressor runs only when a block is complete; elsewhere in every step, because there the
    question costs a round trip to the host.

    Args:
      cache: what earlier steps returned. Donate it, or carry it through a compiled loop: then it is updated
        in place.
      query: as in `prefill`, with `T <= step_capacity`.
      tokens: as in `prefill`.
      gates: as in `prefill`.
      config: as in `prefill`.
      compress: as in `prefill`.
      num_tokens: as in `prefill`; a finished row has 0 and is left as it is.
      count_reads: whether to count the keys that each branch gathers, by the masks that feed the gathers; on
        `xla` only.
      scale: as in `prefill`.
      implementation: as in `prefill`.

    Returns:
      `Step(out, cache)`, or with `count_reads` `CountedStep(out, cache, reads)`. Out is as in
      `prefill`. A row without room for all its new tokens keeps what it held, gets output 0, and its
      `overflowed` is set, under `jit` and outside.

    Raises:
      TypeError: an argument is not an array, or not of a floating (`num_tokens`: integer) dtype.
      ValueError: shapes, dtypes or `config` do not fit the cache, or `T` exceeds its step capacity.

    Numerics: those of the four operations of `nsa_jax.attention`.

    Gradients: as `prefill`.
    """
    checks.check_operands(decode_step, cache, query, tokens, gates, num_tokens)
    capacity = checks.step_capacity(cache, config)
    if query.shape[1] > capacity:
        raise ValueError(
            f"a step must not exceed step_capacity, got {query.shape[1]} > {capacity} tokens. Call "
            "prefill, or init_cache with a larger step_capacity."
        )
    cache, query, tokens, gates, num_tokens = jax.tree.map(
        jnp.asarray, (cache, query, tokens, gates, num_tokens)
    )
    new = slots.admit(cache.lengths, cache.max_length, query.shape[1], num_tokens)
    rings, recent = {}, {}
    for name, ring, token, history in _rings(cache, tokens, config):
        # Written first and read afterwards, so that XLA need not keep the old ring beside the new one.
        rings[name] = slots.write_ring(ring, token, new)
        recent[name] = slots.read_ring(rings[name], new.start - history, history + token.shape[1])
    cache = _append(dataclasses.replace(cache, **rings), tokens, recent, new, config, compress)
    out, reads = _attend(cache, query, gates, recent, new, config, scale, implementation, count_reads)
    return Step(out, cache) if reads is None else CountedStep(out, cache, reads)


def _rings(
    cache: NSACache, tokens: TokenKeysValues, config: NSAConfig
) -> Iterator[tuple[str, Array, Array, int]]:
    """Name, ring, new tokens, and how many tokens before itself a token needs there."""
    rings = (
        ("key_win_ring", cache.key_win_ring, tokens.key_win, config.window_size - 1),
        ("value_win_ring", cache.value_win_ring, tokens.value_win, config.window_size - 1),
        ("key_raw_ring", cache.key_raw_ring, tokens.key_cmp, config.compression_block_size - 1),
        ("value_raw_ring", cache.value_raw_ring, tokens.value_cmp, config.compression_block_size - 1),
    )
    for name, ring, token, history in rings:
        if ring is not None and token is not None:  # None where the branches share keys and values
            yield name, ring, token, history


def _append(
    cache: NSACache,
    tokens: TokenKeysValues,
    recent: dict[str, Array],
    new: slots.Admitted,
    config: NSAConfig,
    compress: Compress,
) -> NSACache:
    """Writes the selection arrays and the complete blocks; `recent` ends in the new tokens."""
    offset = jnp.arange(tokens.key_slc.shape[1], dtype=jnp.int32)[None]
    index, valid = new.start[:, None] + offset, offset < new.num_tokens[:, None]
    (key_cmp, value_cmp), block, complete = _compress_complete(recent, new, offset.shape[1], config, compress)
    return dataclasses.replace(
        cache,
        key_slc=slots.write(cache.key_slc, tokens.key_slc, index, valid),
        value_slc=slots.write(cache.value_slc, tokens.value_slc, index, valid),
        key_cmp=slots.write(cache.key_cmp, key_cmp, block, complete),
        value_cmp=slots.write(cache.value_cmp, value_cmp, block, complete),
        lengths=new.start + new.num_tokens,
        overflowed=cache.overflowed | ~new.fits,
    )


def _compress_complete(recent, new, num_new, config, compress):
    """As many blocks as the new tokens could complete: compressed, their numbers, which are complete."""
    size, stride = config.compression_block_size, config.compression_stride
    first = layout.num_compression_blocks(new.start, config)
    block = first[:, None] + jnp.arange((num_new - 1) // stride + 1, dtype=jnp.int32)[None]
    complete = block < layout.num_compression_blocks(new.start + new.num_tokens, config)[:, None]
    # `recent` begins l - 1 tokens before the new ones. A block that is not complete ends beyond it: it takes
    # any window, so that nothing is read out of bounds.
    start = jnp.clip(block * stride - new.start[:, None] + size - 1, 0, num_new - 1)
    window = start[:, :, None] + jnp.arange(size, dtype=jnp.int32)[None, None]
    row = jnp.arange(block.shape[0], dtype=jnp.int32)[:, None, None]

    def run(*key_value):
        windows = (x.at[row, window].get(mode="promise_in_bounds") for x in key_value)
        return tuple(x.astype(key_value[0].dtype) for x in compress(*windows, block * stride))

    def run_if_any(*key_value):
        zeros = [jnp.zeros(x.shape, x.dtype) for x in jax.eval_shape(run, *key_value)]
        return jax.lax.cond(complete.any(), run, lambda *_: tuple(zeros), *key_value)

    key_value = recent["key_raw_ring"], recent["value_raw_ring"]
    if num_new >= stride:  # nearly every step completes a block
        return run(*key_value), block, complete
    return jax.lax.platform_dependent(*key_value, cpu=run_if_any, default=run), block, complete


def _attend(
    cache: NSACache,
    query: Array,
    gates: Array,
    recent: dict[str, Array],
    new: slots.Admitted,
    config: NSAConfig,
    scale: float | None,
    implementation: Implementation | None,
    count_reads: bool,
) -> tuple[Array, Reads | None]:
    """The three branches over the cache that holds the new tokens already; the window over `recent`."""
    history = config.window_size - 1
    where: dict[str, Any] = dict(
        config=config,
        query_positions=Runs((Run(query.shape[1], new.start),), num_queries=new.num_tokens),
        scale=scale,
        implementation=implementation,
    )
    branch: dict[str, Any] = where | dict(return_reads=count_reads)
    cmp = attention.compressed_attention(query, cache.key_cmp, cache.value_cmp, **branch)
    blocks = attention.select_blocks(query, cache.key_cmp, lse_cmp=cmp.lse, **where)
    slc = attention.selected_attention(query, cache.key_slc, cache.value_slc, blocks, **branch)
    window = _window_tokens(cache, recent, new, query.shape[1], history)
    win = attention.window_attention(query, *window, first_key=new.start - history, **branch)
    out = attention.gated_sum(cmp.out, slc.out, win.out, gates, implementation=implementation)
    return out, Reads(cmp.reads, slc.reads, win.reads) if count_reads else None


def _window_tokens(
    cache: NSACache, recent: dict[str, Array], new: slots.Admitted, num_new: int, history: int
) -> tuple[Array, Array]:
    """Keys and values of the new tokens, and of the `history` tokens before them.

    Shared ones lie in the selection arrays. These are read as a ring of the size of the capacity, in which no
    token has been overwritten.
    """
    if not cache.shares_keys_values:
        return recent["key_win_ring"], recent["value_win_ring"]
    first, length = new.start - history, history + num_new
    return slots.read_ring(cache.key_slc, first, length), slots.read_ring(cache.value_slc, first, length)
