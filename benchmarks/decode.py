"""What does one decoded token cost as the sequence grows, in NSA and in dense attention?

`python -m benchmarks.decode` measures the attention step alone (no projections), or with `--layer` a whole
layer: append the new tokens to a cache of `S` tokens with room for 64 steps, compress where a block became
complete, attend. The steps run in one compiled loop, whose body is several layers, each with a cache of its
own; rows of their own have single steps that the host starts one by one. Dense attention runs in the same
loop, and a ratio counts the faster one of ours and `jax.nn.dot_product_attention`. `--csv` adds each branch's
own time and the reads; `benchmarks.decode_summary` draws that.
"""

import argparse
import csv
import dataclasses
import functools
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import gate, programs, records, roofline, timing
from benchmarks.command_line import (
    Parser,
    add_dtype,
    add_sampling,
    check_heads,
    check_writable,
    command,
    positive,
    progress,
)
from benchmarks.decode_gate import check
from benchmarks.decode_inputs import NUM_STEPS, Setting
from benchmarks.decode_loops import Decoding
from benchmarks.decode_steps import BRANCHES, Program, branch, count_reads, dense, dense_layer, layer, nsa
from benchmarks.inputs import Draw, Shape, abstract_arguments
from benchmarks.timing import Compiled, Timing
from nsa_jax import cache, dispatch
from nsa_jax.config import NSAConfig

CSV_HEADER = (
    *("S", "ms_total", "ms_cmp", "ms_sel", "ms_win"),
    *("reads_actual", "reads_expected", "reads_actual_decode", "reads_expected_decode"),
)
MODES = ("decode_loop", "decode")
# Names of the programs of a length: the whole step or layer, branches, dense attention by implementation.
TOTAL = "total"

type Measured = dict[str, tuple[Timing, Compiled]]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line; the defaults are rows of a CPU."""
    parser = Parser(prog="python -m benchmarks.decode", description=__doc__)
    lengths = [1 << power for power in range(10, 16)]
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=positive,
        default=lengths,
        metavar="S",
        help="tokens in the cache before the first step; default: powers of 2 from 1024 to 32768",
    )
    parser.add_argument(
        "--implementation",
        choices=records.IMPLEMENTATIONS[:2],
        default="xla",
        help="triton needs a GPU; default: %(default)s",
    )
    parser.add_argument(
        "--branch",
        choices=("all", *BRANCHES),
        default="all",
        help="measure one branch alone; default: the whole step",
    )
    parser.add_argument(
        "--layer",
        type=positive,
        metavar="WIDTH",
        help="measure whole layers with an input of this width; default: attention alone",
    )
    parser.add_argument(
        "--compression",
        choices=("mean", "mlp"),
        help="compression of blocks; mlp also rotates compressed keys; default: mean, mlp with --layer",
    )
    add_dtype(parser, "float32", "of all inputs and caches")
    parser.add_argument("--batch", type=positive, default=1, help="sequences; default: %(default)s")
    parser.add_argument(
        "--new-tokens", type=positive, default=1, metavar="T", help="tokens of a step; default: %(default)s"
    )
    parser.add_argument("--heads", type=positive, default=16, help="query heads; default: %(default)s")
    parser.add_argument(
        "--kv-heads", type=positive, default=4, help="KV heads; must divide --heads; default: %(default)s"
    )
    parser.add_argument(
        "--head-dim", type=positive, default=64, help="dimension of keys and values; default: %(default)s"
    )
    parser.add_argument("--key-dim", type=positive, help="dimension of keys; default: --head-dim")
    parser.add_argument(
        "--value-dim", type=positive, help="dimension of values, at most --key-dim; default: --head-dim"
    )
    parser.add_argument(
        "--num-layers",
        type=positive,
        help="layers in the body of the loop; default: 4; on a GPU 8 for batch 1, 2 from batch 32 on",
    )
    add_sampling(parser)
    parser.add_argument(
        "--csv", type=pathlib.Path, help="CSV file for branch times and reads, replaced; default: none"
    )
    options = parser.parse_args(argv)
    options.key_dim = options.key_dim or options.head_dim
    options.value_dim = options.value_dim or options.head_dim
    if options.value_dim > options.key_dim:
        parser.error(
            "--value-dim must not exceed --key-dim, because an output is the next layer's query, got "
            f"{options.value_dim} > {options.key_dim}. Choose others."
        )
    if options.layer and (options.branch != "all" or options.compression == "mean"):
        parser.error(
            "a whole layer has all branches and MLP compressors, got --layer beside --branch or "
            "--compression mean. Leave one out."
        )
    check_heads(options.heads, options.kv_heads)
    check_writable(options.output, "--output")
    check_writable(options.csv, "--csv")
    options.compression = options.compression or ("mlp" if options.layer else "mean")
    options.num_layers = options.num_layers or default_layers(options.batch)
    return options


def default_layers(batch: int) -> int:
    """Layers in a loop's body: together their caches are larger than a GPU's L2, so nothing stays there."""
    if jax.default_backend() == "cpu":  # has none that large, and compiles for long
        return 4
    return 8 if batch == 1 else 4 if batch < 32 else 2


def settings_of(options: argparse.Namespace, config: NSAConfig) -> list[Setting]:
    """One for each length."""
    dims = {"key_dim": options.key_dim, "value_dim": options.value_dim, "model_dim": options.layer}
    heads = {"batch": options.batch, "query_heads": options.heads, "kv_heads": options.kv_heads}
    return [
        Setting(
            shape=Shape(length=length, dtype=options.dtype, **heads, **dims),
            config=config,
            implementation=options.implementation,
            new_tokens=options.new_tokens,
            compression=options.compression,
        )
        for length in options.lengths
    ]


def programs_of(setting: Setting, options: argparse.Namespace) -> dict[str, Program]:
    """What is measured at one length."""
    found = {}
    if options.branch == "all":
        found[TOTAL] = layer(setting) if options.layer else nsa(setting)
    alone = [options.branch] if options.branch != "all" else BRANCHES if options.csv else []
    found |= {name: branch(setting, name) for name in alone}
    make = dense_layer if options.layer else dense
    return found | {f"dense {name}": make(setting, name) for name in (setting.implementation, "jax_nn")}


def refusal(program: Program, setting: Setting) -> str | None:
    """Why a program cannot run here, None if it can."""
    shape, config, runs_as = setting.shape, setting.config, program.implementation
    if program.operation in BRANCHES.values():
        return programs.refusal(program.operation, runs_as, "fwd", shape, config)
    step = "decode_step"
    if program.operation in records.DENSE.values():
        one_dim = runs_as == "jax_nn" or program.operation == "dense_layer"
        reason = programs.refusal("dense_attention", "xla", "fwd", shape, config) if one_dim else None
        if reason or runs_as == "jax_nn":
            return reason
        step = "dense_decode_step"
    query, *_ = abstract_arguments("window_attention", setting.new, config)
    part = "compressed_attention" if step == "decode_step" else "window_attention"
    _, *held = abstract_arguments(part, shape, config)
    return dispatch.unsupported_reason(step, runs_as, query, *held, config=config)


def measure(
    found: Mapping[str, Program], setting: Setting, mode: str, num_layers: int, budget_s: float
) -> Measured:
    """Times all programs of a length in turns; per step and layer."""
    if mode == "decode":  # a call is one step of one layer
        decodings = {name: Decoding(program, setting, 1, 1) for name, program in found.items()}
        samples: dict[str, Any] = {"min_samples": NUM_STEPS, "max_samples": 8 * NUM_STEPS}
        # Few rounds: most samples then follow a step of their own kind, and find its cache warm.
        samples["max_rounds"] = 4
    else:
        decodings = {name: Decoding(program, setting, num_layers) for name, program in found.items()}
        samples = {"sample_s": timing.GPU_SAMPLE_S if jax.default_backend() == "gpu" else 0.0}
    runs = {name: functools.partial(_run, decoding, mode) for name, decoding in decodings.items()}
    times = timing.measure(runs, budget_s=budget_s, **samples)
    steps = 1 if mode == "decode" else NUM_STEPS * num_layers
    for name, decoding in decodings.items():
        if not jnp.isfinite(decoding.x).all():
            raise FloatingPointError(
                f"outputs must be finite, got {name} with others. Check what it computes."
            )
    return {name: (times[name].divided_by(steps), decodings[name].compiled) for name in found}


def _run(decoding: Decoding, mode: str) -> Any:
    return jax.block_until_ready(decoding.run()) if mode == "decode" else decoding.run()


def rows_of(
    measured: Measured, found: Mapping[str, Program], setting: Setting, mode: str, num_layers: int,
    reads: Mapping[str, np.ndarray], environment: records.Environment, ceiling: roofline.Ceiling,
) -> Iterator[records.Row]:  # fmt: skip
    """The rows of one length and mode, each with its ratio to the fastest dense attention."""
    shape, config = setting.shape, setting.config
    fastest = min((time.median_ms for name, (time, _) in measured.items() if "dense" in name), default=None)
    for name, (time, compiled) in measured.items():
        program = found[name]
        cost = roofline.decode_cost(program.operation, reads, shape, config)
        row = records.make_row(
            environment, shape, config, time, compiled, benchmark="decode", operation=program.operation,
            implementation=program.implementation, mode=mode, draw=Draw("random", program.x),
            floor_ms=ceiling.floor_ms(cost),
        )  # fmt: skip
        bytes_per_s = 1e3 * cost.bytes / time.median_ms
        yield dataclasses.replace(
            row,
            new_tokens=setting.new_tokens,
            compression=setting.compression if name == TOTAL else None,
            num_layers=1 if mode == "decode" else num_layers,
            bytes=cost.bytes,
            gb_per_s=bytes_per_s / 1e9,
            copy_share=bytes_per_s / ceiling.bytes_per_s,
            dense_over_this=None if fastest is None else fastest / time.median_ms,
        )


def csv_row(measured: Measured, reads: Mapping[str, np.ndarray], setting: Setting) -> list[Any]:
    """A line below `CSV_HEADER`: reads of the last query, then of all. Unmeasured times are empty."""
    lengths = range(setting.shape.length + 1, setting.max_length + 1)
    expected = [cache.expected_reads(length, setting.config) for length in lengths]
    actual = np.sum([reads[operation].reshape(-1) for operation in BRANCHES.values()], axis=0).tolist()
    medians = [round(measured[x][0].median_ms, 6) if x in measured else "" for x in (TOTAL, *BRANCHES)]
    return [setting.shape.length, *medians, actual[-1], expected[-1], sum(actual), sum(expected)]


@command("benchmarks.decode")
def main(argv: Sequence[str] | None = None, config: NSAConfig | None = None) -> int:
    """Runs the benchmark; `config` other than the paper's is for tests."""
    options = parse(argv)
    config, num_layers = config or NSAConfig(), options.num_layers
    environment = records.environment()
    environment.print()
    ceiling = roofline.measure_ceiling(options.dtype)
    print(f"ceiling in {options.dtype}: {ceiling}\nconfig {config}", flush=True)
    settings = settings_of(options, config)

    run: list[str] = []
    red: list[str] = []
    checks, titles = {}, {}
    for name, program in programs_of(settings[0], options).items():
        titles[name] = f"{program.operation} {program.implementation} decode"
        if reason := refusal(program, settings[0]):
            print(f"refused: {titles[name]}: {reason}", flush=True)
        else:
            checks[name] = functools.partial(check, program.operation, program.implementation, settings[0])
    for name, verdict in gate.verdicts(checks):
        print(f"gate {titles[name]}: {verdict}", flush=True)
        (run if verdict.green else red).append(name if verdict.green else titles[name])
    summary: dict[str, Any] = {"run_id": environment.run_id, "rows": 0, "red": red}
    if red or all("dense" in name for name in run):
        print(json.dumps(summary))
        return 1

    rows: list[records.Row] = []
    table = []
    for setting in settings:
        reads = count_reads(setting)
        for mode in MODES if TOTAL in run else MODES[:1]:  # branches are timed in loops alone
            left_out = BRANCHES if mode == "decode" else {}
            found = {name: x for name, x in programs_of(setting, options).items() if name in run}
            found = {name: program for name, program in found.items() if name not in left_out}
            progress(f"compiling and measuring {len(found)} programs: {mode} at S={setting.shape.length}")
            measured = measure(found, setting, mode, num_layers, options.budget_s)
            given = (measured, found, setting, mode, num_layers, reads, environment, ceiling)
            for row in rows_of(*given):
                print(row, flush=True)
                records.append(options.output, [row])
                rows.append(row)
            if mode == "decode_loop":
                table.append(csv_row(measured, reads, setting))
    if options.csv:
        options.csv.parent.mkdir(parents=True, exist_ok=True)
        with options.csv.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([CSV_HEADER, *table])

    asked = BRANCHES.get(options.branch, "layer" if options.layer else "native_sparse_attention")
    ours = [row for row in rows if row.operation == asked and row.mode == "decode_loop"]
    ratios = {row.length: row.dense_over_this and round(row.dense_over_this, 3) for row in ours}
    growth = round(ours[-1].median_ms / ours[0].median_ms, 3)
    print(f"dense / {asked} by S: {ratios}; at the last S it takes {growth} times that at the first")
    figures = {"rows": len(rows), "operation": asked, "dense_over_this": ratios, "last_over_first": growth}
    print(json.dumps(summary | figures))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
