"""Where the range of a tile of queries begins and ends, and which tiles of keys need a mask."""

from typing import NamedTuple

import triton
import triton.language as tl

from nsa_jax.kernels.triton.pieces import padded_heads

LARGEST_INT: tl.constexpr = tl.constexpr(2147483647)


def tokens_of(rows: int, heads_per_kv_head: int) -> int:
    """Query tokens of a tile of `rows` rows, each with the padded heads of one KV head; at least 16 rows."""
    heads = padded_heads(heads_per_kv_head)
    return max(rows, 16, heads) // heads


class Edges(NamedTuple):
    """What is known, when a program is compiled, of the ranges of consecutive queries of one sequence.

    Attributes:
      first_position: position of the first query, where the queries are consecutive and not packed;
        else None.
      window: longest range, for ranges that end with their query; None for ranges that all start at 0.
      tokens_per_key: tokens by which ranges grow by one key.
    """

    first_position: int | None = None
    window: int | None = None
    tokens_per_key: int = 1

    def of_tiles(self, tokens: int, keys: int) -> tuple[bool, bool]:
        """Returns `(front, rest)`, what tiles of queries need beside whole tiles of keys.

        `front`: they may see less than whole tiles at their front; `rest`: more than one tile of keys may
        need a mask at either end.
        """
        if self.first_position is None:
            return True, True
        if self.window is None:
            # ends within a tile of queries differ by one at most: then one tile holds them
            return False, -(-(tokens - 1) // self.tokens_per_key) > 1
        # Tiles of queries that do not cross a multiple of `keys` have all their ends in one tile of keys;
        # further on, ranges that begin behind 0 leave `window % keys` keys to the last tile.
        aligned = tokens <= 2 or (keys % tokens == 0 and self.first_position % tokens == 0)
        return True, not (aligned and tokens <= keys and self.window % keys + tokens - 1 <= keys)


NOTHING_KNOWN = Edges()


@triton.jit
def is_seen(first, start, count, KEYS: tl.constexpr):
    """`[rows, KEYS]`: whether each row sees the keys from `first` on; one comparison by wrapping below 0."""
    ahead = (first - start)[:, None] + tl.arange(0, KEYS)[None, :]
    return ahead.to(tl.uint32, bitcast=True) < count.to(tl.uint32, bitcast=True)[:, None]


@triton.jit
def tile_limits(starts, ends, first_token, length, TOKENS: tl.constexpr, KEYS: tl.constexpr):
    """Keys that some token of the tile sees, `low .. high - 1`, and a middle that all of them see.

    Returns `(low, full_low, full_high, high)`: the two inner limits lie whole tiles of KEYS behind `low`, and
    tokens that see nothing have no say.
    """
    token = first_token + tl.arange(0, TOKENS)
    inside = token < length
    start = tl.load(starts + token, mask=inside, other=0)
    end = tl.load(ends + token, mask=inside, other=0)
    some = start < end
    high = tl.max(tl.where(some, end, 0), 0)
    low = tl.minimum(tl.min(tl.where(some, start, LARGEST_INT), 0), high)
    last_start = tl.max(tl.where(some, start, low), 0)
    first_end = tl.min(tl.where(some, end, high), 0)
    full_low = low + (last_start - low + KEYS - 1) // KEYS * KEYS
    full_high = full_low + tl.maximum(first_end - full_low, 0) // KEYS * KEYS
    return low, full_low, full_high, high
