"""Selected attention forward: adds up the parts of the outputs, one for each chosen block.

grid = (ceil(queries / tokens), heads): one program for `tokens` queries of a KV head, `[rows, V]`. From the
log-sum-exps of the slots it forms that of the query, then adds the parts in float32, four slots at a time and
always in the same order, each times `exp(its log-sum-exp - the query's)`. Parts of slots that the query does
not see were never written, and are not read. It only moves memory: `R G V itemsize` bytes a query and KV
head, and the output once. At 32k tokens, 32 query heads, 8 KV heads, V = 128, R = 16 and 16 bits that is 4.6
GB, 1.1 ms at 4.3 TB/s.

Error: a part is rounded to the dtype of the query. The weights add up to 1, so this adds at most half a unit
in the last place of the largest part, as much as rounding the output does.
"""

import itertools

import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Float, Int, Int32
from nsa_jax.kernels.triton.dims import padded_heads, split_dim, tokens_of
from nsa_jax.kernels.triton.launch import launch, named
from nsa_jax.kernels.triton.loading import Rows, load_rows, store_rows
from nsa_jax.kernels.triton.pieces import LN_2, Dim, added, cast, scaled, sum_of, zeros
from nsa_jax.kernels.triton.selected.summed_rows import has_part, summed_rows
from nsa_jax.kernels.triton.selected.unions import last_rows
from nsa_jax.layout import Placement

ROWS = 16  # of a program
SLOTS_AT_ONCE = 4  # whose loads are in flight together
FEW_SLOTS = 32  # whose numbers fit into the registers of one warp, or two


def add_output_parts(
    results: tuple[Array, ...],
    parts: Float[Array, "heads queries*R G V"],
    part_lse: Float[Array, "heads queries*R G"],
    chunk: Int32[Array, " 4"],
    block_indices: Int[Array, "B T K R"],
    placement: Placement,
) -> tuple[Array, ...]:
    """Writes what belongs to a chunk into the results, and returns them; that of other chunks stays.

    Args:
      results: outputs `[B, T, N, V]`, natural log-sum-exps `[B, T, N]`, and if they are asked for,
        probabilities of the slots `[B, T, K, R]`.
      parts, part_lse, chunk: see `forward_parts.output_parts`.
      block_indices, placement: see `items.invert`.
    """
    batch, num_queries, num_kv_heads, slots = block_indices.shape
    heads, (v0, v1) = parts.shape[2], split_dim(parts.shape[3])
    queries, tokens = parts.shape[1] // slots, tokens_of(ROWS, heads)
    warps = triton.cdiv(parts.shape[3], 128) if slots <= FEW_SLOTS else 4
    names = ("out", "lse", "probabilities")
    in_place = dict(itertools.zip_longest(names, results))
    updated, () = launch(
        add_output_parts_kernel, parts, part_lse, chunk, block_indices, last_rows(placement),
        placement.sequence_start, out=(), in_place=in_place,
        grid=(triton.cdiv(queries, tokens), parts.shape[0]), num_warps=warps,
        num_queries=num_queries, chunk_queries=queries, all_heads=batch * num_kv_heads,
        KV_HEADS=num_kv_heads, G=heads, PADDED_G=padded_heads(heads), TOKENS=tokens, R=slots,
        PADDED_R=triton.next_power_of_2(slots), AT_ONCE=min(triton.next_power_of_2(slots), SLOTS_AT_ONCE),
        BLOCK=placement.config.selection_block_size, V0=v0, V1=v1,
    )  # fmt: skip
    return tuple(updated[name] for name in names[: len(results)])


@triton.jit(repr=named("nsa_selected_add_output_parts"))
def add_output_parts_kernel(
    out, lse, probabilities, parts, part_lse, chunk, block_indices, last_keys, sequence_starts,
    num_queries, chunk_queries, all_heads, KV_HEADS: tl.constexpr, G: tl.constexpr, PADDED_G: tl.constexpr,
    TOKENS: tl.constexpr, R: tl.constexpr, PADDED_R: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
):  # fmt: skip
    """Outputs and log-sum-exps of TOKENS queries of a KV head, and probabilities of their slots."""
    VALUE: tl.constexpr = Dim(V0, V1)
    both = tl.load(chunk) + tl.program_id(1)
    if both >= all_heads:
        return
    mine = summed_rows(
        chunk, both, block_indices, last_keys, sequence_starts, num_queries, chunk_queries,
        KV_HEADS=KV_HEADS, G=G, PADDED_G=PADDED_G, TOKENS=TOKENS, R=R,
    )  # fmt: skip
    first = tl.program_id(1).to(tl.int64) * chunk_queries * (R * G)

    slot = tl.arange(0, PADDED_R)[None, :]
    blocks = tl.load(mine.slots[:, None] + slot, mask=mine.inside[:, None] & (slot < R), other=-1)
    seen = (blocks >= 0) & (mine.start[:, None] + blocks * BLOCK <= mine.last_key[:, None])
    offset = (mine.within[:, None] * R + slot) * G + mine.head[:, None]
    logits = tl.load(part_lse + first + offset, mask=seen, other=float("-inf"))
    some = tl.max(seen.to(tl.int32), 1) != 0
    top = tl.where(some, tl.max(logits, 1), 0.0)
    total = tl.where(some, tl.sum(tl.exp2(logits - top[:, None]), 1), 1.0)
    result = zeros(TOKENS * PADDED_G, VALUE)
    NUMBER: tl.constexpr = AT_ONCE * TOKENS * PADDED_G
    for several in tl.range(0, R, AT_ONCE):
        # One load of several slots: with a load for each, their weights wait for one another.
        one = (several + tl.arange(0, AT_ONCE))[:, None]
        at = (mine.within[None, :] * R + one) * G + mine.head[None, :]
        there = has_part(mine, one, R, BLOCK)
        logit = tl.load(part_lse + first + at, mask=there, other=float("-inf"))
        weight = tl.reshape(tl.exp2(logit - top[None, :]), [NUMBER])
        rows = Rows(first, tl.reshape(at, [NUMBER]), tl.reshape(there, [NUMBER]))
        part = cast(load_rows(parts, rows, VALUE), tl.float32)
        result = added(result, sum_of(scaled(part, weight[:, None]), AT_ONCE))

    to = mine.result
    store_rows(out, to, scaled(result, (1 / total)[:, None]), VALUE)
    natural = tl.where(some, (top + tl.log2(total)) * LN_2, float("-inf"))
    tl.store(lse + to.first + to.offset, natural, mask=to.inside)
    if probabilities is not None:
        shares = tl.exp2(logits - top[:, None]) / total[:, None]
        of_tokens = tl.sum(shares.reshape(TOKENS, PADDED_G, PADDED_R), 1)
        inside = tl.max(mine.inside.to(tl.int32).reshape(TOKENS, PADDED_G), 1) != 0
        offset = tl.arange(0, TOKENS)[:, None] * (KV_HEADS * R) + slot
        kept = inside[:, None] & (slot < R)
        tl.store(probabilities + to.first // G * R + offset, of_tokens, mask=kept)
