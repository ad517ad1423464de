"""The loss that teaches a layer to select, computed for a chunk of queries at a time."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from nsa_jax import attention, layout
from nsa_jax.array_typing import Array, Float, Float32, Int, Int32
from nsa_jax.config import NSAConfig
from nsa_jax.dispatch import Implementation
from nsa_jax.layout import Run, Runs

type Target = Literal["dense", "selected"]

TARGETS = ("dense", "selected")

# Scores that exist at a time: 64 MiB in float32, and as much of the target and of the gradient.
SCORES_AT_ONCE = 2**24


def mean_loss(
    scores: Callable[..., Float32[Array, "B t K M"]],
    queries: Any,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    block_indices: Int[Array, "B T K R"],
    at: Int32[Array, "B T"],
    *,
    target: Target,
    config: NSAConfig,
    segment_ids: Int[Array, "B T"] | None,
    scale: float,
    implementation: Implementation | None,
) -> Float32[Array, ""]:
    """The mean over queries and KV heads of the KL divergence of a selector's shares from the attention's.

    Args:
      scores: called as `scores(queries, at, **where)` with a chunk of what follows; `where` are
        `query_positions`, `segment_ids`, `config` and `implementation`.
      queries: what the selector asks with, a tree of arrays `[B, T, ...]`.
      query: rotated queries of the layer.
      key: rotated keys of the selected branch.
      block_indices: blocks that the layer attends.
      at: index of each query in its sequence, -1 for padding.
      target: "dense", the probability that dense attention gives to each block, or "selected", the one
        inside the blocks that the layer attends.
      config, segment_ids, scale, implementation: as in the operations.

    Returns:
      The mean, with a gradient through the scores alone. Chunks are computed again in the backward pass.
    """
    batch, num_queries, num_kv_heads = block_indices.shape[:3]
    a_query = batch * num_kv_heads * layout.num_selection_blocks(key.shape[1], config)
    chunks = -(-num_queries // max(SCORES_AT_ONCE // a_query, 1))
    tokens = -(-num_queries // chunks)

    def of_chunk(total: Array, chunk: Any) -> tuple[Array, None]:
        first, queries, query, blocks, at = chunk
        runs = Runs((Run(tokens, first),))
        where: dict[str, Any] = dict(
            config=config, query_positions=runs, segment_ids=segment_ids, implementation=implementation
        )
        scored = scores(queries, at, **where)
        if target == "dense":
            share = attention.block_probabilities(query, key, scale=scale, **where)
            scored = scored[..., : share.shape[3]]  # compressed keys do not tell the number of blocks exactly
        else:
            blocks = layout.distinct_blocks(blocks)
            share = attention.selected_probabilities(query, key, blocks, scale=scale, **where)
            scored = jnp.take_along_axis(scored, jnp.maximum(blocks, 0), axis=3)
            scored = jnp.where(blocks < 0, -jnp.inf, scored)
        return total + attention.selection_loss(scored, share).sum(), None  # 0 where nothing is attended

    def split(x: Array, fill: int = 0) -> Array:
        widths = (0, 0), (0, chunks * tokens - num_queries), *((0, 0),) * (x.ndim - 2)
        x = jnp.pad(x, widths, constant_values=fill)
        return x.reshape(batch, chunks, tokens, *x.shape[2:]).swapaxes(0, 1)

    firsts = jnp.arange(chunks, dtype=jnp.int32) * tokens
    inputs = firsts, *jax.tree.map(split, (queries, query, block_indices)), split(at, fill=-1)
    accumulate = jnp.promote_types(query.dtype, jnp.float32)
    total, _ = jax.lax.scan(jax.checkpoint(of_chunk), jnp.zeros((), accumulate), inputs)
    return total / jnp.maximum((at >= 0).sum() * num_kv_heads, 1)
