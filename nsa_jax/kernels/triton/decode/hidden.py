"""The hidden layer of the MLP that compresses new blocks: one product for all rows, before bias and GELU.

Grid: x = parts times tiles of hidden units times tiles of blocks. A part has some of the `l` tokens of a
block; `forming` adds the parts up. A program whose blocks are all incomplete writes zeros at once: of rows of
one length 15 of 16 steps cost next to nothing (stride 16).

Bytes: the weights, 2 MB for keys and as much for values (32 tokens of 128, 256 units, bfloat16), and
`parts` sums in float32: 1 us at 4.2 TB/s. It runs beside the compressed branch, which no new block enters.
"""

import triton
import triton.language as tl

from nsa_jax.kernels.triton.decode.parts import admit, num_blocks
from nsa_jax.kernels.triton.launch import named


@triton.jit(repr=named("nsa_step_hidden"))
def hidden_kernel(
    ring, new, lengths, num_tokens, position_embedding, kernel_in,
    hidden,
    batch, T: tl.constexpr, KV_HEADS: tl.constexpr, MAX_LENGTH: tl.constexpr, RAW: tl.constexpr,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, F: tl.constexpr,
    UNITS: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, DIM: tl.constexpr, DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One part of UNITS hidden units of ROWS blocks, counted over rows of the batch, blocks and KV heads."""
    part = tl.program_id(0) % PARTS
    column = tl.program_id(0) // PARTS % tl.cdiv(F, UNITS) * UNITS + tl.arange(0, UNITS)
    row = tl.program_id(0) // (PARTS * tl.cdiv(F, UNITS)) * ROWS + tl.arange(0, ROWS)
    exists = row < batch * (BLOCKS * KV_HEADS)
    b = tl.minimum(row // (BLOCKS * KV_HEADS), batch - 1)
    kv_head = row % KV_HEADS
    tokens = admit(lengths, num_tokens, b, T, MAX_LENGTH)
    block = num_blocks(tokens.start, SIZE, STRIDE) + row // KV_HEADS % BLOCKS
    complete = exists & (block < num_blocks(tokens.start + tokens.number, SIZE, STRIDE))

    EACH: tl.constexpr = (SIZE + PARTS - 1) // PARTS
    first = part * EACH
    last = tl.minimum(first + EACH, SIZE)
    last = tl.where(tl.max(complete.to(tl.int32), 0) > 0, last, first)
    x = tl.zeros([ROWS, UNITS], tl.float32)
    for step in tl.range(first * (DIM // DEPTH), last * (DIM // DEPTH), num_stages=STAGES):
        i = step // (DIM // DEPTH)
        d = step % (DIM // DEPTH) * DEPTH + tl.arange(0, DEPTH)
        token = block * STRIDE + i
        held = complete & (token < tokens.start)
        slot = (b.to(tl.int64) * RAW + token % RAW) * KV_HEADS + kv_head
        old = tl.load(ring + (slot * DIM)[:, None] + d[None, :], mask=held[:, None], other=0.0)
        held = complete & (token >= tokens.start)
        slot = (b.to(tl.int64) * T + token - tokens.start) * KV_HEADS + kv_head
        fresh = tl.load(new + (slot * DIM)[:, None] + d[None, :], mask=held[:, None], other=0.0)
        embedding = tl.load(position_embedding + i * DIM + d).to(tl.float32)
        token = (old + fresh).to(tl.float32) + embedding[None, :]  # old or new: the other is 0
        at = kernel_in + (i * DIM + d)[:, None] * F + column[None, :]
        weights = tl.load(at, mask=(column < F)[None, :], other=0.0)
        x = tl.dot(token.to(weights.dtype), weights, x, input_precision=PRECISION)
    at = (row.to(tl.int64) * PARTS + part) * F
    tl.store(hidden + at[:, None] + column[None, :], x, mask=exists[:, None] & (column < F)[None, :])
