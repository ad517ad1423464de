"""Validates a call at trace time: checks shapes, dtypes and options, and returns where its queries stand.

The expected shapes are read from the annotations of the public operations (`array_checks`). The values of
index arrays are checked by `nsa_jax.debug`.
"""

import numbers
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nsa_jax import layout
from nsa_jax.array_checks import check_arrays, check_integers, check_values
from nsa_jax.array_typing import Array, DType, Int
from nsa_jax.config import NSAConfig, check_config
from nsa_jax.option_checks import LARGEST_INT, check_int, is_finite


class Call(NamedTuple):
    """What an implementation gets in addition to the arrays.

    Attributes:
      placement: where each query stands in its row.
      scale: factor of the logits.
    """

    placement: layout.Placement
    scale: float


def check(
    operation: Callable[..., Any],
    arrays: Mapping[str, Any],
    *,
    config: NSAConfig,
    query_positions: Int[Array, "B T"] | layout.Runs | None,
    segment_ids: Int[Array, "B S"] | None,
    scale: float | None,
    first_key_win: int | Int[Array, ""] | Int[Array, " B"] = 0,
) -> Call:
    """Validates a call of a public operation and places its queries; options are as the caller gave them.

    Args:
      operation: the operation; its annotations give the shapes and kinds of dtype of `arrays`.
      arrays: its arrays by name; None for one that is left out.
      first_key_win: row index of the first key of the window branch.

    Returns:
      `Call(placement, scale)` with all defaults filled in.

    Raises:
      TypeError, ValueError: as in `nsa_jax.compressed_attention`.
    """
    positions_array = None if isinstance(query_positions, layout.Runs) else query_positions
    arrays = dict(arrays, query_positions=positions_array, segment_ids=segment_ids)
    sizes = check_arrays(operation, **arrays)
    check_config(config)
    check_not_empty(sizes)
    if "N" in sizes:
        check_heads(sizes)
    check_selection(sizes, config)
    check_index_heads(sizes)
    if isinstance(query_positions, layout.Runs):
        check_runs(query_positions, sizes)
        check_halo(query_positions, first_key_win, sizes, config)
    if not isinstance(query_positions, layout.Runs) or query_positions.halo is None:
        check_first_key(first_key_win, sizes)
    # `_row_length` adds the number of tokens to it, which would overflow a narrow integer type.
    known = isinstance(first_key_win, numbers.Integral)
    first_key_win = int(first_key_win) if known else jnp.asarray(first_key_win, jnp.int32)
    placement = layout.place(
        config,
        batch=sizes["B"],
        num_queries=sizes["T"],
        num_keys=_row_length(sizes, config, query_positions, first_key_win),
        query_positions=_as_given(query_positions),
        segment_ids=_as_given(segment_ids),
        first_keys=layout.FirstKeys(win=layout.Index(first_key_win)),
    )
    key_dim = sizes.get("H", sizes.get("E", 1))
    return Call(placement, resolve_scale(scale, key_dim, next(iter(arrays.values())).dtype))


def check_not_empty(sizes: Mapping[str, int], axes: str = "BTSWHVJIEM") -> None:
    """Raises ValueError if one of `axes` is empty. There may be no compressed keys yet, so C is not one."""
    if "N" not in sizes:  # else `check_heads` says what is wrong with the KV heads
        axes += "K"
    if empty := [axis for axis in axes if sizes.get(axis) == 0]:
        raise ValueError(f"every axis except C must be non-empty, got {empty[0]} = 0. Skip the call.")


def check_heads(sizes: Mapping[str, int]) -> None:
    """Raises ValueError unless there are heads of both kinds and KV heads divide query heads."""
    if min(sizes["N"], sizes["K"]) < 1 or sizes["N"] % sizes["K"]:
        raise ValueError(
            "the number of query heads must be a multiple of the number of KV heads, got "
            f"N = {sizes['N']} and K = {sizes['K']}. Choose num_kv_heads so that it divides num_heads."
        )


def check_selection(sizes: Mapping[str, int], config: NSAConfig) -> None:
    """Raises ValueError unless a selection has `num_selected_blocks` slots for each query."""
    if "R" in sizes and sizes["R"] != config.num_selected_blocks:
        raise ValueError(
            f"block_indices must have num_selected_blocks = {config.num_selected_blocks} slots per query, "
            f"got {sizes['R']}. Pad unused slots with -1."
        )


def check_index_heads(sizes: Mapping[str, int]) -> None:
    """Raises ValueError unless index keys have a head for each KV head, or one for all."""
    if "I" in sizes and sizes["I"] not in (1, sizes["K"]):
        raise ValueError(
            f"index keys must have one head, or one for each of K = {sizes['K']} KV heads, got "
            f"I = {sizes['I']}. Reshape them to [B, S, I, E]."
        )


def check_gates(gates: Array | None, present: tuple[str, ...]) -> None:
    """Raises ValueError unless there is a gate for each branch, and none for one alone."""
    if (1 if gates is None else gates.shape[3]) != len(present) or (gates is not None and len(present) == 1):
        given = "None" if gates is None else f"shape {tuple(gates.shape)}"
        raise ValueError(
            f"gates must be [B, T, N, {len(present)}], one for each of the branches {present}, and None for "
            f"one alone, got {given}. Pass the weights of these branches in this order."
        )


def check_some_choice(block_indices: Array | None, present: tuple[str, ...]) -> None:
    """Raises ValueError if there is neither a selection nor a compressed branch to choose one by."""
    if block_indices is None and "cmp" not in present:
        raise ValueError(
            f"block_indices must be given without a compressed branch, got None and the branches {present}. "
            "Choose them by select_by_index, or pass your own."
        )


def check_blocks(num_compressed: int, num_tokens: int, config: NSAConfig) -> None:
    """Raises ValueError unless a row of `num_tokens` has `num_compressed` compression blocks."""
    expected = layout.num_compression_blocks(num_tokens, config)
    if num_compressed != expected:
        raise ValueError(
            f"a row of {num_tokens} tokens must have {expected} compressed keys, got C = {num_compressed}. "
            "Compress the whole row with the same config, and pass query_positions if only some tokens are "
            "queries."
        )


def check_runs(runs: layout.Runs, sizes: Mapping[str, int]) -> None:
    """Raises unless the runs cover the `T` queries, and each index is an int, a scalar or one int per row."""
    lengths = [run.length for run in runs.runs]
    if not all(isinstance(x, numbers.Integral) and x > 0 for x in lengths) or sum(lengths) != sizes["T"]:
        raise ValueError(
            f"the lengths of runs must be positive ints that add up to T, got {lengths} and "
            f"T = {sizes['T']}. Make the runs cover every query once."
        )
    check_firsts(runs, sizes["B"])
    if runs.num_queries is not None:
        check_row_number("num_queries", runs.num_queries, sizes["B"], scalar=False)
        check_values(0, sizes["T"], num_queries=runs.num_queries)


def check_firsts(runs: layout.Runs, batch: int) -> None:
    """Raises unless the divisor is a positive int, and first indices are ints, scalars or one int per row."""
    check_int(low=1, divisor=runs.divisor)
    for run in runs.runs:
        check_int(low=1, **{"the length of a run": run.length})
        check_row_number("the first of a run", run.first, batch, after=run.length)


def check_halo(
    runs: layout.Runs, first_key: int | Array, sizes: Mapping[str, int], config: NSAConfig
) -> None:
    """Raises ValueError unless a halo is as long as the window needs, and the window's arrays hold it."""
    halo = runs.halo
    if halo is None:
        return
    if not isinstance(halo, numbers.Integral) or halo < config.window_size - 1:
        raise ValueError(
            f"halo must be an int of at least window_size - 1 = {config.window_size - 1}, got {halo!r}. Give "
            "each run all keys that its first query sees."
        )
    check_int(high=(LARGEST_INT - sizes["T"]) // len(runs.runs), halo=halo)
    if not is_zero(first_key):
        raise ValueError(
            "first_key must be left out if runs have a halo, got both. Leave it out: the runs say where "
            "their keys begin."
        )
    expected = sizes["T"] + len(runs.runs) * halo
    if sizes.get("W", expected) != expected:
        raise ValueError(
            f"the window's keys must be {halo} tokens and then its own for each of {len(runs.runs)} runs, "
            f"{expected} in all, got W = {sizes['W']}. Pass one stretch of keys for each run."
        )


def check_first_key(first_key: int | Array, sizes: Mapping[str, int]) -> None:
    """Raises unless `first_key` is an int, a scalar or one int per row, and fits the length of the arrays.

    If it is 0, the window's keys must be those of the whole row.
    """
    check_row_number("first_key", first_key, sizes["B"], after=sizes.get("W", 0))
    if is_zero(first_key) and "W" in sizes and sizes.get("S", sizes["W"]) != sizes["W"]:
        raise ValueError(
            f"the window's keys must cover all S = {sizes['S']} tokens unless first_key is given, got "
            f"W = {sizes['W']}. Pass first_key (first_key_win in native_sparse_attention)."
        )


def is_zero(first_key: int | Array) -> bool:
    """Whether an index is known, while tracing, to be 0."""
    return isinstance(first_key, numbers.Integral) and first_key == 0


def check_row_number(name: str, number: Any, batch: int, *, scalar: bool = True, after: int = 0) -> None:
    """Raises unless `number` is a token index for each row: an int or scalar if `scalar`, or one per row.

    An int must be such that the indices of `after` tokens from it on fit into int32, and itself when negated.
    """
    if scalar and isinstance(number, numbers.Integral):
        check_int(low=-LARGEST_INT, high=LARGEST_INT - after, **{name: number})
        return
    shapes = ((), (batch,)) if scalar else ((batch,),)
    if not isinstance(number, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        raise TypeError(f"{name} must be an integer or an array, got {type(number).__name__}. Pass an int.")
    if number.shape not in shapes or not jnp.issubdtype(number.dtype, jnp.integer):
        raise ValueError(
            f"{name} must be {'a scalar integer, or ' if scalar else ''}one integer for each of {batch} "
            f"rows, got {number.dtype} of shape {number.shape}. Reshape or cast it."
        )
    check_integers(**{name: number})


def resolve_scale(scale: float | None, key_dim: int, dtype: DType) -> float:
    """Returns the factor of the logits: `scale`, or `1/sqrt(key_dim)` if it is None.

    Raises:
      TypeError: `scale` is not a Python number.
      ValueError: `scale` is not finite, or too large for the logits of queries of this dtype.
    """
    if scale is None:
        return key_dim**-0.5
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(
            f"scale must be a Python number, got {type(scale).__name__}. Multiply the queries by an array "
            "instead."
        )
    # Half of the largest number, because kernels multiply the scale by log2(e).
    most = float(jnp.finfo(jnp.promote_types(jax.dtypes.canonicalize_dtype(dtype), jnp.float32)).max) / 2
    if not is_finite(scale) or abs(scale) > most:
        raise ValueError(
            f"scale must be finite, got {scale}. Pass None for 1/sqrt(key dim), or at most {most:.3g} here."
        )
    return float(scale)


def _row_length(
    sizes: Mapping[str, int],
    config: NSAConfig,
    query_positions: Array | layout.Runs | None,
    first_key: int | Array,
) -> Any:
    """Number of tokens of a row, as far as the call tells: from `S`, the window's or the compressed keys.

    If only compressed keys or scores are given, the row has as many tokens as there are queries. With
    positions given, it has as many tokens as a row of `C` or `M` blocks can have at most. Window keys in
    stretches do not tell.
    """
    placed = query_positions is not None
    length: Any
    if "C" in sizes and ("S" in sizes or not placed):
        length = sizes.get("S", sizes["T"])
        check_blocks(sizes["C"], length, config)
    elif "C" in sizes:
        length = layout.longest_length(sizes["C"], config)
    elif "M" in sizes:
        longest = sizes["M"] * config.selection_block_size
        length = sizes.get("S", longest if placed else sizes["T"])
        if length > longest:
            raise ValueError(
                f"scores must have one number for each selection block of a row of {length} tokens, got "
                f"M = {sizes['M']} blocks of {config.selection_block_size}. Pass those of "
                "the whole row."
            )
    elif "S" in sizes:
        length = sizes["S"]
    elif isinstance(query_positions, layout.Runs) and query_positions.halo is not None:
        length = jnp.iinfo(jnp.int32).max
    else:
        length = first_key + sizes["W"]
    held = sizes.get("S" if "C" in sizes else "W", length)
    if not placed and sizes["T"] > held:
        raise ValueError(
            f"query_positions must be given if there are more queries than keys, got T = {sizes['T']} and "
            f"S = {held}. Pass the key index of each query."
        )
    return length


def _as_given[X](array: X) -> X | Array:
    """Converts NumPy arrays to JAX arrays and returns everything else unchanged."""
    return jnp.asarray(array) if isinstance(array, np.ndarray) else array
