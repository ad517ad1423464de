"""Adds up the parts of each branch, and the branches with their gates (Eq. 5).

Grid: that of `second_kernel`; all shares of a team run it last, when all have stored their parts. The loop
runs over query heads, HEADS at a time, and each turn loads all parts of its heads. Why this order: the weight
of a part depends on the largest logits of all parts of its branch, and loads side by side wait for L2
together.

Registers of its part: `HEADS PADDED V / (32 num_warps)` floats a thread (64 at 2 heads, 25 parts padded to
32, V = 128, 4 warps): at these sizes the most that a piece of `second_kernel` holds. `step.MERGED_AT_ONCE`
bounds HEADS, so it is larger only where one head's parts are: 128 floats for a single row of 64k tokens,
which the compiler does not hold all at once. Shared memory: up to `4 num_warps V` bytes, V padded to a power
of two (2 KB), for sums that different warps hold. Bytes: `V + 2` floats a query head and part, 6.7 MB at 8
rows, from the L2 cache.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from nsa_jax.kernels.triton.decode.parts import load_parts
from nsa_jax.kernels.triton.softmax import LOWEST


class Merging(NamedTuple):
    """The parts, the gates and the result.

    Attributes:
      out, sums: the parts, see `parts`.
      gates: `[B, T, N, branches]`: compressed, selected, window, without those that are absent; None for 1.
      merged: `[B, T, N, V]`.
    """

    out: tl.tensor
    sums: tl.tensor
    gates: tl.tensor | None
    merged: tl.tensor


class PartDims(NamedTuple):
    """Sizes of the parts that are known while tracing.

    Attributes:
      T, G, KV_HEADS: new tokens, query heads of a KV head, KV heads.
      CMP, WIN, SLC: parts of the branches, in this order; 0 for one that is absent.
      BRANCHES: number of branches.
      PADDED: the number of all parts, padded to a power of two.
      HEADS: query heads that are merged at a time.
      VALUE: `Dim`.
    """

    T: tl.constexpr
    G: tl.constexpr
    KV_HEADS: tl.constexpr
    CMP: tl.constexpr
    WIN: tl.constexpr
    SLC: tl.constexpr
    BRANCHES: tl.constexpr
    PADDED: tl.constexpr
    HEADS: tl.constexpr
    VALUE: tl.constexpr


@triton.jit
def _weight(parts, of_branch, gates, place, inside, branch: tl.constexpr, P):
    """The factor of each part's values: for the parts of one branch, with its gate; 0 for all others."""
    top = tl.max(tl.where(of_branch, parts.largest, LOWEST), 1)
    decay = tl.where(of_branch, tl.exp2(parts.largest - top[:, None]), 0.0)
    total = tl.sum(decay * parts.total, 1)
    if gates is None:
        gate = tl.where(inside, 1.0, 0.0)
    else:
        gate = tl.load(gates + place * P.BRANCHES + branch, mask=inside, other=0.0).to(tl.float32)
    return decay * (gate / tl.where(total == 0.0, 1.0, total))[:, None]


@triton.jit
def _weighted(values, weight, exists, P):
    """The weighted sum of the parts of each head."""
    WIDTH: tl.constexpr = values.shape[1]
    x = values.reshape(P.HEADS, P.PADDED, WIDTH) * weight[:, :, None]
    return tl.where(exists, tl.sum(x, 1), 0.0)


@triton.jit
def merge_heads(merging, tokens, bk, token, first, P):
    """Merges HEADS query heads of one new token, from `first` on; 0 for a token that was not appended."""
    V: tl.constexpr = P.VALUE.D0 + P.VALUE.D1
    head = first + tl.arange(0, P.HEADS)
    inside = head < P.G
    place = (bk // P.KV_HEADS * P.T + token) * P.KV_HEADS + bk % P.KV_HEADS
    place = place.to(tl.int64) * P.G + head
    ALL: tl.constexpr = P.CMP + P.WIN + P.SLC
    row = token * P.G + head
    own = load_parts(merging.out, merging.sums, bk, row, inside, ALL, P.PADDED, P.T * P.G, P.VALUE)
    part = tl.arange(0, P.PADDED)[None, :]
    SLC: tl.constexpr = 1 if P.CMP > 0 else 0
    gates = merging.gates
    weight = _weight(own, part >= P.CMP + P.WIN, gates, place, inside, SLC, P)
    if P.CMP > 0:
        weight += _weight(own, part < P.CMP, gates, place, inside, 0, P)
    if P.WIN > 0:
        of_window = (part >= P.CMP) & (part < P.CMP + P.WIN)
        weight += _weight(own, of_window, gates, place, inside, SLC + 1, P)
    exists = token < tokens.number
    dtype: tl.constexpr = merging.merged.dtype.element_ty
    out = merging.merged + (place * V)[:, None]
    y = _weighted(own.out.first, weight, exists, P)
    tl.store(out + tl.arange(0, P.VALUE.D0)[None, :], y.to(dtype), mask=inside[:, None])
    if P.VALUE.D1 > 0:
        z = _weighted(own.out.second, weight, exists, P)
        tl.store(out + P.VALUE.D0 + tl.arange(0, P.VALUE.D1)[None, :], z.to(dtype), mask=inside[:, None])
