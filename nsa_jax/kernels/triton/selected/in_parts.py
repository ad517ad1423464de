"""The selected branch with key blocks outside, for few query heads a KV head.

A tile of neighbouring queries needs 64 rows to be worth its products. With few query heads a KV head these
are of many tokens, and where neighbours choose different blocks, most of the tile is masked in each. A tile
of the rows that chose a block has no such work. But each query then gets its result in R parts, which go
through memory. So where neighbours share their blocks, the kernels with queries outside are faster:
`shares_less` tells the cases apart while the program runs.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from nsa_jax.array_typing import Array, Float, Int, Int32
from nsa_jax.kernels.triton.backward import Backward
from nsa_jax.kernels.triton.nonfinite import (
    VisibleKeys,
    recompute_forward,
    recompute_key_gradients,
    recompute_query_gradient,
)
from nsa_jax.kernels.triton.selected.backward_key import join_items
from nsa_jax.kernels.triton.selected.chunks import PART_BYTES, Chunks
from nsa_jax.kernels.triton.selected.deltas import row_deltas
from nsa_jax.kernels.triton.selected.forward_parts import output_parts
from nsa_jax.kernels.triton.selected.gradient_parts import gradient_parts
from nsa_jax.kernels.triton.selected.items import invert
from nsa_jax.kernels.triton.selected.sum_output_parts import add_output_parts
from nsa_jax.kernels.triton.selected.sum_query_parts import add_query_parts
from nsa_jax.kernels.triton.selected.unions import last_rows
from nsa_jax.kernels.triton.sizes import SelectedPartSizes, fitting_item
from nsa_jax.layout import Placement
from nsa_jax.sharding.manual import vary, varying_axes


def chunks_of(
    query: Float[Array, "B T N H"],
    block_indices: Int[Array, "B T K R"],
    dim: int,
    most_bytes: int = PART_BYTES,
) -> Chunks:
    """The chunks of parts that have `dim` numbers a row."""
    slots, heads = block_indices.shape[3], query.shape[2] // block_indices.shape[2]
    return Chunks.of(block_indices, query.dtype.itemsize * slots * heads * dim, most_bytes)


def attend_in_parts(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    block_indices: Int32[Array, "B T K R"],
    placement: Placement,
    visible: VisibleKeys,
    *,
    scale: float,
    sizes: SelectedPartSizes,
    weigh: bool = False,
    most_bytes: int = PART_BYTES,
) -> tuple[Array, ...]:
    """`(out, lse)` as of `forward.attend_selected`; `most_bytes` bounds the parts of a chunk.

    With `weigh` also the probabilities of the slots, as there.
    """
    slots, chunks = block_indices.shape[3], chunks_of(query, block_indices, value.shape[3], most_bytes)
    items = invert(block_indices, placement, key.shape[1], item=sizes.item, range_queries=chunks.queries)
    table = chunks.table(items)

    def chunk(number, results):
        parts, part_lse = output_parts(
            query, key, value, items, last_rows(placement), chunks, table[number],
            block_size=placement.config.selection_block_size, slots=slots, scale=scale, sizes=sizes,
        )  # fmt: skip
        return add_output_parts(results, parts, part_lse, table[number], block_indices, placement)

    outputs: list[Any] = [((*query.shape[:3], value.shape[3]), query.dtype), (query.shape[:3], "float32")]
    if weigh:
        outputs.append((block_indices.shape, "float32"))
    results = _undefined(*outputs, like=(query, key, value, table, placement))
    out, lse, *probabilities = _over_chunks(chunks, chunk, results)
    return *recompute_forward(out, lse, query, key, value, visible, scale), *probabilities


def gradients_in_parts(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    block_indices: Int32[Array, "B T K R"],
    placement: Placement,
    visible: VisibleKeys,
    given: Backward,
    *,
    scale: float,
    sizes: SelectedPartSizes,
    most_bytes: int = PART_BYTES,
) -> tuple[Array, Array, Array, Array]:
    """`(d_query, d_key, d_value, products)` as of `selected.selected_gradients`."""
    slots, block_size = block_indices.shape[3], placement.config.selection_block_size
    chunks = chunks_of(query, block_indices, query.shape[3], most_bytes)
    sizes = sizes._replace(item=fitting_item(sizes.item, block_indices.size, least=512))
    items = invert(block_indices, placement, key.shape[1], item=sizes.item, range_queries=chunks.queries)
    table = chunks.table(items)
    products, delta = row_deltas(given)

    def chunk(number, results):
        d_query, *sums = results
        parts, sums = gradient_parts(
            query, key, value, items, last_rows(placement), given, delta, tuple(sums), chunks, table[number],
            block_size=block_size, slots=slots, scale=scale, sizes=sizes,
        )  # fmt: skip
        d_query = add_query_parts(d_query, parts, table[number], block_indices, placement, given.previous)
        return d_query, *sums

    partials = max(items.num_slots, 1), block_size
    results = _undefined(
        (query.shape, query.dtype), ((*partials, key.shape[3]), "float32"),
        ((*partials, value.shape[3]), "float32"), (key.shape, key.dtype), (value.shape, value.dtype),
        like=(query, key, value, table, placement, given),
    )  # fmt: skip
    d_query, *sums = _over_chunks(chunks, chunk, results)
    d_query = recompute_query_gradient(d_query, query, key, value, visible, given, delta, scale=scale)
    d_keys = join_items(items, *sums)
    d_keys = recompute_key_gradients(*d_keys, query, key, value, visible, given, delta, scale=scale)
    return d_query, *d_keys, products


def _undefined(*arrays: tuple[tuple[int, ...], Any], like: Any) -> tuple[Array, ...]:
    """Arrays that kernels will fill, by shape and dtype; under `shard_map` they vary as `like` does."""
    axes = frozenset[str]().union(*(varying_axes(x) for x in jax.tree.leaves(like)))
    return tuple(vary(lax.empty(shape, jnp.dtype(dtype)), axes) for shape, dtype in arrays)


def _over_chunks[T](chunks: Chunks, chunk: Callable[..., T], carry: T) -> T:
    """Runs `chunk(number, carry)` for all chunks; the only one is not put into a loop."""
    return chunk(0, carry) if chunks.number == 1 else lax.fori_loop(0, chunks.number, chunk, carry)
