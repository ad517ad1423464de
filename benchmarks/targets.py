"""How long does it take to form the target of a selection, beside a forward pass of dense attention?

`python -m benchmarks.targets` times `nsa_jax.block_probabilities` of whole rows: with the log-sum-exps of the
dense attention given, and without them, in two passes. Dense attention's forward takes turns with them. The
gate compares the probabilities of sampled queries with float64, in rows as long as those that are timed. The
last line is JSON.
"""

import argparse
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import programs, records, roofline, timing
from benchmarks.command_line import command, measuring_parser, parse_sizes, progress
from benchmarks.gate import sample_positions
from benchmarks.inputs import Shape, shape_of, tensor
from benchmarks.roofline import Cost
from nsa_jax import attention, budget, dispatch, layout
from nsa_jax.array_typing import Array, Float
from nsa_jax.config import NSAConfig

OPERATION = "block_probabilities"
GIVEN, TWO_PASSES = "lse given", "two passes"
SAMPLED = 16  # queries of the gate, whose logits are stored in float64


def cost(shape: Shape, passes: int) -> Cost:
    """Unavoidable flops and bytes: queries, keys and log-sum-exps read once, probabilities written once."""
    pairs = roofline.visible_pairs("dense_attention", shape.length, shape.config)
    rows = shape.batch * shape.length
    blocks = layout.num_selection_blocks(shape.length, shape.config)
    width = jnp.dtype(shape.dtype).itemsize
    arrays = rows * (shape.query_heads + shape.kv_heads) * shape.key_dim * width
    flops = 2 * shape.batch * shape.query_heads * pairs * shape.key_dim
    return Cost(passes * flops, arrays + 4 * rows * (shape.query_heads + shape.kv_heads * blocks))


def by_definition(
    query: Array, key: Array, positions: Array, config: NSAConfig, reduce: str
) -> Float[Array, "B T K M"]:
    """Probabilities of the blocks for the queries at `positions`."""
    batch, num_queries, _, dim = query.shape
    num_keys, num_kv_heads = key.shape[1:3]
    grouped = query.reshape(batch, num_queries, num_kv_heads, -1, dim)
    wide = jnp.promote_types(query.dtype, jnp.float32)
    logits = jnp.einsum("btkgh,bskh->btkgs", grouped, key, precision="highest", preferred_element_type=wide)
    seen = jnp.arange(num_keys) <= positions[:, None, None, None]
    weights = jax.nn.softmax(jnp.where(seen, logits * dim**-0.5, -jnp.inf), axis=-1)
    size = config.selection_block_size
    weights = jnp.pad(weights, ((0, 0),) * 4 + ((0, -num_keys % size),))
    blocks = weights.reshape(*weights.shape[:4], -1, size).sum(axis=-1)
    return getattr(jnp, reduce)(blocks, axis=3)


def share_of_budget(found: Array, query: Array, key: Array, shape: Shape, reduce: str) -> float:
    """The error at sampled queries over what it may be, see `nsa_jax.budget`."""
    positions = sample_positions(shape.length)[-1::-16][:SAMPLED]

    def exact(dtype: str) -> np.ndarray:
        with jax.enable_x64(True):
            arrays = (jnp.asarray(x, dtype) for x in (query[:, positions], key))
            run = jax.jit(functools.partial(by_definition, config=shape.config, reduce=reduce))
            return np.asarray(run(*arrays, jnp.asarray(positions)))

    right = exact("float64")
    allowed = budget.allowance(exact(shape.dtype), right, float(jnp.finfo("float32").eps))
    return budget.distance(np.asarray(found[:, positions]), right) / allowed


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = measuring_parser(
        "benchmarks.targets",
        __doc__,
        lengths=(2048,),
        dtype=("float32", "of queries and keys"),
        choices={
            "implementation": (dispatch.IMPLEMENTATIONS, "xla", "all but xla need a GPU"),
            "reduce": (("sum", "max"), "sum", "over the query heads of a KV head"),
        },
        sizes={
            "batch": (1, "sequences"),
            "heads": (4, "query heads"),
            "kv-heads": (1, "KV heads; must divide --heads"),
            "key-dim": (64, "dimension of queries, keys and, in dense attention, values"),
        },
    )
    options = parse_sizes(parser, argv)
    options.value_dim = options.key_dim
    return options


class Run(records.Run):
    """One run of the benchmark."""

    def __init__(self, options: argparse.Namespace, config: NSAConfig):
        super().__init__(options.output)
        self.options, self.config = options, config
        self.ceiling = roofline.measure_ceiling(options.dtype)
        print(f"ceiling in {options.dtype}: {self.ceiling}\nconfig {config}", flush=True)

    def measure(self, length: int) -> dict[str, float]:
        """Measures one length; dense attention's time over that of each way, as far as the gate is green."""
        shape = shape_of(self.options, length, self.config)
        query, key, value = (tensor(name, shape) for name in ("query", "key_win", "value_win"))
        settings: dict[str, Any] = dict(config=self.config, reduce=self.options.reduce)
        settings |= dict(implementation=self.options.implementation)
        whole = NSAConfig(window_size=length)
        dense = programs.dense_implementation("dense_attention", shape)
        attend = jax.jit(functools.partial(attention.window_attention, config=whole))
        lse = attend(query, key, value).lse

        def given(query: Array, key: Array, lse: Array) -> Array:
            return attention.block_probabilities(query, key, lse=lse, **settings)

        def alone(query: Array, key: Array) -> Array:
            return attention.block_probabilities(query, key, **settings)

        progress(f"compiling at T={length}")
        compiled = {
            GIVEN: timing.compile_for(given, (query, key, lse)),
            TWO_PASSES: timing.compile_for(alone, (query, key)),
            "dense": timing.compile_for(
                programs.function("dense_attention", dense, shape), (query, key, value)
            ),
        }
        for way in (GIVEN, TWO_PASSES):
            share = share_of_budget(compiled[way].run(), query, key, shape, self.options.reduce)
            print(f"gate {way} T={length}: {'green' if share <= 1 else 'red'}: error / budget {share:.2f}")
            if not share <= 1:
                self.red.append(f"{way} T={length}")
                del compiled[way]
        progress(f"measuring {len(compiled)} programs at T={length}")
        runs = {way: program.start for way, program in compiled.items()}
        options = dict(budget_s=self.options.budget_s, sample_s=timing.least_sample_s())
        times = timing.measure(runs, **options)
        costs = {GIVEN: cost(shape, 1), TWO_PASSES: cost(shape, 2)}
        costs["dense"] = roofline.cost("dense_attention", "fwd", shape)
        for way, program in compiled.items():
            is_dense = way == "dense"
            self.add(
                benchmark="targets", operation="dense_attention" if is_dense else OPERATION, strategy=way,
                implementation=dense if is_dense else settings["implementation"], mode="fwd",
                floor_ms=self.ceiling.floor_ms(costs[way]), **dataclasses.asdict(shape), **times[way].fields,
                **program.fields,
            )  # fmt: skip
        return {
            way: round(times["dense"].median_ms / times[way].median_ms, 3)
            for way in (GIVEN, TWO_PASSES)
            if way in times
        }


@command("benchmarks.targets")
def main(argv: Sequence[str] | None = None, config: NSAConfig | None = None) -> int:
    """Runs the benchmark; `config` other than the paper's is for tests."""
    options = parse(argv)
    run = Run(options, config or NSAConfig())
    return run.finish(dense_over_this={length: run.measure(length) for length in options.lengths})


if __name__ == "__main__":
    raise SystemExit(main())
