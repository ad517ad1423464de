"""The command: times the programs of `steps.py`, once `gate.py` has judged them."""

import argparse
import csv
import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import decode, programs, records, roofline, timing
from benchmarks.command_line import check_writable, command, measuring_parser, parse_sizes, progress
from benchmarks.decode import indexed as of_index
from benchmarks.decode.gate import check
from benchmarks.decode.inputs import NUM_STEPS, Setting
from benchmarks.decode.loops import Decoding
from benchmarks.decode.steps import BRANCHES, Program, branch, count_reads, dense, dense_layer, layer, nsa
from benchmarks.decode.summary import CSV_HEADER
from benchmarks.gate import verdicts
from benchmarks.indexer import MSA, WHOLE
from benchmarks.inputs import Draw, abstract_arguments, shape_of
from benchmarks.timing import Compiled, Timing
from nsa_jax import cache, dispatch
from nsa_jax.config import NSAConfig
from nsa_jax.layout.quantised import LARGEST

# Names of the programs of a length: the whole step or layer, branches, dense attention by implementation.
TOTAL = "total"
SELECTORS = ("importance", "indexer")

type Measured = dict[str, tuple[Timing, Compiled]]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line; the defaults are rows of a CPU."""
    parser = measuring_parser(
        "benchmarks.decode",
        decode.__doc__ or "",
        lengths=[1 << power for power in range(10, 16)],
        dtype=("float32", "of all inputs and caches"),
        choices={
            "implementation": (("xla", "triton"), "xla", "triton needs a GPU"),
            "branch": (("all", *BRANCHES), "all", "measure one branch alone, or the whole step"),
            "selector": (
                SELECTORS,
                SELECTORS[0],
                "what chooses blocks; with indexer a step has the selected branch alone, in sizes of MSA",
            ),
        },
        sizes={"batch": 1, "heads": 16, "kv-heads": 4, "head-dim": 64},
        own_sizes={
            "layer": (None, "measure whole layers with an input of this width; default: attention alone"),
            "num-layers": (
                None,
                "layers in the loop's body; default: 4; on a GPU 8 to 2, for larger batches",
            ),
            "new-tokens": (1, "tokens of a step"),
            "key-dim": (None, "dimension of keys; default: --head-dim"),
            "value-dim": (None, "dimension of values, at most --key-dim; default: --head-dim"),
        },
    )
    parser.add_argument(
        "--compression",
        choices=("mean", "mlp"),
        help="compression of blocks; mlp also rotates compressed keys; default: mean, mlp with --layer",
    )
    parser.add_argument(
        "--cache-dtype",
        choices=tuple(LARGEST),
        help="quantised keys and values in the cache of NSA; default: --dtype, which dense attention keeps",
    )
    parser.add_argument(
        "--csv", type=pathlib.Path, help="CSV file for branch times and reads, replaced; default: none"
    )
    options = parse_sizes(parser, argv)
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
    alone = options.branch != "all" or options.layer or options.csv
    if options.cache_dtype and alone:
        parser.error(
            "--cache-dtype is of a whole step, got it beside --branch, --layer or --csv. Leave one out."
        )
    if options.selector == "indexer" and (alone or options.cache_dtype or options.compression):
        parser.error(
            "an indexer is timed in a step with nothing but the selected branch, got --selector indexer "
            "beside --branch, --layer, --csv, --cache-dtype or --compression. Leave one out."
        )
    check_writable(options.csv, "--csv")
    options.compression = options.compression or ("mlp" if options.layer else "mean")
    options.num_layers = options.num_layers or default_layers(options.batch)
    return options


def default_layers(batch: int) -> int:
    """Layers in a loop's body: together their caches are larger than a GPU's L2, so nothing stays there."""
    if jax.default_backend() == "cpu":  # has none that large, and compiles for long
        return 4
    return 8 if batch == 1 else 4 if batch < 32 else 2


def programs_of(setting: Setting, options: argparse.Namespace) -> dict[str, Program]:
    """What is measured at one length."""
    alone = [options.branch] if options.branch != "all" else BRANCHES if options.csv else []
    whole = layer if options.layer else of_index.indexed if options.selector == "indexer" else nsa
    found = {TOTAL: whole(setting)} if options.branch == "all" else {}
    found |= {name: branch(setting, name) for name in alone}
    make = dense_layer if options.layer else dense
    return found | {f"dense {name}": make(setting, name) for name in (setting.implementation, "jax_nn")}


def refusal(program: Program, setting: Setting) -> str | None:
    """Why a program cannot run here, None if it can."""
    shape, runs_as = setting.shape, program.implementation
    if program.operation in BRANCHES.values():
        return programs.refusal(program.operation, runs_as, "fwd", shape)
    if program.operation == WHOLE:
        return of_index.refusal(setting)
    is_dense = program.operation in records.DENSE.values()
    if runs_as == "jax_nn" or program.operation == "dense_layer":
        reason = programs.refusal("dense_attention", "xla", "fwd", shape)
        if reason or runs_as == "jax_nn":
            return reason
    query, *_ = abstract_arguments("window_attention", setting.new)
    _, *held = abstract_arguments("window_attention" if is_dense else "compressed_attention", shape)
    if setting.cache_dtype and not is_dense:
        held = [jax.ShapeDtypeStruct(x.shape, jnp.dtype(setting.cache_dtype)) for x in held]
    step = "dense_decode_step" if is_dense else "decode_step"
    return dispatch.unsupported_reason(step, runs_as, query, *held, config=shape.config)


def measure(
    found: Mapping[str, Program], setting: Setting, mode: str, num_layers: int, budget_s: float
) -> Measured:
    """Times all programs of a length in turns; per step and layer."""
    single = mode == "decode"  # a call is one step of one layer
    num_steps = 1 if single else NUM_STEPS
    decodings = {name: Decoding(program, setting, num_layers, num_steps) for name, program in found.items()}
    samples: dict[str, Any] = {"sample_s": timing.least_sample_s()}
    if single:  # in few rounds: most samples then follow a step of their own kind, and find its cache warm
        samples = {"min_samples": NUM_STEPS, "max_samples": 8 * NUM_STEPS, "max_rounds": 4}
    runs = {name: decoding.run for name, decoding in decodings.items()}
    times = timing.measure(runs, budget_s=budget_s, **samples)
    for name, decoding in decodings.items():
        if not jnp.isfinite(decoding.x).all():
            raise FloatingPointError(
                f"outputs must be finite, got {name} with others. Check what it computes."
            )
    parts = num_layers * num_steps
    return {name: (times[name].divided_by(parts), decodings[name].compiled) for name in found}


def csv_row(measured: Measured, reads: Mapping[str, np.ndarray], setting: Setting) -> list[Any]:
    """A line below `CSV_HEADER`: reads of the last query, then of all. Unmeasured times are empty."""
    lengths = range(setting.shape.length + 1, setting.max_length + 1)
    expected = [cache.expected_reads(length, setting.shape.config) for length in lengths]
    actual = np.sum([reads[operation].reshape(-1) for operation in BRANCHES.values()], axis=0).tolist()
    medians = [round(measured[x][0].median_ms, 6) if x in measured else "" for x in (TOTAL, *BRANCHES)]
    return [setting.shape.length, *medians, actual[-1], expected[-1], sum(actual), sum(expected)]


class Run(roofline.Run):
    """One run of the benchmark, with the programs that passed the gate."""

    def __init__(self, options: argparse.Namespace, config: NSAConfig):
        super().__init__(options, config)
        self.passed: list[str] = []
        more = options.implementation, options.new_tokens, options.compression, options.cache_dtype
        shapes = (shape_of(options, length, config, options.layer) for length in options.lengths)
        self.settings = [Setting(shape, *more) for shape in shapes]

    def judge(self) -> None:
        """Notes which programs are green, and which are red."""
        setting, checks, titles = self.settings[0], {}, {}
        for name, program in programs_of(setting, self.options).items():
            titles[name] = f"{program.operation} {program.implementation} decode"
            if reason := refusal(program, setting):
                print(f"refused: {titles[name]}: {reason}", flush=True)
            else:
                checks[name] = functools.partial(check, program.operation, program.implementation, setting)
        for name, verdict in verdicts(checks):
            print(f"gate {titles[name]}: {verdict}", flush=True)
            if verdict.green:
                self.passed.append(name)
            else:
                self.red.append(titles[name])

    def measure(self, setting: Setting) -> list[Any]:
        """Measures the rows of one length; returns its line of the CSV."""
        reads, line = count_reads(setting), list[Any]()
        # Branches are timed in loops alone.
        for mode in ("decode_loop", "decode") if TOTAL in self.passed else ("decode_loop",):
            names = [name for name in self.passed if mode == "decode_loop" or name not in BRANCHES]
            found = {x: program for x, program in programs_of(setting, self.options).items() if x in names}
            progress(f"compiling and measuring {len(found)} programs: {mode} at S={setting.shape.length}")
            num_layers = 1 if mode == "decode" else self.options.num_layers
            measured = measure(found, setting, mode, num_layers, self.options.budget_s)
            dense_ms = [time.median_ms for name, (time, _) in measured.items() if "dense" in name]
            for name, (time, compiled) in measured.items():
                kept = setting.cache_dtype if name == TOTAL else None
                by_index = found[name].operation == WHOLE
                if by_index:
                    cost = of_index.cost(reads, setting.shape)
                else:
                    cost = roofline.decode_cost(found[name].operation, reads, setting.shape, kept)
                bytes_per_s = 1e3 * cost.bytes / time.median_ms
                self.add(
                    benchmark="decode", operation=found[name].operation, mode=mode,
                    implementation=found[name].implementation, **dataclasses.asdict(setting.shape),
                    **Draw("random", found[name].x).fields, **time.fields, **compiled.fields,
                    floor_ms=self.ceiling.floor_ms(cost), new_tokens=setting.new_tokens, bytes=cost.bytes,
                    compression=setting.compression if name == TOTAL and not by_index else None,
                    num_layers=num_layers,
                    **(dict(bound_ms=of_index.bound_ms(cost, self.ceiling)) if by_index else {}),
                    **({} if kept is None else dict(cache_dtype=kept)),
                    gb_per_s=bytes_per_s / 1e9, copy_share=bytes_per_s / self.ceiling.bytes_per_s,
                    dense_over_this=min(dense_ms) / time.median_ms if dense_ms else None,
                )  # fmt: skip
            line = line or csv_row(measured, reads, setting)
        return line


@command("benchmarks.decode")
def main(argv: Sequence[str] | None = None, config: NSAConfig | None = None) -> int:
    """Runs the benchmark; `config` other than the paper's is for tests."""
    options = parse(argv)
    run = Run(options, config or (MSA if options.selector == "indexer" else NSAConfig()))
    run.judge()
    if run.red or all("dense" in name for name in run.passed):
        run.finish()
        return 1
    table = [run.measure(setting) for setting in run.settings]
    if options.csv:
        with options.csv.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([CSV_HEADER, *table])
    whole = WHOLE if options.selector == "indexer" else "native_sparse_attention"
    asked = BRANCHES.get(options.branch, "layer" if options.layer else whole)
    ours = [row for row in run.rows if row.operation == asked and row.mode == "decode_loop"]
    ratios = {row.length: row.dense_over_this and round(row.dense_over_this, 3) for row in ours}
    growth = round(ours[-1].median_ms / ours[0].median_ms, 3)
    print(f"dense / {asked} by S: {ratios}; at the last S it takes {growth} times that at the first")
    return run.finish(operation=asked, dense_over_this=ratios, last_over_first=growth)


if __name__ == "__main__":
    raise SystemExit(main())
