"""Tiles as the kernels hold them: matrices in shared memory, one number a row, and which keys a row sees."""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from nsa_jax.array_typing import Array
from nsa_jax.kernels.mosaic_gpu.sizes import ROWS, StepSizes
from nsa_jax.kernels.mosaic_gpu.unstable import BY_ROW, WGMMA, Ref, swizzled
from nsa_jax.kernels.mosaic_gpu.visits import MEMBER_BITS

LOG2_E, LN_2 = math.log2(math.e), math.log(2)
LOWEST = -3.0e38  # the first maximum: finite, so that -inf - -inf cannot occur
i32, f32 = jnp.int32, jnp.float32


def whole_tiles(keys: Array) -> Array:
    """Keys or values `[B, S, K, H]` with S a multiple of 8: copies need a whole number of tiles of 8 rows."""
    return jnp.pad(keys, ((0, 0), (0, -keys.shape[1] % 8), (0, 0), (0, 0)))


def matrices(dtype: Any, *shape: int, summed: int | None = None) -> Ref:
    """Matrices in shared memory, for products that sum over the last axis or over one of `summed` numbers."""
    return plgpu.SMEM(shape, dtype, transforms=swizzled(shape[-1], summed, dtype))


def chosen(visit: Array, token: Array) -> Array:
    """Whether the token of each row chose the block of a visit."""
    members = lax.shift_right_logical(visit, MEMBER_BITS)
    return ((lax.broadcast(members, (ROWS,)) >> token) & 1) != 0


def across(numbers: Array, columns: int) -> Array:
    """One number a row, for all columns."""
    return lax.broadcast_in_dim(numbers, (ROWS, columns), [0])


def seen(start: Array, last: Ref | None, first: Ref | None, sizes: StepSizes, aligned: bool) -> Array:
    """Which keys of a box each row sees, where it may not see all.

    Args:
      start: row index of the first key of the step.
      last: row index of the last key that each row sees; None where all are before it.
      first: row index of the first key that each row sees, in aligned boxes; None where none is before it.
      sizes: of the kernel.
      aligned: whether the step begins at the first key of its box.
    """
    column = plgpu.broadcasted_iota(i32, (ROWS, sizes.box), 1, layout=WGMMA)
    row = None if last is None else plgpu.load(last, layout=BY_ROW, optimized=False)
    if aligned:
        assert row is not None, "aligned boxes end at the last key of their block"
        found = column + start <= across(row, sizes.box)
        if first is None:
            return found
        lowest = plgpu.load(first, layout=BY_ROW, optimized=False)
        return found & (column + start >= across(lowest, sizes.box))
    key = (column - start % 8).astype(jnp.uint32)  # of the step; those before it become large
    if row is None:
        return key < sizes.keys
    count = jnp.clip(row - start + 1, 0, sizes.keys)
    return key < across(count, sizes.box).astype(jnp.uint32)
