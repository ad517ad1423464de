"""Where the range of a tile of queries begins and ends, and which tiles of keys need a mask."""

from typing import NamedTuple

import triton
import triton.language as tl

from nsa_jax.kernels.triton.pieces import LARGEST_INT


class Edges(NamedTuple):
    """What is known, when a program is compiled, of the ranges of consecutive queries of one sequence.

    A query at position p has `(p + 1 - size) // stride + 1` keys before its end, and sees the last `window`
    of them.

    Attributes:
      first_position: position of the first query, where the queries are consecutive and not packed;
        None where nothing is known.
      window: longest range; None for ranges that all start at 0.
      size: tokens that a key stands for; a query sees it when it has passed the last of them.
      stride: tokens between the first ones of two neighbouring keys.
    """

    first_position: int | None = None
    window: int | None = None
    size: int = 1
    stride: int = 1

    @property
    def front(self) -> bool:
        """Whether keys that some query of a tile does not see may stand before those that all see."""
        return self.first_position is None or self.window is not None

    def of_tiles(self, tokens: int, keys: int, halve: bool = False) -> dict[str, bool | int]:
        """What tiles of queries need beside whole tiles of keys in the middle, in the kernels' words.

        `TAIL`: keys of the step behind the middle; `FRONT`: as above; `REST`: one step at either end may not
        be enough. With `halve` ranges that begin at 0 end in a step of half the keys, and may begin with one
        that all queries see.
        """
        known = self.first_position is not None
        if self.window is None:
            # Ends within a tile of queries that differ by one at most lie in one tile of keys.
            rest = not known or -(-(tokens - 1) // self.stride) > 1
            return dict(TAIL=keys // 2 if known and halve else keys, FRONT=self.front, REST=rest)
        tail = min(keys, max(16, triton.next_power_of_2(tokens - 1)))
        rest = not known or tail < tokens - 1 or 0 < self.window % keys < tokens - 1
        return dict(TAIL=tail, FRONT=self.front, REST=rest)

    def constants(self) -> dict[str, int | None]:
        """What the kernels are told."""
        return dict(FIRST=self.first_position, WINDOW=self.window, SIZE=self.size, STRIDE=self.stride)


NOTHING_KNOWN = Edges()


@triton.jit
def is_seen(first, start, count, KEYS: tl.constexpr):
    """`[rows, KEYS]`: whether each row sees the keys from `first` on; one comparison by wrapping below 0."""
    ahead = (first - start)[:, None] + tl.arange(0, KEYS)[None, :]
    return ahead.to(tl.uint32, bitcast=True) < count.to(tl.uint32, bitcast=True)[:, None]


@triton.jit
def range_of(
    token, inside, starts, ends,
    FIRST: tl.constexpr, WINDOW: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """`(start, end)` of the keys that each token sees: by `Edges` where these are known, else as loaded.

    Tokens that are not `inside` see nothing.
    """
    if FIRST is None:
        start = tl.load(starts + token, mask=inside, other=0)
        end = tl.load(ends + token, mask=inside, other=0)
    else:
        past = FIRST + 1 + token
        end = tl.where(inside & (past >= SIZE), (past - SIZE) // STRIDE + 1, 0)
        if WINDOW is None:
            start = end * 0
        else:
            start = tl.maximum(end - WINDOW, 0)
    return start, end


@triton.jit
def tile_limits(
    first_token, length, starts, ends, FIRST: tl.constexpr, WINDOW: tl.constexpr, SIZE: tl.constexpr,
    STRIDE: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Keys that some token of the tile sees, `low .. high - 1`, and a middle that all of them see.

    Returns `(low, full_low, full_high, high)`. `low` and `full_high` lie whole tiles of KEYS from `full_low`:
    so `low` may lie before the first key, even before 0. The middle of a window ends with the range of the
    first query; without a window it begins with the first whole tile, or behind a step of TAIL. Loaded
    ranges that are empty have no say.
    """
    if FIRST is None:
        token = first_token + tl.arange(0, TOKENS)
        start, end = range_of(token, token < length, starts, ends, FIRST, WINDOW, SIZE, STRIDE)
        some = start < end
        high = tl.max(tl.where(some, end, 0), 0)
        low = tl.minimum(tl.min(tl.where(some, start, LARGEST_INT), 0), high)
        last_start = tl.max(tl.where(some, start, low), 0)
        first_end = tl.min(tl.where(some, end, high), 0)
    else:
        last_token = tl.minimum(first_token + TOKENS, length) - 1
        low, first_end = range_of(first_token, True, starts, ends, FIRST, WINDOW, SIZE, STRIDE)
        last_start, high = range_of(last_token, True, starts, ends, FIRST, WINDOW, SIZE, STRIDE)
    if WINDOW is None:
        full_low = low + (last_start - low + KEYS - 1) // KEYS * KEYS
        full_high = full_low + tl.maximum(first_end - full_low, 0) // TAIL * TAIL
        full_low += (full_high - full_low) % KEYS
    else:
        full_high = first_end
        full_low = first_end - tl.maximum(first_end - last_start, 0) // KEYS * KEYS
        low = full_low - tl.maximum(full_low - low + KEYS - 1, 0) // KEYS * KEYS
    return low, full_low, full_high, high


@triton.jit
def query_limits(
    first_key, past_key, num_queries, FIRST: tl.constexpr, WINDOW: tl.constexpr, SIZE: tl.constexpr,
    STRIDE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The same seen from a tile of keys, where ranges are known: tiles of TOKENS queries.

    Returns `(low, full_low, full_high, high)`: tiles `low .. high - 1` hold all queries that see one of the
    keys `first_key .. past_key - 1`; in `full_low .. full_high - 1` every query sees every key. Where there
    are none, the limits are in no order.
    """
    tiles = (num_queries + TOKENS - 1) // TOKENS
    first_query = first_key * STRIDE + (SIZE - 1) - FIRST  # that sees the first key
    all_begin = first_query + (past_key - 1 - first_key) * STRIDE  # the first that sees the last key
    low = tl.maximum(first_query, 0) // TOKENS
    full_low = (tl.maximum(all_begin, 0) + TOKENS - 1) // TOKENS
    if WINDOW is None:
        full_high = tiles
        high = tiles
    else:
        # behind the last query that sees the first key, and behind the last that sees the last one
        full_high = tl.maximum(first_query + WINDOW * STRIDE, 0) // TOKENS
        high = (tl.maximum(all_begin + WINDOW * STRIDE, 0) + TOKENS - 1) // TOKENS
    return low, full_low, tl.minimum(full_high, tiles), tl.minimum(high, tiles)
