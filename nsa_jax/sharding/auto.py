"""Lets XLA divide a function that launches kernels among devices: by batch rows and KV heads.

XLA cannot look into a kernel. Under plain `jit` on sharded arrays it would gather the operands, and every
device would compute everything. `custom_partitioning` tells XLA what it can divide. It has no rule for `vmap`
and none for gradients, so it stands inside of both: of `folds_vmap`, and of the functions of a `custom_vjp`.
"""

import secrets
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src.sharding_impls import parse_flatten_op_sharding
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from nsa_jax.sharding import BATCH, HEADS


def partitioned[R](function: Callable[..., R], *, alike: int = 0) -> Callable[..., R]:
    """Lets each device run a function for the batch rows and KV heads that it holds.

    Axis 0 of each array that the function takes and returns is the batch. Axis 2, where there is one, are
    heads: KV heads, or the query heads of all KV heads. The first `alike` arguments have neither; all rows
    and heads share them. No row and no KV head may need what another has.

    All other axes are whole on each device. So are rows where their number does not divide by the devices,
    and heads where the number of KV heads does not. XLA gathers what comes sharded otherwise.

    On one device the lowered program is that of the function alone. Inside of `shard_map`, XLA divides by the
    mesh axes that are left to it. If none is left, or if a mesh axis is explicit, the function runs as it is.
    """

    def run(*args):
        mesh = jax.sharding.get_abstract_mesh()
        if not _xla_divides(mesh):
            return function(*args)
        device = AbstractMesh((), (), abstract_device=mesh.abstract_device)
        division = _Division(function, alike, len(jax.tree.leaves(args[:alike])), device)
        divided = custom_partitioning(lambda *args: function(*args))
        # JAX would decode shardings by its mesh. That fails for parts of an axis, and inside of `shard_map`.
        divided.def_partition(division.partition, decode_shardings=False, sharding_rule=division.rule)
        return divided(*args)

    return run


def _xla_divides(mesh: AbstractMesh) -> bool:
    """Whether XLA decides how arrays are sharded: not if all mesh axes are manual, or if any is explicit."""
    kinds = set(mesh.axis_types)
    return AxisType.Explicit not in kinds and kinds != {AxisType.Manual}


class _Division(NamedTuple):
    """How a function is divided, as `custom_partitioning` asks for it.

    Attributes:
      function, alike: as in `partitioned`.
      shared: number of arrays in the first `alike` arguments.
      device: a mesh without axes, which says what kind of device the program is for.
    """

    function: Callable[..., Any]
    alike: int
    shared: int
    device: AbstractMesh

    def rule(self, mesh: Mesh, operands: list[Any], results: list[Any]) -> SdyShardingRule:
        """The factors of each axis: `b` rows, `k` KV heads, `g` query heads of one; others are whole."""
        # JAX's persistent cache tells functions apart by an address in memory, which may be used again. Then
        # it returns a program of another function, unless something else is different.
        mlir.ir_constant(np.uint64(secrets.randbits(64)))
        shapes = [x.shape for x in (*operands, *results)]
        kv_heads, num_heads = _head_counts(shapes[self.shared :])
        whole: list[str] = []  # in the order of their first use, as Shardy wants them

        def factor(array: int, axis: int, size: int) -> str | CompoundFactor:
            if array >= self.shared and axis == BATCH:
                return "b"
            if array < self.shared or axis != HEADS or kv_heads == 1:
                whole.append(f"x{array}_{axis}")
                return whole[-1]
            if size == kv_heads:
                return "k"
            if "g" not in whole:
                whole.append("g")
            return CompoundFactor("k", "g")

        arrays = tuple(
            ArrayMapping(*(factor(array, axis, size) for axis, size in enumerate(shape)))
            for array, shape in enumerate(shapes)
        )
        sizes: dict[str, Any] = {"g": num_heads // kv_heads} if "g" in whole else {}
        split = len(operands)
        return SdyShardingRule(arrays[:split], arrays[split:], need_replication_factors=tuple(whole), **sizes)

    def partition(self, mesh: Mesh, args: tuple[Any, ...], results: Any) -> tuple[Any, ...]:
        """One device's function, and shardings of its results and operands that fit that of a result."""
        result = next(x for x in jax.tree.leaves(results) if len(x.shape) > HEADS)
        kv_heads, _ = _head_counts(x.shape for x in jax.tree.leaves((args[self.alike :], results)))
        own, spec = _mesh_and_spec(result)
        rows = _dividing(own, spec[BATCH], result.shape[BATCH])
        heads = _dividing(own, spec[HEADS], kv_heads)

        def place(x):
            return NamedSharding(own, PartitionSpec(*(rows, None, heads)[: len(x.shape)]))

        shared = jax.tree.map(lambda _: NamedSharding(own, PartitionSpec()), args[: self.alike])
        operands, results = jax.tree.map(place, (args[self.alike :], results))
        return mesh, self.on_one_device, results, (*shared, *operands)

    def on_one_device(self, *args):
        """The function with one device's part of the arrays."""
        with jax.sharding.use_abstract_mesh(self.device):
            return self.function(*args)


def _head_counts(shapes: Iterable[tuple[int, ...]]) -> tuple[int, int]:
    """The numbers of KV heads and of query heads; the same where arrays have but one of them."""
    numbers = {shape[HEADS] for shape in shapes if len(shape) > HEADS}
    few, many = min(numbers), max(numbers)
    assert numbers <= {few, many}, f"axis 2 must be KV heads or query heads, got {numbers}"
    assert many % few == 0, f"query heads must be those of all KV heads, got {numbers}"
    return few, many


def _mesh_and_spec(x: jax.ShapeDtypeStruct) -> tuple[AbstractMesh, PartitionSpec]:
    """A mesh of unnamed axes over which an array is sharded, and how: an entry for each axis of the array."""
    sharding = x.sharding._hlo_sharding
    if not sharding.is_tile_assignment_iota():
        return AbstractMesh((), ()), PartitionSpec(*[None] * len(x.shape))
    # Axes as small as can be, so that a part of them may divide what the whole does not.
    sizes = tuple(prime for size in sharding.get_axis_sizes() for prime in _primes(size))
    mesh = AbstractMesh(sizes, tuple(map(str, range(len(sizes)))))
    (spec,) = parse_flatten_op_sharding(sharding, mesh)
    return mesh, PartitionSpec(*spec, *[None] * (len(x.shape) - len(spec)))


def _primes(number: int) -> list[int]:
    """The prime factors of a number."""
    for prime in range(2, number):
        if number % prime == 0:
            return [prime, *_primes(number // prime)]
    return [number]


def _dividing(mesh: AbstractMesh, axes: str | tuple[str, ...] | None, size: int) -> tuple[str, ...]:
    """The first of the mesh axes, as far as their devices divide `size`."""
    found: tuple[str, ...] = ()
    for axis in (axes,) if isinstance(axes, str) else axes or ():
        if size % mesh.shape[axis]:
            break
        size //= mesh.shape[axis]
        found += (axis,)
    return found
