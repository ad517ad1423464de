"""Where the queries of a call stand in their rows, and how much of that is known while tracing."""

import dataclasses
import numbers
from math import gcd
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nsa_jax.array_typing import Array, Int, Int32
from nsa_jax.config import NSAConfig
from nsa_jax.layout.blocks import num_compression_blocks
from nsa_jax.layout.sequences import blocks_ended, sequence_starts


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Index:
    """An index in a row: an int, which is known while tracing, or an array with one index for each row.

    Attributes:
      value: the index.
    """

    value: int | Int32[Array, " B"]

    @property
    def known(self) -> int | None:
        """The index if it is an int, None if it is an array."""
        return self.value if isinstance(self.value, int) else None

    def of_rows(self, batch: int) -> Int32[Array, " B"]:
        """Returns one index for each of `batch` rows."""
        return jnp.broadcast_to(jnp.asarray(self.value, jnp.int32), (batch,))

    def tree_flatten(self):
        """Makes an int part of the tree structure, so that it stays known under `jit`."""
        return ((), self.value) if isinstance(self.value, int) else ((self.value,), None)

    @classmethod
    def tree_unflatten(cls, known, arrays):
        """The inverse."""
        return cls(*arrays) if arrays else cls(known)


class Run(NamedTuple):
    """Queries that are consecutive tokens of a row.

    Attributes:
      length: number of queries, an int of at least 1.
      first: key index of the first query: an int, a scalar array, or an array with one index for each row.
    """

    length: int
    first: int | Int[Array, ""] | Int[Array, " B"]


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Runs:
    """Queries that form runs of consecutive tokens; a value for `query_positions`.

    Runs say more than an array of positions: if rows are not packed and all runs have one length, the GPU
    kernels compute what each tile of queries sees instead of loading it.

    Attributes:
      runs: a tuple of runs in the order of the queries. Their lengths add up to `T`.
      divisor: a number of at least 1 that divides the first index of every run. If it is a multiple of the
        queries in a tile (a multiple of 64 always is), kernels know that no tile reaches into a second
        selection block. It is not checked; `nsa_jax.debug.check_runs` does that.
      num_queries: how many of the `T` queries of each row are real, counted from the first; the others are
        padding. None if all are real.
      halo: says that the keys of the window branch are not those of a whole row, but one stretch for each
        run: the `halo` tokens before its first query, then the tokens of its queries. The stretches lie one
        after another, so `W` is `T` and `halo` for each run. It is at least `window_size - 1`. Tokens before
        the row are not seen.

    Raises:
      TypeError: `runs` is not a tuple of `Run`. All else is checked by the operation that gets them.

    Examples:
      Two shards of a row of 4096 tokens, 1024 queries each:

      >>> shards = Runs((Run(1024, 0), Run(1024, 3072)), divisor=1024)
      >>> out, lse = window_attention(query, key, value, config=config, query_positions=shards)
    """

    runs: tuple[Run, ...]
    divisor: int = 1
    num_queries: Int[Array, " B"] | None = None
    halo: int | None = None

    def __post_init__(self):
        if not isinstance(self.runs, tuple) or not all(isinstance(run, Run) for run in self.runs):
            raise TypeError(
                f"runs must be a tuple of Run, got {self.runs!r}. Pass Runs((Run(length, first),))."
            )
        # As Python ints: sums of NumPy's would overflow where these are narrow.
        object.__setattr__(
            self, "runs", tuple(Run(_as_int(run.length), _as_int(run.first)) for run in self.runs)
        )
        object.__setattr__(self, "divisor", _as_int(self.divisor))
        object.__setattr__(self, "halo", _as_int(self.halo))

    def tree_flatten(self):
        """Makes lengths, divisor, halo and first indices that are ints part of the tree structure."""
        ints = tuple(isinstance(run.first, int) for run in self.runs)
        firsts = tuple(run.first if i else None for run, i in zip(self.runs, ints, strict=True))
        arrays = tuple(None if i else run.first for run, i in zip(self.runs, ints, strict=True))
        lengths = tuple(run.length for run in self.runs)
        return (arrays, self.num_queries), (lengths, firsts, self.divisor, self.halo)

    @classmethod
    def tree_unflatten(cls, known, arrays):
        """The inverse."""
        (lengths, firsts, divisor, halo), (traced, num_queries) = known, arrays
        ends = (x if first is None else first for x, first in zip(traced, firsts, strict=True))
        return cls(tuple(map(Run, lengths, ends)), divisor, num_queries, halo)


class FirstKeys(NamedTuple):
    """The row index of the first key in the arrays of each branch.

    It differs from 0 if an array holds only a part of the row, as a shard or a decode ring does. Keys that
    the array does not hold are not seen. A negative index, such as -3, means that the array begins before the
    row; its entries before index 0 are not keys.

    Attributes:
      cmp: index of the first compression block.
      slc: index of the first token of the selected branch.
      win: index of the first token of the window branch.
    """

    cmp: Index = Index(0)
    slc: Index = Index(0)
    win: Index = Index(0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Where each query of a call stands. A query that sees nothing has position -1 and only empty ranges.

    `place` makes one placement per call. What is known while tracing is part of its tree structure, so it is
    static when a placement is an argument under `jit`. All arrays begin with the batch axis.

    Attributes:
      config: block structure.
      packed: whether a row may hold several sequences.
      position: index of each query in its own sequence, -1 if it sees nothing.
      sequence_start: row index of the first token of the query's sequence.
      compression_start: index, among the compression blocks of the row, of the first block of the query's
        sequence.
      run_lengths: number of queries in each run of consecutive tokens; empty if the queries came as an array.
      run_firsts: key index of the first query of each run.
      run_queries: how many queries of each run are real; those after them are padding. None if all are real.
      divisor: a number that divides the key index of the first query of every run.
      first_keys: row index of the first key of each branch.
      halo: tokens before each run in the arrays of the window branch if these hold one stretch of keys for
        each run, see `Runs`; else None.
      before_stretch: with a `halo`, for each query, the row index of a key of its stretch minus the index of
        that key in the arrays.
    """

    config: NSAConfig = dataclasses.field(metadata={"static": True})
    packed: bool = dataclasses.field(metadata={"static": True})
    position: Int32[Array, "B T"]
    sequence_start: Int32[Array, "B T"]
    compression_start: Int32[Array, "B T"]
    run_lengths: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    run_firsts: tuple[Index, ...]
    run_queries: Int32[Array, "B runs"] | None
    divisor: int = dataclasses.field(metadata={"static": True})
    first_keys: FirstKeys
    halo: int | None = dataclasses.field(metadata={"static": True})
    before_stretch: Int32[Array, "B T"] | None

    def window_range(self, num_keys: int) -> tuple[Int32[Array, "B T"], Int32[Array, "B T"]]:
        """Range of the window's keys, `max(0, t-w+1) .. t`, in the array of the window branch.

        Args:
          num_keys: number of keys in that array.

        Returns:
          First index, and one past the last index. The two are equal for a query that sees nothing.
        """
        end = self.position + 1
        start = jnp.maximum(end - self.config.window_size, 0)
        before = _by_row(self.first_keys.win) if self.before_stretch is None else self.before_stretch
        shift = self.sequence_start - before
        return _within(start + shift, end + shift, num_keys)

    def stretches(self) -> tuple[int, ...]:
        """With a `halo`, where the first query of each run is in the arrays of the window branch."""
        assert self.halo is not None
        lengths = (0, *self.run_lengths[:-1])
        return tuple(sum(lengths[: i + 1]) + (i + 1) * self.halo for i in range(len(lengths)))

    def compression_range(self, num_keys: int) -> tuple[Int32[Array, "B T"], Int32[Array, "B T"]]:
        """Range of the visible compression blocks, `i d + l - 1 <= t`, in the array of compressed keys.

        Args:
          num_keys: number of keys in that array.

        Returns:
          First index, and one past the last index. The two are equal for a query that sees nothing.
        """
        visible = num_compression_blocks(self.position + 1, self.config)
        start = self.compression_start - _by_row(self.first_keys.cmp)
        return _within(start, start + visible, num_keys)

    def selection_start(self) -> Int32[Array, "B T"]:
        """Index, in the array of the selected branch, of the first token of the query's sequence."""
        return self.sequence_start - _by_row(self.first_keys.slc)

    def selection_end(self, num_keys: int) -> Int32[Array, "B T"]:
        """One past the last key that a query may select, in an array of `num_keys`; 0 for none."""
        end = jnp.clip(self.selection_start() + self.position + 1, 0, num_keys)
        return jnp.where(self.position >= 0, end, 0)

    @property
    def first_position(self) -> int | None:
        """Position of the first query if all queries are known to be one run in one sequence, else None."""
        if self.packed or len(self.run_firsts) != 1 or self.run_queries is not None:
            return None
        return self.run_firsts[0].known

    @property
    def rows_alike(self) -> bool:
        """Whether runs and arrays of keys are known to begin at the same index in every row."""
        indices = (*self.run_firsts, *self.first_keys)
        return self.position.shape[0] == 1 or all(index.known is not None for index in indices)

    def tile_in_one_block(self, tokens: int) -> bool:
        """Whether every tile of `tokens` queries is known to lie in one selection block.

        Never true for packed rows, whose blocks may begin at any token.
        """
        starts = (self.divisor, *self.run_lengths[:-1], self.config.selection_block_size)
        return bool(self.run_lengths) and not self.packed and all(start % tokens == 0 for start in starts)


def place(
    config: NSAConfig,
    *,
    batch: int,
    num_queries: int,
    num_keys: int | Int[Array, ""] | Int[Array, " B"],
    query_positions: Int[Array, "B T"] | Runs | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    first_keys: FirstKeys = FirstKeys(),  # noqa: B008 (immutable)
) -> Placement:
    """Finds where each query stands in its sequence, from the row index of its key.

    Args:
      config: block structure.
      batch: number of rows.
      num_queries: number of queries of a row.
      num_keys: number of tokens of a row. A query at index `num_keys` or more, or below 0, is padding.
      query_positions: key index of each query, or runs of them; by default the last `num_queries` of the
        `num_keys` tokens.
      segment_ids: sequence of each token of packed rows.
      first_keys: row index of the first key of each branch.

    Returns:
      The placement of the queries.
    """
    length = _index(num_keys, batch)
    if query_positions is None:
        query_positions = default_runs(num_queries, length.value)
    run_queries, divisor, halo, before_stretch = None, 1, None, None
    runs: tuple[Run, ...] = ()
    if isinstance(query_positions, Runs):
        runs, divisor, halo = query_positions.runs, query_positions.divisor, query_positions.halo
        positions = positions_of(query_positions, batch)
        run_queries = _run_queries(query_positions, batch, length)
        if halo is not None:
            before_stretch = _before_stretch(runs, halo, batch)
        if all(isinstance(run.first, numbers.Integral) for run in runs):
            divisor = gcd(*(int(run.first) for run in runs)) or _ANY  # 0 if every run begins at 0
    else:
        positions = query_positions.astype(jnp.int32)
    outside = (positions < 0) | (positions >= _by_row(length))
    positions = jnp.where(outside, -1, positions)
    known: dict[str, Any] = dict(
        config=config,
        packed=segment_ids is not None,
        run_lengths=tuple(run.length for run in runs),
        run_firsts=tuple(_index(run.first, batch) for run in runs),
        run_queries=run_queries,
        divisor=divisor,
        first_keys=FirstKeys(*(_index(first.value, batch) for first in first_keys)),
        halo=halo,
        before_stretch=before_stretch,
    )
    if segment_ids is None:
        zero = jnp.zeros_like(positions)
        return Placement(position=positions, sequence_start=zero, compression_start=zero, **known)

    def at_query(per_token: Array) -> Array:
        return jnp.take_along_axis(per_token, jnp.maximum(positions, 0), axis=1)

    start = at_query(sequence_starts(segment_ids))
    sees = (positions >= 0) & (at_query(segment_ids) != 0)
    ended_before = jnp.pad(blocks_ended(segment_ids, config), ((0, 0), (1, 0)))
    return Placement(
        position=jnp.where(sees, positions - start, -1),
        sequence_start=start,
        compression_start=jnp.take_along_axis(ended_before, start, axis=1),
        **known,
    )


_ANY = 2**30  # a divisor that is a multiple of any number of tokens that a tile may have


def default_runs(num_queries: int, num_keys: int | Int[Array, " B"]) -> Runs:
    """Places the queries at the last `num_queries` of `num_keys` tokens."""
    return Runs((Run(num_queries, num_keys - num_queries),))


def positions_of(runs: Runs, batch: int) -> Int32[Array, "B T"]:
    """Returns the key index of each query, -1 for padding."""
    parts = [
        _by_row(_index(run.first, batch)) + jnp.arange(run.length, dtype=jnp.int32)[None] for run in runs.runs
    ]
    parts = [jnp.broadcast_to(part, (batch, part.shape[1])) for part in parts]
    positions = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
    if runs.num_queries is None:
        return positions
    real = jnp.arange(positions.shape[1], dtype=jnp.int32)[None] < runs.num_queries.astype(jnp.int32)[:, None]
    return jnp.where(real, positions, -1)


def _before_stretch(runs: tuple[Run, ...], halo: int, batch: int) -> Int32[Array, "B T"]:
    """For each query, the row index of a key minus its index among the stretches of all runs."""
    past, parts = 0, []
    for run in runs:
        shift = _index(run.first, batch).of_rows(batch) - (past + halo)
        parts.append(jnp.broadcast_to(shift[:, None], (batch, run.length)))
        past += halo + run.length
    return jnp.concatenate(parts, axis=1)


def _run_queries(runs: Runs, batch: int, num_keys: Index) -> Int32[Array, "B runs"] | None:
    """Number of real queries of each run; None if all are known to be real."""

    def inside(run: Run) -> bool:
        first, room = _index(run.first, batch).known, num_keys.known
        return first is not None and room is not None and 0 <= first <= room - run.length

    if runs.num_queries is None and all(inside(run) for run in runs.runs):
        return None
    before, counts = 0, []
    for run in runs.runs:
        room = num_keys.of_rows(batch) - _index(run.first, batch).of_rows(batch)
        if runs.num_queries is not None:
            room = jnp.minimum(room, runs.num_queries.astype(jnp.int32) - before)
        counts.append(jnp.clip(room, 0, run.length))
        before += run.length
    return jnp.stack(counts, axis=1)


def _as_int[X](value: X) -> X | int:
    """Integers as Python ints, all else as it is."""
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else value


def _index(value: int | Array, batch: int) -> Index:
    if isinstance(value, numbers.Integral):
        return Index(int(value))
    return Index(jnp.broadcast_to(jnp.asarray(value, jnp.int32), (batch,)))


def _by_row(index: Index) -> int | Int32[Array, "B 1"]:
    """The index in a form that broadcasts against `[B, T]`."""
    value = index.value
    return value if isinstance(value, int) else value[:, None]


def _within(start: Array, end: Array, num_keys: int) -> tuple[Int32[Array, "B T"], Int32[Array, "B T"]]:
    end = jnp.clip(end, 0, num_keys)
    return jnp.minimum(jnp.maximum(start, 0), end), end
