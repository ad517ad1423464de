"""Attention over selected blocks: lists of the blocks of neighbouring queries, and kernels that walk them."""

from nsa_jax import layout
from nsa_jax.array_typing import Array, Float, Int32
from nsa_jax.config import NSAConfig
from nsa_jax.kernels.triton import block_forward
from nsa_jax.kernels.triton.block_backward_key import block_key_gradients
from nsa_jax.kernels.triton.block_backward_query import QuerySizes, block_query_gradient
from nsa_jax.kernels.triton.block_lists import union_lists
from nsa_jax.kernels.triton.dims import tokens_of
from nsa_jax.kernels.triton.gpu import target


def attend_blocks(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    block_indices: Int32[Array, "B T K R"],
    placed: layout.QueryLayout,
    *,
    config: NSAConfig,
    scale: float,
    first_position: int | None = None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """`(out, lse)` of each query over the keys of its blocks up to its own.

    `first_position` is that of the first query, where the queries are neighbours in one sequence that begins
    at key 0, and None where that is not known.
    """
    heads = query.shape[2] // key.shape[2]
    sizes = block_forward.ForwardSizes.choose(heads, *_dims(query, value, config), target())
    lists = union_lists(block_indices, placed, config, key.shape[1], tokens=tokens_of(sizes.rows, heads))
    return block_forward.attend_blocks(
        query, key, value, lists, config, scale, first_position=first_position, sizes=sizes
    )


def block_gradients(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    block_indices: Int32[Array, "B T K R"],
    placed: layout.QueryLayout,
    out: Float[Array, "B T N V"],
    lse: Float[Array, "B T N"],
    d_out: Float[Array, "B T N V"],
    d_lse: Float[Array, "B T N"] | None,
    *,
    weight: Float[Array, "B T N"] | None,
    previous: Float[Array, "B T N H"] | None,
    config: NSAConfig,
    scale: float,
    packed: bool,
    first_position: int | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K V"], Float[Array, "B T N"]]:
    """Gradients of query, key, value and weight where the cotangent of the output is `weight * d_out`.

    Arguments as in `attend_blocks` and `range_attention.range_gradients`; `packed` says whether a row may
    hold several sequences.
    """
    heads = query.shape[2] // key.shape[2]
    sizes = QuerySizes.choose(heads, *_dims(query, value, config), target())
    lists = union_lists(block_indices, placed, config, key.shape[1], tokens=tokens_of(sizes.rows, heads))
    d_query, products, delta = block_query_gradient(
        query, key, value, lists, config, out, lse, d_out, d_lse, weight, previous, scale,
        first_position=first_position, sizes=sizes,
    )  # fmt: skip
    d_keys = block_key_gradients(
        query, key, value, block_indices, placed, config, lse, delta, d_out, weight, scale, packed=packed
    )
    return d_query, *d_keys, products


def _dims(query, value, config: NSAConfig) -> tuple[int, int, int, int]:
    return query.shape[-1], value.shape[-1], query.dtype.itemsize, config.selection_block_size
