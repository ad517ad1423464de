"""The sum of the branches."""

from nsa_jax import arguments, dispatch, keywords
from nsa_jax.array_checks import check_arrays
from nsa_jax.array_typing import Array, Float
from nsa_jax.dispatch import Implementation


@keywords.known
def gated_sum(
    out_cmp: Float[Array, "B T N V"],
    out_slc: Float[Array, "B T N V"],
    out_win: Float[Array, "B T N V"],
    gates: Float[Array, "B T N 3"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"]:
    """Adds the outputs of the branches: `g_cmp * o_cmp + g_slc * o_slc + g_win * o_win` (Eq. 5).

    Args:
      out_cmp: output of the compressed branch.
      out_slc: output of the selected branch.
      out_win: output of the window branch.
      gates: one gate per token, query head and branch, in the order cmp, slc, win; of any float dtype.
      implementation: one of `nsa_jax.dispatch.IMPLEMENTATIONS` or None, see `compressed_attention`.

    Returns:
      The sum, computed in float32 (float64 for float64 inputs) and rounded to the dtype of the branches. NaN
      or infinity in a gate makes it NaN, also where the branches are 0.

    Raises:
      TypeError: an argument is not an array, or not of a floating dtype.
      ValueError: shapes or dtypes disagree, or the arrays are empty.
      NotImplementedError: the implementation asked for cannot run the call.

    Gradients:
      With respect to all four arrays.
    """
    arrays = dict(out_cmp=out_cmp, out_slc=out_slc, out_win=out_win, gates=gates)
    arguments.check_not_empty(check_arrays(gated_sum, **arrays), "BTNV")
    return dispatch.run("gated_sum", implementation, arrays.values(), arrays)
