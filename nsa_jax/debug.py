"""Checks of the values of index arrays. The operations skip them because they would cost time under `jit`.

Outside `jit`, a check raises at once if a rule is violated. Inside `jit`, wrap the function with
`jax.experimental.checkify`, which returns the error:

```python
attend = functools.partial(checked(nsa_jax.selected_attention), config=config)
error, (out, lse) = jax.jit(checkify.checkify(attend))(q, k, v, block_indices)
error.throw()
```
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import checkify

from nsa_jax import arguments, array_checks, layout
from nsa_jax.array_checks import check_arrays
from nsa_jax.array_typing import Array, Int
from nsa_jax.config import NSAConfig, check_config
from nsa_jax.option_checks import check_function, check_int


def check_segment_ids(segment_ids: Int[Array, "B S"]) -> None:
    """Checks that each non-zero id is one contiguous run of its row.

    Args:
      segment_ids: sequence of each token, 0 = padding.

    Raises:
      checkify.JaxRuntimeError: a non-zero id occurs in two separate runs. Under `checkify` inside `jit`, the
        error is returned instead.
      TypeError, ValueError: an argument does not have the kind, dtype or shape given above.
    """
    check_arrays(check_segment_ids, segment_ids=segment_ids)
    returning = layout.returning_ids(_signed(segment_ids))
    repeated = returning != 0
    checkify.check(
        ~repeated.any(),
        "each non-zero segment id must be one contiguous run, got id {id} in several runs. Renumber the "
        "sequences.",
        id=jnp.max(returning, where=repeated, initial=jnp.iinfo(returning.dtype).min),
    )


def check_cu_seqlens(cu_seqlens: Int[Array, " n_plus_1"] | Int[Array, "B n_plus_1"], length: int) -> None:
    """Checks that cumulative lengths start at 0, never decrease, and end within the row.

    Args:
      cu_seqlens: cumulative lengths, see `nsa_jax.segment_ids_from_cu_seqlens`.
      length: number of tokens of a row.

    Raises:
      checkify.JaxRuntimeError: one of these rules is violated, see `check_segment_ids`.
      TypeError, ValueError: an argument does not have the kind, dtype or shape given above.
    """
    array_checks.check_cu_seqlens(cu_seqlens)
    check_int(low=0, length=length)
    if cu_seqlens.size == 0:  # a batch of no rows
        return
    rows = _signed(cu_seqlens).reshape(-1, cu_seqlens.shape[-1])
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
    """Checks that positions are key indices, or -1 for padding.

    Args:
      query_positions: key index of each query.
      num_keys: number of keys of a row.

    Raises:
      checkify.JaxRuntimeError: a position is below -1, or is `num_keys` or more, see `check_segment_ids`.
      TypeError, ValueError: an argument does not have the kind, dtype or shape given above.
    """
    check_arrays(check_query_positions, query_positions=query_positions)
    check_int(low=0, num_keys=num_keys)
    query_positions = _signed(query_positions)
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
    """Checks selections: ascending, no block twice, -1 only at the end, no block that starts after its query.

    Args:
      block_indices: block numbers, counted from the first token of the query's sequence.
      config: block structure.
      query_positions: key index of each query, -1 = padding. The blocks of a padding query may start
        anywhere.
      segment_ids: sequence of each token; None if every row is one sequence.

    Raises:
      checkify.JaxRuntimeError: one of these rules is violated, see `check_segment_ids`.
      TypeError, ValueError: an argument does not have the kind, dtype or shape given above.
    """
    check_config(config)
    index_arrays = dict(block_indices=block_indices, query_positions=query_positions)
    check_arrays(check_block_indices, **index_arrays, segment_ids=segment_ids)
    block_indices, query_positions = _signed(block_indices), _signed(query_positions)
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
        "that break this. Sort each selection and drop duplicates.",
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
    """Checks that the first index of every run is a multiple of the declared divisor.

    Args:
      runs: the runs that are passed as `query_positions`.
      batch: number of rows of the call.

    Raises:
      checkify.JaxRuntimeError: an index is not a multiple, see `check_segment_ids`.
      TypeError, ValueError: `runs` are not `Runs` of whole numbers, or not of `batch` rows.
    """
    if not isinstance(runs, layout.Runs):
        raise TypeError(f"runs must be Runs, got {type(runs).__name__}. Pass Runs((Run(length, first),)).")
    check_int(low=0, batch=batch)
    arguments.check_firsts(runs, batch)
    for run in runs.runs:
        first = jnp.asarray(run.first, jnp.int32)
        checkify.check(
            (first % runs.divisor == 0).all(),
            f"divisor must divide the first index of each run, got divisor {runs.divisor} for indices from "
            "{low} to {high}. Declare a smaller divisor.",
            low=first.min(),
            high=first.max(),
        )


def checked[**P, R](operation: Callable[P, R]) -> Callable[P, R]:
    """Wraps an operation so that it first checks the values of its index arguments.

    Args:
      operation: one of the operations of `nsa_jax.attention`.

    Returns:
      A function with the arguments and results of `operation`. It raises `checkify.JaxRuntimeError` where the
      `check_*` functions of this module do.

    Raises:
      TypeError: `operation` is not a function.

    Examples:
      >>> out, lse = checked(nsa_jax.selected_attention)(q, k, v, block_indices, config=config)
    """
    check_function(operation=operation)
    signature = inspect.signature(operation)

    @functools.wraps(operation)
    def with_checks(*args: P.args, **kwargs: P.kwargs) -> R:
        # Only traced: this refuses wrong shapes and types, which the checks below rely on.
        jax.eval_shape(lambda: operation(*args, **kwargs))
        _check_values(signature.bind(*args, **kwargs).arguments)
        return operation(*args, **kwargs)

    return with_checks


def _signed(index: Array) -> Array:
    """The same integers with a sign and at least 32 bits: in fewer, comparisons with lengths would wrap."""
    return jnp.asarray(index) + jnp.int32(0)


def _check_values(given: dict[str, Any]) -> None:
    queries = next((given[name] for name in ("query", "query_index", "scores") if name in given), None)
    if queries is None:  # `gated_sum` has no index arguments
        return
    batch, num_queries = queries.shape[:2]
    segment_ids, positions = given.get("segment_ids"), given.get("query_positions")
    first = given.get("first_key", 0)
    if segment_ids is not None:
        check_segment_ids(jnp.asarray(segment_ids))
    keys = ("key_slc", "key_win", "key_index")
    rows = next((given[name] for name in keys if name in given), segment_ids)
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
