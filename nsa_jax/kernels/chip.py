"""The GPU that a program is compiled for: its compute capability and processors. Does not import Triton."""

import importlib

import jax

H100_PROCESSORS = 132


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


def num_processors() -> int:
    """How many multiprocessors it has; those of an H100 if the GPU is unknown."""
    if jax.default_backend() == "gpu":
        return jax.local_devices()[0].core_count
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    return getattr(abstract, "num_cores", None) or H100_PROCESSORS
