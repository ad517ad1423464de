"""The compression phi of Eq. 7: one compressed key (or value) for each block of `l` tokens."""

from typing import Any, Literal, get_args

import jax.numpy as jnp
from flax import nnx

from nsa_jax.array_checks import check_arrays
from nsa_jax.array_typing import Array, DType, Float
from nsa_jax.compression import ResidualMLP, mean_of_strides
from nsa_jax.config import NSAConfig, check_config
from nsa_jax.layout import token_strides
from nsa_jax.nn.checks import check_parameters
from nsa_jax.option_checks import check_choice, check_dtype, check_int

POSITION_EMBEDDING_STD = 0.02

CompressionMode = Literal["mlp", "mean"]


class Compressor(nnx.Module):
    """Learned compression of token blocks to single keys (or values). The KV heads share its parameters.

    Equation 7 of arXiv:2502.11089 has "a learnable MLP with intra-block position encoding". Our reading:

    * mode "mlp" computes `mean(block) + gelu(flatten(block + position_embedding) @ kernel_in + bias_in) @
      kernel_out + bias_out`. The output layer starts at zero, so training starts from mean pooling;
    * mode "mean" computes `mean(block)` and has no parameters.

    Parameters of mode "mlp": `position_embedding`, `kernel_in`, `bias_in`, `kernel_out` and `bias_out`.

    Args:
      head_dim: width of a key (or value).
      config: block structure.
      mode: "mlp" or "mean".
      hidden_dim: width of the hidden layer, `2 * head_dim` by default.
      dtype: dtype of the computation; by default the promoted dtype of inputs and parameters, as in
        `nnx.Linear`.
      param_dtype: dtype of the parameters.
      precision: precision of the products, see `jax.lax.Precision`.
      rngs: source of the initial parameters.

    Raises:
      TypeError: an option is of the wrong kind.
      ValueError: a width is below 1, or the mode, a dtype or the precision is unknown.

    Numerics:
      The mean accumulates in float32 at least; the GELU is the tanh approximation.
    """

    def __init__(
        self,
        head_dim: int,
        config: NSAConfig,
        mode: CompressionMode = "mlp",
        hidden_dim: int | None = None,
        *,
        dtype: DType | None = None,
        param_dtype: DType = jnp.float32,
        precision: Any = None,
        rngs: nnx.Rngs,
    ):
        check_int(low=1, head_dim=head_dim, **({} if hidden_dim is None else {"hidden_dim": hidden_dim}))
        check_config(config)
        check_choice(get_args(CompressionMode), compression=mode)
        check_parameters(dtype=dtype, param_dtype=param_dtype, precision=precision, rngs=rngs)
        head_dim = int(head_dim)
        self.head_dim, self.config, self.mode = head_dim, config, mode
        self.dtype, self.precision = dtype, precision
        if mode == "mlp":
            size = config.compression_block_size
            hidden = 2 * head_dim if hidden_dim is None else int(hidden_dim)
            embed = nnx.initializers.normal(POSITION_EMBEDDING_STD)
            kernel = nnx.initializers.lecun_normal()
            self.position_embedding = nnx.Param(embed(rngs.params(), (size, head_dim), param_dtype))
            self.kernel_in = nnx.Param(kernel(rngs.params(), (size * head_dim, hidden), param_dtype))
            self.bias_in = nnx.Param(jnp.zeros((hidden,), param_dtype))
            self.kernel_out = nnx.Param(jnp.zeros((hidden, head_dim), param_dtype))
            self.bias_out = nnx.Param(jnp.zeros((head_dim,), param_dtype))

    def __call__(self, windows: Float[Array, "B m l K H"]) -> Float[Array, "B m K H"]:
        """Compresses each block to one key (or value).

        Args:
          windows: un-rotated tokens of each block, for example from `token_windows`.

        Returns:
          One vector for each block and KV head, in the dtype of the computation.

        Raises:
          TypeError: `windows` is not an array of floats.
          ValueError: `windows` does not have five axes, or the blocks or heads are of another size.
        """
        sizes = check_arrays(Compressor.__call__, windows=windows)
        own = dict(l=self.config.compression_block_size, H=self.head_dim)
        if (given := {axis: sizes[axis] for axis in own}) != own:
            raise ValueError(
                f"windows must be [B, m, l, K, H] with {own}, got {given}. Make the compressor for them."
            )
        if self.mode == "mean":
            return windows.astype(windows.dtype if self.dtype is None else self.dtype).mean(axis=2)
        windows, *arrays = self._promoted(windows)
        return ResidualMLP(*arrays)(windows, precision=self.precision)

    def of_rows(self, rows: Float[Array, "B S K H"]) -> Float[Array, "B m K H"]:
        """Compresses each block of rows that are one sequence each, without forming their windows.

        Args:
          rows: un-rotated tokens.

        Returns:
          As a call with `token_windows(rows, config)`.

        Raises:
          TypeError: `rows` is not an array of floats.
          ValueError: `rows` does not have four axes, or the heads are of another size.
        """
        width = check_arrays(Compressor.of_rows, rows=rows)["H"]
        if width != self.head_dim:
            raise ValueError(
                f"rows must be [B, S, K, {self.head_dim}], got {rows.shape}. Make the compressor for them."
            )
        if self.mode == "mean":
            rows = rows.astype(rows.dtype if self.dtype is None else self.dtype)
            num = self.config.compression_block_size // self.config.compression_stride
            return mean_of_strides(token_strides(rows, self.config), num)
        rows, *arrays = self._promoted(rows)
        return ResidualMLP(*arrays).of_strides(token_strides(rows, self.config), precision=self.precision)

    def is_data(self, dtype: DType) -> bool:
        """Tells whether `weights` describes the whole computation.

        Args:
          dtype: dtype of the blocks.

        Returns:
          False if a precision is set, or if a mean is computed in another dtype than `dtype`; else True.

        Raises:
          ValueError: `dtype` is not floating.
        """
        check_dtype(dtype=dtype)
        keeps_dtype = self.mode == "mlp" or jnp.dtype(self.dtype or dtype) == jnp.dtype(dtype)
        return self.precision is None and keeps_dtype

    def weights(self, dtype: DType) -> ResidualMLP | None:
        """Returns the arrays that compress blocks, for `nsa_jax.cache.Compression`.

        Args:
          dtype: dtype of the blocks.

        Returns:
          The arrays in the dtype of the computation, or None for mode "mean".

        Raises:
          ValueError: `dtype` is not floating.
        """
        check_dtype(dtype=dtype)
        if self.mode == "mean":
            return None
        _, *arrays = self._promoted(jnp.zeros((), dtype))
        return ResidualMLP(*arrays)

    def _promoted(self, windows: Array) -> tuple[Array, ...]:
        """Windows and parameters in the dtype of the computation."""
        parameters = (self.position_embedding, self.kernel_in, self.bias_in, self.kernel_out, self.bias_out)
        return nnx.nn.dtypes.promote_dtype(
            (windows, *(parameter[...] for parameter in parameters)), dtype=self.dtype
        )
