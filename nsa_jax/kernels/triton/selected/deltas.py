"""Selected attention backward: two numbers of each row, where no kernel forms them beside other work.

grid = (ceil(rows / ROWS),): one program for `ROWS` rows `[V]`, each a token with one head. It only moves
memory: output and cotangent, `2 V itemsize` bytes a row. At 64k tokens, 64 heads, V = 128 and 16 bits that
is 2.1 GB, 0.5 ms at 4.3 TB/s.
"""

import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Float
from nsa_jax.kernels.triton.backward import Backward
from nsa_jax.kernels.triton.dims import split_dim
from nsa_jax.kernels.triton.launch import launch, like, named
from nsa_jax.kernels.triton.loading import Rows, load_rows
from nsa_jax.kernels.triton.pieces import Dim
from nsa_jax.kernels.triton.softmax import Sources, row_numbers

ROWS = 32


def row_deltas(given: Backward) -> tuple[Float[Array, "B T N"], Float[Array, "B T N"]]:
    """`(products, delta)`: `out . d_out` and `gate (out . d_out) - d_lse` of each row, float32."""
    out = given.out
    rows, (v0, v1) = out.size // out.shape[-1], split_dim(out.shape[-1])
    numbers = like(out, out.shape[:-1], "float32")
    return launch(
        row_deltas_kernel, out, given.d_out, given.d_lse, given.gate, out=(numbers, numbers),
        grid=(triton.cdiv(rows, ROWS),), rows=rows, ROWS=ROWS, V0=v0, V1=v1,
    )  # fmt: skip


@triton.jit(repr=named("nsa_selected_deltas"))
def row_deltas_kernel(
    out, d_out, d_lse, gate, products, delta, rows,
    ROWS: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
):  # fmt: skip
    """The numbers of `ROWS` rows."""
    VALUE: tl.constexpr = Dim(V0, V1)
    first = tl.program_id(0).to(tl.int64) * ROWS
    r = tl.arange(0, ROWS)
    these = Rows(first, r, first + r < rows)
    row_numbers(
        Sources(out, d_lse, gate, products, delta), None, load_rows(d_out, these, VALUE), these, VALUE
    )
