"""The GPU that kernels are made for, without importing Triton."""

import importlib
from typing import Any

import jax

from nsa_jax.array_typing import Array
from nsa_jax.kernels.triton.tiles import ADA, AMPERE, HOPPER, Shape


def capability() -> tuple[int, int] | None:
    """Compute capability of the GPU that a program is made for, None where none is known."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if jax.default_backend() == "gpu":
        major, minor = jax.local_devices()[0].compute_capability.split(".")
        return int(major), int(minor)
    if abstract is None or abstract.platform != "gpu":
        return None
    # jax-triton knows what it compiles for where JAX has no GPU but lowers for one.
    info = importlib.import_module("jax_triton.triton_lib").gpu_info
    return divmod(info.get_gpu_info().compute_capability, 10)


def target() -> int:
    """The kind of GPU whose tile sizes fit, as `tiles` names it: HOPPER from compute capability 9.0 on.

    Consumer cards of 12.0 have less shared memory: they take those of ADA.
    """
    found = capability() or (9, 0)
    if (9, 0) <= found < (12, 0):
        return HOPPER
    return AMPERE if found == (8, 0) else ADA


def shape_of(query: Array, key: Array, value: Array | None = None, **known: Any) -> Shape:
    """What sizes depend on: the operands [B, T, N, H], [B, S, K, H] and [B, S, K, V], and what is `known`."""
    dims = (key if value is None else value).shape
    return Shape(target(), query.dtype.itemsize, query.shape[2] // dims[2], query.shape[3], dims[3], **known)


def has_tma() -> bool:
    """Whether the GPU fetches tiles by itself (tensor memory accelerator)."""
    return (capability() or (0, 0)) >= (9, 0)
