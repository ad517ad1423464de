"""Whole attention layers as functions of arrays: `nsa_jax.nn.NSAAttention` and the dense layer beside it.

A layer is its operation with everything around it: projections, rotary embedding and output projection, for
NSA also compressors and gates. Its arguments are the input and then its parameters, so that a gradient is
that of a training step. All of them are in the dtype of the shape.
"""

import zlib
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.inputs import Draw, Shape, key, overlap, tensor
from nsa_jax import layout
from nsa_jax.array_typing import Array
from nsa_jax.nn import DenseAttention, NSAAttention
from nsa_jax.nn.parameters import by_path

# Some parameters start at zero, and then others have no gradient: all get this much noise.
NOISE = 0.02


def create(
    operation: str, implementation: str, shape: Shape, rngs: nnx.Rngs
) -> NSAAttention | DenseAttention:
    """The layer with its initial parameters; an empty `implementation` takes the default."""
    sizes: dict[str, Any] = dict(
        num_heads=shape.query_heads, in_features=shape.model_dim, num_kv_heads=shape.kv_heads,
        head_dim=shape.key_dim, param_dtype=jnp.dtype(shape.dtype), rngs=rngs,
    )  # fmt: skip
    if operation == "dense_layer":
        return DenseAttention(**sizes)
    named = cast(Any, implementation or None)
    return NSAAttention(value_dim=shape.value_dim, config=shape.config, implementation=named, **sizes)


def parameters(operation: str, shape: Shape) -> dict[str, jax.ShapeDtypeStruct]:
    """Names, shapes and dtypes of the parameters, in the order in which `function` takes them."""
    abstract = nnx.eval_shape(lambda: create(operation, "", shape, nnx.Rngs(0)))
    named = by_path(nnx.state(abstract, nnx.Param))
    return {name: variable.get_value() for name, variable in named.items()}


def arguments(operation: str, shape: Shape) -> tuple[Array, ...]:
    """The input and the parameters; the same for one operation and shape on one platform."""
    layer = create(operation, "", shape, nnx.Rngs(zlib.crc32(operation.encode())))
    named = by_path(nnx.state(layer, nnx.Param))
    noisy = (
        variable[...] + NOISE * jax.random.normal(key(name), variable.shape, variable.dtype)
        for name, variable in named.items()
    )
    return tensor("x", shape), *noisy


def merged(operation: str, implementation: str, shape: Shape, values: tuple[Array, ...]) -> Any:
    """The layer with these parameters, of any one dtype, which is then that of the computation."""
    abstract = nnx.eval_shape(lambda: create(operation, implementation, shape, nnx.Rngs(0)))
    graph, state = nnx.split(abstract)
    for variable, value in zip(by_path(state).values(), values, strict=True):
        variable.set_value(value)
    return nnx.merge(graph, state)


def function(operation: str, implementation: str, shape: Shape) -> Callable[..., Array]:
    """The layer as a function of its input and its parameters."""
    return lambda x, *values: merged(operation, implementation, shape, values)(x)


def draw(operation: str, implementation: str, shape: Shape) -> Draw:
    """The input and, for NSA, the blocks that the layer selects for it."""
    x, *values = arguments(operation, shape)
    if operation == "dense_layer":
        return Draw("random", x)

    @jax.jit
    def choose(x: Array, *values: Array) -> Array:
        return merged(operation, implementation, shape, values).inspect(x).block_indices

    blocks = choose(x, *values)
    return Draw("random", x, blocks, overlap(blocks))


def products(operation: str, shape: Shape) -> int:
    """Multiplications of an input with a parameter in one forward."""
    blocks = layout.num_compression_blocks(shape.length, shape.config) * shape.kv_heads
    return shape.batch * sum(
        parameter.size * (blocks if name.startswith("compressor") else shape.length)
        for name, parameter in parameters(operation, shape).items()
        if "kernel" in name
    )
