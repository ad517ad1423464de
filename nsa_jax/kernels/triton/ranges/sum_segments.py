"""Range attention backward: adds up what the segments of the queries left for each key.

grid = (ceil(S K / ROWS), B, 2): one program for ROWS rows, each a key with one KV head, of d_key or d_value.
It adds in float32, eight segments at a time and always in the same order, those that have written sums of the
row's tile of keys; what others have there is not read. Where there are none the gradient is 0. It only moves
memory: `4 (H + V)` bytes a key, KV head and such segment. At 8k tokens, 4 KV heads, 128/128 and 32 segments,
half of which see a key in the causal case, that is 33 MB, 8 us at 4.3 TB/s.
"""

import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Float, Int32
from nsa_jax.kernels.triton.dims import split_dim
from nsa_jax.kernels.triton.launch import launch, like, named
from nsa_jax.kernels.triton.loading import Rows, load_at, store_rows
from nsa_jax.kernels.triton.pieces import Dim, added, sum_of, zeros

ROWS = 8  # of a program
SEGMENTS_AT_ONCE = 8  # whose loads are in flight together


def add_segments(
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    part_key: Float[Array, "segments B S K H"],
    part_value: Float[Array, "segments B S K V"],
    written: Int32[Array, "segments BK tiles"],
    *,
    keys: int,
) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K V"]]:
    """`(d_key, d_value)`, in the dtypes of `key` and `value`.

    Args:
      key, value: what the gradients are of.
      part_key, part_value: float32 sums of each segment.
      written: steps of the loop of a segment, for a KV head and a tile of keys; 0 where it wrote no sums.
      keys: keys of a tile.
    """
    batch, num_keys, num_kv_heads, key_dim = key.shape
    segments = written.shape[0]
    (h0, h1), (v0, v1) = split_dim(key_dim), split_dim(value.shape[3])
    d_key, d_value = launch(
        add_segments_kernel, part_key, part_value, written, out=(like(key), like(value)),
        grid=(triton.cdiv(num_keys * num_kv_heads, ROWS), batch, 2), num_keys=num_keys,
        SEGMENTS=segments, AT_ONCE=min(triton.next_power_of_2(segments), SEGMENTS_AT_ONCE), KEYS=keys,
        KV_HEADS=num_kv_heads, ROWS=ROWS, H0=h0, H1=h1, V0=v0, V1=v1,
    )  # fmt: skip
    return d_key, d_value


@triton.jit
def _add(
    result, parts, written, row, num_keys, SEGMENTS: tl.constexpr, AT_ONCE: tl.constexpr, KEYS: tl.constexpr,
    KV_HEADS: tl.constexpr, DIM,
):  # fmt: skip
    """Adds up the segments of rows of the batch row."""
    inside = row < num_keys * KV_HEADS
    num_tiles = (num_keys + KEYS - 1) // KEYS
    tile = (tl.program_id(1) * KV_HEADS + row % KV_HEADS) * num_tiles + row // KV_HEADS // KEYS
    per_segment = tl.num_programs(1) * KV_HEADS * num_tiles
    rows_of_batch = tl.cast(num_keys * KV_HEADS, tl.int64)
    WIDTH: tl.constexpr = DIM.D0 + DIM.D1
    NUMBER: tl.constexpr = AT_ONCE * row.shape[0]
    total = zeros(row.shape[0], DIM)
    for first in tl.range(0, SEGMENTS, AT_ONCE):
        # One load of them all: of a load for each segment the assembler has just two in flight.
        segment = (first + tl.arange(0, AT_ONCE))[:, None]
        mine = inside[None, :] & (segment < SEGMENTS)
        there = tl.load(written + segment * per_segment + tile[None, :], mask=mine, other=0) != 0
        at = (segment * tl.num_programs(1) + tl.program_id(1)) * rows_of_batch + row[None, :]
        part = load_at(parts, tl.reshape(at * WIDTH, [NUMBER]), tl.reshape(there, [NUMBER]), DIM)
        total = added(total, sum_of(part, AT_ONCE))
    store_rows(result, Rows(tl.program_id(1) * rows_of_batch, row, inside), total, DIM)


@triton.jit(repr=named("nsa_add_segments"))
def add_segments_kernel(
    part_key, part_value, written, d_key, d_value, num_keys, SEGMENTS: tl.constexpr, AT_ONCE: tl.constexpr,
    KEYS: tl.constexpr, KV_HEADS: tl.constexpr, ROWS: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr,
    V0: tl.constexpr, V1: tl.constexpr,
):  # fmt: skip
    """Gradients of ROWS rows of the keys, or of the values."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(2) == 0:
        KEY: tl.constexpr = Dim(H0, H1)
        _add(d_key, part_key, written, row, num_keys, SEGMENTS, AT_ONCE, KEYS, KV_HEADS, KEY)
    else:
        VALUE: tl.constexpr = Dim(V0, V1)
        _add(d_value, part_value, written, row, num_keys, SEGMENTS, AT_ONCE, KEYS, KV_HEADS, VALUE)
