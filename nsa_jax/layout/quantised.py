"""Keys and values in 8 bits: numbers, and one scale for each token and head that multiplies them all.

A scale takes the largest number of its token and head to the largest one that 8 bits hold. So int8 errs by at
most `largest / 254`, and float8_e4m3fn by 1/16 of each number that is not below 1/28672 of the largest. The
latter has its scale for the same reason: alone it would lose what is below 2^-9 or above 448. A key or value
that is not finite has the scale NaN, because int8 has no other way to say so.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nsa_jax.array_typing import Array, DType, Float32
from nsa_jax.option_checks import FLOATS, check_dtype_among, dtype_name

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


class Quantised(NamedTuple):
    """An array in 8 bits, in the place of one of floats; `numbers * scale` is what it holds.

    Attributes:
      numbers: `[..., D]` in int8 or float8_e4m3fn.
      scale: `[...]`, not negative; NaN where something is not finite.
    """

    numbers: Array
    scale: Float32[Array, "..."]

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the array it stands for."""
        return self.numbers.shape

    def widened(self, dtype: DType) -> Array:
        """The array in a floating dtype."""
        wide = jnp.promote_types(dtype, jnp.float32)
        return (self.numbers.astype(wide) * self.scale[..., None].astype(wide)).astype(dtype)


def check_kept_dtype(**dtypes: Any) -> None:
    """Raises ValueError unless a cache can be of these dtypes."""
    check_dtype_among((*FLOATS, *LARGEST), "floating or quantised", **dtypes)


def is_quantised(dtype: Any) -> bool:
    """Whether a dtype needs scales."""
    return dtype_name(dtype) in LARGEST


def check_quantised(**arrays: Any) -> None:
    """Raises ValueError unless those that are `Quantised` have 8-bit numbers and a scale for each vector."""
    for name, x in arrays.items():
        if not isinstance(x, Quantised):
            continue
        found = tuple(f"{jnp.result_type(y).name}{list(jnp.shape(y))}" for y in x if y is not None)
        wanted = f"float32{list(jnp.shape(x.numbers)[:-1])}"
        if not is_quantised(jnp.result_type(x.numbers)) or found[1:] != (wanted,):
            raise ValueError(
                f"{name} must have numbers in one of {tuple(LARGEST)} and a scale {wanted}, got "
                f"{' and '.join(found)}. Pass what init_cache gives."
            )


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def quantised(x: Array, dtype: DType) -> Quantised:
    """Rounds an array to 8 bits, half to even. It has no gradient, and says so when asked for one."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    most = LARGEST[jnp.dtype(dtype).name]
    largest = jnp.abs(wide).max(axis=-1, initial=0)
    # XLA would divide by a constant in the same way, but not everywhere.
    scale = (largest * (1 / most)).astype(jnp.float32)
    scale = jnp.where(jnp.isfinite(wide).all(axis=-1), scale, jnp.nan)
    divisor = scale[..., None].astype(wide.dtype)
    numbers = jnp.where(divisor > 0, wide / jnp.where(divisor > 0, divisor, 1), 0)
    if jnp.issubdtype(dtype, jnp.integer):
        numbers = jnp.round(numbers)
    return Quantised(jnp.clip(numbers, -most, most).astype(dtype), scale)


@quantised.defjvp
def _quantised_jvp(dtype: DType, primals: tuple[Array], _: tuple[Array]) -> Any:
    return check_differentiable(Quantised(primals[0].astype(dtype), primals[0]))


def like(x: Array, buffer: Array | Quantised) -> Array | Quantised:
    """New tokens in the form of the array that they are written to."""
    return quantised(x, buffer.numbers.dtype) if isinstance(buffer, Quantised) else x


def widened(x: Any, dtype: DType) -> Any:
    """A tree of arrays, in which what was quantised is of `dtype`; others are as they were."""

    def widen(x: Any) -> Any:
        return x.widened(dtype) if isinstance(x, Quantised) else x

    return jax.tree.map(widen, x, is_leaf=lambda x: isinstance(x, Quantised))


def zeros(shape: tuple[int, ...], dtype: DType) -> Array | Quantised:
    """An empty array of a cache."""
    numbers = jnp.zeros(shape, dtype)
    return Quantised(numbers, jnp.zeros(shape[:-1], jnp.float32)) if is_quantised(dtype) else numbers


def held(cache: Any, name: str) -> Any:
    """The array of this name in a cache, with its scales if it has any."""
    array, scale = getattr(cache, name), getattr(cache, f"{name}_scale", None)
    return array if scale is None else Quantised(array, scale)


def fields(arrays: dict[str, Any]) -> dict[str, Any]:
    """The fields of a cache for arrays by name, the inverse of `held`."""
    found = dict[str, Any]()
    for name, array in arrays.items():
        if isinstance(array, Quantised):
            found |= {name: array.numbers, f"{name}_scale": array.scale}
        else:
            found[name] = array
    return found


def check_differentiable(*arrays: Any) -> None:
    """Raises NotImplementedError if one is quantised: rounding has no gradient."""
    if dtypes := {x.numbers.dtype.name for x in arrays if isinstance(x, Quantised)}:
        raise NotImplementedError(
            f"gradients need keys and values of a floating dtype, got {', '.join(sorted(dtypes))}. Make a "
            "cache of another dtype."
        )
