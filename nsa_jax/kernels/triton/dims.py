"""Head dims and head counts as the powers of two that Triton needs. Does not import Triton."""

from typing import NamedTuple


def split_dim(dim: int) -> tuple[int, int]:
    """`(first, second)`: powers of two of at least 16 that add up to `dim`; `second` is 0 if one is enough.

    Raises:
      ValueError: there are none, or `dim` is above 256.
    """
    first = 1 << (dim.bit_length() - 1) if dim > 0 else 0
    second = dim - first
    if first < 16 or dim > 256 or (second and (second < 16 or second & (second - 1))):
        raise ValueError(
            f"dim must be a power of two or the sum of two, 16 to 256, got {dim}. Pad the array."
        )
    return first, second


def splits(dim: int) -> bool:
    """Whether `split_dim` accepts `dim`."""
    try:
        split_dim(dim)
    except ValueError:
        return False
    return True


def padded_heads(heads_per_kv_head: int) -> int:
    """The query heads of a KV head, rounded up to a power of two."""
    return 1 << (heads_per_kv_head - 1).bit_length()


def tokens_of(rows: int, heads_per_kv_head: int) -> int:
    """Query tokens of a tile of `rows` rows; a tile has at least 16 rows and at least one token."""
    return rows_of_tile(rows, heads_per_kv_head, packed=False).tokens


class TileRows(NamedTuple):
    """How the rows of a tile stand for query tokens with the query heads of one KV head.

    Attributes:
      tokens: query tokens of the tile.
      heads: rows of each token; row `i` is head `i % heads` of token `i // heads`.
      rows: rows of the tile, a power of two, at least `tokens heads`.
    """

    tokens: int
    heads: int
    rows: int


def rows_of_tile(rows: int, heads_per_kv_head: int, *, packed: bool) -> TileRows:
    """A tile of `rows` rows, but at least 16 and one token, for the query heads of a KV head.

    `packed` leaves out heads that are padding if the rows then hold more tokens: of three heads 64 rows
    hold 21 tokens, and one row is empty; of four, padded or not, 16.
    """
    padded = padded_heads(heads_per_kv_head)
    rows = max(rows, 16, padded)
    heads = heads_per_kv_head if packed and rows // heads_per_kv_head > rows // padded else padded
    return TileRows(rows // heads, heads, rows)
