"""Selected attention of few queries, as in a decode step: the slots of a query are shared out among programs.

Source: Eq. 12. grid of `selected_parts_kernel` = (T SHARES, B K): one program for a share of the slots of one
query token and KV head. Grid of `selected_merge_kernel` = (T G, B K): it adds up the shares.

Why: the tiles of `forward` take 4 tokens, and a step has one. Then 8 rows with 4 KV heads are 32 programs for
132 multiprocessors, and each reads a megabyte. The loop runs over the blocks of a share in pieces of KEYS
keys, with all query heads of the KV head, and the loads of `num_stages - 1` pieces are in flight. A program
has one token, so all of its rows see the same keys, and what they do not see is never loaded.

Registers: `ROWS (KEYS + V) / (32 num_warps)` floats a thread, 24 at 16 rows, 64 keys, V = 128. Shared memory:
`((num_stages - 1) KEYS (H + V) + ROWS (H + KEYS)) itemsize`, 70 KB at 3 stages in bfloat16. Bytes: the keys
and values of the selected blocks, 34 MB at 8 rows, 4 KV heads, 16 blocks of 128 and 128/128: 12 us at 2.9
TB/s. Parts: `V + 2` floats a query head and share.
"""

from typing import Any

import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Float, Int32
from nsa_jax.kernels.triton.decode.parts import attend, load_parts, load_query, rows_of_token, store_part
from nsa_jax.kernels.triton.dims import split_dim
from nsa_jax.kernels.triton.launch import launch, like, named
from nsa_jax.kernels.triton.loading import load_at
from nsa_jax.kernels.triton.pieces import LN_2, LOG2_E, Dim, precision
from nsa_jax.kernels.triton.sizes import FewQueriesSizes
from nsa_jax.kernels.triton.softmax import no_keys
from nsa_jax.layout import Placement


def attend_few(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    block_indices: Int32[Array, "B T K R"],
    placement: Placement,
    scale: float,
    sizes: FewQueriesSizes,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Attention of each query over its blocks, as `forward.attend_selected`."""
    batch, num_queries, num_heads, key_dim = query.shape
    num_keys, kv_heads, value_dim = value.shape[1:]
    heads, slots = num_heads // kv_heads, block_indices.shape[3]
    (h0, h1), (v0, v1) = split_dim(key_dim), split_dim(value_dim)
    block = placement.config.selection_block_size
    shares = sizes.shares(batch * kv_heads * num_queries, slots)
    rows = num_queries * heads
    common: dict[str, Any] = dict(T=num_queries, G=heads, KV_HEADS=kv_heads, V0=v0, V1=v1, SHARES=shares)
    parts = launch(
        selected_parts_kernel, query, key, value, block_indices.astype("int32"), placement.selection_start(),
        placement.selection_end(num_keys),
        out=(like(query, (batch, kv_heads, shares, rows, value_dim), "float32"),
             like(query, (batch, kv_heads, shares, 2, rows), "float32")),
        grid=(num_queries * shares, batch * kv_heads), num_warps=sizes.num_warps, num_stages=sizes.num_stages,
        scale=float(scale * LOG2_E.value), num_keys=num_keys, BLOCK=block,
        KEYS=min(triton.next_power_of_2(block), sizes.keys), SLOTS=slots, EACH=triton.cdiv(slots, shares),
        ROWS=max(triton.next_power_of_2(heads), 16), STAGES=sizes.num_stages, H0=h0, H1=h1,
        PRECISION=precision(query.dtype), **common,
    )  # fmt: skip
    return launch(
        selected_merge_kernel, *parts,
        out=(like(query, (batch, num_queries, num_heads, value_dim)),
             like(query, (batch, num_queries, num_heads), "float32")),
        grid=(rows, batch * kv_heads), num_warps=1, num_stages=1, PADDED=triton.next_power_of_2(shares),
        **common,
    )  # fmt: skip


@triton.jit(repr=named("nsa_selected_parts"))
def selected_parts_kernel(
    query, key, value, blocks, starts, ends, out, sums,
    scale, num_keys, T: tl.constexpr, G: tl.constexpr, KV_HEADS: tl.constexpr, V0: tl.constexpr,
    V1: tl.constexpr, SHARES: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, SLOTS: tl.constexpr,
    EACH: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One share of the slots of a token and KV head."""
    KEY: tl.constexpr = Dim(H0, H1)
    VALUE: tl.constexpr = Dim(V0, V1)
    PIECES: tl.constexpr = (BLOCK + KEYS - 1) // KEYS
    share = tl.program_id(0) % SHARES
    token = tl.program_id(0) // SHARES
    bk = tl.program_id(1)
    b = bk // KV_HEADS
    kv_head = bk % KV_HEADS
    start = tl.load(starts + b * T + token)
    end = tl.load(ends + b * T + token)
    rows = rows_of_token(token, ROWS, G, KV_HEADS)
    q = load_query(query, b, kv_head, rows, T, G, KV_HEADS, KEY)
    first_row = b.to(tl.int64) * num_keys * KV_HEADS + kv_head
    keys = key + first_row * (H0 + H1)
    values = value + first_row * (V0 + V1)
    chosen = blocks + ((b.to(tl.int64) * T + token) * KV_HEADS + kv_head) * SLOTS
    i = tl.arange(0, KEYS)
    state = no_keys(ROWS, VALUE)
    for step in tl.range(0, EACH * PIECES, num_stages=STAGES):
        slot = share * EACH + step // PIECES
        block = tl.load(chosen + slot, mask=slot < SLOTS, other=-1)
        inside = step % PIECES * KEYS + i
        at = start + block * BLOCK + inside
        seen = (block >= 0) & (inside < BLOCK) & (at >= 0) & (at < end)
        offset = tl.where(seen, at, 0).to(tl.int64) * KV_HEADS
        k = load_at(keys, offset * (H0 + H1), seen, KEY)
        v = load_at(values, offset * (V0 + V1), seen, VALUE)
        state, _ = attend(state, q, k, v, seen, scale, PRECISION)
    store_part(out, sums, bk, share, SHARES, T * G, rows, state, VALUE)


@triton.jit(repr=named("nsa_selected_merge"))
def selected_merge_kernel(
    parts, sums, out, lse,
    T: tl.constexpr, G: tl.constexpr, KV_HEADS: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    SHARES: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """The output and the log-sum-exp of one query head, from the shares of its token."""
    VALUE: tl.constexpr = Dim(V0, V1)
    row = tl.program_id(0)
    bk = tl.program_id(1)
    one = tl.zeros([1], tl.int32) + row
    own = load_parts(parts, sums, bk, one, one >= 0, SHARES, PADDED, T * G, VALUE)
    largest = tl.reshape(own.largest, [PADDED])
    top = tl.max(largest, 0)
    weight = tl.exp2(largest - top)
    total = tl.sum(tl.reshape(own.total, [PADDED]) * weight, 0)
    sees = total != 0.0  # also true where the total is NaN
    weight *= 1.0 / tl.where(sees, total, 1.0)
    place = (bk // KV_HEADS * T + row // G).to(tl.int64) * (KV_HEADS * G) + bk % KV_HEADS * G + row % G
    tl.store(lse + place, tl.where(sees, (top + tl.log2(total)) * LN_2, float("-inf")))
    dtype: tl.constexpr = out.dtype.element_ty
    to = out + place * (V0 + V1)
    tl.store(to + tl.arange(0, V0), tl.sum(own.out.first * weight[:, None], 0).to(dtype))
    if V1 > 0:
        tl.store(to + V0 + tl.arange(0, V1), tl.sum(own.out.second * weight[:, None], 0).to(dtype))
