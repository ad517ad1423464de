"""The sizes of all tiles but those of decode steps, by GPU, dtype, heads and dims.

They change the speed and the order of sums, so results change by rounding only. Each kernel has one table:
`choose_sizes` takes the first row whose `Bounds` hold and whose tiles fit into shared memory. `by` says what
chose the row: a file of `benchmarks/results`; a section of `docs/kernels.md` or `docs/kernel_log.md`; "other
dims", the tuning runs in the table "Other dims" of `docs/kernel_log.md`; or "compiled": never measured, but
it compiles with no more spills than the tests allow.

Does not import Triton.
"""

import dataclasses
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

from nsa_jax.kernels.triton.dims import padded_heads

KIB = 1024
AMPERE, ADA, HOPPER = 80, 89, 90  # A100; consumer cards, which have less shared memory; Hopper and Blackwell
ALL, BEFORE_HOPPER = (AMPERE, ADA, HOPPER), (AMPERE, ADA)

HEADS_OF_AN_INDEX = "docs/kernel_log.md, several index heads"
FEW_HEADS = "docs/kernel_log.md, few heads"  # what chose most rows for up to 4 query heads a KV head
KEYS_AS_ROWS = "docs/kernel_log.md, keys as rows, and blocks of 128"

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


# --- Ranges: the compressed and the window branch, and the selected branch of short rows --------------------


class RangeQuerySizes(NamedTuple):
    """Sizes of the forward and of the gradient of the queries.

    Attributes:
      rows: query tokens times padded heads of a tile.
      keys: keys of a step.
      num_warps: warps of a program.
      num_stages: steps whose loads are in flight.
      registers: most registers of a thread; None leaves it to the compiler. At 128, four programs of four
        warps share an SM, at 168 three.
      peel: whether the steps at the ends of a tile's keys run before the loop. With wgmma the loop then uses
        the copy of the queries in shared memory that was made for these steps, and holds no queries in
        registers. Without wgmma, peeled steps make the loop hold them in registers.
      halve: whether the steps at both ends of ranges that begin at 0 have half as many keys; with `peel`.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    registers: int | None = None
    peel: bool = True
    halve: bool = False

    def shared_bytes(self, shape: Shape) -> int:
        """Not counted: the bounds alone choose the row."""
        return 0


_Q = RangeQuerySizes
RANGE_FORWARD = (
    Row(Bounds(heads=4, largest_dim=64, from_0=True), _Q(64, 128, 4, 1, 128, halve=True), FEW_HEADS),
    Row(Bounds(heads=64, largest_dim=192, value_dim=128, from_0=True),
        _Q(64, 128, 4, 1, 168, halve=True), "h100_long, h100_192_128"),
    Row(Bounds(heads=64, value_dim=96), _Q(64, 64, 4, 1, 128), "other dims"),
    Row(Bounds(heads=64, value_dim=128, gated=False), _Q(64, 64, 4, 1, 128), "h100_long, h100_192_128"),
    Row(Bounds(heads=64, value_dim=192), _Q(64, 64, 4, 1, 168), "h100_long (gated), other dims"),
    Row(Bounds(heads=64), _Q(64, 64, 4, 1), "other dims"),
    Row(Bounds(), _Q(64, 64, 8, 1), "compiled"),
    Row(Bounds(BEFORE_HOPPER, largest_dim=128), _Q(128, 64, 8, 2, peel=False), "compiled"),
    Row(Bounds((AMPERE,)), _Q(64, 64, 4, 2, peel=False), "compiled"),
    Row(Bounds((ADA,)), _Q(64, 32, 4, 2, peel=False), "compiled"),
    Row(Bounds(float_bytes=4, largest_dim=64), _Q(64, 64, 4, 1, peel=False), "docs/kernels.md, float32"),
    Row(Bounds(ALL, 4, largest_dim=128), _Q(32, 32, 4, 1, peel=False), "docs/kernels.md, float32"),
    Row(Bounds(ALL, 4), _Q(16, 32, 4, 1, peel=False), "compiled"),
)  # fmt: skip
RANGE_QUERY_GRADIENT = (
    Row(Bounds(heads=4, largest_dim=64), _Q(64, 32, 4, 3), FEW_HEADS),
    Row(Bounds(heads=4, largest_dim=128), _Q(64, 64, 4, 1, 168), FEW_HEADS),
    Row(Bounds(heads=64, largest_dim=128, from_0=True), _Q(64, 64, 4, 2), "h100_long"),
    Row(Bounds(heads=64, largest_dim=64), _Q(64, 64, 4, 1, 128), "other dims"),
    Row(Bounds(heads=64, largest_dim=128), _Q(64, 64, 4, 1, 168), "h100_long"),
    Row(Bounds(heads=64, dims=320), _Q(64, 32, 4, 3), "h100_192_128"),
    Row(Bounds(heads=64, dims=384), _Q(64, 32, 4, 2), "other dims"),
    Row(Bounds(heads=4), _Q(128, 64, 8, 1), FEW_HEADS),
    Row(Bounds(heads=64), _Q(64, 32, 4, 3), "other dims"),
    Row(Bounds(smallest_dim=128), _Q(64, 64, 8, 2), "compiled"),
    Row(Bounds(), _Q(64, 32, 8, 2), "compiled"),
    Row(Bounds((AMPERE,), largest_dim=128), _Q(64, 64, 4, 2, peel=False), "compiled"),
    Row(Bounds((ADA,), largest_dim=128), _Q(64, 32, 4, 2, peel=False), "compiled"),
    Row(Bounds(BEFORE_HOPPER), _Q(64, 32, 4, 1, peel=False), "compiled"),
    Row(Bounds(float_bytes=4, largest_dim=64), _Q(64, 32, 4, 1, peel=False), "docs/kernels.md, float32"),
    Row(Bounds(ALL, 4, largest_dim=128), _Q(32, 32, 4, 1, peel=False), "docs/kernels.md, float32"),
    Row(Bounds(ALL, 4), _Q(16, 32, 4, 1, peel=False), "compiled"),
)  # fmt: skip

# Shared memory beside tiles, in which sums and logits change their register layout, by bytes of a float; as
# seen in compiled code.
RANGE_CONVERSION_BYTES = {2: 16 * KIB, 4: 32 * KIB}


class RangeKeySizes(NamedTuple):
    """Sizes of the gradients of keys and values.

    Attributes:
      keys: keys of a tile.
      rows: query tokens times padded heads of a step.
      num_warps: warps of a program.
      num_stages: steps whose loads are in flight.
      segments: parts into which the queries are cut; None chooses by shape.
      keys_first: whether logits are held with keys as rows, so that no product needs them transposed.
    """

    keys: int
    rows: int
    num_warps: int
    num_stages: int
    segments: int | None = None
    keys_first: bool = True

    def shared_bytes(self, shape: Shape) -> int:
        """Keys, values, and the rows of all stages."""
        rows = self.keys + self.num_stages * shape.rows(self.rows)
        return rows * shape.dims * shape.float_bytes + RANGE_CONVERSION_BYTES[shape.float_bytes]


_K = RangeKeySizes
RANGE_KEY_GRADIENTS = (
    Row(Bounds(heads=64, dims=192), _K(64, 64, 4, 3), "other dims"),
    Row(Bounds(heads=4, dims=256), _K(64, 64, 4, 2), FEW_HEADS),
    Row(Bounds(heads=64, dims=256), _K(128, 64, 8, 3), "h100_long"),
    Row(Bounds(heads=64, dims=384), _K(128, 32, 8, 3), "h100_192_128"),
    Row(Bounds(heads=64, dims=384), _K(128, 32, 8, 2), "compiled"),
    # On Blackwell it takes too much shared memory, and the parts below too much tensor memory.
    Row(Bounds(heads=4, blackwell=False), _K(64, 64, 8, 2), FEW_HEADS),
    Row(Bounds(dims=256), _K(64, 64, 8, 3), "compiled"),
    Row(Bounds(dims=256), _K(64, 64, 8, 2), "compiled"),
    Row(Bounds(dims=256), _K(64, 64, 8, 1), "compiled"),
    Row(Bounds(), _K(64, 32, 8, 3), "other dims"),
    Row(Bounds(), _K(64, 32, 8, 2), "compiled"),
    Row(Bounds(), _K(64, 32, 8, 1), "compiled"),
    Row(Bounds((AMPERE,), dims=256), _K(64, 32, 4, 2), "compiled"),
    Row(Bounds((ADA,), dims=256), _K(64, 32, 4, 1), "compiled"),
    Row(Bounds(BEFORE_HOPPER), _K(32, 32, 8, 1), "compiled"),
    Row(Bounds(float_bytes=4), _K(32, 32, 4, 1, keys_first=False), "docs/kernels.md, float32"),
    Row(Bounds(float_bytes=4), _K(16, 16, 4, 1, keys_first=False), "compiled"),
    Row(Bounds(BEFORE_HOPPER, 4), _K(32, 32, 4, 1), "compiled"),
    Row(Bounds(BEFORE_HOPPER, 4), _K(16, 16, 4, 1), "compiled"),
)

# The queries of a compressed branch are cut into as many segments as give RANGE_PROGRAMS programs: 16 for
# each of 132 SMs, about half of them empty in the causal case. But a segment has at least `segment_tokens` (a
# shorter one takes longer to start and to store than to sum), and the sums take at most SEGMENT_BYTES.
RANGE_PROGRAMS = 2048
SEGMENT_BYTES = 300_000_000


def segment_tokens(heads: int) -> int:
    """Fewest queries of a segment, by the query heads of a KV head (docs/kernel_log.md, few heads)."""
    return 512 if heads <= 4 else 256


# --- Blocks: the selected branch ----------------------------------------------------------------------------


class SelectedQuerySizes(NamedTuple):
    """Sizes of the forward and of the gradient of the queries.

    Attributes:
      rows: tokens times padded query heads of a tile, at least 16, of at most 32 tokens. 64 rows make one
        wgmma. float32 takes 16, because its products limit the speed and small tiles mask fewer of them.
      keys: most keys of a step; a block with fewer is one step.
      num_warps: warps of a program.
      num_stages: steps whose loads are in flight.
      registers: most registers of a thread; None leaves it to the compiler.
      peel: whether the last step runs before the loops, see `RangeQuerySizes`.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    registers: int | None = None
    peel: bool = True


class SelectedForwardSizes(SelectedQuerySizes):
    """Sizes of the forward."""

    __slots__ = ()

    def shared_bytes(self, shape: Shape) -> int:
        """Upper bound: queries, keys, values of all stages. A single stage holds keys or values."""
        keys = self.num_stages * min(self.keys, shape.block_size)
        return (shape.rows(self.rows) * shape.key_dim + keys * shape.dims) * shape.operand_bytes()


class SelectedGradientSizes(SelectedQuerySizes):
    """Sizes of the gradient of the queries."""

    __slots__ = ()

    def shared_bytes(self, shape: Shape) -> int:
        """Queries, output gradients, keys and values of all stages; on Hopper d_logits too, for wgmma."""
        rows, keys = shape.rows(self.rows), min(self.keys, shape.block_size)
        d_logits = 2 * rows * keys * shape.float_bytes if self.peel else 0
        return (rows + self.num_stages * keys) * shape.dims * shape.operand_bytes() + d_logits


_F = SelectedForwardSizes
SELECTED_FORWARD = (
    Row(Bounds(heads=1, largest_dim=128, long_blocks=True), _F(32, 128, 2, 1), KEYS_AS_ROWS),
    Row(Bounds(heads=1, largest_dim=128), _F(32, 64, 1, 1), "h100_1_head_per_kv_head"),
    Row(Bounds(heads=1), _F(32, 64, 2, 1), "other dims"),
    Row(Bounds(heads=64, largest_dim=64, long_blocks=True), _F(64, 128, 4, 1, 128), KEYS_AS_ROWS),
    Row(Bounds(heads=64, largest_dim=192, value_dim=128, long_blocks=True),
        _F(64, 128, 4, 1, 168), KEYS_AS_ROWS),
    Row(Bounds(heads=64, value_dim=128), _F(64, 64, 4, 1, 128), "h100_long, h100_192_128"),
    Row(Bounds(heads=64, value_dim=192), _F(64, 64, 4, 1, 168), "other dims"),
    Row(Bounds(heads=4, long_blocks=True), _F(64, 128, 4, 1), KEYS_AS_ROWS),
    Row(Bounds(heads=64), _F(64, 64, 4, 1), "other dims"),
    Row(Bounds(), _F(64, 64, 8, 1), "compiled"),
    *(Row(Bounds(BEFORE_HOPPER, heads=1, dims=384), _F(32, keys, 1, 2, peel=False), "compiled")
      for keys in (64, 32)),
    *(Row(Bounds(BEFORE_HOPPER, heads=1), _F(32, keys, 8, 2, peel=False), "compiled") for keys in (64, 32)),
    *(Row(Bounds(BEFORE_HOPPER, heads=64, dims=384), _F(64, keys, 4, 2, peel=False), "compiled")
      for keys in (64, 32)),
    *(Row(Bounds(BEFORE_HOPPER), _F(64, keys, 8, 2, peel=False), "compiled") for keys in (64, 32, 16)),
    Row(Bounds(ALL, 4, heads=64, dims=384), _F(16, 32, 4, 1, peel=False), "docs/kernels.md, float32"),
    Row(Bounds(ALL, 4, heads=64, dims=384), _F(16, 16, 4, 1, peel=False), "compiled"),
    Row(Bounds(ALL, 4), _F(16, 32, 8, 1, peel=False), "compiled"),
    Row(Bounds(ALL, 4), _F(16, 16, 8, 1, peel=False), "compiled"),
)  # fmt: skip


def weighing_registers(sizes: SelectedForwardSizes, heads: int) -> int | None:
    """Most registers of a thread of the forward that also gives the probabilities of slots.

    At 128 it spills with many heads or steps of 128 keys. With 64 / 4 heads of 128 at 64k tokens (R) they
    then add 24 % to the kernel's time, at 168 just 6 %.
    """
    return 168 if sizes.registers == 128 and (heads > 4 or sizes.keys > 64) else sizes.registers


_G = SelectedGradientSizes
SELECTED_QUERY_GRADIENT = (
    Row(Bounds(heads=1), _G(32, 32, 2, 2), "h100_1_head_per_kv_head"),
    Row(Bounds(heads=4, largest_dim=64, long_blocks=True), _G(64, 64, 4, 2, 168), KEYS_AS_ROWS),
    Row(Bounds(heads=64, largest_dim=128), _G(64, 64, 4, 2), "h100_long"),
    Row(Bounds(heads=64, dims=320), _G(64, 32, 4, 3), "h100_192_128"),
    Row(Bounds(heads=64, dims=384), _G(64, 32, 4, 2), "other dims"),
    Row(Bounds(heads=4), _G(64, 64, 4, 2), FEW_HEADS),
    Row(Bounds(heads=64), _G(64, 32, 4, 3), "other dims"),
    Row(Bounds(largest_dim=128), _G(64, 64, 8, 2), "compiled"),
    Row(Bounds(largest_dim=128), _G(64, 32, 8, 2), "compiled"),
    Row(Bounds(dims=320), _G(64, 32, 8, 3), "compiled"),
    Row(Bounds(dims=384), _G(64, 32, 8, 2), "compiled"),
    Row(Bounds(), _G(64, 32, 8, 3), "compiled"),
    Row(Bounds(), _G(64, 16, 8, 2), "compiled"),
    Row(Bounds(), _G(64, 16, 8, 1), "compiled"),
    Row(Bounds(BEFORE_HOPPER, heads=1), _G(32, 32, 2, 2, peel=False), "compiled"),
    *(Row(Bounds(BEFORE_HOPPER, heads=64, dims=320), _G(64, keys, 4, 2, peel=False), "compiled")
      for keys in (64, 32)),
    *(Row(Bounds(BEFORE_HOPPER), _G(64, keys, 8, 2, peel=False), "compiled") for keys in (64, 32, 16)),
    Row(Bounds(BEFORE_HOPPER), _G(64, 16, 8, 1, peel=False), "compiled"),
    Row(Bounds(ALL, 4, heads=64), _G(16, 32, 4, 1, peel=False), "docs/kernels.md, float32"),
    Row(Bounds(ALL, 4, heads=64), _G(16, 16, 4, 1, peel=False), "compiled"),
    Row(Bounds(ALL, 4), _G(16, 32, 8, 1, peel=False), "compiled"),
    Row(Bounds(ALL, 4), _G(16, 16, 8, 1, peel=False), "compiled"),
)  # fmt: skip


class SelectedKeySizes(NamedTuple):
    """Sizes of the gradients of keys and values.

    Attributes:
      rows: of a step, each a query with one head; at least 16, and at least the padded heads of a KV head.
      keys: most keys of a program; it takes a whole block that has fewer.
      num_warps: warps of a program.
      num_stages: steps whose loads are in flight. From 3 on, tokens are loaded a step early, so that rows can
        be loaded two steps early; at 2, Triton issues the loads at the end of the step before.
      item: most queries of a program; None chooses by heads.
      keys_first: whether logits are held with keys as rows, so that no product needs them transposed.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    item: int | None = None
    keys_first: bool = False

    def shared_bytes(self, shape: Shape) -> int:
        """Upper bound: rows of all stages, with wgmma keys and values (else in registers), and more.

        That is numbers of rows or, where queries are rows, twice the logits to transpose.
        """
        rows, keys = shape.rows(self.rows), min(self.keys, shape.block_size)
        if shape.float_bytes == 4:
            return (rows + keys) * shape.dims * shape.operand_bytes()
        held = keys * shape.dims if shape.gpu == HOPPER else 0
        beside = SCALAR_BYTES if self.keys_first else 2 * rows * keys * shape.float_bytes
        return (self.num_stages * rows * shape.dims + held) * shape.float_bytes + beside


SCALAR_BYTES = 4 * KIB  # beside tiles: numbers of rows, which change their register layout, as compiled
_B = SelectedKeySizes
_KEYS_FIRST = partial(SelectedKeySizes, keys_first=True)
SELECTED_KEY_GRADIENTS = (
    Row(Bounds(heads=4, dims=128, long_blocks=True), _KEYS_FIRST(32, 128, 4, 2), KEYS_AS_ROWS),
    Row(Bounds(dims=128), _KEYS_FIRST(128, 64, 4, 2), KEYS_AS_ROWS),
    Row(Bounds(heads=64, dims=256), _KEYS_FIRST(64, 64, 4, 3), KEYS_AS_ROWS),
    Row(Bounds(dims=256), _B(64, 64, 4, 2), "compiled"),
    Row(Bounds(dims=256), _B(64, 64, 4, 1), "compiled"),
    Row(Bounds(heads=32, dims=320), _KEYS_FIRST(32, 64, 4, 2), KEYS_AS_ROWS),
    Row(Bounds(heads=32, dims=384), _B(32, 64, 4, 2), "h100_192_128, other dims"),
    Row(Bounds(heads=4), _B(128, 64, 8, 1), FEW_HEADS),
    Row(Bounds(), _B(32, 64, 8, 2), "other dims"),
    Row(Bounds(), _B(32, 64, 8, 1), "compiled"),
    Row(Bounds(BEFORE_HOPPER, dims=256), _B(64, 64, 4, 2), "compiled"),
    Row(Bounds(BEFORE_HOPPER, dims=256), _B(64, 64, 4, 1), "compiled"),
    Row(Bounds(BEFORE_HOPPER), _B(32, 32, 8, 2), "compiled"),
    Row(Bounds(BEFORE_HOPPER), _B(32, 32, 8, 1), "compiled"),
    Row(Bounds(ALL, 4), _B(32, 32, 4, 1), "docs/kernels.md, float32"),
    Row(Bounds(ALL, 4), _B(32, 16, 4, 1), "compiled"),
    Row(Bounds(ALL, 4), _B(16, 16, 4, 1), "compiled"),
)


def item_queries(heads: int, pairs: int) -> int:
    """Most queries of an item of the gradients of keys, where the table does not say it.

    The more, the fewer partial sums there are to add up (h100_long), as long as the items fill the GPU.
    """
    return fitting_item({1: 8192, 2: 4096}.get(padded_heads(heads), 2048), pairs, least=1024)


def fitting_item(item: int, pairs: int, least: int) -> int:
    """`item`, halved down to `least` until that cuts the pairs of a query and a block into FULL_ITEMS."""
    while item > least and pairs < item * FULL_ITEMS:
        item //= 2
    return item


FULL_ITEMS = 1024  # about 8 for each of 132 SMs


class SelectedPartSizes(NamedTuple):
    """Sizes of the kernels that have a whole block outside and leave parts.

    Attributes:
      rows: rows of a tile, each a token with one query head, whatever heads a KV head has.
      num_warps: warps of a program.
      num_stages: steps whose loads are in flight.
      registers: most registers of a thread; None leaves it to the compiler.
      item: most queries of a program.
      fewest_keys: of a row: in shorter rows neighbours share too much, even where they choose at random.
      most_shared: choices of 4 neighbours for each block that some of them chose, up to which these kernels
        are faster than those with queries outside; 4 where they always are.
      unasked: pairs of a query and a block up to which these kernels run alone in the forward of a training
        step, whose backward has the same lists: there it takes longer to ask what neighbours share than the
        better way saves. A forward alone takes tiles there: it would make the lists for itself.
    """

    rows: int
    num_warps: int
    num_stages: int
    registers: int | None
    item: int
    fewest_keys: int
    most_shared: float
    unasked: int = 0

    def shared_bytes(self, shape: Shape) -> int:
        """The block's keys and values, rows of all stages, twice the logits."""
        rows = shape.block_size + self.num_stages * self.rows
        return (rows * shape.dims + 2 * self.rows * shape.block_size) * shape.float_bytes


_O = SelectedPartSizes
# Calls for which there is no row take the kernels with queries outside. Measured were 3 and 4 heads of 64, 4
# of 128 and 2 of 256; with fewer heads tiles mask more, and a part is smaller.
OUTPUT_PARTS = (
    Row(Bounds(heads=4, largest_dim=64), _O(64, 4, 1, 128, 512, 6144, 2.1, 2**19), FEW_HEADS),
    Row(Bounds(heads=4, largest_dim=128), _O(64, 4, 1, 128, 512, 12288, 1.7), FEW_HEADS),
    Row(Bounds(heads=4), _O(64, 4, 1, None, 512, 12288, 2.4), FEW_HEADS),
)
GRADIENT_PARTS = (
    Row(Bounds(heads=3, largest_dim=64), _O(64, 4, 3, None, 1024, 6144, 4), FEW_HEADS),
    Row(Bounds(heads=4, largest_dim=128), _O(64, 4, 3, None, 1024, 6144, 2.4), FEW_HEADS),
    Row(Bounds(heads=4, blackwell=False), _O(128, 8, 1, None, 1024, 6144, 2.6), FEW_HEADS),
)


# --- Selection ----------------------------------------------------------------------------------------------

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
    """

    tokens: int = 64
    columns: int = 128
    num_warps: int = 4
    num_stages: int = 3
    column_tiles: int = 1
    best_columns: int = 128
    buffer_bytes: int = 256 * KIB * KIB

    def shared_bytes(self, shape: Shape) -> int:
        """Compressed keys, queries of all stages, and the parts of float32 operands."""
        columns = max(self.columns, shape.block_columns)
        parts = self.tokens + columns if shape.float_bytes == 4 else 0
        rows = columns + self.num_stages * self.tokens + parts
        return rows * shape.key_dim * shape.float_bytes + SCORE_CONVERSION_BYTES


_S = SelectionSizes
SELECTION = (
    Row(Bounds(heads=4, largest_dim=64), _S(64, 64, 4, 3), FEW_HEADS),
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

# --- Block probabilities ------------------------------------------------------------------------------------


class ProbabilitySizes(NamedTuple):
    """Sizes of the two kernels of block probabilities.

    Attributes:
      rows: query tokens times padded heads of a tile.
      keys: keys of a step, a power of two of at least 16.
      num_warps: warps of a program.
      num_stages: steps whose loads are in flight.
      registers: most registers of a thread; None leaves it to the compiler.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    registers: int | None = None

    def shared_bytes(self, shape: Shape) -> int:
        """Queries, and the keys of all stages."""
        return (shape.rows(self.rows) + self.num_stages * self.keys) * shape.key_dim * shape.operand_bytes()


_P = ProbabilitySizes
BLOCK_PROBABILITIES = (
    Row(Bounds(), _P(128, 128, 8, 2, 128), "compiled"),
    Row(Bounds(), _P(64, 64, 8, 2), "compiled"),
    Row(Bounds(BEFORE_HOPPER), _P(128, 64, 8, 2), "compiled"),
    Row(Bounds(BEFORE_HOPPER), _P(64, 64, 8, 2), "compiled"),
    Row(Bounds(ALL), _P(64, 32, 8, 1), "compiled"),
    Row(Bounds(ALL), _P(16, 16, 8, 1), "compiled"),
    Row(Bounds(ALL, 4, largest_dim=64), _P(32, 32, 4, 1), "compiled"),
    Row(Bounds(ALL, 4), _P(16, 32, 4, 1), "compiled"),
    Row(Bounds(ALL, 4), _P(16, 16, 8, 1), "compiled"),
)

# --- Gated sum ----------------------------------------------------------------------------------------------

GATED_SUM_ROWS = 32  # rows of a program

# --- Recomputing what is not finite: it is rare, so speed hardly matters ------------------------------------

RECOMPUTED_HEADS = 16  # query heads at a time: the fewest rows of a product
RECOMPUTED_KEYS = 32  # keys of a step
RECOMPUTED_KEYS_OF_A_PROGRAM = 64  # keys whose gradients one program searches
RECOMPUTED_TOKENS = 32  # query tokens of a program, and of a step for a key
