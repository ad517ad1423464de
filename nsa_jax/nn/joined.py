"""One product in the place of several with the same input.

On a GPU XLA joins products with the same input by itself, because one large product is faster. Two things
remain. It does not join their gradients: that of the input is a sum of products, each of which is written and
read once more. So `projected_together` joins them for a call, with its gradients. And it lays the kernels
side by side where the products are, so in each step of a loop that writes text. `join` does that once.

Kernels whose columns are divided over devices, as by heads, are joined by each device for itself: its columns
of all of them lie side by side. So nothing is moved, neither then nor when their products are cut apart.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from nsa_jax.array_typing import Array, DType, Float
from nsa_jax.nn import products
from nsa_jax.nn.gate import Gate
from nsa_jax.nn.indexer import Indexer
from nsa_jax.nn.place import Place, place_of

# A product this wide takes its time for arithmetic: joining it saves less than cutting its columns out takes.
ENOUGH_COLUMNS = 1024
# Joined kernels are filled up with zeros to a multiple of this. XLA pads others itself, in each step.
WIDTH_MULTIPLE = 128


class Source(NamedTuple):
    """A product with the input: its parameters, how it is computed, and where.

    One with `copies` is made by each device for itself, with all columns.
    """

    kernel: nnx.Param[Array]
    bias: nnx.Param[Array] | None
    dtype: DType | None
    precision: Any
    place: Place
    copies: bool = False


class Joined(nnx.Module):
    """The products of an input with several kernels, as one.

    Parameters: `kernel` `[D, F]`, in the dtype of the computation, and `bias` `[F]` if a source has one.
    Where F is divided, each device has its own columns of all sources, side by side. What has copies comes
    out of a call once for each part of F, side by side.

    Args:
      sources: the products, by name. They must be alike.
      multiple: on each device, the last axis of each product is filled up with zeros to a multiple of this.
    """

    def __init__(self, sources: Mapping[str, Source], multiple: int = 1):
        each = list(sources.values())
        self.dtype, self.precision, place = each[0].dtype, each[0].precision, each[0].place
        kernels = [source.kernel[...] for source in each]
        biases = [None if source.bias is None else source.bias[...] for source in each]
        self.shards = place.column_parts
        self.parts = tuple((name, _own_shape(source, multiple)) for name, source in sources.items())
        kernel, bias = _side_by_side(
            kernels, biases, dtype=self.dtype, multiple=multiple, place=place,
            copies=tuple(source.copies for source in each),
        )  # fmt: skip
        self.kernel = nnx.Param(kernel)
        self.bias = nnx.data(None if bias is None else nnx.Param(bias))

    def __call__(self, x: Float[Array, "B T D"]) -> dict[str, Float[Array, "B T ..."]]:
        """The products by the names of their sources."""
        bias = None if self.bias is None else self.bias[...]
        x, kernel, bias = products.promote_columns((x, self.kernel[...], bias), dtype=self.dtype)
        out = jnp.matmul(x, kernel, precision=self.precision)
        out = out if bias is None else out + bias
        tokens, shards = x.shape[:-1], self.shards
        out = out.reshape(*tokens, shards, -1)
        made, start = {}, 0
        for name, shape in self.parts:
            end = start + math.prod(shape)
            # In two steps, as JAX does not see in one that all stays where it is.
            own = out[..., start:end].reshape(*tokens, shards, *shape)
            made[name] = own.reshape(*tokens, shards * shape[0], *shape[1:])
            start = end
        return made


def projected(module: Any, x: Float[Array, "B T D"], names: Iterable[str] = ()) -> dict[str, Array]:
    """The products of `x` with the projections of these names, and all that the module has joined.

    Where it is called twice with the same `x`, XLA computes the joined product once.
    """
    made = module.joined(x) if is_joined(module) else {}
    x = beside(module, x)
    return made | {name: getattr(module, name)(x) for name in names if name not in made}


def projected_together(module: Any, x: Float[Array, "B T D"], names: Sequence[str]) -> dict[str, Array]:
    """`projected`, by one product, whose gradients are one product each. A `Gate` is joined, too.

    Apart stays what has `ENOUGH_COLUMNS`, computes otherwise than the first projection, or is, or may be,
    divided over devices; and all where there are fewer tokens than features: to lay the kernels side by side
    would then be most of the work.

    What is joined is not called. If only some of the kernels learn, the gradient is still that of all.
    """
    if is_joined(module) or math.prod(x.shape[:-1]) < x.shape[-1]:
        return projected(module, x, names)
    sources = {name: _of_projection(getattr(module, name)) for name in names}
    if type(getattr(module, "gate", None)) is Gate:
        sources["gate"] = _of_gate(module.gate)
    first = sources[names[0]]
    alike = {
        name: source
        for name, source in sources.items()
        if source
        and _are_alike(first, source)
        and _is_whole(source)
        and source.kernel.get_value().shape[0] == x.shape[-1]
        and math.prod(source.kernel.get_value().shape[1:]) < ENOUGH_COLUMNS
    }
    if len(alike) < 2:
        return projected(module, x, names)
    made = _in_one_product(x, alike)
    return made | projected(module, x, [name for name in names if name not in made])


def _is_whole(source: Source) -> bool:
    """Whether each device is known to have all of a kernel.

    A trace shows how devices divide it over explicit axes alone. For others a parameter may say it.
    """
    if source.place != Place():
        return False
    value = source.kernel.get_value()
    shown = not isinstance(value, jax.core.Tracer) or jax.typeof(value).sharding.mesh.explicit_axes
    return (
        bool(shown) or source.kernel.get_metadata("out_sharding", None) is not None or jax.device_count() == 1
    )


def _in_one_product(x: Float[Array, "B T D"], sources: Mapping[str, Source]) -> dict[str, Array]:
    """The products by the names of their sources, which are alike and whole."""
    first, *_ = sources.values()
    kernels = [source.kernel[...] for source in sources.values()]
    shapes = [kernel.shape[1:] for kernel in kernels]
    kernel = jnp.concatenate([kernel.reshape(len(kernel), -1) for kernel in kernels], axis=1)
    x, kernel, _ = products.promote_columns((x, kernel, None), dtype=first.dtype)
    tokens = x.shape[:-1]
    if not jax.typeof(x).sharding.mesh.explicit_axes:
        x = x.reshape(-1, x.shape[-1])  # a CPU sums over two axes of tokens in 16 bits
    out = jnp.matmul(x, kernel, precision=first.precision)
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    made = {}
    # The gradient of a split lays what it is given side by side; that of slices would add them up.
    parts = zip(sources.items(), shapes, jnp.split(out, ends[:-1], axis=-1), strict=True)
    for (name, source), shape, part in parts:
        own = part.reshape(*tokens, *shape)
        made[name] = own if source.bias is None else own + source.bias[...].astype(own.dtype)
    return made


def beside(module: Any, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """`x` for what the module has not joined: a barrier keeps XLA from joining that with what it has."""
    return jax.lax.optimization_barrier(x) if is_joined(module) else x


def is_joined(module: Any) -> bool:
    """Whether `join` has changed the module."""
    return isinstance(getattr(module, "joined", None), Joined)


def join(module: Any, names: Sequence[str], into: Any = None) -> list[Array]:
    """Joins the projections of these names, and those of a `Gate` and an `Indexer`, as `module.joined`.

    Only what computes as the first one does, and is divided over devices as it is, is joined. Everything else
    stays as it is, and so does all of it if the first is no projection of ours.

    Args:
      module: a layer or an MLP.
      names: its projections.
      into: the projection of what comes of them, if their columns are its rows. A plain one, divided by rows
        as they are by columns, is filled up with zeros to `WIDTH_MULTIPLE` on each device, as they are.

    Returns:
      The arrays that it has put side by side or filled up, which the module no longer holds.
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
    place = place_of(into.kernel) if type(into) is nnx.Linear else None
    if place is not None and place.rows != sources[names[0]].place.columns:
        place = None
    module.joined = Joined(sources, 1 if place is None else WIDTH_MULTIPLE)
    for name in sources:
        owner, _, attribute = name.rpartition(".")
        if name == "gate":
            del module.gate.kernel_in, module.gate.bias_in
        else:
            delattr(getattr(module, owner) if owner else module, attribute)
    parameters = [p for source in sources.values() for p in (source.kernel, source.bias) if p is not None]
    if place is not None and len(into.kernel) // place.row_parts % WIDTH_MULTIPLE:
        parameters.append(into.kernel)
        into.kernel = nnx.Param(_with_filled_rows(into.kernel[...], place))
    return [parameter.get_value() for parameter in parameters]


def _of_projection(part: Any) -> Source | None:
    """A projection as a source; None if it is not as this library makes it, or in no `Place`."""
    if type(part) is nnx.LinearGeneral:
        plain = part.axis == (-1,) and not part.batch_axis and part.dot_general is None
        plain = plain and part.dot_general_cls is None
    elif type(part) is nnx.Linear:
        plain = part.dot_general is jax.lax.dot_general
    else:
        return None
    plain = plain and part.promote_dtype is products.promote_columns and part.preferred_element_type is None
    place = place_of(part.kernel, part.bias)
    return Source(part.kernel, part.bias, part.dtype, part.precision, place) if plain and place else None


def _of_gate(gate: Gate) -> Source | None:
    """The first product of a gate as a source; None if its dtype depends on the second.

    Each head reads all of it, and the second may be divided by heads.
    """
    into, out = place_of(gate.kernel_in, gate.bias_in), place_of(gate.kernel_out, gate.bias_out)
    dtypes = {p.get_value().dtype for p in (gate.kernel_in, gate.bias_in, gate.kernel_out, gate.bias_out)}
    if into is None or out is None or into.columns or out.rows or len(dtypes) > 1:
        return None
    place = Place(into.mesh or out.mesh, into.rows, out.columns)
    return Source(gate.kernel_in, gate.bias_in, gate.dtype, gate.precision, place, copies=True)


def _are_alike(first: Source | None, source: Source | None) -> bool:
    """Whether two products can be one: of the same dtype, as precise, and divided over the same axes."""
    if first is None or source is None or first[2:5] != source[2:5]:
        return False
    arrays = (first.kernel, source.kernel, source.bias)
    return len({p.get_value().dtype for p in arrays if p is not None}) == 1


def _own_shape(source: Source, multiple: int) -> tuple[int, ...]:
    """The shape of a product of one token on one device."""
    _, first, *others = source.kernel.get_value().shape
    *shape, last = first // (1 if source.copies else source.place.column_parts), *others
    return *shape, last + -last % multiple


@functools.partial(jax.jit, static_argnames="place")
def _with_filled_rows(kernel: Array, place: Place) -> Array:
    """A kernel that multiplies what was filled up to `WIDTH_MULTIPLE`: on each device its rows are, too."""
    fill = functools.partial(_filled, multiple=WIDTH_MULTIPLE, axis=0)
    spec = PartitionSpec(place.rows, place.columns)
    return place.by_each_device(fill, (spec,), spec)(kernel)


def _filled(array: Array, multiple: int, axis: int = -1) -> Array:
    padding = [(0, 0)] * array.ndim
    padding[axis] = 0, -array.shape[axis] % multiple
    return jnp.pad(array, padding) if padding[axis][1] else array


@functools.partial(jax.jit, static_argnames=("dtype", "multiple", "place", "copies"))
def _side_by_side(
    kernels: list[Array],
    biases: list[Array | None],
    *,
    dtype: DType | None,
    multiple: int,
    place: Place,
    copies: tuple[bool, ...],
) -> tuple[Array, Array | None]:
    """The kernels `[D, ...]` as one `[D, F]`, and the biases as `[F]`, zeros where there is none."""
    dtype = kernels[0].dtype if dtype is None else dtype

    def join(kernels: list[Array], biases: list[Array | None]) -> tuple[Array, Array | None]:
        flat = [_filled(each, multiple).reshape(len(each), -1).astype(dtype) for each in kernels]
        kernel = _filled(jnp.concatenate(flat, axis=1), WIDTH_MULTIPLE)
        if all(bias is None for bias in biases):
            return kernel, None
        filled = [
            jnp.zeros(kernel.shape[1], dtype)
            if bias is None
            else _filled(bias, multiple).reshape(-1).astype(dtype)
            for kernel, bias in zip(flat, biases, strict=True)
        ]
        return kernel, _filled(jnp.concatenate(filled), WIDTH_MULTIPLE)

    columns = [None if copied else place.columns for copied in copies]
    given = [PartitionSpec(place.rows, each) for each in columns], [*map(PartitionSpec, columns)]
    made = PartitionSpec(place.rows, place.columns), PartitionSpec(place.columns)
    return place.by_each_device(join, given, made)(kernels, biases)
