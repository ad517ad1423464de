"""Shapes, packings and positions for comparisons with every oracle; each is for one way to be wrong."""

import dataclasses
import zlib
from typing import NamedTuple

import numpy as np

from nsa_jax.config import NSAConfig

OVERLAPPING = NSAConfig(
    compression_block_size=4,
    compression_stride=2,
    selection_block_size=6,
    num_selected_blocks=4,
    window_size=12,
)
ADJOINING = NSAConfig(
    compression_block_size=4,
    compression_stride=4,
    selection_block_size=4,
    num_selected_blocks=3,
    window_size=5,
    num_initial_blocks=0,
    num_local_blocks=1,
)
MANY_FORCED = NSAConfig(
    compression_block_size=4,
    compression_stride=2,
    selection_block_size=6,
    num_selected_blocks=7,
    window_size=1,
    num_initial_blocks=2,
    num_local_blocks=3,
)
ONLY_FORCED = NSAConfig(
    compression_block_size=9,
    compression_stride=3,
    selection_block_size=9,
    num_selected_blocks=2,
    window_size=7,
    num_initial_blocks=0,
    num_local_blocks=2,
)

type Runs = tuple[tuple[int, int], ...]  # (segment id, tokens); 0 is padding

# Ids in no order, padding at either end and between, sequences of 1 token, of fewer than l, of just l.
PACKED: tuple[Runs, ...] = (
    ((0, 5), (7, 29), (2, 3), (0, 4), (9, 33), (1, 1)),
    ((3, 4), (4, 1), (8, 2), (1, 51), (0, 1), (5, 10), (0, 6)),
)


class Operands(NamedTuple):
    """The float arrays of `native_sparse_attention`, in its order."""

    query: np.ndarray
    key_cmp: np.ndarray
    value_cmp: np.ndarray
    key_slc: np.ndarray
    value_slc: np.ndarray
    key_win: np.ndarray
    value_win: np.ndarray
    gates: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Queries: all tokens, the last `num_queries`, or `positions`. Without `runs` a row is one sequence."""

    name: str
    config: NSAConfig = OVERLAPPING
    batch: int = 2
    num_keys: int = 61
    num_queries: int | None = None
    num_heads: int = 4
    num_kv_heads: int = 2
    key_dim: int = 8
    value_dim: int = 8
    scale: float | None = None
    runs: tuple[Runs, ...] | None = None
    positions: tuple[int, ...] | None = None  # the same for every row

    @property
    def num_compressed(self) -> int:
        size, stride = self.config.compression_block_size, self.config.compression_stride
        return 0 if self.num_keys < size else (self.num_keys - size) // stride + 1

    @property
    def query_positions(self) -> np.ndarray:
        """[B, T] int32."""
        if self.positions is not None:
            row = np.asarray(self.positions)
        else:
            first = 0 if self.num_queries is None else self.num_keys - self.num_queries
            row = np.arange(first, self.num_keys)
        return np.tile(row, (self.batch, 1)).astype(np.int32)

    @property
    def segment_ids(self) -> np.ndarray | None:
        """[B, S] int32."""
        if self.runs is None:
            return None
        return np.array([[i for i, n in row for _ in range(n)] for row in self.runs], np.int32)

    def generator(self, purpose: str = "") -> np.random.Generator:
        """Gives the same numbers for the same case and purpose, whatever ran before."""
        return np.random.default_rng(zlib.crc32((self.name + purpose).encode()))

    def draw(self) -> Operands:
        """Standard normal operands in float64; gates between 0 and 1."""
        rng = self.generator()
        batch, heads, kv_heads = self.batch, self.num_heads, self.num_kv_heads
        queries = self.query_positions.shape[1]

        def keys_values(tokens):
            return tuple(
                rng.standard_normal((batch, tokens, kv_heads, x)) for x in (self.key_dim, self.value_dim)
            )

        return Operands(
            rng.standard_normal((batch, queries, heads, self.key_dim)),
            *keys_values(self.num_compressed),
            *keys_values(self.num_keys),
            *keys_values(self.num_keys),
            rng.uniform(size=(batch, queries, heads, 3)),
        )


PLAIN = Case(name="plain")
PACKED_ROWS = Case(name="packed_rows", num_keys=75, runs=PACKED)
CASES = (
    PLAIN,
    PACKED_ROWS,
    Case(
        name="packed_rows_queried_anywhere",
        num_keys=75,
        runs=PACKED,
        positions=(74, -1, 0, 4, 5, 33, 34, 36, 37, 41, 73, 8, 12, 57, 58, 68),
        key_dim=3,
        value_dim=5,
        scale=0.9,
    ),
    Case(name="last_queries_of_the_row", num_queries=11, num_kv_heads=1),
    Case(name="one_query_of_many_keys", num_queries=1, batch=1),
    Case(name="one_token", num_keys=1, batch=1),
    Case(name="shorter_than_every_block_and_window", num_keys=3),
    Case(
        name="one_head_per_kv_head_odd_dims",
        config=ONLY_FORCED,
        num_heads=3,
        num_kv_heads=3,
        key_dim=7,
        value_dim=5,
    ),
    Case(name="sixty_four_heads_per_kv_head", num_heads=64, num_kv_heads=1, batch=1, num_keys=50, key_dim=5),
    Case(
        name="window_of_one_many_forced",
        config=MANY_FORCED,
        num_heads=6,
        num_keys=70,
        key_dim=12,
        value_dim=8,
    ),
    Case(
        name="adjoining_blocks_dims_of_one",
        config=ADJOINING,
        num_heads=2,
        num_kv_heads=1,
        key_dim=1,
        value_dim=1,
    ),
    Case(
        name="paper_config_and_dims",
        config=NSAConfig(),
        batch=1,
        num_keys=1300,
        positions=(0, 31, 511, 512, 700, 1299),
        num_heads=2,
        num_kv_heads=1,
        key_dim=192,
        value_dim=128,
    ),
    Case(
        name="everything_covered",
        config=dataclasses.replace(OVERLAPPING, num_selected_blocks=12, window_size=100),
        num_keys=59,
        key_dim=6,
        value_dim=4,
    ),
)
BY_NAME = {case.name: case for case in CASES}
