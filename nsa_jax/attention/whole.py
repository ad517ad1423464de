"""The whole operation: three branches and their gated sum."""

from nsa_jax import arguments, dispatch, keywords, layout
from nsa_jax.array_typing import Array, Float, Int
from nsa_jax.config import NSAConfig
from nsa_jax.dispatch import Implementation
from nsa_jax.layout import Runs


@keywords.known
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
    """Native Sparse Attention: attends by all three branches and adds their outputs by gates (Eq. 5).

    Computes what `compressed_attention`, `select_blocks`, `selected_attention`, `window_attention` and
    `gated_sum` compute one after the other. The other arguments are those of `compressed_attention`; by
    default the queries are the last `T` of the `S` tokens.

    Args:
      query: rotated queries, the same for all branches.
      key_cmp: compressed keys, each rotated at the position of its block's first token. `C` is
        `(S - l)//d + 1`, or 0 if `S < l`.
      value_cmp: compressed values.
      key_slc: keys of the selected branch, each rotated at its own position.
      value_slc: values of the selected branch.
      key_win: keys of the window branch, each rotated at its own position. `W` is `S` unless `first_key_win`
        says otherwise.
      value_win: values of the window branch.
      gates: one gate per token, query head and branch, in the order cmp, slc, win; of any float dtype.
      config: block structure.
      block_indices: a selection to use, for example that of another implementation, see
        `selected_attention`; chosen by `select_blocks` if None.
      first_key_win: row index of the first window key, see `first_key` of `window_attention`.

    Returns:
      The output, in the query's dtype; 0 for a padding query with finite gates.

    Raises:
      TypeError, ValueError, NotImplementedError: as in `compressed_attention`.

    Gradients:
      With respect to every floating-point array. No gradient flows through the selection, see
      `select_blocks`.

    Examples:
      Keys and values shared by the selected and the window branch:

      >>> out = native_sparse_attention(q, k_cmp, v_cmp, k, v, k, v, gates, config=NSAConfig())
    """
    arrays = dict(
        query=query, key_cmp=key_cmp, value_cmp=value_cmp, key_slc=key_slc, value_slc=value_slc,
        key_win=key_win, value_win=value_win, gates=gates,
    )  # fmt: skip
    call = arguments.check(
        native_sparse_attention,
        dict(**arrays, block_indices=block_indices),
        config=config,
        query_positions=query_positions,
        segment_ids=segment_ids,
        scale=scale,
        first_key_win=first_key_win,
    )
    if block_indices is not None:
        block_indices = layout.distinct_blocks(block_indices)
    operands = dict(**arrays, block_indices=block_indices, **call._asdict())
    return dispatch.run("native_sparse_attention", implementation, arrays.values(), operands, config=config)
