"""The gates of Eq. 5: the weight of each branch, per token and query head."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nsa_jax.array_checks import check_arrays
from nsa_jax.array_typing import Array, DType, Float
from nsa_jax.config import BRANCHES
from nsa_jax.nn.checks import check_parameters
from nsa_jax.nn.products import columns
from nsa_jax.nn.projections import Sharding, check_sharding, sharding_metadata
from nsa_jax.option_checks import check_int, check_number

MIN_HIDDEN_DIM = 8


class Gate(nnx.Module):
    """A small MLP that computes sigmoid gates from the layer input.

    Equation 5 of arXiv:2502.11089 has "an MLP and sigmoid activation". Our reading: one hidden layer with
    SiLU, and one gate per token, query head and branch, in the order cmp, slc, win. They need not sum to 1.

    Parameters: `kernel_in`, `bias_in`, `kernel_out` and `bias_out`.

    Args:
      in_features: width of the layer input.
      num_heads: number of query heads.
      hidden_dim: width of the hidden layer, `max(in_features // 4, 8)` by default.
      num_branches: number of branches.
      initial_gates: what each gate is at first, whatever the input: one number between 0 and 1 for each
        branch. The output layer then starts at zero. By default it is drawn, and gates start around one half.
      dtype: dtype of the computation; by default the promoted dtype of inputs and parameters, as in
        `nnx.Linear`.
      param_dtype: dtype of the parameters.
      precision: precision of the products, see `jax.lax.Precision`.
      sharding: mesh axes of the dimensions "model" and "heads", see `NSAAttention`.
      rngs: source of the initial parameters.

    Raises:
      TypeError: an option is of the wrong kind.
      ValueError: a number is out of range; `dtype`, `param_dtype`, `precision` or a name in `sharding` is
        unknown, or the mesh in context cannot shard a parameter as asked.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        hidden_dim: int | None = None,
        *,
        num_branches: int = len(BRANCHES),
        initial_gates: Sequence[float] | None = None,
        dtype: DType | None = None,
        param_dtype: DType = jnp.float32,
        precision: Any = None,
        sharding: Sharding | None = None,
        rngs: nnx.Rngs,
    ):
        check_int(low=1, in_features=in_features, num_heads=num_heads)
        check_parameters(dtype=dtype, param_dtype=param_dtype, precision=precision, rngs=rngs)
        check_sharding(sharding, heads=num_heads)
        self.dtype, self.precision = dtype, precision
        hidden = max(in_features // 4, MIN_HIDDEN_DIM) if hidden_dim is None else hidden_dim
        check_int(low=1, hidden_dim=hidden, num_branches=num_branches)
        in_features, num_heads, hidden = int(in_features), int(num_heads), int(hidden)
        columns_out = (num_heads, int(num_branches))
        initial_gates = check_initial_gates(initial_gates, columns_out[1])
        init = nnx.initializers.lecun_normal()
        kernel_in = init(rngs.params(), (in_features, hidden), param_dtype)
        # Drawn with two axes: with three, the initializer would count the heads as part of the fan-in.
        kernel_out = init(rngs.params(), (hidden, math.prod(columns_out)), param_dtype)
        kernel_out = kernel_out.reshape(hidden, *columns_out)
        bias_out = jnp.zeros(columns_out, param_dtype)
        if initial_gates is not None:
            logits = [math.log(gate) - math.log1p(-gate) for gate in initial_gates]
            kernel_out, bias_out = jnp.zeros_like(kernel_out), bias_out + jnp.array(logits, param_dtype)
        self.kernel_in = nnx.Param(kernel_in, **sharding_metadata(sharding, "model", None))
        self.bias_in = nnx.Param(jnp.zeros((hidden,), param_dtype), **sharding_metadata(sharding, None))
        self.kernel_out = nnx.Param(kernel_out, **sharding_metadata(sharding, None, "heads", None))
        self.bias_out = nnx.Param(bias_out, **sharding_metadata(sharding, "heads", None))

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T N branches"]:
        """Computes the gates.

        Args:
          x: layer input.

        Returns:
          Weights of the branches in the order cmp, slc, win, each between 0 and 1, in the dtype of the
          computation.

        Raises:
          TypeError: `x` is not an array of floats.
          ValueError: `x` does not have three axes and the width `in_features`.
        """
        width = check_arrays(Gate.__call__, x=x)["D"]
        if width != self.kernel_in.shape[0]:
            raise ValueError(
                f"x must be as wide as the gate, {self.kernel_in.shape[0]}, got {width}. Make the gate with "
                "this width as in_features."
            )
        parameters = (self.kernel_in, self.bias_in, self.kernel_out, self.bias_out)
        x, kernel_in, bias_in, *_ = nnx.nn.dtypes.promote_dtype(
            (x, *(parameter[...] for parameter in parameters)), dtype=self.dtype
        )
        kernel_in, bias_in = columns(x, kernel_in, bias_in)
        return self.of_hidden(jnp.matmul(x, kernel_in, precision=self.precision) + bias_in)

    def of_hidden(self, hidden: Float[Array, "B T hidden"]) -> Float[Array, "B T N branches"]:
        """The gates, given the hidden layer before its SiLU, or copies of it for equal parts of the heads."""
        hidden, kernel_out, bias_out = nnx.nn.dtypes.promote_dtype(
            (jax.nn.silu(hidden), self.kernel_out[...], self.bias_out[...]), dtype=self.dtype
        )
        kernel_out, bias_out = columns(hidden, kernel_out, bias_out)
        width, heads, branches = kernel_out.shape
        if (copies := hidden.shape[-1] // width) > 1:
            hidden = hidden.reshape(*hidden.shape[:-1], copies, width)
            kernel_out = kernel_out.reshape(width, copies, heads // copies, branches)
        weigh = "btf,fng->btng" if copies == 1 else "btcf,fcng->btcng"
        logits = jnp.einsum(weigh, hidden, kernel_out, precision=self.precision)
        return jax.nn.sigmoid(logits.reshape(*logits.shape[:2], heads, branches) + bias_out)


def check_initial_gates(initial_gates: Sequence[float] | None, num_branches: int) -> tuple[float, ...] | None:
    """Returns the gates as floats.

    Raises:
      TypeError: `initial_gates` is not a sequence of numbers.
      ValueError: it does not have one number for each branch, or one that no sigmoid has.
    """
    if initial_gates is None:
        return None
    if isinstance(initial_gates, str | bytes) or not isinstance(initial_gates, Sequence):
        raise TypeError(
            f"initial_gates must be a sequence of numbers, got {type(initial_gates).__name__}. Pass a tuple, "
            "such as (0.02, 0.96, 0.02)."
        )
    for gate in initial_gates:
        check_number(initial_gates=gate)
    if len(initial_gates) != num_branches or not all(0 < gate < 1 for gate in initial_gates):
        raise ValueError(
            f"initial_gates must be numbers between 0 and 1, one for each of {num_branches} branches, got "
            f"{tuple(initial_gates)}. Pass for example 0.02 for a branch that shall matter little."
        )
    return tuple(map(float, initial_gates))
