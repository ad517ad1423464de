"""The whole operation: three branches and their gated sum."""

from nsa_jax import arguments, dispatch, layout
from nsa_jax.array_typing import Array, Float, Int
from nsa_jax.config import NSAConfig
from nsa_jax.dispatch import Implementation
from nsa_jax.layout import Runs


def native_sparse_attention(
    query: Float[Array, "B T N H"],
    key_cmp: Float[Array, "B C K H"],
    value_cmp: Float[Array, "B C K V"],
    key_slc: Float[Array, "B S K H"],
    value_slc: Float[Array, "B S K V"],
    key_win: Float[Array, "B W K H"],
    value_win: Float[Array, "B W K V"],
    gates: Float[Array, "B T N 3"],
    *,
    config: NSAConfig,
    block_indices: Int[Array, "B T K R"] | None = None,
    query_positions: Int[Array, "B T"] | Runs | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    first_key_win: int | Int[Array, ""] | Int[Array, " B"] = 0,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"]:
    """Native Sparse Attention: compressed, selected and window attention, summed by gates (Eq. 5).

    Args:
      query: rotated queries, the same for all branches.
      key_cmp, value_cmp: see `compressed_attention`; `C = (S - l)//d + 1` blocks, 0 if `S < l`.
      key_slc, value_slc: see `selected_attention`.
      key_win, value_win: see `window_attention`; `W = S` keys unless `first_key_win` says where they begin.
      gates: see `gated_sum`.
      config, query_positions, segment_ids, scale, implementation: see `compressed_attention`.
      block_indices: a selection to use instead of `select_blocks`, for example of another implementation.
      first_key_win: see `first_key` of `window_attention`.

    Returns:
      The output, in the query's dtype; 0 for a padding query.

    Raises:
      TypeError, ValueError, NotImplementedError: see `nsa_jax.attention`, Errors.

    Gradients:
      To all arrays but the index arrays; none through the selection (see `select_blocks`).

    Example:
      out = native_sparse_attention(q, k_cmp, v_cmp, k, v, k, v, gates, config=NSAConfig())
    """
    arrays = query, key_cmp, value_cmp, key_slc, value_slc, key_win, value_win, gates
    call = arguments.check(
        native_sparse_attention,
        dict(
            query=query, key_cmp=key_cmp, value_cmp=value_cmp, key_slc=key_slc, value_slc=value_slc,
            key_win=key_win, value_win=value_win, gates=gates, block_indices=block_indices,
        ),
        config=config,
        query_positions=query_positions,
        segment_ids=segment_ids,
        scale=scale,
        first_key_win=first_key_win,
    )  # fmt: skip
    if block_indices is not None:
        block_indices = layout.distinct_blocks(block_indices)
    with dispatch.running("native_sparse_attention", implementation, *arrays, config=config) as kernels:
        return kernels.native_sparse_attention(*arrays, block_indices, *call)
