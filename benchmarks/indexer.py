"""How fast is attention to blocks that an indexer chooses, beside dense attention and NSA's own selection?

`python -m benchmarks.indexer` times block-sparse attention as in MSA (arXiv:2606.13392), one index head for
each KV head: `select_by_index` and then `selected_attention`, and the backward of the latter. Dense attention
takes turns with it, and so do the selections alone: by the indexer, and by NSA's importance with the paper's
sizes. The gate compares scores, outputs and gradients of sampled queries with float64, in the programs that
are timed. The last line is JSON.
"""

import argparse
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import gate, inputs, programs, records, roofline, timing
from benchmarks.command_line import command, measuring_parser, parse_sizes, progress
from benchmarks.inputs import DISTRIBUTIONS, MEASURED_BY_DEFAULT, Draw, Shape, normal, shape_of
from benchmarks.roofline import Cost
from benchmarks.selections import check_form, check_scores
from benchmarks.timing import Compiled
from benchmarks.verdict import Verdict, worst
from nsa_jax import attention, dispatch
from nsa_jax.array_typing import Array, Float
from nsa_jax.config import NSAConfig
from nsa_jax.dispatch import Implementation

WHOLE, INDEX = "indexed_attention", "select_by_index"
MSA = NSAConfig(selection_block_size=128, num_local_blocks=1)
SAMPLED = 32  # queries whose scores the gate computes in float64


def draw_index(shape: Shape, distribution: str, implementation: Implementation) -> tuple[Draw, Array]:
    """Index queries `[B, T, K, E]` of a distribution, the blocks that they choose, and one head of keys."""
    of_index = dataclasses.replace(shape, query_heads=shape.kv_heads)
    keys = normal("key_index", (shape.batch, shape.length, 1, shape.key_dim), shape.dtype)
    choose = jax.jit(
        lambda query: attention.select_by_index(
            query[:, :, :, None], keys, config=shape.config, implementation=implementation
        )
    )
    return inputs.draw_queries(of_index, distribution, choose), keys


@functools.partial(jax.jit, static_argnames=("config", "dtype"))
def block_maxima(
    query: Array, keys: Array, positions: Array, *, config: NSAConfig, dtype: str
) -> Float[Array, "B t K M"]:
    """The largest product of each block in sight for the queries at `positions`; 0 for all others."""
    query, keys = query.astype(dtype), keys[:, :, 0].astype(dtype)
    products = jnp.einsum("btke,bse->btks", query, keys, precision="highest") * query.shape[-1] ** -0.5
    seen = jnp.arange(keys.shape[1]) <= positions[:, None, None]
    size = config.selection_block_size
    products = jnp.pad(
        jnp.where(seen, products, -jnp.inf), ((0, 0),) * 3 + ((0, -keys.shape[1] % size),),
        constant_values=-jnp.inf,
    )  # fmt: skip
    best = products.reshape(*products.shape[:3], -1, size).max(axis=-1)
    return jnp.where(best == -jnp.inf, 0, best)


def judge_blocks(blocks: Array, draw: Draw, keys: Array, shape: Shape) -> Verdict:
    """The form of all indices, and the scores of sampled queries in float64."""
    form = check_form(np.asarray(blocks), np.arange(shape.length), shape.config)
    positions = gate.sample_positions(shape.length)[-1 :: -256 // SAMPLED]
    return worst(form, judge_scores(blocks[:, positions], draw.query[:, positions], keys, positions, shape))


def judge_scores(blocks: Array, query: Array, keys: Array, positions: np.ndarray, shape: Shape) -> Verdict:
    """The scores, in float64, of what the index queries `[B, t, K, E]` at `positions` chose and left out."""
    scores = functools.partial(block_maxima, config=shape.config)
    same, exact, _ = gate.in_both(scores, (query, keys, positions), "float32")
    return check_scores(np.asarray(blocks), positions, same, exact, shape)


def cost_of_index(shape: Shape) -> Cost:
    """Unavoidable flops and bytes of the scores: a product for each KV head and visible token."""
    pairs = roofline.visible_pairs("dense_attention", shape.length, shape.config)
    rows, width = shape.batch * shape.length, jnp.dtype(shape.dtype).itemsize
    arrays = rows * (shape.kv_heads + 1) * shape.key_dim * width
    return Cost(
        2 * shape.batch * shape.kv_heads * pairs * shape.key_dim,
        arrays + 4 * rows * shape.kv_heads * shape.config.num_selected_blocks,
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = measuring_parser(
        "benchmarks.indexer",
        __doc__,
        lengths=(4096,),
        dtype=("float32", "of queries, keys and values"),
        choices={
            "implementation": (dispatch.IMPLEMENTATIONS, "xla", "all but xla need a GPU"),
            "distributions": (DISTRIBUTIONS, MEASURED_BY_DEFAULT, "how far index queries agree"),
        },
        sizes={"batch": 1, "heads": 4, "kv-heads": 1},
        own_sizes={"key-dim": (64, "dimension of queries, keys, values and of the index")},
    )
    options = parse_sizes(parser, argv)
    options.value_dim = options.key_dim
    return options


class Run(roofline.Run):
    """One run of the benchmark."""

    def measure(self, length: int, distribution: str) -> None:
        """Measures one length and distribution; what takes turns are the rows of one mode."""
        shape = shape_of(self.options, length, self.config)
        implementation = self.options.implementation
        progress(f"drawing and compiling {distribution} T={length}")
        draw, keys = draw_index(shape, distribution, implementation)
        selected = dataclasses.replace(draw, query=inputs.tensor("query", shape))
        given = programs.arguments("selected_attention", selected, shape)
        settings: dict[str, Any] = dict(config=shape.config, implementation=implementation)

        def index(query: Array, keys: Array) -> Array:
            return attention.select_by_index(query[:, :, :, None], keys, **settings)

        def whole(query_index: Array, keys: Array, query: Array, key: Array, value: Array) -> Any:
            blocks = index(query_index, keys)
            return attention.selected_attention(query, key, value, blocks, **settings), blocks

        dense = programs.dense_implementation("dense_attention", shape)
        paper = dataclasses.replace(shape, config=NSAConfig() if self.config == MSA else self.config)
        by_importance = Draw(distribution, inputs.tensor("query", paper))
        run = functools.partial(programs.function, shape=shape)
        of_dense = programs.arguments("dense_attention", selected, shape)
        compiled: dict[tuple[str, str], Compiled] = {
            (INDEX, "fwd"): timing.compile_for(index, (draw.query, keys)),
            ("select_blocks", "fwd"): timing.compile_for(
                programs.function("select_blocks", implementation, paper),
                programs.arguments("select_blocks", by_importance, paper),
            ),
            (WHOLE, "fwd"): timing.compile_for(whole, (draw.query, keys, *given[:3])),
            ("dense_attention", "fwd"): timing.compile_for(run("dense_attention", dense), of_dense),
            (WHOLE, "bwd"): programs.compile_mode(run("selected_attention", implementation), "bwd", given),
            ("dense_attention", "bwd"): programs.compile_mode(run("dense_attention", dense), "bwd", of_dense),
        }
        for name, verdict in self._verdicts(compiled, draw, selected, keys, shape).items():
            print(f"gate {' '.join(name)} {distribution} T={length}: {verdict}", flush=True)
            if not verdict.green:
                self.red.append(f"{' '.join(name)} {distribution} T={length}")
                del compiled[name]
        costs = {
            (INDEX, "fwd"): cost_of_index(shape),
            ("select_blocks", "fwd"): roofline.cost("select_blocks", "fwd", paper),
            (WHOLE, "fwd"): cost_of_index(shape) + roofline.cost("selected_attention", "fwd", shape),
            (WHOLE, "bwd"): roofline.cost("selected_attention", "bwd", shape),
        }
        for mode in ("fwd", "bwd"):
            programs_of_mode = {name: x for name, x in compiled.items() if name[1] == mode}
            times = self.in_turns(programs_of_mode, f"of {mode} at T={length}")
            for name, program in programs_of_mode.items():
                cost = costs.get(name) or roofline.cost("dense_attention", mode, shape)
                sizes = dataclasses.asdict(paper if name[0] == "select_blocks" else shape)
                self.add(
                    benchmark="indexer", operation=name[0], mode=mode,
                    implementation=dense if name[0] == "dense_attention" else implementation,
                    floor_ms=self.ceiling.floor_ms(cost), **sizes, **draw.fields,
                    **times[name].fields, **program.fields,
                )  # fmt: skip

    def _verdicts(
        self, compiled: dict[tuple[str, str], Compiled], draw: Draw, selected: Draw, keys: Array, shape: Shape
    ) -> dict[tuple[str, str], Verdict]:
        """Of the three programs with an indexer; those of `benchmarks.attention` are judged there."""
        positions = gate.sample_positions(shape.length)
        attended, blocks = compiled[WHOLE, "fwd"].run()
        same = Verdict(0.0 if bool((blocks == draw.block_indices).all()) else np.inf, "blocks of the draw")
        outputs = gate.check_rows("selected_attention", tuple(attended), positions, selected, shape)
        gradients = compiled[WHOLE, "bwd"]
        return {
            (INDEX, "fwd"): judge_blocks(compiled[INDEX, "fwd"].run(), draw, keys, shape),
            (WHOLE, "fwd"): worst(outputs, same),
            (WHOLE, "bwd"): gate.check_program(
                "selected_attention", "bwd", gradients, positions, selected, shape
            ),
        }


@command("benchmarks.indexer")
def main(argv: Sequence[str] | None = None, config: NSAConfig | None = None) -> int:
    """Runs the benchmark; `config` other than that of MSA is for tests."""
    options = parse(argv)
    run = Run(options, config or MSA)
    run.each(run.measure)
    ratios = {
        f"{row.distribution} {row.length} {row.mode}": round(beside.median_ms / row.median_ms, 2)
        for row, beside in records.beside_dense(run.rows)
    }
    return run.finish(dense_over_this=ratios)


if __name__ == "__main__":
    raise SystemExit(main())
