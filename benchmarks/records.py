"""The rows that benchmarks write: one JSON object a line, those of one run under one `run_id`."""

import argparse
import dataclasses
import datetime
import importlib.metadata
import itertools
import json
import os
import pathlib
import platform
import re
import secrets
import subprocess
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jaxlib

from benchmarks import timing
from benchmarks.command_line import InputError, progress
from benchmarks.inputs import DISTRIBUTIONS, LAYERS, OPERATIONS, NotCoherent
from nsa_jax import dispatch

MODES = ("fwd", "bwd", "fwd_bwd", "decode", "decode_loop")
# The dense row that each whole operation is compared with.
DENSE = {
    "native_sparse_attention": "dense_attention",
    "indexed_attention": "dense_attention",
    "layer": "dense_layer",
}
# Modules of this package with a selected attention to compare ours with, and the implementation of ours whose
# limits are theirs.
COMPARED = {"one_token": "triton"}
MEASURED = (*dispatch.IMPLEMENTATIONS, *COMPARED)
ROOT = pathlib.Path(__file__).resolve().parent.parent
# Names the commit where the tree is a copy without git; `python -m benchmarks.report --commit` sets it.
COMMIT_VARIABLE = "BENCHMARKS_COMMIT"
UNKNOWN_COMMIT = "unknown"
MEASURED_CODE = ("nsa_jax", "benchmarks/*.py", "examples/*.py")

# Fields of every row; what a row prints, as far as it has it; and what else some rows have.
# `docs/benchmarks.md` says what they mean.
NEEDED = {
    *("run_id", "benchmark", "batch", "length", "samples", "compile_s", "device", "jax", "jaxlib", "commit"),
}
WHAT = ("attention", "spread", "operation", "strategy", "mesh", "implementation", "mode", "distribution")
FIGURES = (
    *("length", "devices", "median_ms", "p20_ms", "p80_ms", "first_token_ms", "token_ms", "streamed_ms"),
    *("tokens_per_s", "over_parts", "products_ms", "attention_ms", "sampling_ms", "samples", "floor_ms"),
    *("floor_share", "gb_per_s", "copy_share", "dense_over_this", "bound_ms", "added_share", "peak_bytes"),
    *("compile_s", "adjacent_share", "mean_union_4"),
)
DERIVED = {"over_parts", "floor_share"}
FIELDS = {*NEEDED, *WHAT, *FIGURES} - DERIVED | {
    *("triton", "query_heads", "kv_heads", "key_dim", "value_dim", "model_dim", "dtype", "config", "noise"),
    *("new_tokens", "compression", "num_layers", "bytes", "model", "parameters", "chunk_size", "cache_dtype"),
    *("products_bytes", "attention_bytes", "sampling_bytes"),
}
VOCABULARY: dict[str, Sequence[str]] = {
    "operation": (*OPERATIONS, *LAYERS, "block_probabilities", "indexed_attention", "select_by_index"),
    "implementation": (*MEASURED, "cudnn", "jax_nn"),
    "mode": MODES,
    "distribution": DISTRIBUTIONS,
}


@dataclasses.dataclass(frozen=True)
class Environment:
    """What a figure depends on, beside the measured code."""

    run_id: str
    device: str
    jax: str
    jaxlib: str
    triton: str | None
    commit: str

    def print(self) -> None:
        """Prints it at the start of a run."""
        versions = f"jax {self.jax}, jaxlib {self.jaxlib}, triton {self.triton}"
        print(f"run {self.run_id}, commit {self.commit}\n{self.device}, {versions}", flush=True)


class Row(dict[str, Any]):
    """One measurement, the object of its line. A field that it does not have is None as an attribute."""

    def __init__(self, **fields: Any):
        super().__init__(fields)
        if wrong := sorted(fields.keys() - FIELDS | NEEDED - fields.keys()):
            raise ValueError(
                f"a row must have all of NEEDED and no field beyond FIELDS, got {wrong}. Extend the lists."
            )
        for name, allowed in VOCABULARY.items():
            if fields.get(name, allowed[0]) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {fields[name]!r}. Extend the list.")

    def __getattr__(self, name: str) -> Any:
        return self.get(name) if name in FIELDS else super().__getattribute__(name)

    @property
    def floor_share(self) -> float | None:
        """The least time over the measured one."""
        return self.floor_ms and self.floor_ms / self.median_ms

    @property
    def over_parts(self) -> float | None:
        """The time of a generated token over the sum of its parts; None where these were not measured."""
        if self.products_ms is None:
            return None
        return self.token_ms / (self.products_ms + self.attention_ms + self.sampling_ms)

    def __str__(self) -> str:
        figures = {name: value for name in FIGURES if (value := getattr(self, name)) is not None}
        numbers = (f"{name} {x if isinstance(x, int) else f'{x:.5g}'}" for name, x in figures.items())
        return "  ".join([*(self[name] for name in WHAT if self.get(name)), *numbers])


class Run:
    """One run of a benchmark: its options, what its figures depend on, the rows so far, and red gates."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.environment = options, environment()
        self.rows: list[Row] = []
        self.red: list[str] = []
        self.environment.print()

    def add(self, **fields: Any) -> Row:
        """Prints a row, and writes it at once, so that an interrupted run keeps what it measured."""
        row = Row(**dataclasses.asdict(self.environment), **fields)
        self.rows.append(row)
        print(row, flush=True)
        append(self.options.output, [row])
        return row

    def each(self, measure: Callable[[int, str], Any]) -> dict[str, Any]:
        """Measures all lengths and distributions; None for one that cannot be drawn, which it says."""
        found = {}
        for length, distribution in itertools.product(self.options.lengths, self.options.distributions):
            name = f"{distribution} {length}"
            try:
                found[name] = measure(length, distribution)
            except NotCoherent as reason:
                found[name] = None
                print(f"refused: {distribution} T={length}: {reason}", flush=True)
        return found

    def in_turns[K: Hashable](
        self, programs: Mapping[K, timing.Compiled], what: str
    ) -> dict[K, timing.Timing]:
        """Times programs, which take turns."""
        if not programs:
            return {}
        progress(f"measuring {len(programs)} programs {what}")
        runs = {name: program.start for name, program in programs.items()}
        budget_s, sample_s = self.options.budget_s, timing.least_sample_s()
        return timing.measure(runs, budget_s=budget_s, sample_s=sample_s)

    def finish(self, **figures: Any) -> int:
        """Prints, as the last line, a summary in JSON. Returns the exit status."""
        summary = {"run_id": self.environment.run_id, "rows": len(self.rows), "red": self.red}
        print(json.dumps(summary | figures))
        return 1 if self.red else 0


def environment() -> Environment:
    """Device, versions and commit of this run, under a new id."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    return Environment(
        f"{now}-{secrets.token_hex(3)}", device(), jax.__version__, jaxlib.__version__, triton, commit()
    )


def device() -> str:
    """Name of the accelerator, or of the CPU with the cores that this process may use."""
    if jax.default_backend() != "cpu":
        return jax.devices()[0].device_kind
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    found = re.search(
        r"^model name\s*:\s*(.+)$", cpuinfo.read_text() if cpuinfo.exists() else "", re.MULTILINE
    )
    model = found[1].strip() if found else platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model}, {cores} cores"


def commit(code: Sequence[str] = MEASURED_CODE) -> str:
    """Short hash of the checkout, `-dirty` where the code that is measured differs from it."""
    if named := os.environ.get(COMMIT_VARIABLE):
        return named

    def git(*command: str) -> str:
        done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", *code)
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN_COMMIT


def memory_bytes() -> int:
    """Memory of the first device, or of the machine where the device is its CPU."""
    statistics = jax.devices()[0].memory_stats() or {}
    return statistics.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def append(path: pathlib.Path | None, rows: Sequence[Row]) -> None:
    """Adds rows to a JSONL file."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def read(path: pathlib.Path, *, cut_off: bool = False) -> list[Row]:
    """All rows of a JSONL file; with `cut_off` without the last line if it does not end.

    Raises:
      InputError: the file cannot be read, or holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if cut_off:
            text = text[: text.rfind("\n") + 1]
        return [Row(**json.loads(line)) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"a results file must hold the rows of a benchmark, got {str(path)!r} "
            f"({type(error).__name__}: {error}). Pass a file that --output wrote."
        ) from error


def ratio(row: Row, dense: Row) -> tuple[float, float]:
    """Dense attention's time and temporary memory over those of the row."""
    return dense.median_ms / row.median_ms, dense.peak_bytes / max(row.peak_bytes, 1)


def beside_dense(rows: Iterable[Row]) -> list[tuple[Row, Row]]:
    """Each row of the whole operation or layer with the fastest dense row of its run, mode and sizes."""
    sizes = ("batch", "length", "query_heads", "kv_heads", "key_dim", "value_dim", "model_dim", "dtype")
    same = ("run_id", "benchmark", "mode", "new_tokens", *sizes)

    def setting(row: Row) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in same)

    rows = list(rows)
    # Where dense attention was measured by several implementations, the fastest one stays.
    ordered = sorted(rows, key=lambda row: -row.median_ms)
    dense = {(row.operation, *setting(row)): row for row in ordered}
    keys = [(row, (DENSE.get(row.operation), *setting(row))) for row in rows]
    return [(row, dense[key]) for row, key in keys if key in dense]
