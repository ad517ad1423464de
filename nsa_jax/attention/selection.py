"""The choice of blocks that the selected branch attends."""

from jax import lax

from nsa_jax import arguments, dispatch
from nsa_jax.array_typing import Array, Float, Int, Int32
from nsa_jax.config import NSAConfig
from nsa_jax.dispatch import Implementation
from nsa_jax.layout import Runs


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
    """The selection blocks that each query attends, the same for all query heads of a KV head (Eq. 8-11).

    The compressed attention's probabilities are summed over the heads of a KV head and over the compressed
    blocks that overlap a selection block, weighted by the shared tokens in strides (for 32/16/64: 1, 2, 2,
    2, 1). Candidates are the blocks whose first token the query sees. The initial blocks and the
    `num_local_blocks` that end with the query's own are always in and count inside `num_selected_blocks`;
    ties go to the lower block index.

    Args:
      query, key_cmp, config, query_positions, segment_ids, scale, implementation: see
        `compressed_attention`.
      lse_cmp: what `compressed_attention` returned for the same arguments; recomputed when None.

    Returns:
      `block_indices [B, T, K, R]`, `R = num_selected_blocks`: sequence-local block numbers, ascending, -1 in
      unused slots at the end.

    Raises:
      TypeError, ValueError, NotImplementedError: see `nsa_jax.attention`, Errors.

    Gradients:
      None: no gradient flows through the selection, which is the paper's choice. The compressed branch
      learns the scores.
    """
    call = arguments.check(
        select_blocks,
        dict(query=query, key_cmp=key_cmp, lse_cmp=lse_cmp),
        config=config,
        query_positions=query_positions,
        segment_ids=segment_ids,
        scale=scale,
    )
    fixed = lax.stop_gradient((query, key_cmp, lse_cmp))
    with dispatch.running("select_blocks", implementation, query, key_cmp, config=config) as kernels:
        return kernels.select_blocks(*fixed, *call)
