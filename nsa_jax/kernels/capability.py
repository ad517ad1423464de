"""The compute capability of the GPU that kernels are compiled for. Does not import Triton."""

import importlib

import jax


def capability() -> tuple[int, int] | None:
    """Compute capability of the GPU that a program is compiled for; None if unknown."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if jax.default_backend() == "gpu":
        major, minor = jax.local_devices()[0].compute_capability.split(".")
        return int(major), int(minor)
    if abstract is None or abstract.platform != "gpu":
        return None
    # JAX has no GPU but lowers for one: jax-triton knows for which.
    info = importlib.import_module("jax_triton.triton_lib").gpu_info
    return divmod(info.get_gpu_info().compute_capability, 10)
