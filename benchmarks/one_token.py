"""Selected attention with one query token a program, as in public kernels: the baseline of ours.

grid = (T, B K): one program per query token and KV head. It reads the token's blocks one after the other
and attends with the G query heads of the KV head, padded to the 16 rows of the smallest matrix product;
nothing is shared between tokens. Forward only. Tiles are loaded as in our kernels, so only the schedule
differs.
"""

import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Float, Int
from nsa_jax.config import NSAConfig
from nsa_jax.kernels.triton.dims import padded_heads, split_dim
from nsa_jax.kernels.triton.gpu import has_tma
from nsa_jax.kernels.triton.launch import launch, like, named
from nsa_jax.kernels.triton.loading import Keys, Rows, key_tiles, load_keys, load_rows, store_rows
from nsa_jax.kernels.triton.pieces import LOG2_E, Dim, inner, precision, scaled
from nsa_jax.kernels.triton.softmax import add_keys, natural_lse, no_keys


def selected_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    block_indices: Int[Array, "B T K R"],
    *,
    config: NSAConfig,
    num_warps: int = 4,
    num_stages: int = 2,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """`(out, lse)` as `nsa_jax.attention.selected_attention`, of the last `T` of `S` tokens."""
    batch, num_queries, num_heads, key_dim = query.shape
    num_keys, num_kv_heads, value_dim = value.shape[1:]
    heads, block = num_heads // num_kv_heads, config.selection_block_size
    (h0, h1), (v0, v1), tma = split_dim(key_dim), split_dim(value_dim), has_tma()
    return launch(
        one_token_kernel, query, *key_tiles(key, block, tma), *key_tiles(value, block, tma), block_indices,
        out=(like(query, (batch, num_queries, num_heads, value_dim)),
             like(query, (batch, num_queries, num_heads), "float32")),
        grid=(num_queries, batch * num_kv_heads), num_warps=num_warps, num_stages=num_stages,
        num_keys=num_keys, first_position=num_keys - num_queries, SLOTS=block_indices.shape[-1], BLOCK=block,
        KV_HEADS=num_kv_heads, G=heads, ROWS=max(padded_heads(heads), 16), H0=h0, H1=h1, V0=v0, V1=v1,
        SCALE=key_dim**-0.5, PRECISION=precision(query.dtype), TMA=tma,
    )  # fmt: skip


@triton.jit(repr=named("one_token"))
def one_token_kernel(
    query, keys0, keys1, values0, values1, block_indices, out, lse, num_keys, first_position,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr, KV_HEADS: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr,
    H0: tl.constexpr, H1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, SCALE: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Outputs and log-sum-exps of one token."""
    KEY: tl.constexpr = Dim(H0, H1)
    VALUE: tl.constexpr = Dim(V0, V1)
    b = tl.program_id(1) // KV_HEADS
    kv_head = tl.program_id(1) % KV_HEADS
    token = tl.program_id(0)
    position = first_position + token
    keys: tl.constexpr = Keys(keys0, keys1, b, kv_head, num_keys, KV_HEADS, BLOCK, KEY, TMA)
    values: tl.constexpr = Keys(values0, values1, b, kv_head, num_keys, KV_HEADS, BLOCK, VALUE, TMA)
    head = tl.arange(0, ROWS)
    at = (b.to(tl.int64) * tl.num_programs(0) + token) * KV_HEADS + kv_head
    block_indices += at * SLOTS
    rows = Rows(at * G, head, head < G)
    q = load_rows(query, rows, KEY)
    state = no_keys(ROWS, VALUE)
    for slot in tl.range(0, SLOTS):
        start = tl.load(block_indices + slot) * BLOCK
        seen = (start >= 0) & (start + tl.arange(0, BLOCK) <= position)
        first = tl.maximum(start, 0)
        logits = inner(q, load_keys(keys, first), PRECISION) * (SCALE * LOG2_E)
        logits = tl.where(seen[None, :], logits, float("-inf"))
        top = tl.maximum(state.largest, tl.max(logits, 1))
        state = add_keys(state, tl.exp2(logits - top[:, None]), top, values, first, PRECISION)
    sees = state.total > 0
    tl.store(lse + rows.first + head, natural_lse(state, sees), mask=rows.inside)
    part = 1 / tl.where(sees, state.total, 1.0)
    store_rows(out, rows, scaled(state.out, part[:, None]), VALUE)
