"""Products of inputs with parameters that are sharded over explicit axes of a mesh.

Inputs `[B, T, ...]` stay where they are. The width D of a model is not sharded while it computes: parameters
are gathered over the axes of their dimension "model" (FSDP). Heads, the inner width of an MLP and the
vocabulary keep their axes (arXiv:1909.08053): a product into them is split by columns of the kernel, and one
out of them by rows, whose parts are added up. Elsewhere, these functions change nothing.
"""

from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from nsa_jax.array_typing import Array, Float, Int

TOKENS = 2  # the axes of an input before its features


def columns(x: Float[Array, "B T ..."], kernel: Any, bias: Any = None) -> Iterator[Any]:
    """Yields kernel and bias of a product into heads, the MLP or the vocabulary, gathered over other axes."""
    taken = {name for names in jax.typeof(x).sharding.spec[:TOKENS] for name in _names(names)}

    def kept(parameter: Array, contracted: int) -> list[Any]:
        own = jax.typeof(parameter).sharding.spec[contracted:]
        return [None] * contracted + [None if taken & set(_names(names)) else names for names in own]

    yield _reshard(kernel, x, *kept(kernel, x.ndim - TOKENS))
    yield None if bias is None else _reshard(bias, x, *kept(bias, 0))


def rows(x: Float[Array, "B T ..."], kernel: Any, bias: Any = None) -> Iterator[Any]:
    """Yields kernel and bias of a product out of heads or the MLP, which are sharded as in `x`."""
    yield _reshard(kernel, x, *jax.typeof(x).sharding.spec[TOKENS:])
    yield None if bias is None else _reshard(bias, x)


def promote_columns(arrays: Any, /, *, dtype: Any = None, inexact: bool = True) -> Any:
    """The `promote_dtype` of a projection by columns."""
    x, *parameters = nnx.nn.dtypes.promote_dtype(arrays, dtype=dtype, inexact=inexact)
    return x, *columns(x, *parameters)


def promote_rows(arrays: Any, /, *, dtype: Any = None, inexact: bool = True) -> Any:
    """The `promote_dtype` of a projection by rows."""
    x, *parameters = nnx.nn.dtypes.promote_dtype(arrays, dtype=dtype, inexact=inexact)
    return x, *rows(x, *parameters)


def promote_table(arrays: Any, /, *, dtype: Any = None, inexact: bool = True) -> Any:
    """The `promote_dtype` of an embedding, whose table is gathered over all axes but that of the vocabulary.

    XLA would otherwise divide the looked-up vectors like the table, and gather them all for that.
    """
    (table,) = nnx.nn.dtypes.promote_dtype(arrays, dtype=dtype, inexact=inexact)
    return (_reshard(table, table, *jax.typeof(table).sharding.spec[:1]),)


def add_rows(x: Float[Array, "B T ..."], kernel: Array, *args: Any, **options: Any) -> Array:
    """The `dot_general` of a projection by rows: the parts of the sum are added up over the devices."""
    return jax.lax.dot_general(x, kernel, *args, **options | dict(out_sharding=of_tokens(x)))


def of_tokens(
    x: Float[Array, "B T ..."] | Int[Array, "B T"], table: Array | None = None
) -> NamedSharding | None:
    """The sharding of `[B, T, D]` beside `x`; None unless `x` is on a mesh with explicit axes.

    An `x` that is on no mesh, as one of NumPy, goes to that of the `table` in which it is looked up.
    """
    sharding, mesh = jax.typeof(x).sharding, jax.typeof(x).sharding.mesh
    if mesh.empty:  # otherwise JAX puts it on the mesh in context
        mesh = jax.sharding.get_abstract_mesh() if table is None else jax.typeof(table).sharding.mesh
    if not mesh.explicit_axes:
        return None
    return NamedSharding(mesh, PartitionSpec(*sharding.spec[:TOKENS], None))


def _names(names: Any) -> tuple[str, ...]:
    """The mesh axes in one entry of a `PartitionSpec`."""
    return names if isinstance(names, tuple) else () if names is None else (names,)


def _reshard(parameter: Array, x: Array, *spec: Any) -> Array:
    mesh = jax.typeof(x).sharding.mesh
    if not mesh.explicit_axes:
        return parameter
    return jax.reshard(parameter, NamedSharding(mesh, PartitionSpec(*spec)))
