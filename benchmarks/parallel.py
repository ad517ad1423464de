"""How much faster is attention on several devices, and what memory does each of them need?

`python -m benchmarks.parallel` measures the whole operation, with the compression of its keys and values, on
one device and spread over several (`strategies.py`). On a machine without GPUs, `--devices` of the CPU come
from `XLA_FLAGS=--xla_force_host_platform_device_count=2`. `docs/benchmarks.md` explains the method.
"""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from benchmarks import devices, records, strategies, timing
from benchmarks.command_line import command, measuring_parser, parse_sizes, progress
from benchmarks.inputs import DISTRIBUTIONS, MEASURED_BY_DEFAULT, Draw, Shape, shape_of
from benchmarks.strategies import STRATEGIES, Strategy
from nsa_jax import dispatch
from nsa_jax.config import NSAConfig

MODES = ("fwd", "fwd_bwd")


class Run(records.Run):
    """One run of the benchmark, with the gates that were green."""

    def __init__(self, options: argparse.Namespace, config: NSAConfig):
        super().__init__(options)
        self.config = config
        print(f"{options.devices} devices, config {config}", flush=True)
        self.green: set[tuple[str, str, Shape]] = set()
        self.programs: dict[tuple[str, str, Shape], timing.Compiled] = {}

    def measure(self, length: int, distribution: str) -> None:
        """Measures all strategies at one length; those of one mode take turns."""
        options = self.options
        shape = shape_of(options, length, self.config)
        ways = [
            Strategy(name, 1 if name == "one" else options.devices, options.implementation, self.config)
            for name in options.strategies
        ]
        if not (ways := [way for way in ways if self._is_possible(way, shape)]):
            return
        draw, arrays = strategies.draw(distribution, options.implementation, shape)
        there = {way: way.put(arrays) for way in ways}
        for mode in options.modes:
            self._measure_mode(mode, there, draw, shape)

    def _measure_mode(self, mode: str, there: Mapping[Strategy, Any], draw: Draw, shape: Shape) -> None:
        options, setting = self.options, f"{mode} {draw.distribution} T={shape.length}"
        programs = {}
        for way, arrays in there.items():
            progress(f"compiling {way.name} {way.mesh_name} {setting}")
            program = self._program(way, mode, arrays, shape)
            if program.all_bytes > (memory := records.memory_bytes()):
                needed, there_is = f"{program.all_bytes / 1e9:.1f} GB", f"{memory / 1e9:.1f} GB"
                print(f"refused: {way.name} {way.mesh_name} {setting}: {needed} of {there_is}")
            else:
                programs[way] = program
        timings = self.in_turns(programs, f"of {setting}")
        for way, program in programs.items():
            self.add(
                benchmark="parallel", strategy=way.name, mesh=way.mesh_name, mode=mode,
                implementation=options.implementation, **dataclasses.asdict(shape), **draw.fields,
                **timings[way].fields, **program.fields,
            )  # fmt: skip

    def _program(self, way: Strategy, mode: str, arrays: Any, shape: Shape) -> timing.Compiled:
        """The program, compiled once for all distributions."""
        key = way.name, mode, shape
        if key not in self.programs:
            program = way.compiled(mode, arrays)
            self.programs[key] = dataclasses.replace(program, arguments=())
        return dataclasses.replace(self.programs[key], arguments=way.operands(mode, arrays))

    def faster(self) -> list[dict[str, Any]]:
        """How many times as fast as one device each row is."""
        same = ("mode", "distribution", "length")
        alone = {tuple(row[x] for x in same): row for row in self.rows if row.strategy == "one"}
        return [
            {name: row[name] for name in ("strategy", "mesh", *same)}
            | {"times": round(one.median_ms / row.median_ms, 3)}
            for row in self.rows
            if row.strategy != "one" and (one := alone.get(tuple(row[x] for x in same)))
        ]

    def _is_possible(self, way: Strategy, shape: Shape) -> bool:
        """Whether the shape can be spread, and the gate of each mode is green; says so if not."""
        name = way.name
        if reason := way.refusal(shape):
            print(f"refused: {name} T={shape.length}: {reason}")
            return False
        for mode in self.options.modes:
            if name in self.red or (name, mode, shape) in self.green:
                continue
            setting = f"{mode} T={shape.length}"
            progress(f"gate {name} {setting}: compiling and comparing with dense attention in float64")
            verdict = strategies.check(way, shape, mode)
            print(f"gate {name}: {verdict}, {setting}", flush=True)
            if verdict.green:
                self.green.add((name, mode, shape))
            else:
                self.red.append(name)
        return name not in self.red


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = measuring_parser(
        "benchmarks.parallel",
        __doc__,
        lengths=(4096,),
        dtype=("float32", "of all inputs"),
        choices={
            "strategies": (STRATEGIES, STRATEGIES, "how attention is spread"),
            "modes": (MODES, MODES, "forward, or forward and backward in one program"),
            "distributions": (DISTRIBUTIONS, MEASURED_BY_DEFAULT, "how selections are drawn"),
            "implementation": (dispatch.IMPLEMENTATIONS, "xla", "all but xla need GPUs"),
        },
        sizes={"batch": 1, "heads": 4, "kv-heads": 2, "key-dim": 64, "value-dim": 64},
        own_sizes={"devices": (jax.device_count(), "devices to spread over")},
    )
    options = parse_sizes(parser, argv)
    devices.check(options.devices)
    return options


@command("benchmarks.parallel")
def main(argv: Sequence[str] | None = None, config: NSAConfig | None = None) -> int:
    """Runs the benchmark; `config` other than the paper's is for tests."""
    options = parse(argv)
    run = Run(options, config or NSAConfig())
    run.each(run.measure)
    return run.finish(faster_than_one_device=run.faster())


if __name__ == "__main__":
    raise SystemExit(main())
