"""Converters to the index arrays of this package: from `cu_seqlens`, and from `[start, end)` token ranges."""

import numbers
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from nsa_jax import array_checks
from nsa_jax.array_checks import check_integers
from nsa_jax.array_typing import Array, Int, Int32
from nsa_jax.config import LONGEST, NSAConfig, check_config
from nsa_jax.option_checks import check_choice, check_int

type RangesLayout = Literal["BTKn2", "TKn2", "BTn2"]

RANGES_LAYOUTS: tuple[str, ...] = get_args(RangesLayout.__value__)


def segment_ids_from_cu_seqlens(
    cu_seqlens: Int[Array, " n_plus_1"] | Int[Array, "B n_plus_1"], length: int
) -> Int32[Array, "B S"]:
    """Makes segment ids of packed rows from the cumulative sequence lengths that variable-length kernels use.

    Also works under `jit`, but the values cannot be checked there, and wrong values give wrong ids. Call
    `nsa_jax.debug.check_cu_seqlens` to check them.

    Args:
      cu_seqlens: cumulative lengths `0 = c_0 <= c_1 <= ... <= c_n`, for one row `[n + 1]` or for each row
        `[B, n + 1]`. Sequence `i` holds tokens `c_i .. c_(i+1) - 1`. In a batch, a row with fewer sequences
        repeats its last entry.
      length: number of tokens of a row, a Python int. Tokens from `c_n` on are padding.

    Returns:
      Segment ids `[B, length]`, int32, with `B = 1` for a single row: sequence `i` has the id `i + 1`,
      padding has 0. The id of an empty sequence does not occur.

    Raises:
      TypeError: `cu_seqlens` does not hold integers, or `length` is not a Python int.
      ValueError: `cu_seqlens` does not have one or two axes, or `length` is negative. Outside `jit` also: the
        lengths do not start at 0, decrease, or exceed the row.

    Examples:
      >>> segment_ids_from_cu_seqlens(np.array([0, 3, 5]), 6)
      Array([[1, 1, 1, 2, 2, 0]], dtype=int32)
    """
    if isinstance(length, bool) or not isinstance(length, numbers.Integral):
        raise TypeError(
            f"length must be a Python int, got {type(length).__name__}. Make it a static argument of jit."
        )
    check_int(low=0, high=LONGEST, length=length)
    traced = isinstance(cu_seqlens, jax.core.Tracer)
    if traced:
        check_integers(cu_seqlens=cu_seqlens)
    bounds = cu_seqlens if traced else _concrete("cu_seqlens", cu_seqlens)
    array_checks.check_cu_seqlens(bounds)
    rows = bounds.reshape(-1, bounds.shape[-1])
    if traced:
        rows, token = rows.astype(jnp.int32), jnp.arange(length, dtype=jnp.int32)
        ids = jax.vmap(lambda row: jnp.searchsorted(row, token, side="right"))(rows)
        return jnp.where(token < rows[:, -1:], ids, 0).astype(jnp.int32)
    for number, row in enumerate(rows):
        _check_bounds(row, length, f" in row {number}" if bounds.ndim == 2 else "")
    # In NumPy: n changes with every batch of a data loader, and JAX would compile again for each n.
    ids, token = np.zeros((len(rows), length), np.int32), np.arange(length)
    for row, ids_of_row in zip(rows, ids, strict=True):
        ids_of_row[: row[-1]] = np.searchsorted(row, token[: row[-1]], side="right")
    return jnp.asarray(ids)


def block_indices_from_ranges(
    ranges: Int[Array, "..."],
    *,
    layout: RangesLayout,
    config: NSAConfig,
    query_positions: Int[Array, "B T"] | None = None,
    num_kv_heads: int | None = None,
) -> Int32[Array, "B T K R"]:
    """Makes block indices from the selected token ranges `[start, end)` of each query.

    Other NSA code passes selections as such ranges. The result can be given to
    `nsa_jax.selected_attention`.

    Args:
      ranges: concrete integers in the given layout. The last axis is `(start, end)`, in tokens counted from
        the first token of the query's sequence. A range starts at the first token of a block and ends at a
        block boundary or just after the query (`end == t + 1`). It may span several blocks; it is empty if
        `start == end`.
      layout: axes of `ranges`: "BTKn2", "TKn2" for a single row, or "BTn2" if all KV heads share the ranges.
        It is never inferred from the shape.
      config: block structure. A query may have at most `num_selected_blocks` blocks.
      query_positions: index `t` of each query in its sequence, `0 .. T - 1` by default. -1 marks a padding
        query, whose ranges must be empty.
      num_kv_heads: `K`; required by the layout "BTn2", otherwise only checked if given.

    Returns:
      Block indices `[B, T, K, R]`, int32, ascending, -1 in the unused slots at the end.

    Raises:
      TypeError: an array does not hold integers, or is traced by JAX; `num_kv_heads` is not an int; or
        `config` is not an `NSAConfig`.
      ValueError: the layout is unknown, the number of axes is wrong, a position is below -1, a number does
        not fit into 32 bits, or a range is misaligned, reversed, overlaps another, reaches beyond its query
        or makes one block too many. The message gives the first such range.

    Examples:
      >>> ranges = np.array([[[[[0, 64], [128, 192]]]]])  # one row, one query, one KV head
      >>> config, positions = NSAConfig(num_selected_blocks=4), np.array([[200]])
      >>> block_indices_from_ranges(ranges, layout="BTKn2", config=config, query_positions=positions)
      Array([[[[ 0,  2, -1, -1]]]], dtype=int32)
    """
    check_choice(RANGES_LAYOUTS, layout=layout)
    check_config(config)
    if num_kv_heads is not None:
        check_int(low=1, num_kv_heads=num_kv_heads)
    array = _concrete("ranges", ranges)
    if array.ndim != len(layout) or array.shape[-1] != 2:
        raise ValueError(
            f"ranges must have the axes {layout}, got shape {array.shape}. Name the layout that they have."
        )
    if layout == "TKn2":
        array = array[None]
    elif layout == "BTn2":
        if num_kv_heads is None:
            raise ValueError("the layout BTn2 needs num_kv_heads, got None. Pass the number of KV heads.")
        array = np.broadcast_to(array[:, :, None], (*array.shape[:2], num_kv_heads, *array.shape[2:]))
    if num_kv_heads not in (None, array.shape[2]):
        raise ValueError(
            f"ranges must have num_kv_heads = {num_kv_heads} KV heads, got {array.shape[2]}. Leave "
            "num_kv_heads out, or pass ranges of that many heads."
        )
    batch, num_queries = array.shape[:2]
    if query_positions is None:
        positions = np.broadcast_to(np.arange(num_queries), (batch, num_queries))
    else:
        positions = _concrete("query_positions", query_positions)
        if positions.shape != (batch, num_queries):
            raise ValueError(
                f"query_positions must be [B, T] = {(batch, num_queries)}, got shape {positions.shape}. "
                "Reshape it."
            )
        if (positions < -1).any():
            raise ValueError(
                f"query_positions must be at least -1, got {positions.min()}. Mark padding queries with -1."
            )

    start, end = array[..., 0], array[..., 1]
    after_query = positions[:, :, None, None] + 1
    size, empty = config.selection_block_size, start == end
    _forbid(~empty & (start < 0), start, end, "must not start before token 0", "Use sequence-local tokens")
    _forbid(end < start, start, end, "must not be reversed", "Pass start <= end")
    _forbid(~empty & (end > after_query), start, end, "must not reach into the future", "End it at t + 1")
    _forbid(~empty & (start % size != 0), start, end, f"must start at a multiple of {size}", "Align it")
    misaligned = ~empty & (end % size != 0) & (end != after_query)
    _forbid(misaligned, start, end, f"must end at a multiple of {size} or at t + 1", "Align it")

    slots = config.num_selected_blocks
    count = np.where(empty, 0, -(-end // size) - start // size)
    total = count.sum(axis=-1, keepdims=True)
    too_many = np.broadcast_to(total > slots, start.shape)
    _forbid(too_many, start, end, f"must cover at most {slots} blocks", "Drop some")
    unused = np.iinfo(np.int32).max
    steps = np.arange(slots)
    blocks = np.where(steps < count[..., None], (start // size)[..., None] + steps, unused)
    blocks = np.sort(blocks.reshape(*blocks.shape[:3], blocks.shape[3] * slots), axis=-1)
    blocks = np.pad(blocks, ((0, 0),) * 3 + ((0, max(slots - blocks.shape[-1], 0)),), constant_values=unused)
    repeated = ((np.diff(blocks, axis=-1) == 0) & (blocks[..., 1:] != unused)).any(axis=-1, keepdims=True)
    _forbid(
        np.broadcast_to(repeated, start.shape), start, end, "must not overlap", "Merge overlapping ranges"
    )
    blocks = blocks[..., :slots]
    return jnp.asarray(np.where(blocks == unused, -1, blocks), jnp.int32)


def _concrete(name: str, array) -> np.ndarray:
    if isinstance(array, jax.core.Tracer):
        raise TypeError(f"{name} must be concrete, got a traced array. Convert it outside jit.")
    try:
        array = np.asarray(array)
    except ValueError:  # lists of different lengths
        given = type(array).__name__
        raise TypeError(f"{name} must be an array, got a ragged {given}. Pass rows of one length.") from None
    check_integers(**{name: array})
    return array.astype(np.int64)  # differences of unsigned integers would wrap instead of being negative


def _check_bounds(bounds: np.ndarray, length: int, where: str) -> None:
    if bounds[0] != 0 or (np.diff(bounds) < 0).any():
        raise ValueError(
            f"cu_seqlens must start at 0 and never decrease, got {bounds.tolist()}{where}. Pass cumulative "
            "lengths."
        )
    if bounds[-1] > length:
        raise ValueError(
            f"cu_seqlens must end within the row, got {bounds[-1]} > {length}{where}. Pass a longer length."
        )


def _forbid(wrong: np.ndarray, start: np.ndarray, end: np.ndarray, rule: str, remedy: str) -> None:
    if wrong.any():
        b, t, k, n = (int(axis[0]) for axis in np.nonzero(wrong))
        raise ValueError(
            f"the ranges of a query {rule}, got [{start[b, t, k, n]}, {end[b, t, k, n]}) at row {b}, "
            f"query {t}, KV head {k}, range {n}. {remedy}."
        )
