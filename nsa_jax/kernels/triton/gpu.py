"""The GPU that kernels are made for, without importing Triton."""

import importlib

import jax


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
    """The kind of GPU whose tile sizes fit: 80 (A100), 89 (consumer cards, less memory) or 90 (Hopper)."""
    found = capability() or (9, 0)
    if (9, 0) <= found < (12, 0):
        return 90
    return 80 if found == (8, 0) else 89


def shared_bytes(target: int) -> int:
    """Shared memory that one program may have on a `target()`."""
    return {80: 163, 89: 99, 90: 227}[target] * 1024


def has_tma() -> bool:
    """Whether the GPU fetches tiles by itself (tensor memory accelerator)."""
    return (capability() or (0, 0)) >= (9, 0)
