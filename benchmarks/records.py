"""The rows that benchmarks write: one JSON object a line, those of one run under one `run_id`."""

import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import secrets
import subprocess
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jaxlib

from benchmarks.command_line import InputError
from benchmarks.inputs import DISTRIBUTIONS, LAYERS, OPERATIONS, Draw, Shape
from benchmarks.timing import Compiled, Timing
from nsa_jax.config import NSAConfig

MODES = ("fwd", "bwd", "fwd_bwd", "decode", "decode_loop")
# The dense row that each whole operation is compared with.
DENSE = {"native_sparse_attention": "dense_attention", "layer": "dense_layer"}
# Modules of this package with a selected attention to compare ours with: the implementation of ours whose
# limits are theirs, and the modes that they have.
COMPARED = {"one_token": ("triton", ("fwd",))}
MEASURED = ("xla", "triton", "mosaic_gpu", *COMPARED)  # implementations of ours
IMPLEMENTATIONS = (*MEASURED, "cudnn", "jax_nn")
ROOT = pathlib.Path(__file__).resolve().parent.parent
# Names the commit where the tree is a copy without git; `python -m benchmarks.report --commit` sets it.
COMMIT_VARIABLE = "BENCHMARKS_COMMIT"
UNKNOWN_COMMIT = "unknown"
MEASURED_CODE = ("nsa_jax", "benchmarks/*.py", "examples/*.py")


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
        print(f"run {self.run_id}, commit {self.commit}\n{self.device}, {versions}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement. `peak_bytes` is temporary memory beside arguments and results."""

    run_id: str
    benchmark: str
    operation: str
    implementation: str
    mode: str
    distribution: str
    batch: int
    length: int
    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    model_dim: int | None = None  # of layers alone
    dtype: str
    median_ms: float
    p20_ms: float
    p80_ms: float
    samples: int
    compile_s: float
    peak_bytes: int
    floor_ms: float
    adjacent_share: float | None
    mean_union_4: float | None
    noise: float | None
    new_tokens: int | None = None  # this and what follows: of decode steps alone
    compression: str | None = None
    num_layers: int | None = None
    bytes: int | None = None
    gb_per_s: float | None = None
    copy_share: float | None = None
    dense_over_this: float | None = None
    config: dict[str, int]
    device: str
    jax: str
    jaxlib: str
    triton: str | None = None  # None where it is not installed, and in rows from before it was recorded
    commit: str

    def __post_init__(self):
        for name, allowed in (
            ("operation", (*OPERATIONS, *LAYERS)),
            ("implementation", IMPLEMENTATIONS),
            ("mode", MODES),
            ("distribution", DISTRIBUTIONS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be one of {allowed}, got {getattr(self, name)!r}. Extend the list."
                )

    def __str__(self) -> str:
        overlap = ""
        if self.adjacent_share is not None:
            overlap = f"  share {self.adjacent_share:.3f} union4 {self.mean_union_4:.1f}"
        moved = ""
        if self.gb_per_s is not None and self.copy_share is not None:
            moved = f"  {self.gb_per_s:.1f} GB/s, {100 * self.copy_share:.1f} % of copy"
        if self.dense_over_this is not None:
            moved += f"  dense / this {self.dense_over_this:.2f}"
        digits = 3 if self.median_ms >= 1 else 5
        return (
            f"{self.operation:24}{self.implementation:15}{self.mode:12}{self.distribution:9} "
            f"T={self.length:<7}{self.median_ms:10.{digits}f} ms "
            f"[{self.p20_ms:.{digits}f}, {self.p80_ms:.{digits}f}]  {self.samples:3} samples  "
            f"{100 * self.floor_ms / self.median_ms:5.1f} % of floor {self.floor_ms:.3f} ms  "
            f"temp {self.peak_bytes / 1e6:.1f} MB  compile {self.compile_s:.1f} s{overlap}{moved}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingRow:
    """One measurement: a step of one model at one length. `peak_bytes` is temporary memory of each device."""

    run_id: str
    benchmark: str
    attention: str
    implementation: str
    devices: int = 1  # which share the tokens of each sequence
    batch: int
    length: int
    model: dict[str, Any]
    parameters: int
    median_ms: float
    p20_ms: float
    p80_ms: float
    samples: int
    tokens_per_s: float
    compile_s: float
    peak_bytes: int
    device: str
    jax: str
    jaxlib: str
    triton: str | None = None  # None where it is not installed, and in rows of before it was noted
    commit: str

    def __str__(self) -> str:
        return (
            f"{self.attention:6}{self.implementation:11}{self.devices} devices  T={self.length:<7}"
            f"{self.median_ms:10.1f} ms [{self.p20_ms:.1f}, {self.p80_ms:.1f}]  {self.samples:3} samples  "
            f"{self.tokens_per_s:10.0f} tokens/s  temp {self.peak_bytes / 1e9:.2f} GB  "
            f"{self.parameters / 1e6:.1f} M parameters  compile {self.compile_s:.1f} s"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateRow:
    """One measurement: what a call of `generate` takes, and what the parts of a token take alone.

    Attributes:
      length: tokens of each prompt.
      devices, spread: how many devices share the work, and by what: "rows", or "heads" and weights.
      first_token_ms: of a call for one new token.
      token_ms: of each further one, all rows together; `tokens_per_s` counts those of all rows.
      products_ms, attention_ms, sampling_ms: of one token, each alone in a compiled loop; None on several
        devices.
    """

    run_id: str
    benchmark: str
    attention: str
    devices: int = 1
    spread: str | None = None
    batch: int
    length: int
    new_tokens: int
    model: dict[str, Any]
    parameters: int
    first_token_ms: float
    token_ms: float
    tokens_per_s: float
    samples: int
    compile_s: float
    products_ms: float | None = None
    products_bytes: int | None = None
    attention_ms: float | None = None
    attention_bytes: int | None = None
    sampling_ms: float | None = None
    sampling_bytes: int | None = None
    device: str
    jax: str
    jaxlib: str
    triton: str | None
    commit: str

    @property
    def over_parts(self) -> float | None:
        """The time per token over the sum of its parts; None where these were not measured."""
        if self.products_ms is None or self.attention_ms is None or self.sampling_ms is None:
            return None
        return self.token_ms / (self.products_ms + self.attention_ms + self.sampling_ms)

    def __str__(self) -> str:
        def part(name: str) -> str:
            ms, read = getattr(self, f"{name}_ms"), getattr(self, f"{name}_bytes")
            return f"{name} {ms:.3f} ms ({read / 1e6:.1f} MB, {read / ms / 1e6:.0f} GB/s)"

        parts = f"{self.devices} devices, by {self.spread}"
        if self.over_parts is not None:
            measured = ", ".join(map(part, ("products", "attention", "sampling")))
            parts = f"{self.over_parts:.2f} times {measured}"

        layer_us = 1e3 * self.token_ms / self.model["num_layers"]
        return (
            f"{self.attention:6}T={self.length:<7}first token {self.first_token_ms:.1f} ms, then "
            f"{self.token_ms:.3f} ms a token, {layer_us:.1f} us a layer, {self.tokens_per_s:.0f} tokens/s  "
            f"{self.samples} samples  compile {self.compile_s:.1f} s\n      {parts}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelRow:
    """One measurement: attention spread over devices. `peak_bytes` is the temporary memory of each device."""

    run_id: str
    benchmark: str
    strategy: str
    mesh: str
    implementation: str
    mode: str
    distribution: str
    batch: int
    length: int
    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: str
    median_ms: float
    p20_ms: float
    p80_ms: float
    samples: int
    compile_s: float
    peak_bytes: int
    adjacent_share: float | None
    mean_union_4: float | None
    noise: float | None
    config: dict[str, int]
    device: str
    jax: str
    jaxlib: str
    triton: str | None
    commit: str

    def __str__(self) -> str:
        return (
            f"{self.strategy:10}{self.mesh:11}{self.implementation:11}{self.mode:8}{self.distribution:9} "
            f"T={self.length:<8}{self.median_ms:10.3f} ms [{self.p20_ms:.3f}, {self.p80_ms:.3f}]  "
            f"{self.samples:3} samples  temp {self.peak_bytes / 1e6:.1f} MB  compile {self.compile_s:.1f} s"
        )


type AnyRow = Row | TrainingRow | GenerateRow | ParallelRow
ROWS: dict[str, type[AnyRow]] = {
    "training": TrainingRow,
    "generate": GenerateRow,
    "parallel": ParallelRow,
}


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
    model = platform.processor() or platform.machine()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        model = next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model
        )
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


def make_row(
    environment: Environment,
    shape: Shape,
    config: NSAConfig,
    timing: Timing,
    compiled: Compiled,
    *,
    benchmark: str,
    operation: str,
    implementation: str,
    mode: str,
    draw: Draw,
    floor_ms: float,
) -> Row:
    """Puts together what was measured."""
    return Row(
        **dataclasses.asdict(environment),
        **dataclasses.asdict(shape),
        benchmark=benchmark,
        operation=operation,
        implementation=implementation,
        mode=mode,
        distribution=draw.distribution,
        median_ms=timing.median_ms,
        p20_ms=timing.percentile_ms(20),
        p80_ms=timing.percentile_ms(80),
        samples=len(timing.samples_ms),
        compile_s=compiled.compile_s,
        peak_bytes=compiled.peak_bytes,
        floor_ms=floor_ms,
        adjacent_share=draw.overlap.adjacent_share if draw.overlap else None,
        mean_union_4=draw.overlap.mean_union_4 if draw.overlap else None,
        noise=draw.noise,
        config=dataclasses.asdict(config),
    )


def append(path: pathlib.Path | None, rows: Iterable[AnyRow]) -> None:
    """Adds rows to a JSONL file at once, so that an interrupted run keeps what it measured."""
    rows = list(rows)
    if path is None or not rows:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows)


def read(path: pathlib.Path, *, cut_off: bool = False) -> list[AnyRow]:
    """All rows of a JSONL file; with `cut_off` without the last line if it does not end.

    Raises:
      InputError: the file cannot be read, or holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if cut_off:
            text = text[: text.rfind("\n") + 1]
        lines = [json.loads(line) for line in text.splitlines() if line.strip()]
        return [ROWS.get(line["benchmark"], Row)(**line) for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"a results file must hold the rows of a benchmark, got {str(path)!r} "
            f"({type(error).__name__}: {error}). Pass a file that --output wrote."
        ) from error


def ratio(row: Row, dense: Row) -> tuple[float, float]:
    """Dense attention's time and temporary memory over those of the row."""
    return dense.median_ms / row.median_ms, dense.peak_bytes / max(row.peak_bytes, 1)


def beside_dense(rows: Iterable[Row]) -> list[tuple[Row, Row]]:
    """Each row of the whole operation or layer with the fastest dense row of its run, mode and sizes."""

    def setting(row: Row) -> tuple[object, ...]:
        heads = (row.query_heads, row.kv_heads, row.key_dim, row.value_dim)
        sizes = (row.batch, row.length, *heads, row.model_dim, row.dtype, row.new_tokens)
        return row.run_id, row.benchmark, row.mode, *sizes

    rows = list(rows)
    # Where dense attention was measured by several implementations, the fastest one stays.
    ordered = sorted(rows, key=lambda row: -row.median_ms)
    dense = {(row.operation, *setting(row)): row for row in ordered}
    keys = [(row, (DENSE.get(row.operation), *setting(row))) for row in rows]
    return [(row, dense[key]) for row, key in keys if key in dense]
