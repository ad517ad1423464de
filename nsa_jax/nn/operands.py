"""What a layer tells of a call: the arrays that it passes to the operations, and what it chose."""

from typing import NamedTuple

from nsa_jax.array_typing import Array, Float, Int32


class Selection(NamedTuple):
    """What a layer chose for each query.

    Attributes:
      block_indices: selected blocks for each KV head, as `nsa_jax.select_blocks` returns them.
      gates: weights of the branches of the layer, in the order cmp, slc, win; None for one alone.
    """

    block_indices: Int32[Array, "B T K R"]
    gates: Float[Array, "B T N branches"] | None


class Operands(NamedTuple):
    """The arrays that `nsa_jax.native_sparse_attention` takes, in its order; None for an absent branch.

    Attributes:
      query: rotated queries.
      key_cmp: compressed and then rotated keys.
      value_cmp: compressed values.
      key_slc: rotated keys of the selected branch.
      value_slc: values of the selected branch.
      key_win: rotated keys of the window branch.
      value_win: values of the window branch.
      gates: weights of the branches, in the order cmp, slc, win.
    """

    query: Float[Array, "B T N H"]
    key_cmp: Float[Array, "B C K H"] | None
    value_cmp: Float[Array, "B C K V"] | None
    key_slc: Float[Array, "B T K H"]
    value_slc: Float[Array, "B T K V"]
    key_win: Float[Array, "B T K H"] | None
    value_win: Float[Array, "B T K V"] | None
    gates: Float[Array, "B T N branches"] | None
