"""Range attention backward to keys and values: tiles of keys outside, the queries that see them inside.

grid = (segments ceil(S / keys), B K): one program per tile of keys and segment of the queries. It holds the
sums of its keys in registers and walks the tiles of queries, `rows` = tokens x heads each, from the first
to the last that sees one of its keys (known, or found beforehand from the ranges); where all see all, nothing
is masked. Four products a step: logits, `d_out v^T`, and the two sums.

A compressed branch has few keys and very many queries, so its queries are cut into segments: each leaves
float32 sums `[segments, B, S, K, H + V]` (at most 300 MB), which are added in order. Programs of one
segment run side by side, so that they read the same queries from L2; the last segment, seen by most keys,
starts first. With one segment (a window) the results are written at once.

Registers: `(keys (H + V) + 2 rows keys) / (32 num_warps)` floats a thread (128 + 64 at 128 keys, 64 rows, 8
warps, 128/128). Shared memory: `(keys + num_stages rows) (H + V) itemsize` (160 KB at 3 stages). On Hopper up
to 96/96 64 keys and 4 warps, beyond 128/128 steps of 32 rows (of a token's heads, where those are more),
beyond 192/192 64 keys. Floor, 64k, 64 heads, 128/128: compressed 8.8 TFLOP, 11 ms at 800 TFLOP/s; window 2.2
TFLOP, 2.75 ms, 25 % more with what the tiles hold too much.
"""

from typing import NamedTuple

import jax.numpy as jnp
import triton
import triton.language as tl
from jax_triton import TensorDescriptor

from nsa_jax.array_typing import Array, Float, Int32
from nsa_jax.kernels.triton.dims import padded_heads, split_dim, tokens_of
from nsa_jax.kernels.triton.gpu import has_tma, shared_bytes, target
from nsa_jax.kernels.triton.launch import launch, like
from nsa_jax.kernels.triton.pieces import (
    LOG2_E,
    add_product,
    inner,
    key_tiles,
    load_keys,
    load_queries,
    precision,
    query_tiles,
    store_rows,
    zeros,
)
from nsa_jax.kernels.triton.range_tiles import NOTHING_KNOWN, Edges, query_limits, range_of

_PARTIAL_BYTES = 300_000_000  # most memory of the sums of all segments
_PROGRAMS = 2048  # wanted: 16 turns of a GPU with 132 processors, about half of them empty in the causal case
_SMALLEST_GATE = 1e-18
_SEGMENT_TOKENS = 128  # fewest: below, a program takes longer to start and to store than to sum


class RangeKeySizes(NamedTuple):
    """What changes the speed only.

    Attributes:
      keys: keys of a tile.
      rows: query tokens times padded heads of a step.
      num_warps: warps of a program.
      num_stages: steps whose loads are in flight.
      segments: parts of the queries; None chooses by shape.
      keys_first: whether logits are held with keys as rows, so that no product needs them transposed.
    """

    keys: int
    rows: int
    num_warps: int
    num_stages: int
    segments: int | None = None
    keys_first: bool = True

    @classmethod
    def choose(
        cls, heads_per_kv_head: int, key_dim: int, value_dim: int, itemsize: int, capability: int = 90
    ) -> "RangeKeySizes":
        """Sizes by heads, dims, bytes of a float, and compute capability (80, 89, 90)."""
        if itemsize == 4:
            size = 32 if 64 * (key_dim + value_dim) * 4 + 2**15 <= shared_bytes(capability) else 16
            return cls(size, size, 4, 1, keys_first=capability != 90)
        dims = key_dim + value_dim
        wide = dims > 256
        if capability < 90:
            return cls(32, 32, 8, 1) if wide else cls(64, 32, 4, 1 if capability == 89 else 2)
        rows = max(32 if wide else 64, padded_heads(heads_per_kv_head))
        keys = 128 if 192 < dims <= 384 and rows <= 64 else 64
        fitting = ((shared_bytes(capability) - 2**14) // (dims * itemsize) - keys) // rows
        return cls(keys, rows, 4 if dims <= 192 and rows <= 64 else 8, max(1, min(fitting, 3)))


def choose_segments(batch: int, num_queries: int, num_keys: int, kv_heads: int, dims: int, keys: int) -> int:
    """Parts of the queries: more where tiles of keys are few, within `segments B S K (H + V) 4 <= 300 MB`.

    As many keys as queries (a window) need one.
    """
    if num_keys >= num_queries:
        return 1
    wanted = triton.cdiv(_PROGRAMS, triton.cdiv(num_keys, keys) * batch * kv_heads)
    fitting = _PARTIAL_BYTES // (batch * num_keys * kv_heads * dims * 4)
    return max(1, min(wanted, fitting, num_queries // _SEGMENT_TOKENS))


def query_bounds(
    start: Int32[Array, "B T"], end: Int32[Array, "B T"], num_keys: int, keys: int, tokens: int
) -> Int32[Array, "B tiles 4"]:
    """For each tile of keys the tiles of queries that matter to it.

    Returns:
      `(first, full_first, full_last, last)`: tiles `first .. last - 1` hold all queries that see one of the
      keys; in `full_first .. full_last - 1` every query sees every key. Compares each tile of keys with each
      tile of queries in a fused reduction: nothing of that size is stored.
    """
    batch, num_queries = start.shape
    tiles = triton.cdiv(num_queries, tokens)
    padding = ((0, 0), (0, tiles * tokens - num_queries))
    start, end = (jnp.pad(x, padding).reshape(batch, tiles, tokens) for x in (start, end))
    some = start < end
    most = jnp.iinfo(jnp.int32).max
    low = jnp.where(some, start, most).min(-1)[:, None]
    high = jnp.where(some, end, 0).max(-1)[:, None]
    last_start = jnp.where(some, start, most).max(-1)[:, None]
    first_end = jnp.where(some, end, 0).min(-1)[:, None]
    key = jnp.arange(triton.cdiv(num_keys, keys), dtype=jnp.int32)[None, :, None] * keys
    past_key = jnp.minimum(key + keys, num_keys)
    tile = jnp.arange(tiles, dtype=jnp.int32)
    seen = (low < past_key) & (high > key)
    full = (last_start <= key) & (first_end >= past_key)
    first = jnp.where(seen, tile, tiles).min(-1)
    last = jnp.where(seen, tile + 1, 0).max(-1)
    full_first = jnp.where(full, tile, tiles).min(-1)
    full_last = jnp.where((tile >= full_first[..., None]) & ~full, tile, tiles).min(-1)
    return jnp.stack([first, full_first, full_last, last], axis=-1)


def row_ranges(start, end, heads: int, tokens: int) -> Int32[Array, "B 2 rows"]:
    """Start and count of the keys that each row sees, as a step reads them: whole tiles, padded heads."""
    padding = ((0, 0), (0, -start.shape[1] % tokens))

    def by_token(x):
        return jnp.repeat(jnp.pad(x, padding), padded_heads(heads), axis=1)

    return jnp.stack([by_token(start), by_token(jnp.maximum(end - start, 0))], axis=1)


def row_scalars(lse, delta, weight, heads: int, tokens: int) -> Float[Array, "B K 2|3 rows"]:
    """Normaliser, shift and, with a weight, gate of each row, as a step reads them.

    Such that `p = exp2(logits - normaliser)`, `dv` sums `gate p` and `dk` sums `gate p (dp - shift)`: this
    form spares the kernel a number an element. Rows that see nothing, or whose gate is 0, have normaliser
    inf: exp2(x - inf) = 0. Smaller gates than 1e-18 become 1e-18.
    """
    batch, num_queries, num_heads = lse.shape
    padding = ((0, 0), (0, -num_queries % tokens), (0, 0), (0, padded_heads(heads) - heads))

    def by_head(x, fill):
        x = x.reshape(batch, num_queries, num_heads // heads, heads)
        x = jnp.pad(x, padding, constant_values=fill)
        return x.swapaxes(1, 2).reshape(batch, num_heads // heads, -1)

    seen = lse > -jnp.inf
    if weight is not None:
        seen &= (weight != 0) | (delta != 0)
    normaliser = jnp.where(seen, lse * LOG2_E.value, jnp.inf)
    shift = jnp.where(seen, delta, 0)
    if weight is None:
        scalars = [by_head(normaliser, jnp.inf), by_head(shift, 0)]
    else:
        gate = jnp.where(jnp.abs(weight) < _SMALLEST_GATE, _SMALLEST_GATE, weight)
        scalars = [by_head(normaliser, jnp.inf), by_head(shift / gate, 0), by_head(gate, 1)]
    return jnp.stack(scalars, axis=2)


def range_key_gradients(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    start: Int32[Array, "B T"],
    end: Int32[Array, "B T"],
    lse: Float[Array, "B T N"],
    delta: Float[Array, "B T N"],
    d_out: Float[Array, "B T N V"],
    weight: Float[Array, "B T N"] | None,
    scale: float,
    *,
    edges: Edges = NOTHING_KNOWN,
    sizes: RangeKeySizes | None = None,
) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K V"]]:
    """`(d_key, d_value)`: `scale (p (weight d_out v^T - delta))^T q` and `(p weight)^T d_out`.

    Arguments as in `range_query_gradient`.
    """
    batch, num_queries, num_heads, key_dim = query.shape
    num_keys, num_kv_heads, value_dim = value.shape[1:]
    heads = num_heads // num_kv_heads
    if sizes is None:
        sizes = RangeKeySizes.choose(heads, key_dim, value_dim, query.dtype.itemsize, target())
    tokens = tokens_of(sizes.rows, heads)
    segments = sizes.segments or choose_segments(
        batch, num_queries, num_keys, num_kv_heads, key_dim + value_dim, sizes.keys
    )
    scalars = row_scalars(lse, delta, weight, heads, tokens)
    bounds = ranges = None
    if edges.first_position is None:
        bounds = query_bounds(start, end, num_keys, sizes.keys, tokens)
        ranges = row_ranges(start, end, heads, tokens)
    out = [like(x) if segments == 1 else like(x, (segments, *x.shape), "float32") for x in (key, value)]
    (h0, h1), (v0, v1) = split_dim(key_dim), split_dim(value_dim)
    tma = has_tma()
    if tma:
        block = tokens * padded_heads(heads)
        ranges = None if ranges is None else TensorDescriptor.from_array(ranges, (1, 1, block))
        scalars = TensorDescriptor.from_array(scalars, (1, 1, 1, block))
    d_key, d_value = launch(
        _key_gradients_kernel, *query_tiles(query, num_kv_heads, tokens, tma),
        *query_tiles(d_out, num_kv_heads, tokens, tma), *key_tiles(key, sizes.keys, tma),
        *key_tiles(value, sizes.keys, tma), ranges, scalars, bounds,
        out=out, grid=(segments * triton.cdiv(num_keys, sizes.keys), batch * num_kv_heads),
        num_warps=sizes.num_warps, num_stages=sizes.num_stages,
        num_queries=num_queries, num_keys=num_keys,
        segment_tiles=triton.cdiv(triton.cdiv(num_queries, tokens), segments), SEGMENTS=segments,
        KV_HEADS=num_kv_heads, HEADS=heads, TOKENS=tokens, PADDED_HEADS=padded_heads(heads), KEYS=sizes.keys,
        H0=h0, H1=h1, V0=v0, V1=v1, SCALE=float(scale), KEYS_FIRST=sizes.keys_first,
        WEIGHTED=weight is not None, **edges.constants(), PRECISION=precision(query.dtype), TMA=tma,
    )  # fmt: skip
    if segments == 1:
        return d_key, d_value
    return d_key.sum(0).astype(key.dtype), d_value.sum(0).astype(value.dtype)


@triton.jit
def _load_range(ranges, b, which, i, rows, ROWS: tl.constexpr, TMA: tl.constexpr):
    """Start (0) or count (1) of the keys that the rows of tile `i` see."""
    if TMA:
        found = ranges.load([b, which, i * ROWS]).reshape(ROWS)
    else:
        found = tl.load(ranges + which * rows + i * ROWS + tl.arange(0, ROWS))
    return found


@triton.jit
def _load_scalar(scalars, b, kv_head, which, i, rows, ROWS: tl.constexpr, TMA: tl.constexpr):
    """Normaliser (0), shift (1) or gate (2) of the rows of tile `i`."""
    if TMA:
        found = scalars.load([b, kv_head, which, i * ROWS]).reshape(ROWS)
    else:
        found = tl.load(scalars + which * rows + i * ROWS + tl.arange(0, ROWS))
    return found


@triton.jit
def _sum_tiles(
    k0, k1, v0, v1, dk0, dk1, dv0, dv1, queries0, queries1, gradients0, gradients1, ranges, scalars,
    b, kv_head, num_queries, rows, low, gap, skipped, high, first_key,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, PADDED_HEADS: tl.constexpr,
    KEYS: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    SCALE: tl.constexpr, KEYS_FIRST: tl.constexpr, FIRST: tl.constexpr, WINDOW: tl.constexpr,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
    WEIGHTED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Adds the tiles of queries `low .. high - 1`, less the `skipped` ones that begin at `gap`."""
    ROWS: tl.constexpr = TOKENS * PADDED_HEADS
    ROW_AXIS: tl.constexpr = 0 if KEYS_FIRST else 1
    for step in tl.range(low, high - skipped):
        i = tl.where(step < gap, step, step + skipped)
        q0, q1 = load_queries(
            queries0, queries1, b, i * TOKENS, kv_head, num_queries,
            KV_HEADS, HEADS, TOKENS, PADDED_HEADS, H0, H1, TMA,
        )  # fmt: skip
        do0, do1 = load_queries(
            gradients0, gradients1, b, i * TOKENS, kv_head, num_queries,
            KV_HEADS, HEADS, TOKENS, PADDED_HEADS, V0, V1, TMA,
        )  # fmt: skip
        if KEYS_FIRST:
            logits = inner(k0, k1, q0, q1, H1, PRECISION)
            dp = inner(v0, v1, do0, do1, V1, PRECISION)
        else:
            logits = inner(q0, q1, k0, k1, H1, PRECISION)
            dp = inner(do0, do1, v0, v1, V1, PRECISION)
        # Numbers of a row are read where they are needed: together they would not fit into registers.
        normaliser = _load_scalar(scalars, b, kv_head, 0, i, rows, ROWS, TMA)
        p = tl.exp2(logits * (SCALE * LOG2_E) - tl.expand_dims(normaliser, ROW_AXIS))
        if MASKED:
            if FIRST is None:
                start = _load_range(ranges, b, 0, i, rows, ROWS, TMA)
                count = _load_range(ranges, b, 1, i, rows, ROWS, TMA)
            else:
                token = i * TOKENS + tl.arange(0, ROWS) // PADDED_HEADS
                start, end = range_of(token, True, None, None, FIRST, WINDOW, SIZE, STRIDE)
                count = end - start
            ahead = tl.expand_dims(first_key - start, ROW_AXIS)
            ahead += tl.expand_dims(tl.arange(0, KEYS), 1 - ROW_AXIS)
            count = tl.expand_dims(count.to(tl.uint32, bitcast=True), ROW_AXIS)
            p = tl.where(ahead.to(tl.uint32, bitcast=True) < count, p, 0.0)
        if WEIGHTED:
            p = p * tl.expand_dims(_load_scalar(scalars, b, kv_head, 2, i, rows, ROWS, TMA), ROW_AXIS)
        gated = p.to(do0.dtype)
        if not KEYS_FIRST:
            gated = tl.trans(gated)
        shift = tl.expand_dims(_load_scalar(scalars, b, kv_head, 1, i, rows, ROWS, TMA), ROW_AXIS)
        # This product runs while d_logits are computed; a load between would serialise the two.
        dv0, dv1 = add_product(gated, do0, do1, dv0, dv1, V1, PRECISION)
        ds = (p * (dp - shift)).to(q0.dtype)
        if not KEYS_FIRST:
            ds = tl.trans(ds)
        dk0, dk1 = add_product(ds, q0, q1, dk0, dk1, H1, PRECISION)
    return dk0, dk1, dv0, dv1


@triton.jit
def _key_gradients_kernel(
    queries0, queries1, gradients0, gradients1, keys0, keys1, values0, values1, ranges, scalars, bounds,
    d_key, d_value, num_queries, num_keys, segment_tiles, SEGMENTS: tl.constexpr, KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, PADDED_HEADS: tl.constexpr, KEYS: tl.constexpr,
    H0: tl.constexpr, H1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, SCALE: tl.constexpr,
    KEYS_FIRST: tl.constexpr, WEIGHTED: tl.constexpr, FIRST: tl.constexpr, WINDOW: tl.constexpr,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = TOKENS * PADDED_HEADS
    key_tiles = tl.num_programs(0) // SEGMENTS
    tile = tl.program_id(0) % key_tiles
    segment = SEGMENTS - 1 - tl.program_id(0) // key_tiles
    b = tl.program_id(1) // KV_HEADS
    kv_head = tl.program_id(1) % KV_HEADS
    first_key = tile * KEYS

    if FIRST is None:
        bounds += (b.to(tl.int64) * key_tiles + tile) * 4
        low, high = tl.load(bounds), tl.load(bounds + 3)
        full_low, full_high = tl.load(bounds + 1), tl.load(bounds + 2)
    else:
        past_key = tl.minimum(first_key + KEYS, num_keys)
        low, full_low, full_high, high = query_limits(
            first_key, past_key, num_queries, FIRST, WINDOW, SIZE, STRIDE, TOKENS
        )
    low = tl.maximum(low, segment * segment_tiles)
    high = tl.maximum(tl.minimum(high, (segment + 1) * segment_tiles), low)
    full_low = tl.minimum(tl.maximum(full_low, low), high)
    full_high = tl.minimum(tl.maximum(full_high, full_low), high)

    k0, k1 = load_keys(keys0, keys1, b, first_key, kv_head, num_keys, KV_HEADS, KEYS, H0, H1, TMA)
    v0, v1 = load_keys(values0, values1, b, first_key, kv_head, num_keys, KV_HEADS, KEYS, V0, V1, TMA)
    rows = (num_queries + TOKENS - 1) // TOKENS * ROWS
    if not TMA:
        if FIRST is None:
            ranges += b.to(tl.int64) * 2 * rows
        scalars += tl.program_id(1).to(tl.int64) * (3 if WEIGHTED else 2) * rows

    dk0, dk1 = zeros(KEYS, H0, H1)
    dv0, dv1 = zeros(KEYS, V0, V1)
    dk0, dk1, dv0, dv1 = _sum_tiles(
        k0, k1, v0, v1, dk0, dk1, dv0, dv1, queries0, queries1, gradients0, gradients1, ranges, scalars,
        b, kv_head, num_queries, rows, low, full_low, full_high - full_low, high, first_key,
        KV_HEADS, HEADS, TOKENS, PADDED_HEADS, KEYS, H0, H1, V0, V1, SCALE, KEYS_FIRST,
        FIRST, WINDOW, SIZE, STRIDE, PRECISION, True, WEIGHTED, TMA,
    )  # fmt: skip
    dk0, dk1, dv0, dv1 = _sum_tiles(
        k0, k1, v0, v1, dk0, dk1, dv0, dv1, queries0, queries1, gradients0, gradients1, ranges, scalars,
        b, kv_head, num_queries, rows, full_low, full_high, 0, full_high, first_key,
        KV_HEADS, HEADS, TOKENS, PADDED_HEADS, KEYS, H0, H1, V0, V1, SCALE, KEYS_FIRST,
        FIRST, WINDOW, SIZE, STRIDE, PRECISION, False, WEIGHTED, TMA,
    )  # fmt: skip

    dk0 *= SCALE
    if H1 > 0:
        dk1 *= SCALE
    c = tl.arange(0, KEYS)
    inside = first_key + c < num_keys
    first_row = (
        (segment * (tl.num_programs(1) // KV_HEADS) + b).to(tl.int64) * num_keys + first_key
    ) * KV_HEADS
    first_row += kv_head
    store_rows(d_key + first_row * (H0 + H1), c * (KV_HEADS * (H0 + H1)), dk0, dk1, inside, H0, H1)
    store_rows(d_value + first_row * (V0 + V1), c * (KV_HEADS * (V0 + V1)), dv0, dv1, inside, V0, V1)
