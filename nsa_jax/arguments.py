"""Shape and dtype rules of the public operations, at trace time; `nsa_jax.debug` checks values."""

import numbers

import jax
import jax.numpy as jnp
import numpy as np

from nsa_jax import layout
from nsa_jax.array_typing import Array, Int32
from nsa_jax.config import NSAConfig, Tiles


def bind_shapes(**arrays: tuple[object, str]) -> dict[str, int]:
    """Checks arrays given as `name=(array, "B T N H")` and returns the size of each letter.

    An array that may be left out is given as `(array, "B S or None")`.

    Raises:
      TypeError: something is not an array.
      ValueError: wrong number of axes, or one letter with two sizes.
    """
    sizes: dict[str, int] = {}
    origin: dict[str, str] = {}
    for name, (array, letters) in arrays.items():
        axes = letters.removesuffix(" or None").split()
        if array is None and letters.endswith(" or None"):
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


def check_not_empty(sizes: dict[str, int]) -> None:
    """Only the compressed keys may be none."""
    if empty := [axis for axis in "BTSHV" if sizes.get(axis) == 0]:
        raise ValueError(f"no axis but C may be empty, got {empty[0]} = 0. Leave the call out.")


def check_heads(sizes: dict[str, int]) -> None:
    """Query heads must be a multiple of KV heads, and there must be some of each."""
    if min(sizes["N"], sizes["K"]) < 1 or sizes["N"] % sizes["K"]:
        raise ValueError(
            f"the number of query heads must be a multiple of the number of KV heads, got N = "
            f"{sizes['N']} and "
            f"K = {sizes['K']}. Choose num_kv_heads so that it divides num_heads."
        )


def check_floats(**arrays: Array | None) -> None:
    """Queries, keys and values must be floating and of one dtype."""
    present = {name: array for name, array in arrays.items() if array is not None}
    for name, array in present.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(
                f"{name} must be floating point, got {array.dtype}. Cast it, for example to bfloat16."
            )
    if len({array.dtype for array in present.values()}) > 1:
        got = ", ".join(f"{name} {array.dtype}" for name, array in present.items())
        raise ValueError(
            f"queries, keys and values must have one dtype, got {got}. Cast them to the same dtype."
        )


def check_integers(**arrays: Array | None) -> None:
    """Positions, segment ids and block indices must be integers."""
    for name, array in arrays.items():
        if array is not None and not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(f"{name} must be an integer array, got {array.dtype}. Cast it to int32.")


def check_config(config: NSAConfig) -> None:
    """The configuration is an `NSAConfig`, not a dict or a model's configuration."""
    if not isinstance(config, NSAConfig):
        raise TypeError(
            f"config must be an NSAConfig, got {type(config).__name__}. Build one with NSAConfig(...)."
        )


def resolve_tiles(tiles: Tiles | None) -> Tiles:
    """The default sizes unless given."""
    if tiles is not None and not isinstance(tiles, Tiles):
        raise TypeError(f"tiles must be Tiles, got {type(tiles).__name__}. Build them with Tiles(...).")
    return Tiles() if tiles is None else tiles


def check_selection(sizes: dict[str, int], config: NSAConfig) -> None:
    """A selection holds `num_selected_blocks` slots a query."""
    if "R" in sizes and sizes["R"] != config.num_selected_blocks:
        raise ValueError(
            f"block_indices must have num_selected_blocks slots a query, got {sizes['R']} and "
            f"{config.num_selected_blocks}. Pad unused slots with -1."
        )


def check_blocks(sizes: dict[str, int], config: NSAConfig) -> None:
    """`C` compressed keys are those of `S` tokens."""
    expected = layout.num_compression_blocks(sizes["S"], config)
    if sizes["C"] != expected:
        raise ValueError(
            f"{sizes['S']} tokens have {expected} compression blocks, got C = {sizes['C']} compressed keys. "
            "Compress the whole row with the same config, and pass query_positions where the queries are "
            "only part of it."
        )


def resolve_scale(scale: float | None, key_dim: int) -> float:
    """The factor of the logits: `1/sqrt(key dim)` unless given."""
    if scale is None:
        return key_dim**-0.5
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(
            f"scale must be a Python number, got {type(scale).__name__}. Fold an array into the queries."
        )
    return float(scale)


def resolve_positions(sizes: dict[str, int], positions, num_keys: int) -> Int32[Array, "B T"]:
    """Key indices of the queries: the last `T` of `num_keys` tokens unless given."""
    if positions is not None:
        return jnp.asarray(positions, jnp.int32)
    if sizes["T"] > num_keys:
        raise ValueError(
            f"more queries than keys need query_positions, got T = {sizes['T']} and S = {num_keys}. "
            "Pass the key index of each query."
        )
    return layout.default_query_positions(sizes["B"], sizes["T"], num_keys)


def resolve_compressed_length(sizes: dict[str, int], positions, config: NSAConfig) -> int:
    """Number of tokens `S` behind `C` compressed keys: from `segment_ids`, else the number of queries.

    Raises:
      ValueError: `C` is not the number of blocks of that length, so the default positions would be wrong.
    """
    length = sizes.get("S", sizes["T"])
    if "S" in sizes or positions is None:
        check_blocks({**sizes, "S": length}, config)
    return length
