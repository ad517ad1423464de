"""Log-sum-exp of dense causal attention, without values: the first of two passes of block probabilities.

grid = (ceil(T / tokens), B K): one program per `tokens` neighbouring queries with all query heads of a KV
head, `rows` rows in all (8 tokens x 16 heads = 128). It loops over the keys and keeps the largest logit and
the sum of each row. Late queries see the most keys, so they start first. Programs of one KV head follow each
other, so its keys stay in L2. See `steps` for the masks.

Registers of a thread: `rows keys / (32 num_warps)` floats of logits; 64 at 128 rows, 128 keys and 8 warps.
Shared memory: `(rows + num_stages keys) H itemsize`, 96 KB at two stages, so two programs fit on an SM. The
floor is that of `blocks`: the same products and exponentials. An H100 takes about 1.2 ms at 8k tokens and
17.5 at 32k, by the difference between two passes and one.
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
from nsa_jax.kernels.triton.softmax import LOWEST, natural_lse


def dense_log_sum_exp(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    places: Places,
    scale: float,
    sizes: ProbabilitySizes,
) -> Float[Array, "B T N"]:
    """Natural log-sum-exp of each query over the keys that it sees, -inf where it sees none."""
    batch, num_queries, num_heads, _ = query.shape
    num_keys, num_kv_heads, dim = key.shape[1:]
    heads, (first, second), tma = num_heads // num_kv_heads, split_dim(dim), has_tma()
    tokens = tokens_of(sizes.rows, heads)
    return launch(
        dense_log_sum_exp_kernel, query, *key_tiles(key, sizes.keys, tma), *places,
        out=like(query, (batch, num_queries, num_heads), "float32"),
        grid=(triton.cdiv(num_queries, tokens), batch * num_kv_heads),
        num_warps=sizes.num_warps, num_stages=sizes.num_stages, registers=sizes.registers,
        num_queries=num_queries, num_keys=num_keys, KV_HEADS=num_kv_heads, G=heads,
        PADDED_G=padded_heads(heads), TOKENS=tokens, KEYS=sizes.keys, H0=first, H1=second,
        SCALE=float(scale), PRECISION=precision(query.dtype), TMA=tma,
    )  # fmt: skip


class Sums(NamedTuple):
    """The state of each row after some keys, in base 2.

    Attributes:
      largest: the largest logit.
      total: sum of `exp2(logit - largest)`.
    """

    largest: tl.tensor
    total: tl.tensor


@triton.jit
def _sum_step(
    q, state, keys, start, first, seen, SCALE: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr
):
    """The state after the keys from `first` on."""
    logits = logits_of(q, keys, start, first, PRECISION)
    if MASKED:
        logits = tl.where(is_hidden(first, seen, keys.ROWS), float("-inf"), logits)
    top = tl.maximum(state.largest, tl.max(logits, 1) * (SCALE * LOG2_E))
    p = tl.exp2(logits * (SCALE * LOG2_E) - top[:, None])
    return Sums(top, state.total * tl.exp2(state.largest - top) + tl.sum(p, 1))


@triton.jit
def _sum_sequence(q, keys, tokens, start, seen, SCALE: tl.constexpr, PRECISION: tl.constexpr):
    """The state of all rows after the sequence whose first key is `start`, right for its own rows."""
    KEYS: tl.constexpr = keys.ROWS
    ROWS: tl.constexpr = q.first.shape[0]
    steps = steps_over(tokens, start, KEYS)
    state = Sums(tl.full([ROWS], LOWEST, tl.float32), tl.zeros([ROWS], tl.float32))
    state = _sum_step(q, state, keys, start, steps.full * KEYS, seen, SCALE, PRECISION, MASKED=True)
    for i in tl.range(0, steps.full):
        state = _sum_step(q, state, keys, start, i * KEYS, seen, SCALE, PRECISION, MASKED=False)
    for i in tl.range(steps.full + 1, steps.past):
        state = _sum_step(q, state, keys, start, i * KEYS, seen, SCALE, PRECISION, MASKED=True)
    return state


@triton.jit(repr=named("nsa_dense_log_sum_exp"))
def dense_log_sum_exp_kernel(
    query, keys0, keys1, position, sequence_start, lse, num_queries, num_keys,
    KV_HEADS: tl.constexpr, G: tl.constexpr, PADDED_G: tl.constexpr, TOKENS: tl.constexpr,
    KEYS: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Log-sum-exps of a tile of queries."""
    DIM: tl.constexpr = Dim(H0, H1)
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    tile = query_tile(number, num_queries, KV_HEADS, G, PADDED_G, TOKENS, TOKENS * PADDED_G)
    keys: tl.constexpr = Keys(keys0, keys1, tile.b, tile.kv_head, num_keys, KV_HEADS, KEYS, DIM, TMA)
    tokens = tokens_of_tile(tile, position, sequence_start, num_queries, TOKENS)
    at = tile.first_query + tile.first_token + tile.token
    seen = seen_keys(position, at, tile.rows.inside)
    q = load_rows(query, tile.rows, DIM)
    if sequence_start is None:
        state = _sum_sequence(q, keys, tokens, 0, seen, SCALE, PRECISION)
    else:
        begin = tl.load(sequence_start + at, mask=tile.rows.inside, other=0)
        largest = tl.zeros([TOKENS * PADDED_G], tl.float32)
        total = largest
        start = next_start(tokens, -1)
        while start < LARGEST_INT:
            own = _sum_sequence(q, keys, tokens, start, seen, SCALE, PRECISION)
            largest = tl.where(begin == start, own.largest, largest)
            total = tl.where(begin == start, own.total, total)
            start = next_start(tokens, start)
        state = Sums(largest, total)
    rows = tile.rows
    tl.store(lse + rows.first + rows.offset, natural_lse(state, seen > 0), mask=rows.inside)
