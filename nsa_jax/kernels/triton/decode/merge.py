"""The parts of the three branches become outputs, and these the gated sum (Eq. 5).

Grid: x = new tokens times query heads times batch rows: a program has one row, so that many read at once.
Merging in the last program of an earlier kernel loses: one processor then reads all parts of a KV head.
"""

import triton
import triton.language as tl

from nsa_jax.kernels.triton.decode.parts import load_parts, load_placed
from nsa_jax.kernels.triton.launch import named
from nsa_jax.kernels.triton.pieces import Dim
from nsa_jax.kernels.triton.softmax import LOWEST


@triton.jit
def _weight(parts, of_branch, gate):
    """What the values of the parts of one branch are multiplied with, 0 for all others."""
    top = tl.max(tl.where(of_branch, parts.largest, LOWEST), 0)
    decay = tl.where(of_branch, tl.exp2(parts.largest - top), 0.0)
    total = tl.sum(decay * parts.total, 0)
    return decay * (gate.to(tl.float32) / tl.where(total == 0.0, 1.0, total))


@triton.jit(repr=named("nsa_step_merge"))
def merge_kernel(
    placed, gates, parts, sums,
    out,
    T: tl.constexpr, G: tl.constexpr, KV_HEADS: tl.constexpr, CMP: tl.constexpr, WIN: tl.constexpr,
    SLC: tl.constexpr, PADDED: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
):  # fmt: skip
    """`out` `[B, T, N, V]`; 0 for a token that found no room. Parts: CMP, then WIN, then SLC."""
    VALUE: tl.constexpr = Dim(V0, V1)
    head = tl.program_id(0) % (KV_HEADS * G)
    token = tl.program_id(0) // (KV_HEADS * G) % T
    b = tl.program_id(0) // (KV_HEADS * G * T)
    bk = b * KV_HEADS + head // G
    row = token * G + head % G

    own = load_parts(parts, sums, bk, row, CMP + WIN + SLC, PADDED, T * G, VALUE)
    gate = gates + tl.program_id(0).to(tl.int64) * 3
    gate_cmp = tl.load(gate)
    gate_slc = tl.load(gate + 1)
    gate_win = tl.load(gate + 2)
    tokens = load_placed(placed, b)

    part = tl.arange(0, PADDED)
    weight = _weight(own, part < CMP, gate_cmp)
    weight += _weight(own, (part >= CMP) & (part < CMP + WIN), gate_win)
    weight += _weight(own, part >= CMP + WIN, gate_slc)
    exists = token < tokens.number
    to = out + tl.program_id(0).to(tl.int64) * (V0 + V1)
    dtype: tl.constexpr = out.dtype.element_ty
    y = tl.sum(own.out.first * weight[:, None], 0)
    tl.store(to + tl.arange(0, V0), tl.where(exists, y, 0.0).to(dtype))
    if V1 > 0:
        z = tl.sum(own.out.second * weight[:, None], 0)
        tl.store(to + V0 + tl.arange(0, V1), tl.where(exists, z, 0.0).to(dtype))
