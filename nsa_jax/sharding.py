"""Runs operations where their operands lie: each device computes its own batch rows and heads.

`jax.make_mesh` gives explicit axes: the type of an array says how it is sharded. No row and no KV head needs
another, so an operation runs under `jax.shard_map` over the explicit axes, and nothing has to move. What
happens on auto axes is left to each implementation.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from nsa_jax.array_typing import Array, Float
from nsa_jax.compression import Compress, Compression, compress_blocks
from nsa_jax.layout import slots

BATCH, TOKENS, HEADS = 0, 1, 2  # of every operand, as far as it has so many axes


class PerShard:
    """An implementation whose operations run on each device's part of operands on explicit axes."""

    def __init__(self, operations: Any):
        self._operations = operations

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return functools.partial(per_shard, getattr(self._operations, name))


def per_shard(operation: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Calls an operation of `nsa_jax.dispatch.Operations`, on shards if operands have explicit ones.

    Operands that are sharded less than others are sharded like those first, without communication. The
    arrays of a `Compression` are replicated.

    Raises:
      ValueError: tokens or features are sharded; operands disagree about the axes of rows or heads; or those
        of heads do not divide the KV heads.
    """
    operands = inspect.signature(operation).bind(*args, **options).arguments
    axes = Axes.of({name: x for name, x in operands.items() if name != "compress"})
    if axes is None:
        return operation(**_varying_alike(operands))
    results: Any = axes.spec(HEADS + 1)
    if "cache" in operands:
        counted = (results,) if operation.__name__ == "decode_step" else ()
        results = (results, axes.specs(operands["cache"]), *counted)
    compress = operands.get("compress")
    if compress is not None and type(compress) is not Compression:
        operands["compress"] = _formed(axes, compress, operands)
    return axes.run(operation, operands, results)


def _varying_alike(operands: Mapping[str, Any]) -> Mapping[str, Any]:
    """Inside `shard_map`, makes floating-point operands vary over every axis over which one of them varies.

    So the gradient of an operand that the devices share, such as the keys of queries that are sharded by
    their tokens, is the sum of what the devices find: the transpose of the cast is that sum. The operands of
    a step through a cache are left as they are, because a cache must come out as it went in.
    """
    if "cache" in operands:
        return operands
    arrays = [x for x in jax.tree.leaves(operands) if isinstance(x, jax.Array)]
    varying = frozenset[str]().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))

    def vary(x: Any) -> Any:
        if not isinstance(x, jax.Array) or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        missing = varying - jax.typeof(x).manual_axis_type.varying
        return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

    return jax.tree.map(vary, operands) if varying else operands


def alike(**operands: Any) -> tuple[Any, ...]:
    """Shards operands that are sharded less than others like those. Raises ValueError as `per_shard`."""
    axes = Axes.of(operands)
    return tuple(x if axes is None else axes.place(x, axes.specs(x)) for x in operands.values())


def like(array: Array, other: Array | jax.ShapeDtypeStruct) -> Array:
    """Shards an array as another one is sharded, on explicit axes."""
    sharding = jax.typeof(other).sharding
    return jax.reshard(array, sharding) if sharding.mesh.explicit_axes else array


def by_rows(array: Array) -> Array:
    """Gathers an array over all explicit axes but those of its first axis, the batch."""
    sharding = jax.typeof(array).sharding
    if not sharding.mesh.explicit_axes:
        return array
    return jax.reshard(array, NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1])))


class _Formed(NamedTuple):
    """Blocks that are formed already, in place of the function that forms them."""

    key: Float[Array, "B blocks K H"]
    value: Float[Array, "B blocks K V"]

    def __call__(self, *_: Array) -> "_Formed":
        return self


def _formed(axes: "Axes", compress: Compress, operands: Mapping[str, Any]) -> _Formed:
    """Forms the blocks of a step. A function may hold arrays, which `shard_map` takes as operands only."""
    given = {name: operands[name] for name in ("cache", "tokens", "num_tokens", "config")}
    windows = PartitionSpec(axes.batch, None, None, axes.heads)
    found = axes.run(slots.windows_of_step, given, (windows, windows, axes.spec(HEADS)))
    return _Formed(*compress_blocks(compress, *found))


class Axes(NamedTuple):
    """The explicit axes over which the operands of a call are sharded.

    Attributes:
      mesh: their mesh.
      batch: axes of batch rows, as in a `PartitionSpec`.
      heads: axes of heads.
      tokens: axis over which a context-parallel call spreads tokens; None in all other calls.
    """

    mesh: jax.sharding.AbstractMesh
    batch: Any
    heads: Any
    tokens: str | None

    @classmethod
    def of(cls, operands: Mapping[str, Any], *, tokens: str | None = None) -> "Axes | None":
        """Finds the axes; None if no operand is sharded explicitly. Raises ValueError as `per_shard`."""
        mesh, found = None, dict[int, tuple[str, Any]]()
        leaves = [(name, x) for name, operand in operands.items() for x in jax.tree.leaves(operand)]
        sharded = [(name, jax.typeof(x)) for name, x in leaves if isinstance(x, jax.Array)]
        for name, array in sharded:
            for axis, names in enumerate(array.sharding.spec):
                if names is None:
                    continue
                mesh = array.sharding.mesh
                if axis == TOKENS and names == tokens:
                    continue
                if axis not in (BATCH, HEADS):
                    raise ValueError(
                        "operands must be sharded by batch rows and heads only, got "
                        f"{name} of type {array}. Use jax.reshard to replicate its other axes."
                    )
                other, expected = found.setdefault(axis, (name, names))
                if names != expected:
                    raise ValueError(
                        f"operands must be sharded alike, got axis {axis} over {expected} in {other} and "
                        f"over {names} in {name}. Use jax.reshard."
                    )
        if mesh is None:
            return None
        batch, heads = (found.get(axis, (None, None))[1] for axis in (BATCH, HEADS))
        axes = cls(mesh, batch, heads, tokens)
        for name, array in sharded:
            if heads is not None and array.ndim > HEADS and array.shape[HEADS] % axes.size(heads):
                raise ValueError(
                    "the devices over which heads are sharded must divide the KV heads, got "
                    f"{axes.size(heads)} devices along {heads} and {name} of type {array}. Split heads over "
                    "fewer devices."
                )
        return axes

    def size(self, names: Any) -> int:
        """Number of devices along one axis or several."""
        names = names if isinstance(names, tuple) else (names,)
        return functools.reduce(lambda size, name: size * self.mesh.shape[name], names, 1)

    def spec(self, rank: int) -> PartitionSpec:
        """How an operand or a result with `rank` axes is sharded."""
        return PartitionSpec(*(self.batch, self.tokens, self.heads)[:rank])

    def specs(self, operand: Any) -> Any:
        """How the arrays of an operand are sharded. Those of a compression belong to all rows and heads."""
        if type(operand) is Compression:
            return jax.tree.map(lambda _: PartitionSpec(), operand)
        return jax.tree.map(lambda x: self.spec(jnp.ndim(x)), operand)

    def run(self, operation: Callable[..., Any], operands: Mapping[str, Any], results: Any) -> Any:
        """Calls `operation` on shards; `results` say how its results are sharded."""
        arrays = {name: x for name, x in operands.items() if _has_arrays(x)}
        others = tuple((name, x) for name, x in operands.items() if name not in arrays)
        specs = {name: self.specs(x) for name, x in arrays.items()}
        leaves, tree = jax.tree.flatten(results)
        return _on_shards(self.place(arrays, specs), operation, others, self, tuple(leaves), tree)

    def place(self, operand: Any, specs: Any) -> Any:
        """Shards the arrays of an operand as `specs` say."""
        mesh = _mesh_of_devices(operand)

        def place(x: Any, spec: PartitionSpec) -> Array:
            if mesh is None or isinstance(x, jax.core.Tracer):
                return jax.reshard(jnp.asarray(x), NamedSharding(self.mesh, spec))
            # Outside of `jax.set_mesh`, `reshard` does not take what lies on one device.
            return jax.device_put(x, NamedSharding(mesh, spec))

        return jax.tree.map(place, operand, specs)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _on_shards(
    arrays: Mapping[str, Any],
    operation: Callable[..., Any],
    others: tuple[tuple[str, Any], ...],
    axes: Axes,
    results: tuple[PartitionSpec, ...],
    tree: Any,
) -> Any:
    """Calls an operation on shards. A jit, because JAX compiles an eager `shard_map` anew in each call."""
    run = jax.shard_map(
        lambda shards: operation(**_varying_alike({**shards, **dict(others)})),
        mesh=axes.mesh,
        in_specs=({name: axes.specs(x) for name, x in arrays.items()},),
        out_specs=jax.tree.unflatten(tree, results),
        axis_names=set(axes.mesh.explicit_axes),
    )
    return run(arrays)


def _mesh_of_devices(operand: Any) -> jax.sharding.Mesh | None:
    """The mesh with explicit axes on which arrays of an eager call lie; None while tracing."""
    for x in jax.tree.leaves(operand):
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
            mesh = getattr(x.sharding, "mesh", None)
            if isinstance(mesh, jax.sharding.Mesh) and mesh.abstract_mesh.explicit_axes:
                return mesh
    return None


def _has_arrays(operand: Any) -> bool:
    return any(isinstance(x, jax.Array | np.ndarray) for x in jax.tree.leaves(operand))
