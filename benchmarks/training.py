"""How many tokens a second does a training step of the example's language model take, with NSA and dense?

`python -m benchmarks.training` times forward, backward and AdamW of `nsa_jax.model.Transformer` on random
tokens, one row of each length and attention, layers rematerialised; all but the attention is the same. Rows
go to a JSONL file of their own kind; the last line is JSON.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from benchmarks import records, timing
from benchmarks.command_line import (
    Parser,
    add_dtype,
    add_sampling,
    add_sizes,
    check_heads,
    check_writable,
    command,
    missing_package,
    positive,
    progress,
)
from benchmarks.inputs import Shape, abstract_arguments, key
from nsa_jax import dispatch
from nsa_jax.array_typing import Array
from nsa_jax.model import Transformer, TransformerConfig
from nsa_jax.nn.checks import head_width
from nsa_jax.nn.dense import choose_implementation

try:
    import optax
except ImportError as error:
    raise SystemExit(missing_package("benchmarks.training", error, "train")) from error

OPTIMIZER = optax.adamw(1e-4)


def compile_step(config: TransformerConfig, batch: int, length: int) -> tuple[timing.Compiled, int]:
    """The compiled step on its arguments, and the number of parameters."""
    graph, state = nnx.split(Transformer(config, rngs=nnx.Rngs(0)))
    tokens = jax.random.randint(key("tokens"), (batch, length + 1), 0, config.vocab_size)

    def loss(state: Any, tokens: Array) -> Array:
        logits = nnx.merge(graph, state)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(state: Any, moments: Any, tokens: Array) -> tuple[Any, Any, Array]:
        value, gradient = jax.value_and_grad(loss)(state, tokens)
        updates, moments = OPTIMIZER.update(gradient, moments, state)
        return optax.apply_updates(state, updates), moments, value

    parameters = sum(x.size for x in jax.tree.leaves(state))
    return timing.compile_for(step, (state, OPTIMIZER.init(state), tokens)), parameters


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = Parser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=positive,
        default=[8192, 16384, 32768, 65536],
        metavar="T",
        help="tokens of a sequence; default: 8192 16384 32768 65536",
    )
    parser.add_argument(
        "--attention",
        nargs="+",
        choices=("nsa", "dense"),
        default=["nsa", "dense"],
        help="models to measure; default: both",
    )
    add_dtype(parser, "bfloat16", "of the activations")
    add_sizes(
        parser,
        ("batch", 1, "sequences of a step"),
        ("layers", 2, "decoder layers"),
        ("model-dim", 2048, "width of the residual stream"),
        ("heads", 64, "query heads"),
        ("kv-heads", 4, "KV heads; must divide --heads"),
        ("head-dim", 128, "dimension of queries, keys and values"),
    )
    add_sampling(parser)
    options = parser.parse_args(argv)
    check_heads(options.heads, options.kv_heads)
    check_writable(options.output, "--output")
    return options


@command("benchmarks.training")
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    options = parse(argv)
    environment = records.environment()
    environment.print()
    model = TransformerConfig(
        vocab_size=256, num_layers=options.layers, model_dim=options.model_dim, num_heads=options.heads,
        num_kv_heads=options.kv_heads, head_dim=options.head_dim, dtype=options.dtype, remat=True,
    )  # fmt: skip
    configs = {name: dataclasses.replace(model, attention=name) for name in options.attention}
    ratios = {}
    rows = 0
    for length in options.lengths:
        steps, sizes = {}, {}
        for attention, config in configs.items():
            progress(f"compiling the training step: {attention} T={length}")
            steps[attention], sizes[attention] = compile_step(config, options.batch, length)
        runs = {attention: step.run for attention, step in steps.items()}
        progress(f"measuring {len(runs)} programs at T={length}")
        times = timing.measure(runs, budget_s=options.budget_s)
        for attention, step in steps.items():
            taken = times[attention]
            row = records.TrainingRow(
                **dataclasses.asdict(environment), benchmark="training", attention=attention,
                implementation=implementation(configs[attention], options.batch, length),
                batch=options.batch, length=length, model=dataclasses.asdict(configs[attention]),
                parameters=sizes[attention], median_ms=taken.median_ms, p20_ms=taken.percentile_ms(20),
                p80_ms=taken.percentile_ms(80), samples=len(taken.samples_ms),
                tokens_per_s=options.batch * length / taken.median_ms * 1e3, compile_s=step.compile_s,
                peak_bytes=step.peak_bytes,
            )  # fmt: skip
            rows += 1
            print(row, flush=True)
            records.append(options.output, [row])
        if {"nsa", "dense"} <= times.keys():
            ratios[length] = round(times["dense"].median_ms / times["nsa"].median_ms, 3)
    print(json.dumps({"run_id": environment.run_id, "rows": rows, "dense_over_nsa": ratios}))
    return 0


def implementation(model: TransformerConfig, batch: int, length: int) -> str:
    """What runs the attention of the model."""
    dim = head_width(model.num_heads, model.model_dim, model.num_kv_heads, model.head_dim)
    shape = Shape(
        batch=batch, length=length, query_heads=model.num_heads, kv_heads=model.num_kv_heads, key_dim=dim,
        value_dim=dim, dtype=model.dtype,
    )  # fmt: skip
    arrays = abstract_arguments("native_sparse_attention", shape, model.nsa)
    if model.attention == "dense":
        return choose_implementation(arrays[0]) or "xla"
    return dispatch.choose("native_sparse_attention", *arrays, config=model.nsa).implementation


if __name__ == "__main__":
    raise SystemExit(main())
