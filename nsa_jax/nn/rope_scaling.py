"""Scaled rotary frequencies, with which a model can read longer sequences than it was first trained on."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, get_args

import numpy as np

from nsa_jax.option_checks import check_positive


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: divides every frequency by `factor` (Eq. 4 of arXiv:2306.15595).

    Attributes:
      factor: new length divided by the original length; above 0.

    Raises:
      TypeError: `factor` is not a number.
      ValueError: `factor` is out of range.
    """

    factor: float
    kind = "linear"
    magnitude = 1.0

    def __post_init__(self):
        check_positive(factor=self.factor)

    def scaled(self, frequency: np.ndarray, base: float) -> np.ndarray:
        """Scales frequencies.

        Args:
          frequency: plain frequencies, `base ** (-i / half)` for pair `i`, in radians per token.
          base: base of the rotary embedding.

        Returns:
          The frequencies to use instead.
        """
        return frequency / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """The scaling of Llama 3.1: interpolates only pairs that turn rarely within the original length.

    Source: `apply_scaling` in `models/llama3/model.py` of github.com/meta-llama/llama-models. A pair that
    turns at least `high_frequency_factor` times within `original_length` keeps its frequency. The frequency
    of a pair that turns at most `low_frequency_factor` times is divided by `factor`. In between, the two are
    mixed, with weights that are linear in the number of turns. The defaults are those of Llama 3.1.

    Attributes:
      factor: new length divided by the original length; above 0.
      low_frequency_factor: number of turns up to which a pair is interpolated; above 0.
      high_frequency_factor: number of turns from which a pair keeps its frequency; above
        `low_frequency_factor`.
      original_length: number of tokens that the model was first trained on.

    Raises:
      TypeError: a value is not a number.
      ValueError: a value is out of range.
    """

    factor: float = 8.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_length: int = 8192
    kind = "llama3"
    magnitude = 1.0

    def __post_init__(self):
        check_positive(**dataclasses.asdict(self))
        _check_order("low_frequency_factor", "high_frequency_factor", self)

    def scaled(self, frequency: np.ndarray, base: float) -> np.ndarray:
        """Scales frequencies, see `LinearScaling.scaled`."""
        turns = frequency * self.original_length / (2 * math.pi)
        width = self.high_frequency_factor - self.low_frequency_factor
        kept = np.clip((turns - self.low_frequency_factor) / width, 0, 1)
        return frequency * (kept + (1 - kept) / self.factor)


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN: interpolates low frequencies and makes rotated heads a little longer (arXiv:2309.00071).

    It follows sections 3.2 and 3.4 of the paper as the authors' released code has them
    (github.com/jquesnelle/yarn), which released models use: the ramp between kept and interpolated
    frequencies is linear in the index of the pair. In the paper's text it is linear in the number of turns.
    The ramp begins at the last index whose pair turns at least `beta_fast` times within `original_length`,
    and ends at the first index whose pair turns at most `beta_slow` times.

    Attributes:
      factor: new length divided by the original length; above 0.
      original_length: number of tokens that the model was first trained on.
      beta_fast: number of turns from which a pair keeps its frequency; above `beta_slow`.
      beta_slow: number of turns up to which a pair is interpolated; above 0.
      attention_factor: factor of rotated queries and keys, so its square multiplies the logits; by default
        `0.1 ln(factor) + 1`, or 1 if `factor` is below 1.

    Raises:
      TypeError: a value is not a number.
      ValueError: a value is out of range.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    kind = "yarn"

    def __post_init__(self):
        given = dataclasses.asdict(self)
        if self.attention_factor is None:
            del given["attention_factor"]
        check_positive(**given)
        _check_order("beta_slow", "beta_fast", self)

    @property
    def magnitude(self) -> float:
        """Factor of the rotated heads."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(max(self.factor, 1.0)) + 1

    def scaled(self, frequency: np.ndarray, base: float) -> np.ndarray:
        """Scales frequencies, see `LinearScaling.scaled`.

        Raises:
          ValueError: `base` is not above 1.
        """
        if base <= 1:
            raise ValueError(f"YaRN needs a rope_base above 1, got {base}. Pass the base of the model.")
        half = len(frequency)

        def index_that_turns(times: float) -> float:
            return half * math.log(self.original_length / (2 * math.pi * times), base)

        first = max(math.floor(index_that_turns(self.beta_fast)), 0)
        # The bound is that of the released code, which uses the width of a head for the number of pairs.
        last = min(math.ceil(index_that_turns(self.beta_slow)), 2 * half - 1)
        interpolated = np.clip((np.arange(half) - first) / max(last - first, 1), 0, 1)
        return frequency * ((1 - interpolated) + interpolated / self.factor)


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling
"""A scaling of rotary frequencies, for the option `rope_scaling` of the layers."""


def as_plain(scaling: RopeScaling) -> dict[str, Any]:
    """The scaling as plain data for files, for example `{"kind": "linear", "factor": 4.0}`."""
    return {"kind": scaling.kind, **dataclasses.asdict(scaling)}


def from_plain(values: Mapping[str, Any]) -> RopeScaling:
    """The scaling that `as_plain` wrote. Raises ValueError if its kind is unknown."""
    kinds = {scheme.kind: scheme for scheme in get_args(RopeScaling)}
    if values["kind"] not in kinds:
        raise ValueError(
            f"the kind of a rope_scaling must be one of {tuple(kinds)}, got {values['kind']!r}. Load it with "
            "the version of nsa_jax that wrote it."
        )
    return kinds[values["kind"]](**{name: value for name, value in values.items() if name != "kind"})


def _check_order(low: str, high: str, scaling: Llama3Scaling | YarnScaling) -> None:
    values = getattr(scaling, low), getattr(scaling, high)
    if values[0] >= values[1]:
        raise ValueError(
            f"{low} must be below {high}, got {values[0]} and {values[1]}. Pass them in the other order."
        )
