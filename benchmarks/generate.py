"""How fast does `generate` write text, with NSA and dense attention, and what is a token's time made of?

`python -m benchmarks.generate` gives a random model random prompts. A call for one new token is the time to
the first one; what a call for more takes beyond that, over their number, is the time per token. Beside it
stand the products with all weights, the attention steps and the sampling, each alone in a compiled loop and
with the bytes that it reads. Rows go to a JSONL file of their own kind; the last line is JSON.
"""

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from flax import nnx

from benchmarks import records, timing, token_parts
from nsa_jax.config import NSAConfig
from nsa_jax.generate import generate
from nsa_jax.model import Transformer, TransformerConfig
from nsa_jax.nn import weights


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line; the defaults are for a GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generate", description=__doc__)
    parser.add_argument("--lengths", nargs="+", type=int, default=[32768], metavar="T", help="prompt tokens")
    parser.add_argument("--new-tokens", type=int, default=257, help="the first, and whole chunks of 8 steps")
    parser.add_argument("--attention", nargs="+", choices=("nsa", "dense"), default=["nsa", "dense"])
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--model-dim", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--budget-s", type=float, default=5.0, help="seconds of samples a call, at least 3")
    parser.add_argument("--output", type=pathlib.Path, help="JSONL file that the rows are added to")
    options = parser.parse_args(argv)
    if options.new_tokens < 2 or options.new_tokens % 8 != 1:
        parser.error(
            "--new-tokens must be 1 and whole chunks of 8 steps, so that none runs for nothing, got "
            f"{options.new_tokens}. Pass 9, 17 or 257."
        )
    return options


def main(argv: Sequence[str] | None = None, nsa: NSAConfig | None = None) -> int:
    """Runs the benchmark; `nsa` other than the paper's is for tests."""
    options = parse(argv)
    environment = records.environment()
    environment.print()
    config = TransformerConfig(
        vocab_size=options.vocab, num_layers=options.layers, model_dim=options.model_dim,
        num_heads=options.heads, num_kv_heads=options.kv_heads, head_dim=options.head_dim,
        nsa=nsa or NSAConfig(), dtype=options.dtype, param_dtype=options.dtype,
    )  # fmt: skip
    ratios, rows = {}, 0
    for length in options.lengths:
        token_ms = {}
        for attention in options.attention:
            model = Transformer(dataclasses.replace(config, attention=attention), rngs=nnx.Rngs(0))
            try:
                figures = measure(model, options.batch, length, options.new_tokens, options.budget_s)
            except NotImplementedError as reason:
                print(f"refused: {attention} T={length}: {reason}", flush=True)
                continue
            row = records.GenerateRow(
                **dataclasses.asdict(environment), benchmark="generate", attention=attention,
                batch=options.batch, length=length, new_tokens=options.new_tokens,
                model=dataclasses.asdict(model.config),
                parameters=sum(x.size for x in weights(model).values()), **figures,
            )  # fmt: skip
            token_ms[attention], rows = row.token_ms, rows + 1
            print(row, flush=True)
            records.append(options.output, [row])
        if len(token_ms) == 2:
            ratios[length] = round(token_ms["dense"] / token_ms["nsa"], 3)
    print(json.dumps({"run_id": environment.run_id, "rows": rows, "dense_over_nsa": ratios}))
    return 0


def measure(model: Transformer, batch: int, length: int, new_tokens: int, budget_s: float) -> dict[str, Any]:
    """The figures of one row; both calls run one program.

    Raises:
      NotImplementedError: the model cannot decode.
    """
    prompts = np.random.default_rng(0).integers(0, model.config.vocab_size, (batch, length))

    def call(count: int) -> Callable[[], Any]:
        return lambda: generate(model, prompts, max_new_tokens=count, max_length=length + new_tokens)

    first_call_s = timing.seconds_of(call(1))
    whole = timing.measure({"first": call(1), "all": call(new_tokens)}, budget_s=budget_s)
    first_ms = whole["first"].median_ms
    token_ms = (whole["all"].median_ms - first_ms) / (new_tokens - 1)

    parts = {
        "products": lambda: token_parts.products(model, batch),
        "attention": lambda: token_parts.attention(model, batch, length),
        "sampling": lambda: token_parts.sampling(model, batch),
    }
    figures: dict[str, Any] = {}
    for name, make in parts.items():
        part = make()
        alone = timing.measure({name: part.run}, budget_s=budget_s)[name]
        figures |= {f"{name}_ms": alone.median_ms / token_parts.STEPS, f"{name}_bytes": part.bytes}
    return figures | {
        "compile_s": max(first_call_s - first_ms / 1e3, 0.0),
        "first_token_ms": first_ms,
        "token_ms": token_ms,
        "tokens_per_s": batch / token_ms * 1e3,
        "samples": len(whole["all"].samples_ms),
    }


if __name__ == "__main__":
    raise SystemExit(main())
