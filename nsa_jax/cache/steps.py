"""The two steps of decoding: `prefill` appends a prompt of any length, `decode_step` a few tokens."""

from typing import Any

import jax
import jax.numpy as jnp

from nsa_jax import arguments, attention, dispatch
from nsa_jax.array_typing import Array, Float, Int
from nsa_jax.cache import checks
from nsa_jax.cache.state import Step
from nsa_jax.compression import Compress
from nsa_jax.config import NSAConfig
from nsa_jax.dispatch import Implementation
from nsa_jax.layout import NSACache, Run, Runs, TokenKeysValues, slots
from nsa_jax.layout.appending import append, rings, window_tokens
from nsa_jax.layout.quantised import fields, held, widened
from nsa_jax.sharding.explicit import per_shard
from nsa_jax.sharding.steps import STEP


def prefill(
    cache: NSACache,
    query: Float[Array, "B T N H"],
    tokens: TokenKeysValues,
    gates: Float[Array, "B T N branches"] | None,
    *,
    config: NSAConfig,
    compress: Compress | None,
    num_tokens: Int[Array, " B"] | None = None,
    block_indices: Int[Array, "B T K R"] | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> Step:
    """Appends a prompt, or a chunk of one, to every row and attends from each of its tokens.

    Chunk after chunk gives the same result as the whole prompt at once. A chunk may be longer than the rings:
    the window branch attends to its ring and the chunk together, and the ring is written afterwards. `scale`
    and `implementation` are those of `nsa_jax.compressed_attention`.

    Args:
      cache: an empty cache, or the one that an earlier step returned.
      query: rotated queries of the new tokens; `N` is a multiple of `K`.
      tokens: keys and values of the new tokens.
      gates: gates of the new tokens, in the order cmp, slc, win, without branches that the cache does not
        have; None for the selected branch alone.
      config: block structure, the same as for `init_cache`.
      compress: a `Compression`, or a function from `(key_windows [B, m, l, K, H], value_windows [B, m, l, K,
        V], first_positions [B, m])` to `(key_cmp [B, m, K, H], value_cmp [B, m, K, V])`. It compresses each
        window of `l` tokens and then rotates the key at the position of the window's first token. It is also
        called for windows that are not complete blocks; what it returns for them is dropped. None without a
        compressed branch.
      num_tokens: how many of the `T` tokens of each row are real, 0 .. `T`; the others are padding on the
        right. All are real by default.
      block_indices: a selection to use instead of choosing one, see `nsa_jax.selected_attention`; blocks are
        counted from the first token of the row. It must be given without a compressed branch.

    Returns:
      `Step(out, cache)`. `out` has the query's dtype and is 0 for padding with finite gates. Under `jit`, a
      row without room for all its new tokens keeps what it held, gets output 0, and its `overflowed` is set.

    Raises:
      TypeError: an argument is not an array, or not of a floating (`num_tokens`: integer) dtype, or the
        lengths of the cache are not int32.
      ValueError: rows, heads, dims, lengths or dtypes of the arrays in the cache do not fit together, or the
        other arguments, `config` or `compress` do not fit the cache. Outside `jit` also: a row has a negative
        length or no room for its tokens, or `num_tokens` is out of range. Nothing is written then.
      NotImplementedError: the implementation asked for cannot run the call.

    Numerics:
      As in the operations of `nsa_jax.attention`.

    Gradients:
      No gradient flows through the selection. A cache is meant for inference. One in 8 bits refuses gradients
      with respect to keys and values (NotImplementedError).
    """
    sizes = checks.check_operands(prefill, cache, query, tokens, gates, num_tokens, block_indices)
    checks.step_capacity(cache, config)
    arguments.check_selection(sizes, config)
    checks.check_compression(compress, cache, config)
    checks.check_room(cache.lengths, cache.max_length, query.shape[1], num_tokens)
    operands = dict(
        cache=cache._replace(kept=None),  # which `keep` alone writes
        query=query, tokens=tokens, gates=gates, num_tokens=num_tokens, block_indices=block_indices,
    )  # fmt: skip
    options = dict(config=config, compress=compress, scale=scale, implementation=implementation)
    out, after = per_shard(_prefill, STEP, **jax.tree.map(jnp.asarray, operands), **options)
    return Step(out, after._replace(kept=cache.kept))


def _prefill(
    cache: NSACache,
    query: Array,
    tokens: TokenKeysValues,
    gates: Array | None,
    num_tokens: Array | None,
    block_indices: Array | None,
    compress: Compress | None,
    config: NSAConfig,
    scale: float | None,
    implementation: Implementation | None,
) -> tuple[Array, NSACache]:
    num_new = query.shape[1]
    new = slots.admit(cache.lengths, cache.max_length, num_new, num_tokens)
    written, recent = dict[str, Any](), dict[str, Any]()
    for name, ring, token, history in rings(cache, tokens, config):
        earlier = slots.read_ring(ring, new.start - history, history)
        recent[name] = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), earlier, token)
        written[name] = slots.write_ring(ring, token, new)
    cache = append(cache._replace(**fields(written)), tokens, recent, new, config, compress)

    history = config.window_size - 1
    window: tuple[Any, Any] = None, None
    if "win" in cache.branches(gates):
        window = window_tokens(cache, recent, new, num_new, history, query.dtype)
    names = "key_cmp", "value_cmp", "key_slc", "value_slc"
    key_cmp, value_cmp, key_slc, value_slc = (widened(held(cache, name), query.dtype) for name in names)
    out = attention.native_sparse_attention(
        query, key_cmp, value_cmp, key_slc, value_slc, *window, gates,
        config=config, block_indices=block_indices, first_key_win=new.start - history, scale=scale,
        query_positions=Runs((Run(num_new, new.start),), num_queries=new.num_tokens),
        implementation=implementation,
    )  # fmt: skip
    return out, cache


def decode_step(
    cache: NSACache,
    query: Float[Array, "B T N H"],
    tokens: TokenKeysValues,
    gates: Float[Array, "B T N branches"] | None,
    *,
    config: NSAConfig,
    compress: Compress | None,
    num_tokens: Int[Array, " B"] | None = None,
    block_indices: Int[Array, "B T K R"] | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> Step:
    """Appends up to `step_capacity` tokens to every row, compresses the blocks they complete, then attends.

    The step that appends token `t` gives row `t` of a full forward pass, whether the tokens before it came in
    by prompts, chunks or steps. `scale` and `implementation` are those of `nsa_jax.compressed_attention`.

    On a CPU the compressor runs only if a step completes a block, or in every step if `T` is at least the
    compression stride. On a GPU, the Triton kernels test on the device whether a block is complete. A
    `compress` that runs as XLA operations runs in every step there, because a test in XLA would cost a round
    trip to the host.

    Args:
      cache: the cache that an earlier step returned. To have it updated in place, donate it or carry it
        through a compiled loop.
      query: rotated queries of the new tokens; `T` is at most `step_capacity`.
      tokens: keys and values of the new tokens.
      gates: gates of the new tokens, as in `prefill`.
      config: block structure, the same as for `init_cache`.
      compress: as in `prefill`. GPU kernels compress the blocks themselves if it is a `Compression`; a
        function runs as XLA operations.
      num_tokens: how many of the `T` tokens of each row are real; all by default. A finished row has 0 and is
        left as it is.
      block_indices: a selection to use instead of choosing one, as in `prefill`.

    Returns:
      `Step(out, cache)`. `out` has the query's dtype and is 0 for padding with finite gates. A row without
      room for all its new tokens keeps what it held, gets output 0, and its `overflowed` is set, under `jit`
      and outside.

    Raises:
      TypeError: as in `prefill`.
      ValueError: as in `prefill`, but for a row without room, or `T` exceeds the step capacity of the cache.
        Lengths and `num_tokens` out of range are found where the host has their values: outside `jit`, in
        NumPy arrays and in JAX arrays on a CPU. Elsewhere a `num_tokens` counts as the nearest in range.
      NotImplementedError: as in `prefill`; the kernels of `triton` take at most 8 tokens.

    Numerics:
      As in the operations of `nsa_jax.attention`.

    Gradients:
      On `xla` as in `prefill`, but none beside a cache in 8 bits; the kernels of `triton` have none.
    """
    sizes = checks.check_operands(decode_step, cache, query, tokens, gates, num_tokens, block_indices)
    capacity = checks.step_capacity(cache, config)
    arguments.check_selection(sizes, config)
    checks.check_compression(compress, cache, config)
    checks.check_lengths(cache.lengths, cache.max_length, query.shape[1], num_tokens)
    if query.shape[1] > capacity:
        raise ValueError(
            f"a step must not exceed step_capacity, got {query.shape[1]} > {capacity} tokens. Call "
            "prefill, or init_cache with a larger step_capacity."
        )
    operands: dict[str, Any] = dict(
        cache=cache._replace(kept=None),  # which `keep` alone writes
        query=query, tokens=tokens, gates=gates, num_tokens=num_tokens, block_indices=block_indices,
    )  # fmt: skip
    operands = jax.tree.map(jnp.asarray, operands)
    scale = arguments.resolve_scale(scale, query.shape[-1], query.dtype)
    operands |= dict(config=config, compress=compress, scale=scale)
    arrays: Any = query, cache.key_cmp, cache.value_cmp
    if cache.key_cmp is None:
        arrays = query, cache.key_slc, cache.value_slc, block_indices
        if block_indices is not None:  # of which int8 would be taken for keys
            arrays = *arrays[:3], jax.ShapeDtypeStruct(block_indices.shape, "int32")
    out, after = dispatch.run("decode_step", implementation, arrays, operands, config=config)
    return Step(out, after._replace(kept=cache.kept))
