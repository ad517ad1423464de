"""The operations of `nsa_jax.attention` and the decode steps as Triton gradients, with gradients.

They implement `nsa_jax.dispatch.Operations`: arguments are validated, and the placement says where the
queries stand. The kernels do not count what they read.

The arrays that the forward saves for the backward carry the names `nsa_jax.remat.SAVED_NAMES`, so that a
remat policy can keep them: with `save_only_these_names(*SAVED_NAMES)` no forward kernel runs twice.
"""

import functools
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from nsa_jax.array_typing import Array, Attended, Float, Int, Int32
from nsa_jax.compression import Compress, Compression, compress_blocks
from nsa_jax.config import NSAConfig
from nsa_jax.kernels.triton import gated_sum as gating
from nsa_jax.kernels.triton import probabilities
from nsa_jax.kernels.triton.backward import Backward
from nsa_jax.kernels.triton.decode import dense_step as dense_steps
from nsa_jax.kernels.triton.decode import step as steps
from nsa_jax.kernels.triton.decode.step import GivenBlocks
from nsa_jax.kernels.triton.nonfinite import (
    Branch,
    Outputs,
    Saved,
    recompute_forward,
    recompute_key_gradients,
    recompute_probabilities,
    recompute_query_gradient,
    visible_in_blocks,
)
from nsa_jax.kernels.triton.ranges import (
    causal_ranges,
    compression_ranges,
    forward,
    window_ranges,
)
from nsa_jax.kernels.triton.repaired import (
    BY_TRITON,
    BranchKernels,
    attend_blocks,
    attend_range,
    differentiate_blocks,
    differentiate_range,
)
from nsa_jax.kernels.triton.selected import attend_selected
from nsa_jax.kernels.triton.selection import (
    choose_best,
    choose_blocks,
    choose_by_index,
    chosen_scores,
    score_blocks,
)
from nsa_jax.kernels.triton.selection.block_scores import score_gradients
from nsa_jax.kernels.triton.selection.index_scores import flat_if_shared
from nsa_jax.layout import (
    DenseCache,
    NSACache,
    Placement,
    TokenKeysValues,
    num_selection_blocks,
    slots,
)
from nsa_jax.remat import BLOCK_INDICES, LSE, OUT
from nsa_jax.sharding.auto import partitioned
from nsa_jax.sharding.vmap import folds_vmap


class BranchKeysValues(NamedTuple):
    """Keys and values of the three branches."""

    key_cmp: Float[Array, "B C K H"]
    value_cmp: Float[Array, "B C K V"]
    key_slc: Float[Array, "B S K H"]
    value_slc: Float[Array, "B S K V"]
    key_win: Float[Array, "B W K H"]
    value_win: Float[Array, "B W K V"]


@partial(jax.jit, static_argnames=("scale",))
def compressed_attention(
    query: Float[Array, "B T N H"],
    key_cmp: Float[Array, "B C K H"],
    value_cmp: Float[Array, "B C K V"],
    placement: Placement,
    scale: float,
) -> Attended:
    """Attention over the visible compressed blocks (Eq. 7): one range of blocks for each query."""
    return Attended(*_compressed(query, key_cmp, value_cmp, placement, scale))


@partial(jax.jit, static_argnames=("scale",))
def window_attention(
    query: Float[Array, "B T N H"],
    key_win: Float[Array, "B W K H"],
    value_win: Float[Array, "B W K V"],
    placement: Placement,
    scale: float,
) -> Attended:
    """Attention over the last `w` tokens, including the query's own: one range of keys for each query."""
    ranges = window_ranges(placement, key_win.shape[1])
    return Attended(*_range_attention(query, key_win, value_win, ranges, scale))


@partial(jax.jit, static_argnames=("scale",))
def select_blocks(
    query: Float[Array, "B T N H"],
    key_cmp: Float[Array, "B C K H"],
    lse_cmp: Float[Array, "B T N"] | None,
    placement: Placement,
    scale: float,
) -> Int32[Array, "B T K R"]:
    """The blocks that each query attends (Eq. 8-11)."""
    if lse_cmp is None:
        lse_cmp = _compressed(query, key_cmp, key_cmp, placement, scale)[1]
    return _select(query, key_cmp, lse_cmp, placement, scale)


@partial(jax.jit, static_argnames=("scale",))
def block_scores(
    query_index: Float[Array, "B T K J E"],
    key_index: Float[Array, "B S I E"],
    weights: Float[Array, "B T K J"] | None,
    block_indices: Int32[Array, "B T K R"] | None,
    placement: Placement,
    scale: float,
) -> Float[Array, "B T K M"] | Float[Array, "B T K R"]:
    """The scores that an indexer gives to the blocks, or to those that are named."""
    operands = query_index, flat_if_shared(key_index), weights
    if block_indices is None:
        return _block_scores(*operands, placement, scale)
    return _chosen_scores(*operands, block_indices, placement, scale)


@partial(jax.jit, static_argnames=("scale",))
def select_by_index(
    query_index: Float[Array, "B T K J E"],
    key_index: Float[Array, "B S I E"],
    weights: Float[Array, "B T K J"] | None,
    placement: Placement,
    scale: float,
) -> Int32[Array, "B T K R"]:
    """The blocks that each query attends, by the scores of an indexer."""
    fixed = jax.lax.stop_gradient((query_index, flat_if_shared(key_index), weights))
    blocks = _divisible(choose_by_index, scale=scale)(*fixed, placement)
    return _named(blocks, BLOCK_INDICES)


@jax.jit
def top_blocks(scores: Float[Array, "B T K M"], placement: Placement) -> Int32[Array, "B T K R"]:
    """The blocks that each query attends, by scores that are given."""
    blocks = _divisible(choose_best)(jax.lax.stop_gradient(scores), placement)
    return _named(blocks, BLOCK_INDICES)


@partial(jax.jit, static_argnames=("scale", "with_probabilities", "by"))
def selected_attention(
    query: Float[Array, "B T N H"],
    key_slc: Float[Array, "B S K H"],
    value_slc: Float[Array, "B S K V"],
    block_indices: Int[Array, "B T K R"],
    placement: Placement,
    scale: float,
    with_probabilities: bool = False,
    *,
    by: BranchKernels = BY_TRITON,
) -> Attended | tuple[Attended, Float[Array, "B T K R"]]:
    """Attention over the tokens `s <= t` of the selected blocks (Eq. 12)."""
    arrays = query, key_slc, value_slc, block_indices, placement
    out, lse, *probabilities = _selected_attention(*arrays, scale, by, with_probabilities)
    return (Attended(out, lse), *probabilities) if with_probabilities else Attended(out, lse)


@partial(jax.jit, static_argnames=("scale", "reduce"))
def block_probabilities(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    lse: Float[Array, "B T N"] | None,
    placement: Placement,
    scale: float,
    reduce: str,
) -> Float[Array, "B T K M"]:
    """What dense causal attention gives to each selection block."""
    fixed = jax.lax.stop_gradient((query, key, lse))
    probabilities_of = _divisible(probabilities.block_probabilities, scale=scale, reduce=reduce)
    return probabilities_of(*fixed, placement)


@partial(jax.jit, static_argnames=("scale", "reduce"))
def selected_probabilities(
    query: Float[Array, "B T N H"],
    key_slc: Float[Array, "B S K H"],
    block_indices: Int32[Array, "B T K R"],
    lse: Float[Array, "B T N"] | None,
    placement: Placement,
    scale: float,
    reduce: str,
) -> Float[Array, "B T K R"]:
    """What the selected branch gives to the block of each slot."""
    query, key_slc, lse = jax.lax.stop_gradient((query, key_slc, lse))
    probabilities_of = _divisible(probabilities.selected_probabilities, scale=scale, reduce=reduce)
    return probabilities_of(query, key_slc, block_indices, lse, placement)


@jax.jit
def gated_sum(
    out_cmp: Float[Array, "B T N V"],
    out_slc: Float[Array, "B T N V"],
    out_win: Float[Array, "B T N V"],
    gates: Float[Array, "B T N 3"],
) -> Float[Array, "B T N V"]:
    """`g_cmp * o_cmp + g_slc * o_slc + g_win * o_win` (Eq. 5), summed in float32."""
    return _gated_sum(out_cmp, out_slc, out_win, gates)


@partial(jax.jit, static_argnames=("scale", "with_probabilities", "by"))
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
    by: BranchKernels = BY_TRITON,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], Float[Array, "B T K R"]]:
    """The three branches and their gated sum (Eq. 5), differentiated as one.

    The gates enter the backward kernels of the branches as a factor of each row. So these read the cotangent
    of the gated sum, and no branch's own is ever stored. The branches add up one gradient of the query.
    """
    keys_values = BranchKeysValues(key_cmp, value_cmp, key_slc, value_slc, key_win, value_win)
    arrays = query, keys_values, gates, block_indices, placement
    out, *probabilities = _native(*arrays, scale, by, with_probabilities)
    return (out, *probabilities) if with_probabilities else out


def decode_step(
    cache: NSACache,
    query: Float[Array, "B T N H"],
    tokens: TokenKeysValues,
    gates: Float[Array, "B T N branches"] | None,
    num_tokens: Int[Array, " B"] | None,
    block_indices: Int32[Array, "B T K R"] | None,
    compress: Compress | None,
    config: NSAConfig,
    scale: float,
) -> tuple[Float[Array, "B T N V"], NSACache]:
    """Appends the tokens, compresses the blocks they complete, then attends."""
    forming: Compress | GivenBlocks | None = compress
    if compress is not None and not _is_known(compress):
        windows = slots.windows_of_step(cache, tokens, num_tokens, config)
        forming = GivenBlocks(*compress_blocks(compress, *windows))
    run = _decode_step(config, float(scale))
    step = run(forming, cache, query, tokens, gates, num_tokens, block_indices)
    return step.out, step.cache


@functools.cache
def _decode_step(config: NSAConfig, scale: float):
    def step(compress, cache, query, tokens, gates, num_tokens, block_indices):
        new = (query, tokens, gates, num_tokens)
        return steps.decode_step(cache, *new, compress, config, scale, block_indices=block_indices)

    by_blocks, by_weights = _divisible(step), _divisible(step, alike=1)

    @jax.jit
    def run(compress, *operands):
        given = isinstance(compress, GivenBlocks)
        return (by_blocks if given else by_weights)(compress, *operands)

    return run


def _is_known(compress: Compress) -> bool:
    """Whether the kernels can compute it: a `Compression`, but no subclass, which may do something else."""
    weights = jax.tree.leaves((compress.key, compress.value)) if type(compress) is Compression else None
    return weights is not None and all(x.dtype.itemsize <= 4 for x in weights)


def dense_decode_step(
    cache: DenseCache,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    num_tokens: Int[Array, " B"] | None,
    window_size: int | None,
    scale: float,
) -> tuple[Float[Array, "B T N V"], DenseCache]:
    """Appends the tokens, then attends from each of them to the row, or to its window."""
    return _dense_decode_step(window_size, float(scale))(cache, query, key, value, num_tokens)


@functools.cache
def _dense_decode_step(window_size: int | None, scale: float):
    return jax.jit(_divisible(dense_steps.dense_decode_step, window_size=window_size, scale=scale))


@functools.cache
def _divisible(function, *, alike=0, **static):
    """Lets `vmap` and a mesh divide a function that launches kernels, by batch rows and KV heads."""
    return folds_vmap(partitioned(partial(function, **static), alike=alike), alike=alike)


def _saved(out: Array, lse: Array) -> tuple[Array, Array]:
    return _named(out, OUT), _named(lse, LSE)


def _named(result: Array, name: str) -> Array:
    """`checkpoint_name` of what a kernel gives, behind a barrier.

    Without it, where a scan over layers stores the result, XLA of jaxlib 0.11 launches the kernel twice: once
    for who reads it, and once to write it where it is stored.
    """
    return checkpoint_name(jax.lax.optimization_barrier(result), name)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _range_attention(query, key, value, ranges, scale):
    return _divisible(attend_range, scale=scale)(query, key, value, ranges)


def _range_forward(query, key, value, ranges, scale):
    saved = _saved(*_range_attention(query, key, value, ranges, scale))
    return saved, ((query, key, value, ranges), saved)


def _range_backward(scale, residuals, cotangents):
    operands, saved = residuals
    return *_divisible(differentiate_range, scale=scale)(*operands, Backward(*saved, *cotangents)), None


_range_attention.defvjp(_range_forward, _range_backward)


def _compressed(query, key_cmp, value_cmp, placement, scale):
    ranges = compression_ranges(placement, key_cmp.shape[1])
    return _range_attention(query, key_cmp, value_cmp, ranges, scale)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _selected_attention(query, key, value, block_indices, placement, scale, by, with_probabilities):
    attend = _divisible(attend_blocks, scale=scale, with_probabilities=with_probabilities)
    return attend(query, key, value, block_indices, placement)


def _selected_forward(query, key, value, block_indices, placement, scale, by, with_probabilities):
    operands = query, key, value, block_indices, placement
    attend = _divisible(
        attend_blocks, scale=scale, with_probabilities=with_probabilities, before_backward=True
    )
    out, lse, *probabilities = attend(*operands)
    saved = _saved(out, lse)
    return (*saved, *probabilities), (operands, saved)


def _selected_backward(scale, by, with_probabilities, residuals, cotangents):
    operands, saved = residuals
    given = Backward(*saved, *cotangents[:2])  # no gradient flows through the probabilities
    differentiate = _divisible(differentiate_blocks, scale=scale, by=by)
    return *differentiate(*operands, given), None, None


_selected_attention.defvjp(_selected_forward, _selected_backward)


def _select(query, key_cmp, lse_cmp, placement, scale):
    fixed = jax.lax.stop_gradient((query, key_cmp, lse_cmp))
    blocks = _divisible(choose_blocks, scale=scale)(*fixed, placement)
    return _named(blocks, BLOCK_INDICES)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _block_scores(query, keys, weights, placement, scale):
    return _divisible(score_blocks, scale=scale)(query, keys, weights, placement)[0]


def _block_scores_forward(query, keys, weights, placement, scale):
    scores, tokens = _divisible(score_blocks, scale=scale)(query, keys, weights, placement)
    return scores, (query, keys, weights, tokens, placement)


def _block_scores_backward(scale, residuals, d_scores):
    *operands, placement = residuals
    differentiate = _divisible(score_gradients, scale=scale)
    d_query, d_keys, d_weights = differentiate(*operands, d_scores, placement)
    return d_query, _like_keys(d_keys, operands[1]), d_weights, None


_block_scores.defvjp(_block_scores_forward, _block_scores_backward)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _chosen_scores(query, keys, weights, block_indices, placement, scale):
    score = _divisible(chosen_scores.score_chosen, scale=scale)
    return score(query, keys, weights, block_indices, placement)[0]


def _chosen_scores_forward(query, keys, weights, block_indices, placement, scale):
    score = _divisible(chosen_scores.score_chosen, scale=scale)
    scores, tokens = score(query, keys, weights, block_indices, placement)
    return scores, (query, keys, weights, block_indices, tokens, placement)


def _chosen_scores_backward(scale, residuals, d_scores):
    *operands, placement = residuals
    differentiate = _divisible(chosen_scores.chosen_gradients, scale=scale)
    d_query, d_keys, d_weights = differentiate(*operands, d_scores, placement)
    return d_query, _like_keys(d_keys, operands[1]), d_weights, None, None


_chosen_scores.defvjp(_chosen_scores_forward, _chosen_scores_backward)


def _like_keys(d_keys: Float[Array, "B S K E"], keys: Float[Array, "B ..."]) -> Float[Array, "B ..."]:
    """The gradient of keys as `flat_if_shared` has them: a key that KV heads share has the sum of theirs."""
    if keys.ndim == 2:
        d_keys = d_keys.sum(axis=2)
    return d_keys.reshape(keys.shape).astype(keys.dtype)


@jax.custom_vjp
def _gated_sum(out_cmp, out_slc, out_win, gates):
    return _divisible(gating.gated_sum)(out_cmp, out_slc, out_win, gates)


def _gated_sum_forward(*operands):
    return _gated_sum(*operands), operands


def _gated_sum_backward(operands, d_out):
    gates = operands[3].astype(jnp.float32)
    d_gates = _divisible(gating.gate_gradients)(*operands, d_out)
    d_branches = (gates[..., branch, None] * d_out.astype(jnp.float32) for branch in range(3))
    return *(d_branch.astype(d_out.dtype) for d_branch in d_branches), d_gates


_gated_sum.defvjp(_gated_sum_forward, _gated_sum_backward)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _native(query, keys_values, gates, block_indices, placement, scale, by, with_probabilities):
    """Without gradients, of which the sum alone is wanted."""
    arrays = query, keys_values, gates, block_indices, placement
    total, _, _, probabilities = _attend_all(*arrays, scale, by, with_probabilities, before_backward=False)
    return total, *probabilities


def _native_forward(query, keys_values, gates, block_indices, placement, scale, by, with_probabilities):
    arrays = query, keys_values, gates, block_indices, placement
    total, saved, blocks, probabilities = _attend_all(
        *arrays, scale, by, with_probabilities, before_backward=True
    )
    return (total, *probabilities), (query, keys_values, gates, blocks, placement, saved)


def _attend_all(
    query, keys_values, gates, block_indices, placement, scale, by, with_probabilities, *, before_backward
):
    """`(total, saved, block_indices, probabilities)`: the branches one after the other, then their search.

    Before a backward pass, `saved` are output and log-sum-exps of each branch. They carry their names before
    they are added: so a remat policy that keeps them need not attend again for the sum. The blocks are None
    where the row is so short that every query selects all of them: then the selected branch is causal
    attention. With `with_probabilities`, for which blocks are given, also the probabilities of the slots.
    """
    key_cmp, value_cmp, key_slc, value_slc, key_win, value_win = keys_values
    attend = _divisible(by.attend_ranges, scale=scale)
    out_cmp, lse_cmp = attend(query, key_cmp, value_cmp, compression_ranges(placement, key_cmp.shape[1]))
    config, num_keys = placement.config, key_slc.shape[1]
    probabilities: list[Array] = []
    if block_indices is None and num_selection_blocks(num_keys, config) <= config.num_selected_blocks:
        out_slc, lse_slc = attend(query, key_slc, value_slc, causal_ranges(placement, num_keys))
    else:
        if block_indices is None:
            block_indices = _select(query, key_cmp, lse_cmp, placement, scale)
        attend_chosen = _divisible(
            attend_selected, scale=scale, with_probabilities=with_probabilities,
            before_backward=before_backward,
        )  # fmt: skip
        out_slc, lse_slc, *probabilities = attend_chosen(query, key_slc, value_slc, block_indices, placement)
    window = query, key_win, value_win, window_ranges(placement, key_win.shape[1])
    lse_of_blocks = None if block_indices is None else lse_slc
    branches = _branches(keys_values, block_indices, placement)
    search = _divisible(recompute_forward, scale=scale)
    search_probabilities = _divisible(recompute_probabilities, scale=scale)

    def searched(found):
        found = search(found, query, branches, gates)
        of_slots = query, key_slc, branches[1].visible
        return found, [search_probabilities(x, found.lse, *of_slots) for x in probabilities]

    if before_backward:
        out_win, lse_win = attend(*window)
        found, probabilities = searched(Outputs((out_cmp, out_slc, out_win), lse_of_blocks))
        lse = lse_cmp, lse_slc if found.lse is None else found.lse, lse_win
        saved = tuple(_saved(*of_branch) for of_branch in zip(found.outs, lse, strict=True))
        total = _divisible(gating.gated_sum)(*(out for out, _ in saved), gates)
        return total, saved, block_indices, probabilities
    # the window's kernel ends in the gated sum
    attend_and_add = _divisible(forward.attend_ranges, scale=scale)
    total, _ = attend_and_add(*window, (out_cmp, out_slc, gates))
    found, probabilities = searched(Outputs((None, None, None), lse_of_blocks, total))
    return found.total, None, block_indices, probabilities


def _branches(
    keys_values: BranchKeysValues, block_indices: Int32[Array, "B T K R"] | None, placement: Placement
) -> tuple[Branch, Branch, Branch]:
    """The three branches as `nonfinite` takes them; without blocks the selected one is causal."""
    key_cmp, value_cmp, key_slc, value_slc, key_win, value_win = keys_values
    if block_indices is None:
        selected = causal_ranges(placement, key_slc.shape[1]).visible
    else:
        selected = visible_in_blocks(block_indices, placement, key_slc.shape[1])
    return (
        Branch(key_cmp, value_cmp, compression_ranges(placement, key_cmp.shape[1]).visible),
        Branch(key_slc, value_slc, selected),
        Branch(key_win, value_win, window_ranges(placement, key_win.shape[1]).visible),
    )


def _native_backward(scale, by, with_probabilities, residuals, cotangents):
    d_out = cotangents[0]
    query, keys_values, gates, block_indices, placement, (cmp, slc, win) = residuals
    key_cmp, value_cmp, key_slc, value_slc, key_win, value_win = keys_values
    differentiate = _divisible(by.range_gradients, scale=scale)
    gate_cmp, gate_slc, gate_win = (gates[..., branch].astype(jnp.float32) for branch in range(3))
    branches = _branches(keys_values, block_indices, placement)

    def keys_of(which, found, lse):  # each branch's at once, so that devices may send them meanwhile
        search = _divisible(recompute_key_gradients, scale=scale, which=which)
        saved = Saved((lse,), (found.delta,), d_out, gates)
        return search(found.key, found.value, query, branches, saved)

    given = Backward(cmp[0], cmp[1], d_out, gate=gate_cmp)
    ranges = compression_ranges(placement, key_cmp.shape[1])
    of_cmp = differentiate(query, key_cmp, value_cmp, ranges, given)
    d_cmp = keys_of(0, of_cmp, cmp[1])
    given = Backward(slc[0], slc[1], d_out, gate=gate_slc, previous=of_cmp.query)
    if block_indices is None:
        causal = causal_ranges(placement, key_slc.shape[1])
        of_slc = differentiate(query, key_slc, value_slc, causal, given)
    else:
        selected = _divisible(by.selected_gradients, scale=scale)
        of_slc = selected(query, key_slc, value_slc, block_indices, placement, given)
    d_slc = keys_of(1, of_slc, slc[1])
    given = Backward(win[0], win[1], d_out, gate=gate_win, previous=of_slc.query)
    ranges = window_ranges(placement, key_win.shape[1])
    of_win = differentiate(query, key_win, value_win, ranges, given)
    d_win = keys_of(2, of_win, win[1])

    saved = Saved((cmp[1], slc[1], win[1]), (of_cmp.delta, of_slc.delta, of_win.delta), d_out, gates)
    d_query = _divisible(recompute_query_gradient, scale=scale)(of_win.query, query, branches, saved)
    d_gates = jnp.stack([x.products for x in (of_cmp, of_slc, of_win)], axis=-1).astype(gates.dtype)
    return d_query, BranchKeysValues(*d_cmp, *d_slc, *d_win), d_gates, None, None


_native.defvjp(_native_forward, _native_backward)
