"""The gated sum of the branches (Eq. 5) and the gradient of the gates.

grid = (ceil(rows / ROWS),): one program for `ROWS` rows `[V]`, each a token with one head. Both kernels only
move memory: `4 V` numbers a row, and the gates. At 64k tokens, 64 heads, V = 128 and 16 bits that is 4.3 GB,
1.44 ms at 3 TB/s.
"""

import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Float
from nsa_jax.kernels.triton.launch import launch, like, named
from nsa_jax.kernels.triton.loading import load_rows
from nsa_jax.kernels.triton.pieces import added, cast, scaled

GATED_SUM_ROWS = 32  # rows of a program


@triton.jit
def _rows_of(rows, VALUE_DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    inside = (row < rows)[:, None] & (column < VALUE_DIM)[None, :]
    return row, row[:, None] * VALUE_DIM + column[None, :], inside


@triton.jit(repr=named("nsa_gated_sum"))
def gated_sum_kernel(
    out_cmp, out_slc, out_win, gates, out, rows,
    VALUE_DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The sum of the branches for ROWS rows."""
    row, place, inside = _rows_of(rows, VALUE_DIM, PADDED, ROWS)
    total = tl.zeros([ROWS, PADDED], tl.float32)
    for branch in tl.static_range(3):
        source = out_cmp if branch == 0 else (out_slc if branch == 1 else out_win)
        gate = tl.load(gates + row * 3 + branch, mask=row < rows, other=0.0).to(tl.float32)
        total += gate[:, None] * tl.load(source + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(repr=named("nsa_gate_gradients"))
def gate_gradients_kernel(
    out_cmp, out_slc, out_win, d_out, d_gates, rows,
    VALUE_DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradients of the gates of ROWS rows."""
    row, place, inside = _rows_of(rows, VALUE_DIM, PADDED, ROWS)
    cotangent = tl.load(d_out + place, mask=inside, other=0.0).to(tl.float32)
    for branch in tl.static_range(3):
        source = out_cmp if branch == 0 else (out_slc if branch == 1 else out_win)
        d_gate = tl.sum(cotangent * tl.load(source + place, mask=inside, other=0.0).to(tl.float32), 1)
        tl.store(d_gates + row * 3 + branch, d_gate.to(d_gates.dtype.element_ty), mask=row < rows)


@triton.jit
def gated_rows(out, out_cmp, out_slc, gates, rows, DIM):
    """The gated sum of rows whose third branch is `out`, which is rounded as if it had been stored."""
    gates += rows.first * 3
    gate = tl.load(gates + rows.offset * 3 + 2, mask=rows.inside, other=0.0).to(tl.float32)[:, None]
    total = scaled(cast(out, out_cmp.dtype.element_ty), gate)
    for branch in tl.range(0, 2, num_stages=1):  # not unrolled: two tiles at once would take more registers
        source = out_cmp
        if branch == 1:
            source = out_slc
        gate = tl.load(gates + rows.offset * 3 + branch, mask=rows.inside, other=0.0).to(tl.float32)[:, None]
        total = added(total, scaled(load_rows(source, rows, DIM), gate))
    return total


def gated_sum(
    out_cmp: Float[Array, "B T N V"],
    out_slc: Float[Array, "B T N V"],
    out_win: Float[Array, "B T N V"],
    gates: Float[Array, "B T N 3"],
) -> Float[Array, "B T N V"]:
    """`g_cmp * o_cmp + g_slc * o_slc + g_win * o_win`, summed in float32."""
    return launch(gated_sum_kernel, out_cmp, out_slc, out_win, gates, out=like(out_cmp), **_sizes(out_cmp))


def gate_gradients(
    out_cmp: Float[Array, "B T N V"],
    out_slc: Float[Array, "B T N V"],
    out_win: Float[Array, "B T N V"],
    gates: Float[Array, "B T N 3"],
    d_out: Float[Array, "B T N V"],
) -> Float[Array, "B T N 3"]:
    """`sum(o * d_out)` over V for each branch, summed in float32, in the dtype of `gates`."""
    operands = (out_cmp, out_slc, out_win, d_out)
    return launch(gate_gradients_kernel, *operands, out=like(gates), **_sizes(out_cmp))


def _sizes(out: Float[Array, "B T N V"]) -> dict:
    rows, value_dim = out.size // out.shape[-1], out.shape[-1]
    return dict(
        grid=(triton.cdiv(rows, GATED_SUM_ROWS),),
        rows=rows,
        VALUE_DIM=value_dim,
        PADDED=triton.next_power_of_2(value_dim),
        ROWS=GATED_SUM_ROWS,
    )
