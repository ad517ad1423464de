"""How fast does `generate` write text, with NSA and dense attention, and what is a token's time made of?

`python -m benchmarks.generate` gives a random model random prompts. A call for one new token is the time to
the first token. A longer call takes more; the difference, over the number of its further tokens, is the time
per token, and so it is of `stream`, which gives each chunk of tokens to the host. A row also has the products
with all weights, the attention steps and the sampling, each alone in a compiled loop, with the bytes that it
reads. With several devices NSA also writes on all of them, without the parts: as many more prompts, divided
by rows, and the same prompts, divided by heads. What is divided by heads is a model that was prepared once,
before all calls. Rows go to a JSONL file of their own kind; the last line is JSON.
"""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from benchmarks import devices, records, timing, token_parts
from benchmarks.command_line import InputError, command, measuring_parser, parse_sizes, progress
from nsa_jax.config import NSAConfig
from nsa_jax.generate import generate, prepare, start, stream
from nsa_jax.model import Transformer, TransformerConfig
from nsa_jax.nn import weights

MODEL = {"layers": 18, "model-dim": 1024, "heads": 16, "kv-heads": 4, "head-dim": 128, "vocab": 32768}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line; the defaults are for a GPU."""
    parser = measuring_parser(
        "benchmarks.generate",
        __doc__,
        lengths=(32768,),
        dtype=("bfloat16", "of parameters and activations"),
        choices={"attention": (("nsa", "dense"), ("nsa", "dense"), "models to measure")},
        sizes=MODEL,
        own_sizes={
            "new-tokens": (257, "tokens to write for each prompt: 1 plus a multiple of --chunk-size"),
            "chunk-size": (8, "steps between two tests whether all rows have ended"),
            "batch": (8, "prompts, of each device where they are divided by rows"),
            "devices": (1, "with more than one, also NSA on so many, by rows and by heads"),
        },
    )
    options = parse_sizes(parser, argv)
    if options.new_tokens < 2 or (options.new_tokens - 1) % options.chunk_size:
        parser.error(
            f"--new-tokens must be 1 plus a multiple of {options.chunk_size}, because the loop runs in "
            f"chunks of --chunk-size steps, got {options.new_tokens}. Pass {options.chunk_size + 1}."
        )
    devices.check(options.devices)
    if options.kv_heads % options.devices:
        raise InputError(
            f"--kv-heads must be a multiple of --devices, got {options.kv_heads} and {options.devices}. Pass "
            "another number."
        )
    return options


def configuration(options: argparse.Namespace, attention: Any, nsa: NSAConfig | None) -> TransformerConfig:
    """The model that a command asks for."""
    return TransformerConfig(
        vocab_size=options.vocab, num_layers=options.layers, model_dim=options.model_dim,
        num_heads=options.heads, num_kv_heads=options.kv_heads, head_dim=options.head_dim,
        nsa=nsa or NSAConfig(), dtype=options.dtype, param_dtype=options.dtype, attention=attention,
    )  # fmt: skip


class Unmeasurable(Exception):
    """A time that drowns in noise."""


@command("benchmarks.generate")
def main(argv: Sequence[str] | None = None, nsa: NSAConfig | None = None) -> int:
    """Runs the benchmark; `nsa` other than the paper's is for tests."""
    options = parse(argv)
    run = records.Run(options)
    ratios, unmeasured = {}, []
    ways: list[tuple[Any, str | None]] = [(name, None) for name in options.attention]
    ways += [("nsa", spread) for spread in ("rows", "heads")] * (options.devices > 1)
    for length in options.lengths:
        token_ms = {}
        for attention, spread in ways:
            what = f"{attention} T={length}" + (f" by {spread}" if spread else "")
            progress(f"compiling and measuring generate: {what}")
            try:
                figures = measure(configuration(options, attention, nsa), options, length, spread)
            except NotImplementedError as reason:
                print(f"refused: {what}: {reason}", flush=True)
                continue
            except Unmeasurable as reason:
                unmeasured.append(f"{what}: {reason}")
                print(f"not measured: {unmeasured[-1]}", flush=True)
                continue
            row = run.add(
                benchmark="generate", attention=attention, length=length, new_tokens=options.new_tokens,
                **({} if options.chunk_size == 8 else dict(chunk_size=options.chunk_size)),
                **({} if spread is None else dict(devices=options.devices, spread=spread)), **figures,
            )  # fmt: skip
            if spread is None:
                token_ms[attention] = row.token_ms
        if len(token_ms) == 2:
            ratios[length] = round(token_ms["dense"] / token_ms["nsa"], 3)
    return run.finish(dense_over_nsa=ratios, unmeasured=unmeasured) or int(bool(unmeasured))


def measure(
    config: TransformerConfig, options: argparse.Namespace, length: int, spread: str | None
) -> dict[str, Any]:
    """The figures of one row; both calls run one program.

    Raises:
      NotImplementedError: the model cannot decode.
      Unmeasurable: the tokens after the first take less than the noise.
    """
    new_tokens, budget_s = options.new_tokens, options.budget_s
    num_devices = 1 if spread is None else options.devices
    batch = options.batch * (num_devices if spread == "rows" else 1)
    with devices.in_context(num_devices):
        parts = {None: None, "rows": {}, "heads": dict.fromkeys(("heads", "kv_heads", "mlp"), devices.AXIS)}
        model = Transformer(config, sharding=parts[spread], rngs=nnx.Rngs(0))
        num_parameters = sum(x.size for x in weights(model).values())
        if spread == "heads":
            model = prepare(model, donate=True)
        prompts: Any = np.random.default_rng(0).integers(0, config.vocab_size, (batch, length), np.int32)
        if spread is not None:
            prompts = devices.put(prompts, PartitionSpec(devices.AXIS if spread == "rows" else None))

        capacity, chunk_size = length + new_tokens, options.chunk_size

        def call(count: int) -> Callable[[], Any]:
            settings: Any = dict(max_new_tokens=count, max_length=capacity, chunk_size=chunk_size)
            return lambda: generate(model, prompts, **settings)

        def streamed(count: int) -> Callable[[], Any]:
            return lambda: [*stream(start(model, prompts, max_length=capacity), count, chunk_size=chunk_size)]

        first_call_s = timing.seconds_of(call(1))
        runs = {"first": call(1), "all": call(new_tokens)}
        if spread is None:
            runs |= {"first streamed": streamed(1), "all streamed": streamed(new_tokens)}
        whole = timing.measure(runs, budget_s=budget_s)
    first_ms = whole["first"].median_ms
    further_ms = whole["all"].median_ms - first_ms
    if further_ms <= 0:
        raise Unmeasurable(
            f"the tokens after the first must take more than the noise, got {further_ms:.3g} ms for "
            f"{new_tokens - 1}. Pass more --new-tokens, or a longer --budget-s."
        )
    token_ms = further_ms / (new_tokens - 1)
    figures: dict[str, Any] = {
        "batch": batch,
        "model": dataclasses.asdict(config),
        "parameters": num_parameters,
        "compile_s": max(first_call_s - first_ms / 1e3, 0.0),
        "first_token_ms": first_ms,
        "token_ms": token_ms,
        "tokens_per_s": batch / token_ms * 1e3,
        "samples": len(whole["all"].samples_ms),
    }
    if spread is None:
        further_ms = whole["all streamed"].median_ms - whole["first streamed"].median_ms
        figures["streamed_ms"] = further_ms / (new_tokens - 1)
    for name, make in token_parts.PARTS.items() if spread is None else ():
        progress(f"compiling and measuring {name} alone")
        part = make(model, batch, length)
        alone = timing.measure({name: part.run}, budget_s=budget_s)[name]
        figures |= {f"{name}_ms": alone.median_ms / token_parts.STEPS, f"{name}_bytes": part.bytes}
    return figures


if __name__ == "__main__":
    raise SystemExit(main())
