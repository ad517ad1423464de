"""Selected attention (Eq. 12), in two ways.

Mostly neighbouring queries are a tile, which loops over the union of their blocks. With few query heads a KV
head, where neighbours share few blocks, each block meets the rows that chose it (`in_parts`).

Where what neighbours share is not known while tracing, the kernels of both ways are started, and those of one
find nothing to do: lists with counts of -1, or chunks without items. A `lax.cond` would make the host wait
for the device, which takes longer than programs that end at once.
"""

from typing import NamedTuple

import jax.numpy as jnp

from nsa_jax.array_typing import Array, Bool, Float, Int32
from nsa_jax.kernels.triton.backward import Backward, BranchGradients
from nsa_jax.kernels.triton.gpu import shape_of
from nsa_jax.kernels.triton.selected import forward
from nsa_jax.kernels.triton.selected.backward_key import join_items, selected_key_gradients
from nsa_jax.kernels.triton.selected.backward_query import selected_query_gradient
from nsa_jax.kernels.triton.selected.deltas import row_deltas
from nsa_jax.kernels.triton.selected.in_parts import (
    attend_in_parts,
    chunks_of,
    cuts_queries,
    gradients_in_parts,
)
from nsa_jax.kernels.triton.selected.items import invert
from nsa_jax.kernels.triton.selected.sharing import shares_less
from nsa_jax.kernels.triton.selected.unions import UnionLists, rows_of_listed_tile, union_lists
from nsa_jax.kernels.triton.sizes import Shape, choose_sizes, find_sizes
from nsa_jax.kernels.triton.sizes.selected import (
    GRADIENT_PARTS,
    OUTPUT_PARTS,
    SELECTED_FORWARD,
    SELECTED_KEY_GRADIENTS,
    SELECTED_QUERY_GRADIENT,
    SelectedPartSizes,
    fitting_item,
    item_queries,
)
from nsa_jax.layout import Placement

BLOCK = 64  # keys of a block for which there are sizes for parts
NEIGHBOURS = 4  # queries whose blocks are compared
FEWEST_PAIRS = 2**18  # of a query and a block, from which results may come in parts
# With fewer the forward takes tiles: to start both ways it must sort the pairs, which only parts use there.
# But before a backward pass it may take parts alone, see `SelectedPartSizes.unasked`.
FEWEST_ASKED_FORWARD = 3 * 2**18


def attend_selected(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    block_indices: Int32[Array, "B T K R"],
    placement: Placement,
    *,
    scale: float,
    with_probabilities: bool = False,
    before_backward: bool = False,
) -> tuple[Array, ...]:
    """Attends to the keys of each query's blocks, up to the query itself; returns `(out, lse)`.

    The results are not searched for what is not finite. With `with_probabilities` also the probability of the
    block in each slot, `[B, T, K, R]`, summed over the query heads of a KV head. `before_backward` says that
    a backward pass follows, which can use the lists of parts again.
    """
    shape = shape_of(query, key, value, block_size=placement.config.selection_block_size)
    arrays = query, key, value, block_indices, placement
    way = _choose_forward(shape, key.shape[1], block_indices, placement, before_backward)
    results: tuple[Array, ...] | None = None
    if way.has_tiles:
        tile = choose_sizes(SELECTED_FORWARD, shape)
        tokens = rows_of_listed_tile(tile.rows, shape.heads).tokens
        lists = union_lists(block_indices, placement, key.shape[1], tokens=tokens, unless=way.few)
        selections = forward.Selections(block_indices, placement.sequence_start)
        results = forward.attend_selected(
            query, key, value, lists, placement.config, scale,
            one_block=placement.tile_in_one_block(tokens), may_rest=way.few is not None, sizes=tile,
            selections=selections if with_probabilities else None,
        )  # fmt: skip
    if way.parts is not None:
        results = attend_in_parts(
            *arrays, results, way.few, scale=scale, sizes=way.parts, with_probabilities=with_probabilities
        )
    assert results is not None
    return results


def selected_gradients(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    block_indices: Int32[Array, "B T K R"],
    placement: Placement,
    given: Backward,
    *,
    scale: float,
) -> BranchGradients:
    """What `ranges.range_gradients` returns, for this branch; arguments as there and in `attend_selected`."""
    num_keys, slots = key.shape[1], block_indices.shape[3]
    shape = shape_of(query, key, value, block_size=placement.config.selection_block_size)
    arrays = query, key, value
    # Where the queries are cut too, most blocks have several items, whose partial sums take the more memory.
    cut = cuts_queries(query, block_indices)
    sizes = None if cut else find_sizes(GRADIENT_PARTS, shape)
    way = _choose_way(sizes, num_keys, block_indices, placement)
    key_sizes = choose_sizes(SELECTED_KEY_GRADIENTS, shape)
    if way.parts is None:
        chunks, item = None, key_sizes.item or item_queries(shape.heads, block_indices.size)
    else:
        chunks = chunks_of(query, block_indices, query.shape[3])
        item = fitting_item(way.parts.item, block_indices.size, least=512)
    cuts = {} if chunks is None else dict(range_queries=chunks.queries, chunk_heads=chunks.heads)
    items = invert(block_indices, placement, num_keys, item=item, **cuts)

    written: tuple[Array, ...] | None = None
    if way.has_tiles:
        tile = choose_sizes(SELECTED_QUERY_GRADIENT, shape)
        tokens = rows_of_listed_tile(tile.rows, shape.heads).tokens
        before = _choose_forward(shape, num_keys, block_indices, placement, before_backward=True)
        nobody = way.few
        if before.has_tiles:  # with the same lists, so that a program of both makes them once
            nobody = before.few if before.rests_only_with(way) else None
        lists = union_lists(block_indices, placement, num_keys, tokens=tokens, unless=nobody)
        d_query, products, delta = selected_query_gradient(
            *arrays, way.of_tiles(lists), placement.config, given, scale=scale,
            one_block=placement.tile_in_one_block(tokens), may_rest=way.few is not None, sizes=tile,
        )  # fmt: skip
        mine = items if chunks is None else items._replace(tokens=items.tokens // slots)
        if way.few is not None:
            mine = mine._replace(items=jnp.where(way.few, -1, mine.items))
        sums = selected_key_gradients(*arrays, mine, placement, given, delta, scale=scale, sizes=key_sizes)
        written = d_query, *sums
    else:
        products, delta = row_deltas(given)
    if way.parts is not None:
        assert chunks is not None
        written = gradients_in_parts(
            *arrays, block_indices, placement, items, chunks, given, delta, written, way.few,
            scale=scale, sizes=way.parts._replace(item=item),
        )  # fmt: skip
    assert written is not None
    d_query, *parts = written
    return BranchGradients(d_query, *join_items(items, *parts), products, delta)


class _Way(NamedTuple):
    """Which kernels are started.

    Attributes:
      parts: sizes of those with key blocks outside; None without them.
      few: whether neighbours share so few blocks that these shall do the work, and those of tiles nothing;
        None where only one of the two ways is started.
    """

    parts: SelectedPartSizes | None
    few: Bool[Array, ""] | None

    @property
    def has_tiles(self) -> bool:
        """Whether the kernels of tiles are started."""
        return self.parts is None or self.few is not None

    def rests_only_with(self, other: "_Way") -> bool:
        """Whether tiles of the other way are known to rest wherever those of this way rest."""
        if self.few is None or self.parts is None or other.parts is None:
            return False
        return self.parts.most_shared <= other.parts.most_shared

    def of_tiles(self, lists: UnionLists) -> UnionLists:
        """The lists that they are given: counts of -1 where the others do the work."""
        if self.few is None:
            return lists
        return lists._replace(counts=jnp.where(self.few, -1, lists.counts))


def _choose_forward(
    shape: Shape,
    num_keys: int,
    block_indices: Int32[Array, "B T K R"],
    placement: Placement,
    before_backward: bool,
) -> _Way:
    """The way of `attend_selected`."""
    return _choose_way(
        find_sizes(OUTPUT_PARTS, shape), num_keys, block_indices, placement,
        fewest_asked=FEWEST_ASKED_FORWARD, before_backward=before_backward,
    )  # fmt: skip


def _choose_way(
    sizes: SelectedPartSizes | None,
    num_keys: int,
    block_indices: Int32[Array, "B T K R"],
    placement: Placement,
    *,
    fewest_asked: int = 0,
    before_backward: bool = False,
) -> _Way:
    """By what is known while tracing, and else by what neighbours share; `sizes` are those of parts."""
    if (
        sizes is None
        or num_keys < sizes.fewest_keys
        or placement.config.selection_block_size != BLOCK
        or not FEWEST_PAIRS <= block_indices.size < 2**31
    ):
        return _Way(None, None)
    unasked = sizes.unasked if before_backward else 0
    if sizes.most_shared >= NEIGHBOURS or block_indices.size <= unasked:
        return _Way(sizes, None)
    if block_indices.size < fewest_asked:
        return _Way(None, None)
    return _Way(sizes, shares_less(block_indices, NEIGHBOURS, sizes.most_shared))
