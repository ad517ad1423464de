"""Checks of index *values*, which the operations themselves do not make because under `jit` they cost time.

Outside `jit` a violated rule raises at once. Inside, wrap the function with `jax.experimental.checkify`:

    attend = functools.partial(checked(nsa_jax.selected_attention), config=config)
    error, (out, lse) = jax.jit(checkify.checkify(attend))(q, k, v, block_indices)
    error.throw()
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import checkify

from nsa_jax import arguments, layout
from nsa_jax.array_typing import Array, Int
from nsa_jax.config import NSAConfig


def check_segment_ids(segment_ids: Int[Array, "B S"]) -> None:
    """Each non-zero id must be one contiguous run of its row.

    Raises:
      checkify.JaxRuntimeError: an id comes back after another one (outside `jit`; inside, an error to throw).
    """
    is_first = jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1] - 1) != 0
    runs = jnp.sort(jnp.where(is_first, segment_ids, 0), axis=1)
    repeated = (runs[:, 1:] == runs[:, :-1]) & (runs[:, 1:] != 0)
    checkify.check(
        ~repeated.any(),
        "each non-zero segment id must be one contiguous run, got id {id} in several runs. Renumber the "
        "sequences.",
        id=jnp.max(runs[:, 1:], where=repeated, initial=jnp.iinfo(runs.dtype).min),
    )


def check_cu_seqlens(cu_seqlens: Int[Array, " n_plus_1"] | Int[Array, "B n_plus_1"], length: int) -> None:
    """Cumulative lengths must start at 0, never decrease, and end within the row of `length` tokens.

    Raises:
      checkify.JaxRuntimeError: one of these rules is violated.
    """
    if cu_seqlens.size == 0:  # a batch of no rows
        return
    rows = cu_seqlens.reshape(-1, cu_seqlens.shape[-1]).astype(jnp.int32)  # a uint8 cannot hold `length`
    wrong = (rows[:, 0] != 0) | (rows[:, 1:] < rows[:, :-1]).any(axis=1)
    checkify.check(
        ~wrong.any(),
        "cu_seqlens must start at 0 and never decrease, got {bounds}. Pass cumulative lengths.",
        bounds=rows[jnp.argmax(wrong)],
    )
    checkify.check(
        (rows[:, -1] <= length).all(),
        f"cu_seqlens must end within the row, got {{last}} > {length}. Pass a longer length.",
        last=rows[:, -1].max(),
    )


def check_query_positions(query_positions: Int[Array, "B T"], num_keys: int) -> None:
    """Positions must be key indices, or -1 for padding.

    Raises:
      checkify.JaxRuntimeError: a position is below -1 or not below `num_keys`.
    """
    checkify.check(
        ((query_positions >= -1) & (query_positions < num_keys)).all(),
        f"query_positions must lie in [-1, {num_keys}), got values from {{low}} to {{high}}. Pass key "
        "indices.",
        low=query_positions.min(initial=0),
        high=query_positions.max(initial=0),
    )


def check_block_indices(
    block_indices: Int[Array, "B T K R"],
    *,
    config: NSAConfig,
    query_positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B S"] | None = None,
) -> None:
    """A selection must be ascending without repetition, -1 only at the end, and start at or before its query.

    Raises:
      checkify.JaxRuntimeError: one of these rules is violated.
    """
    used = block_indices >= 0
    checkify.check(
        (block_indices >= -1).all(),
        "block_indices must be at least -1, got {low}. Mark unused slots with -1.",
        low=block_indices.min(initial=0),
    )
    ascending = ~used[..., 1:] | (used[..., :-1] & (block_indices[..., 1:] > block_indices[..., :-1]))
    checkify.check(
        ascending.all(),
        "block_indices must be ascending without repetition and -1 only at the end, got {count} slots "
        "that are not. "
        "Sort each selection and drop duplicates.",
        count=(~ascending).sum(),
    )
    batch, num_queries = query_positions.shape
    rows = layout.place(
        config, batch=batch, num_queries=num_queries,
        num_keys=jnp.iinfo(jnp.int32).max if segment_ids is None else segment_ids.shape[1],
        query_positions=query_positions, segment_ids=segment_ids,
    )  # fmt: skip
    position = rows.position[:, :, None, None]
    future = used & (position >= 0) & (block_indices > position // config.selection_block_size)
    checkify.check(
        ~future.any(),
        "selected blocks must start at or before their query, got {count} that start after it. Select "
        "past blocks.",
        count=future.sum(),
    )


def check_runs(runs: layout.Runs, batch: int) -> None:
    """Every first index of a run must be a multiple of the divisor that is declared.

    Raises:
      checkify.JaxRuntimeError: one is not.
    """
    for run in runs.runs:
        first = jnp.asarray(run.first, jnp.int32)
        checkify.check(
            (first % runs.divisor == 0).all(),
            f"divisor must divide the first index of each run, got {runs.divisor} and {{low}} to {{high}}. "
            "Declare a smaller divisor.",
            low=first.min(),
            high=first.max(),
        )


def checked[**P, R](operation: Callable[P, R]) -> Callable[P, R]:
    """An operation of `nsa_jax.attention` that first checks the values of its index arguments.

    Example:
      out, lse = checked(nsa_jax.selected_attention)(q, k, v, block_indices, config=config)

    Raises:
      checkify.JaxRuntimeError: see the `check_*` functions.
    """
    signature = inspect.signature(operation)

    @functools.wraps(operation)
    def with_checks(*args: P.args, **kwargs: P.kwargs) -> R:
        # Traced, not run: it refuses the shapes and kinds that the checks take for granted.
        jax.eval_shape(lambda: operation(*args, **kwargs))
        _check_values(signature.bind(*args, **kwargs).arguments)
        return operation(*args, **kwargs)

    return with_checks


def _check_values(given: dict[str, Any]) -> None:
    if "query" not in given:  # the gated sum, which has no index arguments
        return
    batch, num_queries = given["query"].shape[:2]
    segment_ids, positions = given.get("segment_ids"), given.get("query_positions")
    first = given.get("first_key", 0)
    if segment_ids is not None:
        check_segment_ids(jnp.asarray(segment_ids))
    rows = next((given[name] for name in ("key_slc", "key_win") if name in given), segment_ids)
    num_keys = None if rows is None else rows.shape[1] if arguments.is_zero(first) else None
    if isinstance(positions, layout.Runs):
        check_runs(positions, batch)
        positions = layout.positions_of(positions, batch)
    if positions is None:
        length = num_queries if num_keys is None else num_keys
        positions = layout.positions_of(layout.default_runs(num_queries, length), batch)
    elif num_keys is not None:
        check_query_positions(jnp.asarray(positions), num_keys)
    if (blocks := given.get("block_indices")) is not None:
        check_block_indices(
            jnp.asarray(blocks),
            config=given["config"],
            query_positions=jnp.asarray(positions),
            segment_ids=segment_ids,
        )
