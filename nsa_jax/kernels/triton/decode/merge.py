"""The parts of the three branches become outputs, and these the gated sum (Eq. 5).

Grid: x = new tokens times query heads times batch rows: a program has one row, so that many read at once.
Merging in the last program of an earlier kernel loses: one processor then reads all parts of a KV head.
"""

import triton
import triton.language as tl

from nsa_jax.kernels.triton.decode.parts import load_parts, load_placed, sum_parts
from nsa_jax.kernels.triton.launch import named
from nsa_jax.kernels.triton.pieces import Dim, added, scaled


@triton.jit
def _share(gates, branch: tl.constexpr, total):
    """What the values of a branch are multiplied with."""
    return tl.load(gates + branch).to(tl.float32) / tl.where(total == 0.0, 1.0, total)


@triton.jit(repr=named("nsa_step_merge"))
def merge_kernel(
    placed, gates, out_cmp, sums_cmp, out_new, sums_new, out_slc, sums_slc, out_win, sums_win,
    alive_0, alive_1, alive_2, alive_3, alive_4, alive_5,
    out,
    T: tl.constexpr, G: tl.constexpr, KV_HEADS: tl.constexpr, CMP: tl.constexpr, PADDED_CMP: tl.constexpr,
    SLC: tl.constexpr, PADDED_SLC: tl.constexpr, WIN: tl.constexpr, PADDED_WIN: tl.constexpr,
    V0: tl.constexpr, V1: tl.constexpr,
):  # fmt: skip
    """`out` `[B, T, N, V]`; 0 for a token that found no room.

    What is `alive` is not read. XLA would give the memory of what nobody reads any more to another kernel,
    which then could not run beside the one that wrote it.
    """
    head = tl.program_id(0) % (KV_HEADS * G)
    token = tl.program_id(0) // (KV_HEADS * G) % T
    b = tl.program_id(0) // (KV_HEADS * G * T)
    bk = b * KV_HEADS + head // G
    row = token * G + head % G
    R: tl.constexpr = T * G
    VALUE: tl.constexpr = Dim(V0, V1)
    gate = gates + tl.program_id(0).to(tl.int64) * 3
    tokens = load_placed(placed, b)

    cmp = load_parts(out_cmp, sums_cmp, bk, row, CMP, PADDED_CMP, R, VALUE)
    new = load_parts(out_new, sums_new, bk, row, 1, 1, R, VALUE)
    slc = load_parts(out_slc, sums_slc, bk, row, SLC, PADDED_SLC, R, VALUE)
    win = load_parts(out_win, sums_win, bk, row, WIN, PADDED_WIN, R, VALUE)

    x, top, total = sum_parts(cmp)
    y, new_top, new_total = sum_parts(new)
    both = tl.maximum(top, new_top)
    decay = tl.exp2(top - both)
    new_decay = tl.exp2(new_top - both)
    share = _share(gate, 0, total * decay + new_total * new_decay)
    x = added(scaled(x, decay * share), scaled(y, new_decay * share))
    y, _, total = sum_parts(slc)
    x = added(x, scaled(y, _share(gate, 1, total)))
    y, _, total = sum_parts(win)
    x = added(x, scaled(y, _share(gate, 2, total)))

    to = out + tl.program_id(0).to(tl.int64) * (V0 + V1)
    exists = token < tokens.number
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(to + tl.arange(0, V0), tl.where(exists, x.first, 0.0).to(dtype))
    if V1 > 0:
        tl.store(to + V0 + tl.arange(0, V1), tl.where(exists, x.second, 0.0).to(dtype))
