"""Sizes of the kernels of block probabilities."""

from typing import NamedTuple

from nsa_jax.kernels.triton.sizes import ALL, BEFORE_HOPPER, Bounds, Row, Shape


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
