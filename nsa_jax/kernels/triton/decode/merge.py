"""The parts of the three branches become outputs, and these the gated sum (Eq. 5).

Grid: x = new tokens times query heads times batch rows: a program has one row, so that many read at once.
Merging in the last program of an earlier kernel loses: one processor then reads all parts of a KV head.
"""

import triton
import triton.language as tl

from nsa_jax.kernels.triton.decode.parts import load_placed
from nsa_jax.kernels.triton.launch import named
from nsa_jax.kernels.triton.loading import load_at
from nsa_jax.kernels.triton.pieces import Dim
from nsa_jax.kernels.triton.softmax import LOWEST


@triton.jit
def _weight(largest, total, own, gate):
    """What the values of a branch's parts are multiplied with, 0 for parts that are not its `own`."""
    top = tl.max(tl.where(own, largest, LOWEST), 0)
    decay = tl.where(own, tl.exp2(largest - top), 0.0)
    sum = tl.sum(decay * total, 0)
    return decay * (gate.to(tl.float32) / tl.where(sum == 0.0, 1.0, sum))


@triton.jit(repr=named("nsa_step_merge"))
def merge_kernel(
    placed, gates, parts, sums,
    out,
    T: tl.constexpr, G: tl.constexpr, KV_HEADS: tl.constexpr, CMP: tl.constexpr, WIN: tl.constexpr,
    SLC: tl.constexpr, PADDED: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
):  # fmt: skip
    """`out` `[B, T, N, V]`; 0 for a token that found no room. Parts: CMP, then WIN, then SLC."""
    ALL: tl.constexpr = CMP + WIN + SLC
    R: tl.constexpr = T * G
    VALUE: tl.constexpr = Dim(V0, V1)
    head = tl.program_id(0) % (KV_HEADS * G)
    token = tl.program_id(0) // (KV_HEADS * G) % T
    b = tl.program_id(0) // (KV_HEADS * G * T)
    bk = b * KV_HEADS + head // G
    row = token * G + head % G

    part = tl.arange(0, PADDED)
    there = part < ALL
    at = bk.to(tl.int64) * ALL + part
    x = load_at(parts, (at * R + row) * (V0 + V1), there, VALUE)
    largest = tl.load(sums + at * (2 * R) + row, mask=there, other=LOWEST)
    total = tl.load(sums + at * (2 * R) + R + row, mask=there, other=0.0)
    gate = gates + tl.program_id(0).to(tl.int64) * 3
    gate_cmp = tl.load(gate)
    gate_slc = tl.load(gate + 1)
    gate_win = tl.load(gate + 2)
    tokens = load_placed(placed, b)

    weight = _weight(largest, total, part < CMP, gate_cmp)
    weight += _weight(largest, total, (part >= CMP) & (part < CMP + WIN), gate_win)
    weight += _weight(largest, total, part >= CMP + WIN, gate_slc)
    exists = token < tokens.number
    to = out + tl.program_id(0).to(tl.int64) * (V0 + V1)
    dtype: tl.constexpr = out.dtype.element_ty
    y = tl.sum(x.first * weight[:, None], 0)
    tl.store(to + tl.arange(0, V0), tl.where(exists, y, 0.0).to(dtype))
    if V1 > 0:
        z = tl.sum(x.second * weight[:, None], 0)
        tl.store(to + V0 + tl.arange(0, V1), tl.where(exists, z, 0.0).to(dtype))
