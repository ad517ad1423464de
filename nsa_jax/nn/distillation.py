"""The loss that teaches a layer to select, computed for a chunk of queries at a time."""

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from nsa_jax import attention, layout
from nsa_jax.array_typing import Array, DType, Float, Float32, Int, Int32
from nsa_jax.config import NSAConfig
from nsa_jax.dispatch import Implementation
from nsa_jax.layout import Run, Runs
from nsa_jax.remat import LOSS_GRADIENTS
from nsa_jax.sharding.manual import varying_alike

type Target = Literal["dense", "selected"]

TARGETS = get_args(Target.__value__)

# Scores that exist at a time: 64 MiB in float32, and as much of the target and of the gradient.
SCORES_AT_ONCE = 2**24


def mean_loss(
    scores: Callable[..., Float32[Array, "B t K M"] | Float32[Array, "B t K R"]],
    queries: Any,
    held: Any,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    block_indices: Int[Array, "B T K R"],
    at: Int32[Array, "B T"],
    probabilities: Float[Array, "B T K R"] | None,
    *,
    scores_slots: bool,
    config: NSAConfig,
    segment_ids: Int[Array, "B T"] | None,
    scale: float,
    implementation: Implementation | None,
) -> Float32[Array, ""]:
    """The mean over queries and KV heads of the KL divergence of a selector's shares from the attention's.

    Shares are those among the blocks that are not always selected, because there is no choice of the others.

    Args:
      scores: called as `scores(queries, held, at, **where)` with a chunk of `queries` and `at`; `where` are
        `query_positions`, `segment_ids`, `config` and `implementation`.
      queries: what the selector asks with, a tree of arrays `[B, T, ...]`.
      held: what it asks, and its parameters: a tree of arrays.
      query: rotated queries of the layer.
      key: rotated keys of the selected branch.
      block_indices: blocks that the layer attends.
      at: index of each query in its sequence, -1 for padding.
      probabilities: the target: what the selected branch gives to the blocks that the layer attends. None for
        what dense attention gives to each block.
      scores_slots: whether `scores` also takes `block_indices`, -1 in unused slots, and returns the scores of
        these blocks alone. Then all queries are one chunk. Needs `probabilities`.
      config, segment_ids, scale, implementation: as in the operations.

    Returns:
      The mean, with a gradient through the scores alone, for the floats among `queries` and `held`. It is
      formed beside the loss of each chunk, so the target and the scores are computed once, also under a
      remat policy that keeps `nsa_jax.remat.SAVED_NAMES`, and no chunk of them is kept.
    """
    batch, num_queries, num_kv_heads = block_indices.shape[:3]
    a_query = batch * num_kv_heads * layout.num_selection_blocks(key.shape[1], config)
    chunks = 1 if scores_slots else -(-num_queries // max(SCORES_AT_ONCE // a_query, 1))
    tokens = -(-num_queries // chunks)

    weight = 1 / jnp.maximum((at >= 0).sum() * num_kv_heads, 1).astype(_wide(query))

    def of_chunk(asked: Any, held: Any, fixed: Any, whole: Any) -> Array:
        (first, query, blocks, at, share), (key, segment_ids, weight) = fixed, whole
        where: dict[str, Any] = dict(
            config=config, query_positions=Runs((Run(tokens, first),)), segment_ids=segment_ids,
            implementation=implementation,
        )  # fmt: skip
        if share is None:
            found = scores(asked, held, at, **where)
            share = attention.block_probabilities(query, key, scale=scale, **where)
            found = found[..., : share.shape[3]]  # compressed keys do not tell the number of blocks exactly
            blocks = jnp.arange(share.shape[3], dtype=jnp.int32)
            found = jnp.where(layout.is_forced(blocks, at[:, :, None, None], config), -jnp.inf, found)
        else:
            blocks = layout.distinct_blocks(blocks, key.shape[1], config)
            blocks = jnp.where(layout.is_forced(blocks, at[:, :, None, None], config), -1, blocks)
            if scores_slots:
                found = scores(asked, held, at, block_indices=blocks, **where)
            else:
                found = layout.of_slots(scores(asked, held, at, **where), blocks)
        # Weighed here: gradients that are not would leave the range of float16.
        return attention.selection_loss(found, share).sum() * weight  # 0 where nothing is attended

    def split(x: Array, fill: int = 0) -> Array:
        widths = (0, 0), (0, chunks * tokens - num_queries), *((0, 0),) * (x.ndim - 2)
        x = jnp.pad(x, widths, constant_values=fill)
        return x.reshape(batch, chunks, tokens, *x.shape[2:]).swapaxes(0, 1)

    asked, of_attention = jax.tree.map(split, queries), jax.tree.map(split, (query, block_indices))
    share = None if probabilities is None else split(jax.lax.stop_gradient(probabilities))
    fixed = jnp.arange(chunks, dtype=jnp.int32) * tokens, *of_attention, split(at, fill=-1), share
    asked, held, key = varying_alike((asked, held, key))  # inside of `shard_map` parameters are shared
    return _sum_of_chunks(of_chunk, asked, held, fixed, (key, segment_ids, weight))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_of_chunks(
    loss: Callable[..., Array], asked: Any, held: Any, fixed: Any, whole: Any
) -> Float32[Array, ""]:
    """The sum of `loss(asked, held, fixed, whole)` over the chunks of `asked` and `fixed`."""

    def add(total: Array, chunk: Any) -> tuple[Array, None]:
        asked, fixed = chunk
        return total + loss(asked, held, fixed, whole), None

    return jax.lax.scan(add, _nothing(whole), (asked, fixed))[0]


def _with_gradients(
    loss: Callable[..., Array], asked: Any, held: Any, fixed: Any, whole: Any
) -> tuple[Array, Any]:
    """The sum, and its gradients for the floats in `asked` and `held`; the latter are summed up wide."""

    def add(carry: tuple[Array, Any], chunk: Any) -> tuple[tuple[Array, Any], Any]:
        (total, sums), (asked, fixed) = carry, chunk
        found, pull = jax.vjp(lambda *learned: loss(*learned, fixed, whole), asked, held)
        d_asked, d_held = pull(jnp.ones_like(found))
        sums = jax.tree.map(lambda x, total, d: total + d if _learns(x) else None, held, sums, d_held)
        return (total + found, sums), jax.tree.map(lambda x, d: d if _learns(x) else None, asked, d_asked)

    sums = jax.tree.map(lambda x: jnp.zeros_like(x, dtype=_wide(x)) if _learns(x) else None, held)
    (total, sums), d_asked = jax.lax.scan(add, (_nothing(whole), sums), (asked, fixed))
    d_held = jax.tree.map(lambda x, total: total.astype(x.dtype) if _learns(x) else None, held, sums)
    return total, checkpoint_name((d_asked, d_held), LOSS_GRADIENTS)


def _scaled(loss: Callable[..., Array], gradients: Any, d_total: Array) -> tuple[Any, ...]:
    return *jax.tree.map(lambda d: (d * d_total).astype(d.dtype), gradients), None, None


_sum_of_chunks.defvjp(_with_gradients, _scaled)


def _learns(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _wide(x: Array) -> DType:
    return jnp.promote_types(x.dtype, jnp.float32)


def _nothing(whole: Any) -> Float32[Array, ""]:
    """A sum of nothing, which varies over the mesh axes that the keys vary over."""
    return jnp.zeros_like(whole[0], dtype=_wide(whole[0]), shape=())
