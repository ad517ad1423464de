"""Attention of each query over a range of keys, or over chosen blocks in it: one branch, or all three.

The outer loop goes over chunks of queries. The inner loop goes over only those tiles of keys that at least
one query of the chunk can see, with an online softmax; it is left out if one tile holds them all. So the
memory is one `[chunk, tile]` block of logits per head, and the work is in proportion to the ranges. The
backward pass repeats the loops with the saved normaliser and adds `dk, dv` tile by tile, in a fixed order.
Branches in one loop share the work that concerns only the queries, and their program compiles faster.
"""

import itertools
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from nsa_jax import layout
from nsa_jax.array_typing import Array, Float, Int, Int32
from nsa_jax.kernels.xla import chunks as cutting
from nsa_jax.kernels.xla.chunks import ChunkPlaces, Look, TileSizes, zeros_beside
from nsa_jax.kernels.xla.masked import (
    CAREFUL_TILE,
    Partial,
    Rows,
    are_few,
    attend_few,
    attend_tile,
    merged,
    no_keys,
    normalised,
    tile_gradients,
)
from nsa_jax.kernels.xla.selection import choose_blocks
from nsa_jax.kernels.xla.sizes import Sizes
from nsa_jax.layout import Placement
from nsa_jax.layout.quantised import check_differentiable

type BranchName = Literal["cmp", "slc", "win"]
type KeysValues = tuple[Float[Array, "B S K H"], Float[Array, "B S K V"]]


class Branch(NamedTuple):
    """A branch of a call. All of it is static.

    Attributes:
      name: says which keys the queries see.
      sizes: sizes of the tiles of keys.
    """

    name: BranchName
    sizes: TileSizes


class Plan(NamedTuple):
    """What a call computes. All of it is static.

    Attributes:
      branches: branches in the order of the keys and values. After "cmp", "slc" may choose its own blocks.
      tokens: number of queries in a chunk.
      scale: factor of the logits.
    """

    branches: tuple[Branch, ...]
    tokens: int
    scale: float

    @classmethod
    def of(
        cls, names: tuple[BranchName, ...], keys: tuple[Array, ...], num_queries: int, placement: Placement,
        scale: float, sizes: Sizes,
    ) -> "Plan":  # fmt: skip
        """Makes the plan of a call with these branches and keys."""
        tokens = min(sizes.query_chunk, num_queries)
        lengths = [key.shape[1] for key in keys]
        neighbours = placement.run_lengths and all(n % tokens == 0 for n in placement.run_lengths[:-1])
        span = placement.config.window_size + tokens - 1 if neighbours else max(lengths)
        # Early chunks see few of the compressed keys. A loop over tiles leaves out the others.
        at_once = {"cmp": sizes.one_tile + 1, "slc": max(lengths), "win": span}
        of_branches = [
            TileSizes.choose(num_queries, n, at_once[name], sizes)
            for name, n in zip(names, lengths, strict=True)
        ]
        if not placement.rows_alike:  # the union over all rows may be larger: a loop, mostly of one iteration
            of_branches = [x._replace(one=x.tile == n) for x, n in zip(of_branches, lengths, strict=True)]
        return cls(tuple(map(Branch, names, of_branches)), tokens, scale)


class _Saved(NamedTuple):
    """What the backward pass needs of the branches, by the rows of each chunk."""

    out: tuple[Float[Array, "chunks B K rows V"], ...]
    lse: Float[Array, "chunks branches B K rows"]


class _Chunk(NamedTuple):
    """What the backward pass knows of each chunk; None for what a call does not have.

    Attributes:
      query: rows of the queries.
      places: where the tokens stand.
      blocks: selected blocks of each token.
      saved: what the forward pass saved.
      gates: weights of the branches in the output.
      d_out: cotangent of the output: of the gated sum, or of the only branch.
      d_lse: cotangent of the log-sum-exps of the only branch.
    """

    query: Float[Array, "chunks B K rows H"]
    places: ChunkPlaces
    blocks: Int32[Array, "chunks B tokens K R"] | None
    saved: _Saved
    gates: Float[Array, "chunks branches B K rows"] | None
    d_out: Float[Array, "chunks B K rows V"]
    d_lse: Float[Array, "chunks B K rows 1"] | None


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def attend_branch(
    query: Float[Array, "B T N H"],
    keys_values: KeysValues,
    block_indices: Int[Array, "B T K R"] | None,
    placement: Placement,
    plan: Plan,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """`(out, lse)` of one branch. `block_indices` are needed by the selected branch only."""
    return _branch_forward(query, keys_values, block_indices, placement, plan)[0]


def _branch_forward(query, keys_values, block_indices, placement, plan):
    num_queries, num_heads = query.shape[1:3]
    saved, _ = _attend(query, (keys_values,), block_indices, placement, plan)
    out = cutting.join_rows(saved.out[0], num_queries, num_heads)
    lse = cutting.join_rows(saved.lse[:, 0, ..., None], num_queries, num_heads)[..., 0]
    return (out, lse), (query, keys_values, block_indices, placement, saved)


def _branch_backward(plan, residuals, cotangents):
    query, keys_values, block_indices, placement, saved = residuals
    d_out, d_lse = cotangents
    d_query, (gradients,), _ = _differentiate(
        query, (keys_values,), block_indices, placement, saved, None, d_out, d_lse, plan
    )
    return d_query, gradients, None, None


attend_branch.defvjp(_branch_forward, _branch_backward)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def attend_all(
    query: Float[Array, "B T N H"],
    keys_values: tuple[KeysValues, KeysValues, KeysValues],
    gates: Float[Array, "B T N 3"],
    block_indices: Int[Array, "B T K R"] | None,
    placement: Placement,
    plan: Plan,
) -> Float[Array, "B T N V"]:
    """The gated sum of the three branches. If `block_indices` is None, it chooses the blocks."""
    return _all_forward(query, keys_values, gates, block_indices, placement, plan)[0]


def _all_forward(query, keys_values, gates, block_indices, placement, plan):
    saved, blocks = _attend(query, keys_values, block_indices, placement, plan)
    weights = _rows_of_gates(gates, keys_values[0][0].shape[2], plan).astype(saved.lse.dtype)
    cmp, slc, win = (weights[:, i, ..., None] * x.astype(weights.dtype) for i, x in enumerate(saved.out))
    out = (cmp + slc + win).astype(query.dtype)
    out = cutting.join_rows(out, *query.shape[1:3])
    return out, (query, keys_values, gates, blocks, placement, saved)


def _all_backward(plan, residuals, d_out):
    query, keys_values, gates, blocks, placement, saved = residuals
    blocks = cutting.join_tokens(blocks, query.shape[1])
    d_query, gradients, d_gates = _differentiate(
        query, keys_values, blocks, placement, saved, gates, d_out, None, plan
    )
    return d_query, gradients, d_gates.astype(gates.dtype), None, None


attend_all.defvjp(_all_forward, _all_backward)


def _rows_of_gates(gates, num_kv_heads: int, plan: Plan) -> Float[Array, "chunks 3 B K rows"]:
    rows = (cutting.split_rows(gates[..., i, None], num_kv_heads, plan.tokens)[..., 0] for i in range(3))
    return jnp.stack(tuple(rows), axis=1)


def _attend(query, keys_values, block_indices, placement, plan):
    """What the branches save, and the chosen blocks, both by chunks."""

    def attend_chunk(inputs):
        rows, places, blocks = inputs
        here = places.placement(placement, plan.tokens)
        outs: list[Array] = []
        lses: list[Array] = []
        for branch, (key, value) in zip(plan.branches, keys_values, strict=True):
            if branch.name == "slc" and blocks is None:
                fixed = jax.lax.stop_gradient((rows, keys_values[0][0], lses[0]))
                blocks = choose_blocks(*fixed, here, plan.scale, plan.branches[0].sizes)
            look = _look(branch, here, blocks, places, key.shape[1])
            out, lse = _attend_chunk(rows, look, key, value, branch, plan, placement)
            outs, lses = [*outs, out], [*lses, lse]
        return _Saved(tuple(outs), jnp.stack(lses)), blocks

    num_kv_heads = keys_values[0][0].shape[2]
    inputs = (
        cutting.split_rows(query, num_kv_heads, plan.tokens),
        ChunkPlaces.of(placement, plan.tokens),
        None if block_indices is None else cutting.split_tokens(block_indices, plan.tokens, fill=-1),
    )
    return cutting.over_chunks(attend_chunk, inputs)


def _attend_chunk(rows, look, key, value, branch, plan, placement):
    """`(out, lse)` of one branch in one chunk, by row."""
    heads, num_keys = rows.shape[2] // plan.tokens, key.shape[1]
    block_size = placement.config.selection_block_size

    def add_up(attend, sizes, wanted=None):
        def attend_keys(first, sums):
            visible, (k, v) = look.read(first, sizes, block_size, rows.dtype, key, value)
            part = attend(rows, k, v, cutting.of_rows(visible, heads), plan.scale)
            return part if sums is None else merged(sums, part)

        sums = None if sizes.one else no_keys(rows, value.shape[-1])
        return cutting.fold_tiles(look, sizes, num_keys, attend_keys, sums, wanted)

    if num_keys > 0 and are_few(rows):
        sums = add_up(attend_few, branch.sizes)
        # Hidden keys or values that are not finite spoil these sums. That is rare; attend again, with care.
        clean = jnp.isfinite(sums.total) & jnp.isfinite(sums.out).all(axis=-1)
        again = add_up(attend_tile, TileSizes(min(CAREFUL_TILE, num_keys), False), ~clean.all())
        sums = Partial(
            jnp.where(clean, sums.largest, again.largest),
            jnp.where(clean, sums.total, again.total),
            jnp.where(clean[..., None], sums.out, again.out),
        )
    else:
        sums = add_up(attend_tile, branch.sizes)
    out, lse = normalised(sums)
    return out.astype(rows.dtype), lse


def _differentiate(query, keys_values, block_indices, placement, saved, gates, d_out, d_lse, plan):
    """Gradients of the query, of the keys and values of each branch, and of the gates.

    With `gates`, `d_out` is the cotangent of the gated sum, otherwise of the output of the only branch.
    """
    check_differentiable(*itertools.chain(*keys_values))
    num_queries, num_heads = query.shape[1:3]
    num_kv_heads = keys_values[0][0].shape[2]
    accumulate = saved.lse.dtype

    def split(x):
        return None if x is None else cutting.split_rows(x, num_kv_heads, plan.tokens)

    def differentiate_chunk(totals, chunk):
        here = chunk.places.placement(placement, plan.tokens)
        known, products = _rows_and_products(chunk, accumulate)
        d_query = zeros_beside(chunk.query, chunk.query.shape, accumulate)
        new_totals = []
        for i, branch in enumerate(plan.branches):
            key, value = keys_values[i]
            gate = None if chunk.gates is None else chunk.gates[i]
            rows = known._replace(normaliser=known.normaliser[i], delta=known.delta[i], gate=gate)
            look = _look(branch, here, chunk.blocks, chunk.places, key.shape[1])
            carry = (d_query, *totals[i])
            d_query, *d_key_value = _differentiate_chunk(
                rows, look, key, value, carry, branch, plan, placement
            )
            new_totals.append(tuple(d_key_value))
        return tuple(new_totals), (d_query.astype(query.dtype), products)

    inputs = _Chunk(
        query=split(query),
        places=ChunkPlaces.of(placement, plan.tokens),
        blocks=None if block_indices is None else cutting.split_tokens(block_indices, plan.tokens, fill=-1),
        saved=saved,
        gates=None if gates is None else _rows_of_gates(gates, num_kv_heads, plan).astype(accumulate),
        d_out=split(d_out),
        d_lse=split(None if d_lse is None else d_lse[..., None]),
    )
    totals = jax.tree.map(lambda x: zeros_beside(x, x.shape, accumulate), keys_values)
    totals, (d_query, products) = cutting.fold_chunks(differentiate_chunk, totals, inputs)
    gradients = jax.tree.map(lambda total, x: total.astype(x.dtype), totals, keys_values)
    d_gates = jnp.moveaxis(products, 1, -1)  # [chunks, B, K, rows, branches]
    d_gates = cutting.join_rows(d_gates, num_queries, num_heads)
    return cutting.join_rows(d_query, num_queries, num_heads), gradients, d_gates


def _rows_and_products(chunk: _Chunk, accumulate) -> tuple[Rows, Float[Array, "branches B K rows"]]:
    """The backward pass's `Rows` of all branches, and `sum(out * d_out)`, the gradients of the gates."""
    outs, lse = chunk.saved
    d_out = chunk.d_out.astype(accumulate)
    seen = lse != -jnp.inf
    products = jnp.stack([(out.astype(accumulate) * d_out).sum(axis=-1) for out in outs])
    products = jnp.where(seen, products, 0)
    delta = products if chunk.gates is None else products * chunk.gates
    if chunk.d_lse is not None:
        delta = jnp.where(seen, delta - chunk.d_lse[None, ..., 0], 0)
    return Rows.of(chunk.query, chunk.d_out, jnp.where(seen, lse, 0), delta), products


def _differentiate_chunk(rows, look, key, value, carry, branch, plan, placement):
    """Adds the contributions of one branch in one chunk to `(d_query, d_key, d_value)`."""
    heads = rows.query.shape[2] // plan.tokens
    block_size = placement.config.selection_block_size

    def differentiate_keys(first, carry):
        d_query, d_keys, d_values = carry
        visible, (k, v) = look.read(first, branch.sizes, block_size, rows.query.dtype, key, value)
        part, d_k, d_v = tile_gradients(rows, k, v, cutting.of_rows(visible, heads), plan.scale)
        d_keys = cutting.add_tile(d_keys, first, d_k, axis=1)
        return d_query + part, d_keys, cutting.add_tile(d_values, first, d_v, axis=1)

    return cutting.fold_tiles(look, branch.sizes, key.shape[1], differentiate_keys, carry)


def _look(branch: Branch, here: Placement, blocks: Array | None, places: ChunkPlaces, num_keys: int) -> Look:
    """Which keys the queries of a chunk see in one branch."""
    ascending = places.first is not None and here.rows_alike
    if branch.name == "cmp":
        return Look(*here.compression_range(num_keys), ascending=ascending)
    if branch.name == "win":
        return Look(*here.window_range(num_keys), ascending=ascending)
    assert blocks is not None
    start, end = here.selection_start(), here.selection_end(num_keys)
    numbers = jnp.arange(layout.num_selection_blocks(num_keys, here.config), dtype=jnp.int32)
    chosen = (blocks[..., None] == numbers[None, None, None, None]).any(axis=3)
    plain = not here.packed and here.first_keys.slc.known == 0
    return Look(
        jnp.minimum(jnp.maximum(start, 0), end), end, chosen, None if plain else start, ascending=ascending
    )
