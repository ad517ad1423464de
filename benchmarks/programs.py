"""The functions that are timed: an operation, or dense attention, forward, backward or both."""

import functools
import importlib
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp

from benchmarks import inputs, layers
from benchmarks.inputs import LAYERS, Draw, Shape, abstract_arguments, tensor
from benchmarks.records import COMPARED
from benchmarks.timing import Compiled, compile_for
from nsa_jax import attention, dispatch
from nsa_jax.array_typing import Array, DType
from nsa_jax.nn.dense import choose_implementation

type Function = Callable[..., Any]


def function(operation: str, implementation: str, shape: Shape) -> Function:
    """The operation as a function of its arrays alone."""
    if operation in LAYERS:
        return layers.function(operation, implementation, shape)
    if operation == "dense_attention":
        by = cast(Any, implementation)
        return functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=by)
    if implementation in COMPARED:
        module = importlib.import_module(f"benchmarks.{implementation}")  # needs Triton
        return functools.partial(module.selected_attention, config=shape.config)
    settings = {} if operation == "gated_sum" else {"config": shape.config}
    run = functools.partial(getattr(attention, operation), implementation=implementation, **settings)
    if operation == "select_blocks":
        return lambda query, key_cmp, lse_cmp=None: run(query, key_cmp, lse_cmp=lse_cmp)
    return run


def arguments(operation: str, draw: Draw, shape: Shape) -> tuple[Array, ...]:
    """The arguments of that function."""
    if operation in LAYERS:
        return layers.arguments(operation, shape)
    return inputs.arguments(operation, draw, shape)


def draw(operation: str, implementation: str, shape: Shape, distribution: str = "random") -> Draw:
    """What the operation is given: the queries, or the input of a layer, and the blocks that are selected."""
    if operation in LAYERS:
        return layers.draw(operation, implementation, shape)
    if operation == "selected_attention":
        return inputs.draw_blocks(shape, distribution)
    if operation not in inputs.SELECTING:
        return inputs.draw_queries(shape, distribution, None)
    select, key_cmp = jax.jit(function("select_blocks", implementation, shape)), tensor("key_cmp", shape)
    return inputs.draw_queries(shape, distribution, lambda query: select(query, key_cmp))


def dense_implementation(operation: str, shape: Shape) -> str:
    """What the dense operation, or layer, is measured with here."""
    if operation in LAYERS:
        return choose_implementation(abstract_arguments("dense_attention", shape)[0]) or "xla"
    return "cudnn" if jax.default_backend() == "gpu" else "xla"


def refusal(operation: str, implementation: str, mode: str, shape: Shape) -> str | None:
    """Why this combination cannot be measured here, None if it can."""
    if operation == "select_blocks" and mode != "fwd":
        return "no gradient flows through the selection"
    operation = LAYERS.get(operation, operation)
    if operation == "dense_attention":
        if shape.key_dim != shape.value_dim:
            return f"dense attention has one head dim, got {shape.key_dim} and {shape.value_dim}"
        if implementation == "cudnn" and (shape.dtype == "float32" or shape.key_dim % 8):
            return f"cuDNN needs 16-bit floats and dim % 8 = 0, got {shape.dtype} and {shape.key_dim}"
        return None
    if implementation in COMPARED:
        if operation != "selected_attention":
            return f"{implementation} is there for selected_attention alone"
        implementation = COMPARED[implementation]
    arrays = [x for x in abstract_arguments(operation, shape) if len(x.shape) == 4]  # no lse
    return dispatch.unsupported_reason(operation, implementation, *arrays, config=shape.config)


def compile_mode(
    run: Function, mode: str, arguments: tuple[Array, ...], every_result: bool = False
) -> Compiled:
    """Compiles one mode of `run`.

    `fwd` returns all results. `bwd` is the pullback of the output alone, with the residuals as arguments;
    `fwd_bwd` is `value_and_grad` of the output's inner product with a random cotangent. Both give the
    gradients of every float argument. The lse of a branch has no cotangent, because in training it has none,
    unless `every_result` has one. The last argument of both is a tuple of cotangents.
    """
    if mode == "fwd":
        return compile_for(run, arguments)
    places = tuple(i for i, x in enumerate(arguments) if jnp.issubdtype(x.dtype, jnp.floating))

    def outputs(*floats: Array) -> tuple[Array, ...]:
        whole = list(arguments)
        for place, x in zip(places, floats, strict=True):
            whole[place] = x
        result = run(*whole)
        found = tuple(result) if isinstance(result, tuple) else (result,)
        return found if every_result else found[:1]

    floats = tuple(arguments[i] for i in places)
    out, *others = jax.eval_shape(outputs, *floats)
    # Rounded to the dtype of the output, all of them are exact in the precision of the input.
    cotangents = tuple(cotangent_like(x, out.dtype).astype(x.dtype) for x in (out, *others))
    if mode == "bwd":
        _, pullback = jax.jit(lambda *floats: jax.vjp(outputs, *floats))(*floats)
        return compile_for(lambda pullback, cotangents: pullback(cotangents), (pullback, cotangents))

    def loss(floats: tuple[Array, ...], cotangents: tuple[Array, ...]) -> Array:
        products = zip(outputs(*floats), cotangents, strict=True)
        first, *others = [(x.astype(jnp.float32) * cotangent).sum() for x, cotangent in products]
        return sum(others, start=first)

    return compile_for(jax.value_and_grad(loss), (floats, cotangents))


def cotangent_like(out: jax.Array | jax.ShapeDtypeStruct, dtype: DType) -> Array:
    """The random cotangent of an output of this shape, drawn in float32 and rounded to `dtype`."""
    return inputs.normal("cotangent", out.shape, dtype)
