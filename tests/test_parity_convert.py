"""Arrays and weights between PyTorch and JAX, both ways."""

import re

import pytest

torch = pytest.importorskip("torch", reason="parity needs the extra `torch`")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402

import nsa_torch_ref  # noqa: E402
from nsa_jax import nn  # noqa: E402
from nsa_jax.config import NSAConfig  # noqa: E402
from parity import convert  # noqa: E402

CONFIG = NSAConfig(
    compression_block_size=4,
    compression_stride=2,
    selection_block_size=8,
    num_selected_blocks=4,
    window_size=5,
)
ARGUMENTS = dict(num_heads=4, in_features=12, num_kv_heads=2, head_dim=5, value_dim=3, config=CONFIG)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "bool"])
@pytest.mark.parametrize("shape", [(2, 3), (), (2, 0, 3)], ids=str)
def test_arrays_come_back_as_they_went(dtype, shape):
    tensor = (10 * torch.randn(shape)).to(getattr(torch, dtype))
    array = convert.to_jax(tensor)
    assert array.shape == shape
    assert array.dtype == jnp.dtype(dtype)
    back = convert.to_torch(array)
    assert back.dtype == tensor.dtype
    assert torch.equal(back, tensor)
    assert torch.equal(convert.to_torch(array, "cpu"), tensor)


def test_memory_is_shared_on_one_device():
    tensor = torch.randn(64, 64)
    array = convert.to_jax(tensor)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert convert.to_torch(array).data_ptr() == tensor.data_ptr()


def test_values_survive_a_transposed_tensor_and_a_leaf_with_gradient():
    tensor = torch.arange(6.0, requires_grad=True).reshape(2, 3).T
    assert convert.to_jax(tensor).tolist() == [[0, 3], [1, 4], [2, 5]]


def test_float64_needs_64_bit_jax():
    tensor = torch.tensor([1 / 3], dtype=torch.float64)
    with pytest.raises(ValueError, match="needs 64-bit JAX, got jax_enable_x64=False"):
        convert.to_jax(tensor)
    with jax.enable_x64(True):
        assert convert.to_jax(tensor).dtype == jnp.float64
        assert torch.equal(convert.to_torch(convert.to_jax(tensor)), tensor)


def twins(**changes):
    """A PyTorch layer with random weights and a JAX layer that has none yet."""
    arguments = ARGUMENTS | changes
    abstract = nnx.eval_shape(lambda: nn.NSAAttention(**arguments, rngs=nnx.Rngs(0)))
    return nsa_torch_ref.NSAAttention(**arguments), abstract


@pytest.mark.parametrize("compression", ["mlp", "mean"])
@pytest.mark.parametrize("use_bias", [False, True])
def test_both_layers_name_their_parameters_alike(compression, use_bias):
    ours, theirs = twins(compression=compression, use_bias=use_bias)
    shapes = {name: tuple(p.shape) for name, p in ours.named_parameters()}
    assert {name: p.shape for name, p in convert.parameters_of(theirs).items()} == shapes


def test_weights_move_into_jax_and_stay_there():
    source, target = twins(use_bias=True)
    convert.load_into_jax(target, source.state_dict())
    moved = {name: convert.to_torch(weight).clone() for name, weight in convert.parameters_of(target).items()}
    assert all(torch.equal(moved[name], weight) for name, weight in source.state_dict().items())
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.zero_()
    kept = convert.parameters_of(target)
    assert all(torch.equal(convert.to_torch(kept[name]), weight) for name, weight in moved.items())


def test_weights_move_out_of_a_fresh_jax_layer():
    target = nsa_torch_ref.Gate(12, 4)
    source = nn.Gate(12, 4, rngs=nnx.Rngs(0))
    weights = convert.parameters_of(source)
    convert.load_into_torch(target, weights)
    assert all(parameter.requires_grad for parameter in target.parameters())
    for name, parameter in target.named_parameters():
        assert torch.equal(parameter.detach(), convert.to_torch(weights[name]))
    with torch.no_grad():
        target.bias_out.fill_(7.0)
    assert float(source.bias_out[...].max()) == 0


def test_weights_bring_their_dtype():
    source, target = twins()
    convert.load_into_jax(target, source.to(torch.bfloat16).state_dict())
    assert {weight.dtype for weight in convert.parameters_of(target).values()} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("into", ["jax", "torch"])
def test_other_weights_are_one_clear_error(into):
    ours, theirs = twins()
    weights = dict(ours.state_dict())
    if into == "torch":
        weights = {name: convert.to_jax(weight) for name, weight in weights.items()}
    weights["gate.kernel"] = weights.pop("gate.kernel_in")
    weights["out_proj.kernel"] = weights["out_proj.kernel"][:2]
    told = (
        "the weights must be those of the module, name by name, got gate.kernel: (12, 8) for None, "
        "gate.kernel_in: None for (12, 8), out_proj.kernel: (2, 3, 12) for (4, 3, 12). "
        "Build both modules with the same arguments."
    )
    load, module = (convert.load_into_jax, theirs) if into == "jax" else (convert.load_into_torch, ours)
    with pytest.raises(ValueError, match=re.escape(told)):
        load(module, weights)
