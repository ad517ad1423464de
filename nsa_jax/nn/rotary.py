"""Rotary position embedding (arXiv:2104.09864). All three branches share one rotation."""

import dataclasses
import typing
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from nsa_jax.array_checks import check_arrays
from nsa_jax.array_typing import Array, Float, Int
from nsa_jax.compression import Rotation
from nsa_jax.nn.rope_scaling import RopeScaling
from nsa_jax.option_checks import check_function, check_positive

DEFAULT_BASE = 10000.0

type RotaryFunction = Callable[[Float[Array, "B T N H"], Int[Array, "B T"]], Float[Array, "B T N H"]]


def rotate(
    x: Float[Array, "B T N H"],
    positions: Int[Array, "B T"],
    *,
    base: float = DEFAULT_BASE,
    scaling: RopeScaling | None = None,
) -> Float[Array, "B T N H"]:
    """Rotates each head by its position, so that dot products depend only on differences of positions.

    Section 3.4.2 of arXiv:2104.09864 with half-split pairing: dimensions `i` and `i + H // 2` form a pair,
    which turns by `position * base ** (-i / (H // 2))`. The NSA paper does not say which pairing it uses;
    ours is that of LLaMA.

    Args:
      x: queries or keys. If `H` is odd, the last dimension stays as it is.
      positions: rotary position of each token, any integers; one row stands for all rows of `x`.
      base: base of the frequencies; with a larger base, pairs turn more slowly.
      scaling: a scaling of the frequencies for longer contexts, or None. A `YarnScaling` also multiplies the
        heads by its `magnitude`.

    Returns:
      The rotated heads in the dtype of `x`.

    Numerics:
      Angles are within 2e-6 rad of the exact ones at every int32 position, so that a million tokens turn as
      precisely as ten do. Angles, sine, cosine and products are float32, or float64 for float64 inputs.

    Raises:
      TypeError: an argument is of the wrong kind, or an array of the wrong kind of dtype.
      ValueError: shapes disagree, or `base` or what `scaling` makes of it is out of range.

    Gradients:
      The cotangent rotated back, multiplied by the same magnitude.
    """
    if getattr(positions, "ndim", None) == 2 and positions.shape[0] == 1 and getattr(x, "ndim", None) == 4:
        repeat = np.repeat if isinstance(positions, np.ndarray) else jnp.repeat  # int64 stays to be checked
        positions = repeat(positions, x.shape[0], axis=0)
    check_arrays(rotate, x=x, positions=positions)
    _check_frequencies(base, scaling)
    return Rotary(base, scaling).rotation(x.shape[-1])(x, positions)


@dataclasses.dataclass(frozen=True)
class Rotary:
    """`rotate` with fixed settings: the rotary function of a layer that was given none.

    Attributes:
      base: base of the frequencies.
      scaling: a scaling of the frequencies, or None.
    """

    base: float
    scaling: RopeScaling | None

    def __call__(self, x: Float[Array, "B T N H"], positions: Int[Array, "B T"]) -> Float[Array, "B T N H"]:
        """Returns the rotated heads, see `rotate`."""
        return rotate(x, positions, base=self.base, scaling=self.scaling)

    def rotation(self, dim: int) -> Rotation:
        """The rotation of heads of width `dim`, as data."""
        half = dim // 2
        frequency = np.array([self.base ** (-i / half) for i in range(half)], np.float64)
        magnitude = 1.0
        if self.scaling is not None:
            frequency, magnitude = self.scaling.scaled(frequency, self.base), self.scaling.magnitude
        return Rotation.of(frequency, magnitude)


def rotary_function(
    base: float, scaling: RopeScaling | None, rotary: RotaryFunction | None
) -> RotaryFunction:
    """Returns the rotary function of a layer: `rotary`, or one with `base` and `scaling`.

    Raises:
      TypeError: `base` is no number, `scaling` is not a `RopeScaling`, or `rotary` cannot be called.
      ValueError: `base` is not finite and above 0, or `rotary` is given together with settings that it does
        not read.
    """
    if rotary is None:
        _check_frequencies(base, scaling)
        return Rotary(base, scaling)
    if base != DEFAULT_BASE or scaling is not None:
        raise ValueError(
            f"rope_base and rope_scaling must be left out if a rotary function is given, got {base} and "
            f"{scaling}. Set them in the function, or leave it out."
        )
    check_function(rotary=rotary)
    return rotary


def _check_frequencies(base: float, scaling: RopeScaling | None) -> None:
    """Raises TypeError or ValueError unless rotary frequencies can be made of these."""
    if scaling is not None and not isinstance(scaling, RopeScaling):
        names = ", ".join(scheme.__name__ for scheme in typing.get_args(RopeScaling))
        raise TypeError(
            f"rope_scaling must be one of {names}, got {type(scaling).__name__}. Build one of them."
        )
    check_positive(rope_base=base)


def turn(
    rotary: RotaryFunction, x: Float[Array, "B T N H"], positions: Int[Array, "B T"]
) -> Float[Array, "B T N H"]:
    """Calls `rotary` and casts the result to the dtype of `x`. Raises ValueError if the shape changed."""
    turned = rotary(x, positions)
    if turned.shape != x.shape:
        raise ValueError(
            f"a rotary function must keep the shape of its heads, got {turned.shape} for {x.shape}. "
            "Make it return all dimensions, also those that it does not rotate."
        )
    return turned.astype(x.dtype)
