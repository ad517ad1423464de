"""The scores that an indexer gives to selection blocks."""

from nsa_jax import arguments, dispatch, keywords, layout
from nsa_jax.array_typing import Array, Float, Int
from nsa_jax.config import NSAConfig
from nsa_jax.dispatch import Implementation
from nsa_jax.layout import Runs


@keywords.known
def block_scores(
    query_index: Float[Array, "B T K J E"],
    key_index: Float[Array, "B S I E"],
    *,
    weights: Float[Array, "B T K J"] | None = None,
    block_indices: Int[Array, "B T K R"] | None = None,
    config: NSAConfig,
    query_positions: Int[Array, "B T"] | Runs | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T K M"] | Float[Array, "B T K R"]:
    """Scores the selection blocks by small queries and keys that are made for it: an indexer.

    The score of a token is `max_j scale q_j.k` over the `J` index heads of the KV head (MSA, arXiv
    2606.13392) or, with `weights`, `sum_j weights_j relu(scale q_j.k)` (the lightning indexer of DeepSeek
    V3.2). The score of a block is the largest of those of its tokens that are at or before the query. Each KV
    head may have an index key of its own; in MSA all share one.

    The result has `T M` numbers. For long rows call it for some queries at a time, with `query_positions`;
    scores of single tokens are never stored for more than a bounded chunk of queries. `select_by_index`
    chooses by these scores, and stores them for a chunk only.

    With `block_indices` only these blocks are scored, and the result has `T R` numbers. By them a selection
    learns where its target is what the attention gives to the blocks that it chose. The Triton kernels do no
    other work; `xla` scores all blocks of a chunk of queries, and keeps these.

    Args:
      query_index: `J` index queries for each KV head, rotated if the keys are.
      key_index: index keys of each token of the row: `I = K`, or one that all KV heads share.
      weights: weight of each index head; None for the largest product instead of a sum.
      block_indices: blocks to score, as `selected_attention` takes them; None for all.
      config: block structure.
      query_positions: key index of each query (-1 = padding), or `Runs`; by default the queries are the last
        `T` of the `S` tokens.
      segment_ids: sequence of each token of packed rows, see `compressed_attention`. Blocks are counted from
        the first token of the query's sequence.
      scale: factor of the products, a finite Python number; `1/sqrt(E)` if None.
      implementation: one of `nsa_jax.dispatch.IMPLEMENTATIONS` or None, see `compressed_attention`.

    Returns:
      Scores `[B, T, K, M]` in float32 (float64 for float64 inputs), where `M = ceil(S / l')`. Blocks of which
      a query sees no token have `-inf`, and so has all of a padding query. With `block_indices` one score for
      each slot, `[B, T, K, R]`. An unused slot has `-inf`, and so has one that repeats an earlier one.

    Raises:
      TypeError, ValueError, NotImplementedError: as in `compressed_attention`.

    Numerics:
      The score of a token that is NaN counts as `-inf`, so no score is NaN.

    Gradients:
      With respect to `query_index`, `key_index` and `weights`: each score has those of the token that gives
      it. Of equal tokens that is the first, and of equal heads of that token the first. A score that is not
      finite has no gradient, and the gradients are finite.
    """
    floats = dict(query_index=query_index, key_index=key_index, weights=weights)
    call = arguments.check(
        block_scores,
        dict(**floats, block_indices=block_indices),
        config=config,
        query_positions=query_positions,
        segment_ids=segment_ids,
        scale=scale,
    )
    if block_indices is not None:
        block_indices = layout.distinct_blocks(block_indices, key_index.shape[1], config)
    arrays = dict(**floats, block_indices=block_indices)
    given = [x for x in arrays.values() if x is not None]
    operands = dict(**arrays, **call._asdict())
    return dispatch.run("block_scores", implementation, given, operands, config=config)
