"""Index arrays from what other code holds: `cu_seqlens` and `[start, end)` token ranges."""

import numbers
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from nsa_jax.arguments import check_integers
from nsa_jax.array_typing import Array, Int, Int32
from nsa_jax.config import NSAConfig

type RangesLayout = Literal["BTKn2", "TKn2", "BTn2"]

RANGES_LAYOUTS: tuple[str, ...] = get_args(RangesLayout.__value__)


def segment_ids_from_cu_seqlens(
    cu_seqlens: Int[Array, " n_plus_1"] | Int[Array, "B n_plus_1"], length: int
) -> Int32[Array, "B S"]:
    """Segment ids of packed rows from the cumulative sequence lengths that varlen kernels use.

    Works under `jit`, where values are not checked and wrong ones give wrong ids;
    `nsa_jax.debug.check_cu_seqlens` checks them there.

    Args:
      cu_seqlens: `0 = c_0 <= c_1 <= ... <= c_n` of one row or of each; sequence `i` holds tokens
        `c_i .. c_(i+1) - 1`. A row of fewer sequences repeats its last entry.
      length: tokens of a row, a Python int; those from `c_n` on are padding.

    Returns:
      `[B, length]` int32, `B = 1` for a single row: ids `1 .. n`, 0 for padding. An empty sequence has no
      tokens and so no id.

    Raises:
      ValueError: not one or two axes, or a negative length; where the values are concrete also: not starting
        at 0, decreasing, or longer than the row.
      TypeError: not integers, or a length that is no Python int.
    """
    if isinstance(length, bool) or not isinstance(length, numbers.Integral):
        raise TypeError(
            f"length must be a Python int, got {type(length).__name__}. Make it a static argument of jit."
        )
    if length < 0:
        raise ValueError(f"length must be at least 0, got {length}. Pass the number of tokens of a row.")
    traced = isinstance(cu_seqlens, jax.core.Tracer)
    if traced:
        check_integers(cu_seqlens=cu_seqlens)
    bounds = cu_seqlens if traced else _concrete("cu_seqlens", cu_seqlens)
    if bounds.ndim not in (1, 2) or bounds.shape[-1] < 1:
        raise ValueError(
            f"cu_seqlens must be [n + 1] or [B, n + 1], got shape {bounds.shape}. Pass one row, or a batch."
        )
    rows = bounds.reshape(-1, bounds.shape[-1])
    if traced:
        rows, token = rows.astype(jnp.int32), jnp.arange(length, dtype=jnp.int32)
        ids = jax.vmap(lambda row: jnp.searchsorted(row, token, side="right"))(rows)
        return jnp.where(token < rows[:, -1:], ids, 0).astype(jnp.int32)
    for number, row in enumerate(rows):
        _check_bounds(row, length, f" in row {number}" if bounds.ndim == 2 else "")
    # By NumPy: a data loader has another n in every batch, and JAX would compile for each.
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
    """Block indices from token ranges `[start, end)` of each query, as other NSA code passes selections.

    Args:
      ranges: concrete integers in the named layout; the last axis is `(start, end)`, sequence-local tokens.
        A range starts at a block's first token and ends at a block boundary or after the query (`end == t +
        1`). It may span several blocks; `start == end` is empty.
      layout: "BTKn2", "TKn2" (one row) or "BTn2" (the same for all KV heads); never inferred.
      config: block structure; at most `num_selected_blocks` blocks a query.
      query_positions: sequence-local index `t` of each query, by default `0 .. T-1`; -1 = padding, which may
        hold only empty ranges.
      num_kv_heads: `K`, needed by the layout "BTn2" only.

    Returns:
      `[B, T, K, R]` int32, ascending, -1 in unused slots at the end.

    Raises:
      ValueError: unknown layout, wrong number of axes, or a range that is misaligned, reversed, overlapping
        another, in the future, or one block too many; the message names the first such query.
      TypeError: not integers, or traced.
    """
    if layout not in RANGES_LAYOUTS:
        raise ValueError(
            f"layout must be one of {RANGES_LAYOUTS}, got {layout!r}. Name the axes of the ranges."
        )
    array = _concrete("ranges", ranges)
    if array.ndim != len(layout) or array.shape[-1] != 2:
        raise ValueError(f"ranges must have the axes {layout}, got shape {array.shape}. Name another layout.")
    if layout == "TKn2":
        array = array[None]
    elif layout == "BTn2":
        if num_kv_heads is None:
            raise ValueError("the layout BTn2 needs num_kv_heads, got None. Pass the number of KV heads.")
        array = np.repeat(array[:, :, None], num_kv_heads, axis=2)
    if num_kv_heads not in (None, array.shape[2]):
        raise ValueError(
            f"ranges must have num_kv_heads = {num_kv_heads}, got {array.shape[2]}. Drop one of them."
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
    blocks = np.sort(blocks.reshape(*blocks.shape[:3], -1), axis=-1)
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
    array = np.asarray(array)
    check_integers(**{name: array})
    return array.astype(np.int64)  # an unsigned difference is never negative


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
