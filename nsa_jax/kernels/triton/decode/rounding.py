"""Keys and values of a quantised cache: numbers in 8 bits, and a scale for each token and head.

Numbers of 8 bits are exact in 16, so tiles become the dtype of the query as they are, and the scales
multiply what has one number for each key: logits and weights. Without a quantised cache all scales are
None, and nothing of this is compiled.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from nsa_jax.kernels.triton.loading import store_at
from nsa_jax.kernels.triton.pieces import Pieces, nonfinite_rows
from nsa_jax.layout.quantised import LARGEST

LARGEST_INT8: tl.constexpr = tl.constexpr(LARGEST["int8"])
LARGEST_FLOAT8: tl.constexpr = tl.constexpr(LARGEST["float8_e4m3fn"])
# Added to a float32 and taken away again, it leaves an integer: 1.5 * 2^23, whose neighbours are 1 apart.
ROUNDS: tl.constexpr = tl.constexpr(12582912.0)


class Scales(NamedTuple):
    """The scales of a tile of keys and of their values, or where they are; None if not quantised."""

    key: tl.tensor | None
    value: tl.tensor | None


class Rounded(NamedTuple):
    """Vectors in 8 bits, and the scale of each."""

    numbers: Pieces
    scale: tl.tensor


@triton.jit
def load_scales(scales, start, offset, inside):
    """The scales of a tile of keys and values, at `start + offset`, 0 where not `inside`."""
    if scales.key is None:
        found = Scales(None, None)
    else:
        found = Scales(
            tl.load(scales.key + start + offset, mask=inside, other=0.0),
            tl.load(scales.value + start + offset, mask=inside, other=0.0),
        )
    return found


@triton.jit
def _nearest(x, scale, dtype: tl.constexpr):
    some = scale > 0.0  # neither 0 nor NaN
    y = tl.div_rn(x.to(tl.float32), tl.where(some, scale, 1.0)[:, None])
    y = tl.where(some[:, None], y, 0.0)
    if dtype == tl.int8:
        y = tl.clamp((y + ROUNDS) - ROUNDS, -LARGEST_INT8, LARGEST_INT8)
    return y.to(dtype)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Vectors as a cache in `dtype` holds them; the scale of one that is not finite is NaN."""
    largest = tl.max(tl.abs(x.first.to(tl.float32)), 1)
    if x.second is not None:
        largest = tl.maximum(largest, tl.max(tl.abs(x.second.to(tl.float32)), 1))
    MOST: tl.constexpr = LARGEST_INT8 if dtype == tl.int8 else LARGEST_FLOAT8
    scale = tl.where(nonfinite_rows(x), float("nan"), largest * (1.0 / MOST))
    first = _nearest(x.first, scale, dtype)
    if x.second is None:
        numbers = Pieces(first, None)
    else:
        numbers = Pieces(first, _nearest(x.second, scale, dtype))
    return Rounded(numbers, scale)


@triton.jit
def as_kept(x, scales, like, dtype: tl.constexpr):
    """Vectors as the cache `like` gives them back, in `dtype`: rounded, where it has `scales`."""
    if scales is None:
        y = x
    else:
        z = rounded(x, like.dtype.element_ty)
        y = times(z.numbers, z.scale, dtype)
    return y


@triton.jit
def times(x, scale, dtype: tl.constexpr):
    """Vectors times one number each, in `dtype`."""
    first = (x.first.to(tl.float32) * scale[:, None]).to(dtype)
    if x.second is None:
        y = Pieces(first, None)
    else:
        y = Pieces(first, (x.second.to(tl.float32) * scale[:, None]).to(dtype))
    return y


@triton.jit
def store_kept(array, scales, start, offset, x, inside, WIDTH: tl.constexpr, DIM):
    """Stores vectors number `start + offset` of the cache, rounded where it has `scales`."""
    if scales is None:
        store_at(array + start * WIDTH, offset * WIDTH, x, inside, DIM)
    else:
        y = rounded(x, array.dtype.element_ty)
        store_at(array + start * WIDTH, offset * WIDTH, y.numbers, inside, DIM)
        tl.store(scales + start + offset, y.scale, mask=inside)
