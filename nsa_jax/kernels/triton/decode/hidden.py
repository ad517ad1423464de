"""The hidden layers of the MLPs that compress new blocks (Eq. 7): products of all rows, no bias or GELU.

Grid: x = parts times tiles of hidden units (first the keys' MLP, then the values') times tiles of blocks. A
part has some of the `l` tokens of a block; `forming` adds the parts up. A program with no complete block
writes zeros at once. So where all rows have one length, 15 of 16 steps cost next to nothing (stride 16).

Bytes: the weights, 2 MB for keys and as much for values (32 tokens of 128, 256 units, bfloat16), and
`parts` sums in float32: 1 us at 4.2 TB/s.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from nsa_jax.kernels.triton.decode.parts import admit, num_blocks
from nsa_jax.kernels.triton.launch import named


class HiddenLayer(NamedTuple):
    """Tokens and weights of one MLP; all None without an MLP.

    Attributes:
      ring, new: old and new tokens before compression, `[B, RAW, K, D]`, `[B, T, K, D]`.
      position_embedding, kernel_in: `[l, D]`, `[l D, F]`.
    """

    ring: tl.tensor | None
    new: tl.tensor | None
    position_embedding: tl.tensor | None
    kernel_in: tl.tensor | None


class LayerDims(NamedTuple):
    """Hidden units, dim of a token, how much of this dim a product takes at a time, and its precision."""

    UNITS: tl.constexpr
    DIM: tl.constexpr
    DEPTH: tl.constexpr
    PRECISION: tl.constexpr


class HiddenDims(NamedTuple):
    """Sizes of the step, which `StepDims` explains, and of the work.

    Attributes:
      ROWS, COLUMNS: blocks, and hidden units, of a program.
      PARTS: programs that share the tokens of a block.
      STAGES: stages of the loop: the loads of STAGES - 1 steps are in flight.
      ALL: hidden units of both MLPs.
    """

    T: tl.constexpr
    KV_HEADS: tl.constexpr
    MAX_LENGTH: tl.constexpr
    RAW: tl.constexpr
    SIZE: tl.constexpr
    STRIDE: tl.constexpr
    BLOCKS: tl.constexpr
    ROWS: tl.constexpr
    COLUMNS: tl.constexpr
    PARTS: tl.constexpr
    STAGES: tl.constexpr
    ALL: tl.constexpr


@triton.jit
def _product(layer, hidden, lengths, num_tokens, batch, part, columns, rows, L, D):
    """One part of some units of an MLP, for some blocks; `hidden` begins at the MLP's own units."""
    F: tl.constexpr = L.UNITS
    PER_TOKEN: tl.constexpr = L.DIM // L.DEPTH
    column = columns * D.COLUMNS + tl.arange(0, D.COLUMNS)
    row = rows * D.ROWS + tl.arange(0, D.ROWS)
    exists = row < batch * (D.BLOCKS * D.KV_HEADS)
    b = tl.minimum(row // (D.BLOCKS * D.KV_HEADS), batch - 1)
    kv_head = row % D.KV_HEADS
    tokens = admit(lengths, num_tokens, b, D.T, D.MAX_LENGTH)
    block = num_blocks(tokens.start, D.SIZE, D.STRIDE) + row // D.KV_HEADS % D.BLOCKS
    complete = exists & (block < num_blocks(tokens.start + tokens.number, D.SIZE, D.STRIDE))

    EACH: tl.constexpr = (D.SIZE + D.PARTS - 1) // D.PARTS
    first = part * EACH
    last = tl.minimum(first + EACH, D.SIZE)
    last = tl.where(tl.max(complete.to(tl.int32), 0) > 0, last, first)
    x = tl.zeros([D.ROWS, D.COLUMNS], tl.float32)
    for step in tl.range(first * PER_TOKEN, last * PER_TOKEN, num_stages=D.STAGES):
        i = step // PER_TOKEN
        d = step % PER_TOKEN * L.DEPTH + tl.arange(0, L.DEPTH)
        token = block * D.STRIDE + i
        held = complete & (token < tokens.start)
        slot = (b.to(tl.int64) * D.RAW + token % D.RAW) * D.KV_HEADS + kv_head
        old = tl.load(layer.ring + (slot * L.DIM)[:, None] + d[None, :], mask=held[:, None], other=0.0)
        held = complete & (token >= tokens.start)
        slot = (b.to(tl.int64) * D.T + token - tokens.start) * D.KV_HEADS + kv_head
        fresh = tl.load(layer.new + (slot * L.DIM)[:, None] + d[None, :], mask=held[:, None], other=0.0)
        embedding = tl.load(layer.position_embedding + i * L.DIM + d).to(tl.float32)
        token = (old + fresh).to(tl.float32) + embedding[None, :]  # a token is old or new; the other is 0
        at = layer.kernel_in + (i * L.DIM + d)[:, None] * F + column[None, :]
        weights = tl.load(at, mask=(column < F)[None, :], other=0.0)
        x = tl.dot(token.to(weights.dtype), weights, x, input_precision=L.PRECISION)
    at = (row.to(tl.int64) * D.PARTS + part) * D.ALL
    tl.store(hidden + at[:, None] + column[None, :], x, mask=exists[:, None] & (column < F)[None, :])


@triton.jit(repr=named("nsa_step_hidden"))
def hidden_kernel(
    lengths, num_tokens, key_ring, key_new, key_embedding, key_kernel_in,
    value_ring, value_new, value_embedding, value_kernel_in,
    hidden,
    batch, T: tl.constexpr, KV_HEADS: tl.constexpr, MAX_LENGTH: tl.constexpr, RAW: tl.constexpr,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, KEY_UNITS: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_DEPTH: tl.constexpr, KEY_PRECISION: tl.constexpr, VALUE_UNITS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_DEPTH: tl.constexpr, VALUE_PRECISION: tl.constexpr,
):  # fmt: skip
    """`hidden` `[B, BLOCKS, K, PARTS, F]`, the units of the keys' MLP and then of the values'."""
    D: tl.constexpr = HiddenDims(
        T=T, KV_HEADS=KV_HEADS, MAX_LENGTH=MAX_LENGTH, RAW=RAW, SIZE=SIZE, STRIDE=STRIDE, BLOCKS=BLOCKS,
        ROWS=ROWS, COLUMNS=COLUMNS, PARTS=PARTS, STAGES=STAGES, ALL=KEY_UNITS + VALUE_UNITS,
    )  # fmt: skip
    KEY_TILES: tl.constexpr = (KEY_UNITS + COLUMNS - 1) // COLUMNS
    TILES: tl.constexpr = KEY_TILES + (VALUE_UNITS + COLUMNS - 1) // COLUMNS
    part = tl.program_id(0) % PARTS
    tile = tl.program_id(0) // PARTS % TILES
    rows = tl.program_id(0) // (PARTS * TILES)
    if KEY_UNITS > 0:  # noqa: SIM102 - one is known at compile time, the other is not
        if tile < KEY_TILES:
            L: tl.constexpr = LayerDims(KEY_UNITS, KEY_DIM, KEY_DEPTH, KEY_PRECISION)
            layer = HiddenLayer(key_ring, key_new, key_embedding, key_kernel_in)
            _product(layer, hidden, lengths, num_tokens, batch, part, tile, rows, L, D)
    if VALUE_UNITS > 0:  # noqa: SIM102
        if tile >= KEY_TILES:
            M: tl.constexpr = LayerDims(VALUE_UNITS, VALUE_DIM, VALUE_DEPTH, VALUE_PRECISION)
            layer = HiddenLayer(value_ring, value_new, value_embedding, value_kernel_in)
            to = hidden + KEY_UNITS
            _product(layer, to, lengths, num_tokens, batch, part, tile - KEY_TILES, rows, M, D)
