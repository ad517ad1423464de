"""Sizes of the selected branch."""

from functools import partial
from typing import NamedTuple

from nsa_jax.kernels.triton.dims import padded_heads
from nsa_jax.kernels.triton.sizes import (
    ALL,
    BEFORE_HOPPER,
    FEW_HEADS,
    HOPPER,
    KIB,
    ONE_MORE,
    Bounds,
    Row,
    Shape,
)

MORE_HEADS = "docs/kernel_log.md, parts with 5 to 8 heads"
KEYS_AS_ROWS = "docs/kernel_log.md, keys as rows, and blocks of 128"


class SelectedQuerySizes(NamedTuple):
    """Sizes of the forward and of the gradient of the queries.

    Attributes:
      rows: of a tile of queries (`unions.rows_of_listed_tile`), at least 16, of at most 32 tokens. 64 rows
        make one wgmma. float32 takes 16: its products limit the speed, and small tiles mask fewer of them.
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
    Row(Bounds(heads=64, largest_dim=64, long_blocks=True, blackwell=False),
        _F(64, 128, 4, 1, 128), KEYS_AS_ROWS),
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

    At 128 it spills with many heads or steps of 128 keys. With 64 / 4 heads of 128 at 64k tokens (R) the
    probabilities then add 24 % to the kernel's time, at 168 just 6 %.
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


SCALAR_BYTES = 4 * KIB  # beside tiles: numbers of rows, which change their register layout, as compiled


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
# Calls for which there is no row take the kernels with queries outside. Measured were 3, 4 and 7 heads of 64,
# 4 to 8 of 128, and 2 of 256; with fewer heads tiles mask more, and a part is smaller.
OUTPUT_PARTS = (
    Row(Bounds(heads=4, largest_dim=64), _O(64, 4, 1, 80, 512, 6144, 2.1, 2**19), ONE_MORE),
    Row(Bounds(heads=4, largest_dim=128), _O(64, 4, 1, 128, 512, 12288, 1.7), FEW_HEADS),
    Row(Bounds(heads=4), _O(64, 4, 1, None, 512, 12288, 2.4), FEW_HEADS),
    Row(Bounds(heads=8, largest_dim=64), _O(64, 4, 1, 80, 512, 12288, 2.1), MORE_HEADS),
    Row(Bounds(heads=8, largest_dim=128), _O(64, 4, 1, 128, 512, 12288, 1.6), MORE_HEADS),
)
# With 5 heads, or 7 of 64, gradients in parts at 8k tokens take longer where neighbours agree, see the log.
GRADIENT_PARTS = (
    Row(Bounds(heads=3, largest_dim=64), _O(64, 4, 3, None, 1024, 6144, 4), FEW_HEADS),
    Row(Bounds(heads=4, largest_dim=128), _O(64, 4, 3, None, 1024, 6144, 2.4), FEW_HEADS),
    Row(Bounds(heads=4, blackwell=False), _O(128, 8, 1, None, 1024, 6144, 2.6), FEW_HEADS),
    *(
        Row(bounds, _O(64, 4, 3, None, 1024, 12288, 2.3), MORE_HEADS)
        for bounds in (Bounds(heads=5, largest_dim=128), Bounds(heads=7, largest_dim=64))
    ),
    Row(Bounds(heads=7, largest_dim=128), _O(64, 4, 3, None, 1024, 6144, 2.3), MORE_HEADS),
    Row(Bounds(heads=8, largest_dim=128), _O(64, 4, 3, None, 1024, 12288, 1.9), MORE_HEADS),
)
