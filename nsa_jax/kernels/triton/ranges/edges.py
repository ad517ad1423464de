"""Where the range of a tile of queries begins and ends, and which tiles of keys need a mask."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Int32
from nsa_jax.kernels.triton.nonfinite import VisibleKeys
from nsa_jax.kernels.triton.pieces import LARGEST_INT
from nsa_jax.layout import Index, Placement


class Edges(NamedTuple):
    """What is known, when a program is compiled, of the ranges of neighbouring queries.

    A query at position p has `(p + 1 - size) // stride + 1` keys before its end, and sees the last `window`
    of them.

    Attributes:
      branch: name of the branch, in the names of its kernels.
      first_position: position of the first query, where all are consecutive tokens of one sequence and the
        array holds the row from key 0.
      run_length: queries of each run of consecutive tokens, where an array says at which position they begin.
      clipped: whether keys may be missing at either end of what a run sees.
      window: longest range; None for ranges that all start at 0.
      size: tokens that a key stands for; a query sees it when it has passed the last of them.
      stride: tokens between the first ones of two neighbouring keys.
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
        """Whether kernels compute the ranges; else they load them."""
        return self.first_position is not None or self.run_length is not None

    @property
    def from_0(self) -> bool:
        """Whether all ranges are known to begin at one key: what all see stands before what some see."""
        return self.known and self.window is None

    def of_tiles(self, tokens: int, num_queries: int) -> "Edges":
        """What is known of tiles of `tokens` queries: nothing where one may reach into a second run."""
        if self.run_length in (None, num_queries) or self.run_length % tokens == 0:
            return self
        return self._replace(run_length=None)

    def end_steps(self, tokens: int, keys: int, halve: bool = False) -> dict[str, bool | int]:
        """What tiles of queries need beside whole tiles of keys in the middle, in the kernels' words.

        `TAIL`: keys of the step behind the middle; `FRONT`: whether a step stands before it; `REST`: one
        step at either end may not be enough. With `halve` ranges that begin at 0 end in a step of half the
        keys, and may begin with one that all queries see.
        """
        if self.window is None:
            # Ends within a tile of queries that differ by one at most lie in one tile of keys.
            rest = not self.known or -(-(tokens - 1) // self.stride) > 1
            return dict(TAIL=keys // 2 if self.known and halve else keys, FRONT=not self.from_0, REST=rest)
        tail = min(keys, max(16, triton.next_power_of_2(tokens - 1)))
        rest = not self.known or self.clipped or tail < tokens - 1 or 0 < self.window % keys < tokens - 1
        return dict(TAIL=tail, FRONT=True, REST=rest)

    def constants(self) -> dict[str, Any]:
        """What the kernels are told."""
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
      start, end: row indices; nothing is seen where `start >= end`.
      runs: of each run the position of its first query, counted as `edges` counts keys; the lowest row index
        that the array holds; and how many of its queries are real. None where nothing is known of runs.
      edges: what is known of the ranges while tracing.
    """

    start: Int32[Array, "B T"]
    end: Int32[Array, "B T"]
    runs: Int32[Array, "B runs 3"] | None = None
    edges: Edges = dataclasses.field(default=Edges(), metadata={"static": True})

    @property
    def visible(self) -> VisibleKeys:
        """The same in the form that `nonfinite` takes."""
        return VisibleKeys(self.edges.branch, self.start, self.end)

    def kernel_operands(self, tokens: int) -> tuple[Edges, tuple[Array | None, Array | None, Array | None]]:
        """What is known of tiles of `tokens` queries, and what kernels load: starts, ends, runs, or None."""
        edges = self.edges.of_tiles(tokens, self.start.shape[1])
        if not edges.known:
            return edges, (self.start, self.end, None)
        return edges, (None, None, None if edges.run_length is None else self.runs)


def compression_ranges(placement: Placement, num_keys: int) -> KeyRanges:
    """What queries see of the compressed branch, whose array holds `num_keys` compressed keys."""
    config = placement.config
    size, stride = config.compression_block_size, config.compression_stride
    edges = Edges("compressed", size=size, stride=stride)
    limits = placement.compression_range(num_keys)
    return _ranges(placement, limits, edges, placement.first_keys.cmp)


def window_ranges(placement: Placement, num_keys: int) -> KeyRanges:
    """What queries see of the window branch, whose array holds `num_keys` keys."""
    edges = Edges("window", window=placement.config.window_size)
    return _ranges(placement, placement.window_range(num_keys), edges, placement.first_keys.win)


def _ranges(placement: Placement, limits: tuple[Array, Array], edges: Edges, origin: Index) -> KeyRanges:
    if placement.first_position is not None and origin.known == 0:
        return KeyRanges(*limits, None, edges._replace(first_position=placement.first_position))
    lengths = set(placement.run_lengths)
    if placement.packed or len(lengths) != 1:
        return KeyRanges(*limits, None, edges)
    (length,) = lengths
    batch = limits[0].shape[0]
    first_key = origin.of_rows(batch)
    firsts = jnp.stack([first.of_rows(batch) for first in placement.run_firsts], axis=1)
    real = placement.run_queries
    runs = (
        firsts - first_key[:, None] * edges.stride,
        jnp.broadcast_to(jnp.maximum(-first_key, 0)[:, None], firsts.shape),
        jnp.full_like(firsts, length) if real is None else real,
    )
    known = edges._replace(run_length=length, clipped=origin.known != 0)
    return KeyRanges(*limits, jnp.stack(runs, axis=-1), known)


class Ranges(NamedTuple):
    """The keys that each query of a row of the batch sees, in kernels.

    Attributes:
      starts, ends: of each query of the batch; None where they are computed. The gradient of keys has None in
        both cases: it loads them by rows (`RowData`).
      first_query: place of the first query of this row of the batch in `starts` and `ends`.
      num_keys: keys of a row.
      RUN_LENGTH, CLIPPED, WINDOW, SIZE, STRIDE: `Edges`.
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
    """Consecutive queries.

    Attributes:
      shift: position of a query, less its place in the row.
      lowest: row index of the first key that there is.
      begin, past: place of the run's first query, and behind its last real one.
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
    """Steps of a program, in keys or in tiles of queries.

    All that matter are `low .. high - 1`; those of `full_low .. full_high - 1` need no mask.
    """

    low: tl.tensor
    full_low: tl.tensor
    full_high: tl.tensor
    high: tl.tensor


@triton.jit
def is_seen(first, seen, KEYS: tl.constexpr):
    """`[rows, KEYS]`: whether each row sees the keys from `first` on; one comparison by wrapping below 0."""
    ahead = (first - seen.start)[:, None] + tl.arange(0, KEYS)[None, :]
    return ahead.to(tl.uint32, bitcast=True) < seen.count.to(tl.uint32, bitcast=True)[:, None]


@triton.jit
def run_at(runs, b, number, num_queries, FIRST: tl.constexpr, RUN_LENGTH: tl.constexpr):
    """Run number `number` of row `b` of the batch; all queries are one where no array says more."""
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
    first_token, length, ranges, run, TOKENS: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr
):
    """Keys that a tile of TOKENS queries sees, and the middle that all of them see.

        low ........ full_low - KEYS . full_low ............. full_high . full_high + TAIL ........ high
        masked steps | one masked step | steps without a mask | one masked step | masked steps
        (REST)         (FRONT)                                  (TAIL)            (REST)

    `low` and `full_high` lie whole tiles of KEYS from `full_low`: so `low` may lie before the first key, even
    before 0. The middle of a window ends with the range of the first query; without a window it begins with
    the first whole tile, or behind a step of TAIL. Loaded ranges that are empty have no say.
    """
    if ranges.starts is not None:
        token = first_token + tl.arange(0, TOKENS)
        start, end = range_of(token, token < length, ranges, run)
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

    Where ranges are known. Where there are none, the limits are in no order.
    """
    tiles = (run.past + TOKENS - 1) // TOKENS
    STRIDE: tl.constexpr = ranges.STRIDE
    first_query = first_key * STRIDE + (ranges.SIZE - 1) - run.shift  # that sees the first key
    all_begin = first_query + (past_key - 1 - first_key) * STRIDE  # the first that sees the last key
    low = tl.maximum(first_query, run.begin) // TOKENS
    full_low = (tl.maximum(all_begin, run.begin) + TOKENS - 1) // TOKENS
    if ranges.WINDOW is None:
        full_high = tiles
        high = tiles
    else:
        # behind the last query that sees the first key, and behind the last that sees the last one
        full_high = tl.maximum(first_query + ranges.WINDOW * STRIDE, 0) // TOKENS
        high = (tl.maximum(all_begin + ranges.WINDOW * STRIDE, 0) + TOKENS - 1) // TOKENS
    if ranges.CLIPPED:
        full_high = tl.where(first_key < run.lowest, full_low, full_high)
    return Limits(low, full_low, tl.minimum(full_high, tiles), tl.minimum(high, tiles))
