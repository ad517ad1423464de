"""What the gradients of a branch read beside the operands of its forward, and what they are."""

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


class BranchGradients(NamedTuple):
    """Gradients of a branch, where the cotangent of its output is `gate * d_out`.

    Attributes:
      query: with what other branches gave, if that was passed.
      key, value: as the operands.
      products: `sum(out * d_out)` of each row, which is the gradient of the gate; float32.
      delta: `gate * products - d_lse`; float32.
    """

    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K V"]
    products: Float[Array, "B T N"]
    delta: Float[Array, "B T N"]
