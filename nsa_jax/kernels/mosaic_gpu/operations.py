"""Triton's operations; their gradients, and the forward of the compressed branch, come from Pallas.

This is what `implementation="mosaic_gpu"` means: of each kernel the faster one, and all else is Triton's. The
lists of blocks are Triton kernels, and so is what computes results again that are not finite. Forward passes
of the selected branch and the window in Pallas were slower than Triton's, see `docs/kernel_log.md`.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from nsa_jax.array_typing import Array, Float, Int, Int32
from nsa_jax.kernels.mosaic_gpu import sizes
from nsa_jax.kernels.mosaic_gpu.gradients_in_parts import can_form_parts, gradients_in_parts, shares_little
from nsa_jax.kernels.mosaic_gpu.key_arrays import KeyArrays
from nsa_jax.kernels.mosaic_gpu.query_gradient import query_gradient
from nsa_jax.kernels.mosaic_gpu.range_forward import range_forward
from nsa_jax.kernels.mosaic_gpu.range_key_gradients import KEYS, range_key_gradients
from nsa_jax.kernels.mosaic_gpu.range_visits import RangeVisits
from nsa_jax.kernels.mosaic_gpu.selected_key_gradients import selected_key_gradients
from nsa_jax.kernels.mosaic_gpu.support import FEWEST_HEADS
from nsa_jax.kernels.mosaic_gpu.tiles import whole_tiles
from nsa_jax.kernels.mosaic_gpu.unstable import best_form, drops_varying_axes
from nsa_jax.kernels.mosaic_gpu.visits import VisitLists, visit_lists
from nsa_jax.kernels.triton import operations
from nsa_jax.kernels.triton.backward import Backward, BranchGradients
from nsa_jax.kernels.triton.operations import (
    block_probabilities,
    block_scores,
    compressed_attention,
    decode_step,
    dense_decode_step,
    gated_sum,
    select_blocks,
    select_by_index,
    selected_probabilities,
    top_blocks,
    window_attention,
)
from nsa_jax.kernels.triton.ranges import KeyRanges
from nsa_jax.kernels.triton.ranges import attend_ranges as attend_by_triton
from nsa_jax.kernels.triton.ranges import range_gradients as ranges_by_triton
from nsa_jax.kernels.triton.ranges.backward_key import choose_segments
from nsa_jax.kernels.triton.ranges.backward_key import range_key_gradients as key_gradients_by_triton
from nsa_jax.kernels.triton.ranges.sum_segments import add_segments
from nsa_jax.kernels.triton.repaired import BranchKernels
from nsa_jax.kernels.triton.selected.backward_key import join_items
from nsa_jax.kernels.triton.selected.items import invert
from nsa_jax.kernels.triton.selected.unions import last_rows, union_lists
from nsa_jax.kernels.triton.sizes.selected import fitting_item
from nsa_jax.layout import Placement

ITEM_QUERIES = 2048  # most queries of an item; half of that in short rows

__all__ = (
    "block_probabilities",
    "block_scores",
    "compressed_attention",
    "decode_step",
    "dense_decode_step",
    "gated_sum",
    "native_sparse_attention",
    "select_blocks",
    "select_by_index",
    "selected_attention",
    "selected_probabilities",
    "top_blocks",
    "window_attention",
)


@drops_varying_axes
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
    """As `triton.selected.selected_gradients`."""
    arrays = query, key, value, block_indices, placement, given
    more = dict(scale=scale, **_known(placement))

    def by_kernels():
        return _gradients_by_kernels(*arrays, **more)

    if can_form_parts(query, value, block_indices, placement):
        tokens = sizes.tile_tokens(query.shape[2] // key.shape[2]) // sizes.CONSUMERS
        few = shares_little(block_indices, tokens)
        found = jax.lax.cond(few, lambda: gradients_in_parts(*arrays, **more), by_kernels)
    else:
        found = by_kernels()
    return BranchGradients(*found)


def _gradients_by_kernels(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    block_indices: Int32[Array, "B T K R"],
    placement: Placement,
    given: Backward,
    *,
    scale: float,
    **known: Any,
) -> tuple[Array, Array, Array, Array, Array]:
    """`(d_query, d_key, d_value, products, delta)`, by a kernel for the queries and one for the keys."""
    tokens = sizes.tile_tokens(query.shape[2] // key.shape[2])
    tile = sizes.gradient_sizes(query.shape[3], value.shape[3], known["block_size"], aligned=known["aligned"])
    num_keys, last_keys = key.shape[1], last_rows(placement)
    lists = _visit_lists(block_indices, placement, num_keys, tokens, tile)
    d_query, products, delta = query_gradient(
        query, key, value, lists, last_keys, given, branch="selected", scale=scale,
        one_block=placement.tile_in_one_block(tokens), **known,
    )  # fmt: skip
    item = fitting_item(ITEM_QUERIES, block_indices.size, least=ITEM_QUERIES // 2)
    items = invert(block_indices, placement, num_keys, item=item)
    arrays = KeyArrays.of(query, key, value, given, delta, aligned=known["aligned"])
    sums = selected_key_gradients(arrays, items, last_keys, scale=scale, **known)
    return d_query, *join_items(items, *sums), products, delta


@drops_varying_axes
def attend_ranges(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    ranges: KeyRanges,
    *,
    scale: float,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """As `triton.ranges.attend_ranges`; the compressed branch of long rows in Pallas."""
    fits = ranges.edges.branch == "compressed" and (key.shape[3], value.shape[3]) == sizes.RANGE_DIMS
    fits = fits and scale > 0  # the kernel takes the largest product for the largest logit
    if not fits or not _takes_ranges(query, key, ranges, sizes.FEWEST_FORWARD_KEYS):
        return attend_by_triton(query, key, value, ranges, scale=scale)
    return range_forward(query, key, value, ranges.edges, ranges.end - 1, scale=scale, form=best_form())


@drops_varying_axes
def range_gradients(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    ranges: KeyRanges,
    given: Backward,
    *,
    scale: float,
) -> BranchGradients:
    """As `triton.ranges.range_gradients`."""
    if not _takes_ranges(query, key, ranges, sizes.MOST_KEYS):
        return ranges_by_triton(query, key, value, ranges, given, scale=scale)
    return ranges_by_triton(
        query, key, value, ranges, given, scale=scale,
        query_gradient=_range_query_gradient, key_gradients=_range_key_gradients,
    )  # fmt: skip


def _takes_ranges(query: Array, key: Array, ranges: KeyRanges, fewest_keys: int) -> bool:
    """Whether the kernels of ranges are faster than Triton's.

    They are where a row is one sequence, not too short, and a KV head has `FEWEST_HEADS` query heads or more.
    """
    fits = ranges.edges.first_position == 0 and key.shape[1] >= fewest_keys
    return fits and query.shape[2] >= FEWEST_HEADS * key.shape[2]


def _range_query_gradient(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    ranges: KeyRanges,
    given: Backward,
    *,
    scale: float,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"], Float[Array, "B T N"]]:
    tokens = sizes.tile_tokens(query.shape[2] // key.shape[2])
    visits = RangeVisits(ranges.edges, query.shape[1], key.shape[1], tokens, sizes.MOST_KEYS)
    return query_gradient(
        query, key, value, visits, ranges.end - 1, given, branch=ranges.edges.branch, scale=scale,
        block_size=sizes.MOST_KEYS, form=best_form(),
        first_keys=None if ranges.edges.window is None else ranges.start,
    )  # fmt: skip


def _range_key_gradients(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    ranges: KeyRanges,
    given: Backward,
    delta: Float[Array, "B T N"],
    *,
    scale: float,
) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K V"]]:
    batch, num_queries, num_heads, key_dim = query.shape
    num_keys, num_kv_heads, value_dim = value.shape[1:]
    heads, dims = num_heads // num_kv_heads, key_dim + value_dim
    if (key_dim, value_dim) != sizes.RANGE_DIMS:
        return key_gradients_by_triton(query, key, value, ranges, given, delta, scale=scale)
    arrays = KeyArrays.of(query, key, value, given, delta, aligned=True)
    segments = choose_segments(batch, num_queries, num_keys, num_kv_heads, heads, dims, KEYS)
    part_key, part_value, steps = range_key_gradients(
        arrays, ranges.edges, segments=segments, scale=scale, form=best_form()
    )
    if segments == 1:
        d_key, d_value = part_key[0], part_value[0]
    else:
        keys, values = whole_tiles(key), whole_tiles(value)
        d_key, d_value = add_segments(keys, values, part_key, part_value, steps, keys=KEYS)
    return d_key[:, :num_keys], d_value[:, :num_keys]


def _known(placement: Placement) -> dict[str, Any]:
    """What all kernels know of a call beside its arrays."""
    size = placement.config.selection_block_size
    return dict(block_size=size, form=best_form(), aligned=not placement.packed)


def _visit_lists(
    block_indices: Int[Array, "B T K R"],
    placement: Placement,
    num_keys: int,
    tokens: int,
    tile: sizes.StepSizes,
) -> VisitLists:
    """The lists of tiles of `tokens` queries, in steps of `tile.keys` keys."""
    steps = placement.config.selection_block_size // tile.keys
    if steps > 1:  # a block is several steps: as if the query had chosen smaller blocks
        parts = block_indices[..., None] * steps + jnp.arange(steps, dtype=jnp.int32)
        parts = jnp.where(block_indices[..., None] >= 0, parts, -1)
        block_indices = parts.reshape(*block_indices.shape[:3], -1)
    unions = union_lists(block_indices, placement, num_keys, tokens=tokens, block_size=tile.keys)
    return visit_lists(unions, tokens=tokens, warpgroups=sizes.CONSUMERS, longest_gap=tile.stages)


BY_MOSAIC_GPU = BranchKernels(attend_ranges, range_gradients, selected_gradients)
selected_attention = partial(operations.selected_attention, by=BY_MOSAIC_GPU)
native_sparse_attention = partial(operations.native_sparse_attention, by=BY_MOSAIC_GPU)
