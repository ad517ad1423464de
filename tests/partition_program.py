"""Run by test_partition with eight host devices: `partitioned` on a function that stands in for a kernel.

Each check compares with one device, and says for how many rows and KV heads a device ran the function, and
which collectives XLA needed beside it.
"""

import contextlib
import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import fewer_collections  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from nsa_jax.sharding.auto import partitioned
from nsa_jax.sharding.vmap import folds_vmap

P = PartitionSpec
COLLECTIVES = re.compile(
    r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
HEADS, TOKENS, KEYS, DIM = 24, 6, 5, 8
seen: list[tuple[int, int]] = []  # rows and KV heads, each time the stand-in is traced


def attend(weights, query, key, lengths):
    """Takes what a step takes: weights for all, heads of both kinds, and a number for each row."""
    seen.append(key.shape[::2][:2])
    batch, tokens, _, dim = query.shape
    queries = query.reshape(batch, tokens, key.shape[2], -1, dim)
    out = jnp.einsum("btkgd,bskd,d->btkgd", queries, key, weights)
    return (out * lengths[:, None, None, None, None]).reshape(query.shape), lengths + 1


def divided() -> Callable:
    """The stand-in as XLA may divide it; a new function each time, so that JAX traces it anew."""
    return partitioned(lambda *operands: attend(*operands), alike=1)


class Case(NamedTuple):
    """How the operands are sharded, and what must come of it.

    Attributes:
      query, key, lengths: specifications of the operands.
      rows, kv_heads: those that a device runs the function for.
      collectives: names of the collectives that XLA may use.
      mesh: sizes of the axes `data`, `tensor` and `context`.
      num_kv_heads: KV heads of all devices.
      axes: axes of a `shard_map` around the call.
    """

    query: PartitionSpec
    key: PartitionSpec
    lengths: PartitionSpec
    rows: int
    kv_heads: int
    collectives: tuple[str, ...] = ()
    mesh: tuple[int, ...] = (2, 4, 1)
    num_kv_heads: int = 4
    axes: tuple[str, ...] = ()


WHOLE, ROWS, BOTH = P(), P("data"), P("data", None, "tensor")
GATHER = ("all-gather",)
CUBE = (2, 2, 2)
CASES = {
    "rows and heads": Case(BOTH, BOTH, ROWS, 2, 1),
    "one operand decides": Case(BOTH, WHOLE, WHOLE, 2, 1),
    "an operand of KV heads decides": Case(WHOLE, BOTH, WHOLE, 2, 1),
    "rows over two axes": Case(P(("data", "context")), ROWS, WHOLE, 1, 4, mesh=CUBE),
    "heads over two axes": Case(P(None, None, ("data", "tensor")), WHOLE, WHOLE, 4, 1, mesh=CUBE),
    "one KV head": Case(ROWS, ROWS, ROWS, 2, 1, num_kv_heads=1),
    "as many KV heads as heads": Case(BOTH, BOTH, ROWS, 2, 6, num_kv_heads=24),
    "heads over eight devices": Case(P(None, None, ("data", "tensor")), WHOLE, WHOLE, 4, 1, GATHER),
    "tokens are gathered": Case(P(None, "data", "tensor"), P(None, None, "tensor"), WHOLE, 4, 1, GATHER),
    "dims are gathered": Case(P("data", None, None, "tensor"), ROWS, ROWS, 2, 4, GATHER),
    "two KV heads on four devices": Case(BOTH, ROWS, ROWS, 2, 1, GATHER, num_kv_heads=2),
    "six KV heads on four devices": Case(BOTH, ROWS, ROWS, 2, 3, GATHER, num_kv_heads=6),
    "one KV head on four devices": Case(BOTH, ROWS, ROWS, 2, 1, GATHER, num_kv_heads=1),
    "inside of shard_map over all axes": Case(BOTH, BOTH, ROWS, 2, 1, axes=("data", "tensor", "context")),
    "inside of shard_map over rows": Case(BOTH, BOTH, ROWS, 2, 2, mesh=CUBE, axes=("data",)),
    "inside of shard_map over heads": Case(BOTH, BOTH, ROWS, 2, 2, mesh=CUBE, axes=("tensor",)),
    "inside of shard_map over neither": Case(BOTH, BOTH, ROWS, 2, 2, mesh=CUBE, axes=("context",)),
}

IN_CONTEXT = ("rows and heads", "inside of shard_map over rows")  # checked with a mesh in context, too


def make_mesh(shape: tuple[int, ...]) -> jax.sharding.Mesh:
    return jax.make_mesh(shape, ("data", "tensor", "context"), axis_types=(AxisType.Auto,) * 3)


def operands(num_kv_heads: int, batch: int = 4):
    rng = np.random.default_rng(0)
    shapes = ((DIM,), (batch, TOKENS, HEADS, DIM), (batch, KEYS, num_kv_heads, DIM), (batch,))
    return tuple(jnp.asarray(rng.integers(-4, 5, shape), jnp.float32) for shape in shapes)


def place(mesh: jax.sharding.Mesh, arrays, specs) -> list[jax.Array]:
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]


def in_shards(function: Callable, case: Case, mesh: jax.sharding.Mesh) -> Callable:
    """The function in a `shard_map` over the axes of the case, if there are any."""
    if not case.axes:
        return function
    held = [P(*(name if name in case.axes else None for name in spec)) for spec in case[:3]]
    specs = dict(in_specs=(P(), *held), out_specs=(held[0], held[2]), axis_names=set(case.axes))
    return jax.shard_map(function, mesh=mesh, **specs)


def check(name: str, case: Case, *, in_context: bool) -> None:
    mesh, arrays = make_mesh(case.mesh), operands(case.num_kv_heads)
    expected = attend(*arrays)
    placed = place(mesh, arrays, (WHOLE, *case[:3]))
    seen.clear()
    with jax.set_mesh(mesh) if in_context else contextlib.nullcontext():
        compiled = jax.jit(in_shards(divided(), case, mesh)).lower(*placed).compile()
        found = compiled(*placed)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs, name)  # small integers: every sum is exact
    assert seen[-1] == (case.rows, case.kv_heads), (name, seen)
    used = set(COLLECTIVES.findall(compiled.as_text()))
    assert used <= set(case.collectives), (name, used)
    assert used or not case.collectives, f"{name}: no collective"


def check_results_asked_for_otherwise() -> None:
    """The function runs in shards, and XLA gathers what it gave."""
    mesh, arrays = make_mesh((2, 4, 1)), operands(4)
    placed = [
        jax.device_put(x, NamedSharding(mesh, s))
        for x, s in zip(arrays, (WHOLE, BOTH, BOTH, ROWS), strict=True)
    ]
    seen.clear()
    found = jax.jit(divided(), out_shardings=NamedSharding(mesh, WHOLE))(*placed)
    np.testing.assert_array_equal(found[0], attend(*arrays)[0])
    assert (2, 1) in seen


def check_vmap() -> None:
    """The mapped axis becomes part of the rows, outside of what XLA divides."""
    mesh, (weights, *arrays) = make_mesh((2, 4, 1)), operands(4)
    apart = [x.reshape(4, 1, *x.shape[1:]) for x in arrays]
    specs = P("data", None, None, "tensor"), P("data", None, None, "tensor"), P("data")
    placed = place(mesh, apart, specs)
    seen.clear()
    mapped = jax.vmap(functools.partial(folds_vmap(divided(), alike=1), weights))
    compiled = jax.jit(mapped).lower(*placed).compile()
    np.testing.assert_array_equal(compiled(*placed)[0][:, 0], attend(weights, *arrays)[0])
    assert (2, 1) in seen, seen
    assert not COLLECTIVES.search(compiled.as_text())


def check_gradients() -> None:
    """`partitioned` inside of a `custom_vjp`, as in the operations."""

    def plain(query, key):
        return query * jnp.repeat(key.sum(1, keepdims=True), query.shape[2] // key.shape[2], 2)

    def gradients(query, key, cotangent):
        seen.append(key.shape[::2][:2])
        return jax.vjp(plain, query, key)[1](cotangent)

    scale = jax.custom_vjp(partitioned(plain))
    scale.defvjp(
        lambda *operands: (scale(*operands), operands), lambda held, d: partitioned(gradients)(*held, d)
    )

    def both(function, query, key):
        out, pull_back = jax.vjp(function, query, key)
        return out, *pull_back(out)

    mesh, (_, query, key, _) = make_mesh((2, 4, 1)), operands(4)
    placed = place(mesh, (query, key), (BOTH, BOTH))
    seen.clear()
    compiled = jax.jit(functools.partial(both, scale)).lower(*placed).compile()
    for ours, theirs in zip(compiled(*placed), both(plain, query, key), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert (2, 1) in seen, seen
    assert not COLLECTIVES.search(compiled.as_text())


def check_programs_of_two_functions_differ() -> None:
    """Else JAX's persistent cache may return the program of one for the other."""
    mesh = make_mesh((2, 4, 1))
    x = jax.device_put(operands(4)[1], NamedSharding(mesh, BOTH))

    def lowered(factor):
        text = jax.jit(partitioned(lambda x: factor * x)).lower(x).as_text()
        return re.sub(r'backend_config = "\d+"', "", text)  # an address, which is not unique for long

    assert lowered(2.0) != lowered(3.0)


if __name__ == "__main__":
    for name, case in CASES.items():
        for in_context in (False, True) if name in IN_CONTEXT else (False,):
            check(name, case, in_context=in_context)
        print(f"{name}: ok")
    check_results_asked_for_otherwise()
    check_vmap()
    check_gradients()
    check_programs_of_two_functions_differ()
    print("others: ok")
