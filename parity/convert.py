"""Arrays and weights between PyTorch and JAX, both ways; by dlpack, without a copy, on a shared device."""

import jax
import torch
from flax import nnx
from torch import Tensor

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


def parameters_of(module: nnx.Module) -> dict[str, jax.Array]:
    """The parameters of an NNX module under the names that PyTorch gives them: paths joined by dots."""
    return flatten(nnx.state(module, nnx.Param))


def flatten(state: nnx.State) -> dict[str, jax.Array]:
    """`{"gate.kernel_in": array, ...}` of a state of parameters, or of their gradients."""
    return {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}


def load_into_jax(module: nnx.Module, weights: dict[str, Tensor], device: jax.Device | None = None) -> None:
    """Gives an NNX module copies of the weights of a PyTorch `state_dict`, in the dtypes they have there.

    The module may be abstract, as `nnx.eval_shape` makes it, which spares its own initial weights.
    """
    state = nnx.state(module, nnx.Param)
    leaves = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    check_match({name: leaf.get_value().shape for name, leaf in leaves.items()}, weights)
    for name, leaf in leaves.items():
        leaf.set_value(to_jax(weights[name].detach().clone(), device))
    nnx.update(module, state)


def load_into_torch(module: torch.nn.Module, weights: dict[str, jax.Array]) -> None:
    """Gives a PyTorch module copies of the weights of `parameters_of`, in the dtypes they have there."""
    parameters = dict(module.named_parameters())
    check_match({name: parameter.shape for name, parameter in parameters.items()}, weights)
    for name, parameter in parameters.items():
        parameter.data = to_torch(weights[name], parameter.device).clone()


def check_match(
    shapes: dict[str, tuple[int, ...]], weights: dict[str, Tensor] | dict[str, jax.Array]
) -> None:
    """Raises ValueError unless `weights` has exactly these names and shapes."""
    given = {name: tuple(weight.shape) for name, weight in weights.items()}
    wanted = {name: tuple(shape) for name, shape in shapes.items()}
    if given != wanted:
        differing = sorted(
            name for name in given.keys() | wanted.keys() if given.get(name) != wanted.get(name)
        )
        told = ", ".join(f"{name}: {given.get(name)} for {wanted.get(name)}" for name in differing)
        raise ValueError(
            f"the weights must be those of the module, name by name, got {told}. "
            "Build both modules with the same arguments."
        )
