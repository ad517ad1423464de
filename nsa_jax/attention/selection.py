"""The choice of blocks that the selected branch attends."""

from jax import lax

from nsa_jax import arguments, dispatch, keywords
from nsa_jax.array_typing import Array, Float, Int, Int32
from nsa_jax.config import NSAConfig
from nsa_jax.dispatch import Implementation
from nsa_jax.layout import Runs


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
