"""The online softmax over keys that come tile by tile, and the numbers of each row for its backward."""

from typing import NamedTuple

import triton
import triton.language as tl

from nsa_jax.kernels.triton.loading import load_keys, load_rows
from nsa_jax.kernels.triton.pieces import LN_2, LOG2_E, Pieces, add_product, row_products, scaled, zeros

LOWEST: tl.constexpr = tl.constexpr(-3.0e38)  # the first maximum: finite, so that -inf - -inf cannot occur


class Softmax(NamedTuple):
    """The state of each row after some keys.

    Attributes:
      out: sum of the values, each times `exp2(logit - largest)`.
      largest: the largest logit in base 2.
      total: sum of `exp2(logit - largest)`.
    """

    out: Pieces
    largest: tl.tensor
    total: tl.tensor


@triton.jit
def no_keys(ROWS: tl.constexpr, DIM):
    """The state before the first key."""
    return Softmax(zeros(ROWS, DIM), tl.full([ROWS], LOWEST, tl.float32), tl.zeros([ROWS], tl.float32))


@triton.jit
def add_keys(state, p, top, values, first, PRECISION: tl.constexpr):
    """Adds the keys from `first` on, with weights `p = exp2(logit - top)`; `top` is the new largest logit."""
    decay = tl.exp2(state.largest - top)
    total = state.total * decay + tl.sum(p, 1)
    out = scaled(state.out, decay[:, None])
    v = load_keys(values, first)
    return Softmax(add_product(p.to(v.first.dtype), v, out, PRECISION), top, total)


@triton.jit
def natural_lse(state, sees):
    """Natural log-sum-exp of each row, -inf where it sees nothing."""
    return tl.where(sees, (state.largest + tl.log2(state.total)) * LN_2, float("-inf"))


@triton.jit
def load_lse(pointer, rows):
    """The saved log-sum-exp in base 2. Where a row sees nothing it is +inf, which makes probabilities 0."""
    lse = tl.load(pointer + rows.first + rows.offset, mask=rows.inside, other=float("-inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)


class RowNumbers(NamedTuple):
    """The numbers of each row that the backward needs.

    Attributes:
      lse: log-sum-exp in base 2; inf where the row sees nothing.
      delta: `gate (out . d_out) - d_lse`.
      gate: factor of the row in the output, None for 1.
    """

    lse: tl.tensor
    delta: tl.tensor
    gate: tl.tensor | None


class Sources(NamedTuple):
    """The arrays that `row_numbers` reads and writes.

    Attributes:
      out: output of the forward.
      d_lse: gradient of the log-sum-exp, None for 0.
      gate: gate of each row, None for 1.
      products: receives `out . d_out`.
      delta: receives `gate (out . d_out) - d_lse`.
    """

    out: tl.tensor
    d_lse: tl.tensor | None
    gate: tl.tensor | None
    products: tl.tensor
    delta: tl.tensor


@triton.jit
def row_numbers(sources, lse, d_out, rows, DIM):
    """Computes the `RowNumbers`, and stores products and deltas."""
    at = rows.first + rows.offset
    product = row_products(load_rows(sources.out, rows, DIM), d_out)
    tl.store(sources.products + at, product, mask=rows.inside)
    if sources.gate is None:
        gate = None
        delta = product
    else:
        gate = tl.load(sources.gate + at, mask=rows.inside, other=0.0)
        delta = gate * product
    if sources.d_lse is not None:
        delta -= tl.load(sources.d_lse + at, mask=rows.inside, other=0.0)
    tl.store(sources.delta + at, delta, mask=rows.inside)
    return RowNumbers(lse, delta, gate)
