"""Rotary position embedding (arXiv:2104.09864), the one rotation that all three branches share."""

import dataclasses
import typing
from collections.abc import Callable

import numpy as np

from nsa_jax.array_typing import Array, Float, Int
from nsa_jax.compression import Rotation
from nsa_jax.nn.rope_scaling import RopeScaling

DEFAULT_BASE = 10000.0

type RotaryFunction = Callable[[Float[Array, "B T N H"], Int[Array, "B T"]], Float[Array, "B T N H"]]


def rotate(
    x: Float[Array, "B T N H"],
    positions: Int[Array, "B T"],
    *,
    base: float = DEFAULT_BASE,
    scaling: RopeScaling | None = None,
) -> Float[Array, "B T N H"]:
    """Rotates each head of `x` by its position, so that dot products depend on position differences only.

    Section 3.4.2 of arXiv:2104.09864 with half-split pairing: dimension `i` turns with dimension `i + H // 2`
    by `position * base ** (-i / (H // 2))`. The paper on NSA does not fix the pairing; ours is that of LLaMA.

    Args:
      x: queries or keys. An odd last dimension stays as it is.
      positions: rotary position of each token, any integers.
      base: wavelength base; larger turns slower.
      scaling: what replaces the frequencies, for longer contexts; a `YarnScaling` also lengthens the pairs.

    Returns:
      The rotated heads in the dtype of `x`.

    Numerics:
      Frequencies and angles are rounded to float32, in every dtype of `x`, so that two frameworks turn by the
      same angle; sine, cosine and products are float32, or float64 for float64 inputs.

    Gradients:
      The inverse rotation of the cotangent, lengthened as the heads are.
    """
    return Rotary(base, scaling).rotation(x.shape[-1])(x, positions)


@dataclasses.dataclass(frozen=True)
class Rotary:
    """`rotate` with its settings: the rotary function of a layer to which none was given."""

    base: float
    scaling: RopeScaling | None

    def __call__(self, x: Float[Array, "B T N H"], positions: Int[Array, "B T"]) -> Float[Array, "B T N H"]:
        """Rotated heads."""
        return rotate(x, positions, base=self.base, scaling=self.scaling)

    def rotation(self, dim: int) -> Rotation:
        """The same for heads of `dim`, as data."""
        half = dim // 2
        frequency = np.array([self.base ** (-i / half) for i in range(half)], np.float64)
        magnitude = 1.0
        if self.scaling is not None:
            frequency, magnitude = self.scaling.scaled(frequency, self.base), self.scaling.magnitude
        return Rotation(frequency.astype(np.float32), magnitude)


def rotary_function(
    base: float, scaling: RopeScaling | None, rotary: RotaryFunction | None
) -> RotaryFunction:
    """The function by which a layer rotates: `rotary`, or what `base` and `scaling` say.

    Raises:
      TypeError: `scaling` is no `RopeScaling`, or `rotary` no function.
      ValueError: `rotary` is given beside settings that it does not read.
    """
    if rotary is None:
        if scaling is not None and not isinstance(scaling, RopeScaling):
            names = ", ".join(scheme.__name__ for scheme in typing.get_args(RopeScaling))
            raise TypeError(
                f"rope_scaling must be one of {names}, got {type(scaling).__name__}. Build one of them."
            )
        return Rotary(base, scaling)
    if base != DEFAULT_BASE or scaling is not None:
        raise ValueError(
            f"a rotary function takes the place of rope_base and rope_scaling, got {base} and {scaling} "
            "beside it. Set them in the function, or leave it out."
        )
    if not callable(rotary):
        raise TypeError(
            f"rotary must be a function of heads and positions, got {type(rotary).__name__}. Pass a function."
        )
    return rotary


def turn(
    rotary: RotaryFunction, x: Float[Array, "B T N H"], positions: Int[Array, "B T"]
) -> Float[Array, "B T N H"]:
    """`rotary(x, positions)` in the dtype of `x`. Raises ValueError if it has another shape than `x`."""
    turned = rotary(x, positions)
    if turned.shape != x.shape:
        raise ValueError(
            f"a rotary function must keep the shape of its heads, got {turned.shape} for {x.shape}. "
            "Make it join the dimensions that it leaves alone to those that it turns."
        )
    return turned.astype(x.dtype)
