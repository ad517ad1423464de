"""Tiles of keys and values of a quantised cache, read two numbers at a time.

A product takes neighbouring numbers of its inner axis together. For values these are neighbouring keys, and
an instruction brings 16-bit numbers from shared memory to where the product wants them. For 8-bit ones there
is none, so they would be read one by one. Here two numbers of a vector are read as one of 16 bits, so that a
tile becomes two, of its even and its odd columns. A query is cut alike, and sums are put together at the end.

A bfloat16 of 128 to 255 has its last bit worth 1, so seven bits of a number stand in it as they are:
`128 + (x & 127) - (256 if x < 0 else 128)` is x, for two numbers in three instructions. The general
conversion takes half as many again, and a step on a full cache is bound by its instructions.

Without a quantised cache, and for dims of two pieces or of 16, half of which is too little for a product,
tiles are as they always are, and nothing is cut.
"""

import triton
import triton.language as tl

from nsa_jax.kernels.triton.loading import load_at
from nsa_jax.kernels.triton.pieces import Dim, Pieces
from nsa_jax.kernels.triton.softmax import Softmax, no_keys


@triton.constexpr_function
def _is_cut(quantised, d0, d1):
    return quantised and d0 >= 32 and d1 == 0


@triton.jit
def cut_query(x, scale, DIM):
    """Rows of a query with even and odd columns apart, as `load_kept_tile` gives keys; `scale` is theirs."""
    if not _is_cut(scale is not None, DIM.D0, DIM.D1):
        y = x
    else:
        even, odd = tl.split(tl.reshape(x.first, [x.first.shape[0], DIM.D0 // 2, 2]))
        y = Pieces(even, odd)
    return y


@triton.jit
def load_kept_tile(array, place, scale, inside, ROW: tl.constexpr, DIM, dtype: tl.constexpr):
    """Vectors at `array + place * ROW`, without their scales; of a quantised cache cut.

    Numbers of int8 are bfloat16 if `dtype`, that of the query, is; all others are as they are kept.
    """
    if not _is_cut(scale is not None, DIM.D0, DIM.D1):
        x = load_at(array, place * ROW, inside, DIM)
    else:
        HALF: tl.constexpr = Dim(DIM.D0 // 2, 0)
        pairs = array.to(tl.pointer_type(tl.int16), bitcast=True)
        x = _numbers(load_at(pairs, place * (ROW // 2), inside, HALF).first, array.dtype.element_ty, dtype)
    return x


@triton.jit
def _numbers(pairs, kept: tl.constexpr, dtype: tl.constexpr):
    """The first and the second number of each pair."""
    if kept == tl.int8 and dtype == tl.bfloat16:
        # One result each: of an assembly with two, Triton brings one through shared memory once more.
        even = tl.inline_asm_elementwise(
            """{
            .reg .b32 low, sign, one;
            lop3.b32 low, $1, 0x007f007f, 0x43004300, 0xea;   // 128 + (x & 127)
            lop3.b32 sign, $1, 0x00800080, 0xc300c300, 0xea;  // -256 or -128
            mov.b32 one, 0x3f803f80;
            fma.rn.bf16x2 $0, low, one, sign;
            }""",
            "=r,r", [pairs], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
        odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 x, low, sign, one;
            shr.u32 x, $1, 8;
            lop3.b32 low, x, 0x007f007f, 0x43004300, 0xea;
            lop3.b32 sign, x, 0x00800080, 0xc300c300, 0xea;
            mov.b32 one, 0x3f803f80;
            fma.rn.bf16x2 $0, low, one, sign;
            }""",
            "=r,r", [pairs], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        even = pairs.to(tl.int8).to(kept, bitcast=True)
        odd = (pairs >> 8).to(tl.int8).to(kept, bitcast=True)
    return Pieces(even, odd)


@triton.jit
def no_sums(ROWS: tl.constexpr, scale, DIM):
    """The sums before the first values of `load_kept_tile`."""
    if not _is_cut(scale is not None, DIM.D0, DIM.D1):
        state = no_keys(ROWS, DIM)
    else:
        HALVES: tl.constexpr = Dim(DIM.D0 // 2, DIM.D0 // 2)
        state = no_keys(ROWS, HALVES)
    return state


@triton.jit
def joined_sums(state, scale, DIM):
    """The sums with their columns in order."""
    if not _is_cut(scale is not None, DIM.D0, DIM.D1):
        x = state
    else:
        both = tl.join(state.out.first, state.out.second)
        out = Pieces(tl.reshape(both, [both.shape[0], DIM.D0]), None)
        x = Softmax(out, state.largest, state.total)
    return x
