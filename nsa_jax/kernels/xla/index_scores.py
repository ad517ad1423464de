"""Scores of the selection blocks by an indexer, for chunks of queries and tiles of keys, with gradients.

A tile holds whole blocks of one sequence, so the largest score of a block, and the token that has it, are
found in one tile. A packed row makes one pass for each sequence that a chunk of queries touches. The backward
pass scores each tile again.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nsa_jax import layout
from nsa_jax.array_typing import Array, Bool, Float, Int, Int32
from nsa_jax.config import NSAConfig
from nsa_jax.kernels.xla import chunks as cutting
from nsa_jax.kernels.xla.chunks import ChunkPlaces
from nsa_jax.kernels.xla.masked import accumulator, finite, product
from nsa_jax.kernels.xla.sizes import Sizes
from nsa_jax.layout import Placement, of_slots
from nsa_jax.layout.quantised import widened
from nsa_jax.option_checks import LARGEST_INT


class ScorePlan(NamedTuple):
    """Static sizes of a call.

    Attributes:
      tokens: query tokens of a chunk.
      tile: keys of a tile, whole blocks.
      block: tokens of a block.
      num_blocks: M.
      scale: factor of the products.
    """

    tokens: int
    tile: int
    block: int
    num_blocks: int
    scale: float

    @classmethod
    def of(
        cls, query: Float[Array, "B T K J E"], num_keys: int, config: NSAConfig, scale: float, sizes: Sizes
    ) -> "ScorePlan":
        """Chooses the sizes: tiles as wide as the floats of partial results allow, so that few are needed."""
        batch, num_queries, num_kv_heads, heads, _ = query.shape
        tokens, block = min(sizes.query_chunk, num_queries), config.selection_block_size
        rows = (batch if isinstance(batch, int) else 1) * tokens * num_kv_heads * heads
        widest = min(sizes.partial_floats // rows, sizes.key_tile * sizes.widest_tile)
        tile = min(max(sizes.key_tile, widest), num_keys)
        return cls(
            tokens, -(-tile // block) * block, block, layout.num_selection_blocks(num_keys, config), scale
        )


class _Tile(NamedTuple):
    """Keys of one sequence of each row, beginning at one of its blocks.

    Attributes:
      first_block: the block that they begin with.
      start: row index of the first key, in every row.
      keys: the keys.
      visible: which of them each query sees.
    """

    first_block: Int[Array, ""]
    start: Int32[Array, " B"]
    keys: Float[Array, "B tile I E"]
    visible: Bool[Array, "B tokens tile"]


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def scores_of_blocks(
    query: Float[Array, "B T K J E"],
    keys: Float[Array, "B S I E"],
    weights: Float[Array, "B T K J"] | None,
    block_indices: Int32[Array, "B T K R"] | None,
    placement: Placement,
    plan: ScorePlan,
) -> Float[Array, "B T K M"] | Float[Array, "B T K R"]:
    """The scores of all queries, as `nsa_jax.block_scores` returns them.

    With `block_indices` all blocks are scored, too, but no more than those of a chunk exist at a time.
    """
    return _forward(query, keys, weights, block_indices, placement, plan)[0]


def _forward(query, keys, weights, block_indices, placement, plan: ScorePlan):
    padded = padded_keys(keys, plan)
    chunks, places = _split(query, weights, block_indices, placement, plan)

    def score_chunk(inputs):
        (query, weights, blocks), place = inputs
        scores = scores_of_chunk(query, padded, weights, place.placement(placement, plan.tokens), plan)
        return scores if blocks is None else of_slots(scores, blocks)

    scores = cutting.over_chunks(score_chunk, (chunks, places))
    return cutting.join_tokens(scores, query.shape[1]), (query, keys, weights, block_indices, placement)


def _split(query, weights, block_indices, placement, plan: ScorePlan):
    arrays = (query, weights, block_indices)
    chunks = jax.tree.map(lambda x: cutting.split_tokens(x, plan.tokens), arrays)
    return chunks, ChunkPlaces.of(placement, plan.tokens)


def padded_keys(keys: Float[Array, "B S I E"], plan: ScorePlan) -> Float[Array, "B keys I E"]:
    """The keys with a tile of zeros behind them, so that a tile may begin at any key."""
    return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, plan.tile), *((0, 0),) * (x.ndim - 2))), keys)


def scores_of_chunk(
    query: Float[Array, "B tokens K J E"],
    padded: Float[Array, "B keys I E"],
    weights: Float[Array, "B tokens K J"] | None,
    here: Placement,
    plan: ScorePlan,
) -> Float[Array, "B tokens K M"]:
    """The scores of the queries of one chunk."""

    def score_tile(tile: _Tile, scores):
        tile = tile._replace(keys=widened(tile.keys, query.dtype))
        part = _score(_products(query, tile, plan), weights, tile, plan)[0]
        old = jax.lax.dynamic_slice_in_dim(scores, tile.first_block, part.shape[-1], axis=3)
        return jax.lax.dynamic_update_slice_in_dim(scores, jnp.maximum(old, part), tile.first_block, axis=3)

    shape = (*query.shape[:3], _whole_tiles(plan))
    nothing = cutting.zeros_beside(query, shape, accumulator(query)) - jnp.inf
    return _fold_tiles(score_tile, nothing, padded, here, plan)[..., : plan.num_blocks]


def _whole_tiles(plan: ScorePlan) -> int:
    """The number of blocks, rounded up to those of whole tiles."""
    of_tile = plan.tile // plan.block
    return -(-plan.num_blocks // of_tile) * of_tile


def _fold_tiles(
    function: Callable[[_Tile, Any], Any], carry: Any, padded: Array, here: Placement, plan: ScorePlan
) -> Any:
    """Repeats `carry = function(tile, carry)` for the tiles of each sequence that the chunk touches."""
    assert here.first_keys.slc.known == 0, "scores are those of whole rows"
    batch = padded.shape[0]

    def fold_sequence(start: Int32[Array, " B"], end: Int32[Array, "B tokens"], carry):
        """`start` is where the sequence begins in each row, `end` how many of its tokens a query sees."""

        def one(i, carry):
            first = i * plan.tile
            token = first + jnp.arange(plan.tile, dtype=jnp.int32)[None, None]
            keys = _slices(padded, start + first, plan.tile)
            visible = token < end[..., None]
            return function(_Tile(first // plan.block, start + first, keys, visible), carry)

        return jax.lax.fori_loop(0, (end.max() + plan.tile - 1) // plan.tile, one, carry)

    end = here.position + 1
    if not here.packed:
        return fold_sequence(jnp.zeros((batch,), jnp.int32), end, carry)
    begin = jnp.where(end > 0, here.selection_start(), LARGEST_INT)

    def next_sequence(state):
        start, carry = state
        carry = fold_sequence(start, jnp.where(begin == start[:, None], end, 0), carry)
        return jnp.where(begin > start[:, None], begin, LARGEST_INT).min(axis=1), carry

    return jax.lax.while_loop(
        lambda state: state[0].min() < LARGEST_INT, next_sequence, (begin.min(1), carry)
    )[1]


def _slices(
    x: Float[Array, "B keys I E"], start: Int32[Array, " B"], size: int
) -> Float[Array, "B tile I E"]:
    """A slice of each row. Where a row has no such keys the slice is others, which nothing sees."""
    cut = jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, size))
    return jax.tree.map(lambda x: cut(x, start), x)


def _products(query, tile: _Tile, plan: ScorePlan) -> Float[Array, "B tokens K J tile"]:
    keys, axes = _axes(tile.keys)
    return product(f"btkje,{axes}->btkjs", query, keys, accumulator(query)) * plan.scale


def _axes(keys: Float[Array, "B tile I E"]) -> tuple[Array, str]:
    """The keys with the names of their axes in a product: without that of heads if all share one."""
    return (keys[:, :, 0], "bse") if keys.shape[2] == 1 else (keys, "bske")


def _relu(x: Array) -> Array:
    """`max(x, 0)`, which keeps NaN on every platform."""
    return jnp.where(x <= 0, 0, x)


def _score(
    products: Float[Array, "B tokens K J tile"], weights: Array | None, tile: _Tile, plan: ScorePlan
) -> tuple[Float[Array, "B tokens K blocks"], Int[Array, "B tokens K blocks"]]:
    """The score of each block of the tile, and the first of its tokens that has it."""
    if weights is None:
        scores = jnp.where(jnp.isnan(products), -jnp.inf, products).max(axis=3)
    else:
        scores = (weights.astype(products.dtype)[..., None] * _relu(products)).sum(axis=3)
        scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
    scores = jnp.where(tile.visible[:, :, None], scores, -jnp.inf)
    scores = scores.reshape(*scores.shape[:3], -1, plan.block)
    return scores.max(axis=-1), jnp.argmax(scores, axis=-1)


def _backward(plan, residuals, d_scores):
    query, keys, weights, block_indices, placement = residuals
    accumulate, padded = accumulator(query), padded_keys(keys, plan)
    more = _whole_tiles(plan) - plan.num_blocks
    chunks, places = _split(query, weights, block_indices, placement, plan)

    def differentiate_chunk(d_keys, inputs):
        (query, weights, blocks), place, d_scores = inputs
        if blocks is not None:
            of_all = jnp.zeros_like(d_scores, shape=(*d_scores.shape[:3], plan.num_blocks))
            (d_scores,) = jax.vjp(lambda scores: of_slots(scores, blocks), of_all)[1](d_scores)
        d_scores = jnp.pad(d_scores, ((0, 0),) * 3 + ((0, more),))

        def differentiate_tile(tile: _Tile, carry):
            d_keys, *d_rows = carry
            given = jax.lax.dynamic_slice_in_dim(d_scores, tile.first_block, plan.tile // plan.block, axis=3)
            parts, d_tile = _tile_gradients(query, weights, tile, given, plan)
            d_keys = _add_slices(d_keys, tile.start, d_tile)
            return d_keys, *(
                total if part is None else total + part for total, part in zip(d_rows, parts, strict=True)
            )

        shapes = (query.shape, query.shape[:4])
        nothing = (cutting.zeros_beside(query, shape, accumulate) for shape in shapes)
        carry = (d_keys, *nothing)
        d_keys, *d_rows = _fold_tiles(
            differentiate_tile, carry, padded, place.placement(placement, plan.tokens), plan
        )
        return d_keys, d_rows

    d_keys = cutting.zeros_beside(keys, padded.shape, accumulate)
    inputs = (chunks, places, cutting.split_tokens(d_scores, plan.tokens))
    d_keys, d_rows = cutting.fold_chunks(differentiate_chunk, d_keys, inputs)
    d_query, d_weights = (cutting.join_tokens(x, query.shape[1]) for x in d_rows)
    return (
        d_query.astype(query.dtype),
        d_keys[:, : keys.shape[1]].astype(keys.dtype),
        None if weights is None else d_weights.astype(weights.dtype),
        None,
        None,
    )


scores_of_blocks.defvjp(_forward, _backward)


def _tile_gradients(
    query, weights, tile: _Tile, d_scores: Float[Array, "B tokens K blocks"], plan: ScorePlan
) -> tuple[tuple[Array, Array | None], Float[Array, "B tile I E"]]:
    """Contributions to the gradients of the queries and their weights, and of the keys of the tile.

    A score that is finite comes from numbers that are, unless a relu hides them; so all others count as 0.
    """
    products = _products(query, tile, plan)
    best, token = _score(products, weights, tile, plan)
    taken = jnp.arange(plan.block, dtype=token.dtype) == token[..., None]
    taken = (taken & jnp.isfinite(best)[..., None]).reshape(*token.shape[:3], -1)[:, :, :, None]
    d_token = jnp.where(taken, jnp.repeat(d_scores, plan.block, axis=-1)[:, :, :, None], 0)
    d_weights = None
    if weights is None:
        first = jnp.argmax(jnp.where(jnp.isnan(products), -jnp.inf, products), axis=3, keepdims=True)
        heads = jnp.arange(products.shape[3], dtype=first.dtype)[:, None]
        d_products = jnp.where(heads == first, d_token, 0)
    else:
        wide = weights.astype(products.dtype)[..., None]
        d_weights = jnp.where(taken, d_token * _relu(products), 0).sum(axis=-1)
        d_products = jnp.where(taken & (products > 0), d_token * wide, 0)
    d_products = (d_products * plan.scale).astype(tile.keys.dtype)
    keys, axes = _axes(finite(tile.keys))
    d_query = product(f"btkjs,{axes}->btkje", d_products, keys, products.dtype)
    d_keys = product(f"btkjs,btkje->{axes}", d_products, finite(query), products.dtype)
    return (d_query, d_weights), d_keys.reshape(tile.keys.shape)


def _add_slices(
    total: Float[Array, "B keys I E"], start: Int32[Array, " B"], part: Float[Array, "B tile I E"]
) -> Float[Array, "B keys I E"]:
    """Adds a slice to each row, where `_slices` reads it."""

    def add(row, at, part):
        old = jax.lax.dynamic_slice_in_dim(row, at, part.shape[0])
        return jax.lax.dynamic_update_slice_in_dim(row, old + part, at, 0)

    return jax.vmap(add)(total, start, part)
