"""Where the range of a tile of queries begins and ends, and which tiles of keys need a mask."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from nsa_jax.kernels.triton.pieces import LARGEST_INT
from nsa_jax.layout import Placement


class Edges(NamedTuple):
    """What is known, when a program is compiled, of the ranges of consecutive queries of one sequence.

    A query at position p has `(p + 1 - size) // stride + 1` keys before its end, and sees the last `window`
    of them.

    Attributes:
      branch: name of the branch, in the names of its kernels.
      first_position: position of the first query, where the queries are consecutive and not packed;
        None where nothing is known.
      window: longest range; None for ranges that all start at 0.
      size: tokens that a key stands for; a query sees it when it has passed the last of them.
      stride: tokens between the first ones of two neighbouring keys.
    """

    branch: str = "range"
    first_position: int | None = None
    window: int | None = None
    size: int = 1
    stride: int = 1

    @property
    def from_0(self) -> bool:
        """Whether all ranges are known to begin at key 0: no key that all see stands behind one that some see."""
        return self.first_position is not None and self.window is None

    def of_tiles(self, tokens: int, keys: int, halve: bool = False) -> dict[str, bool | int]:
        """What tiles of queries need beside whole tiles of keys in the middle, in the kernels' words.

        `TAIL`: keys of the step behind the middle; `FRONT`: whether a step stands before it; `REST`: one
        step at either end may not be enough. With `halve` ranges that begin at 0 end in a step of half the
        keys, and may begin with one that all queries see.
        """
        known = self.first_position is not None
        if self.window is None:
            # Ends within a tile of queries that differ by one at most lie in one tile of keys.
            rest = not known or -(-(tokens - 1) // self.stride) > 1
            return dict(TAIL=keys // 2 if known and halve else keys, FRONT=not self.from_0, REST=rest)
        tail = min(keys, max(16, triton.next_power_of_2(tokens - 1)))
        rest = not known or tail < tokens - 1 or 0 < self.window % keys < tokens - 1
        return dict(TAIL=tail, FRONT=True, REST=rest)

    def constants(self) -> dict[str, Any]:
        """What the kernels are told."""
        return dict(
            BRANCH=self.branch,
            FIRST=self.first_position,
            WINDOW=self.window,
            SIZE=self.size,
            STRIDE=self.stride,
        )


NOTHING_KNOWN = Edges()


def compression_edges(placement: Placement, num_keys: int) -> Edges:
    """Edges of the compressed branch, whose array holds `num_keys` compressed keys."""
    config = placement.config
    size, stride = config.compression_block_size, config.compression_stride
    return Edges("compressed", _first(placement, "cmp"), None, size, stride)


def window_edges(placement: Placement, num_keys: int) -> Edges:
    """Edges of the window branch, whose array holds `num_keys` keys."""
    return Edges("window", _first(placement, "win"), placement.config.window_size)


def _first(placement: Placement, branch: str) -> int | None:
    whole = getattr(placement.first_keys, branch).known == 0
    return placement.first_position if whole else None


class Ranges(NamedTuple):
    """The keys that each query of a row of the batch sees, in kernels.

    Attributes:
      starts, ends: of each query; None where `Edges` say it.
      FIRST, WINDOW, SIZE, STRIDE: `Edges`.
    """

    starts: tl.tensor | None
    ends: tl.tensor | None
    FIRST: tl.constexpr
    WINDOW: tl.constexpr
    SIZE: tl.constexpr
    STRIDE: tl.constexpr


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
def range_of(token, inside, ranges):
    """`(start, end)` of the keys that each token sees; one that is not `inside` sees nothing."""
    if ranges.FIRST is None:
        start = tl.load(ranges.starts + token, mask=inside, other=0)
        end = tl.load(ranges.ends + token, mask=inside, other=0)
    else:
        past = ranges.FIRST + 1 + token
        end = tl.where(inside & (past >= ranges.SIZE), (past - ranges.SIZE) // ranges.STRIDE + 1, 0)
        if ranges.WINDOW is None:
            start = end * 0
        else:
            start = tl.maximum(end - ranges.WINDOW, 0)
    return start, end


@triton.jit
def seen_by(token, inside, ranges):
    """`Seen` of each token."""
    start, end = range_of(token, inside, ranges)
    return Seen(start, tl.maximum(end - start, 0))


@triton.jit
def key_limits(first_token, length, ranges, TOKENS: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr):
    """Keys that a tile of TOKENS queries sees, and the middle that all of them see.

    `low` and `full_high` lie whole tiles of KEYS from `full_low`: so `low` may lie before the first key, even
    before 0. The middle of a window ends with the range of the first query; without a window it begins with
    the first whole tile, or behind a step of TAIL. Loaded ranges that are empty have no say.
    """
    if ranges.FIRST is None:
        token = first_token + tl.arange(0, TOKENS)
        start, end = range_of(token, token < length, ranges)
        some = start < end
        high = tl.max(tl.where(some, end, 0), 0)
        low = tl.minimum(tl.min(tl.where(some, start, LARGEST_INT), 0), high)
        last_start = tl.max(tl.where(some, start, low), 0)
        first_end = tl.min(tl.where(some, end, high), 0)
    else:
        last_token = tl.minimum(first_token + TOKENS, length) - 1
        low, first_end = range_of(first_token, True, ranges)
        last_start, high = range_of(last_token, True, ranges)
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
def query_limits(first_key, past_key, num_queries, ranges, TOKENS: tl.constexpr):
    """Tiles of TOKENS queries that see one of the keys `first_key .. past_key - 1`, and those that see all.

    Where ranges are known. Where there are none, the limits are in no order.
    """
    tiles = (num_queries + TOKENS - 1) // TOKENS
    STRIDE: tl.constexpr = ranges.STRIDE
    first_query = first_key * STRIDE + (ranges.SIZE - 1) - ranges.FIRST  # that sees the first key
    all_begin = first_query + (past_key - 1 - first_key) * STRIDE  # the first that sees the last key
    low = tl.maximum(first_query, 0) // TOKENS
    full_low = (tl.maximum(all_begin, 0) + TOKENS - 1) // TOKENS
    if ranges.WINDOW is None:
        full_high = tiles
        high = tiles
    else:
        # behind the last query that sees the first key, and behind the last that sees the last one
        full_high = tl.maximum(first_query + ranges.WINDOW * STRIDE, 0) // TOKENS
        high = (tl.maximum(all_begin + ranges.WINDOW * STRIDE, 0) + TOKENS - 1) // TOKENS
    return Limits(low, full_low, tl.minimum(full_high, tiles), tl.minimum(high, tiles))
