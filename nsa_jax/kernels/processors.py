"""The multiprocessors of the GPU that a program is compiled for."""

import jax

H100_PROCESSORS = 132


def num_processors() -> int:
    """How many there are; those of an H100 if the GPU is unknown."""
    if jax.default_backend() == "gpu":
        return jax.local_devices()[0].core_count
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    return getattr(abstract, "num_cores", None) or H100_PROCESSORS
