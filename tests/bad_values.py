"""What each kind of argument must refuse, and what it must take as it takes the value that a call gives.

`wrong` and `same` map a readable name to another value of the argument. `rng` draws what is free in it.
"""

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np

NO_INT = {"str": "3", "float": 2.5, "nan": math.nan, "list": [3], "bool": True}
NO_FLOAT = {"str": "3", "NaN": math.nan, "inf": math.inf, "list": [1.0], "bool": True}

OF_ANOTHER_TYPE = (
    *(
        "None",
        "str",
        "list",
        "bool",
        "float",
        "complex",
        "float8",
        "int",
        "int 2^40",
        "int64",
        "nan",
        "class",
    ),
    *("dict", "tuple", "axis", "array", "no array", "ragged", "raw key", "scalar"),
)


def no_name(rng) -> dict[str, Any]:
    letters = "".join(rng.choice(list("abcdefgh"), 6))
    number = int(rng.integers(100))
    return {"unknown": letters, "int": number, "nan": math.nan, "list": ["xla"], "array": np.ones(3)}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of argument that must refuse the values of `refused`, all with `error` if that is given."""

    refused: dict[str, Any] = dataclasses.field(default_factory=dict)
    error: type[Exception] | tuple[type[Exception], ...] | None = None

    def errors(self, label: str) -> type[Exception] | tuple[type[Exception], ...]:
        """With what a value must be refused: one of another type with a TypeError."""
        return self.error or (TypeError if label in OF_ANOTHER_TYPE else ValueError)

    def wrong(self, value, rng) -> dict[str, Any]:
        return self.refused

    def same(self, value) -> dict[str, Any]:
        return {}


@dataclasses.dataclass(frozen=True)
class Whole(Kind):
    """An int of at least `low`; None if any int of 32 bits will do."""

    low: int | None = 1

    def wrong(self, value, rng):
        found = NO_INT | {"2^k": 2 ** int(rng.integers(33, 100)), "10^400": 10**400}
        if self.low is not None:
            found |= {"below": self.low - 1, "negative": self.low - int(rng.integers(2, 99))}
        return found

    def same(self, value):
        return {} if value is None else {"numpy": np.int64(value), "int8": np.int8(value)}


@dataclasses.dataclass(frozen=True)
class Real(Kind):
    """A finite number, above 0 if `positive`."""

    positive: bool = True

    def wrong(self, value, rng):
        below = {"negative": -float(rng.random()), "0": 0} if self.positive else {}
        return NO_FLOAT | {"10^400": 10**400} | below

    def same(self, value):
        return {} if value is None else {"numpy": np.float64(value)}


class Scale(Kind):
    """A factor of the logits."""

    def wrong(self, value, rng):
        return NO_FLOAT | {"10^400": 10**400, "1e300": 1e300, "array": np.ones(2)}


class Flag(Kind):
    """True or False."""

    def wrong(self, value, rng):
        return {"str": "no", "int": int(rng.integers(9)), "nan": math.nan, "list": []}


@dataclasses.dataclass(frozen=True)
class Name(Kind):
    """One of some names."""

    error: type[Exception] = ValueError

    def wrong(self, value, rng):
        return no_name(rng)


class FreeName(Kind):
    """Any name."""

    def wrong(self, value, rng):
        return {"int": 3, "nan": math.nan, "tuple": ("data", "tensor")}


@dataclasses.dataclass(frozen=True)
class DType(Kind):
    """A floating-point dtype of at least 16 bits."""

    error: type[Exception] = ValueError

    def wrong(self, value, rng):
        others = {"int32": np.int32, "complex": "complex64", "float8": ml_dtypes.float8_e4m3fn, "bool": bool}
        return no_name(rng) | others

    def same(self, value):
        return {} if value is None else {"numpy": np.dtype(value)}


@dataclasses.dataclass(frozen=True)
class KeptDType(DType):
    """One of those of a cache: floating, or one of the two of 8 bits."""

    def wrong(self, value, rng):
        return super().wrong(value, rng) | {"float8": ml_dtypes.float8_e5m2, "uint8": "uint8"}


@dataclasses.dataclass(frozen=True)
class QuantisedDType(KeptDType):
    """One of those two."""

    def wrong(self, value, rng):
        return super().wrong(value, rng) | {"float32": "float32", "bfloat16": ml_dtypes.bfloat16}


class Of(Kind):
    """An object of a class of ours, or of Flax."""

    def wrong(self, value, rng):
        others = {"int": int(rng.integers(9)), "str": "a", "nan": math.nan, "dict": {}, "list": [3]}
        return others | {"class": type(value)}


class Function(Kind):
    """Something that can be called."""

    def wrong(self, value, rng):
        return {"int": 3, "str": "mean", "nan": math.nan, "list": [3]}


class Sharding(Kind):
    """Names of mesh axes by the names of dimensions."""

    def wrong(self, value, rng):
        unknown = {no_name(rng)["unknown"]: "data"}
        others = {"axis": {"heads": 3}, "list": ["heads"], "str": "heads", "int": 3, "nan": math.nan}
        return others | {"unknown": unknown}


@dataclasses.dataclass(frozen=True)
class Floats(Kind):
    """An array of floats, whose axes are named; those of `free` may have any size."""

    axes: tuple[str, ...] = ()
    free: tuple[str, ...] = ()

    def wrong(self, value, rng):
        others = {"int": value.astype(np.int32), "bool": value.astype(bool), "complex": value.astype(complex)}
        others |= {"float8": value.astype(ml_dtypes.float8_e5m2), "str": "a", "float": 1.0}
        return others | {"list": value.tolist()} | self.shapes(value, rng)

    def shapes(self, value, rng):
        changed = {"rank + 1": value[None], "nan": math.nan, "int 2^40": 2**40}
        changed["scalar" if value.ndim == 1 else "rank - 1"] = value[0]
        for axis, name in enumerate(self.axes):
            if name not in self.free:
                more = 2 * int(rng.integers(4, 10)) - 1  # no number of heads that KV heads divide
                changed[f"{name} + {more}"] = np.concatenate([value, *[value.take([0], axis)] * more], axis)
        return changed


class Integers(Floats):
    """An array of integers that fit into 32 bits."""

    def wrong(self, value, rng):
        others = {"float": value.astype(np.float32), "bool": value.astype(bool), "list": value.tolist()}
        wide = value.astype(np.int64) + 2 ** int(rng.integers(32, 60))
        others |= {"str": "a", "wraps": wide, "uint32": value.astype(np.uint32) + 2**31}
        return others | self.shapes(value, rng)

    def same(self, value):
        return {"int8": value.astype(np.int8), "int64": value.astype(np.int64)}


@dataclasses.dataclass(frozen=True)
class Counts(Integers):
    """Integers from `low` to `high`."""

    low: int = 0
    high: int = 0

    def wrong(self, value, rng):
        below, above = value.copy(), value.copy()
        below.flat[rng.integers(value.size)] = self.low - int(rng.integers(1, 9))
        above.flat[rng.integers(value.size)] = self.high + int(rng.integers(1, 9))
        return super().wrong(value, rng) | {"below": below, "above": above}


class Flags(Floats):
    """An array of booleans."""

    def wrong(self, value, rng):
        others = {"float": value.astype(np.float32), "int": value.astype(np.int32), "list": value.tolist()}
        return others | {"int64": value.astype(np.int64)} | self.shapes(value, rng)


class Lengths(Counts):
    """How many tokens each row of a cache has: int32, as a compiled loop carries them."""

    def wrong(self, value, rng):
        return super().wrong(value, rng) | {"int64": value.astype(np.int64)}

    def errors(self, label):
        return TypeError if label in ("wraps", "uint32") else super().errors(label)

    def same(self, value):
        return {}
