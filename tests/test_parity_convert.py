"""Arrays and weights between PyTorch and JAX, both ways."""

import re

import pytest
from messages import refused

torch = pytest.importorskip("torch", reason="parity needs the extra `torch`")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402

import nsa_torch_ref  # noqa: E402
from nsa_jax import nn  # noqa: E402
from nsa_jax.config import NSAConfig  # noqa: E402
from nsa_jax.nn.parameters import by_path  # noqa: E402
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
    with refused(ValueError, "needs 64-bit JAX, got jax_enable_x64=False"):
        convert.to_jax(tensor)
    with jax.enable_x64(True):
        assert convert.to_jax(tensor).dtype == jnp.float64
        assert torch.equal(convert.to_torch(convert.to_jax(tensor)), tensor)


def twins(param_dtype="float32", **changes):
    """A PyTorch layer with random weights and a JAX layer that has none yet."""
    arguments = ARGUMENTS | changes
    abstract = nnx.eval_shape(lambda: nn.NSAAttention(**arguments, param_dtype=param_dtype, rngs=nnx.Rngs(0)))
    return nsa_torch_ref.NSAAttention(**arguments).to(getattr(torch, param_dtype)), abstract


@pytest.mark.parametrize("compression", ["mlp", "mean"])
@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("sharing", [False, True])
def test_both_layers_name_their_parameters_alike(compression, use_bias, sharing):
    ours, theirs = twins(
        compression=compression, use_bias=use_bias, normalize_qk=use_bias, share_keys_values=sharing
    )
    shapes = {name: tuple(p.shape) for name, p in ours.named_parameters()}
    named = by_path(nnx.state(theirs, nnx.Param))
    assert {name: parameter.get_value().shape for name, parameter in named.items()} == shapes


@pytest.mark.parametrize(
    "branches", [("slc",), ("slc", "win"), ("cmp", "slc"), ("cmp", "slc", "win")], ids=str
)
def test_both_layers_with_an_indexer_name_their_parameters_alike(branches):
    selector = nn.IndexerConfig(num_heads=3, dim=4, weighted=True, normalize=True)
    ours, theirs = twins(branches=branches, selector=selector)
    shapes = {name: tuple(p.shape) for name, p in ours.named_parameters()}
    named = by_path(nnx.state(theirs, nnx.Param))
    assert {name: parameter.get_value().shape for name, parameter in named.items()} == shapes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_move_into_jax_and_stay_there(dtype):
    source, target = twins(use_bias=True, param_dtype=dtype)
    nn.load_weights(target, convert.weights_of(source))
    moved = nn.weights(target)
    for name, weight in source.state_dict().items():
        assert moved[name].dtype == jnp.dtype(dtype)
        assert torch.equal(convert.to_torch(jnp.asarray(moved[name])), weight)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.zero_()
    for name, weight in nn.weights(target).items():
        np.testing.assert_array_equal(weight, moved[name])


def test_weights_move_out_of_a_fresh_jax_layer():
    target = nsa_torch_ref.Gate(12, 4).double()
    source = nn.Gate(12, 4, rngs=nnx.Rngs(0))
    weights = nn.weights(source)
    convert.load_into_torch(target, weights)
    for name, parameter in target.named_parameters():
        assert parameter.requires_grad
        assert parameter.dtype == torch.float64
        np.testing.assert_array_equal(parameter.detach().numpy(), weights[name])
    with torch.no_grad():
        target.bias_out.fill_(7.0)
    assert float(source.bias_out[...].max()) == 0


def test_other_weights_are_one_clear_error():
    ours, theirs = twins()
    weights = convert.weights_of(ours)
    weights["gate.kernel"] = weights.pop("gate.kernel_in")
    weights["out_proj.kernel"] = weights["out_proj.kernel"][:2]
    told = (
        "weights must be those of the module, got 1 missing (gate.kernel_in), 1 extra (gate.kernel), "
        "1 of another shape (out_proj.kernel: (2, 3, 12) for (4, 3, 12)). Rename or convert them"
    )
    for load, module in ((nn.load_weights, theirs), (convert.load_into_torch, ours)):
        with refused(ValueError, re.escape(told)):
            load(module, weights)
