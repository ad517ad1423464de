"""Do drafts pay? Steps and time of one model with and without `LookUp`, on a text that it continues.

    python -m examples.drafts MODEL --text FILES... --results FILE

MODEL is what `nsa_jax.pretrained.load` takes, such as RUN/model of `adopt`. A row of the results is one
number of drafts for one number of rows and one kind of text: "continues" follows a document, "repeats"
follows a document whose first tokens have come once more. All is greedy, and compiled before it is timed.
"""

import argparse
import itertools
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from nsa_jax.adopt.command_line import InputError, Parser, complain, count, positive
from nsa_jax.adopt.files import documents
from nsa_jax.adopt.report import versions
from nsa_jax.generate import LookUp, advance, prepare, start
from nsa_jax.pretrained import load

PROGRAM = "examples.drafts"
KINDS = "continues", "repeats"


def main(arguments: list[str] | None = None) -> int:
    """Measures all, adds a row for each to the results, and returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        model, tokenizer = load(options.source, dtype=options.dtype)
        if tokenizer is None:
            raise InputError(
                f"MODEL must have a tokenizer, got {options.source!r} with none that is known. Pass the "
                "folder or repository that its tokenizer.json is in."
            )
        texts = _prompts(tokenizer, options)
        prepared = prepare(model)
        same = dict(model=pathlib.Path(options.source).name, attention=model.config.attention)
        same |= dict(device=jax.devices()[0].device_kind, versions=versions())
        with options.results.open("a", encoding="utf-8") as file:
            for kind, rows in itertools.product(KINDS, options.rows):
                for found in measure(prepared, texts[kind][:rows], options):
                    row = dict(text=kind, rows=rows, context=options.context) | found
                    print(row)
                    file.write(json.dumps(row | same) + "\n")
                    file.flush()  # what was measured stays if the rest is cut off
    except (InputError, OSError, TypeError, ValueError) as error:
        return complain(error, PROGRAM)
    return 0


def measure(model: Any, prompts: np.ndarray, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The figures of each number of drafts, 0 first, for prompts [B, P]: milliseconds for all new tokens."""
    want = None
    for number in sorted({0, *options.drafts}):
        drafts = LookUp(number, match=options.match) if number else None
        seconds = []
        for _ in range(1 + options.samples):
            session = start(model, prompts, max_length=prompts.shape[1] + options.new_tokens, drafts=drafts)
            jax.block_until_ready(session)
            started = time.perf_counter()
            _, new = jax.block_until_ready(advance(session, options.new_tokens))
            seconds.append(time.perf_counter() - started)
        ms, tokens = 1e3 * statistics.median(seconds[1:]), np.asarray(new.tokens)
        if want is None:
            want, without = tokens, ms
        agree = np.cumprod(tokens == want, axis=1).sum(axis=1)  # until sums of another order decide
        yield dict(
            drafts=number, new_tokens=options.new_tokens, steps=int(new.steps), ms=round(ms, 2),
            times_as_fast=round(without / ms, 3), same_tokens=agree.tolist(),
        )  # fmt: skip


def _prompts(tokenizer: Any, options: argparse.Namespace) -> dict[str, np.ndarray]:
    """Prompts of both kinds [B, P], a document each."""
    size, most, found = options.context, max(options.rows), []
    for text in itertools.chain.from_iterable(documents(path, "text") for path in options.text):
        if len(found) == most:
            break
        ids = tokenizer.encode(text[: 20 * size]).ids
        if len(ids) >= size:
            found.append(ids[:size])
    if len(found) < most:
        raise InputError(
            f"--text must hold enough documents, got {len(found)} of {most} with {size} tokens. Pass more "
            "text, or a smaller --context."
        )
    tokens = np.array(found, np.int32)
    again = tokens[:, : size // 8]
    return {"continues": tokens, "repeats": np.concatenate([tokens[:, : size - again.shape[1]], again], 1)}


def _parser() -> Parser:
    parser = Parser(prog=f"python -m {PROGRAM}", description=(__doc__ or "").split("\n\n")[0])
    add, path = parser.add_argument, pathlib.Path
    add("source", metavar="MODEL", help="a folder or repository of Hugging Face, or a GGUF file")
    told = "files of UTF-8, or .jsonl with a document in each line; no default"
    add("--text", type=path, nargs="+", required=True, metavar="FILE", help=told)
    told = "JSONL file that the rows are added to; no default"
    add("--results", type=path, required=True, metavar="FILE", help=told)
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: %(default)s")
    numbers = {
        "rows": (positive, [1, 8], "texts at the same time, one or more numbers"),
        "drafts": (count, [2, 4, 7], "drafts of a step, one or more numbers; none are always measured"),
        "match": (positive, 3, "newest tokens that must have come before"),
        "context": (positive, 7680, "tokens of a prompt"),
        "new-tokens": (positive, 256, "tokens to write"),
        "samples": (positive, 3, "times that each is timed"),
    }
    for name, (kind, default, told) in numbers.items():
        several = dict(nargs="+") if isinstance(default, list) else {}
        add(f"--{name}", type=kind, default=default, help=f"{told}; default: %(default)s", **several)
    return parser


if __name__ == "__main__":
    sys.exit(main())
