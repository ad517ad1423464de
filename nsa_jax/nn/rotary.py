"""Rotary position embedding (arXiv:2104.09864), the one rotation that all three branches share."""

import jax.numpy as jnp
import numpy as np

from nsa_jax.array_typing import Array, Float, Int

DEFAULT_BASE = 10000.0


def rotate(
    x: Float[Array, "B T N H"],
    positions: Int[Array, "B T"],
    *,
    base: float = DEFAULT_BASE,
) -> Float[Array, "B T N H"]:
    """Rotates each head of `x` by its position, so that dot products depend on position differences only.

    Section 3.4.2 of arXiv:2104.09864 with half-split pairing: dimension `i` turns with dimension `i + H // 2`
    by `position * base ** (-i / (H // 2))`. The paper on NSA does not fix the pairing; ours is that of LLaMA.

    Args:
      x: queries or keys. An odd last dimension stays as it is.
      positions: rotary position of each token, any integers.
      base: wavelength base; larger turns slower.

    Returns:
      The rotated heads in the dtype of `x`.

    Numerics:
      Frequencies and angles are rounded to float32, in every dtype of `x`, so that two frameworks turn by the
      same angle; sine, cosine and products are float32, or float64 for float64 inputs.

    Gradients:
      The inverse rotation of the cotangent.
    """
    half = x.shape[-1] // 2
    frequency = np.array([base ** (-i / half) for i in range(half)], np.float32)
    angle = positions[:, :, None, None].astype(jnp.float32) * frequency
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    angle = angle.astype(wide.dtype)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    left, right, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin, rest], axis=-1).astype(
        x.dtype
    )
