"""Selected attention (Eq. 12): merges the blocks that neighbouring queries chose, then loops over them."""

from nsa_jax.array_typing import Array, Float, Int32
from nsa_jax.kernels.triton.backward import Backward
from nsa_jax.kernels.triton.dims import tokens_of
from nsa_jax.kernels.triton.gpu import shape_of
from nsa_jax.kernels.triton.nonfinite import visible_in_blocks
from nsa_jax.kernels.triton.selected import forward
from nsa_jax.kernels.triton.selected.backward_key import selected_key_gradients
from nsa_jax.kernels.triton.selected.backward_query import selected_query_gradient
from nsa_jax.kernels.triton.selected.unions import union_lists
from nsa_jax.kernels.triton.sizes import (
    SELECTED_FORWARD,
    SELECTED_QUERY_GRADIENT,
    choose_sizes,
)
from nsa_jax.layout import Placement


def attend_selected(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    block_indices: Int32[Array, "B T K R"],
    placement: Placement,
    *,
    scale: float,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Attends to the keys of each query's blocks, up to the query itself; returns `(out, lse)`."""
    shape = shape_of(query, key, value, block_size=placement.config.selection_block_size)
    sizes = choose_sizes(SELECTED_FORWARD, shape)
    tokens = tokens_of(sizes.rows, shape.heads)
    lists = union_lists(block_indices, placement, key.shape[1], tokens=tokens)
    visible = visible_in_blocks(block_indices, placement, key.shape[1])
    one_block = placement.tile_in_one_block(tokens)
    return forward.attend_selected(
        query, key, value, lists, visible, placement.config, scale, one_block=one_block, sizes=sizes
    )


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
    sizes = choose_sizes(SELECTED_QUERY_GRADIENT, shape)
    tokens = tokens_of(sizes.rows, shape.heads)
    lists = union_lists(block_indices, placement, key.shape[1], tokens=tokens)
    visible = visible_in_blocks(block_indices, placement, key.shape[1])
    d_query, products, delta = selected_query_gradient(
        query, key, value, lists, visible, placement.config, given, scale=scale,
        one_block=placement.tile_in_one_block(tokens), sizes=sizes,
    )  # fmt: skip
    d_keys = selected_key_gradients(
        query, key, value, block_indices, placement, visible, given, delta, scale=scale
    )
    return d_query, *d_keys, products
