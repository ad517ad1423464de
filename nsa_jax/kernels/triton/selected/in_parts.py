"""The selected branch with key blocks outside, for few query heads a KV head.

A tile of neighbouring queries needs 64 rows to be worth its products. With few query heads a KV head these
are of many tokens, and where neighbours choose different blocks, most of the tile is masked in each. A tile
of the rows that chose a block has no such work. But each query then gets its result in R parts, which go
through memory. So where neighbours share their blocks, the kernels with queries outside are faster. Where
both were started, chunks without items leave what these wrote as it is.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from nsa_jax.array_typing import Array, Bool, Float, Int, Int32
from nsa_jax.kernels.triton.backward import Backward
from nsa_jax.kernels.triton.launch import like
from nsa_jax.kernels.triton.selected.chunks import PART_BYTES, Chunks
from nsa_jax.kernels.triton.selected.forward_parts import output_parts
from nsa_jax.kernels.triton.selected.gradient_parts import gradient_parts
from nsa_jax.kernels.triton.selected.items import BlockItems, invert
from nsa_jax.kernels.triton.selected.sum_output_parts import add_output_parts
from nsa_jax.kernels.triton.selected.sum_query_parts import add_query_parts
from nsa_jax.kernels.triton.selected.undefined import undefined
from nsa_jax.kernels.triton.selected.unions import last_rows
from nsa_jax.kernels.triton.sizes.selected import SelectedPartSizes
from nsa_jax.layout import Placement


def chunks_of(
    query: Float[Array, "B T N H"],
    block_indices: Int[Array, "B T K R"],
    dim: int,
) -> Chunks:
    """The chunks of parts that have `dim` numbers a row: at most `PART_BYTES` each.

    Where the parts of one KV head take more than that, a chunk has up to twice as much: a head that is cut
    into ranges of queries has no gradients in parts (`cuts_queries`).
    """
    slots, heads = block_indices.shape[3], query.shape[2] // block_indices.shape[2]
    of_query = query.dtype.itemsize * slots * heads * dim
    of_head = query.shape[1] * of_query
    return Chunks.of(block_indices, of_query, max(PART_BYTES, min(of_head, 2 * PART_BYTES)))


def cuts_queries(query: Float[Array, "B T N H"], block_indices: Int[Array, "B T K R"]) -> bool:
    """Whether chunks of gradients are ranges of queries, not whole KV heads."""
    return chunks_of(query, block_indices, query.shape[3]).ranges > 1


def attend_in_parts(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    block_indices: Int32[Array, "B T K R"],
    placement: Placement,
    written: tuple[Array, ...] | None,
    few: Bool[Array, ""] | None,
    *,
    scale: float,
    sizes: SelectedPartSizes,
    with_probabilities: bool = False,
) -> tuple[Array, ...]:
    """What `forward.attend_selected` returns, with the probabilities of the slots if `with_probabilities`.

    Args:
      query, key, value, block_indices, placement, scale: see `nsa_jax.selected_attention`.
      written: what other kernels wrote, to be written over; None without them.
      few: whether it is written over; None for yes.
      sizes: tile sizes.
      with_probabilities: whether the probabilities are asked for.
    """
    slots, chunks = block_indices.shape[3], chunks_of(query, block_indices, value.shape[3])
    items = invert(
        block_indices, placement, key.shape[1],
        item=sizes.item, range_queries=chunks.queries, chunk_heads=chunks.heads,
    )  # fmt: skip
    table = _table(chunks, items, few)

    def chunk(number, results):
        parts, part_lse = output_parts(
            query, key, value, items, last_rows(placement), chunks, table[number],
            block_size=placement.config.selection_block_size, slots=slots, scale=scale, sizes=sizes,
        )  # fmt: skip
        return add_output_parts(results, parts, part_lse, table[number], block_indices, placement)

    if written is None:
        shapes = (
            like(query, (*query.shape[:3], value.shape[3])), like(query, query.shape[:3], "float32"),
            like(block_indices, dtype="float32"),
        )[: 3 if with_probabilities else 2]  # fmt: skip
        written = undefined(*shapes, after=table, vary_as=(query, key, value, placement))
    return _over_chunks(chunks, chunk, written)


def gradients_in_parts(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    block_indices: Int32[Array, "B T K R"],
    placement: Placement,
    items: BlockItems,
    chunks: Chunks,
    given: Backward,
    delta: Float[Array, "B T N"],
    written: tuple[Array, ...] | None,
    few: Bool[Array, ""] | None,
    *,
    scale: float,
    sizes: SelectedPartSizes,
) -> tuple[Array, ...]:
    """The gradient of the queries with `previous`, and the four sums that `backward_key.join_items` takes.

    Args:
      query, key, value, block_indices, placement, written, few, scale, sizes: see `attend_in_parts`.
      items: the queries of each block, with codes, in items of `sizes.item`.
      chunks: how the parts are cut.
      given, delta: see `backward_query.selected_query_gradient`.
    """
    slots, block_size = block_indices.shape[3], placement.config.selection_block_size
    table = _table(chunks, items, few)

    def chunk(number, results):
        d_query, *sums = results
        parts, sums = gradient_parts(
            query, key, value, items, last_rows(placement), given, delta, tuple(sums), chunks, table[number],
            block_size=block_size, slots=slots, scale=scale, sizes=sizes,
        )  # fmt: skip
        d_query = add_query_parts(d_query, parts, table[number], block_indices, placement, given.previous)
        return d_query, *sums

    if written is None:
        partials = max(items.num_partials, 1), block_size
        written = undefined(
            like(query), like(key, (*partials, key.shape[3]), "float32"),
            like(value, (*partials, value.shape[3]), "float32"), like(key), like(value),
            after=delta, vary_as=(query, key, value, table, placement, given),
        )  # fmt: skip
    return _over_chunks(chunks, chunk, written)


def _table(chunks: Chunks, items: BlockItems, few: Bool[Array, ""] | None) -> Int32[Array, "chunks 4"]:
    """`Chunks.table`; unless neighbours share few blocks, its chunks have no heads and no items."""
    table = chunks.table(items)
    if few is None:
        return table
    nothing = jnp.where(jnp.arange(table.shape[1]) == 0, items.slots.shape[0], 0)
    return jnp.where(few, table, nothing.astype(jnp.int32))


def _over_chunks[T](chunks: Chunks, chunk: Callable[..., T], carry: T) -> T:
    """Runs `chunk(number, carry)` for all chunks; the only one is not put into a loop."""
    return chunk(0, carry) if chunks.number == 1 else lax.fori_loop(0, chunks.number, chunk, carry)
