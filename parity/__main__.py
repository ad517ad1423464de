"""`python -m parity`: compares nsa_jax with the PyTorch reference, case by case.

Prints a row for each quantity with its error and its budget, then one line of JSON; progress goes to stderr.
Exit code 0: every error is within its budget; 1: one is not; 2: nothing could be compared, with the reason.
"""

import argparse
import importlib.util
import json
import math
import os
import pathlib
import platform
import sys
import time
from importlib import metadata
from typing import TYPE_CHECKING, Any

from benchmarks.command_line import InputError, Parser, check_writable, command, progress
from nsa_jax import dispatch

if TYPE_CHECKING:
    from parity.budget import Row

DTYPES = ("float32", "bfloat16", "float16")
IMPLEMENTATIONS = (*dispatch.IMPLEMENTATIONS, "reference")
# Rough time of a case in float32 on 2 CPU cores; all others take about as long as one another.
SECONDS = {
    "kernel_paper": 82,
    "kernel_paper_192_128": 23,
    "kernel_eight_heads": 21,
    "kernel_packed": 9,
    "decode_mean_chunked": 13,
    "decode_shared": 8,
}
OTHER_SECONDS = 4


@command("parity")
def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    options = parse(arguments)
    prepare(options.device)
    if options.list:
        print_cases()
        return 0
    rows, skipped = run(options)
    report = summary(options, rows, skipped)
    print(json.dumps(report))
    return 0 if report["passed"] else 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Options; what may be repeated is a list."""
    parser = Parser(prog="python -m parity", description=__doc__.split("\n\n")[1])
    parser.add_argument("--list", action="store_true", help="print what each case compares, and exit")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="of both frameworks; default: %(default)s"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, action="append", help="of the inputs; may be repeated; default: float32"
    )
    parser.add_argument(
        "--case", action="append", metavar="NAME", help="a case of --list; may be repeated; default: all"
    )
    parser.add_argument(
        "--implementation",
        choices=IMPLEMENTATIONS,
        help="of nsa_jax; triton needs a GPU, reference runs operations alone; default: what nsa_jax chooses",
    )
    parser.add_argument(
        "--output", type=pathlib.Path, help="JSONL file to append a row for each quantity to; default: none"
    )
    options = parser.parse_args(arguments)
    options.dtype = options.dtype or ["float32"]
    check_writable(options.output, "--output")
    return options


def prepare(device: str) -> None:
    """Looks for PyTorch and, if asked for, a GPU that both frameworks see."""
    if importlib.util.find_spec("torch") is None:
        raise InputError(
            "parity compares with PyTorch, got no module torch. Install it in the root of the clone: "
            'pip install ".[torch]".'
        )
    if device == "cpu":
        return
    # JAX would otherwise take most of the memory that PyTorch needs too; read when its backend starts.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax
    import torch

    try:
        seen = [each.device_kind for each in jax.local_devices(backend="gpu")]
    except RuntimeError:
        seen = []
    if not torch.cuda.is_available() or not seen:
        raise InputError(
            "--device cuda needs a GPU that PyTorch and JAX both see, got "
            f"torch.cuda.is_available() = {torch.cuda.is_available()} and JAX GPUs {seen}. "
            'Use --device cpu, or install both with CUDA: pip install ".[cuda13,torch]".'
        )


def run(options: argparse.Namespace) -> tuple[list["Row"], dict[str, str]]:
    """Compares and prints row by row. Returns the rows, and why each of the other cases was left out."""
    import torch

    from parity.cases import CASES
    from parity.compare import compare

    names = options.case or list(CASES)
    if unknown := [name for name in names if name not in CASES]:
        raise InputError(
            f"--case must name cases, got {', '.join(unknown)}. Choose from those that --list prints."
        )
    rows, skipped = [], {}
    count = len(names) * len(options.dtype)
    expected_s = len(options.dtype) * sum(expected_seconds(name) for name in names)
    progress(f"{count} cases, about {expected_s:.0f} s on 2 CPU cores, most of it compiling")
    started, done, done_s = time.perf_counter(), 0, 0
    print(f"{'case':34}{'dtype':10}{'quantity':40}{'error':>10}{'budget':>10}{'mean':>10}  verdict")
    for dtype in options.dtype:
        for name in names:
            elapsed_s = time.perf_counter() - started
            # The share of the expected time that is done says how fast this machine is.
            rate = elapsed_s / done_s if done_s else 1.0
            left_s = rate * (expected_s - done_s)
            done, done_s = done + 1, done_s + expected_seconds(name)
            times = f"{elapsed_s:.0f} s elapsed, about {left_s:.0f} s left"
            progress(f"case {done} of {count}: {name} {dtype} ({times})")
            try:
                found = compare(CASES[name], getattr(torch, dtype), options.device, options.implementation)
            except NotImplementedError as reason:
                skipped[f"{name} {dtype}"] = str(reason)
                print(f"{name:34}{dtype:10}skipped: {reason}")
                continue
            rows += found
            for row in found:
                verdict = ("ok" if row.passed else "MISS") + (f"  ({row.note})" if row.note else "")
                mean = "-" if row.mean is None else f"{row.mean:.2e}"
                errors = f"{row.error:10.2e}{row.budget:10.2e}{mean:>10}"
                print(f"{name:34}{dtype:10}{row.quantity:40}{errors}  {verdict}")
            append(options.output, found)
            sys.stdout.flush()  # a case takes seconds: let a pipe see it when it is done
    if not rows:
        reasons = "; ".join(sorted(set(skipped.values()))).rstrip(".")
        raise InputError(f"one case must run, got {reasons}. Choose other cases or another device.")
    return rows, skipped


def expected_seconds(name: str) -> int:
    """Rough time of a case, compiling included; for estimates alone."""
    return SECONDS.get(name, OTHER_SECONDS)


def print_cases() -> None:
    """One line a case: its name, its rough time and what it compares."""
    from parity.cases import CASES, described

    print(f"{'case':34}{'about':>7}  compares")
    for case in CASES.values():
        print(f"{case.name:34}{expected_seconds(case.name):5.0f} s  {described(case)}")


def spelled(row: "Row") -> dict[str, Any]:
    """A row in JSON, which has no word for what is not finite. A mean that may be anything has no budget."""
    numbers = dict(error=row.error, budget=row.budget, used=row.used, mean=row.mean)
    if math.isfinite(row.mean_budget):
        numbers["mean_budget"] = row.mean_budget
    told = {name: x if x is None else rounded(x) for name, x in numbers.items()}
    return dict(case=row.case, dtype=row.dtype, quantity=row.quantity, **told, note=row.note)


def rounded(number: float) -> float | str:
    """Four digits, or the name of what is not finite."""
    return float(f"{number:.4g}") if math.isfinite(number) else str(number)


def append(path: pathlib.Path | None, rows: list["Row"]) -> None:
    """Adds the rows of a case to a JSONL file, so that a run that is cut off keeps what it compared."""
    if path is not None:
        lines = (json.dumps(spelled(row) | {"passed": row.passed}) for row in rows)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)


def summary(options: argparse.Namespace, rows: list["Row"], skipped: dict[str, str]) -> dict[str, Any]:
    """What the last line says: the verdict, every miss, and how much of the budget each case used."""
    import jax
    import torch

    worst: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = (row.case, row.dtype)
        # A NaN error is the worst there is, and no comparison would say so.
        if key not in worst or math.isnan(row.used) or row.used > worst[key].used:
            worst[key] = row
    missed = [spelled(row) for row in rows if not row.passed]
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else None
    return {
        "parity": "nsa_jax against nsa_torch_ref",
        "passed": not missed,
        "quantities": len(rows),
        "missed": missed,
        "skipped": skipped,
        "worst": [spelled(row) for row in worst.values()],
        "device": gpu or f"cpu ({platform.machine()})",
        "implementation": options.implementation,
        "dtypes": options.dtype,
        "jax": jax.__version__,
        "flax": metadata.version("flax"),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


if __name__ == "__main__":
    sys.exit(main())
