"""What the gradients of a branch read beside the operands of its forward."""

from typing import NamedTuple

from nsa_jax.array_typing import Array, Float


class Backward(NamedTuple):
    """Results of the forward and cotangents, where the cotangent of the output is `gate * d_out`.

    Attributes:
      out, lse: what the forward returned.
      d_out: cotangent of the weighted output, that is, of the gated sum.
      d_lse: cotangent of `lse`; None for 0.
      gate: one factor for each row, the gate of the branch; None for 1.
      previous: gradient of the queries from other branches, which is added in float32; None for none.
    """

    out: Float[Array, "B T N V"]
    lse: Float[Array, "B T N"]
    d_out: Float[Array, "B T N V"]
    d_lse: Float[Array, "B T N"] | None = None
    gate: Float[Array, "B T N"] | None = None
    previous: Float[Array, "B T N H"] | None = None
