"""What each kind of argument must refuse, and what it must take as it takes the value that a call gives.

`wrong` and `same` map a readable name to another value of the argument. `rng` draws what is free in it.
"""

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np

NO_INT = {"str": "3", "float": 2.5, "nan": math.nan, "list": [3], "bool": True}
NO_FLOAT = {"str": "3", "nan": math.nan, "inf": math.inf, "list": [1.0], "bool": True}


def no_name(rng) -> dict[str, Any]:
    letters = "".join(rng.choice(list("abcdefgh"), 6))
    return {
        "unknown": letters,
        "int": int(rng.integers(100)),
        "nan": math.nan,
        "list": ["xla"],
        "array": np.ones(3),
    }


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of argument; `optional` ones may be None, which then is what `none_means` says."""

    optional: bool = False

    def values(self, value, rng) -> dict[str, Any]:
        raise NotImplementedError

    def wrong(self, value, rng) -> dict[str, Any]:
        return self.values(value, rng) | ({} if self.optional else {"None": None})

    def same(self, value) -> dict[str, Any]:
        return {}


@dataclasses.dataclass(frozen=True)
class Whole(Kind):
    """An int of at least `low`; None if any int of 32 bits will do."""

    low: int | None = 1

    def values(self, value, rng):
        huge = {"2^k": 2 ** int(rng.integers(33, 100)), "10^400": 10**400}
        below = (
            {}
            if self.low is None
            else {"below": self.low - 1, "negative": self.low - int(rng.integers(2, 99))}
        )
        return NO_INT | huge | below

    def same(self, value):
        return {} if value is None else {"numpy": np.int64(value), "int8": np.int8(value)}


@dataclasses.dataclass(frozen=True)
class Real(Kind):
    """A finite number, above 0 if `positive`."""

    positive: bool = True

    def values(self, value, rng):
        return (
            NO_FLOAT
            | {"10^400": 10**400}
            | ({"negative": -float(rng.random()), "0": 0} if self.positive else {})
        )

    def same(self, value):
        return {} if value is None else {"numpy": np.float64(value)}


class Scale(Kind):
    """A factor of the logits."""

    def values(self, value, rng):
        return NO_FLOAT | {"10^400": 10**400, "1e300": 1e300, "array": np.ones(2)}


class Flag(Kind):
    """True or False."""

    def values(self, value, rng):
        return {"str": "no", "int": int(rng.integers(9)), "nan": math.nan, "list": []}


class Name(Kind):
    """One of some names."""

    def values(self, value, rng):
        return no_name(rng)


class FreeName(Kind):
    """Any name."""

    def values(self, value, rng):
        return {"int": 3, "nan": math.nan, "tuple": ("data", "tensor")}


class DType(Kind):
    """A floating-point dtype of at least 16 bits."""

    def values(self, value, rng):
        others = {"int32": np.int32, "complex": "complex64", "float8": ml_dtypes.float8_e4m3fn, "bool": bool}
        return no_name(rng) | others

    def same(self, value):
        return {} if value is None else {"numpy": np.dtype(value)}


class Of(Kind):
    """An object of a class of ours, or of Flax."""

    def values(self, value, rng):
        return {
            "int": int(rng.integers(9)),
            "str": "a",
            "nan": math.nan,
            "dict": {},
            "list": [3],
            "class": type(value),
        }


class Function(Kind):
    """Something that can be called."""

    def values(self, value, rng):
        return {"int": 3, "str": "mean", "nan": math.nan, "list": [3]}


class Sharding(Kind):
    """Names of mesh axes by the names of dimensions."""

    def values(self, value, rng):
        names = {
            "unknown": {no_name(rng)["unknown"]: "data"},
            "axis": {"heads": 3},
            "list": ["heads"],
            "str": "heads",
        }
        return names | {"int": 3, "nan": math.nan}


@dataclasses.dataclass(frozen=True)
class Floats(Kind):
    """An array of floats; sizes of the axes `free` (a letter each) may be any."""

    axes: str = ""
    free: str = ""

    def values(self, value, rng):
        others = {"int": value.astype(np.int32), "bool": value.astype(bool), "complex": value.astype(complex)}
        others |= {
            "float8": value.astype(ml_dtypes.float8_e5m2),
            "str": "a",
            "float": 1.0,
            "list": value.tolist(),
        }
        return others | self.shapes(value, rng)

    def shapes(self, value, rng):
        changed = {"rank - 1": value[0], "rank + 1": value[None], "nan": math.nan, "int 2^40": 2**40}
        for axis, letter in enumerate(self.axes):
            if letter not in self.free:
                more = 2 * int(rng.integers(4, 10)) - 1  # no number of heads that KV heads divide
                changed[f"{letter} + {more}"] = np.concatenate([value, *[value.take([0], axis)] * more], axis)
        return changed


class Integers(Floats):
    """An array of integers that fit into 32 bits."""

    def values(self, value, rng):
        others = {
            "float": value.astype(np.float32),
            "bool": value.astype(bool),
            "list": value.tolist(),
            "str": "a",
        }
        wide = value.astype(np.int64)
        others |= {"wraps": wide + 2 ** int(rng.integers(32, 60)), "uint32": value.astype(np.uint32) + 2**31}
        return others | self.shapes(value, rng)

    def same(self, value):
        return {} if value is None else {"int8": value.astype(np.int8), "int64": value.astype(np.int64)}


@dataclasses.dataclass(frozen=True)
class Counts(Integers):
    """Integers from `low` to `high`."""

    low: int = 0
    high: int = 0

    def values(self, value, rng):
        below, above = value.copy(), value.copy()
        below.flat[rng.integers(value.size)] = self.low - int(rng.integers(1, 9))
        above.flat[rng.integers(value.size)] = self.high + int(rng.integers(1, 9))
        return super().values(value, rng) | {"below": below, "above": above}


class Exact(Floats):
    """An array of one dtype."""

    def values(self, value, rng):
        return {
            "float": value.astype(np.float32),
            "int64": value.astype(np.int64),
            "list": value.tolist(),
        } | self.shapes(value, rng)


class Flags(Exact):
    """An array of booleans."""

    def values(self, value, rng):
        return super().values(value, rng) | {"int": value.astype(np.int32)}


class Lengths(Counts):
    """How many tokens each row of a cache has: int32, as a compiled loop carries them."""

    def values(self, value, rng):
        return super().values(value, rng) | {"int64": value.astype(np.int64)}

    def same(self, value):
        return {}


@dataclasses.dataclass(frozen=True)
class Given(Kind):
    """Any other argument, with what it must refuse."""

    refused: dict[str, Any] = dataclasses.field(default_factory=dict)

    def values(self, value, rng):
        return dict(self.refused)
