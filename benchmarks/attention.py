"""Where is sparse attention faster than dense, and how far from the ceiling is each operation?

`python -m benchmarks.attention` measures the whole operation against dense causal attention. Its defaults are
the CPU rows of `docs/results.md`. `--operations` names single operations, or `layer`, a whole attention layer
beside the dense layer. `docs/benchmarks.md` explains the method and the columns.
"""

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from benchmarks import gate, inputs, programs, records, roofline, timing
from benchmarks.command_line import command, measuring_parser, parse_sizes, progress
from benchmarks.inputs import LAYERS, SELECTING, Draw, NotCoherent, Shape, shape_of
from benchmarks.verdict import Verdict
from nsa_jax.config import NSAConfig

LEAST_LENGTH = 4  # the overlap of blocks is that of 4 adjacent tokens
# The forward at 64k shows that time grows with T and not with T^2; its gradient would show the same again.
CPU_LENGTHS = "4096 8192 16384 65536:fwd"
LARGEST_DENSE_ON_CPU = 16384  # there dense value_and_grad takes 1.5 minutes on 2 cores; at 64k, 16 times that


class Variant(NamedTuple):
    """What one row measures: an operation in one implementation and mode, on one draw."""

    operation: str
    implementation: str
    mode: str
    distribution: str
    shape: Shape

    def __str__(self) -> str:
        return f"{' '.join(self[:4])} T={self.shape.length}"


class Refused(Exception):
    """A combination that is not measured, with the reason."""


class Run(roofline.Run):
    """One run of the benchmark, with the verdicts at a small length."""

    def __init__(self, options: argparse.Namespace, config: NSAConfig):
        super().__init__(options, config)
        self.verdicts: dict[tuple[str, ...], Verdict] = {}
        self.draws: dict[tuple[Any, ...], Draw] = {}

    def measure_length(self, length: int, modes: Sequence[str]) -> None:
        """Measures all rows of one length; those of one mode take turns."""
        self.draws.clear()
        variants = {mode: list(self._variants(length, mode)) for mode in modes}
        self._judge(itertools.chain(*variants.values()))
        for mode in modes:
            compiled = {}
            for variant in variants[mode]:
                try:
                    compiled[variant] = self._compiled(variant)
                except (Refused, NotCoherent) as reason:
                    print(f"refused: {variant}: {reason}")
            timings = self.in_turns(compiled, f"of {mode} at T={length}")
            for variant, program in compiled.items():
                cost = roofline.cost(variant.operation, mode, variant.shape)
                self.add(
                    benchmark="attention", operation=variant.operation, mode=mode,
                    implementation=variant.implementation, floor_ms=self.ceiling.floor_ms(cost),
                    **dataclasses.asdict(variant.shape), **self._draw(variant).fields,
                    **timings[variant].fields, **program.fields,
                )  # fmt: skip

    def compare(self) -> list[dict[str, Any]]:
        """Prints and returns the ratios to dense."""
        ratios = []
        for row, dense in records.beside_dense(self.rows):
            time, memory = records.ratio(row, dense)
            what = {name: row[name] for name in ("operation", "mode", "distribution", "length")}
            print("dense / NSA:", *what.values(), f"time {time:.2f}, temporary memory {memory:.1f}")
            ratios.append(what | {"time": round(time, 3), "memory": round(memory, 3)})
        return ratios

    def _variants(self, length: int, mode: str) -> Iterator[Variant]:
        options = self.options
        layers = ["dense_layer"] if "layer" in options.operations else []
        for operation in [*options.operations, *layers]:
            width = options.model_dim or options.heads * options.key_dim
            shape = shape_of(options, length, self.config, width if operation in LAYERS else None)
            implementations, distributions = options.implementations, options.distributions
            if operation in records.DENSE.values():
                implementations = [programs.dense_implementation(operation, shape)]
            if operation not in SELECTING:  # both distributions cost the same here, so one row is enough
                distributions = ["random"]
            for implementation, distribution in itertools.product(implementations, distributions):
                yield Variant(operation, implementation, mode, distribution, shape)

    def _refusal(self, variant: Variant) -> str | None:
        operation, implementation, mode, _, shape = variant
        if operation in records.DENSE.values() and shape.length > self.options.dense_up_to:
            return f"longer than --dense-up-to {self.options.dense_up_to}"
        return programs.refusal(operation, implementation, mode, shape)

    def _judge(self, variants: Iterable[Variant]) -> None:
        """Compares what is to be measured and was not yet compared, each once for all lengths."""
        checks = {
            variant[:3]: functools.partial(gate.check_small, *variant[:3], variant.shape)
            for variant in variants
            if variant[:3] not in self.verdicts and self._refusal(variant) is None
        }
        for key, verdict in gate.verdicts(checks):
            print(f"gate {' '.join(key)}: {verdict}", flush=True)
            self.verdicts[key] = verdict

    def _stop_if_red(self, verdict: Verdict, what: str) -> None:
        if not verdict.green:
            self.red += [what] if what not in self.red else []
            raise Refused(f"the gate is {verdict}; no speed is reported")

    def _draw(self, variant: Variant) -> Draw:
        """That of the variant, which operations share that are given the same."""
        operation, implementation, _, distribution, shape = variant
        own = operation in (*LAYERS, "selected_attention")
        key = operation if own else operation in SELECTING, implementation, distribution
        if key not in self.draws:
            self.draws[key] = programs.draw(operation, implementation, shape, distribution)
        return self.draws[key]

    def _compiled(self, variant: Variant) -> timing.Compiled:
        """The program, which passed both gates."""
        if reason := self._refusal(variant):
            raise Refused(reason)
        operation, implementation, mode, _, shape = variant
        self._stop_if_red(self.verdicts[variant[:3]], " ".join(variant[:3]))
        draw = self._draw(variant)
        progress(f"compiling {variant}")
        run = programs.function(operation, implementation, shape)
        program = programs.compile_mode(run, mode, programs.arguments(operation, draw, shape))
        if program.peak_bytes > (memory := records.memory_bytes()):
            needed = f"needs {program.peak_bytes / 1e9:.1f} GB beside its arguments"
            raise Refused(f"{needed}, has {memory / 1e9:.1f}")
        positions = gate.sample_positions(shape.length, operation)
        verdict = gate.check_program(operation, mode, program, positions, draw, shape)
        print(f"gate {variant}, {len(positions)} queries: {verdict}", flush=True)
        self._stop_if_red(verdict, f"{variant}")
        return program


def length_and_modes(text: str) -> tuple[int, list[str]]:
    """Reads `T` or `T:MODE,MODE`; no modes stand for those of `--modes`."""
    length, _, modes = text.partition(":")
    chosen = modes.split(",") if modes else []
    if not length.isdecimal() or int(length) < LEAST_LENGTH or not set(chosen) <= set(records.MODES[:3]):
        raise argparse.ArgumentTypeError(
            f"must be T or T:MODE,MODE with T at least {LEAST_LENGTH} and modes of {records.MODES[:3]}, "
            f"got {text}. Pass a length alone."
        )
    return int(length), chosen


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line; the defaults are the CPU rows of `docs/results.md`."""
    whole = ("native_sparse_attention", "dense_attention")
    compared = "one_token is for comparison"
    parser = measuring_parser(
        "benchmarks.attention",
        __doc__,
        dtype=("float32", "of all inputs"),
        choices={
            "operations": ((*inputs.OPERATIONS, "layer"), whole, "operations to measure"),
            "modes": (records.MODES[:3], ("fwd", "fwd_bwd"), "forward, backward, or both in one program"),
            "distributions": (
                inputs.DISTRIBUTIONS,
                inputs.MEASURED_BY_DEFAULT,
                "how the selected blocks are drawn",
            ),
            "implementations": (records.MEASURED, ("xla",), f"all but xla need a GPU; {compared}"),
        },
        sizes={"batch": 1, "heads": 4, "kv-heads": 1, "key-dim": 64, "value-dim": 64},
        own_sizes={
            "model-dim": (None, "width of a layer's input; default: --heads times --key-dim"),
            "dense-up-to": (
                LARGEST_DENSE_ON_CPU if jax.default_backend() == "cpu" else 1 << 20,
                "longest sequence for dense attention, in tokens",
            ),
        },
    )
    parser.add_argument(
        "--lengths",
        nargs="+",
        default=[length_and_modes(text) for text in CPU_LENGTHS.split()],
        type=length_and_modes,
        metavar="T[:MODE,...]",
        help=f"tokens of a sequence; modes given here replace --modes for it; default: {CPU_LENGTHS}",
    )
    return parse_sizes(parser, argv)


@command("benchmarks.attention")
def main(argv: Sequence[str] | None = None, config: NSAConfig | None = None) -> int:
    """Runs the benchmark; `config` other than the paper's is for tests."""
    options = parse(argv)
    run = Run(options, config or NSAConfig())
    for length, modes in options.lengths:
        run.measure_length(length, modes or options.modes)
    return run.finish(dense_over_nsa=run.compare())


if __name__ == "__main__":
    raise SystemExit(main())
