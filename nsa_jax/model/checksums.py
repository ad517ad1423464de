"""Checksums of arrays, by which `restore` knows that it read what was saved.

Orbax has none for the data of arrays: a flipped byte there is read as another number. A CRC depends on the
order of the bytes, and so on how an array is divided among devices. The sum here does not:

    sum = sum over i, j, ... of w0[i] w1[j] ... word[i, j, ...]  modulo 2^64

The words are the bits of the array in units of up to 32. The weights are odd numbers that depend on axis and
index alone (the "multilinear" hash of Lemire and Kaser, arXiv:1202.4961, with a weight for each axis). The
sum of an array is that of its shards, so each process adds up what it holds, and nothing is gathered.

If one word changes, the sum does: the difference is an odd number times less than 2^32. If several change at
random, the sum stays the same once in 2^32 times or less.
"""

import json
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

WORD_BYTES = 4
# Weights are drawn for so many indices at a time: those of a long vector would take twice its memory.
STRETCH = 2**16


def of_json(values: Mapping[str, Any]) -> dict[str, str]:
    """The checksum of each of some values that JSON can hold, as hexadecimal digits."""
    texts = {name: json.dumps(value, sort_keys=True) for name, value in values.items()}
    return {name: f"{zlib.crc32(text.encode()):08x}" for name, text in texts.items()}


def of_arrays(arrays: Mapping[str, Any]) -> dict[str, str]:
    """The checksums of arrays and numbers, as hexadecimal digits.

    If arrays lie on devices of several processes, all of these must call it together.
    """
    parts = np.array([_sum_here(array) for array in arrays.values()], np.uint64)
    spread = [isinstance(array, jax.Array) and not array.is_fully_addressable for array in arrays.values()]
    if any(spread):
        # JAX has words of 32 bits by default, and no others.
        words = multihost_utils.process_allgather(parts.view(np.uint32))
        totals = np.ascontiguousarray(words).view(np.uint64).sum(axis=0)
        parts = np.where(spread, totals, parts)
    return {name: f"{part:016x}" for name, part in zip(arrays, parts.tolist(), strict=True)}


def _sum_here(array: Any) -> np.uint64:
    """The sum of what this process holds of an array: of all its elements, each once."""
    if not isinstance(array, jax.Array):
        return _sum(np.asarray(array), [0] * np.ndim(array))
    own = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    sums = [_sum(_on_host(shard.data), [part.start or 0 for part in shard.index]) for shard in own]
    return np.uint64(np.array(sums, np.uint64).sum())


def _on_host(shard: jax.Array) -> np.ndarray:
    """The elements of a shard. Of a GPU's, `np.asarray` would keep a copy as long as the array lives."""
    device = next(iter(shard.devices()))
    return np.asarray(shard if device.platform == "cpu" else _copied(shard, device))


def _copied(shard: jax.Array, device: jax.Device) -> jax.Array:
    return jax.device_put(shard, jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host"))


def _sum(array: np.ndarray, start: list[int]) -> np.uint64:
    """The sum of a part of an array; the part begins at the indices `start`."""
    if array.ndim == 0:
        array, start = array.reshape(1), [0]
    word_bytes = min(WORD_BYTES, array.itemsize)
    words = np.ascontiguousarray(array).view(f"u{word_bytes}")  # several words lie along the last axis
    start = [*start[:-1], start[-1] * (array.itemsize // word_bytes)]
    for axis in reversed(range(words.ndim)):
        words = _weighted(words, axis, start[axis])
    return np.uint64(words)


def _weighted(words: np.ndarray, axis: int, start: int) -> np.ndarray:
    """Sums over the last axis of `words`, which is `axis` of the array."""
    total = np.zeros(words.shape[:-1], np.uint64)
    for begin in range(0, words.shape[-1], STRETCH):
        stretch = words[..., begin : begin + STRETCH]
        # NumPy promises the same numbers for ever. With the lowest bit set they are odd.
        weights = np.random.PCG64(axis).advance(start + begin).random_raw(stretch.shape[-1]) | 1
        total += np.einsum("...i,i->...", stretch, weights)
    return total
