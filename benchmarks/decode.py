"""What does one decoded token cost as the sequence grows, in NSA and in dense attention?

`python -m benchmarks.decode` measures the attention step alone (no projections): append one token to a cache
that holds `S` tokens and has room for 64 more, compress by the mean where a block became complete, attend.
Caches are donated, so that a step writes in place as it does inside a compiled loop; dense attention is
`jax.nn.dot_product_attention` over the same capacity. `--csv` adds each branch's own time and the reads.
"""

import argparse
import csv
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import records, roofline, timing
from benchmarks.decode_steps import (
    NEW_TOKENS,
    Decoding,
    branches,
    check,
    count_reads,
    dense_decoding,
    nsa_decoding,
)
from benchmarks.inputs import Draw, Shape
from nsa_jax import cache, dispatch
from nsa_jax.config import NSAConfig

CSV_HEADER = (
    *("S", "ms_total", "ms_cmp", "ms_sel", "ms_win"),
    *("reads_actual", "reads_expected", "reads_actual_decode", "reads_expected_decode"),
)


def csv_row(
    shape: Shape, times: dict[str, timing.Timing], config: NSAConfig, implementation: str
) -> list[float]:
    """A line under `CSV_HEADER`: reads of the last step, then of all steps together."""
    expected = [cache.expected_reads(shape.length + step, config) for step in range(1, NEW_TOKENS + 1)]
    actual = [sum(step) for step in count_reads(shape, config, implementation)]
    medians = [times[f"{name} {shape.length}"].median_ms for name in ("nsa", "cmp", "sel", "win")]
    reads = (actual[-1], expected[-1], sum(actual), sum(expected))
    return [shape.length, *(round(median, 4) for median in medians), *reads]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line; the defaults are the decode rows of the README."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__)
    lengths = [1 << power for power in range(10, 16)]
    parser.add_argument("--lengths", nargs="+", type=int, default=lengths, metavar="S")
    parser.add_argument("--implementation", choices=dispatch.IMPLEMENTATIONS, default="xla")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=16, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64, help="key and value dim")
    parser.add_argument("--budget-s", type=float, default=5.0, help="seconds a row, 64 samples at least")
    parser.add_argument("--output", type=pathlib.Path, help="JSONL file that the rows are added to")
    parser.add_argument("--csv", type=pathlib.Path, help="CSV file for branch times and reads")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, config: NSAConfig | None = None) -> int:
    """Runs the benchmark; `config` other than the paper's is for tests."""
    options = parse(argv)
    config, implementation = config or NSAConfig(), options.implementation
    environment = records.environment()
    environment.print()
    ceiling = roofline.measure_ceiling(options.dtype)
    print(f"ceiling in {options.dtype}: {ceiling}\nconfig {config}", flush=True)
    dims = {"key_dim": options.head_dim, "value_dim": options.head_dim, "dtype": options.dtype}
    heads = {"batch": options.batch, "query_heads": options.heads, "kv_heads": options.kv_heads}
    shapes = [Shape(length=length, **heads, **dims) for length in options.lengths]

    refused = dispatch.unsupported_reason("native_sparse_attention", implementation, config=config)
    verdict = None if refused else check(shapes[0], config, implementation)
    print(f"gate decode {implementation}: {refused or verdict}", flush=True)
    if verdict is None or not verdict.green:
        print(json.dumps({"run_id": environment.run_id, "rows": 0, "red": [f"decode {implementation}"]}))
        return 1

    steps: dict[str, Decoding] = {}
    runs: dict[str, Callable[[], Any]] = {}
    for shape in shapes:
        steps[f"nsa {shape.length}"] = nsa_decoding(shape, config, implementation)
        steps[f"dense {shape.length}"] = dense_decoding(shape, config)
        if options.csv:
            alone = branches(shape, config, implementation)
            runs |= {f"{name} {shape.length}": run for name, run in alone.items()}
    runs |= {name: step.run for name, step in steps.items()}
    samples = {"min_samples": NEW_TOKENS, "max_samples": 8 * NEW_TOKENS}
    # Few rounds: most samples then follow a step of their own kind, as in decoding, and find its cache warm.
    times = timing.measure(runs, budget_s=options.budget_s, max_rounds=4, **samples)

    rows = []
    for shape in shapes:
        for name, operation, runs_as in (
            ("nsa", "native_sparse_attention", implementation),
            ("dense", "dense_attention", "xla"),
        ):
            step = steps[f"{name} {shape.length}"]
            row = records.make_row(
                environment,
                shape,
                config,
                times[f"{name} {shape.length}"],
                step.compiled,
                benchmark="decode",
                operation=operation,
                implementation=runs_as,
                mode="decode",
                draw=Draw("random", step.operands[0]),
                floor_ms=ceiling.floor_ms(roofline.decode_cost(operation, shape, config)),
            )
            rows.append(row)
            print(row, flush=True)
    records.append(options.output, rows)
    if options.csv:
        table = [csv_row(shape, times, config, implementation) for shape in shapes]
        with options.csv.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([CSV_HEADER, *table])
    pairs = records.beside_dense(rows)
    ratios = {row.length: round(records.ratio(row, dense)[0], 3) for row, dense in pairs}
    growth = round(pairs[-1][0].median_ms / pairs[0][0].median_ms, 3)
    print(f"dense / NSA by S: {ratios}; NSA at the last S takes {growth} times that at the first")
    summary = {"run_id": environment.run_id, "rows": len(rows), "red": []}
    print(json.dumps(summary | {"dense_over_nsa": ratios, "last_over_first": growth}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
