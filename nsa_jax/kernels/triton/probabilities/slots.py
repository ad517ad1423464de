"""Slot probabilities: `exp(q k - lse)` of the selected branch, summed over the keys of each selected block.

grid = (ceil(T / tokens), B K): one program per `tokens` neighbouring queries times the query heads of a KV
head, as in the forward of the branch (`selected.forward`), over the same union of their blocks. It loads the
keys of a block once for all of them, sums over keys and heads in registers, and puts the sum into the slots
that hold this block: `[tokens, R]` numbers that stay in registers and are stored once. A query without the
block has no such slot, so no mask says who chose it. Only blocks that reach beyond a query of the tile need
the causal mask; they come last in the list, and the very last runs before the loops.

Registers of a thread: `rows keys / (32 num_warps)` floats of logits, 32 at 64 rows, 64 keys and 4 warps.
Shared memory: `(rows + num_stages keys) H itemsize`. Floor at 64k, 16 blocks of 64, 64 / 4 heads of 128: 1.1
TFLOP and 4.3 G exponentials, 1.4 and 1.2 ms; bytes from L2 half of the forward's. On an H200 it takes 8.6 ms
for random selections and 3.3 for coherent ones, half of the forward's time or more.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Float, Int32
from nsa_jax.kernels.triton.dims import padded_heads, split_dim, tokens_of
from nsa_jax.kernels.triton.gpu import has_tma, shape_of
from nsa_jax.kernels.triton.launch import launch, like, named
from nsa_jax.kernels.triton.loading import Keys, key_tiles, load_keys, load_rows, query_tile
from nsa_jax.kernels.triton.pieces import LOG2_E, Dim, inner, precision
from nsa_jax.kernels.triton.repaired import attend_blocks
from nsa_jax.kernels.triton.selected.unions import union_lists
from nsa_jax.kernels.triton.sizes import choose_sizes
from nsa_jax.kernels.triton.sizes.selected import SELECTED_FORWARD, SelectedForwardSizes
from nsa_jax.kernels.triton.softmax import load_lse
from nsa_jax.layout import Placement


def selected_probabilities(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    block_indices: Int32[Array, "B T K R"],
    lse: Float[Array, "B T N"] | None,
    placement: Placement,
    *,
    scale: float,
    reduce: str,
    sizes: SelectedForwardSizes | None = None,
) -> Float[Array, "B T K R"]:
    """The probability of the block in each slot, as `nsa_jax.selected_probabilities` returns it.

    Without `lse` the forward of the branch runs, with the keys as values: it gives the sums beside its
    log-sum-exps, and for "max" these alone. `sizes` are those of that forward if None.
    """
    batch, num_queries, num_heads, dim = query.shape
    num_keys, num_kv_heads = key.shape[1:3]
    block_size, slots = placement.config.selection_block_size, block_indices.shape[-1]
    if sizes is None:
        sizes = choose_sizes(SELECTED_FORWARD, shape_of(query, key, block_size=block_size))
    if lse is None:
        arrays = query, key, key, block_indices, placement
        _, lse, *found = attend_blocks(*arrays, scale=scale, with_probabilities=reduce == "sum")
        if found:
            return found[0]
    heads, (first, second), tma = num_heads // num_kv_heads, split_dim(dim), has_tma()
    tokens, keys = tokens_of(sizes.rows, heads), min(sizes.keys, block_size)
    lists = union_lists(block_indices, placement, num_keys, tokens=tokens)
    tiles, size = lists.starts.shape[2:]
    return launch(
        selected_probabilities_kernel, query, *key_tiles(key, keys, tma), lse.astype("float32"),
        block_indices, placement.sequence_start, lists.starts, lists.counts, lists.unmasked, lists.rows,
        out=like(query, block_indices.shape, "float32"),
        grid=(tiles, batch * num_kv_heads), num_warps=sizes.num_warps, num_stages=sizes.num_stages,
        registers=sizes.registers,
        num_queries=num_queries, num_keys=num_keys, ENTRIES=size, KV_HEADS=num_kv_heads, G=heads,
        PADDED_G=padded_heads(heads), TOKENS=tokens, KEYS=keys, BLOCK=block_size, SLOTS=slots,
        PADDED_SLOTS=triton.next_power_of_2(slots), H0=first, H1=second, SCALE=float(scale),
        LARGEST=reduce == "max", PRECISION=precision(query.dtype), TMA=tma,
    )  # fmt: skip


class SlotRow(NamedTuple):
    """Of each row: log-sum-exp in base 2, inf where it sees nothing, and the last key that it sees."""

    lse: tl.tensor
    last: tl.tensor


@triton.jit
def _row_sums(q, row, keys, first, SCALE: tl.constexpr, PRECISION: tl.constexpr, CAUSAL: tl.constexpr):
    """The sum of each row over the keys from `first` on."""
    p = tl.exp2(inner(q, load_keys(keys, first), PRECISION) * (SCALE * LOG2_E) - row.lse[:, None])
    if CAUSAL:
        p = tl.where((first + tl.arange(0, keys.ROWS))[None, :] <= row.last[:, None], p, 0.0)
    return tl.sum(p, 1)


@triton.jit
def _weigh_block(
    q, row, keys, slots, found, start,
    BLOCK: tl.constexpr, SCALE: tl.constexpr, LARGEST: tl.constexpr, PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """`found [TOKENS, slots]` with the probability of the block at `start` in the slots that hold it."""
    ROWS: tl.constexpr = q.first.shape[0]
    TOKENS: tl.constexpr = slots.shape[0]
    if keys.ROWS == BLOCK:
        sums = _row_sums(q, row, keys, start, SCALE, PRECISION, CAUSAL)
    else:
        sums = tl.zeros([ROWS], tl.float32)
        for first in tl.range(start, start + BLOCK, keys.ROWS):
            sums += _row_sums(q, row, keys, first, SCALE, PRECISION, CAUSAL)
    heads = sums.reshape(TOKENS, ROWS // TOKENS)
    values = tl.sum(heads, 1)
    if LARGEST:
        values = tl.max(heads, 1) + 0.0 * values  # a maximum drops NaN
    return tl.where(slots == start, values[:, None], found)


@triton.jit(repr=named("nsa_selected_probabilities"))
def selected_probabilities_kernel(
    query, keys0, keys1, lse, block_indices, sequence_start, starts, counts, unmasked, last_keys,
    probabilities, num_queries, num_keys, ENTRIES: tl.constexpr, KV_HEADS: tl.constexpr, G: tl.constexpr,
    PADDED_G: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
    SLOTS: tl.constexpr, PADDED_SLOTS: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr,
    SCALE: tl.constexpr, LARGEST: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Probabilities of the slots of a tile of queries."""
    DIM: tl.constexpr = Dim(H0, H1)
    tile = query_tile(tl.program_id(0), num_queries, KV_HEADS, G, PADDED_G, TOKENS, TOKENS * PADDED_G)
    keys: tl.constexpr = Keys(keys0, keys1, tile.b, tile.kv_head, num_keys, KV_HEADS, KEYS, DIM, TMA)
    at = tile.first_query + tile.first_token + tile.token
    row = SlotRow(load_lse(lse, tile.rows), tl.load(last_keys + at, mask=tile.rows.inside, other=-1))
    q = load_rows(query, tile.rows, DIM)

    token = tile.first_token + tl.arange(0, TOKENS)
    slot = tl.arange(0, PADDED_SLOTS)
    kept = (token < num_queries)[:, None] & (slot < SLOTS)[None, :]
    places = ((tile.first_query + token) * KV_HEADS + tile.kv_head)[:, None] * SLOTS + slot[None, :]
    block = tl.load(block_indices + places, mask=kept, other=-1)
    begin = tl.load(sequence_start + tile.first_query + token, mask=token < num_queries, other=0)
    slots = tl.where(block >= 0, begin[:, None] + block * BLOCK, -1)  # first key of each slot's block

    this = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    starts += this * ENTRIES
    last = tl.load(counts + this) - 1
    free = tl.minimum(tl.load(unmasked + this), last)
    found = tl.zeros([TOKENS, PADDED_SLOTS], tl.float32)
    start = tl.load(starts + last, mask=last >= 0, other=-2)  # -2: no slot has it
    found = _weigh_block(q, row, keys, slots, found, start, BLOCK, SCALE, LARGEST, PRECISION, CAUSAL=True)
    for i in tl.range(0, free):
        start = tl.load(starts + i)
        found = _weigh_block(
            q, row, keys, slots, found, start, BLOCK, SCALE, LARGEST, PRECISION, CAUSAL=False
        )
    for i in tl.range(free, last):
        start = tl.load(starts + i)
        found = _weigh_block(q, row, keys, slots, found, start, BLOCK, SCALE, LARGEST, PRECISION, CAUSAL=True)
    tl.store(probabilities + places, found, mask=kept)
