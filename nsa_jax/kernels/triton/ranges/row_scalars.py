"""Range attention backward: the numbers of each row that the loop over queries reads.

grid = (ceil(rows / ROWS) B groups,): one program for ROWS rows, each a token with one of the padded heads of
a group. It only moves memory: 16 bytes a row, 24 with a gate. At 64k tokens and 64 heads with gates that is
100 MB, 23 us at 4.3 TB/s; at 8k tokens and 9 heads it is nothing beside the launch.
"""

import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Float
from nsa_jax.kernels.triton.backward import Backward
from nsa_jax.kernels.triton.dims import padded_heads
from nsa_jax.kernels.triton.launch import launch, like, named
from nsa_jax.kernels.triton.pieces import LOG2_E

ROWS = 256  # of a program
_SMALLEST_GATE = tl.constexpr(1e-18)


def row_scalars(
    given: Backward, delta: Float[Array, "B T N"], *, heads: int, tokens: int
) -> Float[Array, "B groups 2|3 rows"]:
    """Normaliser, shift and, if there is one, gate of each row, padded to the rows that steps load.

    With these numbers `p = exp2(logits - normaliser)`, `dv` sums `gate p`, and `dk` sums
    `gate p (dp - shift)`: the kernel need not hold `p` beside `gate p`. Rows that see nothing, or whose gate
    and delta are 0, have normaliser inf, since exp2(x - inf) = 0. A gate below 1e-18 in magnitude becomes
    1e-18.

    Args:
      given: log-sum-exps, and gates if there are any.
      delta: see `BranchGradients`.
      heads: query heads of a group.
      tokens: tokens of a step.
    """
    batch, num_queries, num_heads = delta.shape
    groups, numbers = num_heads // heads, 2 if given.gate is None else 3
    rows = triton.cdiv(num_queries, tokens) * tokens * padded_heads(heads)
    return launch(
        row_scalars_kernel, given.lse, delta, given.gate,
        out=like(delta, (batch, groups, numbers, rows), "float32"),
        grid=(triton.cdiv(rows, ROWS) * batch * groups,), rows=rows, num_queries=num_queries,
        GROUPS=groups, G=heads, PADDED_G=padded_heads(heads), ROWS=ROWS,
    )  # fmt: skip


@triton.jit(repr=named("nsa_row_scalars"))
def row_scalars_kernel(
    lse, delta, gate, scalars, rows, num_queries,
    GROUPS: tl.constexpr, G: tl.constexpr, PADDED_G: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The numbers of ROWS rows of a group of heads."""
    programs = (rows + ROWS - 1) // ROWS  # of a group
    lane = tl.program_id(0) // programs
    b = lane // GROUPS
    group = lane % GROUPS
    row = tl.program_id(0) % programs * ROWS + tl.arange(0, ROWS)
    token = row // PADDED_G
    head = row % PADDED_G
    inside = (token < num_queries) & (head < G)
    at = (b.to(tl.int64) * num_queries + token) * (GROUPS * G) + group * G + head
    total = tl.load(lse + at, mask=inside, other=float("-inf"))
    shift = tl.load(delta + at, mask=inside, other=0.0)
    seen = total != float("-inf")  # NaN and, unlike in `load_lse`, +inf too: they reach their keys
    NUMBERS: tl.constexpr = 2 if gate is None else 3
    to = scalars + lane.to(tl.int64) * NUMBERS * rows + row
    if gate is not None:
        factor = tl.load(gate + at, mask=inside, other=1.0).to(tl.float32)
        seen = seen & ((factor != 0) | (shift != 0))
        factor = tl.where(tl.abs(factor) < _SMALLEST_GATE, _SMALLEST_GATE, factor)
        tl.store(to + 2 * rows, factor, mask=row < rows)
        shift = shift / factor
    tl.store(to, tl.where(seen, total * LOG2_E, float("inf")), mask=row < rows)
    tl.store(to + rows, tl.where(seen, shift, 0.0), mask=row < rows)
