"""How many tokens a second does a training step of the example's language model take, with NSA and dense?

`python -m benchmarks.training` times forward, backward and AdamW of `nsa_jax.model.Transformer` on random
tokens, one row of each length and attention, layers rematerialised; all but the attention is the same. With
`--devices` it also times NSA with the tokens of each sequence spread over several (`docs/parallel.md`). Rows
go to a JSONL file of their own kind; the last line is JSON.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from benchmarks import command_line, devices, programs, records, timing
from benchmarks.command_line import InputError, command, measuring_parser, parse_sizes, progress
from benchmarks.inputs import Shape, abstract_arguments, key
from nsa_jax import dispatch
from nsa_jax.array_typing import Array
from nsa_jax.config import NSAConfig
from nsa_jax.model import Transformer, TransformerConfig
from nsa_jax.parallel import padded_length, to_zigzag

try:
    import optax
except ImportError as error:
    raise SystemExit(command_line.missing_package("benchmarks.training", error, "train")) from error

# It learns next to nothing, so that each step selects as the first one does: what it costs depends on that.
OPTIMIZER = optax.adamw(1e-12)
# Least length of a sample on a GPU. The host queues its steps ahead, as a training loop does, because to hand
# over some thousand parameters takes tens of milliseconds.
SAMPLE_S = 2.0


class Training:
    """Training steps on the same tokens, each from what the last one left.

    Args:
      step: the compiled step, which is given the memory of `held`.
      held: parameters and moments.
      tokens: inputs and labels.
    """

    def __init__(self, step: timing.Compiled, held: tuple[Any, Any], tokens: tuple[Array, Array]):
        self.step, self.held, self.tokens = step, held, tokens

    def start(self) -> Array:
        """One step, not waited for; returns its loss."""
        *held, loss = self.step.call(*self.held, *self.tokens)
        self.held = tuple(held)
        return loss


def compile_step(
    config: TransformerConfig, batch: int, length: int, num_devices: int = 1
) -> tuple[Training, int]:
    """The compiled step on its arguments, and the number of parameters; tokens spread over the devices."""
    axis = devices.AXIS if num_devices > 1 else None
    with devices.in_context(num_devices):
        graph, state = nnx.split(Transformer(config, context_axis=axis, rngs=nnx.Rngs(0)))
        tokens = jax.random.randint(key("tokens"), (batch, length + 1), 0, config.vocab_size)
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        if num_devices > 1:
            state = devices.put(state, PartitionSpec())
            spread_tokens = PartitionSpec(None, devices.AXIS)
            inputs, labels = (devices.put(to_zigzag(x, num_devices), spread_tokens) for x in (inputs, labels))

        def loss(state: Any, inputs: Array, labels: Array) -> Array:
            mean: Array = nnx.merge(graph, state).loss(inputs, targets=labels)
            return mean

        def step(state: Any, moments: Any, inputs: Array, labels: Array) -> tuple[Any, Any, Array]:
            value, gradient = jax.value_and_grad(loss)(state, inputs, labels)
            updates, moments = OPTIMIZER.update(gradient, moments, state)
            return optax.apply_updates(state, updates), moments, value

        parameters = sum(x.size for x in jax.tree.leaves(state))
        held = state, OPTIMIZER.init(state)
        compiled = timing.compile_for(step, (*held, inputs, labels), donate=(0, 1))
        return Training(dataclasses.replace(compiled, arguments=()), held, (inputs, labels)), parameters


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = measuring_parser(
        "benchmarks.training",
        __doc__,
        lengths=(8192, 16384, 32768, 65536),
        dtype=("bfloat16", "of the activations"),
        choices={"attention": (("nsa", "dense"), ("nsa", "dense"), "models to measure")},
        sizes={"layers": 2, "model-dim": 2048, "heads": 64, "kv-heads": 4, "head-dim": 128, "vocab": 256},
        own_sizes={
            "devices": (1, "with more than one, also NSA on so many, which share the tokens of a sequence"),
            "batch": (1, "sequences of a step"),
        },
    )
    parser.add_argument(
        "--remat", choices=("layers", "attention"), default="layers",
        help="what the backward pass computes again: whole layers, or all but what the GPU kernels gave; "
        "default: layers",
    )  # fmt: skip
    parser.add_argument("--scan-layers", action="store_true", help="compile all layers as one")
    options = parse_sizes(parser, argv)
    devices.check(options.devices)
    for length in options.lengths:
        whole = padded_length(length, options.devices, NSAConfig())
        if options.devices > 1 and length != whole:
            raise InputError(
                f"--lengths must be whole chunks for {options.devices} devices, got {length}. Pass {whole}."
            )
    return options


@command("benchmarks.training")
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    options = parse(argv)
    run = records.Run(options)
    model = TransformerConfig(
        vocab_size=options.vocab, num_layers=options.layers, model_dim=options.model_dim,
        num_heads=options.heads, num_kv_heads=options.kv_heads, head_dim=options.head_dim,
        dtype=options.dtype, scan_layers=options.scan_layers,
        remat=True if options.remat == "layers" else options.remat,
    )  # fmt: skip
    ways = [(name, 1) for name in options.attention] + [("nsa", options.devices)] * (options.devices > 1)
    configs = {way: dataclasses.replace(model, attention=way[0]) for way in ways}
    ratios, faster = {}, {}
    for length in options.lengths:
        steps, sizes = {}, {}
        for way, config in configs.items():
            progress(f"compiling the training step: {way[0]} on {way[1]} T={length}")
            steps[way], sizes[way] = compile_step(config, options.batch, length, way[1])
        progress(f"measuring {len(steps)} programs at T={length}")
        runs = {way: training.start for way, training in steps.items()}
        sample_s = SAMPLE_S if timing.least_sample_s() else 0.0
        times = timing.measure(runs, budget_s=options.budget_s, sample_s=sample_s)
        for way, training in steps.items():
            run.add(
                benchmark="training", attention=way[0], devices=way[1], batch=options.batch, length=length,
                implementation=implementation(configs[way], options.batch, length), parameters=sizes[way],
                model=dataclasses.asdict(configs[way]), **times[way].fields, **training.step.fields,
                tokens_per_s=options.batch * length / times[way].median_ms * 1e3,
            )  # fmt: skip
        alone = times.get(("nsa", 1))
        if alone and ("dense", 1) in times:
            ratios[length] = round(times["dense", 1].median_ms / alone.median_ms, 3)
        if alone and options.devices > 1:
            faster[length] = round(alone.median_ms / times["nsa", options.devices].median_ms, 3)
    return run.finish(dense_over_nsa=ratios, **({"faster_than_one_device": faster} if faster else {}))


def implementation(model: TransformerConfig, batch: int, length: int) -> str:
    """What runs the attention of the model."""
    assert model.head_dim is not None
    shape = Shape(
        batch=batch, length=length, query_heads=model.num_heads, kv_heads=model.num_kv_heads,
        key_dim=model.head_dim, value_dim=model.head_dim, dtype=model.dtype, config=model.nsa,
    )  # fmt: skip
    if model.attention == "dense":
        return programs.dense_implementation("dense_layer", shape)
    arrays = abstract_arguments("native_sparse_attention", shape)
    return dispatch.choose("native_sparse_attention", *arrays, config=model.nsa).implementation


if __name__ == "__main__":
    raise SystemExit(main())
