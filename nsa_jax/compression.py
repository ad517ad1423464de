"""The compression phi of Eq. 7 as data, which a kernel can take where it cannot take a function.

`nn.Compressor` and `nn.rotate` compute with these classes, too, so a layer and its decode steps agree.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nsa_jax.array_typing import Array, Float, Float32, Int, Int32
from nsa_jax.option_checks import check_number


class ResidualMLP(NamedTuple):
    """An MLP that compresses a block to one key (or value), added to the mean of the block.

    For a block `x` of `l` tokens it computes `mean(x) + gelu(flatten(x + position_embedding) @ kernel_in +
    bias_in) @ kernel_out + bias_out`. All KV heads share the arrays. It computes in the dtype of its arrays.

    Attributes:
      position_embedding: added to the tokens of a block by their place in it.
      kernel_in: kernel of the hidden layer, which takes the flattened block.
      bias_in: bias of the hidden layer.
      kernel_out: kernel of the output layer.
      bias_out: bias of the output layer.
    """

    position_embedding: Float[Array, "l D"]
    kernel_in: Float[Array, "lD F"]
    bias_in: Float[Array, " F"]
    kernel_out: Float[Array, "F D"]
    bias_out: Float[Array, " D"]

    def __call__(
        self, windows: Float[Array, "B m l K D"], *, precision: Any = None
    ) -> Float[Array, "B m K D"]:
        """Computes one key (or value) for each block.

        Args:
          windows: tokens of each block, un-rotated.
          precision: precision of the products, see `jax.lax.Precision`.

        Returns:
          One vector for each block and KV head, in the dtype of the arrays.

        Numerics:
          The mean accumulates in float32 at least; GELU is the tanh approximation.
        """
        windows = windows.astype(self.kernel_in.dtype)
        size, dim = self.position_embedding.shape
        # Flattening (l, D) and multiplying is one contraction over both axes. Written like this, XLA needs no
        # transposed copy.
        hidden = jnp.einsum(
            "bmlkd,ldf->bmkf",
            windows + self.position_embedding[:, None],
            self.kernel_in.reshape(size, dim, -1),
            precision=precision,
        )
        hidden = jax.nn.gelu(hidden + self.bias_in, approximate=True)
        out = jnp.matmul(hidden, self.kernel_out, precision=precision)
        return windows.mean(axis=2) + out + self.bias_out

    def of_strides(
        self, strides: Float[Array, "B n d K D"], *, precision: Any = None
    ) -> Float[Array, "B m K D"]:
        """Computes one key (or value) for each block of rows that are one sequence each.

        The same function of the tokens as a call with their windows, which are never formed: a stride is
        multiplied once, by all parts of `kernel_in` side by side, and a block adds up what its strides give.

        Args:
          strides: tokens of each stride, un-rotated. Block `j` is the `l / d` strides from number `j` on.
          precision: precision of the products, see `jax.lax.Precision`.

        Returns:
          As a call.

        Numerics:
          As a call, and the products of strides are added in float32 at least.
        """
        strides = strides.astype(self.kernel_in.dtype)
        (size, dim), stride = self.position_embedding.shape, strides.shape[2]
        num = size // stride
        kernel = self.kernel_in.reshape(num, stride, dim, -1)
        position = self.position_embedding.reshape(num, stride, dim)
        of_position = jnp.einsum("psd,psdf->f", position, kernel, precision=precision)
        products = jnp.einsum("bnskd,psdf->bnkpf", strides, kernel, precision=precision)
        hidden = _sum_in_blocks([products[..., part, :] for part in range(num)]) + of_position + self.bias_in
        hidden = jax.nn.gelu(hidden.astype(strides.dtype), approximate=True)
        out = jnp.matmul(hidden, self.kernel_out, precision=precision)
        return mean_of_strides(strides, num) + out + self.bias_out


def mean_of_strides(strides: Float[Array, "B n d K D"], num: int) -> Float[Array, "B m K D"]:
    """The mean of each block of `num` strides, accumulated in float32 at least."""
    sums = strides.sum(axis=2, dtype=jnp.promote_types(strides.dtype, jnp.float32))
    return (_sum_in_blocks([sums] * num) / (num * strides.shape[2])).astype(strides.dtype)


def _sum_in_blocks(parts: Sequence[Float[Array, "B n ..."]]) -> Float[Array, "B m ..."]:
    """Adds up what the strides of each block give: the first by the first of `parts`, and so on."""
    wide = jnp.promote_types(parts[0].dtype, jnp.float32)
    blocks = max(parts[0].shape[1] - len(parts) + 1, 0)
    return functools.reduce(jnp.add, (part[:, j : j + blocks].astype(wide) for j, part in enumerate(parts)))


# A turn of 2 pi has 2^32 ticks. The int32 product of a position and ticks per position wraps around where a
# turn is complete, so the angle that it leaves is exact at every position.
RADIANS_PER_TICK = 2 * math.pi / 2**32


class Rotation(NamedTuple):
    """Rotary embedding as data: rotates the pairs of dimensions `i` and `i + H // 2` and scales them.

    `Rotation.of` makes it from frequencies in radians.

    Attributes:
      ticks: angle per position of each pair without whole turns, rounded to 2^-32 of a turn, in such ticks.
      rest: what the rounding left of that angle, in radians.
      magnitude: factor of the rotated heads, which YaRN uses.
    """

    ticks: Int32[Array | np.ndarray, " pairs"]
    rest: Float32[Array | np.ndarray, " pairs"]
    magnitude: float = 1.0

    @classmethod
    def of(cls, frequency: Float[np.ndarray, " pairs"], magnitude: float = 1.0) -> "Rotation":
        """Returns the rotation by `frequency`, the angle per position of each pair in radians (float64).

        Raises:
          TypeError: `frequency` is not an array of floats, or `magnitude` is not a number.
          ValueError: a value is not finite.
        """
        check_number(magnitude=magnitude)
        if not isinstance(frequency, np.ndarray) or not np.issubdtype(frequency.dtype, np.floating):
            given = getattr(frequency, "dtype", type(frequency).__name__)
            raise TypeError(f"frequency must be an array of floats, got {given}. Pass an np.ndarray.")
        if not np.isfinite(frequency).all():
            raise ValueError(f"frequency must be finite, got {frequency}. Pass radians per position.")
        ticks = frequency.astype(np.float64) / RADIANS_PER_TICK
        whole = np.rint(ticks)
        rest = (ticks - whole) * RADIANS_PER_TICK
        return cls((whole % 2**32).astype(np.uint32).view(np.int32), rest.astype(np.float32), magnitude)

    def angles(self, positions: Int[Array, "*X"], dtype: Any) -> Float[Array, "*X pairs"]:
        """The angle of each pair at each position, between about -pi and pi.

        In float32 it is within 1e-6 of the exact angle at positions up to 2^24, within 2e-6 at every int32
        position: four roundings of an angle of about pi. Up to 2^24, `position * rest` is below 0.013.
        """
        positions = jnp.asarray(positions, jnp.int32)[..., None]
        turned = (positions * self.ticks).astype(dtype) * RADIANS_PER_TICK
        return turned + positions.astype(dtype) * jnp.asarray(self.rest, dtype)

    def __call__(self, x: Float[Array, "B T N H"], positions: Int[Array, "B T"]) -> Float[Array, "B T N H"]:
        """Rotates each pair by its angle at the position and multiplies it by `magnitude`.

        Args:
          x: heads; dimensions beyond the pairs stay as they are.
          positions: rotary position of each token.

        Returns:
          The rotated heads in the dtype of `x`; the numerics are those of `nsa_jax.nn.rotate`.
        """
        half = self.ticks.shape[0]
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        angle = self.angles(positions, wide.dtype)[:, :, None]
        cos, sin = self.magnitude * jnp.cos(angle), self.magnitude * jnp.sin(angle)
        # The gradient of a split lays its parts side by side, as this does; slices would be padded and added.
        left, right, rest = jnp.split(wide, (half, 2 * half), axis=-1)
        turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin, rest], axis=-1)
        return turned.astype(x.dtype)


class Compression(NamedTuple):
    """Compresses the keys and values of blocks and rotates the compressed keys.

    It can be called wherever a `Compress` function is accepted. The GPU kernels of a decode step also read
    its arrays and compress the blocks themselves. By default a block becomes the mean of its tokens.

    Attributes:
      key: how the keys of a block become one key; None for their mean.
      value: how the values of a block become one value; None for their mean.
      rotation: rotation of a compressed key, at the position of its block's first token; None for no
        rotation.
    """

    key: ResidualMLP | None = None
    value: ResidualMLP | None = None
    rotation: Rotation | None = None

    def __call__(
        self,
        key_windows: Float[Array, "B m l K H"],
        value_windows: Float[Array, "B m l K V"],
        first_positions: Int[Array, "B m"],
    ) -> tuple[Float[Array, "B m K H"], Float[Array, "B m K V"]]:
        """Compresses blocks.

        Args:
          key_windows: un-rotated keys of each block.
          value_windows: values of each block.
          first_positions: rotary position of the first token of each block.

        Returns:
          Compressed and rotated keys, and compressed values, in the dtypes of keys and values.
        """
        key = _one_of_each(self.key, key_windows)
        if self.rotation is not None:
            key = self.rotation(key, first_positions)
        return key, _one_of_each(self.value, value_windows)


# Maps key windows, value windows and first positions to compressed keys and values, as `Compression` does.
type Compress = Callable[[Array, Array, Array], tuple[Array, Array]] | Compression


def check_compress(compress: Any) -> None:
    """Raises TypeError unless `compress` can be called."""
    if not callable(compress):
        raise TypeError(
            f"compress must be a Compression or a function, got {type(compress).__name__}. Pass "
            "Compression() for means."
        )


def compress_blocks(
    compress: Compress,
    key_windows: Float[Array, "B m l K H"],
    value_windows: Float[Array, "B m l K V"],
    first_positions: Int[Array, "B m"],
) -> tuple[Float[Array, "B m K H"], Float[Array, "B m K V"]]:
    """Calls `compress` on the windows and casts the results to their dtype.

    Raises:
      ValueError: the result is not one key and one value for each block.
    """
    found = compress(key_windows, value_windows, first_positions)
    expected = [(*x.shape[:2], *x.shape[3:]) for x in (key_windows, value_windows)]
    if (shapes := [x.shape for x in found]) != expected:
        raise ValueError(
            f"compress must return one key and one value for each block, of shapes {expected}, got {shapes}. "
            "Make it reduce only axis 2, the tokens of a block."
        )
    key, value = found
    return key.astype(key_windows.dtype), value.astype(value_windows.dtype)


def _one_of_each(mlp: ResidualMLP | None, windows: Float[Array, "B m l K D"]) -> Float[Array, "B m K D"]:
    return windows.mean(axis=2) if mlp is None else mlp(windows).astype(windows.dtype)
