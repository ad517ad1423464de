"""Selected attention backward, gradients of keys and values: key blocks outside, their queries inside.

grid = (items, block / keys): one program per item of up to `item` queries that chose one block
(`block_items`). It holds the block's keys and values and the two sums; each step gathers the rows of a few
tokens, tokens times query heads of the KV head = `rows`, whose `N H` floats lie together. Items are ordered
by KV head and block, and tokens ascend in an item, so that programs that run together read the same queries
from L2. Queries that do not see the whole block, mostly the block's own, stand first in
a run and are masked in a loop of their own.

No atomics: a block of several items leaves float32 partial sums. A second kernel, grid = (blocks, B K,
block / 16), adds them in the order of the items and copies the blocks that were one item (270 MB at 64k,
0.1 ms; Triton calls cannot write into an operand without a deprecated option). Gradients are the same bit
for bit at every run.

Registers: `keys (H + V + 2 rows) / 128` floats a thread at 4 warps (192 at 64 / 64, 128/128). Shared memory:
`(stages rows (H + V) + keys (H + V) + 2 rows keys) itemsize` (112 KB in bfloat16, two programs a processor).
On Hopper steps have 128 rows up to 64/64 and 32 beyond 128/128, of 8 warps beyond 192/192. Partial sums: `4
block (H + V)` bytes a slot, at most `2 P / item` slots of `P = B K T R` pairs (at 64k and 2048: 0.27 GB).
Floor at 64k, 16 blocks of 64, 64 heads, 128/128: 4.4 TFLOP, 5.5 ms at 800 TFLOP/s; bytes from L2: `2 G (H +
V)` a pair, 34 GB.
"""

from typing import NamedTuple

import jax.numpy as jnp
import triton
import triton.language as tl

from nsa_jax import layout
from nsa_jax.array_typing import Array, Float, Int
from nsa_jax.config import NSAConfig
from nsa_jax.kernels.triton.block_backward_query import load_lse
from nsa_jax.kernels.triton.block_items import ITEM_FIELDS, BlockItems, invert
from nsa_jax.kernels.triton.block_lists import last_rows
from nsa_jax.kernels.triton.dims import padded_heads, split_dim
from nsa_jax.kernels.triton.gpu import shared_bytes, target
from nsa_jax.kernels.triton.launch import launch, like
from nsa_jax.kernels.triton.pieces import (
    LOG2_E,
    add_product,
    inner,
    load_rows,
    precision,
    store_rows,
    zeros,
)


class KeySizes(NamedTuple):
    """What changes the speed and the order of summation only.

    Attributes:
      rows: tokens times padded query heads of a step, at least 16.
      keys: keys of a program; divides the block size.
      item: queries of a program at most.
      num_warps: warps of a program.
      num_stages: steps whose loads are in flight. From 3 on tokens are loaded a step early, so that rows are
        loaded two steps early; at 2 Triton issues them at the end of the step before.
    """

    rows: int
    keys: int
    item: int
    num_warps: int
    num_stages: int

    @classmethod
    def choose(
        cls, heads_per_kv_head: int, key_dim: int, value_dim: int, itemsize: int, block_size: int,
        capability: int = 90,
    ) -> "KeySizes":  # fmt: skip
        """Sizes by heads, dims, bytes of a float, block size and compute capability (80, 89, 90)."""
        heads, wide, room = padded_heads(heads_per_kv_head), key_dim + value_dim, shared_bytes(capability)
        item = max(2048, 8192 // heads)
        if itemsize == 4:
            rows, keys, num_stages = max(32, heads), min(block_size, 32), 1
            while (rows + keys) * wide * 6 > room and max(rows, keys) > max(16, heads):
                rows, keys = (rows, keys // 2) if keys > 16 else (max(rows // 2, heads), keys)
            return cls(rows, keys, item, 4, num_stages)
        # Wider sums leave room for fewer rows. At 64/64 the 128 spill a little and still win (7.5 -> 6.5 ms).
        rows = max(128 if wide <= 128 and capability >= 90 else 64 if wide <= 256 else 32, heads)
        keys = min(block_size, 64 if wide <= 256 or capability >= 90 else 32)

        def used(stages):
            held = keys * wide if capability >= 90 else 0  # in registers where there is no wgmma
            return (stages * rows * wide + held + 2 * rows * keys) * itemsize

        num_warps = 4 if wide <= 256 or (capability >= 90 and wide <= 384 and rows == 32) else 8
        return cls(rows, keys, item, num_warps, 2 if used(2) <= room else 1)


def block_key_gradients(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    block_indices: Int[Array, "B T K R"],
    placed: layout.QueryLayout,
    config: NSAConfig,
    lse: Float[Array, "B T N"],
    delta: Float[Array, "B T N"],
    d_out: Float[Array, "B T N V"],
    weight: Float[Array, "B T N"] | None,
    scale: float,
    *,
    packed: bool = True,
    sizes: KeySizes | None = None,
) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K V"]]:
    """Gradients of the keys and values.

    Args:
      query, key, value, config, lse, delta, d_out, weight, scale: see `block_query_gradient`.
      block_indices: sequence-local blocks of each query, each at most once; -1 in unused slots.
      placed: where each query stands.
      packed: whether a row may hold several sequences; False is faster.
      sizes: tile sizes, chosen when None.
    """
    num_queries, num_heads, key_dim = query.shape[1:]
    num_keys, num_kv_heads, value_dim = value.shape[1:]
    heads, block_size = num_heads // num_kv_heads, config.selection_block_size
    if sizes is None:
        sizes = KeySizes.choose(heads, key_dim, value_dim, query.dtype.itemsize, block_size, target())
    assert block_size % sizes.keys == 0
    items = invert(block_indices, placed, config, num_keys, item=sizes.item, packed=packed)
    (h0, h1), (v0, v1) = split_dim(key_dim), split_dim(value_dim)
    slots = max(items.num_slots, 1)
    dims = dict(BLOCK=block_size, KV_HEADS=num_kv_heads, H0=h0, H1=h1, V0=v0, V1=v1)
    part_key, part_value, d_key, d_value = launch(
        _key_gradients_kernel,
        query, key, value, items.tokens, items.items, last_rows(placed), lse, delta, d_out, weight,
        out=(like(query, (slots, block_size, key_dim), "float32"),
             like(query, (slots, block_size, value_dim), "float32"), like(key), like(value)),
        grid=(items.items.shape[0], block_size // sizes.keys), num_warps=sizes.num_warps,
        num_stages=sizes.num_stages,
        num_queries=num_queries, num_keys=num_keys, FIELDS=ITEM_FIELDS, HEADS=heads,
        TOKENS=max(sizes.rows // padded_heads(heads), 1), PADDED_HEADS=padded_heads(heads), KEYS=sizes.keys,
        SCALE=float(scale), PRECISION=precision(query.dtype),
        WIDE=num_queries * num_heads * max(key_dim, value_dim) >= 2**31, **dims,
    )  # fmt: skip
    if items.num_slots:
        d_key, d_value = _add_partials(items, part_key, part_value, d_key, d_value, dims)
    if items.written is not None:
        d_key = jnp.where(items.written[..., None], d_key, 0)
        d_value = jnp.where(items.written[..., None], d_value, 0)
    return d_key, d_value


def _add_partials(items: BlockItems, part_key, part_value, d_key, d_value, dims):
    """Copies the gradients of the blocks that are one item and adds up the others."""
    heads, num_blocks = items.partials.shape
    operands = (
        part_key, part_value, items.slots, items.partials, items.starts, items.limits, d_key, d_value
    )  # fmt: skip
    return launch(
        _add_partials_kernel, *operands,
        out=(like(d_key), like(d_value)), grid=(num_blocks, heads, dims["BLOCK"] // 16),
        num_keys=d_key.shape[1], **dims,
    )  # fmt: skip


@triton.jit
def _add_steps(
    query, d_out, tokens, rows, lse, delta, weight, k0, k1, v0, v1, dk0, dk1, dv0, dv1,
    first, last, end, key_row, ROW_HEADS: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr,
    PADDED_HEADS: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    SCALE: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, TOKENS * PADDED_HEADS)
    head = r % PADDED_HEADS
    for i in tl.range(first, last, TOKENS):
        at = i + r // PADDED_HEADS
        token = tl.load(tokens + at, mask=at < end, other=0)
        inside = (at < end) & (head < HEADS)
        if WIDE:
            token = token.to(tl.int64)
        offset = token * ROW_HEADS + head
        q0, q1 = load_rows(query, offset * (H0 + H1), inside, H0, H1)
        do0, do1 = load_rows(d_out, offset * (V0 + V1), inside, V0, V1)
        logits = inner(q0, q1, k0, k1, H1, PRECISION)
        dp = inner(do0, do1, v0, v1, V1, PRECISION)
        log_sum = load_lse(lse, offset, inside)
        p = tl.exp2(logits * (SCALE * LOG2_E) - log_sum[:, None])
        if CAUSAL:
            row = tl.load(rows + token, mask=inside, other=-1)
            p = tl.where(key_row[None, :] <= row[:, None], p, 0.0)
        shift = tl.load(delta + offset, mask=inside, other=0.0)[:, None]
        if weight is not None:
            gate = tl.load(weight + offset, mask=inside, other=0.0)[:, None]
            weighted = (p * gate).to(do0.dtype)
            dp = dp * gate
        else:
            weighted = p.to(do0.dtype)
        dv0, dv1 = add_product(tl.trans(weighted), do0, do1, dv0, dv1, V1, PRECISION)
        ds = (p * (dp - shift)).to(q0.dtype)
        dk0, dk1 = add_product(tl.trans(ds), q0, q1, dk0, dk1, H1, PRECISION)
    return dk0, dk1, dv0, dv1


@triton.jit
def _key_gradients_kernel(
    query, key, value, tokens, items, rows, lse, delta, d_out, weight, part_key, part_value, d_key, d_value,
    num_queries, num_keys, FIELDS: tl.constexpr, BLOCK: tl.constexpr, KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, PADDED_HEADS: tl.constexpr, KEYS: tl.constexpr,
    H0: tl.constexpr, H1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, SCALE: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    items += tl.program_id(0) * FIELDS
    both = tl.load(items)
    if both < 0:
        return
    within = tl.program_id(1) * KEYS
    start = tl.load(items + 1) + within
    limit = tl.load(items + 2)
    first = tl.load(items + 3)
    masked = tl.load(items + 4)
    end = tl.load(items + 5)
    slot = tl.load(items + 6)
    b = (both // KV_HEADS).to(tl.int64)
    kv_head = both % KV_HEADS
    ROW_HEADS: tl.constexpr = KV_HEADS * HEADS
    n = tl.arange(0, KEYS)
    exists = start + n < num_keys
    key_offset = (b * num_keys + start + n) * KV_HEADS + kv_head
    k0, k1 = load_rows(key, key_offset * (H0 + H1), exists, H0, H1)
    v0, v1 = load_rows(value, key_offset * (V0 + V1), exists, V0, V1)
    first_row = b * num_queries * ROW_HEADS + kv_head * HEADS
    query += first_row * (H0 + H1)
    d_out += first_row * (V0 + V1)
    rows += b * num_queries
    lse += first_row
    delta += first_row
    if weight is not None:
        weight += first_row
    dk0, dk1 = zeros(KEYS, H0, H1)
    dv0, dv1 = zeros(KEYS, V0, V1)
    middle = first + tl.cdiv(masked - first, TOKENS) * TOKENS
    dk0, dk1, dv0, dv1 = _add_steps(
        query, d_out, tokens, rows, lse, delta, weight, k0, k1, v0, v1, dk0, dk1, dv0, dv1,
        first, middle, end, start + n, ROW_HEADS, HEADS, TOKENS, PADDED_HEADS, H0, H1, V0, V1,
        SCALE, PRECISION, WIDE, True,
    )  # fmt: skip
    dk0, dk1, dv0, dv1 = _add_steps(
        query, d_out, tokens, rows, lse, delta, weight, k0, k1, v0, v1, dk0, dk1, dv0, dv1,
        middle, end, end, start + n, ROW_HEADS, HEADS, TOKENS, PADDED_HEADS, H0, H1, V0, V1,
        SCALE, PRECISION, WIDE, False,
    )  # fmt: skip
    dk0 *= SCALE
    if H1 > 0:
        dk1 *= SCALE
    if slot < 0:
        mine = start + n < limit
        store_rows(d_key, key_offset * (H0 + H1), dk0, dk1, mine, H0, H1)
        store_rows(d_value, key_offset * (V0 + V1), dv0, dv1, mine, V0, V1)
    else:
        to = slot.to(tl.int64) * BLOCK + within + n
        store_rows(part_key, to * (H0 + H1), dk0, dk1, n >= 0, H0, H1)
        store_rows(part_value, to * (V0 + V1), dv0, dv1, n >= 0, V0, V1)


@triton.jit
def _add_slots(part, slot, count, within, BLOCK: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):
    n = tl.arange(0, 16)
    x0, x1 = zeros(16, D0, D1)
    for i in range(count):
        y0, y1 = load_rows(part, ((slot + i) * BLOCK + within + n) * (D0 + D1), n >= 0, D0, D1)
        x0 += y0
        if D1 > 0:
            x1 += y1
    return x0, x1


@triton.jit
def _add_partials_kernel(
    part_key, part_value, slots, partials, starts, limits, old_key, old_value, d_key, d_value,
    num_keys, BLOCK: tl.constexpr, KV_HEADS: tl.constexpr,
    H0: tl.constexpr, H1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    num_blocks = tl.num_programs(0)
    b = tl.program_id(1) // KV_HEADS
    kv_head = tl.program_id(1) % KV_HEADS
    count = tl.load(partials + tl.program_id(1) * num_blocks + block)
    n = tl.arange(0, 16)
    within = tl.program_id(2) * 16
    key = tl.load(starts + b * num_blocks + block) + within + n
    mine = key < tl.load(limits + b * num_blocks + block)
    to = (b.to(tl.int64) * num_keys + key) * KV_HEADS + kv_head
    if count == 0:
        k0, k1 = load_rows(old_key, to * (H0 + H1), mine, H0, H1)
        store_rows(d_key, to * (H0 + H1), k0, k1, mine, H0, H1)
        v0, v1 = load_rows(old_value, to * (V0 + V1), mine, V0, V1)
        store_rows(d_value, to * (V0 + V1), v0, v1, mine, V0, V1)
    else:
        slot = tl.load(slots + tl.program_id(1) * num_blocks + block).to(tl.int64)
        x0, x1 = _add_slots(part_key, slot, count, within, BLOCK, H0, H1)
        store_rows(d_key, to * (H0 + H1), x0, x1, mine, H0, H1)
        y0, y1 = _add_slots(part_value, slot, count, within, BLOCK, V0, V1)
        store_rows(d_value, to * (V0 + V1), y0, y1, mine, V0, V1)
