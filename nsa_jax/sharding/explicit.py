"""Runs operations on explicit axes: each device computes its own batch rows and heads.

`jax.make_mesh` gives explicit axes: the type of an array says how it is sharded. An operation runs under
`jax.shard_map` over them. What happens on auto axes is left to each implementation.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from nsa_jax.array_typing import Array
from nsa_jax.sharding import BATCH, HEADS, TOKENS
from nsa_jax.sharding.manual import varying_alike


class Sharing(NamedTuple):
    """What an operation declares of its operands and results; all others are split by rows and heads.

    Attributes:
      shared: operands that all shards hold whole.
      one_for_all: operands that may have one head for all, and then are split by rows alone.
      results: names of the results. One that is the name of an operand, such as a cache, lies as that does.
      alike: whether floating-point operands vary over the same manual axes, see `varying_alike`. Those of a
        step through a cache are left as they are: a cache comes out as it went in.
      before: what is done first with operands that have explicit axes. It is called with these axes and the
        operands, and returns operands for shards, with what is to be declared of them.
    """

    shared: tuple[str, ...] = ()
    one_for_all: tuple[str, ...] = ()
    results: tuple[str, ...] = ("out",)
    alike: bool = True
    before: Callable[["Axes", dict[str, Any]], tuple[dict[str, Any], "Sharing"]] | None = None


BY_TOKENS = Sharing()  # an operation on the tokens of a call
BY_INDEX = Sharing(one_for_all=("key_index",))


def per_shard(operation: Callable[..., Any], sharing: Sharing, **operands: Any) -> Any:
    """Calls an operation, on shards if operands have explicit axes.

    Operands that are sharded less than others are sharded like those first, without communication.

    Raises:
      ValueError: tokens or features are sharded; operands disagree about the axes of rows or heads; or those
        of heads do not divide the KV heads.
    """
    shared = {name: x for name, x in operands.items() if name not in sharing.shared}
    axes = Axes.of(shared, one_for_all=sharing.one_for_all)
    if axes is None:
        return operation(**_prepared(operands, sharing))
    if sharing.before is not None:
        operands, sharing = sharing.before(axes, operands)
    names = {name: axes.specs(operands[name]) for name in sharing.results if name in operands}
    results = tuple(names.get(name, axes.spec(HEADS + 1)) for name in sharing.results)
    return axes.run(operation, sharing, operands, results if len(results) > 1 else results[0])


def _prepared(operands: Mapping[str, Any], sharing: Sharing) -> Mapping[str, Any]:
    """The operands of one shard."""
    return varying_alike(operands) if sharing.alike else operands


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
    def of(
        cls, operands: Mapping[str, Any], *, tokens: str | None = None, one_for_all: tuple[str, ...] = ()
    ) -> "Axes | None":
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
            has_heads = array.ndim > HEADS and not (name in one_for_all and array.shape[HEADS] == 1)
            if heads is not None and has_heads and array.shape[HEADS] % axes.size(heads):
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

    def specs(self, operand: Any, *, name: str = "", sharing: Sharing = BY_TOKENS) -> Any:
        """How the arrays of the operand of this name are sharded."""

        def spec(x: Any) -> PartitionSpec:
            shared = name in sharing.one_for_all and jnp.shape(x)[HEADS] == 1
            return self.spec(BATCH + 1 if shared else jnp.ndim(x))

        return jax.tree.map(lambda x: PartitionSpec() if name in sharing.shared else spec(x), operand)

    def run(
        self, operation: Callable[..., Any], sharing: Sharing, operands: Mapping[str, Any], results: Any
    ) -> Any:
        """Calls `operation` on shards; `results` say how its results are sharded."""
        arrays = {name: x for name, x in operands.items() if _has_arrays(x)}
        others = tuple((name, x) for name, x in operands.items() if name not in arrays)
        specs = {name: self.specs(x, name=name, sharing=sharing) for name, x in arrays.items()}
        leaves, tree = jax.tree.flatten(results)
        return _on_shards(self.place(arrays, specs), operation, others, self, sharing, tuple(leaves), tree)

    def place(self, operand: Any, specs: Any) -> Any:
        """Shards the arrays of an operand as `specs` say."""
        mesh = _mesh_of_devices(operand)

        def place(x: Any, spec: PartitionSpec) -> Array:
            if mesh is None or isinstance(x, jax.core.Tracer):
                return jax.reshard(jnp.asarray(x), NamedSharding(self.mesh, spec))
            # Outside of `jax.set_mesh`, `reshard` does not take what lies on one device.
            return jax.device_put(x, NamedSharding(mesh, spec))

        return jax.tree.map(place, operand, specs)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5, 6))
def _on_shards(
    arrays: Mapping[str, Any],
    operation: Callable[..., Any],
    others: tuple[tuple[str, Any], ...],
    axes: Axes,
    sharing: Sharing,
    results: tuple[PartitionSpec, ...],
    tree: Any,
) -> Any:
    """Calls an operation on shards. A jit, because JAX compiles an eager `shard_map` anew in each call."""
    specs = {name: axes.specs(x, name=name, sharing=sharing) for name, x in arrays.items()}
    run = jax.shard_map(
        lambda shards: operation(**_prepared({**shards, **dict(others)}, sharing)),
        mesh=axes.mesh,
        in_specs=(specs,),
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
