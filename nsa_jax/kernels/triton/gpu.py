"""The sizes and features that fit the GPU that kernels are compiled for. Does not import Triton."""

from typing import Any

from nsa_jax.array_typing import Array
from nsa_jax.kernels.chip import capability
from nsa_jax.kernels.triton.sizes import ADA, AMPERE, HOPPER, Shape


def target() -> int:
    """The kind of GPU in `sizes` whose sizes fit: HOPPER from compute capability 9.0 on, or if it is unknown.

    Consumer cards of 12.0 have less shared memory, so they take the sizes of ADA.
    """
    found = capability() or (9, 0)
    if (9, 0) <= found < (12, 0):
        return HOPPER
    return AMPERE if found == (8, 0) else ADA


def shape_of(query: Array, key: Array, value: Array | None = None, **known: Any) -> Shape:
    """`Shape` of a call with [B, T, N, H], [B, S, K, H] and [B, S, K, V]; `known` are its other fields."""
    dims, heads = (key if value is None else value).shape, query.shape[2]
    known["blackwell"] = (10, 0) <= (capability() or (9, 0)) < (12, 0)
    return Shape(target(), query.dtype.itemsize, heads // dims[2], query.shape[3], dims[3], **known)


def has_tma() -> bool:
    """Whether the GPU has a tensor memory accelerator (TMA), which fetches whole tiles."""
    return (capability() or (0, 0)) >= (9, 0)
