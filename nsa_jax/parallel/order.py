"""The order in which the tokens of a row lie on the devices."""

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import numpy as np

from nsa_jax.array_typing import Array
from nsa_jax.config import NSAConfig, check_config
from nsa_jax.option_checks import check_choice, check_int

type Order = Literal["zigzag", "contiguous"]

_ORDERS: tuple[str, ...] = get_args(Order.__value__)
MOST_DEVICES = 2**20  # more than any machine has; a list of chunks is made for them


def to_zigzag[X: (jax.Array, np.ndarray)](array: X, num_devices: int, *, axis: int = 1) -> X:
    """Puts the tokens of rows into zigzag order.

    A row is cut into `2 P` chunks of equal length. Chunks `i` and `2 P - 1 - i` become neighbours, those of
    device 0 first.

    Args:
      array: tokens, labels, positions, segment ids, or any other array with a token axis. Labels are made
        before: the token that follows another stands elsewhere afterwards.
      num_devices: `P`, number of devices along the context axis of the mesh.
      axis: the token axis.

    Returns:
      The array in zigzag order, of the same kind: NumPy's, or JAX's with the same sharding. (Under `jit` the
      sharding over auto axes is up to XLA.)

    Raises:
      TypeError: `P` or `axis` is not an int, or `array` not an array.
      ValueError: the number of tokens is not a multiple of `2 P`, there is no such axis, or `P` is
        not positive.

    Examples:
      >>> to_zigzag(np.arange(8), 2, axis=0)
      array([0, 1, 6, 7, 2, 3, 4, 5])
    """
    return _reorder(array, _chunks(num_devices), axis)


def from_zigzag[X: (jax.Array, np.ndarray)](array: X, num_devices: int, *, axis: int = 1) -> X:
    """Puts tokens in zigzag order back into the order of the row; arguments as in `to_zigzag`."""
    return _reorder(array, np.argsort(_chunks(num_devices)), axis)


def token_indices(length: int, num_devices: int, order: Order = "zigzag") -> np.ndarray:
    """The index in its row of each token, in the given order; the default rotary positions of a plain row.

    Args:
      length: number of tokens of a row.
      num_devices: number of devices along the context axis.
      order: "zigzag" or "contiguous".

    Returns:
      `[length]` int32.

    Raises:
      TypeError: a number is not an int.
      ValueError: the length is negative or does not divide, the order is unknown, or the number of devices is
        not positive.
    """
    check_int(low=0, length=length)
    _check_devices(num_devices)
    _check_whole_chunks(length, runs_per_device(order) * num_devices, order)
    index = np.arange(length, dtype=np.int32)
    return index if order == "contiguous" else to_zigzag(index, num_devices, axis=0)


def padded_length(length: int, num_devices: int, config: NSAConfig, order: Order = "zigzag") -> int:
    """The number of tokens to pad a row to, so that context parallelism can split it.

    Pad rows at their end, before `to_zigzag`, with any tokens. No earlier token sees them, so it is enough to
    leave them out of the loss.

    Args:
      length: number of tokens of a row.
      num_devices: number of devices along the context axis.
      config: block structure.
      order: "zigzag" or "contiguous".

    Returns:
      The smallest number, not below `length`, that is whole chunks of allowed length for every device.

    Raises:
      TypeError: a number is not an int, or `config` is not an `NSAConfig`.
      ValueError: the order is unknown, the length is negative, or the number of devices is not positive.

    Examples:
      >>> padded_length(100_000, 8, NSAConfig())
      100096
    """
    check_int(low=0, length=length)
    check_config(config)
    _check_devices(num_devices)
    runs = num_devices * runs_per_device(order)
    chunk = max(-(-length // runs), shortest_chunk(config))
    return runs * (-(-chunk // config.compression_stride) * config.compression_stride)


def shortest_chunk(config: NSAConfig) -> int:
    """The fewest tokens of a chunk: no window and no compression block reaches beyond the chunk before."""
    return max(config.window_size, config.compression_block_size) - 1


def runs_per_device(order: Order) -> int:
    """How many runs of consecutive tokens a device holds."""
    check_order(order)
    return 2 if order == "zigzag" else 1


def check_order(order: Order) -> None:
    """Raises ValueError if the order is unknown."""
    check_choice(_ORDERS, order=order)


def on_whole_rows(function: Callable[[Array], Array], array: Array) -> Array:
    """Applies a function that keeps shapes, also to tokens that are spread over a mesh, where they stay.

    Under `jit`, XLA decides over auto axes where they lie.
    """
    sharding = jax.typeof(array).sharding
    if explicit := sharding.mesh.explicit_axes:
        function = jax.sharding.auto_axes(function, axes=explicit, out_sharding=sharding)
    traced = isinstance(array, jax.core.Tracer)
    placed = None if traced else getattr(array, "sharding", None)  # NumPy has none
    if isinstance(placed, jax.NamedSharding):
        return jax.jit(function, out_shardings=placed)(array)
    return function(array)


def _chunks(num_devices: int) -> np.ndarray:
    """The chunks of a row in zigzag order."""
    _check_devices(num_devices)
    first = np.arange(num_devices)
    return np.stack([first, 2 * num_devices - 1 - first], axis=1).reshape(-1)


def _check_devices(num_devices: int) -> None:
    check_int(low=1, high=MOST_DEVICES, num_devices=num_devices)


def _check_whole_chunks(length: int, chunks: int, order: Order) -> None:
    if length % chunks:
        raise ValueError(
            f"{order} order needs whole chunks for each of {chunks // runs_per_device(order)} devices, so a "
            f"multiple of {chunks} tokens, got {length}. Pad the end of the rows, see padded_length."
        )


def _reorder(array, chunks: np.ndarray, axis: int):
    if not isinstance(array, jax.Array | np.ndarray):
        raise TypeError(f"array must be an array, got {type(array).__name__}. Pass one of NumPy or JAX.")
    check_int(axis=axis)
    shape = array.shape
    if not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"axis must be an axis of the array, got {axis} for shape {shape}. Pass its token axis."
        )
    axis %= len(shape)
    _check_whole_chunks(shape[axis], len(chunks), "zigzag")
    reorder = _reordering(tuple(chunks.tolist()), axis)
    return on_whole_rows(reorder, array) if isinstance(array, jax.Array) else reorder(array)


@functools.cache  # the same function each time, so that JAX compiles it once for a shape
def _reordering(chunks: tuple[int, ...], axis: int) -> Callable[[Any], Any]:
    def reorder(x):
        shape = x.shape
        cut = x.reshape(*shape[:axis], len(chunks), shape[axis] // len(chunks), *shape[axis + 1 :])
        taken = cut[(slice(None),) * axis + (np.array(chunks),)]
        return taken.reshape(shape)

    return reorder
