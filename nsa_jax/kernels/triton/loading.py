"""Where kernels load tiles of keys and queries from, and store rows to.

From Hopper on, the tensor memory accelerator (TMA) fetches tiles, through descriptors that the host makes. A
descriptor made inside a kernel needs memory that jaxlib allocates at every launch. No CUDA graph may do that,
and XLA runs whole programs as CUDA graphs. Older GPUs load through pointers.
"""

from typing import NamedTuple

import jax_triton
import triton
import triton.language as tl

from nsa_jax.array_typing import Array
from nsa_jax.kernels.triton.dims import padded_heads, split_dim
from nsa_jax.kernels.triton.pieces import Pieces

type Source = Array | jax_triton.TensorDescriptor | None


def key_tiles(array: Array, rows: int, tma: bool) -> tuple[Source, Source]:
    """The sources, one a piece, of tiles of `rows` tokens of one head of `[B, S, K, D]`."""
    if not tma:
        return array, None
    batch, length, heads, dim = array.shape
    return _descriptors(array.reshape(batch, length, heads * dim), (1, rows), dim)


def query_tiles(array: Array, groups: int, tokens: int, tma: bool) -> tuple[Source, Source]:
    """The same for tiles of `tokens` tokens with the padded heads of one of the groups, of `[B, T, N, D]`."""
    if not tma:
        return array, None
    batch, length, num_heads, dim = array.shape
    heads = num_heads // groups
    array = array.reshape(batch, length, groups, heads, dim)
    return _descriptors(array, (1, tokens, 1, padded_heads(heads)), dim)


def _descriptors(array: Array, block: tuple[int, ...], dim: int) -> tuple[Source, Source]:
    first, second = (
        jax_triton.TensorDescriptor.from_array(array, (*block, piece)) if piece else None
        for piece in split_dim(dim)
    )
    return first, second


class Keys(NamedTuple):
    """Where tiles of ROWS keys, or values, of one head of row `b` come from: `[B, length, HEADS, D]`.

    Attributes:
      first, second: a pointer and None, or a descriptor of each piece.
      b, head, length: row of the batch, head, and tokens of the row.
      HEADS: heads of the array: KV heads for keys, query heads for queries.
      ROWS: keys of a tile.
      DIM: `Dim` of a key.
      TMA: whether `first` and `second` are descriptors.
    """

    first: tl.tensor
    second: tl.tensor | None
    b: tl.tensor
    head: tl.tensor
    length: tl.tensor
    HEADS: tl.constexpr
    ROWS: tl.constexpr
    DIM: tl.constexpr
    TMA: tl.constexpr


class Queries(NamedTuple):
    """Where tiles of TOKENS tokens with a group of heads come from: `[B, length, GROUPS, G, D]`.

    Attributes:
      first, second: a pointer and None, or a descriptor of each piece.
      b, group, length: row of the batch, first group of the program's heads, and tokens of the row.
      GROUPS: groups of heads: one a KV head, or one a query head.
      G: query heads of a group.
      PADDED_G: heads of a tile for each token.
      TOKENS: tokens of a tile.
      DIM: `Dim` of a query.
      TMA: whether `first` and `second` are descriptors.
    """

    first: tl.tensor
    second: tl.tensor | None
    b: tl.tensor
    group: tl.tensor
    length: tl.tensor
    GROUPS: tl.constexpr
    G: tl.constexpr
    PADDED_G: tl.constexpr
    TOKENS: tl.constexpr
    DIM: tl.constexpr
    TMA: tl.constexpr


class Rows(NamedTuple):
    """Rows of `[rows, D]`, each a token with one head: `first + offset`, where `inside`."""

    first: tl.tensor
    offset: tl.tensor
    inside: tl.tensor


class QueryTile(NamedTuple):
    """TOKENS neighbouring queries, each with the query heads of one KV head: the rows of a program.

    Attributes:
      b: row of the batch.
      kv_head: the KV head.
      first_query: `b T`, where the batch row begins in arrays `[B, T]`.
      first_token: first token of the tile, among those of the batch row.
      token: token of each row, counted from the tile's first.
      rows: place of each row in arrays `[B T N, D]`.
    """

    b: tl.tensor
    kv_head: tl.tensor
    first_query: tl.tensor
    first_token: tl.tensor
    token: tl.tensor
    rows: Rows


@triton.jit
def query_tile(
    tile, num_queries, KV_HEADS: tl.constexpr, G: tl.constexpr, ROW_HEADS: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Tile number `tile` of the batch row and KV head that the program has on the grid's y axis.

    ROW_HEADS, TOKENS, ROWS: see `dims.TileRows`.
    """
    b = tl.program_id(1) // KV_HEADS
    kv_head = tl.program_id(1) % KV_HEADS
    r = tl.arange(0, ROWS)
    token = r // ROW_HEADS
    head = r % ROW_HEADS
    first_token = tile * TOKENS
    inside = (first_token + token < num_queries) & (head < G)
    if ROWS > TOKENS * ROW_HEADS:
        inside = inside & (token < TOKENS)
    first_query = b.to(tl.int64) * num_queries
    first_row = (first_query + first_token) * (KV_HEADS * G) + kv_head * G
    rows = Rows(first_row, token * (KV_HEADS * G) + head, inside)
    return QueryTile(b, kv_head, first_query, first_token, token, rows)


@triton.jit
def load_keys(keys, token):
    """The tile of keys that starts at `token`; 0 for tokens outside of the row, `0 .. length - 1`."""
    WIDTH: tl.constexpr = keys.DIM.D0 + keys.DIM.D1
    if keys.TMA:
        x0 = keys.first.load([keys.b, token, keys.head * WIDTH]).reshape(keys.ROWS, keys.DIM.D0)
        if keys.DIM.D1 > 0:
            x1 = keys.second.load([keys.b, token, keys.head * WIDTH + keys.DIM.D0])
            x1 = x1.reshape(keys.ROWS, keys.DIM.D1)
        else:
            x1 = None
        tile = Pieces(x0, x1)
    else:
        row = token + tl.arange(0, keys.ROWS)
        pointer = keys.first + (keys.b.to(tl.int64) * keys.length * keys.HEADS + keys.head) * WIDTH
        offset = row.to(tl.int64) * (keys.HEADS * WIDTH)
        tile = load_at(pointer, offset, (row >= 0) & (row < keys.length), keys.DIM)
    return tile


@triton.jit
def load_chosen_keys(keys, token, inside):
    """Loads keys one by one, for padded columns: key `token` of each column where `inside`, else 0."""
    source = keys.b.to(tl.int64) * keys.length + token
    offset = (source * keys.HEADS + keys.head) * (keys.DIM.D0 + keys.DIM.D1)
    return load_at(keys.first, offset, inside & (token < keys.length), keys.DIM)


@triton.jit
def load_queries(queries, token, group):
    """The tile of queries of a group of heads from `token` on; 0 where token or head does not exist."""
    ROWS: tl.constexpr = queries.TOKENS * queries.PADDED_G
    D0: tl.constexpr = queries.DIM.D0
    D1: tl.constexpr = queries.DIM.D1
    if queries.TMA:
        x0 = queries.first.load([queries.b, token, queries.group + group, 0, 0]).reshape(ROWS, D0)
        if D1 > 0:
            x1 = queries.second.load([queries.b, token, queries.group + group, 0, D0]).reshape(ROWS, D1)
        else:
            x1 = None
        tile = Pieces(x0, x1)
    else:
        r = tl.arange(0, ROWS)
        inside = (token + r // queries.PADDED_G < queries.length) & (r % queries.PADDED_G < queries.G)
        row = (queries.b.to(tl.int64) * queries.length + token) * queries.GROUPS + queries.group + group
        start = row * (queries.G * (D0 + D1))
        offset = (r // queries.PADDED_G) * (queries.GROUPS * queries.G) + r % queries.PADDED_G
        tile = load_at(queries.first + start, offset * (D0 + D1), inside, queries.DIM)
    return tile


@triton.jit
def load_rows(pointer, rows, DIM):
    """The rows of the array at `pointer`, 0 where they are not inside."""
    WIDTH: tl.constexpr = DIM.D0 + DIM.D1
    return load_at(pointer + rows.first * WIDTH, rows.offset * WIDTH, rows.inside, DIM)


@triton.jit
def load_at(pointer, offset, inside, DIM):
    """Vectors that start at `pointer + offset`, 0 where not `inside`."""
    x0 = tl.load(pointer + offset[:, None] + tl.arange(0, DIM.D0)[None, :], mask=inside[:, None], other=0.0)
    if DIM.D1 > 0:
        columns = DIM.D0 + tl.arange(0, DIM.D1)
        x1 = tl.load(pointer + offset[:, None] + columns[None, :], mask=inside[:, None], other=0.0)
    else:
        x1 = None
    return Pieces(x0, x1)


@triton.jit
def store_rows(pointer, rows, x, DIM):
    """Stores the rows of the array at `pointer` that are inside, in its dtype."""
    WIDTH: tl.constexpr = DIM.D0 + DIM.D1
    store_at(pointer + rows.first * WIDTH, rows.offset * WIDTH, x, rows.inside, DIM)


@triton.jit
def store_at(pointer, offset, x, inside, DIM):
    """Stores vectors that start at `pointer + offset`, where `inside`, in the pointer's dtype."""
    to = pointer + offset[:, None]
    dtype: tl.constexpr = pointer.dtype.element_ty
    tl.store(to + tl.arange(0, DIM.D0)[None, :], x.first.to(dtype), mask=inside[:, None])
    if DIM.D1 > 0:
        columns = DIM.D0 + tl.arange(0, DIM.D1)
        tl.store(to + columns[None, :], x.second.to(dtype), mask=inside[:, None])
