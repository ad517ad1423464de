"""Validates a call at trace time: checks shapes, dtypes and options, and returns where its queries stand.

The expected shapes are read from the annotations of the public operations. The values of index arrays are
checked by `nsa_jax.debug`.
"""

import functools
import inspect
import math
import numbers
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nsa_jax import layout
from nsa_jax.array_typing import Array, Float, Int
from nsa_jax.config import NSAConfig

FLOATS = ("bfloat16", "float16", "float32", "float64")


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
    """Validates a call of a public operation and places its queries.

    Args:
      operation: the operation; its annotations give the shapes and kinds of dtype of `arrays`.
      arrays: its arrays by name; None for one that is left out.
      config: block structure, as given by the caller.
      query_positions: as given by the caller.
      segment_ids: as given by the caller.
      scale: as given by the caller.
      first_key_win: row index of the first key of the window branch.

    Returns:
      `Call(placement, scale)` with all defaults filled in.

    Raises:
      TypeError: an argument is of the wrong kind, or an array of the wrong kind of dtype.
      ValueError: shapes or dtypes disagree, or a number is out of range.
    """
    positions_array = None if isinstance(query_positions, layout.Runs) else query_positions
    arrays = dict(arrays, query_positions=positions_array, segment_ids=segment_ids)
    annotations = annotations_of(operation)
    sizes = bind_shapes(annotations, arrays)
    check_config(config)
    check_not_empty(sizes)
    check_heads(sizes)
    check_selection(sizes, config)
    check_dtypes(annotations, arrays)
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
    return Call(placement, resolve_scale(scale, sizes["H"]))


def bind_shapes(annotations: "Annotations", arrays: Mapping[str, Any]) -> dict[str, int]:
    """Finds the size of each letter in `annotations` from the shapes of `arrays`.

    An array may be None if its annotation allows it.

    Raises:
      TypeError: something is not an array.
      ValueError: an array has the wrong number of axes, or one letter has two sizes.
    """
    sizes: dict[str, int] = {}
    origin: dict[str, str] = {}
    for name, array in arrays.items():
        annotation, optional = annotations[name]
        axes = annotation.dim_str.split()
        if array is None and optional:
            continue
        if not isinstance(array, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
            raise TypeError(f"{name} must be an array, got {type(array).__name__}. Pass a jax.Array.")
        if len(array.shape) != len(axes):
            raise ValueError(
                f"{name} must have {len(axes)} axes [{', '.join(axes)}], got shape {tuple(array.shape)}. "
                "Reshape or transpose it."
            )
        for axis, size in zip(axes, array.shape, strict=True):
            expected = int(axis) if axis.isdigit() else sizes.setdefault(axis, size)
            if size != expected:
                source = "by definition" if axis.isdigit() else f"in {origin[axis]}"
                raise ValueError(
                    f"axis {axis} of {name} must be {expected} ({source}), got shape {tuple(array.shape)}. "
                    f"Pass {name} as [{', '.join(axes)}]."
                )
            origin.setdefault(axis, name)
    return sizes


type Annotations = Mapping[str, tuple[Any, bool]]


def annotations_of(owner: Callable[..., Any]) -> Annotations:
    """The jaxtyping annotation of each array of a function or a class, and whether it may be None."""
    return _annotations_of(owner)


# Separate from `annotations_of` because type checkers let a cached function take hashable types only.
@functools.cache
def _annotations_of(owner: Any) -> Annotations:
    if isinstance(owner, type):
        annotated = inspect.get_annotations(owner)
    else:
        annotated = {name: x.annotation for name, x in inspect.signature(owner).parameters.items()}
    found = {}
    for name, annotation in annotated.items():
        parts = typing.get_args(annotation) or (annotation,)
        if shaped := [part for part in parts if hasattr(part, "dim_str")]:
            found[name] = (shaped[0], type(None) in parts)
    return found


def check_dtypes(annotations: Annotations, arrays: Mapping[str, Any]) -> None:
    """Raises unless each array has the kind of dtype that its annotation names.

    Queries, keys and values must also share one dtype; gates and log-sum-exps may have their own.

    Raises:
      TypeError: an array has another kind of dtype, or a float type that is not supported.
      ValueError: queries, keys and values differ in dtype.
    """
    present = {name: array for name, array in arrays.items() if array is not None}
    floats = {name: x for name, x in present.items() if annotations[name][0].dtype is Float}
    check_floats(**{name: x for name, x in floats.items() if not _own_dtype(name)})
    for name, array in present.items():
        if name in floats:
            check_floats(**{name: array})
        else:
            check_integers(**{name: array})


def _own_dtype(name: str) -> bool:
    return name.startswith(("gates", "lse"))


def check_not_empty(sizes: Mapping[str, int], axes: str = "BTSWHV") -> None:
    """Raises ValueError if one of `axes` is empty. There may be no compressed keys yet, so C is not one."""
    if empty := [axis for axis in axes if sizes.get(axis) == 0]:
        raise ValueError(f"every axis except C must be non-empty, got {empty[0]} = 0. Skip the call.")


def check_heads(sizes: Mapping[str, int]) -> None:
    """Raises ValueError unless there are heads of both kinds and KV heads divide query heads."""
    if min(sizes["N"], sizes["K"]) < 1 or sizes["N"] % sizes["K"]:
        raise ValueError(
            "the number of query heads must be a multiple of the number of KV heads, got "
            f"N = {sizes['N']} and K = {sizes['K']}. Choose num_kv_heads so that it divides num_heads."
        )


def check_floats(**arrays: Array) -> None:
    """Raises TypeError or ValueError unless all arrays are of one dtype, a float of at least 16 bits."""
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(
                f"{name} must be floating point, got {array.dtype}. Cast it, for example to bfloat16."
            )
        if array.dtype.name not in FLOATS:
            raise TypeError(f"{name} must be one of {FLOATS}, got {array.dtype}. Cast it to bfloat16.")
    if len({array.dtype for array in arrays.values()}) > 1:
        got = ", ".join(f"{name} {array.dtype}" for name, array in arrays.items())
        raise ValueError(
            f"queries, keys and values must have one dtype, got {got}. Cast them to the same dtype."
        )


def check_integers(**arrays: Array) -> None:
    """Raises TypeError unless all arrays hold integers."""
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(f"{name} must be an integer array, got {array.dtype}. Cast it to int32.")


def check_config(config: NSAConfig) -> None:
    """Raises TypeError unless `config` is an `NSAConfig`, not, for example, the configuration of a model."""
    if not isinstance(config, NSAConfig):
        raise TypeError(
            f"config must be an NSAConfig, got {type(config).__name__}. Build one with NSAConfig(...)."
        )


def check_selection(sizes: Mapping[str, int], config: NSAConfig) -> None:
    """Raises ValueError unless a selection has `num_selected_blocks` slots for each query."""
    if "R" in sizes and sizes["R"] != config.num_selected_blocks:
        raise ValueError(
            f"block_indices must have num_selected_blocks = {config.num_selected_blocks} slots per query, "
            f"got {sizes['R']}. Pad unused slots with -1."
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
    """Raises unless the runs cover the `T` queries and each index is an int, a scalar or one int per row."""
    lengths = [run.length for run in runs.runs]
    if not all(isinstance(x, numbers.Integral) and x > 0 for x in lengths) or sum(lengths) != sizes["T"]:
        raise ValueError(
            f"the lengths of runs must be positive ints that add up to T, got {lengths} and "
            f"T = {sizes['T']}. Make the runs cover every query once."
        )
    if not isinstance(runs.divisor, numbers.Integral) or runs.divisor < 1:
        raise ValueError(f"divisor must be a positive int, got {runs.divisor!r}. Pass 1 if nothing is known.")
    for run in runs.runs:
        _check_row_number("the first of a run", run.first, sizes["B"])
    if runs.num_queries is not None:
        _check_row_number("num_queries", runs.num_queries, sizes["B"], scalar=False)


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
    _check_row_number("first_key", first_key, sizes["B"])
    if is_zero(first_key) and "W" in sizes and sizes.get("S", sizes["W"]) != sizes["W"]:
        raise ValueError(
            f"the window's keys must cover all S = {sizes['S']} tokens unless first_key is given, got "
            f"W = {sizes['W']}. Pass first_key (first_key_win in native_sparse_attention)."
        )


def is_zero(first_key: int | Array) -> bool:
    """Whether an index is known, while tracing, to be 0."""
    return isinstance(first_key, numbers.Integral) and first_key == 0


def _check_row_number(name: str, number: Any, batch: int, scalar: bool = True) -> None:
    if scalar and isinstance(number, numbers.Integral) and not isinstance(number, bool):
        return
    shapes = ((), (batch,)) if scalar else ((batch,),)
    if not isinstance(number, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        raise TypeError(f"{name} must be an integer or an array, got {type(number).__name__}. Pass an int.")
    if number.shape not in shapes or not jnp.issubdtype(number.dtype, jnp.integer):
        raise ValueError(
            f"{name} must be {'a scalar integer, or ' if scalar else ''}one integer for each of {batch} "
            f"rows, got {number.dtype} of shape {number.shape}. Reshape or cast it."
        )


def resolve_scale(scale: float | None, key_dim: int) -> float:
    """Returns the factor of the logits: `scale`, or `1/sqrt(key_dim)` if it is None.

    Raises:
      TypeError: `scale` is not a Python number.
      ValueError: `scale` is not finite.
    """
    if scale is None:
        return key_dim**-0.5
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(
            f"scale must be a Python number, got {type(scale).__name__}. Multiply the queries by an array "
            "instead."
        )
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}. Pass None for 1/sqrt(key dim).")
    return float(scale)


def _row_length(
    sizes: Mapping[str, int],
    config: NSAConfig,
    query_positions: Array | layout.Runs | None,
    first_key: int | Array,
) -> Any:
    """Number of tokens of a row, as far as the call tells: from `S`, the window's or the compressed keys.

    If only compressed keys are given, the row has as many tokens as there are queries. With positions given,
    it has as many tokens as a row of `C` blocks can have at most. Window keys in stretches do not tell.
    """
    placed = query_positions is not None
    length: Any
    if "C" in sizes and ("S" in sizes or not placed):
        length = sizes.get("S", sizes["T"])
        check_blocks(sizes["C"], length, config)
    elif "C" in sizes:
        length = layout.longest_length(sizes["C"], config)
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
