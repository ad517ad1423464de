"""Range attention backward to keys and values (Eq. 4): a tile of keys loops over the queries that see it.

grid = (segments ceil(S / keys), B K): one program per tile of keys and segment of the queries. It keeps d_key
and d_value of its keys in registers and loops over tiles of queries, from the first that sees one of its keys
to the last. These two are computed, or found from the ranges before the launch. Where every query sees every
key, nothing is masked. A step has `rows` rows: a tile of tokens with all heads, or, where too many of these
would be padding, of one head (`APART`). It takes four products: logits, `d_out v^T`, d_value, d_key.

A compressed branch has few keys and very many queries, so its queries are cut into segments. Each leaves
float32 sums `[segments, B, S, K, H + V]` (at most 300 MB) of the tiles that its queries may see, and
`sum_segments` adds them. Programs of one segment run side by side, so they read the same queries from L2. The
last segment has the queries that see the most keys, so it starts first. With one segment (a window) the
program writes the results themselves.

Registers of a thread: `(keys (H + V) + 2 rows keys) / (32 num_warps)` floats (128 + 64 at 128 keys, 64 rows,
8 warps, 128/128). Shared memory: `(keys + num_stages rows) (H + V) itemsize` (160 KB at 3 stages). Floor at
64k, 64 heads, 128/128: compressed 8.8 TFLOP, 11 ms at 800 TFLOP/s; window 2.2 TFLOP, 2.75 ms, plus 25 % for
masked positions inside tiles.
"""

from typing import NamedTuple

import jax.numpy as jnp
import triton
import triton.language as tl
from jax_triton import TensorDescriptor

from nsa_jax.array_typing import Array, Float, Int32
from nsa_jax.kernels.triton.backward import Backward
from nsa_jax.kernels.triton.dims import padded_heads, split_dim, tokens_of
from nsa_jax.kernels.triton.gpu import has_tma, shape_of
from nsa_jax.kernels.triton.launch import launch, like, named
from nsa_jax.kernels.triton.loading import (
    Keys,
    Queries,
    Rows,
    key_tiles,
    load_keys,
    load_queries,
    query_tiles,
    store_rows,
)
from nsa_jax.kernels.triton.pieces import (
    LOG2_E,
    Dim,
    KeyGradients,
    Pieces,
    add_product,
    inner,
    precision,
    scaled,
    zeros,
)
from nsa_jax.kernels.triton.ranges.edges import (
    KeyRanges,
    Limits,
    Ranges,
    query_limits,
    range_of,
    run_at,
)
from nsa_jax.kernels.triton.ranges.row_scalars import row_scalars
from nsa_jax.kernels.triton.ranges.sum_segments import add_segments
from nsa_jax.kernels.triton.sizes import choose_sizes
from nsa_jax.kernels.triton.sizes.ranges import (
    RANGE_KEY_GRADIENTS,
    RANGE_PROGRAMS,
    SEGMENT_BYTES,
    RangeKeySizes,
    segment_tokens,
)


def choose_segments(
    batch: int, num_queries: int, num_keys: int, kv_heads: int, heads: int, dims: int, keys: int
) -> int:
    """Segments of the queries: one for a window (as many keys as queries), else enough to fill the GPU.

    Limited by the memory of the sums, `segments B S K (H + V) 4` bytes.
    """
    if num_keys >= num_queries:
        return 1
    wanted = triton.cdiv(RANGE_PROGRAMS, triton.cdiv(num_keys, keys) * batch * kv_heads)
    fitting = SEGMENT_BYTES // (batch * num_keys * kv_heads * dims * 4)
    return max(1, min(wanted, fitting, num_queries // segment_tokens(heads)))


def query_bounds(
    start: Int32[Array, "B T"], end: Int32[Array, "B T"], num_keys: int, keys: int, tokens: int
) -> Int32[Array, "B tiles 4"]:
    """For each tile of keys, the tiles of queries that it loops over.

    Returns:
      `(first, full_first, full_last, last)`: tiles `first .. last - 1` hold all queries that see one of the
      keys; in `full_first .. full_last - 1` every query sees every key. Each tile of keys is compared with
      each tile of queries, but in a fused reduction, so no array of that size is stored.
    """
    batch, num_queries = start.shape
    num_tiles = triton.cdiv(num_queries, tokens)
    padding = ((0, 0), (0, num_tiles * tokens - num_queries))
    start, end = (jnp.pad(x, padding).reshape(batch, num_tiles, tokens) for x in (start, end))
    some = start < end
    most = jnp.iinfo(jnp.int32).max
    low = jnp.where(some, start, most).min(-1)[:, None]
    high = jnp.where(some, end, 0).max(-1)[:, None]
    last_start = jnp.where(some, start, most).max(-1)[:, None]
    first_end = jnp.where(some, end, 0).min(-1)[:, None]
    key = jnp.arange(triton.cdiv(num_keys, keys), dtype=jnp.int32)[None, :, None] * keys
    past_key = jnp.minimum(key + keys, num_keys)
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    seen = (low < past_key) & (high > key)
    full = (last_start <= key) & (first_end >= past_key)
    first = jnp.where(seen, tile, num_tiles).min(-1)
    last = jnp.where(seen, tile + 1, 0).max(-1)
    full_first = jnp.where(full, tile, num_tiles).min(-1)
    full_last = jnp.where((tile >= full_first[..., None]) & ~full, tile, num_tiles).min(-1)
    return jnp.stack([first, full_first, full_last, last], axis=-1)


def ranges_of_rows(start, end, heads: int, tokens: int) -> Int32[Array, "B 2 rows"]:
    """Start and count of the keys that each row sees, padded to the rows that steps load."""
    padding = ((0, 0), (0, -start.shape[1] % tokens))

    def by_token(x):
        return jnp.repeat(jnp.pad(x, padding), padded_heads(heads), axis=1)

    return jnp.stack([by_token(start), by_token(jnp.maximum(end - start, 0))], axis=1)


def range_key_gradients(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    ranges: KeyRanges,
    given: Backward,
    delta: Float[Array, "B T N"],
    *,
    scale: float,
    sizes: RangeKeySizes | None = None,
) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K V"]]:
    """`(d_key, d_value)`: `scale (p (gate d_out v^T - delta))^T q` and `(p gate)^T d_out`.

    Arguments as in `range_query_gradient`; `delta` is what it returned.
    """
    batch, num_queries, num_heads, key_dim = query.shape
    num_keys, num_kv_heads, value_dim = value.shape[1:]
    heads = num_heads // num_kv_heads
    if sizes is None:
        shape = shape_of(query, key, value, **ranges.edges.known_shape())
        sizes = choose_sizes(RANGE_KEY_GRADIENTS, shape)
    apart = heads if ranges.heads_apart(sizes.rows, heads) else 1  # groups of a KV head's query heads
    together, groups = heads // apart, num_kv_heads * apart
    tokens = tokens_of(sizes.rows, together)
    segments = sizes.segments or choose_segments(
        batch, num_queries, num_keys, num_kv_heads, heads, key_dim + value_dim, sizes.keys
    )
    scalars = row_scalars(given, delta, heads=together, tokens=tokens)
    edges, (*_, runs) = ranges.kernel_operands(tokens)
    bounds = rows = None
    if not edges.known:
        bounds = query_bounds(ranges.start, ranges.end, num_keys, sizes.keys, tokens)
        rows = ranges_of_rows(ranges.start, ranges.end, together, tokens)
    num_tiles = triton.cdiv(num_keys, sizes.keys)
    out = [like(x) if segments == 1 else like(x, (segments, *x.shape), "float32") for x in (key, value)]
    out.append(like(key, (segments, batch * num_kv_heads, num_tiles), "int32"))
    (h0, h1), (v0, v1) = split_dim(key_dim), split_dim(value_dim)
    tma = has_tma()
    if tma:
        block = tokens * padded_heads(together)
        rows = None if rows is None else TensorDescriptor.from_array(rows, (1, 1, block))
        scalars = TensorDescriptor.from_array(scalars, (1, 1, 1, block))
    d_key, d_value, written = launch(
        range_key_gradients_kernel, *query_tiles(query, groups, tokens, tma),
        *query_tiles(given.d_out, groups, tokens, tma), *key_tiles(key, sizes.keys, tma),
        *key_tiles(value, sizes.keys, tma), rows, scalars, bounds, runs,
        out=out, grid=(segments * num_tiles, batch * num_kv_heads),
        num_warps=sizes.num_warps, num_stages=sizes.num_stages, registers=sizes.registers,
        num_queries=num_queries, num_keys=num_keys,
        segment_tiles=triton.cdiv(triton.cdiv(num_queries, tokens), segments), SEGMENTS=segments,
        KV_HEADS=num_kv_heads, APART=apart, G=together, PADDED_G=padded_heads(together), TOKENS=tokens,
        KEYS=sizes.keys,
        H0=h0, H1=h1, V0=v0, V1=v1, SCALE=float(scale), KEYS_FIRST=sizes.keys_first,
        GATED=given.gate is not None, **edges.constants(), PRECISION=precision(query.dtype), TMA=tma,
    )  # fmt: skip
    if segments > 1:
        return add_segments(key, value, d_key, d_value, written, keys=sizes.keys)
    return d_key, d_value


class KeyTile(NamedTuple):
    """The keys of a program, their values, and the index of the first key."""

    k: Pieces
    v: Pieces
    first: tl.tensor


class RowData(NamedTuple):
    """Where kernels load the numbers of rows from.

    Attributes:
      ranges: start (0) and count (1) of the keys that they see, `[B, 2, length]`; None if they are computed.
      scalars: normaliser (0), shift (1) and gate (2), `[B, groups, 2|3, length]`.
      length: rows of one batch row and group of heads, padded to whole tiles.
      NUMBERS: scalars of a row.
    """

    ranges: tl.tensor | None
    scalars: tl.tensor
    length: tl.tensor
    NUMBERS: tl.constexpr


class _QueriesOfRun(NamedTuple):
    """What a program reads of the queries of one run: vectors, output gradients, numbers, ranges of keys."""

    queries: Queries
    gradients: Queries
    data: RowData
    ranges: Ranges
    run: tl.tensor


@triton.jit
def _load_range(data, queries, which, i):
    """Start (0) or count (1) of the keys that the rows of tile `i` see."""
    ROWS: tl.constexpr = queries.TOKENS * queries.PADDED_G
    if queries.TMA:
        found = data.ranges.load([queries.b, which, i * ROWS]).reshape(ROWS)
    else:
        found = tl.load(data.ranges + which * data.length + i * ROWS + tl.arange(0, ROWS))
    return found


@triton.jit
def _load_scalar(data, queries, group, which, i):
    """Normaliser (0), shift (1) or gate (2) of the rows of tile `i` of a group of heads."""
    ROWS: tl.constexpr = queries.TOKENS * queries.PADDED_G
    if queries.TMA:
        found = data.scalars.load([queries.b, queries.group + group, which, i * ROWS]).reshape(ROWS)
    else:
        found = tl.load(
            data.scalars + (group * data.NUMBERS + which) * data.length + i * ROWS + tl.arange(0, ROWS)
        )
    return found


@triton.jit
def _sum_tiles(
    sums, tile, source, steps, APART: tl.constexpr, SCALE: tl.constexpr, KEYS_FIRST: tl.constexpr,
    GATED: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds tiles of queries: if MASKED those of `low .. high - 1` that are not full, else the full ones."""
    queries: tl.constexpr = source.queries
    data: tl.constexpr = source.data
    ROWS: tl.constexpr = queries.TOKENS * queries.PADDED_G
    KEYS: tl.constexpr = tile.k.first.shape[0]
    ROW_AXIS: tl.constexpr = 0 if KEYS_FIRST else 1
    if MASKED:
        low = steps.low
        skipped = steps.full_high - steps.full_low
        past = steps.high - skipped
    else:
        low = steps.full_low
        skipped = 0
        past = steps.full_high
    for step in tl.range(low * APART, past * APART):
        i = step // APART
        group = step % APART
        if MASKED:
            i = tl.where(i < steps.full_low, i, i + skipped)
        q = load_queries(queries, i * queries.TOKENS, group)
        d_out = load_queries(source.gradients, i * queries.TOKENS, group)
        if KEYS_FIRST:
            logits = inner(tile.k, q, PRECISION)
            dp = inner(tile.v, d_out, PRECISION)
        else:
            logits = inner(q, tile.k, PRECISION)
            dp = inner(d_out, tile.v, PRECISION)
        # Numbers of rows are loaded where they are needed: all at once they would not fit into registers.
        normaliser = _load_scalar(data, queries, group, 0, i)
        p = tl.exp2(logits * (SCALE * LOG2_E) - tl.expand_dims(normaliser, ROW_AXIS))
        if MASKED:
            if data.ranges is not None:
                start = _load_range(data, queries, 0, i)
                count = _load_range(data, queries, 1, i)
            else:
                token = i * queries.TOKENS + tl.arange(0, ROWS) // queries.PADDED_G
                start, end = range_of(token, True, source.ranges, source.run)
                count = end - start
            ahead = tl.expand_dims(tile.first - start, ROW_AXIS)
            ahead += tl.expand_dims(tl.arange(0, KEYS), 1 - ROW_AXIS)
            count = tl.expand_dims(count.to(tl.uint32, bitcast=True), ROW_AXIS)
            p = tl.where(ahead.to(tl.uint32, bitcast=True) < count, p, 0.0)
        if GATED:
            p = p * tl.expand_dims(_load_scalar(data, queries, group, 2, i), ROW_AXIS)
        gated = p.to(d_out.first.dtype)
        if not KEYS_FIRST:
            gated = tl.trans(gated)
        shift = tl.expand_dims(_load_scalar(data, queries, group, 1, i), ROW_AXIS)
        # This product runs while d_logits are computed; a load in between would serialise the two.
        dv = add_product(gated, d_out, sums.dv, PRECISION)
        ds = (p * (dp - shift)).to(q.first.dtype)
        if not KEYS_FIRST:
            ds = tl.trans(ds)
        sums = KeyGradients(add_product(ds, q, sums.dk, PRECISION), dv)
    return sums


@triton.jit
def _sum_run(
    sums, tile, source, steps, APART: tl.constexpr, SCALE: tl.constexpr, KEYS_FIRST: tl.constexpr,
    GATED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the tiles of queries of all steps: first those with a mask, then the others."""
    for MASKED in tl.static_range(1, -1, -1):
        sums = _sum_tiles(
            sums, tile, source, steps, APART=APART, SCALE=SCALE, KEYS_FIRST=KEYS_FIRST, GATED=GATED,
            PRECISION=PRECISION, MASKED=MASKED,
        )  # fmt: skip
    return sums


@triton.jit
def _steps(limits, segment, segment_tiles):
    """The tiles of queries within both the limits and the segment."""
    low = tl.maximum(limits.low, segment * segment_tiles)
    high = tl.maximum(tl.minimum(limits.high, (segment + 1) * segment_tiles), low)
    full_low = tl.minimum(tl.maximum(limits.full_low, low), high)
    full_high = tl.minimum(tl.maximum(limits.full_high, full_low), high)
    return Limits(low, full_low, full_high, high)


@triton.jit(repr=named("nsa_{BRANCH}_key_gradients"))
def range_key_gradients_kernel(
    queries0, queries1, gradients0, gradients1, keys0, keys1, values0, values1, row_ranges, scalars, bounds,
    runs, d_key, d_value, written, num_queries, num_keys, segment_tiles, SEGMENTS: tl.constexpr,
    KV_HEADS: tl.constexpr, APART: tl.constexpr, G: tl.constexpr, PADDED_G: tl.constexpr,
    TOKENS: tl.constexpr, KEYS: tl.constexpr,
    H0: tl.constexpr, H1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, SCALE: tl.constexpr,
    KEYS_FIRST: tl.constexpr, GATED: tl.constexpr, BRANCH: tl.constexpr, FIRST: tl.constexpr,
    RUN_LENGTH: tl.constexpr, CLIPPED: tl.constexpr, WINDOW: tl.constexpr, SIZE: tl.constexpr,
    STRIDE: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys, or what one segment of the queries adds to them."""
    KEY: tl.constexpr = Dim(H0, H1)
    VALUE: tl.constexpr = Dim(V0, V1)
    key_tiles = tl.num_programs(0) // SEGMENTS
    tile = tl.program_id(0) % key_tiles
    segment = SEGMENTS - 1 - tl.program_id(0) // key_tiles
    b = tl.program_id(1) // KV_HEADS
    kv_head = tl.program_id(1) % KV_HEADS
    first_key = tile * KEYS

    ranges: tl.constexpr = Ranges(None, None, None, num_keys, RUN_LENGTH, CLIPPED, WINDOW, SIZE, STRIDE)
    keys: tl.constexpr = Keys(keys0, keys1, b, kv_head, num_keys, KV_HEADS, KEYS, KEY, TMA)
    values: tl.constexpr = Keys(values0, values1, b, kv_head, num_keys, KV_HEADS, KEYS, VALUE, TMA)
    held = KeyTile(load_keys(keys, first_key), load_keys(values, first_key), first_key)
    length = (num_queries + TOKENS - 1) // TOKENS * (TOKENS * PADDED_G)
    NUMBERS: tl.constexpr = 3 if GATED else 2
    if not TMA:
        if row_ranges is not None:
            row_ranges += b.to(tl.int64) * 2 * length
        scalars += tl.program_id(1).to(tl.int64) * (APART * NUMBERS) * length
    data: tl.constexpr = RowData(row_ranges, scalars, length, NUMBERS)
    queries: tl.constexpr = Queries(
        queries0, queries1, b, kv_head * APART, num_queries,
        GROUPS=KV_HEADS * APART, G=G, PADDED_G=PADDED_G, TOKENS=TOKENS, DIM=KEY, TMA=TMA,
    )  # fmt: skip
    gradients: tl.constexpr = Queries(
        gradients0, gradients1, b, kv_head * APART, num_queries,
        GROUPS=KV_HEADS * APART, G=G, PADDED_G=PADDED_G, TOKENS=TOKENS, DIM=VALUE, TMA=TMA,
    )  # fmt: skip

    sums = KeyGradients(zeros(KEYS, KEY), zeros(KEYS, VALUE))
    if RUN_LENGTH is None:
        run = run_at(runs, b, 0, num_queries, FIRST, RUN_LENGTH)
        if bounds is None:
            limits = query_limits(first_key, tl.minimum(first_key + KEYS, num_keys), ranges, run, TOKENS)
        else:
            bounds += (b.to(tl.int64) * key_tiles + tile) * 4
            limits = Limits(tl.load(bounds), tl.load(bounds + 1), tl.load(bounds + 2), tl.load(bounds + 3))
        steps = _steps(limits, segment, segment_tiles)
        source: tl.constexpr = _QueriesOfRun(queries, gradients, data, ranges, run)
        sums = _sum_run(
            sums, held, source, steps,
            APART=APART, SCALE=SCALE, KEYS_FIRST=KEYS_FIRST, GATED=GATED, PRECISION=PRECISION,
        )  # fmt: skip
        count = steps.high - steps.low
    else:
        count = 0
        for number in tl.range(0, num_queries // RUN_LENGTH):
            run = run_at(runs, b, number, num_queries, FIRST, RUN_LENGTH)
            limits = query_limits(first_key, tl.minimum(first_key + KEYS, num_keys), ranges, run, TOKENS)
            steps = _steps(limits, segment, segment_tiles)
            source: tl.constexpr = _QueriesOfRun(queries, gradients, data, ranges, run)  # type: ignore[no-redef]
            sums = _sum_run(
                sums, held, source, steps,
                APART=APART, SCALE=SCALE, KEYS_FIRST=KEYS_FIRST, GATED=GATED, PRECISION=PRECISION,
            )  # fmt: skip
            count += steps.high - steps.low

    if SEGMENTS > 1:
        tl.store(written + (segment * tl.num_programs(1) + tl.program_id(1)) * key_tiles + tile, count)
        if count == 0:
            return
    c = tl.arange(0, KEYS)
    part = (segment * (tl.num_programs(1) // KV_HEADS) + b).to(tl.int64)
    rows = Rows((part * num_keys + first_key) * KV_HEADS + kv_head, c * KV_HEADS, first_key + c < num_keys)
    store_rows(d_key, rows, scaled(sums.dk, SCALE), KEY)
    store_rows(d_value, rows, sums.dv, VALUE)
