"""The sum of the branches."""

from nsa_jax import arguments, dispatch
from nsa_jax.array_typing import Array, Float
from nsa_jax.dispatch import Implementation


def gated_sum(
    out_cmp: Float[Array, "B T N V"],
    out_slc: Float[Array, "B T N V"],
    out_win: Float[Array, "B T N V"],
    gates: Float[Array, "B T N 3"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"]:
    """`g_cmp * o_cmp + g_slc * o_slc + g_win * o_win` (Eq. 5).

    Args:
      out_cmp, out_slc, out_win: outputs of the three branches.
      gates: one gate per token, query head and branch, in the order cmp, slc, win; any float dtype.
      implementation: see `nsa_jax.dispatch`.

    Returns:
      The sum, in the branches' dtype.

    Raises:
      TypeError, ValueError, NotImplementedError: see `nsa_jax.attention`, Errors.
    """
    arrays = dict(out_cmp=out_cmp, out_slc=out_slc, out_win=out_win, gates=gates)
    annotations = arguments.annotations_of(gated_sum)
    arguments.check_not_empty(arguments.bind_shapes(annotations, arrays), "BTNV")
    arguments.check_dtypes(annotations, arrays)
    with dispatch.running("gated_sum", implementation, *arrays.values()) as kernels:
        return kernels.gated_sum(*arrays.values())
