"""The sizes of all tiles but those of decode steps, by GPU, dtype, heads and dims.

They change the speed and the order of sums, so results change by rounding only. Each kernel has one table, in
the module of its branch or task; those of decode steps are in `decode/sizes.py`. `choose_sizes` takes the
first row whose `Bounds` hold and whose tiles fit into shared memory. `by` says what chose the row: a file of
`benchmarks/results`; a section of `docs/kernels.md` or `docs/kernel_log.md`; "other dims", the tuning runs in
the table "Other dims" of `docs/kernel_log.md`; or "compiled": never measured, but it compiles with no more
spills than the tests allow.

Does not import Triton.
"""

import dataclasses
from typing import NamedTuple, Protocol, runtime_checkable

from nsa_jax.kernels.triton.dims import padded_heads

KIB = 1024
AMPERE, ADA, HOPPER = 80, 89, 90  # A100; consumer cards, which have less shared memory; Hopper and Blackwell
ALL, BEFORE_HOPPER = (AMPERE, ADA, HOPPER), (AMPERE, ADA)

FEW_HEADS = "docs/kernel_log.md, few heads"  # what chose most rows for up to 4 query heads a KV head
ONE_MORE = "docs/kernel_log.md, one program more on an sm"  # caps of registers, and what goes with them

# Shared memory that one program may have.
SHARED_BYTES = {AMPERE: 163 * KIB, ADA: 99 * KIB, HOPPER: 227 * KIB}


class Shape(NamedTuple):
    """What sizes depend on.

    Attributes:
      gpu: AMPERE, ADA or HOPPER.
      float_bytes: of one number of the query, 2 or 4.
      heads: query heads of a KV head.
      key_dim, value_dim: H and V.
      from_0: whether all ranges of keys are known to begin at key 0 (the compressed branch of plain rows).
      plain: whether the kernel computes which keys a row sees, instead of loading it for each row, as it must
        for packed rows, and takes keys as whole tiles.
      gated: whether the kernel ends in the gated sum of the branches.
      block_size: tokens of a selection block, which are the most keys of a step.
      block_columns: padded columns of two selection blocks, which are the fewest columns of a tile of scores.
      blackwell: whether the GPU is a data-centre Blackwell, which mostly has the sizes of HOPPER.
    """

    gpu: int
    float_bytes: int
    heads: int
    key_dim: int
    value_dim: int
    from_0: bool = False
    plain: bool = False
    gated: bool = False
    block_size: int = 128
    block_columns: int = 16
    blackwell: bool = False

    @property
    def dims(self) -> int:
        """Key and value dim together."""
        return self.key_dim + self.value_dim

    @property
    def long_blocks(self) -> bool:
        """Whether a selection block has at least 128 tokens."""
        return self.block_size >= 128

    def rows(self, wanted: int) -> int:
        """Rows of a tile of queries: at least 16, and at least the padded heads of one token."""
        return max(wanted, 16, padded_heads(self.heads))

    def operand_bytes(self) -> int:
        """Bytes of one number of an operand of `tl.dot` in shared memory.

        A float32 product is three TF32 products, whose operands take half as much again.
        """
        return 6 if self.float_bytes == 4 else self.float_bytes


class Bounds(NamedTuple):
    """The calls that a row of a table is for, by default all with 16-bit numbers on Hopper.

    The GPU, `float_bytes` and flags must match (a flag of None matches both); other numbers are upper bounds.
    """

    gpus: tuple[int, ...] = (HOPPER,)
    float_bytes: int = 2
    heads: int = 256
    largest_dim: int = 256
    smallest_dim: int = 256
    value_dim: int = 256
    dims: int = 512
    from_0: bool | None = None
    plain: bool | None = None
    gated: bool | None = None
    blackwell: bool | None = None
    long_blocks: bool | None = None

    def hold(self, shape: Shape) -> bool:
        """Whether the row is for calls of this shape."""
        return (
            shape.gpu in self.gpus
            and shape.float_bytes == self.float_bytes
            and shape.heads <= self.heads
            and max(shape.key_dim, shape.value_dim) <= self.largest_dim
            and min(shape.key_dim, shape.value_dim) <= self.smallest_dim
            and shape.value_dim <= self.value_dim
            and shape.dims <= self.dims
            and self.from_0 in (None, shape.from_0)
            and self.plain in (None, shape.plain)
            and self.gated in (None, shape.gated)
            and self.blackwell in (None, shape.blackwell)
            and self.long_blocks in (None, shape.long_blocks)
        )


@runtime_checkable
class Sizes(Protocol):
    """The sizes of one kernel."""

    def shared_bytes(self, shape: Shape) -> int:
        """Shared memory that a program takes; 0 where the bounds alone choose the row."""
        ...


@dataclasses.dataclass(frozen=True)
class Row[S: Sizes]:
    """One row of a table."""

    bounds: Bounds
    sizes: S
    by: str


def find_sizes[S: Sizes](table: tuple[Row[S], ...], shape: Shape) -> S | None:
    """The sizes of the first row that is for this shape and fits; None if there is none."""
    suitable = (row.sizes for row in table if row.bounds.hold(shape))
    return next((x for x in suitable if x.shared_bytes(shape) <= SHARED_BYTES[shape.gpu]), None)


def choose_sizes[S: Sizes](table: tuple[Row[S], ...], shape: Shape) -> S:
    """The sizes of the first row that is for this shape and fits; if none fits, of the last one for it."""
    return find_sizes(table, shape) or [row.sizes for row in table if row.bounds.hold(shape)][-1]
