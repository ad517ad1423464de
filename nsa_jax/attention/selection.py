"""The choice of blocks that the selected branch attends: by importance, an indexer, or scores of your own."""

from typing import Any

import jax
from jax import lax

from nsa_jax import arguments, dispatch, keywords
from nsa_jax.array_typing import Array, Float, Int, Int32
from nsa_jax.config import NSAConfig
from nsa_jax.dispatch import Implementation
from nsa_jax.layout import Quantised, Runs
from nsa_jax.layout.quantised import check_quantised


@keywords.known
def select_blocks(
    query: Float[Array, "B T N H"],
    key_cmp: Float[Array, "B C K H"],
    *,
    config: NSAConfig,
    lse_cmp: Float[Array, "B T N"] | None = None,
    query_positions: Int[Array, "B T"] | Runs | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> Int32[Array, "B T K R"]:
    """Chooses the selection blocks that each query attends, one choice per KV head (Eq. 8-11).

    The score of a selection block is a weighted sum of the probabilities that the compressed attention gives
    to the compressed blocks which overlap it, summed over the query heads of the KV head (Eq. 9 and 10). The
    weight is the number of shared tokens, counted in strides (for 32 / 16 / 64: 1, 2, 2, 2, 1). Candidates
    are the blocks whose first token is at or before the query. The first `num_initial_blocks` blocks, the
    query's own block and the `num_local_blocks - 1` before it are always selected, and they count towards
    `num_selected_blocks`. The other slots go to the best scores; ties go to the lower block index. The
    other arguments are those of `compressed_attention`.

    Args:
      query: rotated queries.
      key_cmp: compressed keys, see `compressed_attention`.
      config: block structure.
      lse_cmp: the `lse` that `compressed_attention` returned for the same arguments; computed anew if None.

    Returns:
      Block indices `[B, T, K, R]`, int32, with `R = num_selected_blocks`: block numbers counted from the
      first token of the query's sequence, ascending, -1 in the unused slots at the end. All slots of a
      padding query are -1.

    Raises:
      TypeError, ValueError, NotImplementedError: as in `compressed_attention`.

    Numerics:
      Two implementations choose the same blocks wherever two scores differ by more than rounding, and exactly
      the same ones where scores tie exactly.

    Gradients:
      No gradient flows through the selection, as in the paper. The compressed keys learn their scores through
      the output of the compressed branch.
    """
    arrays = dict(query=query, key_cmp=key_cmp, lse_cmp=lse_cmp)
    call = arguments.check(
        select_blocks,
        arrays,
        config=config,
        query_positions=query_positions,
        segment_ids=segment_ids,
        scale=scale,
    )
    operands = dict(**lax.stop_gradient(arrays), **call._asdict())
    return dispatch.run("select_blocks", implementation, (query, key_cmp), operands, config=config)


@keywords.known
def select_by_index(
    query_index: Float[Array, "B T K J E"],
    key_index: Float[Array, "B S I E"] | Quantised,
    *,
    weights: Float[Array, "B T K J"] | None = None,
    config: NSAConfig,
    query_positions: Int[Array, "B T"] | Runs | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> Int32[Array, "B T K R"]:
    """Chooses the selection blocks that each query attends by the scores of an indexer.

    The scores are those of `block_scores`; the rest of the rule is that of `select_blocks`: which blocks are
    candidates, which are always selected, and who wins a tie. Scores are stored for a bounded chunk of
    queries. The arguments are those of `block_scores`, but that keys may be in 8 bits.

    Args:
      query_index: `J` index queries for each KV head, rotated if the keys are.
      key_index: index keys of each token of the row: `I = K`, or one that all KV heads share; or what a cache
        in 8 bits keeps of them, a pair `nsa_jax.layout.Quantised(numbers [B, S, I, E], scale [B, S, I])`.
      weights: weight of each index head; None for the largest product instead of a sum.
      config: block structure.

    Returns:
      Block indices `[B, T, K, R]`, int32, as `select_blocks` returns them.

    Raises:
      TypeError, ValueError, NotImplementedError: as in `compressed_attention`.

    Numerics:
      Two implementations choose the same blocks wherever two scores differ by more than rounding, and exactly
      the same ones where scores tie exactly. The score of a token that is NaN counts as `-inf`, and infinite
      scores as the largest finite numbers, so such a query still selects candidates.

    Gradients:
      No gradient flows through the selection. An indexer learns from the gradients of `block_scores`.
    """
    check_quantised(key_index=key_index)
    arrays = dict(query_index=query_index, key_index=key_index, weights=weights)
    keys: Any = key_index
    if isinstance(keys, Quantised):
        keys = jax.ShapeDtypeStruct(keys.shape, query_index.dtype)  # in its place
    call = arguments.check(
        select_by_index,
        arrays | dict(key_index=keys),
        config=config,
        query_positions=query_positions,
        segment_ids=segment_ids,
        scale=scale,
    )
    given = [x.numbers if isinstance(x, Quantised) else x for x in arrays.values() if x is not None]
    operands = dict(**lax.stop_gradient(arrays), **call._asdict())
    return dispatch.run("select_by_index", implementation, given, operands, config=config)


@keywords.known
def top_blocks(
    scores: Float[Array, "B T K M"],
    *,
    config: NSAConfig,
    query_positions: Int[Array, "B T"] | Runs | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    implementation: Implementation | None = None,
) -> Int32[Array, "B T K R"]:
    """Chooses the selection blocks that each query attends by scores of your own.

    The rule is that of `select_blocks`: which blocks are candidates, which are always selected, and who wins
    a tie. It is exact: scores are compared in float32, or in float64 if that is their dtype.

    Args:
      scores: score of each block, counted from the first token of the query's sequence. Those of blocks that
        begin after the query are not read, nor those of blocks that are always selected.
      config: block structure.
      query_positions: key index of each query (-1 = padding), or `Runs`. By default the queries are the last
        `T` of the `S` tokens of `segment_ids`. Without `segment_ids` the default is that the row has `T`
        tokens and each is a query; pass positions if only some of the tokens are queries.
      segment_ids: sequence of each token of packed rows, see `compressed_attention`.
      implementation: one of `nsa_jax.dispatch.IMPLEMENTATIONS`, or None for the best that can run the call,
        see `nsa_jax.choose`.

    Returns:
      Block indices `[B, T, K, R]`, int32, as `select_blocks` returns them.

    Raises:
      TypeError, ValueError, NotImplementedError: as in `compressed_attention`; ValueError also if there are
        fewer scores than the row has selection blocks.

    Numerics:
      NaN counts as `-inf`, and infinite scores count as the largest finite numbers.

    Gradients:
      No gradient flows through the selection.
    """
    arrays = dict(scores=scores)
    call = arguments.check(
        top_blocks,
        arrays,
        config=config,
        query_positions=query_positions,
        segment_ids=segment_ids,
        scale=None,
    )
    operands = dict(**lax.stop_gradient(arrays), placement=call.placement)
    return dispatch.run("top_blocks", implementation, (scores,), operands, config=config)
