"""phi of Eq. 7 as data: what a kernel can be given in the place of a function.

`nn.Compressor` and `nn.rotate` compute by these, so a layer and its decode steps agree.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nsa_jax.array_typing import Array, Float, Float32, Int


class ResidualMLP(NamedTuple):
    """`mean(x) + gelu(flatten(x + position_embedding) @ kernel_in + bias_in) @ kernel_out + bias_out`.

    `x` is a block; all KV heads share the arrays. It computes in the dtype of its arrays.
    """

    position_embedding: Float[Array, "l D"]
    kernel_in: Float[Array, "lD F"]
    bias_in: Float[Array, " F"]
    kernel_out: Float[Array, "F D"]
    bias_out: Float[Array, " D"]

    def __call__(
        self, windows: Float[Array, "B m l K D"], *, precision: Any = None
    ) -> Float[Array, "B m K D"]:
        """One key (or value) for each block. The mean accumulates in float32 at least, GELU is by tanh."""
        windows = windows.astype(self.kernel_in.dtype)
        size, dim = self.position_embedding.shape
        # Flattening (l, D) and multiplying is one contraction over both, which spares a transposed copy.
        hidden = jnp.einsum(
            "bmlkd,ldf->bmkf",
            windows + self.position_embedding[:, None],
            self.kernel_in.reshape(size, dim, -1),
            precision=precision,
        )
        hidden = jax.nn.gelu(hidden + self.bias_in, approximate=True)
        out = jnp.matmul(hidden, self.kernel_out, precision=precision)
        return windows.mean(axis=2) + out + self.bias_out


class Rotation(NamedTuple):
    """Turns pairs of dimensions, `i` with `i + H // 2`, by `position * frequency[i]`, and lengthens them."""

    frequency: Float32[Array | np.ndarray, " pairs"]
    magnitude: float = 1.0

    def __call__(self, x: Float[Array, "B T N H"], positions: Int[Array, "B T"]) -> Float[Array, "B T N H"]:
        """The rotated heads in the dtype of `x`; numerics as in `nsa_jax.nn.rotate`."""
        half = self.frequency.shape[0]
        angle = positions[:, :, None, None].astype(jnp.float32) * self.frequency
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        angle = angle.astype(wide.dtype)
        cos, sin = self.magnitude * jnp.cos(angle), self.magnitude * jnp.sin(angle)
        left, right, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
        turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin, rest], axis=-1)
        return turned.astype(x.dtype)


class Compression(NamedTuple):
    """Compresses keys and values of a block, then rotates the key at its first token; the mean by default.

    A `Compress` function that the kernels of a decode step know: they form the block themselves.

    Attributes:
      key, value: how a block becomes one key, and one value; None for the mean of its tokens.
      rotation: of the compressed key; None for none.
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
        """Compressed keys and values in the dtype of the tokens."""
        key = _one_of_each(self.key, key_windows)
        if self.rotation is not None:
            key = self.rotation(key, first_positions)
        return key, _one_of_each(self.value, value_windows)


type Compress = Callable[[Array, Array, Array], tuple[Array, Array]] | Compression


def compress_blocks(
    compress: Compress,
    key_windows: Float[Array, "B m l K H"],
    value_windows: Float[Array, "B m l K V"],
    first_positions: Int[Array, "B m"],
) -> tuple[Float[Array, "B m K H"], Float[Array, "B m K V"]]:
    """`compress` of the windows, in their dtype. Raises ValueError unless it gives one for each block."""
    found = compress(key_windows, value_windows, first_positions)
    expected = [(*x.shape[:2], *x.shape[3:]) for x in (key_windows, value_windows)]
    if (shapes := [x.shape for x in found]) != expected:
        raise ValueError(
            f"compress must make one key and one value of each block, {expected}, got {shapes}. Make it "
            "reduce axis 2, the tokens of a block, alone."
        )
    key, value = found
    return key.astype(key_windows.dtype), value.astype(value_windows.dtype)


def _one_of_each(mlp: ResidualMLP | None, windows: Float[Array, "B m l K D"]) -> Float[Array, "B m K D"]:
    return windows.mean(axis=2) if mlp is None else mlp(windows).astype(windows.dtype)
