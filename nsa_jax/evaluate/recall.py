"""Block recall: whether the blocks that a layer selects are those that its dense attention would look at."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nsa_jax import attention, layout
from nsa_jax.array_checks import check_arrays
from nsa_jax.array_typing import Array, Bool, Float, Int
from nsa_jax.evaluate.table import markdown
from nsa_jax.layout import Run, Runs
from nsa_jax.model import Transformer
from nsa_jax.nn.projections import token_positions

# Probabilities that exist at a time: 64 MiB in float32.
PROBABILITIES_AT_ONCE = 2**24
_MEASURES = ("best", "best_free", "mass", "chance")


@dataclasses.dataclass(frozen=True)
class BlockRecall:
    """How well the selection of each layer and KV head agrees with dense attention, see `block_recall`.

    `str` gives a table in Markdown, with the means over the KV heads.

    Attributes:
      layers: which layers of the model these are, from 0; the rows of the arrays.
      queries: how many queries were counted.
      best: share of queries whose best block is selected. The best block is that to which dense attention
        gives the most probability, added up over the query heads of the KV head.
      best_free: the same for the best of the blocks that are neither initial nor local, which are always
        selected.
      mass: mean share of the probability of dense attention that lies in the selected blocks.
      chance: what `best_free` is for a random choice.
    """

    layers: tuple[int, ...]
    queries: int
    best: Float[np.ndarray, "layers K"]
    best_free: Float[np.ndarray, "layers K"]
    mass: Float[np.ndarray, "layers K"]
    chance: Float[np.ndarray, "layers K"]

    def __str__(self) -> str:
        """A row for each layer and for the mean of all."""
        heads = "layer", "best block", "best free block", "probability", "chance"
        means = np.stack([getattr(self, name).mean(1) for name in _MEASURES], axis=1)
        rows = zip((*self.layers, "all"), (*means, means.mean(0)), strict=True)
        return markdown(heads, [(layer, *(f"{each:.3f}" for each in row)) for layer, row in rows])


def block_recall(
    model: Transformer,
    tokens: Int[Array, "B T"],
    *,
    positions: Int[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    counted: Bool[Array, "B T"] | None = None,
) -> BlockRecall:
    """Measures, for each NSA layer, how often dense attention's best block is among those it selects.

    The dense attention is that of the layer's own queries to its keys of the selected branch, on what the NSA
    layers before it give. Layers of the same structure share a compiled program.

    Args:
      model: a model with NSA layers, without a `context_axis`.
      tokens: token ids.
      positions: rotary position of each token, see `Transformer`.
      segment_ids: sequence of each token, see `Transformer`.
      counted: queries to count, for example the last ones of prompts that ask for a needle. Among them only
        those count that see more blocks than they select; all such by default.

    Returns:
      The shares, as `BlockRecall`; NaN if no query counts.

    Raises:
      NotImplementedError: no layer is "nsa", or the model has a `context_axis`.
      TypeError: `model` is no `Transformer`, or an argument is not an array.
      ValueError: shapes do not fit, or a layer has the selector "given".
    """
    if not isinstance(model, Transformer):
        raise TypeError(
            f"model must be a Transformer, got {type(model).__name__}. Pass one of nsa_jax.model."
        )
    per_token = dict(positions=positions, segment_ids=segment_ids, counted=counted)
    check_arrays(block_recall, tokens=tokens, **per_token)
    kinds = [each.attention == "nsa" for each in model.config.per_layer]
    if not any(kinds):
        raise NotImplementedError(
            f"block_recall needs NSA layers, got attention={model.config.attention!r}. Build the model with "
            'attention="nsa".'
        )
    x = model._embed(tokens)
    found = []
    for layer, is_nsa in zip(model.layers, kinds, strict=True):
        x, sums = _of_layer(*nnx.split(layer), x, **per_token, is_nsa=is_nsa)
        found += [np.asarray(sums)] if is_nsa else []
    totals = np.stack(found).astype(float)
    with np.errstate(invalid="ignore"):
        shares = totals[:, 1:] / totals[:, :1]
    layers = tuple(i for i, is_nsa in enumerate(kinds) if is_nsa)
    return BlockRecall(layers, int(totals[0, 0, 0]), *shares.swapaxes(0, 1))


@functools.partial(jax.jit, static_argnames=("graph", "is_nsa"))
def _of_layer(
    graph: Any, state: Any, x: Array, positions: Any, segment_ids: Any, counted: Any, is_nsa: bool
) -> tuple[Array, Array | None]:
    """What comes out of the layer; and number of queries and sums of the measures, `[5, K]`."""
    layer = nnx.merge(graph, state)
    where = dict(positions=positions, segment_ids=segment_ids)
    if not is_nsa:
        return layer(x, **where, deterministic=True)[0], None
    normed = layer.attention_norm(x)
    operands, blocks = (getattr(layer.attention, name)(normed, **where) for name in ("operands", "inspect"))
    at = token_positions(x, segment_ids)
    at = at if segment_ids is None else jnp.where(segment_ids == 0, -1, at)
    at = at if counted is None else jnp.where(counted, at, -1)
    sums = _sums(layer.attention, operands.query, operands.key_slc, blocks.block_indices, at, segment_ids)
    return layer(x, **where, block_indices=blocks.block_indices, deterministic=True)[0], sums


def _sums(
    layer: Any,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    block_indices: Int[Array, "B T K R"],
    at: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None,
) -> Float[Array, "5 K"]:
    """Number of queries and sums of the measures, over chunks of queries; `at` is -1 where none counts."""
    config, (rows, length, num_kv_heads) = layer.config, block_indices.shape[:3]
    a_query = rows * num_kv_heads * layout.num_selection_blocks(length, config)
    chunks = -(-length // max(PROBABILITIES_AT_ONCE // a_query, 1))
    tokens = -(-length // chunks)

    def of_chunk(total: Array, chunk: Any) -> tuple[Array, None]:
        first, query, blocks, at = chunk
        probability = attention.block_probabilities(
            query, key, config=config, query_positions=Runs((Run(tokens, first),)), segment_ids=segment_ids,
            scale=layer.scale, implementation=layer.implementation,
        )  # fmt: skip
        blocks = layout.distinct_blocks(blocks, length, config)
        return total + _measured(probability, blocks, at, config).sum((1, 2)), None

    def split(x: Array, fill: int = 0) -> Array:
        widths = (0, 0), (0, chunks * tokens - length), *((0, 0),) * (x.ndim - 2)
        x = jnp.pad(x, widths, constant_values=fill)
        return x.reshape(rows, chunks, tokens, *x.shape[2:]).swapaxes(0, 1)

    firsts = jnp.arange(chunks, dtype=jnp.int32) * tokens
    inputs = firsts, split(query), split(block_indices, -1), split(at, -1)
    wide = jnp.promote_types(query.dtype, jnp.float32)
    return jax.lax.scan(of_chunk, jnp.zeros((5, num_kv_heads), wide), inputs)[0]


def _measured(
    probability: Float[Array, "B t K M"], blocks: Int[Array, "B t K R"], at: Int[Array, "B t"], config: Any
) -> Float[Array, "5 B t K"]:
    """Whether a query counts, and its measures."""
    at = at[:, :, None, None]
    own, block = at // config.selection_block_size, jnp.arange(probability.shape[3], dtype=jnp.int32)
    blocks = jnp.where(blocks <= own, blocks, -1)  # those of the future are not attended
    chosen, is_seen, is_forced = blocks >= 0, block <= own, layout.is_forced(block, at, config)
    free = is_seen & ~is_forced

    def has_best(candidates: Array) -> Array:
        best = jnp.where(candidates, probability, -1).argmax(-1)
        return (blocks == best[..., None]).any(-1)

    held = jnp.take_along_axis(probability, jnp.maximum(blocks, 0), axis=3)
    mass = jnp.where(chosen, held, 0).sum(-1) / probability.sum(-1)
    chance = (chosen & ~layout.is_forced(blocks, at, config)).sum(-1) / free.sum(-1)
    counts = (at >= 0)[..., 0] & (own[..., 0] + 1 > chosen.sum(-1))
    measures = jnp.ones_like(mass), has_best(is_seen), has_best(free), mass, chance
    return jnp.stack([jnp.where(counts, each, 0) for each in measures])
