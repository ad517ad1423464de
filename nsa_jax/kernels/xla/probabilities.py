"""What attention gives to selection blocks, and the logarithm of their importance, in chunks of queries.

A chunk takes all keys at once, so it has as many queries as keep its logits within `Sizes.partial_floats`.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from nsa_jax import layout
from nsa_jax.array_typing import Array, Bool, Float, Int32
from nsa_jax.kernels.xla import chunks as cutting
from nsa_jax.kernels.xla.chunks import ChunkPlaces, Look, TileSizes
from nsa_jax.kernels.xla.masked import accumulator, all_logits, finite, product
from nsa_jax.kernels.xla.selection import collect
from nsa_jax.kernels.xla.sizes import DEFAULT, Sizes
from nsa_jax.layout import Placement


@partial(jax.jit, static_argnames=("scale", "reduce", "sizes"))
def block_probabilities(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    lse: Float[Array, "B T N"] | None,
    placement: Placement,
    scale: float,
    reduce: str,
    *,
    sizes: Sizes = DEFAULT,
) -> Float[Array, "B T K M"]:
    """What dense causal attention gives to each selection block."""
    num_keys, num_kv_heads = key.shape[1:3]
    size = placement.config.selection_block_size
    num_blocks = layout.num_selection_blocks(num_keys, placement.config)
    tokens = _tokens(query, query.shape[2] * num_keys, sizes)

    def weigh_chunk(inputs: Any) -> Float[Array, "B tokens K M"]:
        rows, lse, places = inputs
        here = places.placement(placement, tokens)
        start = here.selection_start()
        visible = _visible(Look(start, here.selection_end(num_keys)), key)
        weights = _by_head(_probabilities(_logits(rows, key) * scale, visible, lse), tokens)
        if here.packed:  # block numbers count from the sequence's first token, so shift it to column 0
            column = _along(4, num_blocks * size) + start[:, None, :, None, None]
            weights = jnp.take_along_axis(weights, column, axis=4, mode="fill", fill_value=0)
        else:
            weights = jnp.pad(weights, ((0, 0),) * 4 + ((0, num_blocks * size - num_keys),))
        blocks = weights.reshape(*weights.shape[:4], num_blocks, size).sum(axis=-1)
        return _over_heads(blocks, reduce)

    inputs = _chunks(query, lse, placement, num_kv_heads, tokens)
    return cutting.join_tokens(cutting.over_chunks(weigh_chunk, inputs), query.shape[1])


@partial(jax.jit, static_argnames=("scale", "reduce", "sizes"))
def selected_probabilities(
    query: Float[Array, "B T N H"],
    key_slc: Float[Array, "B S K H"],
    block_indices: Int32[Array, "B T K R"],
    lse: Float[Array, "B T N"] | None,
    placement: Placement,
    scale: float,
    reduce: str,
    *,
    sizes: Sizes = DEFAULT,
) -> Float[Array, "B T K R"]:
    """What the selected branch gives to the block of each slot. A chunk gathers the keys of its slots."""
    num_keys, num_kv_heads, dim = key_slc.shape[1:]
    size, slots = placement.config.selection_block_size, block_indices.shape[-1]
    width = (num_kv_heads * dim + query.shape[2]) * slots * size
    tokens, keys = _tokens(query, width, sizes), key_slc.swapaxes(1, 2)

    def weigh_chunk(inputs: Any) -> Float[Array, "B tokens K R"]:
        (rows, lse, places), blocks = inputs
        batch = blocks.shape[0]
        here = places.placement(placement, tokens)
        # A block that begins after the query has no visible token. Its number may be too large to multiply.
        useful = (blocks >= 0) & (blocks <= (here.position // size)[..., None, None])
        first = jnp.where(useful, blocks, 0) * size + here.selection_start()[..., None, None]
        key = first[..., None] + _along(4, size)  # [B, tokens, K, R, size]
        end = here.selection_end(num_keys)[..., None, None, None]
        visible = (useful[..., None] & (key < end)).swapaxes(1, 2).reshape(batch, num_kv_heads, tokens, 1, -1)
        index = jnp.clip(key.swapaxes(1, 2), 0, num_keys - 1).reshape(batch, num_kv_heads, -1, 1)
        gathered = jnp.take_along_axis(keys, index, axis=2)
        gathered = gathered.reshape(batch, num_kv_heads, tokens, -1, dim)
        grouped = rows.reshape(batch, num_kv_heads, tokens, -1, dim)
        logits = product("bktgh,bktsh->bktgs", grouped, gathered, accumulator(rows)) * scale
        lse = None if lse is None else lse.reshape(batch, num_kv_heads, tokens, -1)
        weights = _probabilities(logits, visible, lse)
        return _over_heads(weights.reshape(*weights.shape[:4], slots, size).sum(axis=-1), reduce)

    inputs = _chunks(query, lse, placement, num_kv_heads, tokens)
    blocks = cutting.split_tokens(block_indices, tokens, fill=-1)
    return cutting.join_tokens(cutting.over_chunks(weigh_chunk, (inputs, blocks)), query.shape[1])


@partial(jax.jit, static_argnames=("scale", "sizes"))
def importance_scores(
    query: Float[Array, "B T N H"],
    key_cmp: Float[Array, "B C K H"],
    lse_cmp: Float[Array, "B T N"] | None,
    placement: Placement,
    scale: float,
    *,
    sizes: Sizes = DEFAULT,
) -> Float[Array, "B T K M"]:
    """Logarithm of the importance of each selection block (Eq. 8-10). The backward repeats each chunk."""
    assert placement.first_keys.cmp.known == 0  # the scores need all blocks, not a part
    config, accumulate = placement.config, accumulator(query)
    num_compressed, num_kv_heads = key_cmp.shape[1:3]
    num_blocks = max(layout.max_selection_blocks(num_compressed, config), 1)
    tokens = _tokens(query, query.shape[2] * num_compressed, sizes)
    lowest = jnp.finfo(accumulate).tiny
    wide = key_cmp.astype(accumulate)  # so that the chunks add up their gradients in this dtype

    @jax.checkpoint
    def score_chunk(inputs: Any) -> Float[Array, "B tokens K M"]:
        rows, lse, places = inputs
        here = places.placement(placement, tokens)
        visible = _visible(Look(*here.compression_range(num_compressed)), key_cmp)
        weights = _by_head(_probabilities(_logits(rows, wide) * scale, visible, lse), tokens).sum(axis=3)
        if here.packed:
            column = _along(3, num_compressed) + here.compression_start[:, None, :, None]
            weights = jnp.take_along_axis(weights, column, axis=3, mode="fill", fill_value=0)
        scores = collect(weights, num_blocks, config).swapaxes(1, 2)
        low = scores < lowest  # NaN is not
        scores = jnp.where(low, jnp.log(lowest), jnp.log(jnp.where(low, 1, scores)))
        first = _along(3, num_blocks) * config.selection_block_size
        return jnp.where(first <= here.position[..., None, None], scores, -jnp.inf)

    inputs = _chunks(query, lse_cmp, placement, num_kv_heads, tokens)
    return cutting.join_tokens(cutting.over_chunks(score_chunk, inputs), query.shape[1])


def _tokens(query: Array, width: int, sizes: Sizes) -> int:
    """Query tokens of a chunk, if each takes `width` floats in a row of the batch."""
    batch, num_queries = query.shape[:2]
    rows = batch if isinstance(batch, int) else 1  # `jax.export` may not know it
    return max(min(sizes.query_chunk, num_queries, sizes.partial_floats // max(rows * width, 1)), 1)


def _chunks(query: Array, lse: Array | None, placement: Placement, num_kv_heads: int, tokens: int) -> Any:
    """Query rows, log-sum-exps and places of all chunks."""
    if lse is not None:
        lse = cutting.split_rows(lse.astype(accumulator(query))[..., None], num_kv_heads, tokens)[..., 0]
    return cutting.split_rows(query, num_kv_heads, tokens), lse, ChunkPlaces.of(placement, tokens)


def _along(axis: int, size: int) -> Int32[Array, "*ones size"]:
    """0 .. size - 1 along the last axis, after `axis` axes of 1."""
    return jnp.arange(size, dtype=jnp.int32).reshape(*[1] * axis, size)


def _visible(look: Look, keys: Array) -> Bool[Array, "B 1 tokens S"]:
    """Which of all keys each query sees."""
    return look.read(jnp.int32(0), TileSizes(keys.shape[1], True), 1, keys.dtype, keys)[0]


@jax.custom_vjp
def _logits(rows: Float[Array, "B K rows H"], key: Float[Array, "B S K H"]) -> Float[Array, "B K rows S"]:
    """Products in the dtype of the rows. A cotangent of 0 hides what is not finite from the gradients."""
    return _logits_forward(rows, key)[0]


def _logits_forward(rows, key):
    return all_logits(rows, key.astype(rows.dtype)), (rows, key)


def _logits_backward(residuals, d_logits):
    rows, key = residuals
    given, accumulate = d_logits.astype(rows.dtype), accumulator(rows)
    d_rows = product("bkrs,bskh->bkrh", given, finite(key).astype(rows.dtype), accumulate)
    d_key = product("bkrs,bkrh->bskh", given, finite(rows), accumulate)
    return d_rows.astype(rows.dtype), d_key.astype(key.dtype)


_logits.defvjp(_logits_forward, _logits_backward)


def _probabilities(
    logits: Float[Array, "*rows S"], visible: Bool[Array, "*#rows S"], lse: Float[Array, "*rows"] | None
) -> Float[Array, "*rows S"]:
    """`exp(logits - lse)` where visible, else 0; the softmax if `lse` is None. `visible` is of tokens."""
    if visible.shape[2] != logits.shape[2]:
        visible = cutting.of_rows(visible, logits.shape[2] // visible.shape[2])
    logits = jnp.where(visible, logits, -jnp.inf)
    if lse is None:
        largest = jax.lax.stop_gradient(logits.max(axis=-1, initial=-jnp.inf))
        largest = jnp.where(largest == -jnp.inf, 0, largest)
        total = jnp.exp(logits - largest[..., None]).sum(axis=-1)
        lse = largest + jnp.log(jnp.where(total == 0, 1, total))
    else:
        lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)
    return jnp.where(visible, jnp.exp(logits - lse[..., None]), 0)


def _by_head(weights: Float[Array, "B K rows S"], tokens: int) -> Float[Array, "B K tokens G S"]:
    batch, num_kv_heads, rows, num_keys = weights.shape
    return weights.reshape(batch, num_kv_heads, tokens, rows // tokens, num_keys)


def _over_heads(blocks: Float[Array, "B K tokens G M"], reduce: str) -> Float[Array, "B tokens K M"]:
    """The sum or the largest over the query heads of a KV head."""
    found = blocks.sum(axis=3)
    if reduce == "max":
        found = blocks.max(axis=3) + 0 * found  # a maximum on a CPU may drop NaN
    return found.swapaxes(1, 2)
