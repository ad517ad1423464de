"""Tiles of keys and queries, whose head dim is one or two powers of two: 96 = 64 + 32, 192 = 128 + 64.

Powers of two are the only lengths that Triton knows, so a tile is held as two tensors. Where there is no
second piece its size is 0 and a copy of the first stands for it, which the compiler drops.

On Hopper the tensor memory accelerator (TMA) fetches tiles, through descriptors that the host makes: those
that a kernel makes for itself need memory that jaxlib allocates at every launch, which no CUDA graph may do,
and XLA runs whole programs as CUDA graphs. Older GPUs load through pointers.
"""

import jax_triton
import triton
import triton.language as tl

from nsa_jax.array_typing import Array
from nsa_jax.kernels.triton.dims import padded_heads, split_dim

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
LARGEST_INT: tl.constexpr = tl.constexpr(2147483647)  # more than any index, or any score by its bits
LOWEST: tl.constexpr = tl.constexpr(-3.0e38)  # a first maximum that no -inf minus -inf can come from

type Source = Array | jax_triton.TensorDescriptor | None


def precision(dtype) -> str:
    """How `tl.dot` multiplies float32: in three parts. Has no effect on 16-bit inputs."""
    return "tf32x3" if dtype.itemsize == 4 else "tf32"


def key_tiles(array: Array, rows: int, tma: bool) -> tuple[Source, Source]:
    """What a kernel loads tiles of `rows` tokens of one head of `[B, S, K, D]` from: both pieces."""
    if not tma:
        return array, None
    batch, length, heads, dim = array.shape
    return _descriptors(array.reshape(batch, length, heads * dim), (1, rows), dim)


def query_tiles(array: Array, num_kv_heads: int, tokens: int, tma: bool) -> tuple[Source, Source]:
    """The same for `tokens` tokens and the padded heads of one KV head of `[B, T, N, D]`."""
    if not tma:
        return array, None
    batch, length, num_heads, dim = array.shape
    heads = num_heads // num_kv_heads
    array = array.reshape(batch, length, num_kv_heads, heads, dim)
    return _descriptors(array, (1, tokens, 1, padded_heads(heads)), dim)


def _descriptors(array: Array, block: tuple[int, ...], dim: int) -> tuple[Source, Source]:
    first, second = (
        jax_triton.TensorDescriptor.from_array(array, (*block, piece)) if piece else None
        for piece in split_dim(dim)
    )
    return first, second


@triton.jit
def load_keys(
    first, second, b, token, head, length,
    HEADS: tl.constexpr, ROWS: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Both pieces of the tile of keys that starts at `token`, 0 outside of the row's `0 .. length - 1`."""
    if TMA:
        x0 = first.load([b, token, head * (D0 + D1)]).reshape(ROWS, D0)
        if D1 > 0:
            x1 = second.load([b, token, head * (D0 + D1) + D0]).reshape(ROWS, D1)
        else:
            x1 = x0
    else:
        row = token + tl.arange(0, ROWS)
        pointer = first + (b.to(tl.int64) * length * HEADS + head) * (D0 + D1)
        offset = row.to(tl.int64) * (HEADS * (D0 + D1))
        x0, x1 = load_rows(pointer, offset, (row >= 0) & (row < length), D0, D1)
    return x0, x1


@triton.jit
def load_queries(
    first, second, b, token, kv_head, length,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, PADDED_HEADS: tl.constexpr,
    D0: tl.constexpr, D1: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Both pieces of the tile of queries that starts at `token`, 0 where there is no token or no head."""
    ROWS: tl.constexpr = TOKENS * PADDED_HEADS
    if TMA:
        x0 = first.load([b, token, kv_head, 0, 0]).reshape(ROWS, D0)
        if D1 > 0:
            x1 = second.load([b, token, kv_head, 0, D0]).reshape(ROWS, D1)
        else:
            x1 = x0
    else:
        r = tl.arange(0, ROWS)
        inside = (token + r // PADDED_HEADS < length) & (r % PADDED_HEADS < HEADS)
        start = ((b.to(tl.int64) * length + token) * KV_HEADS + kv_head) * (HEADS * (D0 + D1))
        offset = ((r // PADDED_HEADS) * (KV_HEADS * HEADS) + r % PADDED_HEADS) * (D0 + D1)
        x0, x1 = load_rows(first + start, offset, inside, D0, D1)
    return x0, x1


@triton.jit
def load_rows(pointer, offset, inside, D0: tl.constexpr, D1: tl.constexpr):
    """Both pieces of the rows that start at `pointer + offset`, 0 where not `inside`."""
    x0 = tl.load(pointer + offset[:, None] + tl.arange(0, D0)[None, :], mask=inside[:, None], other=0.0)
    if D1 > 0:
        columns = D0 + tl.arange(0, D1)
        x1 = tl.load(pointer + offset[:, None] + columns[None, :], mask=inside[:, None], other=0.0)
    else:
        x1 = x0
    return x0, x1


@triton.jit
def store_rows(pointer, offset, x0, x1, inside, D0: tl.constexpr, D1: tl.constexpr):
    """Stores both pieces as rows that start at `pointer + offset`, in the pointer's dtype."""
    to = pointer + offset[:, None]
    tl.store(to + tl.arange(0, D0)[None, :], x0.to(pointer.dtype.element_ty), mask=inside[:, None])
    if D1 > 0:
        columns = D0 + tl.arange(0, D1)
        tl.store(to + columns[None, :], x1.to(pointer.dtype.element_ty), mask=inside[:, None])


@triton.jit
def row_shift(
    out,
    do0,
    do1,
    d_lse,
    weight,
    products,
    delta,
    first_row,
    offset,
    inside,
    V0: tl.constexpr,
    V1: tl.constexpr,
):
    """`(shift, gate)` of the rows: `delta = gate (out . d_out) - d_lse`, and what stands in for no gate.

    Stores `out . d_out` in `products`, and `delta`.
    """
    o0, o1 = load_rows(out + first_row * (V0 + V1), offset * (V0 + V1), inside, V0, V1)
    product = tl.sum(o0.to(tl.float32) * do0.to(tl.float32), 1)
    if V1 > 0:
        product += tl.sum(o1.to(tl.float32) * do1.to(tl.float32), 1)
    tl.store(products + first_row + offset, product, mask=inside)
    if weight is None:
        gate = product
        shift = product
    else:
        gate = tl.load(weight + first_row + offset, mask=inside, other=0.0)
        shift = gate * product
    if d_lse is not None:
        shift -= tl.load(d_lse + first_row + offset, mask=inside, other=0.0)
    tl.store(delta + first_row + offset, shift, mask=inside)
    return shift, gate


@triton.jit
def zeros(ROWS: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):
    """Both pieces of an accumulator."""
    x0 = tl.zeros([ROWS, D0], tl.float32)
    if D1 > 0:
        x1 = tl.zeros([ROWS, D1], tl.float32)
    else:
        x1 = 0.0
    return x0, x1


@triton.jit
def inner(a0, a1, b0, b1, D1: tl.constexpr, PRECISION: tl.constexpr):
    """`a b^T` over both pieces, in float32."""
    product = tl.dot(a0, tl.trans(b0), input_precision=PRECISION)
    if D1 > 0:
        product = tl.dot(a1, tl.trans(b1), product, input_precision=PRECISION)
    return product


@triton.jit
def add_product(a, b0, b1, x0, x1, D1: tl.constexpr, PRECISION: tl.constexpr):
    """`x + a b` over both pieces of `x` and `b`."""
    x0 = tl.dot(a, b0, x0, input_precision=PRECISION)
    if D1 > 0:
        x1 = tl.dot(a, b1, x1, input_precision=PRECISION)
    return x0, x1
