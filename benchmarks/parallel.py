"""How much faster is attention on several devices, and what memory does each of them need?

`python -m benchmarks.parallel` measures the whole operation, with the compression of its keys and values, on
one device and spread over several (`strategies.py`). On a machine without GPUs, `--devices` of the CPU come
from `XLA_FLAGS=--xla_force_host_platform_device_count=2`. `docs/benchmarks.md` explains the method.
"""

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from benchmarks import devices, records, strategies, timing
from benchmarks.command_line import (
    Parser,
    add_dtype,
    add_sampling,
    add_sizes,
    check_heads,
    check_writable,
    command,
    positive,
    progress,
)
from benchmarks.inputs import DISTRIBUTIONS, Draw, NotCoherent, Shape
from benchmarks.strategies import STRATEGIES, Strategy
from nsa_jax import dispatch
from nsa_jax.config import NSAConfig

MODES = ("fwd", "fwd_bwd")


class Run:
    """One run of the benchmark: its options, the verdicts, and the rows so far."""

    def __init__(self, options: argparse.Namespace, config: NSAConfig):
        self.options, self.config = options, config
        self.environment = records.environment()
        self.environment.print()
        print(f"{options.devices} devices, config {config}", flush=True)
        self.rows: list[records.ParallelRow] = []
        self.red: list[str] = []
        self.green: set[tuple[str, Shape]] = set()
        self.programs: dict[tuple[str, str, Shape], timing.Compiled] = {}

    def measure(self, length: int, distribution: str) -> None:
        """Measures all strategies at one length; those of one mode take turns."""
        options = self.options
        shape = Shape(
            batch=options.batch, length=length, query_heads=options.heads, kv_heads=options.kv_heads,
            key_dim=options.key_dim, value_dim=options.value_dim, dtype=options.dtype,
        )  # fmt: skip
        ways = [self._strategy(name) for name in options.strategies]
        if not (ways := [way for way in ways if self._is_possible(way, shape)]):
            return
        try:
            draw, arrays = strategies.draw(distribution, options.implementation, shape, self.config)
        except NotCoherent as reason:
            print(f"refused: {distribution} T={length}: {reason}")
            return
        there = {way: way.put(arrays) for way in ways}
        for mode in options.modes:
            self._measure_mode(mode, there, draw, shape)

    def _measure_mode(self, mode: str, there: Mapping[Strategy, Any], draw: Draw, shape: Shape) -> None:
        """Measures one mode of strategies whose arrays are there. They take turns."""
        options, setting = self.options, f"{mode} {draw.distribution} T={shape.length}"
        programs = {}
        for strategy, arrays in there.items():
            progress(f"compiling {strategy.name} {strategy.mesh_name} {setting}")
            program = self._program(strategy, mode, arrays, shape)
            if program.all_bytes > (memory := records.memory_bytes()):
                needed, there_is = f"{program.all_bytes / 1e9:.1f} GB", f"{memory / 1e9:.1f} GB"
                print(f"refused: {strategy.name} {strategy.mesh_name} {setting}: {needed} of {there_is}")
            else:
                programs[strategy] = program
        if not programs:
            return
        progress(f"measuring {len(programs)} programs of {setting}")
        sample_s = timing.GPU_SAMPLE_S if jax.default_backend() == "gpu" else 0.0
        runs = {strategy: program.start for strategy, program in programs.items()}
        timings = timing.measure(runs, budget_s=options.budget_s, sample_s=sample_s)
        rows = [
            self._row(strategy, mode, draw, shape, program, timings[strategy])
            for strategy, program in programs.items()
        ]
        records.append(options.output, rows)
        self.rows += rows
        for row in rows:
            print(row, flush=True)

    def _program(self, way: Strategy, mode: str, arrays: Any, shape: Shape) -> timing.Compiled:
        """The program, compiled once for all distributions."""
        key = way.name, mode, shape
        if key not in self.programs:
            program = way.compiled(mode, arrays, self.options.implementation, self.config)
            self.programs[key] = dataclasses.replace(program, arguments=())
        return dataclasses.replace(self.programs[key], arguments=way.operands(mode, arrays))

    def finish(self) -> int:
        """Prints, as the last line, a summary in JSON. Returns the exit status."""

        def setting(row: records.ParallelRow) -> dict[str, Any]:
            return dict(mode=row.mode, distribution=row.distribution, length=row.length)

        one = {tuple(setting(row).values()): row for row in self.rows if row.strategy == "one"}
        faster = []
        for row in self.rows:
            alone = one.get(tuple(setting(row).values()))
            if row.strategy != "one" and alone is not None:
                times = round(alone.median_ms / row.median_ms, 3)
                faster.append(dict(strategy=row.strategy, mesh=row.mesh, **setting(row), times=times))
        summary = {"run_id": self.environment.run_id, "rows": len(self.rows), "red": self.red}
        print(json.dumps(summary | {"faster_than_one_device": faster}))
        return 1 if self.red else 0

    def _strategy(self, name: str) -> Strategy:
        return Strategy(name, 1 if name == "one" else self.options.devices)

    def _is_possible(self, strategy: Strategy, shape: Shape) -> bool:
        """Whether the shape can be spread, and the gate is green; says so if not."""
        if reason := strategy.refusal(shape, self.config):
            print(f"refused: {strategy.name} T={shape.length}: {reason}")
            return False
        name = strategy.name
        if name not in self.red and (name, shape) not in self.green:
            progress(f"gate {name} T={shape.length}: compiling and comparing with dense attention in float64")
            verdict = strategies.check(strategy, self.options.implementation, shape, self.config)
            print(f"gate {name}: {verdict}, T={shape.length}", flush=True)
            if verdict.green:
                self.green.add((name, shape))
            else:
                self.red.append(name)
        return name not in self.red

    def _row(
        self, strategy: Strategy, mode: str, draw: Draw, shape: Shape, program: timing.Compiled,
        taken: timing.Timing,
    ) -> records.ParallelRow:  # fmt: skip
        sizes = dataclasses.asdict(shape)
        del sizes["model_dim"]
        assert draw.overlap is not None
        return records.ParallelRow(
            **dataclasses.asdict(self.environment), **sizes, benchmark="parallel", strategy=strategy.name,
            mesh=strategy.mesh_name, implementation=self.options.implementation, mode=mode,
            distribution=draw.distribution, median_ms=taken.median_ms, p20_ms=taken.percentile_ms(20),
            p80_ms=taken.percentile_ms(80), samples=len(taken.samples_ms), compile_s=program.compile_s,
            peak_bytes=program.peak_bytes, adjacent_share=draw.overlap.adjacent_share,
            mean_union_4=draw.overlap.mean_union_4, noise=draw.noise, config=dataclasses.asdict(self.config),
        )  # fmt: skip


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = Parser(prog="python -m benchmarks.parallel", description=__doc__)
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=positive,
        default=[4096],
        metavar="T",
        help="tokens of a row; default: 4096",
    )
    parser.add_argument(
        "--strategies",
        nargs="+",
        choices=STRATEGIES,
        default=list(STRATEGIES),
        help="how attention is spread; default: all",
    )
    for name, choices, default, meaning in (
        ("modes", MODES, MODES, "forward, or forward and backward in one program; default: both"),
        ("distributions", DISTRIBUTIONS, DISTRIBUTIONS, "how selections are drawn; default: both"),
    ):
        parser.add_argument(f"--{name}", nargs="+", choices=choices, default=list(default), help=meaning)
    parser.add_argument(
        "--devices", type=positive, default=jax.device_count(), help="devices to spread over; default: all"
    )
    parser.add_argument(
        "--implementation",
        choices=dispatch.IMPLEMENTATIONS,
        default="xla",
        help="all but xla need GPUs; default: xla",
    )
    add_dtype(parser, "float32", "of all inputs")
    add_sizes(
        parser,
        ("batch", 1, "rows"),
        ("heads", 4, "query heads"),
        ("kv-heads", 2, "KV heads; must divide --heads"),
        ("key-dim", 64, "dimension of queries and keys"),
        ("value-dim", 64, "dimension of values"),
    )
    add_sampling(parser)
    options = parser.parse_args(argv)
    check_heads(options.heads, options.kv_heads)
    check_writable(options.output, "--output")
    devices.check(options.devices)
    return options


@command("benchmarks.parallel")
def main(argv: Sequence[str] | None = None, config: NSAConfig | None = None) -> int:
    """Runs the benchmark; `config` other than the paper's is for tests."""
    options = parse(argv)
    run = Run(options, config or NSAConfig())
    for length in options.lengths:
        for distribution in options.distributions:
            run.measure(length, distribution)
    return run.finish()


if __name__ == "__main__":
    raise SystemExit(main())
