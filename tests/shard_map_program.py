"""Run by test_transformations with two host devices: values and gradients of two shards against the whole.

`batch` splits the rows. `kv_heads` splits KV heads with their query heads; index arrays stay whole.
"""

import functools

import fewer_collections  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
from cases import OVERLAPPING, Case
from jax.sharding import AxisType, PartitionSpec

from nsa_jax import attention
from nsa_jax.config import NSAConfig

RUNS = (((0, 2), (7, 13), (2, 3), (9, 6)), ((3, 8), (4, 1), (8, 15)))
CASE = Case(name="sharded", num_keys=24, runs=RUNS, num_heads=4, key_dim=4, value_dim=3)
FAST_TO_COMPILE = {"xla_backend_optimization_level": 0}


def values_and_gradients(config: NSAConfig, positions, segment_ids, cotangents, *operands):
    def attend(*operands):
        query, key_cmp, value_cmp, *_ = operands
        shared = dict(config=config, query_positions=positions, segment_ids=segment_ids)
        out = attention.native_sparse_attention(*operands, **shared)
        return out, *attention.compressed_attention(query, key_cmp, value_cmp, **shared)

    results, pull_back = jax.vjp(attend, *operands)
    return results, pull_back(cotangents)


# How the operands are split, and how the index arrays.
SPLITS = {
    "batch": (PartitionSpec("x"), PartitionSpec("x")),
    "kv_heads": (PartitionSpec(None, None, "x"), PartitionSpec()),
}


def main() -> None:
    operands = tuple(jnp.asarray(x, jnp.float32) for x in CASE.draw())
    rng = CASE.generator("cotangents")
    shapes = ((2, 24, 4, 3), (2, 24, 4, 3), (2, 24, 4))
    cotangents = tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    arguments = (jnp.asarray(CASE.query_positions), jnp.asarray(CASE.segment_ids), cotangents, *operands)

    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    whole = functools.partial(values_and_gradients, OVERLAPPING)
    expected = jax.jit(whole, compiler_options=FAST_TO_COMPILE)(*arguments)
    for axis, (shard, index) in SPLITS.items():
        specs = index, index, shard, *[shard] * len(operands)
        in_shards = jax.shard_map(whole, mesh=mesh, in_specs=specs, out_specs=(shard, shard))
        found = jax.jit(in_shards, compiler_options=FAST_TO_COMPILE)(*arguments)
        for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            # float32 sums of some 20 terms, in another order: 170 eps
            np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)
        print(axis, len(jax.tree.leaves(found)[0].sharding.device_set))


if __name__ == "__main__":
    main()
