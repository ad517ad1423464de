"""How much of `generate`'s speed is left when requests of many lengths come and go?

`python -m benchmarks.batcher` gives a `Batcher` requests with prompts of random lengths, and compares the
time of all, prompts included, with that of `generate` for as many rows as there are slots, all of the mean
length, as often as makes the same number of texts. Then all slots but one write, and one more request comes
between two chunks of steps: the row of the requests also has the time to its first token, and that of a step
of the others before it came; the row of `generate` has the time to the first token of the same prompt alone.
Everything is compiled before it is timed. Rows go to a JSONL file of their own kind; the last line is JSON.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from benchmarks import records, timing
from benchmarks.command_line import command, measuring_parser, parse_sizes, progress
from benchmarks.generate import MODEL, configuration
from nsa_jax.config import NSAConfig
from nsa_jax.generate import Batcher, generate, prepare
from nsa_jax.model import Transformer, TransformerConfig
from nsa_jax.nn import weights

CHUNKS = 10  # of steps, for the time of one
LATE = 5  # requests that come while others write


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line; the defaults are for a GPU."""
    parser = measuring_parser(
        "benchmarks.batcher",
        __doc__,
        lengths=(32768,),
        dtype=("bfloat16", "of parameters and activations"),
        choices={"attention": (("nsa", "dense"), ("nsa",), "models to measure")},
        sizes=MODEL,
        own_sizes={
            "requests": (64, "texts to write: a multiple of --slots"),
            "slots": (16, "requests that are written at the same time"),
            "shortest": (1024, "tokens of the shortest prompt; the longest has the length"),
            "new-tokens": (256, "tokens to write for each prompt"),
            "chunk-size": (8, "steps between two times at which requests enter and leave"),
            "prefill-chunk": (8192, "most tokens of a prompt that the batcher reads at once"),
        },
    )
    options = parse_sizes(parser, argv)
    if options.requests % options.slots:
        parser.error(f"--requests must be a multiple of --slots, got {options.requests} and {options.slots}.")
    if options.slots < 2:
        parser.error("--slots must be at least 2, so that one request comes while others write, got 1.")
    if options.shortest > min(options.lengths):
        parser.error(f"--shortest must not exceed a length, got {options.shortest}. Pass a smaller one.")
    return options


@command("benchmarks.batcher")
def main(argv: Sequence[str] | None = None, nsa: NSAConfig | None = None) -> int:
    """Runs the benchmark; `nsa` other than the paper's is for tests."""
    options = parse(argv)
    run = records.Run(options)
    shares = []
    for length in options.lengths:
        for attention in options.attention:
            config = configuration(options, attention, nsa)
            progress(f"compiling and measuring the batcher: {attention} T={length}")
            requests, rows = (
                run.add(benchmark="batcher", attention=attention, length=length, **figures)
                for figures in measure(config, options, length)
            )
            shares.append(round(rows.median_ms / requests.median_ms, 3))
    return run.finish(share_of_generate=shares)


def measure(config: TransformerConfig, options: argparse.Namespace, length: int) -> list[dict[str, Any]]:
    """The figures of both rows: requests that come and go, and equal rows."""
    started, random = time.perf_counter(), np.random.default_rng(0)
    model = prepare(Transformer(config, rngs=nnx.Rngs(0)))
    lengths = random.integers(options.shortest, length, options.requests, endpoint=True)
    prompts = [random.integers(0, config.vocab_size, size, np.int32) for size in lengths]
    mean = round(lengths.mean())
    equal = random.integers(0, config.vocab_size, (options.slots, mean), np.int32)
    settings: dict[str, Any] = dict(
        # A slot that is written goes on while all others are filled, and for the chunks that are timed.
        max_length=length + (options.slots + 2 * CHUNKS) * options.chunk_size + options.new_tokens,
        chunk_size=options.chunk_size,
    )
    batcher = Batcher(
        model, options.slots, max_waiting=options.requests, sampling=(), prefill_chunk=options.prefill_chunk,
        **settings,
    )  # fmt: skip

    def write_all() -> None:
        requests = [batcher.submit(prompt, max_new_tokens=options.new_tokens) for prompt in prompts]
        for request in requests:
            for _ in request:
                pass

    def write_equal() -> None:
        for _ in range(options.requests // options.slots):
            jax.block_until_ready(generate(model, equal, max_new_tokens=options.new_tokens, **settings))

    def read_one() -> Any:
        return generate(model, equal[:1], max_new_tokens=1, **settings)

    def late_request() -> tuple[float, float]:
        many = settings["max_length"] - mean
        others = [batcher.submit(prompt, max_new_tokens=many) for prompt in equal[1:]]
        try:
            for other in others:
                next(other)
            chunks_s = timing.seconds_of(lambda: [next(others[-1]) for _ in range(CHUNKS)])
            late = batcher.submit(equal[0], max_new_tokens=options.chunk_size)
            first_s = timing.seconds_of(lambda: next(late))
            for _ in late:
                pass
        finally:
            for other in others:
                other.cancel()
        return first_s, chunks_s / CHUNKS

    runs = {"requests": write_all, "equal rows": write_equal, "prompt": read_one}
    for each in (*runs.values(), late_request):
        each()
    compile_s = time.perf_counter() - started
    whole = timing.measure(runs, budget_s=options.budget_s)
    first_s, chunk_s = map(statistics.median, zip(*(late_request() for _ in range(LATE)), strict=True))
    same = {
        "batch": options.slots,
        "new_tokens": options.new_tokens,
        "chunk_size": options.chunk_size,
        "model": dataclasses.asdict(config),
        "parameters": sum(x.size for x in weights(model).values()),
        "compile_s": compile_s,
    }
    texts = options.requests * options.new_tokens
    read = f"tokens, at most {options.prefill_chunk} at a time"
    named = {
        "requests": f"{options.requests} requests of {options.shortest} to {length} {read}",
        "equal rows": f"{options.requests // options.slots} times {options.slots} rows of {mean} tokens",
    }
    requests, rows = (
        dict(
            **same, **whole[name].fields, strategy=strategy,
            tokens_per_s=1e3 * texts / whole[name].median_ms,
        )
        for name, strategy in named.items()
    )  # fmt: skip
    requests |= dict(first_token_ms=1e3 * first_s, token_ms=1e3 * chunk_s / options.chunk_size)
    return [requests, rows | dict(first_token_ms=whole["prompt"].median_ms)]


if __name__ == "__main__":
    raise SystemExit(main())
