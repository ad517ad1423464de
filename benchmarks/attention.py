"""Where is sparse attention faster than dense, and how far from the ceiling is each operation?

`python -m benchmarks.attention` measures the whole operation against dense causal attention. Its defaults are
the CPU rows of `docs/results.md`. `--operations` names single operations, or `layer`, a whole attention layer
beside the dense layer. `docs/benchmarks.md` explains the method and the columns.
"""

import argparse
import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator, Sequence

import jax

from benchmarks import gate, layers, programs, records, roofline, timing
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
from benchmarks.inputs import (
    DISTRIBUTIONS,
    LAYERS,
    OPERATIONS,
    SELECTING,
    Draw,
    NotCoherent,
    Shape,
    draw_blocks,
    draw_queries,
)
from benchmarks.verdict import Verdict
from nsa_jax.config import NSAConfig

LEAST_LENGTH = 4  # the overlap of blocks is that of 4 adjacent tokens
# The forward at 64k shows that time grows with T and not with T^2; its gradient would show the same again.
CPU_LENGTHS = "4096 8192 16384 65536:fwd"
LARGEST_DENSE_ON_CPU = 16384  # there dense value_and_grad takes 1.5 minutes on 2 cores; at 64k, 16 times that


@dataclasses.dataclass(frozen=True)
class Variant:
    """What one row measures: an operation in one implementation and mode, on one draw."""

    operation: str
    implementation: str
    mode: str
    draw: Draw
    shape: Shape

    def __str__(self) -> str:
        return f"{self.operation} {self.implementation} {self.mode} {self.draw.distribution}"


class Run:
    """One run of the benchmark: options, verdicts and the rows so far."""

    def __init__(self, options: argparse.Namespace, config: NSAConfig):
        self.options, self.config = options, config
        self.rows: list[records.Row] = []
        self.verdicts: dict[tuple[str, str, str], Verdict] = {}
        self.red: list[str] = []
        self.environment = records.environment()
        self.environment.print()
        self.ceiling = roofline.measure_ceiling(options.dtype)
        print(f"ceiling in {options.dtype}: {self.ceiling}\nconfig {config}", flush=True)

    def measure_length(self, length: int, modes: Sequence[str]) -> None:
        """Measures all rows of one length; those of one mode take turns."""
        options = self.options
        heads = {"query_heads": options.heads, "kv_heads": options.kv_heads}
        dims = {"key_dim": options.key_dim, "value_dim": options.value_dim}
        whole = Shape(batch=options.batch, length=length, dtype=options.dtype, **heads, **dims)
        wide = dataclasses.replace(whole, model_dim=options.model_dim or options.heads * options.key_dim)
        draws: dict[tuple[str, str, str], Draw] = {}
        self._judge(modes, whole, wide)
        for mode in modes:
            compiled: dict[Variant, timing.Compiled] = {}
            for operation, implementation, distribution in self._combinations(whole):
                shape = wide if operation in LAYERS else whole
                try:
                    if reason := self._refusal(operation, implementation, mode, shape):
                        raise Refused(reason)
                    key = (self._kind_of_draw(operation), implementation, distribution)
                    if key not in draws:
                        draws[key] = self._draw(*key, shape)
                    judged = operation, implementation, mode
                    self._stop_if_red(self.verdicts[judged], " ".join(judged))
                    variant = Variant(operation, implementation, mode, draws[key], shape)
                    compiled[variant] = self._compile(variant)
                except Refused as refused:
                    what = f"{operation} {implementation} {mode} {distribution} T={length}"
                    print(f"refused: {what}: {refused}")
            runs = {str(variant): program.start for variant, program in compiled.items()}
            sample_s = timing.GPU_SAMPLE_S if jax.default_backend() == "gpu" else 0.0
            if runs:
                progress(f"measuring {len(runs)} programs of {mode} at T={length}")
            timings = timing.measure(runs, budget_s=options.budget_s, sample_s=sample_s) if runs else {}
            rows = [self._row(variant, program, timings) for variant, program in compiled.items()]
            records.append(options.output, rows)
            self.rows += rows
            for row in rows:
                print(row, flush=True)

    def finish(self) -> int:
        """Prints the ratios to dense and, as the last line, a summary in JSON. Returns the exit status."""
        ratios = []
        for row, dense in records.beside_dense(self.rows):
            time, memory = records.ratio(row, dense)
            what = {
                "operation": row.operation,
                "mode": row.mode,
                "distribution": row.distribution,
                "length": row.length,
            }
            print("dense / NSA:", *what.values(), f"time {time:.2f}, temporary memory {memory:.1f}")
            ratios.append(what | {"time": round(time, 3), "memory": round(memory, 3)})
        summary = {"run_id": self.environment.run_id, "rows": len(self.rows), "red": self.red}
        print(json.dumps(summary | {"dense_over_nsa": ratios}))
        return 1 if self.red else 0

    def _combinations(self, shape: Shape) -> Iterator[tuple[str, str, str]]:
        chosen = self.options.operations
        for operation in [*chosen, *(["dense_layer"] if "layer" in chosen else [])]:
            implementations, distributions = self.options.implementations, self.options.distributions
            if operation == "dense_attention":
                implementations = [programs.dense_implementation()]
            if operation == "dense_layer":
                implementations = [layers.dense_implementation(shape, self.config)]
            if operation not in SELECTING:  # both distributions cost the same here, so one row is enough
                distributions = ["random"]
            yield from itertools.product([operation], implementations, distributions)

    def _refusal(self, operation: str, implementation: str, mode: str, shape: Shape) -> str | None:
        if operation in records.DENSE.values() and shape.length > self.options.dense_up_to:
            return f"longer than --dense-up-to {self.options.dense_up_to}"
        return programs.refusal(operation, implementation, mode, shape, self.config)

    def _judge(self, modes: Sequence[str], whole: Shape, wide: Shape) -> None:
        """Compares what is to be measured and was not yet compared, each once for all lengths."""
        checks = {}
        for mode, (operation, implementation, _) in itertools.product(modes, self._combinations(whole)):
            key, shape = (operation, implementation, mode), wide if operation in LAYERS else whole
            if key not in self.verdicts and self._refusal(*key, shape) is None:
                checks[key] = functools.partial(gate.check_small, *key, shape, self.config)
        for key, verdict in gate.verdicts(checks):
            print(f"gate {' '.join(key)}: {verdict}", flush=True)
            self.verdicts[key] = verdict

    def _stop_if_red(self, verdict: Verdict, what: str) -> None:
        if not verdict.green:
            self.red.append(what)
            raise Refused(f"the gate is {verdict}; no speed is reported")

    @staticmethod
    def _kind_of_draw(operation: str) -> str:
        if operation in LAYERS:
            return operation
        if operation == "selected_attention":
            return "blocks"
        return "queries with their selection" if operation in SELECTING else "queries"

    def _draw(self, kind: str, implementation: str, distribution: str, shape: Shape) -> Draw:
        try:
            if kind in LAYERS:
                return layers.draw(kind, implementation, shape, self.config)
            if kind == "blocks":
                return draw_blocks(shape, self.config, distribution)
            if kind == "queries":
                return draw_queries(shape, self.config, distribution, None)
            choose = jax.jit(programs.function("select_blocks", implementation, self.config))
            return draw_queries(shape, self.config, distribution, choose)
        except NotCoherent as error:
            raise Refused(str(error)) from error

    def _compile(self, variant: Variant) -> timing.Compiled:
        shape = variant.shape
        run = programs.function(variant.operation, variant.implementation, self.config, shape)
        operands = programs.arguments(variant.operation, variant.draw, shape, self.config)
        progress(f"compiling {variant} T={shape.length}")
        program = programs.compile_mode(run, variant.mode, operands)
        if program.peak_bytes > (memory := records.memory_bytes()):
            raise Refused(
                f"needs {program.peak_bytes / 1e9:.1f} GB beside its arguments, has {memory / 1e9:.1f}"
            )
        positions = gate.sample_positions(shape.length, variant.operation)
        verdict = gate.check_program(
            variant.operation, variant.mode, program, positions, variant.draw, shape, self.config
        )
        print(f"gate {variant} T={shape.length}, {len(positions)} queries: {verdict}", flush=True)
        self._stop_if_red(verdict, f"{variant} T={shape.length}")
        return program

    def _row(
        self, variant: Variant, program: timing.Compiled, timings: dict[str, timing.Timing]
    ) -> records.Row:
        cost = roofline.cost(variant.operation, variant.mode, variant.shape, self.config)
        return records.make_row(
            self.environment,
            variant.shape,
            self.config,
            timings[str(variant)],
            program,
            benchmark="attention",
            operation=variant.operation,
            implementation=variant.implementation,
            mode=variant.mode,
            draw=variant.draw,
            floor_ms=self.ceiling.floor_ms(cost),
        )


class Refused(Exception):
    """A combination that is not measured, with the reason."""


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
    parser = Parser(prog="python -m benchmarks.attention", description=__doc__)
    whole = ["native_sparse_attention", "dense_attention"]
    parser.add_argument(
        "--lengths",
        nargs="+",
        default=[length_and_modes(text) for text in CPU_LENGTHS.split()],
        type=length_and_modes,
        metavar="T[:MODE,...]",
        help=f"tokens of a sequence; modes given here replace --modes for it; default: {CPU_LENGTHS}",
    )
    parser.add_argument(
        "--operations",
        nargs="+",
        choices=(*OPERATIONS, "layer"),
        default=whole,
        help="operations to measure; default: native_sparse_attention dense_attention",
    )
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=records.MODES[:3],
        default=["fwd", "fwd_bwd"],
        help="forward, backward, or both in one program; default: fwd fwd_bwd",
    )
    parser.add_argument(
        "--distributions",
        nargs="+",
        choices=DISTRIBUTIONS,
        default=list(DISTRIBUTIONS),
        help="how the selected blocks are drawn; default: both",
    )
    parser.add_argument(
        "--implementations",
        nargs="+",
        choices=records.MEASURED,
        default=["xla"],
        help="all but xla need a GPU; one_token is for comparison; default: xla",
    )
    add_dtype(parser, "float32", "of all inputs")
    add_sizes(
        parser,
        ("batch", 1, "sequences"),
        ("heads", 4, "query heads"),
        ("kv-heads", 1, "KV heads; must divide --heads"),
        ("key-dim", 64, "dimension of queries and keys"),
        ("value-dim", 64, "dimension of values"),
    )
    parser.add_argument(
        "--model-dim", type=positive, help="width of a layer's input; default: --heads times --key-dim"
    )
    add_sampling(parser)
    longest = LARGEST_DENSE_ON_CPU if jax.default_backend() == "cpu" else 1 << 20
    parser.add_argument(
        "--dense-up-to",
        type=positive,
        default=longest,
        help="longest sequence for dense attention, in tokens; default: %(default)s",
    )
    options = parser.parse_args(argv)
    check_heads(options.heads, options.kv_heads)
    check_writable(options.output, "--output")
    return options


@command("benchmarks.attention")
def main(argv: Sequence[str] | None = None, config: NSAConfig | None = None) -> int:
    """Runs the benchmark; `config` other than the paper's is for tests."""
    options = parse(argv)
    run = Run(options, config or NSAConfig())
    for length, modes in options.lengths:
        run.measure_length(length, modes or options.modes)
    return run.finish()


if __name__ == "__main__":
    raise SystemExit(main())
