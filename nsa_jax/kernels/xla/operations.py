"""The operations of `nsa_jax.attention` in plain JAX: in chunks, differentiable, on any platform.

Their arguments are those of `nsa_jax.dispatch.Operations`: already validated, with all defaults filled in,
and with a placement that says where the queries stand. `sizes` change only the speed.
"""

import functools
import operator
from functools import partial

import jax
import jax.numpy as jnp

from nsa_jax import layout
from nsa_jax.array_typing import Array, Attended, Float, Int, Int32
from nsa_jax.kernels.xla import chunks as cutting
from nsa_jax.kernels.xla.chunks import ChunkPlaces
from nsa_jax.kernels.xla.index_scores import ScorePlan, padded_keys, scores_of_blocks, scores_of_chunk
from nsa_jax.kernels.xla.masked import accumulator
from nsa_jax.kernels.xla.probabilities import selected_probabilities
from nsa_jax.kernels.xla.range_attention import BranchName, Plan, attend_all, attend_branch
from nsa_jax.kernels.xla.selected import NO_BLOCK, BlockLists, ItemSizes, block_attention
from nsa_jax.kernels.xla.selection import best_of_any, choose_blocks
from nsa_jax.kernels.xla.sizes import DEFAULT, Sizes
from nsa_jax.layout import Placement


@partial(jax.jit, static_argnames=("scale", "sizes"))
def compressed_attention(
    query: Float[Array, "B T N H"],
    key_cmp: Float[Array, "B C K H"],
    value_cmp: Float[Array, "B C K V"],
    placement: Placement,
    scale: float,
    *,
    sizes: Sizes = DEFAULT,
) -> Attended:
    """Attention over the visible compressed blocks (Eq. 7), one range of blocks for each query."""
    return _attend_branch("cmp", query, key_cmp, value_cmp, None, placement, scale, sizes)


@partial(jax.jit, static_argnames=("scale", "sizes"))
def window_attention(
    query: Float[Array, "B T N H"],
    key_win: Float[Array, "B W K H"],
    value_win: Float[Array, "B W K V"],
    placement: Placement,
    scale: float,
    *,
    sizes: Sizes = DEFAULT,
) -> Attended:
    """Attention over the last `w` tokens, the query's own included: one range of keys for each query."""
    return _attend_branch("win", query, key_win, value_win, None, placement, scale, sizes)


@partial(jax.jit, static_argnames=("scale", "sizes"))
def select_blocks(
    query: Float[Array, "B T N H"],
    key_cmp: Float[Array, "B C K H"],
    lse_cmp: Float[Array, "B T N"] | None,
    placement: Placement,
    scale: float,
    *,
    sizes: Sizes = DEFAULT,
) -> Int32[Array, "B T K R"]:
    """The blocks that each query attends (Eq. 8-11)."""
    if lse_cmp is None:
        lse_cmp = compressed_attention(query, key_cmp, key_cmp[..., :0], placement, scale, sizes=sizes).lse
    num_queries, num_kv_heads = query.shape[1], key_cmp.shape[2]
    tokens = min(sizes.query_chunk, num_queries)
    tiles = Plan.of(("cmp",), (key_cmp,), num_queries, placement, scale, sizes).branches[0].sizes

    def choose_chunk(inputs):
        rows, lse, places = inputs
        return choose_blocks(rows, key_cmp, lse[..., 0], places.placement(placement, tokens), scale, tiles)

    inputs = (
        cutting.split_rows(query, num_kv_heads, tokens),
        cutting.split_rows(lse_cmp[..., None], num_kv_heads, tokens),
        ChunkPlaces.of(placement, tokens),
    )
    return cutting.join_tokens(cutting.over_chunks(choose_chunk, inputs), num_queries)


@partial(jax.jit, static_argnames=("scale", "sizes"))
def block_scores(
    query_index: Float[Array, "B T K J E"],
    key_index: Float[Array, "B S I E"],
    weights: Float[Array, "B T K J"] | None,
    block_indices: Int32[Array, "B T K R"] | None,
    placement: Placement,
    scale: float,
    *,
    sizes: Sizes = DEFAULT,
) -> Float[Array, "B T K M"] | Float[Array, "B T K R"]:
    """The scores that an indexer gives to the blocks, or to those that are named."""
    plan = ScorePlan.of(query_index, key_index.shape[1], placement.config, scale, sizes)
    return scores_of_blocks(query_index, key_index, weights, block_indices, placement, plan)


@partial(jax.jit, static_argnames=("scale", "sizes"))
def select_by_index(
    query_index: Float[Array, "B T K J E"],
    key_index: Float[Array, "B S I E"],
    weights: Float[Array, "B T K J"] | None,
    placement: Placement,
    scale: float,
    *,
    sizes: Sizes = DEFAULT,
) -> Int32[Array, "B T K R"]:
    """The blocks that each query attends, by the scores of an indexer."""
    plan = ScorePlan.of(query_index, key_index.shape[1], placement.config, scale, sizes)
    keys = padded_keys(key_index, plan)

    def choose_chunk(inputs):
        query, weights, places = inputs
        here = places.placement(placement, plan.tokens)
        scores = scores_of_chunk(query, keys, weights, here, plan)
        return best_of_any(scores, here.position, here.config)

    arrays = jax.tree.map(lambda x: cutting.split_tokens(x, plan.tokens), (query_index, weights))
    chosen = cutting.over_chunks(choose_chunk, (*arrays, ChunkPlaces.of(placement, plan.tokens)))
    return cutting.join_tokens(chosen, query_index.shape[1])


@partial(jax.jit, static_argnames=("sizes",))
def top_blocks(
    scores: Float[Array, "B T K M"], placement: Placement, *, sizes: Sizes = DEFAULT
) -> Int32[Array, "B T K R"]:
    """The blocks that each query attends, by scores that are given."""
    tokens = min(sizes.query_chunk, scores.shape[1])

    def choose_chunk(inputs):
        scores, position = inputs
        return best_of_any(scores, position, placement.config)

    arrays = cutting.split_tokens(scores, tokens), cutting.split_tokens(placement.position, tokens, fill=-1)
    return cutting.join_tokens(cutting.over_chunks(choose_chunk, arrays), scores.shape[1])


@partial(jax.jit, static_argnames=("scale", "with_probabilities", "sizes"))
def selected_attention(
    query: Float[Array, "B T N H"],
    key_slc: Float[Array, "B S K H"],
    value_slc: Float[Array, "B S K V"],
    block_indices: Int[Array, "B T K R"],
    placement: Placement,
    scale: float,
    with_probabilities: bool = False,
    *,
    sizes: Sizes = DEFAULT,
) -> Attended | tuple[Attended, Float[Array, "B T K R"]]:
    """Attention over the tokens `s <= t` of the selected blocks (Eq. 12)."""
    attend = partial(_attend_branch, "slc") if _is_short(key_slc, placement, sizes) else _attend_listed
    found = attend(query, key_slc, value_slc, block_indices, placement, scale, sizes)
    if not with_probabilities:
        return found
    return found, _probabilities_of(query, key_slc, block_indices, placement, scale, sizes)


def _probabilities_of(query, key_slc, block_indices, placement, scale, sizes) -> Float[Array, "B T K R"]:
    """The probabilities of the slots, without a gradient."""
    query, key_slc = jax.lax.stop_gradient((query, key_slc))
    return selected_probabilities(query, key_slc, block_indices, None, placement, scale, "sum", sizes=sizes)


def _is_short(key_slc: Array, placement: Placement, sizes: Sizes) -> bool:
    """Whether rows are so short that attending under a mask costs no more than looking the blocks up."""
    config = placement.config
    selected = config.num_selected_blocks * config.selection_block_size
    return key_slc.shape[1] <= sizes.dense_blocks * selected


def _attend_branch(name: BranchName, query, key, value, block_indices, placement, scale, sizes) -> Attended:
    plan = Plan.of((name,), (key,), query.shape[1], placement, scale, sizes)
    return Attended(*attend_branch(query, (key, value), block_indices, placement, plan))


def _attend_listed(query, key, value, block_indices, placement, scale, sizes):
    batch, num_queries, num_heads, _ = query.shape
    num_keys, num_kv_heads = key.shape[1:3]
    heads, config = num_heads // num_kv_heads, placement.config
    block_size = config.selection_block_size

    def flatten(x):
        return x.swapaxes(1, 2).reshape(batch * num_kv_heads * x.shape[1], *x.shape[3:])

    row = (jnp.arange(batch, dtype=jnp.int32) * num_keys)[:, None]
    head = jnp.arange(num_kv_heads, dtype=jnp.int32)[None, None]

    def name(token: Int32[Array, "B T"]) -> Int32[Array, "B T K"]:
        return (row + token)[..., None] * num_kv_heads + head

    end = placement.selection_end(num_keys)
    first_block = placement.selection_start()
    starts = name(first_block)[..., None] + block_indices * (block_size * num_kv_heads)
    # A block that begins after its query, or ends before the array, has no visible key: it gets no item.
    begin = first_block[..., None, None] + block_indices * block_size
    useful = (block_indices >= 0) & (begin < end[..., None, None]) & (begin > -block_size)
    blocks = BlockLists(
        flatten(jnp.where(useful, starts, NO_BLOCK)), flatten(name(jnp.zeros_like(end))), flatten(name(end))
    )
    blocks_per_sequence = layout.num_selection_blocks(num_keys, config)
    if placement.packed:  # each sequence may end in a partial block, and queries are in at most T sequences
        blocks_per_sequence = min(blocks_per_sequence + num_queries, num_keys)
    sizes = ItemSizes.choose(
        num_rows=_static(batch) * num_kv_heads * num_queries,
        slots=block_indices.shape[-1],
        width=heads * max(query.shape[-1], value.shape[-1]),
        block_size=block_size,
        rows_per_sequence=num_queries,
        blocks_per_sequence=blocks_per_sequence,
        sizes=sizes,
    )
    grouped = query.reshape(batch, num_queries, num_kv_heads, heads, -1)
    keys, values = jax.tree.map(lambda x: x.reshape(batch * num_keys, *x.shape[2:]), (key, value))
    rows = block_attention(flatten(grouped), keys, values, blocks, scale, sizes)
    out, lse = (x.reshape(batch, num_kv_heads, num_queries, *x.shape[1:]).swapaxes(1, 2) for x in rows)
    return Attended(
        out.reshape(batch, num_queries, num_heads, -1), lse.reshape(batch, num_queries, num_heads)
    )


@jax.jit
def gated_sum(
    out_cmp: Float[Array, "B T N V"],
    out_slc: Float[Array, "B T N V"],
    out_win: Float[Array, "B T N V"],
    gates: Float[Array, "B T N 3"],
) -> Float[Array, "B T N V"]:
    """`g_cmp * o_cmp + g_slc * o_slc + g_win * o_win` (Eq. 5)."""
    return sum_of_branches(gates, out_cmp, out_slc, out_win)


def sum_of_branches(
    gates: Float[Array, "B T N branches"] | None, *outs: Float[Array, "B T N V"]
) -> Float[Array, "B T N V"]:
    """The branches that there are, each times its gate, summed in float32 or wider; without gates the one."""
    if gates is None:
        return outs[0]
    accumulate = accumulator(outs[0])
    gates = gates.astype(accumulate)
    weighted = (gates[..., i, None] * out.astype(accumulate) for i, out in enumerate(outs))
    return functools.reduce(operator.add, weighted).astype(outs[0].dtype)


@partial(jax.jit, static_argnames=("scale", "with_probabilities", "sizes"))
def native_sparse_attention(
    query: Float[Array, "B T N H"],
    key_cmp: Float[Array, "B C K H"],
    value_cmp: Float[Array, "B C K V"],
    key_slc: Float[Array, "B S K H"],
    value_slc: Float[Array, "B S K V"],
    key_win: Float[Array, "B W K H"],
    value_win: Float[Array, "B W K V"],
    gates: Float[Array, "B T N 3"],
    block_indices: Int[Array, "B T K R"] | None,
    placement: Placement,
    scale: float,
    with_probabilities: bool = False,
    *,
    sizes: Sizes = DEFAULT,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], Float[Array, "B T K R"]]:
    """The three branches and their gated sum (Eq. 5); in short rows one loop over chunks makes them all."""
    if with_probabilities:
        arrays = query, key_cmp, value_cmp, key_slc, value_slc, key_win, value_win, gates
        out = native_sparse_attention(*arrays, block_indices, placement, scale, sizes=sizes)
        return out, _probabilities_of(query, key_slc, block_indices, placement, scale, sizes)
    if _is_short(key_slc, placement, sizes):
        keys = (key_cmp, key_slc, key_win)
        plan = Plan.of(("cmp", "slc", "win"), keys, query.shape[1], placement, scale, sizes)
        keys_values = tuple(zip(keys, (value_cmp, value_slc, value_win), strict=True))
        return attend_all(query, keys_values, gates, block_indices, placement, plan)
    cmp = compressed_attention(query, key_cmp, value_cmp, placement, scale, sizes=sizes)
    if block_indices is None:
        fixed = jax.lax.stop_gradient((query, key_cmp, cmp.lse))
        block_indices = select_blocks(*fixed, placement, scale, sizes=sizes)
    slc = selected_attention(query, key_slc, value_slc, block_indices, placement, scale, sizes=sizes)
    win = window_attention(query, key_win, value_win, placement, scale, sizes=sizes)
    return gated_sum(cmp.out, slc.out, win.out, gates)


def _static(size) -> int:
    """A size if it is known while tracing, or 1 for a symbolic size of `jax.export`."""
    return size if isinstance(size, int) else 1
