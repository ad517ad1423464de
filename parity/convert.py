"""Arrays and weights between PyTorch and JAX, both ways; by dlpack, without a copy, on a shared device."""

import jax
import numpy as np
import torch
from torch import Tensor

from nsa_jax.nn.parameters import check_names_and_shapes

WIDE = (torch.float64, torch.complex128)


def jax_device(device: str) -> jax.Device:
    """JAX's first device of the kind that PyTorch calls "cpu" or "cuda"."""
    return jax.local_devices(backend={"cpu": "cpu", "cuda": "gpu"}[device])[0]


def to_jax(tensor: Tensor, device: jax.Device | None = None) -> jax.Array:
    """The tensor as a JAX array on `device` (default: where the tensor is).

    Memory is shared where both frameworks see that device: do not write to the tensor while the array lives.
    Integers of 64 bit become 32 bit unless JAX has x64 enabled; floats of 64 bit are an error then.
    """
    if tensor.dtype in WIDE and not jax.config.jax_enable_x64:
        raise ValueError(
            f"{tensor.dtype} needs 64-bit JAX, got jax_enable_x64=False. Convert in `jax.enable_x64(True)`."
        )
    tensor = tensor.detach().contiguous()
    platforms = {each.platform for each in jax.local_devices()}
    if tensor.device.type == "cuda" and "gpu" not in platforms:
        tensor = tensor.cpu()
    array = jax.dlpack.from_dlpack(tensor)
    return array if device is None else jax.device_put(array, device)


def to_torch(array: jax.Array, device: str | torch.device | None = None) -> Tensor:
    """The array as a tensor on `device` (default: where the array is); memory is shared where it can be."""
    if next(iter(array.devices())).platform == "gpu" and not torch.cuda.is_available():
        array = jax.device_put(array, jax.local_devices(backend="cpu")[0])
    tensor = torch.from_dlpack(array)
    return tensor if device is None else tensor.to(device)


def weights_of(module: torch.nn.Module) -> dict[str, np.ndarray]:
    """The parameters of a PyTorch module as `nsa_jax.nn.load_weights` takes them."""
    return {name: np.asarray(to_jax(parameter)) for name, parameter in module.named_parameters()}


def load_into_torch(module: torch.nn.Module, weights: dict[str, np.ndarray]) -> None:
    """Gives a PyTorch module copies of `nsa_jax.nn.weights`, in the dtypes that it has."""
    parameters = dict(module.named_parameters())
    check_names_and_shapes(parameters, weights)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(np.array(weights[name], np.float64)))
