"""Block probabilities: `exp(q k - lse)` of dense causal attention, summed over the keys of each block.

grid = (ceil(T / tokens), B K): one program per `tokens` neighbouring queries with all query heads of a KV
head, `rows` rows in all (8 tokens x 16 heads = 128). It loops over the keys in steps of whole selection
blocks. What a step finds is summed over the keys of each block and over the heads while it is in registers,
so only `[tokens, blocks]` is stored, and no sum depends on another step. Blocks out of sight get 0 at the
end. Late queries see the most keys, so they start first. Programs of one KV head follow each other, so its
keys stay in L2. See `steps` for the masks. A step holds `KEYS` keys; a block with more takes several parts.

Registers of a thread: `rows keys / (32 num_warps)` floats of logits; 64 at 128 rows, 128 keys and 8 warps.
Shared memory: `(rows + num_stages keys) H itemsize`, 96 KB at two stages, so two programs fit on an SM. A
step loads `keys H itemsize` bytes (32 KB) from L2 for `2 rows keys H` flops (4.2 M); 64 rows would need
10 TB/s at 650 TFLOP/s, more than L2 gives.

Floor at 64 / 4 heads, H = 128, T = S: products `T^2 N H`, 8.8 TFLOP at 32k, 8.9 ms at 990 TFLOP/s;
exponentials `T^2 N / 2`, 34 G, 9.3 ms at 16 a clock and SM (1.755 GHz); results `4 T K M`, 0.27 GB, 0.1 ms.
At 8k: 0.56, 0.58 and 0.01 ms. We had predicted 16 ms at 32k and 1.15 ms at 8k; an H100 takes 19.6 and 1.29,
where cuDNN's dense forward, with twice the products and as many exponentials, takes 28.0 and 1.94.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Float
from nsa_jax.kernels.triton.dims import padded_heads, split_dim, tokens_of
from nsa_jax.kernels.triton.gpu import has_tma
from nsa_jax.kernels.triton.launch import launch, like, named
from nsa_jax.kernels.triton.loading import Keys, key_tiles, load_rows, query_tile
from nsa_jax.kernels.triton.pieces import LARGEST_INT, LOG2_E, Dim, precision
from nsa_jax.kernels.triton.probabilities.steps import (
    Places,
    is_hidden,
    logits_of,
    next_start,
    seen_keys,
    steps_over,
    tokens_of_tile,
)
from nsa_jax.kernels.triton.sizes.probabilities import ProbabilitySizes
from nsa_jax.kernels.triton.softmax import load_lse

ZEROS = 64  # blocks that get 0 at once


def weigh_blocks(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    lse: Float[Array, "B T N"],
    places: Places,
    scale: float,
    sizes: ProbabilitySizes,
    block_size: int,
    num_blocks: int,
    largest: bool,
) -> Float[Array, "B T K M"]:
    """Probabilities of `num_blocks` blocks, summed over the heads of a KV head, or the `largest` of them."""
    batch, num_queries, num_heads, _ = query.shape
    num_keys, num_kv_heads, dim = key.shape[1:]
    heads, (first, second), tma = num_heads // num_kv_heads, split_dim(dim), has_tma()
    tokens = tokens_of(sizes.rows, heads)
    return launch(
        block_probabilities_kernel, query, *key_tiles(key, sizes.keys, tma), lse.astype("float32"), *places,
        out=like(query, (batch, num_queries, num_kv_heads, num_blocks), "float32"),
        grid=(triton.cdiv(num_queries, tokens), batch * num_kv_heads),
        num_warps=sizes.num_warps, num_stages=sizes.num_stages, registers=sizes.registers,
        num_queries=num_queries, num_keys=num_keys, num_blocks=num_blocks, KV_HEADS=num_kv_heads, G=heads,
        PADDED_G=padded_heads(heads), TOKENS=tokens, KEYS=sizes.keys, BLOCK=block_size, H0=first, H1=second,
        SCALE=float(scale), LARGEST=largest, ZEROS=ZEROS, PRECISION=precision(query.dtype), TMA=tma,
    )  # fmt: skip


class Row(NamedTuple):
    """What is known of each row: log-sum-exp in base 2, inf where it sees nothing, and the keys it sees."""

    lse: tl.tensor
    seen: tl.tensor


class Target(NamedTuple):
    """Where the blocks of each token go.

    Attributes:
      first: pointer to block 0 of each token.
      wanted: tokens that are stored.
      sees: those of them that see a key; the others get 0.
      num_blocks: blocks of a token.
      LARGEST: whether the largest of the heads is stored, not their sum.
    """

    first: tl.tensor
    wanted: tl.tensor
    sees: tl.tensor
    num_blocks: tl.tensor
    LARGEST: tl.constexpr


@triton.jit
def _store(target, first_block, values):
    """Stores `[TOKENS, blocks]` from `first_block` on."""
    block = first_block + tl.arange(0, values.shape[1])
    kept = target.wanted[:, None] & (block < target.num_blocks)[None, :]
    tl.store(target.first[:, None] + block[None, :], values, mask=kept)


@triton.jit
def _sums(
    q, row, keys, start, first,
    BLOCKS: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`[rows, BLOCKS]`: sums over the keys from `first` on, of each of BLOCKS equal parts."""
    logits = logits_of(q, keys, start, first, PRECISION)
    p = tl.exp2(logits * (SCALE * LOG2_E) - row.lse[:, None])
    if MASKED:
        p = tl.where(is_hidden(first, row.seen, keys.ROWS), 0.0, p)
    return tl.sum(p.reshape(p.shape[0], BLOCKS, keys.ROWS // BLOCKS), 2)


@triton.jit
def _weigh_step(
    q, row, keys, start, number, target,
    BLOCK: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Stores the blocks of step `number` of a sequence."""
    KEYS: tl.constexpr = keys.ROWS
    ROWS: tl.constexpr = q.first.shape[0]
    TOKENS: tl.constexpr = target.first.shape[0]
    BLOCKS: tl.constexpr = KEYS // BLOCK if KEYS > BLOCK else 1
    if KEYS >= BLOCK:
        sums = _sums(q, row, keys, start, number * KEYS, BLOCKS, SCALE, PRECISION, MASKED)
    else:
        sums = tl.zeros([ROWS, 1], tl.float32)
        for first in tl.range(number * BLOCK, number * BLOCK + BLOCK, KEYS):
            sums += _sums(q, row, keys, start, first, 1, SCALE, PRECISION, MASKED)
    heads = sums.reshape(TOKENS, ROWS // TOKENS, BLOCKS)
    values = tl.sum(heads, 1)
    if target.LARGEST:
        values = tl.max(heads, 1) + 0.0 * values  # a maximum drops NaN
    _store(target, number * BLOCKS, tl.where(target.sees[:, None], values, 0.0))


@triton.jit
def _weigh_sequence(
    q, row, keys, tokens, start, target,
    BLOCK: tl.constexpr, ZEROS: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Stores all blocks of the tokens of the sequence whose first key is `start`."""
    STEP: tl.constexpr = keys.ROWS if keys.ROWS > BLOCK else BLOCK
    steps = steps_over(tokens, start, STEP)
    _weigh_step(q, row, keys, start, steps.full, target, BLOCK, SCALE, PRECISION, MASKED=True)
    for number in tl.range(0, steps.full):
        _weigh_step(q, row, keys, start, number, target, BLOCK, SCALE, PRECISION, MASKED=False)
    for number in tl.range(steps.full + 1, steps.past):
        _weigh_step(q, row, keys, start, number, target, BLOCK, SCALE, PRECISION, MASKED=True)
    _fill(target, tl.maximum(steps.full + 1, steps.past) * (STEP // BLOCK), ZEROS)


@triton.jit
def _fill(target, first_block, ZEROS: tl.constexpr):
    """Stores 0 in all blocks from `first_block` on."""
    for block in tl.range(first_block, target.num_blocks, ZEROS):
        _store(target, block, tl.zeros([target.first.shape[0], ZEROS], tl.float32))


@triton.jit(repr=named("nsa_block_probabilities"))
def block_probabilities_kernel(
    query, keys0, keys1, lse, position, sequence_start, probabilities, num_queries, num_keys, num_blocks,
    KV_HEADS: tl.constexpr, G: tl.constexpr, PADDED_G: tl.constexpr, TOKENS: tl.constexpr,
    KEYS: tl.constexpr, BLOCK: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr, SCALE: tl.constexpr,
    LARGEST: tl.constexpr, ZEROS: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Probabilities of the blocks for a tile of queries."""
    DIM: tl.constexpr = Dim(H0, H1)
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    tile = query_tile(number, num_queries, KV_HEADS, G, PADDED_G, TOKENS, TOKENS * PADDED_G)
    keys: tl.constexpr = Keys(keys0, keys1, tile.b, tile.kv_head, num_keys, KV_HEADS, KEYS, DIM, TMA)
    tokens = tokens_of_tile(tile, position, sequence_start, num_queries, TOKENS)
    at = tile.first_query + tile.first_token + tile.token
    row = Row(load_lse(lse, tile.rows), seen_keys(position, at, tile.rows.inside))
    q = load_rows(query, tile.rows, DIM)
    first = probabilities + (tokens.index * KV_HEADS + tile.kv_head) * num_blocks
    sees = tokens.seen > 0
    if sequence_start is None:
        target: tl.constexpr = Target(first, tokens.exists, sees, num_blocks, LARGEST)
        _weigh_sequence(q, row, keys, tokens, 0, target, BLOCK, ZEROS, SCALE, PRECISION)
    else:
        padding: tl.constexpr = Target(first, tokens.exists & (tokens.seen <= 0), sees, num_blocks, LARGEST)
        _fill(padding, 0, ZEROS)
        start = next_start(tokens, -1)
        while start < LARGEST_INT:
            own: tl.constexpr = Target(first, tokens.begin == start, sees, num_blocks, LARGEST)
            _weigh_sequence(q, row, keys, tokens, start, own, BLOCK, ZEROS, SCALE, PRECISION)
            start = next_start(tokens, start)
