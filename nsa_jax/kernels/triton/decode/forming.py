"""How the tokens of a new compression block become one key and one value (Eq. 7): `Compression` on the GPU.

The program that appends takes the mean here. The hidden layer of an MLP is a larger product, which
`hidden_kernel` computes for all rows at once; here its output layer is applied and added to the mean. Last
the key is rotated. It is stored and loaded again for that, since the two halves of a pair lie in different
threads.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from nsa_jax.compression import RADIANS_PER_TICK
from nsa_jax.kernels.triton.loading import load_at
from nsa_jax.kernels.triton.pieces import Pieces

WEIGHTS_AT_ONCE: tl.constexpr = tl.constexpr(4096)  # of an output layer: 32 registers, 8 or 16 KB a stage
TICK: tl.constexpr = tl.constexpr(RADIANS_PER_TICK)


class OutputLayer(NamedTuple):
    """The rest of an MLP with F hidden units: `[F]`, `[F, D]`, `[D]`; all None without an MLP."""

    bias_in: tl.tensor | None
    kernel_out: tl.tensor | None
    bias_out: tl.tensor | None


class Turning(NamedTuple):
    """A `Rotation`: ticks and rest of each pair, and the magnitude of all; all None without a rotation."""

    ticks: tl.tensor | None
    rest: tl.tensor | None
    magnitude: tl.tensor | None


class Forming(NamedTuple):
    """How the blocks of a step are formed.

    Attributes:
      given_key, given_value: `[B, BLOCKS, K, D]`, the blocks if XLA has formed them; else None.
      hidden: `[B, BLOCKS, K, PARTS, F]` in float32, the hidden units of the keys' MLP, then of the values';
        to be summed over parts, before bias and GELU. None without MLPs.
      key, value: the output layers of the MLPs.
      turning: the rotation of keys.
    """

    given_key: tl.tensor | None
    given_value: tl.tensor | None
    hidden: tl.tensor | None
    key: OutputLayer
    value: OutputLayer
    turning: Turning


@triton.jit
def mean_of_block(ring, new, b, kv_head, tokens, block, DIM, D):
    """Mean of the tokens of a block, old ones from the ring, new ones from the operand; `[1, D]`."""
    WIDTH: tl.constexpr = DIM.D0 + DIM.D1
    PADDED: tl.constexpr = triton.next_power_of_2(D.SIZE)
    r = tl.arange(0, PADDED)
    token = block * D.STRIDE + r
    held = r < D.SIZE
    slot = (b.to(tl.int64) * D.RAW + token % D.RAW) * D.KV_HEADS + kv_head
    old = load_at(ring, slot * WIDTH, held & (token < tokens.start), DIM)
    slot = (b * D.T + token - tokens.start) * D.KV_HEADS + kv_head
    fresh = load_at(new, slot * WIDTH, held & (token >= tokens.start), DIM)
    x0 = tl.sum(old.first.to(tl.float32) + fresh.first.to(tl.float32), 0)[None, :] / D.SIZE
    if DIM.D1 > 0:
        x1 = tl.sum(old.second.to(tl.float32) + fresh.second.to(tl.float32), 0)[None, :] / D.SIZE
    else:
        x1 = None
    return Pieces(x0, x1)


@triton.jit
def _gelu(x):
    """GELU by tanh, which is a sigmoid of twice its argument; 1.59577 is twice the root of 2 / pi."""
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def with_output_layer(x, hidden, layer, DIM, F: tl.constexpr, PARTS: tl.constexpr, ALL: tl.constexpr):
    """The mean `x` plus the output of the MLP; `hidden` `[PARTS, ALL]` begins at the MLP's own units."""
    WIDTH: tl.constexpr = DIM.D0 + DIM.D1
    UNITS: tl.constexpr = WEIGHTS_AT_ONCE // triton.next_power_of_2(WIDTH)
    part = tl.arange(0, PARTS)
    bias = load_at(layer.bias_out, tl.zeros([1], tl.int32), tl.full([1], True, tl.int1), DIM)
    x0 = x.first + bias.first.to(tl.float32)
    if DIM.D1 > 0:
        x1 = x.second + bias.second.to(tl.float32)
    for first in tl.range(0, F, UNITS, num_stages=2):
        unit = first + tl.arange(0, UNITS)
        inside = unit < F
        h = tl.load(hidden + part[:, None] * ALL + unit[None, :], mask=inside[None, :], other=0.0)
        h = _gelu(tl.sum(h, 0) + tl.load(layer.bias_in + unit, mask=inside, other=0.0).to(tl.float32))
        w = load_at(layer.kernel_out, unit * WIDTH, inside, DIM)
        x0 += tl.sum(h[:, None] * w.first.to(tl.float32), 0)[None, :]
        if DIM.D1 > 0:
            x1 += tl.sum(h[:, None] * w.second.to(tl.float32), 0)[None, :]
    if DIM.D1 > 0:
        y = Pieces(x0, x1)
    else:
        y = Pieces(x0, None)
    return y


@triton.jit
def _turned_columns(key, position, turning, FIRST: tl.constexpr, NUMBER: tl.constexpr, PAIRS: tl.constexpr):
    """NUMBER columns of the stored `key` from FIRST on, rotated; `[1, NUMBER]`."""
    column = FIRST + tl.arange(0, NUMBER)
    left = column < PAIRS
    turns = column < 2 * PAIRS
    pair = tl.where(left, column, column - PAIRS)
    ticks = tl.load(turning.ticks + pair, mask=turns, other=0)
    rest = tl.load(turning.rest + pair, mask=turns, other=0.0)
    angle = (position * ticks).to(tl.float32) * TICK + position.to(tl.float32) * rest
    magnitude = tl.load(turning.magnitude)
    x = tl.load(key + column).to(tl.float32)
    y = tl.load(key + tl.where(left, column + PAIRS, column - PAIRS), mask=turns, other=0.0).to(tl.float32)
    turned = x * (magnitude * tl.cos(angle)) + tl.where(left, -y, y) * (magnitude * tl.sin(angle))
    return tl.where(turns, turned, x)[None, :]


@triton.jit
def turned(key, position, turning, DIM, PAIRS: tl.constexpr):
    """The stored `key`, rotated by its position."""
    x0 = _turned_columns(key, position, turning, 0, DIM.D0, PAIRS)
    if DIM.D1 > 0:
        x1 = _turned_columns(key, position, turning, DIM.D0, DIM.D1, PAIRS)
    else:
        x1 = None
    return Pieces(x0, x1)
