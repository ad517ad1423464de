"""One product in the place of several with the same input, for models that write text.

On a GPU XLA joins products with the same input by itself, because one large product is faster. But it lays
their kernels side by side where the products are, so in each step of a loop. Here that is done once.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from nsa_jax.array_typing import Array, DType, Float
from nsa_jax.nn import products
from nsa_jax.nn.gate import Gate
from nsa_jax.nn.indexer import Indexer

# Joined kernels are filled up with zeros to a multiple of this. XLA pads others itself, in each step.
WIDTH_MULTIPLE = 128


class Source(NamedTuple):
    """A product with the input: its parameters, and how it is computed."""

    kernel: nnx.Param[Array]
    bias: nnx.Param[Array] | None
    dtype: DType | None
    precision: Any


class Joined(nnx.Module):
    """The products of an input with several kernels, as one.

    Parameters: `kernel` `[D, F]`, in the dtype of the computation, and `bias` `[F]` if a source has one.

    Args:
      sources: the products, by name. They must be alike.
      multiple: the last axis of each product is filled up with zeros to a multiple of this.
    """

    def __init__(self, sources: Mapping[str, Source], multiple: int = 1):
        each = list(sources.values())
        self.dtype, self.precision = each[0].dtype, each[0].precision
        kernels = [_filled(source.kernel[...], multiple) for source in each]
        biases = [None if source.bias is None else _filled(source.bias[...], multiple) for source in each]
        self.parts = tuple(zip(sources, (kernel.shape[1:] for kernel in kernels), strict=True))
        kernel, bias = _side_by_side(kernels, biases, dtype=self.dtype)
        self.kernel = nnx.Param(kernel)
        self.bias = nnx.data(None if bias is None else nnx.Param(bias))

    def __call__(self, x: Float[Array, "B T D"]) -> dict[str, Float[Array, "B T ..."]]:
        """The products by the names of their sources."""
        bias = None if self.bias is None else self.bias[...]
        x, kernel, bias = products.promote_columns((x, self.kernel[...], bias), dtype=self.dtype)
        out = jnp.matmul(x, kernel, precision=self.precision)
        out = out if bias is None else out + bias
        made, start = {}, 0
        for name, shape in self.parts:
            end = start + math.prod(shape)
            made[name] = out[..., start:end].reshape(*x.shape[:-1], *shape)
            start = end
        return made


def projected(module: Any, x: Float[Array, "B T D"], names: Iterable[str] = ()) -> dict[str, Array]:
    """The products of `x` with the projections of these names, and all that the module has joined.

    Where it is called twice with the same `x`, XLA computes the joined product once.
    """
    made = module.joined(x) if is_joined(module) else {}
    x = beside(module, x)
    return made | {name: getattr(module, name)(x) for name in names if name not in made}


def beside(module: Any, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """`x` for what the module has not joined: a barrier keeps XLA from joining that with what it has."""
    return jax.lax.optimization_barrier(x) if is_joined(module) else x


def is_joined(module: Any) -> bool:
    """Whether `join` has changed the module."""
    return isinstance(getattr(module, "joined", None), Joined)


def join(module: Any, names: Sequence[str], multiple: int = 1) -> list[Array]:
    """Joins the projections of these names, and those of a `Gate` and an `Indexer`, as `module.joined`.

    Only what computes as the first one does is joined; everything else stays as it is. So does all of it if
    the first is no projection of ours, or divided over devices. For `multiple` see `Joined`.

    Returns:
      The arrays that it has put side by side, which the module no longer holds.
    """
    groups = [{name: _of_projection(getattr(module, name))} for name in names]
    if type(getattr(module, "gate", None)) is Gate:
        module.gate = nnx.clone(module.gate)  # another layer may have the same
        groups.append({"gate": _of_gate(module.gate)})
    if type(getattr(module, "selector", None)) is Indexer:
        module.selector = selector = nnx.clone(module.selector)
        own = {name: _of_projection(getattr(selector, name)) for name in selector.input_projections}
        groups.append({f"selector.{name}": source for name, source in own.items()})
    first = groups[0][names[0]]
    alike = [group for group in groups if all(_are_alike(first, source) for source in group.values())]
    sources = {name: source for group in alike for name, source in group.items() if source is not None}
    if len(sources) < 2:
        return []
    module.joined = Joined(sources, multiple)
    for name in sources:
        owner, _, attribute = name.rpartition(".")
        if name == "gate":
            del module.gate.kernel_in, module.gate.bias_in
        else:
            delattr(getattr(module, owner) if owner else module, attribute)
    parameters = (p for source in sources.values() for p in (source.kernel, source.bias) if p is not None)
    return [parameter.get_value() for parameter in parameters]


def _of_projection(part: Any) -> Source | None:
    """A projection as a source; None if it is not as this library makes it, or divided over devices."""
    if type(part) is nnx.LinearGeneral:
        plain = part.axis == (-1,) and not part.batch_axis and part.dot_general is None
        plain = plain and part.dot_general_cls is None
    elif type(part) is nnx.Linear:
        plain = part.dot_general is jax.lax.dot_general
    else:
        return None
    plain = plain and part.promote_dtype is products.promote_columns and part.preferred_element_type is None
    source = Source(part.kernel, part.bias, part.dtype, part.precision)
    return source if plain and all(map(is_whole, source[:2])) else None


def _of_gate(gate: Gate) -> Source | None:
    """The first product of a gate as a source; None if it is divided, or its dtype depends on the second."""
    source = Source(gate.kernel_in, gate.bias_in, gate.dtype, gate.precision)
    dtypes = {p.get_value().dtype for p in (gate.kernel_in, gate.bias_in, gate.kernel_out, gate.bias_out)}
    return source if len(dtypes) == 1 and all(map(is_whole, source[:2])) else None


def _are_alike(first: Source | None, source: Source | None) -> bool:
    """Whether two products can be one: they promote their input to the same dtype, and are as precise."""
    if first is None or source is None or first[2:] != source[2:]:
        return False
    arrays = (first.kernel, source.kernel, source.bias)
    return len({p.get_value().dtype for p in arrays if p is not None}) == 1


def is_whole(parameter: nnx.Variable[Any] | None) -> bool:
    """Whether each device has all of a parameter, as far as that is known while tracing."""
    if parameter is None:
        return True
    value = parameter.get_value()
    if isinstance(value, jax.core.Tracer):
        axes = *(parameter.get_metadata("out_sharding", ()) or ()), *jax.typeof(value).sharding.spec
        return all(axis is None for axis in axes)
    sharding = getattr(value, "sharding", None)  # NumPy arrays have none
    return sharding is None or sharding.is_fully_replicated


def _filled(array: Array, multiple: int) -> Array:
    padding = -array.shape[-1] % multiple
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, padding)]) if padding else array


@functools.partial(jax.jit, static_argnames="dtype")
def _side_by_side(
    kernels: list[Array], biases: list[Array | None], *, dtype: DType | None
) -> tuple[Array, Array | None]:
    """The kernels `[D, ...]` as one `[D, F]`, and the biases as `[F]`, zeros where there is none."""
    dtype = kernels[0].dtype if dtype is None else dtype
    flat = [kernel.reshape(len(kernel), -1).astype(dtype) for kernel in kernels]
    kernel = _filled(jnp.concatenate(flat, axis=1), WIDTH_MULTIPLE)
    if all(bias is None for bias in biases):
        return kernel, None
    filled = [
        jnp.zeros(kernel.shape[1], dtype) if bias is None else bias.reshape(-1).astype(dtype)
        for kernel, bias in zip(flat, biases, strict=True)
    ]
    return kernel, _filled(jnp.concatenate(filled), WIDTH_MULTIPLE)
