"""Arithmetic on tiles whose head dim is one or two powers of two: 96 = 64 + 32, 192 = 128 + 64.

The axes of Triton's tensors are powers of two, so a tile is two tensors, `Pieces`. Where one is enough, the
second is None and its part of the `Dim` is 0.

Functions of kernels take NamedTuples. One that has `tl.constexpr` fields must be assigned to a name that is
annotated as `tl.constexpr`, as the parameters of kernels are: otherwise Triton turns the constants into
run-time values.
"""

from typing import NamedTuple

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
LARGEST_FLOAT: tl.constexpr = tl.constexpr(3.4028234663852886e38)
LARGEST_INT: tl.constexpr = tl.constexpr(2147483647)  # more than any index, or any score by its bits


def precision(dtype) -> str:
    """`input_precision` of `tl.dot`: three TF32 products for float32. Has no effect on 16-bit inputs."""
    return "tf32x3" if dtype.itemsize == 4 else "tf32"


class Dim(NamedTuple):
    """A head dim as the sum of two powers of two, or of one and 0."""

    D0: tl.constexpr
    D1: tl.constexpr


class Pieces(NamedTuple):
    """A tile cut into two by columns; `second` is None where the dim is one power of two."""

    first: tl.tensor
    second: tl.tensor | None


class KeyGradients(NamedTuple):
    """Gradients of keys and of their values."""

    dk: Pieces
    dv: Pieces


@triton.jit
def zeros(ROWS: tl.constexpr, DIM):
    """An accumulator in float32."""
    x0 = tl.zeros([ROWS, DIM.D0], tl.float32)
    if DIM.D1 > 0:
        x1 = tl.zeros([ROWS, DIM.D1], tl.float32)
    else:
        x1 = None
    return Pieces(x0, x1)


@triton.jit
def scaled(x, factor):
    """`x * factor`, which is a number or broadcasts against both pieces."""
    if x.second is None:
        y = Pieces(x.first * factor, None)
    else:
        y = Pieces(x.first * factor, x.second * factor)
    return y


@triton.jit
def added(x, y):
    """`x + y` in float32."""
    if x.second is None:
        z = Pieces(x.first + y.first.to(tl.float32), None)
    else:
        z = Pieces(x.first + y.first.to(tl.float32), x.second + y.second.to(tl.float32))
    return z


@triton.jit
def sum_of(x, COUNT: tl.constexpr):
    """The sum of COUNT tiles that lie one below the other, in their dtype."""
    ROWS: tl.constexpr = x.first.shape[0] // COUNT
    y0 = tl.sum(x.first.reshape(COUNT, ROWS, x.first.shape[1]), 0)
    if x.second is None:
        y1 = None
    else:
        y1 = tl.sum(x.second.reshape(COUNT, ROWS, x.second.shape[1]), 0)
    return Pieces(y0, y1)


@triton.jit
def cast(x, dtype: tl.constexpr):
    """`x` in another dtype."""
    if x.second is None:
        y = Pieces(x.first.to(dtype), None)
    else:
        y = Pieces(x.first.to(dtype), x.second.to(dtype))
    return y


@triton.jit
def kept(x, condition):
    """`x` where the condition holds, which broadcasts against both pieces; else 0."""
    if x.second is None:
        y = Pieces(tl.where(condition, x.first, 0.0), None)
    else:
        y = Pieces(tl.where(condition, x.first, 0.0), tl.where(condition, x.second, 0.0))
    return y


@triton.jit
def nonfinite_rows(x):
    """Which rows hold a number that is not finite."""
    total = tl.sum(x.first.to(tl.float32) * 0.0, 1)  # 0 * inf and 0 * NaN are NaN, and NaN stays
    if x.second is not None:
        total += tl.sum(x.second.to(tl.float32) * 0.0, 1)
    return total != 0.0


@triton.jit
def inner(a, b, PRECISION: tl.constexpr):
    """`a b^T`, in float32."""
    product = tl.dot(a.first, tl.trans(b.first), input_precision=PRECISION)
    if a.second is not None:
        product = tl.dot(a.second, tl.trans(b.second), product, input_precision=PRECISION)
    return product


@triton.jit
def row_products(a, b):
    """The sum of `a * b` over the columns of each row, in float32."""
    product = tl.sum(a.first.to(tl.float32) * b.first.to(tl.float32), 1)
    if a.second is not None:
        product += tl.sum(a.second.to(tl.float32) * b.second.to(tl.float32), 1)
    return product


@triton.jit
def add_product(a, b, x, PRECISION: tl.constexpr):
    """`x + a b`; `a` is one tensor."""
    x0 = tl.dot(a, b.first, x.first, input_precision=PRECISION)
    if b.second is None:
        x1 = None
    else:
        x1 = tl.dot(a, b.second, x.second, input_precision=PRECISION)
    return Pieces(x0, x1)
