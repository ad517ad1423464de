"""Selected attention (Eq. 12), in two ways.

Mostly neighbouring queries are a tile, which loops over the union of their blocks. With few query heads a KV
head, where neighbours share few blocks, each block meets the rows that chose it (`in_parts`).
"""

from collections.abc import Callable

import jax

from nsa_jax.array_typing import Array, Float, Int32
from nsa_jax.kernels.triton.backward import Backward
from nsa_jax.kernels.triton.dims import tokens_of
from nsa_jax.kernels.triton.gpu import shape_of
from nsa_jax.kernels.triton.nonfinite import visible_in_blocks
from nsa_jax.kernels.triton.selected import forward
from nsa_jax.kernels.triton.selected.backward_key import selected_key_gradients
from nsa_jax.kernels.triton.selected.backward_query import selected_query_gradient
from nsa_jax.kernels.triton.selected.in_parts import attend_in_parts, chunks_of, gradients_in_parts
from nsa_jax.kernels.triton.selected.sharing import shares_less
from nsa_jax.kernels.triton.selected.unions import union_lists
from nsa_jax.kernels.triton.sizes import (
    GRADIENT_PARTS,
    OUTPUT_PARTS,
    SELECTED_FORWARD,
    SELECTED_QUERY_GRADIENT,
    SelectedPartSizes,
    choose_sizes,
    find_sizes,
)
from nsa_jax.layout import Placement

BLOCK = 64  # keys of a block for which there are sizes for parts
NEIGHBOURS = 4  # queries whose blocks are compared
FEWEST_PAIRS = 2**18  # of a query and a block: with fewer, the choice costs about what it gains


def attend_selected(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    block_indices: Int32[Array, "B T K R"],
    placement: Placement,
    *,
    scale: float,
    weigh: bool = False,
) -> tuple[Array, ...]:
    """Attends to the keys of each query's blocks, up to the query itself; returns `(out, lse)`.

    With `weigh` also the probability of the block in each slot, `[B, T, K, R]`, summed over the query heads
    of a KV head.
    """
    shape = shape_of(query, key, value, block_size=placement.config.selection_block_size)
    visible = visible_in_blocks(block_indices, placement, key.shape[1])

    def by_tiles():
        sizes = choose_sizes(SELECTED_FORWARD, shape)
        tokens = tokens_of(sizes.rows, shape.heads)
        lists = union_lists(block_indices, placement, key.shape[1], tokens=tokens)
        return forward.attend_selected(
            query, key, value, lists, visible, placement.config, scale,
            one_block=placement.tile_in_one_block(tokens), sizes=sizes,
            slots=forward.Slots(block_indices, placement.sequence_start) if weigh else None,
        )  # fmt: skip

    def in_parts(sizes):
        arrays = query, key, value, block_indices, placement, visible
        return attend_in_parts(*arrays, scale=scale, sizes=sizes, weigh=weigh)

    sizes = find_sizes(OUTPUT_PARTS, shape)
    return _either(sizes, key.shape[1], block_indices, placement, in_parts, by_tiles)


def selected_gradients(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    block_indices: Int32[Array, "B T K R"],
    placement: Placement,
    given: Backward,
    *,
    scale: float,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K V"], Float[Array, "B T N"]]:
    """Gradients of query, key, value and weight where the cotangent of the output is `weight * d_out`.

    Arguments as in `attend_selected` and `ranges.range_gradients`.
    """
    shape = shape_of(query, key, value, block_size=placement.config.selection_block_size)
    visible = visible_in_blocks(block_indices, placement, key.shape[1])

    def by_tiles():
        sizes = choose_sizes(SELECTED_QUERY_GRADIENT, shape)
        tokens = tokens_of(sizes.rows, shape.heads)
        lists = union_lists(block_indices, placement, key.shape[1], tokens=tokens)
        d_query, products, delta = selected_query_gradient(
            query, key, value, lists, visible, placement.config, given, scale=scale,
            one_block=placement.tile_in_one_block(tokens), sizes=sizes,
        )  # fmt: skip
        d_keys = selected_key_gradients(
            query, key, value, block_indices, placement, visible, given, delta, scale=scale
        )
        return d_query, *d_keys, products

    def in_parts(sizes):
        arrays = query, key, value, block_indices, placement, visible, given
        return gradients_in_parts(*arrays, scale=scale, sizes=sizes)

    # Where the queries are cut too, most blocks have several items, whose partial sums take the more memory.
    cut = chunks_of(query, block_indices, query.shape[3]).ranges > 1
    sizes = None if cut else find_sizes(GRADIENT_PARTS, shape)
    return _either(sizes, key.shape[1], block_indices, placement, in_parts, by_tiles)


def _either[T](
    sizes: SelectedPartSizes | None,
    num_keys: int,
    block_indices: Int32[Array, "B T K R"],
    placement: Placement,
    in_parts: Callable[[SelectedPartSizes], T],
    by_tiles: Callable[[], T],
) -> T:
    """One of the two ways: by what is known while tracing, and else by what neighbours share."""
    if (
        sizes is None
        or num_keys < sizes.fewest_keys
        or placement.config.selection_block_size != BLOCK
        or not FEWEST_PAIRS <= block_indices.size < 2**31
    ):
        return by_tiles()
    if sizes.most_shared >= NEIGHBOURS or block_indices.size <= sizes.unasked:
        return in_parts(sizes)
    few = shares_less(block_indices, NEIGHBOURS, sizes.most_shared)
    return jax.lax.cond(few, lambda: in_parts(sizes), by_tiles)
