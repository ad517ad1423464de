"""Sizes of the kernels that score and choose blocks."""

from typing import NamedTuple

from nsa_jax.kernels.triton.sizes import (
    ALL,
    BEFORE_HOPPER,
    FEW_HEADS,
    HOPPER,
    KIB,
    ONE_MORE,
    SHARED_BYTES,
    Bounds,
    Row,
    Shape,
)

HEADS_OF_AN_INDEX = "docs/kernel_log.md, several index heads"

SCORE_CONVERSION_BYTES = 15 * KIB  # beside tiles: sums over a block's columns, as compiled


class SelectionSizes(NamedTuple):
    """Sizes of the two kernels of the block selection.

    Attributes:
      tokens: query tokens of a tile of scores.
      columns: compressed keys of a tile of scores, a power of two; at least those of two blocks.
      num_warps, num_stages: of the score kernel.
      column_tiles: tiles of scores that one program makes, one after the other.
      best_columns: scores of a row that the top-n kernel holds in registers at a time, a power of two.
      buffer_bytes: most bytes of the scores of a chunk, unless one tile of tokens takes more.
      registers: most registers of a thread of the score kernel; None leaves it to the compiler.
    """

    tokens: int = 64
    columns: int = 128
    num_warps: int = 4
    num_stages: int = 3
    column_tiles: int = 1
    best_columns: int = 128
    buffer_bytes: int = 256 * KIB * KIB
    registers: int | None = None

    def shared_bytes(self, shape: Shape) -> int:
        """Compressed keys, queries of all stages, and the parts of float32 operands."""
        columns = max(self.columns, shape.block_columns)
        parts = self.tokens + columns if shape.float_bytes == 4 else 0
        rows = columns + self.num_stages * self.tokens + parts
        return rows * shape.key_dim * shape.float_bytes + SCORE_CONVERSION_BYTES


_S = SelectionSizes
SELECTION = (
    Row(
        Bounds(heads=4, largest_dim=64, plain=True, blackwell=False), _S(64, 64, 4, 3, registers=96), ONE_MORE
    ),
    Row(Bounds(heads=4, largest_dim=64), _S(64, 64, 4, 3), FEW_HEADS),
    Row(Bounds(largest_dim=128, plain=True, blackwell=False), _S(64, 128, 4, 2, registers=168), ONE_MORE),
    Row(Bounds(largest_dim=192), _S(64, 128, 4, 3), "h100_long"),
    Row(Bounds(heads=4), _S(64, 128, 4, 1), FEW_HEADS),
    *(
        Row(Bounds(gpus, float_bytes), sizes, by)
        for float_bytes in (2, 4)
        for gpus, sizes, by in (
            ((HOPPER,), _S(64, 128, 4, 3), "h100_long"),
            ((HOPPER,), _S(64, 128, 4, 2), "compiled"),
            (BEFORE_HOPPER, _S(64, 128, 8, 3), "compiled"),
            (BEFORE_HOPPER, _S(64, 128, 8, 2), "compiled"),
            (ALL, _S(64, 64, 4, 2), "compiled"),
            (ALL, _S(32, 64, 4, 2), "compiled"),
            (ALL, _S(32, 32, 4, 2), "compiled"),
            (ALL, _S(32, 32, 4, 1), "compiled"),
            (ALL, _S(16, 32, 4, 1), "compiled"),
        )
    ),
)


class IndexSizes(NamedTuple):
    """Sizes of the kernel that scores blocks by an indexer, and of the top-n kernel after it.

    Attributes:
      pairs: (query token, KV head) pairs of a tile, a power of two; fewer where a call has fewer.
      keys: index keys of a tile, a power of two; at least those of a block.
      num_warps, num_stages: of the score kernel.
      held_heads: most index heads whose queries a program holds while keys stream in; with more, it holds
        keys.
      key_tiles: most tiles of keys that one program takes, one after the other.
      best_columns, buffer_bytes: as in `SelectionSizes`.
    """

    pairs: int
    keys: int
    num_warps: int
    num_stages: int
    held_heads: int = 1
    key_tiles: int = 32
    best_columns: int = 128
    buffer_bytes: int = 256 * KIB * KIB

    def shared_bytes(self, shape: Shape) -> int:
        """The tiles that are held, those of all stages, and the parts of float32 operands."""
        keys = max(self.keys, shape.block_columns)
        held, streamed = keys, self.pairs
        if shape.heads <= self.held_heads:
            held, streamed = shape.heads * self.pairs, keys
        parts = self.pairs + keys if shape.float_bytes == 4 else 0
        rows = held + self.num_stages * streamed + parts
        return rows * shape.key_dim * shape.float_bytes + INDEX_CONVERSION_BYTES


def index_gradient_tile(float_bytes: int, dim: int) -> tuple[int, int]:
    """Query tokens, and most keys, of a tile of an indexer's key gradients, and the warps of a program."""
    return (64, 4) if float_bytes * dim <= 256 else (32, 4)


CHOSEN_STAGES = 2  # tiles of queries in flight where the chosen blocks are scored
_CHOSEN_FLOATS = 8192  # most numbers of a tile there


def chosen_score_rows(float_bytes: int, dim: int, block_size: int, gpu: int) -> int:
    """Pairs of a query and a chosen block in a tile of scores; 0 if no tile fits into shared memory."""
    parts = 2 if float_bytes == 4 else 1  # of an operand of a product
    for rows in (64, 32, 16):
        shared_bytes = parts * (block_size + CHOSEN_STAGES * rows) * dim * float_bytes
        if rows * block_size <= _CHOSEN_FLOATS and shared_bytes + INDEX_CONVERSION_BYTES <= SHARED_BYTES[gpu]:
            return rows
    return 0


def chosen_gradient_tile(dim: int) -> tuple[int, int]:
    """Most keys, and pairs, of a tile of the key gradients of chosen blocks."""
    padded = 1 << (dim - 1).bit_length()
    keys = max(_CHOSEN_FLOATS // padded, 16)
    return keys, min(keys, 64)


INDEX_CONVERSION_BYTES = 2 * KIB  # beside tiles: block maxima of a tile, as compiled
_I = IndexSizes
INDEX = (
    # Two programs share an SM; of three stages, one.
    Row(Bounds(heads=1), _I(128, 128, 8, 2), HEADS_OF_AN_INDEX),
    Row(Bounds(heads=4, largest_dim=64), _I(64, 128, 4, 3, held_heads=4), HEADS_OF_AN_INDEX),
    Row(Bounds(heads=8, largest_dim=32), _I(64, 128, 4, 3, held_heads=8), HEADS_OF_AN_INDEX),
    Row(Bounds(largest_dim=128), _I(64, 128, 4, 2), HEADS_OF_AN_INDEX),
    Row(Bounds(), _I(128, 128, 8, 2), HEADS_OF_AN_INDEX),
    Row(Bounds(BEFORE_HOPPER), _I(128, 128, 8, 2), "compiled"),
    Row(Bounds(ALL), _I(64, 64, 8, 2), "compiled"),
    Row(Bounds((HOPPER,), 4, heads=1), _I(64, 64, 8, 2), "compiled"),
    Row(Bounds((HOPPER,), 4), _I(64, 64, 4, 2), "compiled"),
    *(
        Row(Bounds(ALL, float_bytes), sizes, "compiled")
        for float_bytes in (2, 4)
        for sizes in (_I(32, 64, 8, 2), _I(32, 32, 8, 1), _I(16, 32, 4, 1))
    ),
)

# A call whose queries make few tiles cuts the keys of a row into so many groups that there are about
# INDEX_PROGRAMS programs: 8 for each of 132 SMs.
INDEX_PROGRAMS = 1024
