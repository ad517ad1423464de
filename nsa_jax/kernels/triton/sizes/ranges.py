"""Sizes of the compressed and the window branch, and of the selected branch of short rows."""

from typing import NamedTuple

from nsa_jax.kernels.triton.sizes import (
    ADA,
    ALL,
    AMPERE,
    BEFORE_HOPPER,
    FEW_HEADS,
    KIB,
    ONE_MORE,
    Bounds,
    Row,
    Shape,
)


class RangeQuerySizes(NamedTuple):
    """Sizes of the forward and of the gradient of the queries.

    Attributes:
      rows: of a tile of queries, see `dims.TileRows`.
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
    Row(Bounds(heads=2, largest_dim=64, gated=False), _Q(64, 64, 4, 1, 128), "other dims"),
    Row(Bounds(heads=4, largest_dim=64, plain=True, gated=False, blackwell=False),
        _Q(64, 128, 4, 1, 128), ONE_MORE),
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
    Row(Bounds(heads=4, largest_dim=64, from_0=False, plain=True, blackwell=False),
        _Q(64, 32, 4, 3, 96), ONE_MORE),
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
      rows: of a step: query tokens times padded heads, or tokens of one head (`KeyRanges.heads_apart`).
      num_warps: warps of a program.
      num_stages: steps whose loads are in flight.
      segments: parts into which the queries are cut; None chooses by shape.
      keys_first: whether logits are held with keys as rows, so that no product needs them transposed.
      registers: most registers of a thread; None leaves it to the compiler.
    """

    keys: int
    rows: int
    num_warps: int
    num_stages: int
    segments: int | None = None
    keys_first: bool = True
    registers: int | None = None

    def shared_bytes(self, shape: Shape) -> int:
        """Keys, values, and the rows of all stages."""
        rows = self.keys + self.num_stages * shape.rows(self.rows)
        return rows * shape.dims * shape.float_bytes + RANGE_CONVERSION_BYTES[shape.float_bytes]


_K = RangeKeySizes
RANGE_KEY_GRADIENTS = (
    Row(
        Bounds(heads=3, largest_dim=64, from_0=False, plain=True, blackwell=False),
        _K(64, 64, 4, 3, registers=168),
        ONE_MORE,
    ),
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
