"""Rotary position embedding and the scalings of its frequencies, computed pair by pair."""

import math
from typing import Any

import torch
from torch import Tensor

from nsa_torch_ref.attention import accumulation_dtype


def frequency(i: int, half: int, base: float, scaling: Any = None) -> float:
    """The frequency of pair `i` of `half`, in radians per token.

    `scaling` is None or an object with a `kind` and the attributes of that kind:

    * "linear" (arXiv:2306.15595): `factor`;
    * "llama3" (Llama 3.1): `factor`, `low_frequency_factor`, `high_frequency_factor` and `original_length`;
    * "yarn" (arXiv:2309.00071, with the ramp of its released code): `factor`, `beta_fast`, `beta_slow` and
      `original_length`.
    """
    plain = base ** (-i / half)
    if scaling is None:
        return plain
    interpolated = plain / scaling.factor
    if scaling.kind == "linear":
        return interpolated
    if scaling.kind == "llama3":
        wavelength = 2 * math.pi / plain
        longest, shortest = (
            scaling.original_length / turns
            for turns in (scaling.low_frequency_factor, scaling.high_frequency_factor)
        )
        if wavelength <= shortest:
            return plain
        if wavelength >= longest:
            return interpolated
        part = (scaling.original_length / wavelength - scaling.low_frequency_factor) / (
            scaling.high_frequency_factor - scaling.low_frequency_factor
        )
        return part * plain + (1 - part) * interpolated
    assert scaling.kind == "yarn", scaling.kind

    def bound(turns: float) -> float:
        """The fractional index of a pair that turns `turns` times within the original length."""
        return half * (math.log(scaling.original_length / turns) - math.log(2 * math.pi)) / math.log(base)

    first, last = max(0, math.floor(bound(scaling.beta_fast))), math.ceil(bound(scaling.beta_slow))
    last = min(last, 2 * half - 1)
    if i <= first:
        return plain
    if i >= last:
        return interpolated
    part = (last - i) / (last - first)
    return part * plain + (1 - part) * interpolated


def magnitude(scaling: Any) -> float:
    """The factor of the rotated heads: that of YaRN, otherwise 1."""
    if getattr(scaling, "kind", None) != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 1.0 if scaling.factor < 1 else 1.0 + math.log(scaling.factor) / 10


def rotate(x: Tensor, positions: Tensor, base: float, scaling: Any = None) -> Tensor:
    """Rotates heads `[B, X, heads, H]` at `positions` `[B, X]`, by half-split pairs.

    If H is odd, the last dimension stays as it is. Whole turns are left out of an angle before it is rounded,
    so it is as exact at a million tokens as at ten.
    """
    half = x.shape[-1] // 2
    wide = x.to(accumulation_dtype(x.dtype))
    frequencies = [frequency(i, half, base, scaling) for i in range(half)]
    angle = _angles(positions, frequencies, wide.dtype)[:, :, None]
    cos, sin = (magnitude(scaling) * function(angle) for function in (torch.cos, torch.sin))
    left, right, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return torch.cat((left * cos - right * sin, right * cos + left * sin, rest), dim=-1).to(x.dtype)


def _angles(positions: Tensor, frequencies: list[float], dtype: torch.dtype) -> Tensor:
    """The angles `position * frequency` without whole turns, between about -pi and pi; one more axis.

    A turn has 2^32 ticks. A frequency is a whole number of ticks and a rest of at most half a tick. Ticks are
    multiplied in integers, so that what remains of the last turn is exact.
    """
    radians_per_tick = 2 * math.pi / 2**32
    in_ticks = torch.tensor(frequencies, dtype=torch.float64, device=positions.device) / radians_per_tick
    ticks = in_ticks.round()
    rest = ((in_ticks - ticks) * radians_per_tick).float()
    turned = (positions.long()[..., None] * ticks.long() % 2**32 + 2**31) % 2**32 - 2**31
    return turned.to(dtype) * radians_per_tick + positions[..., None].to(dtype) * rest.to(dtype)
