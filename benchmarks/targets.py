"""How long does it take to form the target of a selection, beside a forward pass of dense attention?

`python -m benchmarks.targets` times `nsa_jax.block_probabilities` of whole rows: with the log-sum-exps of the
dense attention given, and without them, in two passes. Dense attention's forward takes turns with them. With
`--target selected` it times the selected branch, forward and backward, with and without what the branch gives
to its own blocks (`return_probabilities`), which take turns, too. The gate compares the probabilities of
sampled queries with float64, in rows as long as those that are timed, and then the branch's outputs and
gradients. The last line is JSON.
"""

import argparse
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import gate, inputs, programs, roofline, timing
from benchmarks.command_line import command, measuring_parser, parse_sizes, progress
from benchmarks.gate import sample_positions
from benchmarks.inputs import DISTRIBUTIONS, MEASURED_BY_DEFAULT, Draw, Shape, shape_of, tensor
from benchmarks.roofline import Cost
from benchmarks.timing import Compiled
from nsa_jax import attention, budget, dispatch, layout
from nsa_jax.array_typing import Array, Float
from nsa_jax.config import NSAConfig
from nsa_jax.nn.distillation import TARGETS

OPERATION = "block_probabilities"
GIVEN, TWO_PASSES = "lse given", "two passes"
BRANCH = "selected_attention"
ALONE, WEIGHED = "alone", "with probabilities"
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


@functools.partial(jax.jit, static_argnames=("config", "reduce", "dtype"))
def by_definition(
    query: Array, key: Array, blocks: Array | None, positions: Array, *, config: NSAConfig, reduce: str,
    dtype: str,
) -> Float[Array, "B T K M"]:  # fmt: skip
    """Probabilities of the blocks for the queries at `positions`; of selected `blocks` among these alone."""
    query, key = query.astype(dtype), key.astype(dtype)
    batch, num_queries, _, dim = query.shape
    num_keys, num_kv_heads = key.shape[1:3]
    grouped = query.reshape(batch, num_queries, num_kv_heads, -1, dim)
    wide = jnp.promote_types(query.dtype, jnp.float32)
    logits = jnp.einsum("btkgh,bskh->btkgs", grouped, key, precision="highest", preferred_element_type=wide)
    size = config.selection_block_size
    seen = jnp.arange(num_keys) <= positions[:, None, None, None]
    if blocks is not None:
        chosen = (blocks[..., None] == jnp.arange(num_keys) // size).any(axis=-2)
        seen = seen & chosen[:, :, :, None]
    weights = jax.nn.softmax(jnp.where(seen, logits * dim**-0.5, -jnp.inf), axis=-1)
    weights = jnp.pad(weights, ((0, 0),) * 4 + ((0, -num_keys % size),))
    found = weights.reshape(*weights.shape[:4], -1, size).sum(axis=-1)
    found = getattr(jnp, reduce)(found, axis=3)
    if blocks is None:
        return found
    return jnp.where(blocks < 0, 0, jnp.take_along_axis(found, jnp.maximum(blocks, 0), axis=3))


def share_of_budget(
    found: Array, query: Array, key: Array, shape: Shape, reduce: str, blocks: Array | None = None
) -> float:
    """The error at sampled queries over what it may be, see `nsa_jax.budget`."""
    positions = sample_positions(shape.length)[-1::-16][:SAMPLED]
    chosen = None if blocks is None else blocks[:, positions]
    exact = functools.partial(by_definition, config=shape.config, reduce=reduce)
    same, right, _ = gate.in_both(exact, (query[:, positions], key, chosen, positions), shape.dtype)
    allowed = budget.allowance(same, right, float(jnp.finfo("float32").eps))
    return budget.distance(np.asarray(found[:, positions]), right) / allowed


def branch_function(
    with_probabilities: bool, shape: Shape, implementation: dispatch.Implementation
) -> programs.Function:
    """The selected branch, forward and backward: `((out, probabilities or None), gradients)`.

    Its arguments are `(query, key, value, block_indices)` and a tuple of the output's cotangent.
    """

    def run(arrays: tuple[Array, ...], cotangents: tuple[Array]) -> Any:
        *floats, blocks = arrays

        def attend(query: Array, key: Array, value: Array) -> tuple[Array, Array | None]:
            attend_blocks: Any = functools.partial(
                attention.native_sparse_attention, query, None, None, key, value, None, None, None,
                config=shape.config, block_indices=blocks, implementation=implementation,
            )  # fmt: skip
            return attend_blocks(return_probabilities=True) if with_probabilities else (attend_blocks(), None)

        out, pull_back, probabilities = jax.vjp(attend, *floats, has_aux=True)
        return (out, probabilities), pull_back(*cotangents)

    return run


def shares_of_branch(program: Compiled, draw: Draw, shape: Shape) -> dict[str, float]:
    """The errors of output, gradients and, if it gives any, probabilities, over what they may be."""
    (out, probabilities), _ = program.run()
    positions = sample_positions(shape.length)
    shares = {
        "out": gate.check_rows(BRANCH, (out,), positions, draw, shape).share,
        "gradients": gate.check_program(BRANCH, "fwd_bwd", program, positions, draw, shape).share,
    }
    if probabilities is None:
        return shares
    query, key, _, blocks = program.arguments[0]
    return shares | {"probabilities": share_of_budget(probabilities, query, key, shape, "sum", blocks)}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = measuring_parser(
        "benchmarks.targets",
        __doc__,
        lengths=(2048,),
        dtype=("float32", "of queries and keys"),
        choices={
            "implementation": (dispatch.IMPLEMENTATIONS, "xla", "all but xla need a GPU"),
            "target": (TARGETS, "dense", "what dense attention gives to blocks, or the selected branch"),
            "reduce": (("sum", "max"), "sum", "over the query heads of a KV head; selected: sum alone"),
            "distributions": (DISTRIBUTIONS, MEASURED_BY_DEFAULT, "how far selections agree; selected alone"),
        },
        sizes={"batch": 1, "heads": 4, "kv-heads": 1},
        own_sizes={
            "key-dim": (64, "dimension of queries, keys and values"),
            "block-size": (None, "tokens of a selection block; default: those of the paper"),
        },
    )
    options = parse_sizes(parser, argv)
    if options.target == "selected" and options.reduce == "max":
        parser.error(
            "probabilities of the selected branch are sums over heads, got --target selected beside "
            "--reduce max. Leave one out."
        )
    options.value_dim = options.key_dim
    return options


class Run(roofline.Run):
    """One run of the benchmark."""

    def measure(self, length: int) -> dict[str, float]:
        """Measures one length; dense attention's time over that of each way, as far as the gate is green."""
        shape = shape_of(self.options, length, self.config)
        query, key, value = (tensor(name, shape) for name in ("query", "key_win", "value_win"))
        implementation, reduce = self.options.implementation, self.options.reduce
        probabilities = functools.partial(
            attention.block_probabilities, config=self.config, reduce=reduce, implementation=implementation
        )
        whole = NSAConfig(window_size=length)
        dense = programs.dense_implementation("dense_attention", shape)
        attend = jax.jit(functools.partial(attention.window_attention, config=whole))
        lse = attend(query, key, value).lse

        def given(query: Array, key: Array, lse: Array) -> Array:
            return probabilities(query, key, lse=lse)

        progress(f"compiling at T={length}")
        compiled = {
            GIVEN: timing.compile_for(given, (query, key, lse)),
            TWO_PASSES: timing.compile_for(probabilities, (query, key)),
            "dense": timing.compile_for(
                programs.function("dense_attention", dense, shape), (query, key, value)
            ),
        }
        for way in (GIVEN, TWO_PASSES):
            share = share_of_budget(compiled[way].run(), query, key, shape, reduce)
            self._judge(way, compiled, {"probabilities": share}, f"T={length}")
        times = self.in_turns(compiled, f"at T={length}")
        costs = {GIVEN: cost(shape, 1), TWO_PASSES: cost(shape, 2)}
        costs["dense"] = roofline.cost("dense_attention", "fwd", shape)
        for way, program in compiled.items():
            is_dense = way == "dense"
            self.add(
                benchmark="targets", operation="dense_attention" if is_dense else OPERATION, strategy=way,
                implementation=dense if is_dense else implementation, mode="fwd",
                floor_ms=self.ceiling.floor_ms(costs[way]), **dataclasses.asdict(shape),
                **Draw("random", query).fields, **times[way].fields, **program.fields,
            )  # fmt: skip
        return {
            way: round(times["dense"].median_ms / times[way].median_ms, 3)
            for way in (GIVEN, TWO_PASSES)
            if way in times
        }

    def measure_branch(self, length: int, distribution: str) -> float | None:
        """What probabilities add to the selected branch, as a share of it; None where a gate is red."""
        shape, at = shape_of(self.options, length, self.config), f"{distribution} T={length}"
        implementation = self.options.implementation
        progress(f"drawing and compiling {at}")
        draw = inputs.draw_blocks(shape, distribution)
        arrays = programs.arguments(BRANCH, draw, shape)
        out = jax.ShapeDtypeStruct(inputs.tensor_shape("out", shape), shape.dtype)
        given = arrays, (programs.cotangent_like(out, shape.dtype),)
        compiled = {
            way: timing.compile_for(branch_function(way == WEIGHED, shape, implementation), given)
            for way in (ALONE, WEIGHED)
        }
        for way in (ALONE, WEIGHED):
            self._judge(way, compiled, shares_of_branch(compiled[way], draw, shape), at)
        times, added = self.in_turns(compiled, f"at {at}"), None
        if len(times) == 2:
            added = times[WEIGHED].median_ms / times[ALONE].median_ms - 1
        for way, program in compiled.items():
            self.add(
                benchmark="targets", operation=BRANCH, strategy=way, implementation=implementation,
                mode="fwd_bwd", floor_ms=self.ceiling.floor_ms(roofline.cost(BRANCH, "fwd_bwd", shape)),
                added_share=added if way == WEIGHED else None, **dataclasses.asdict(shape), **draw.fields,
                **times[way].fields, **program.fields,
            )  # fmt: skip
        return None if added is None else round(added, 4)

    def _judge(self, way: str, compiled: dict[str, Compiled], shares: dict[str, float], at: str) -> None:
        """Takes a program out that is over one of its budgets."""
        told = ", ".join(f"{name} {share:.2f}" for name, share in shares.items())
        green = all(share <= 1 for share in shares.values())
        print(f"gate {way} {at}: {'green' if green else 'red'}: error / budget {told}", flush=True)
        if not green:
            self.red.append(f"{way} {at}")
            del compiled[way]


@command("benchmarks.targets")
def main(argv: Sequence[str] | None = None, config: NSAConfig | None = None) -> int:
    """Runs the benchmark; `config` other than the paper's is for tests."""
    options = parse(argv)
    config = config or NSAConfig()
    if options.block_size:
        config = dataclasses.replace(config, selection_block_size=options.block_size)
    run = Run(options, config)
    if options.target == "selected":
        return run.finish(added_share=run.each(run.measure_branch))
    return run.finish(dense_over_this={length: run.measure(length) for length in options.lengths})


if __name__ == "__main__":
    raise SystemExit(main())
