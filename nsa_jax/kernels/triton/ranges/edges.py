"""Where the range of a tile of queries begins and ends, and which tiles of keys need a mask."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Int32
from nsa_jax.kernels.triton.dims import TileRows, padded_heads, rows_of_tile
from nsa_jax.kernels.triton.nonfinite import VisibleKeys
from nsa_jax.kernels.triton.pieces import LARGEST_INT
from nsa_jax.layout import Index, Placement


class Edges(NamedTuple):
    """What is known about the ranges of neighbouring queries when a program is compiled.

    The range of a query at position p ends after `(p + 1 - size) // stride + 1` keys; it has the last
    `window` of them.

    Attributes:
      branch: name of the branch, for the names of its kernels.
      first_position: position of the first query, if the queries of a row are consecutive tokens of one
        sequence and the array holds its keys from key 0 on; else None.
      run_length: queries of each run of consecutive tokens, if `KeyRanges.runs` says where runs begin.
      clipped: whether the array may lack keys at either end of what a run sees.
      window: longest range; None for ranges that all start at 0.
      size: tokens that a key stands for; a query sees the key if it is at or after the last of them.
      stride: tokens from the first token of a key to that of the next key.
    """

    branch: str = "range"
    first_position: int | None = None
    run_length: int | None = None
    clipped: bool = False
    window: int | None = None
    size: int = 1
    stride: int = 1

    @property
    def known(self) -> bool:
        """Whether kernels compute the ranges instead of loading them."""
        return self.first_position is not None or self.run_length is not None

    @property
    def from_0(self) -> bool:
        """Whether all ranges are known to begin at the same key, so what all queries see comes first."""
        return self.known and self.window is None

    def known_shape(self) -> dict[str, bool]:
        """What the sizes of tiles may depend on, as fields of `Shape`."""
        return dict(from_0=self.from_0, plain=self.known)

    def of_tiles(self, tokens: int, num_queries: int) -> "Edges":
        """The same for tiles of `tokens` queries: nothing is known if a tile may reach into a second run."""
        if self.run_length in (None, num_queries) or self.run_length % tokens == 0:
            return self
        return self._replace(run_length=None)

    def end_steps(self, tokens: int, keys: int, halve: bool = False) -> dict[str, Any]:
        """Which steps a tile of queries needs beside the middle, as constants of the kernels.

        `TAIL`: keys of the step after the middle. `FRONT`: whether there is a step before it. `REST`: whether
        one step at either end may be too few. With `halve`, ranges that begin at 0 end in a step of half the
        keys, and may begin with such a step, which all queries see.
        """
        if self.window is None:
            # If the ends of a tile's ranges differ by at most one key, one step covers them.
            rest = not self.known or -(-(tokens - 1) // self.stride) > 1
            return dict(TAIL=keys // 2 if self.known and halve else keys, FRONT=not self.from_0, REST=rest)
        tail = min(keys, max(16, triton.next_power_of_2(tokens - 1)))
        rest = not self.known or self.clipped or tail < tokens - 1 or 0 < self.window % keys < tokens - 1
        return dict(TAIL=tail, FRONT=True, REST=rest)

    def constants(self) -> dict[str, Any]:
        """These facts as constants of the kernels."""
        return dict(
            BRANCH=self.branch,
            FIRST=self.first_position,
            RUN_LENGTH=self.run_length,
            CLIPPED=self.clipped,
            WINDOW=self.window,
            SIZE=self.size,
            STRIDE=self.stride,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyRanges:
    """The keys `start .. end - 1` of each query.

    Attributes:
      start, end: indices in the array of keys; a query sees nothing where `start >= end`.
      runs: three numbers of each run, one run after the other: the position of its first query, counted from
        the first token of the array's key 0; the index of the first key that exists; and how many of its
        queries are real. None if nothing is known about runs.
      edges: what is known about the ranges while tracing.
    """

    start: Int32[Array, "B T"]
    end: Int32[Array, "B T"]
    runs: Int32[Array, "B numbers"] | None = None
    edges: Edges = dataclasses.field(default=Edges(), metadata={"static": True})

    @property
    def visible(self) -> VisibleKeys:
        """The same in the form that `nonfinite` takes."""
        return VisibleKeys(self.edges.branch, self.start, self.end)

    def rows_of_tile(self, rows: int, heads: int) -> TileRows:
        """Rows of a tile for `heads` query heads of a KV head, packed unless tiles reach into two runs."""
        packed = rows_of_tile(rows, heads, packed=True)
        return packed if self._fit(packed.tokens) else rows_of_tile(rows, heads, packed=False)

    def heads_apart(self, rows: int, heads: int) -> bool:
        """Whether a step of the gradient of keys takes `rows` tokens of one query head.

        It then has no heads that are padding, but more tokens, so more is masked at the ends of ranges. That
        pays if at least an eighth of the heads would be padding.
        """
        return 8 * heads <= 7 * padded_heads(heads) and self._fit(rows)

    def _fit(self, tokens: int) -> bool:
        """Whether tiles of so many tokens lie within runs, so that kernels need not load their ranges."""
        return self.edges.of_tiles(tokens, self.start.shape[1]) == self.edges

    def kernel_operands(self, tokens: int) -> tuple[Edges, tuple[Array | None, Array | None, Array | None]]:
        """`edges` for tiles of `tokens` queries; and starts, ends and runs, None where kernels load none."""
        edges = self.edges.of_tiles(tokens, self.start.shape[1])
        if not edges.known:
            return edges, (self.start, self.end, None)
        return edges, (None, None, None if edges.run_length is None else self.runs)


def compression_ranges(placement: Placement, num_keys: int) -> KeyRanges:
    """The range of each query in the array of the compressed branch, which holds `num_keys` keys."""
    config = placement.config
    size, stride = config.compression_block_size, config.compression_stride
    edges = Edges("compressed", size=size, stride=stride)
    limits = placement.compression_range(num_keys)
    return _ranges(placement, limits, edges, placement.first_keys.cmp)


def window_ranges(placement: Placement, num_keys: int) -> KeyRanges:
    """The range of each query in the array of the window branch, which holds `num_keys` keys."""
    edges = Edges("window", window=placement.config.window_size)
    origin = placement.first_keys.win if placement.halo is None else None
    return _ranges(placement, placement.window_range(num_keys), edges, origin)


def causal_ranges(placement: Placement, num_keys: int) -> KeyRanges:
    """All keys of its sequence up to each query, in the array of the selected branch."""
    end = placement.selection_end(num_keys)
    start = jnp.clip(placement.selection_start(), 0, end)
    return _ranges(placement, (start, end), Edges("selected_causal"), placement.first_keys.slc)


def _ranges(
    placement: Placement, limits: tuple[Array, Array], edges: Edges, origin: Index | None
) -> KeyRanges:
    """Ranges, and what is known of them; `origin` is None for an array with a stretch of keys for each run.

    To the kernels such stretches are one row. No window reaches from one into another, because the halo is at
    least the window less one.
    """
    if placement.first_position is not None and origin is not None and origin.known == 0:
        return KeyRanges(*limits, None, edges._replace(first_position=placement.first_position))
    lengths = set(placement.run_lengths)
    if placement.packed or len(lengths) != 1:
        return KeyRanges(*limits, None, edges)
    (length,) = lengths
    batch = limits[0].shape[0]
    firsts = jnp.stack([first.of_rows(batch) for first in placement.run_firsts], axis=1)
    if origin is None:
        assert placement.halo is not None
        positions = jnp.broadcast_to(jnp.asarray(placement.stretches(), jnp.int32), firsts.shape)
        lowest = positions - jnp.minimum(firsts, placement.halo)
    else:
        first_key = origin.of_rows(batch)[:, None]
        positions = firsts - first_key * edges.stride
        lowest = jnp.broadcast_to(jnp.maximum(-first_key, 0), firsts.shape)
    real = placement.run_queries
    runs = positions, lowest, jnp.full_like(firsts, length) if real is None else real
    known = edges._replace(run_length=length, clipped=origin is None or origin.known != 0)
    return KeyRanges(*limits, jnp.stack(runs, axis=-1).reshape(batch, -1), known)


class Ranges(NamedTuple):
    """The keys that each query of a row of the batch sees, in kernels.

    Attributes:
      starts, ends: of each query of the batch; None if they are computed. In the gradient of keys always
        None: that kernel loads ranges by rows (`RowData`).
      first_query: index in `starts` and `ends` of the first query of this row of the batch.
      num_keys: keys of a row.
      RUN_LENGTH, CLIPPED, WINDOW, SIZE, STRIDE: see `Edges`.
    """

    starts: tl.tensor | None
    ends: tl.tensor | None
    first_query: tl.tensor | None
    num_keys: tl.tensor
    RUN_LENGTH: tl.constexpr
    CLIPPED: tl.constexpr
    WINDOW: tl.constexpr
    SIZE: tl.constexpr
    STRIDE: tl.constexpr


class Run(NamedTuple):
    """A run: consecutive queries.

    Attributes:
      shift: position of a query minus its index in the row.
      lowest: index of the first key that exists.
      begin, past: index of the run's first query, and one past its last real query.
    """

    shift: tl.tensor
    lowest: tl.tensor
    begin: tl.tensor
    past: tl.tensor


class Seen(NamedTuple):
    """The keys `start .. start + count - 1` that each row sees."""

    start: tl.tensor
    count: tl.tensor


class Limits(NamedTuple):
    """What a program loops over, in keys or in tiles of queries.

    The loop covers `low .. high - 1`; `full_low .. full_high - 1` of it, the full ones, need no mask.
    """

    low: tl.tensor
    full_low: tl.tensor
    full_high: tl.tensor
    high: tl.tensor


@triton.jit
def is_seen(first, seen, KEYS: tl.constexpr):
    """`[rows, KEYS]`: whether each row sees each key from `first` on; numbers below 0 wrap to large ones."""
    ahead = (first - seen.start)[:, None] + tl.arange(0, KEYS)[None, :]
    return ahead.to(tl.uint32, bitcast=True) < seen.count.to(tl.uint32, bitcast=True)[:, None]


@triton.jit
def run_at(runs, b, number, num_queries, FIRST: tl.constexpr, RUN_LENGTH: tl.constexpr):
    """Run number `number` of row `b` of the batch; without an array of runs, all queries are one run."""
    if RUN_LENGTH is None:
        run = Run(0 if FIRST is None else FIRST, 0, 0, num_queries)
    else:
        begin = number * RUN_LENGTH
        at = runs + (b * (num_queries // RUN_LENGTH) + number) * 3
        run = Run(tl.load(at) - begin, tl.load(at + 1), begin, begin + tl.load(at + 2))
    return run


@triton.jit
def run_of(tile, runs, num_queries, FIRST: tl.constexpr, RUN_LENGTH: tl.constexpr):
    """The run of a tile of queries."""
    number = 0 if RUN_LENGTH is None else tile.first_token // RUN_LENGTH
    return run_at(runs, tile.b, number, num_queries, FIRST, RUN_LENGTH)


@triton.jit
def range_of(token, inside, ranges, run):
    """`(start, end)` of the keys that each token of a run sees; one that is not `inside` sees nothing."""
    if ranges.starts is not None:
        start = tl.load(ranges.starts + ranges.first_query + token, mask=inside, other=0)
        end = tl.load(ranges.ends + ranges.first_query + token, mask=inside, other=0)
    else:
        past = run.shift + 1 + token
        sees = inside & (past >= ranges.SIZE)
        if ranges.RUN_LENGTH is not None:
            sees = sees & (token < run.past)
        end = tl.where(sees, (past - ranges.SIZE) // ranges.STRIDE + 1, 0)
        if ranges.WINDOW is None:
            start = end * 0
        else:
            start = tl.maximum(end - ranges.WINDOW, 0)
        if ranges.CLIPPED:
            end = tl.maximum(tl.minimum(end, ranges.num_keys), run.lowest)
            start = tl.minimum(tl.maximum(start, run.lowest), end)
    return start, end


@triton.jit
def seen_by(token, inside, ranges, run):
    """`Seen` of each token."""
    start, end = range_of(token, inside, ranges, run)
    return Seen(start, tl.maximum(end - start, 0))


@triton.jit
def key_limits(
    first_token, length, ranges, run,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """The keys that a tile of TOKENS queries loops over, and the middle that all of them see.

    ROWS: a power of two, at least TOKENS.

        low ........ full_low - KEYS . full_low ............. full_high . full_high + TAIL ........ high
        masked steps | one masked step | steps without a mask | one masked step | masked steps
        (REST)         (FRONT)                                  (TAIL)            (REST)

    The middle is whole steps of KEYS. With a window it ends with the range of the first query, and `low` is
    whole steps before `full_low`, so it may be before the first key, even below 0. Without a window the
    middle begins whole steps after `low`, or one step of TAIL later. Empty loaded ranges are ignored.
    """
    if ranges.starts is not None:
        token = first_token + tl.arange(0, ROWS)
        start, end = range_of(token, token < tl.minimum(first_token + TOKENS, length), ranges, run)
        some = start < end
        high = tl.max(tl.where(some, end, 0), 0)
        low = tl.minimum(tl.min(tl.where(some, start, LARGEST_INT), 0), high)
        last_start = tl.max(tl.where(some, start, low), 0)
        first_end = tl.min(tl.where(some, end, high), 0)
    else:
        last_token = tl.minimum(first_token + TOKENS, length) - 1
        if ranges.RUN_LENGTH is not None:
            last_token = tl.maximum(tl.minimum(last_token, run.past - 1), first_token)
        low, first_end = range_of(first_token, True, ranges, run)
        last_start, high = range_of(last_token, True, ranges, run)
    if ranges.WINDOW is None:
        full_low = low + (last_start - low + KEYS - 1) // KEYS * KEYS
        full_high = full_low + tl.maximum(first_end - full_low, 0) // TAIL * TAIL
        full_low += (full_high - full_low) % KEYS
    else:
        full_high = first_end
        full_low = first_end - tl.maximum(first_end - last_start, 0) // KEYS * KEYS
        low = full_low - tl.maximum(full_low - low + KEYS - 1, 0) // KEYS * KEYS
    return Limits(low, full_low, full_high, high)


@triton.jit
def query_limits(first_key, past_key, ranges, run, TOKENS: tl.constexpr):
    """Tiles of TOKENS queries of a run that see one of the keys `first_key .. past_key - 1`, or all of them.

    Only for ranges that are known. If there is no such tile, the limits may be in any order.
    """
    tiles = (run.past + TOKENS - 1) // TOKENS
    STRIDE: tl.constexpr = ranges.STRIDE
    first_query = first_key * STRIDE + (ranges.SIZE - 1) - run.shift  # the first that sees the first key
    all_begin = first_query + (past_key - 1 - first_key) * STRIDE  # the first that sees the last key
    low = tl.maximum(first_query, run.begin) // TOKENS
    full_low = (tl.maximum(all_begin, run.begin) + TOKENS - 1) // TOKENS
    if ranges.WINDOW is None:
        full_high = tiles
        high = tiles
    else:
        # one past the last query that sees the first key, and past the last that sees the last key
        full_high = tl.maximum(first_query + ranges.WINDOW * STRIDE, 0) // TOKENS
        high = (tl.maximum(all_begin + ranges.WINDOW * STRIDE, 0) + TOKENS - 1) // TOKENS
    if ranges.CLIPPED:
        full_high = tl.where(first_key < run.lowest, full_low, full_high)
    return Limits(low, full_low, tl.minimum(full_high, tiles), tl.minimum(high, tiles))
