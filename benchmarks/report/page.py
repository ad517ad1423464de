"""`report.md`: what a reader sees, made of `report.json` and the files of the steps by `template.md`."""

import collections
import contextlib
import itertools
import json
import pathlib
import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks import records, tables
from benchmarks.command_line import InputError
from benchmarks.records import AnyRow
from benchmarks.report import comparison
from benchmarks.report.places import without_places
from benchmarks.report.state import Ran, Report, Result, write_whole
from benchmarks.report.steps import Step

TEMPLATE = pathlib.Path(__file__).with_name("template.md")
FILE = "report.md"
LOG_LINES = 15
MOST_REFUSED = 12

type Facts = dict[str, Any]


def write(report: Report, folder: pathlib.Path, steps: Mapping[str, Step]) -> None:
    """Writes `report.md`, whole or not at all."""
    write_whole(folder / FILE, render(report, folder, steps))


def render(report: Report, folder: pathlib.Path, steps: Mapping[str, Step]) -> str:
    """The page."""
    rows = {name: rows_of(folder / name) for name in report.results}
    found = comparison.pairs(itertools.chain(*rows.values()), comparison.committed_rows())
    results = {name: report.results.get(name) for name in steps}
    page = string.Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=f"Report: {report.host['device']}",
        verdict=verdict(report),
        host="\n".join(f"| {name} | {value} |" for name, value in about(report)),
        steps="\n".join(step_line(name, result) for name, result in results.items()),
        beside=together(report),
        failures=failures(report, folder),
        comparison=ratios(found),
        refused=refusals(report),
        details="\n".join(details(steps[name], each, folder, rows[name]) for name, each in ran(results)),
    )
    return without_places(re.sub(r"\n{3,}", "\n\n", page).rstrip() + "\n", folder)


def ran(results: Mapping[str, Result | None]) -> list[tuple[str, Result]]:
    """The steps that ran programs."""
    return [(name, result) for name, result in results.items() if result is not None and result.ran]


def verdict(report: Report) -> str:
    """The first line that a reader wants."""
    counts = collections.Counter(result.status for result in report.results.values())
    told = ", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "nothing ran yet"
    word = "PASS" if report.passed else "FAIL" if report.failed else "NOT FINISHED"
    return f"**{word}**: {told}." + (f" Failed: {', '.join(report.failed)}." if report.failed else "")


def about(report: Report) -> list[tuple[str, str]]:
    """Host, GPU, driver, commit and versions, as far as the steps found them out."""
    doctor = fact(report, "environment", "doctor") or {}
    host, versions = doctor.get("host") or {}, doctor.get("versions") or {}
    lines = [("device", f"{report.host['device']} ({counted(report.host['count'], 'device')} seen by JAX)")]
    for gpu in doctor.get("gpus") or []:
        memory = _gigabytes(gpu.get("memory_bytes"))
        driver = gpu.get("driver") or "unknown"
        lines.append(
            ("GPU", f"{gpu.get('name')}, capability {gpu.get('capability')}, {memory}, driver {driver}")
        )
    if host:
        cores = f"{host.get('cores')} cores, {_gigabytes(host.get('memory_bytes'))}"
        lines.append(("host", f"{host.get('system')}, {cores}, Python {host.get('python')}"))
    known = versions or {name: report.host[name] for name in ("jax", "jaxlib", "triton")}
    lines.append(("versions", ", ".join(f"{name} {version}" for name, version in known.items() if version)))
    lines.append(("commit", f"`{report.identity['commit']}`"))
    size = "quick" if report.identity["quick"] else "full"
    lines.append(("run", f"{size}, begun {report.started}, {report.seconds:.0f} s of steps"))
    if ceiling := fact(report, "environment", "ceiling"):
        rates = "copy {copy_gb_per_s:.0f} GB/s, matmul {matmul_gflop_per_s:.0f} GFLOP/s".format(**ceiling)
        lines.append(("ceilings", f"{rates} in {ceiling['dtype']}"))
    return lines


def step_line(name: str, result: Result | None) -> str:
    """A line of the table of steps."""
    if result is None:
        return f"| {name} | SKIPPED | | not asked for |"
    time = f"{result.seconds:.0f} s" if result.ran else ""
    time = f"({time})" if time and result.beside else time
    said = result.reason or "; ".join(filter(None, (_said(each) for each in result.ran)))
    return f"| {name} | {_bold(result.status)} | {time} | {_cell(said)} |"


def together(report: Report) -> str:
    """What the brackets around a time mean."""
    shared = {
        each for name, result in report.results.items() if result.beside for each in (name, *result.beside)
    }
    if not shared:
        return ""
    names = ", ".join(name for name in report.results if name in shared)
    return (
        f"A time in brackets: the step shared the machine with others ({names}). What it says of speed is "
        "too slow.\n"
    )


def failures(report: Report, folder: pathlib.Path) -> str:
    """What failed, with the end of its log."""
    parts = ["## What failed\n"] if report.failed else []
    for name in report.failed:
        result = report.results[name]
        parts.append(f"**{name}**: {_cell(result.reason)}\n")
        for each in result.ran:
            if each.problems:
                parts.append(f"The end of `{each.log}`:\n\n```text\n{log_end(folder / each.log)}\n```\n")
    return "\n".join(parts)


def ratios(found: Sequence[comparison.Pair]) -> str:
    """A line on all rows, and a table of those that have a committed one."""
    if not found:
        return "No step measured a time."
    cells = []
    for pair in found:
        if pair.committed is not None and pair.ratio is not None:
            here, there = (comparison.milliseconds(row) for row in (pair.row, pair.committed))
            when = f"{pair.committed.device}, `{pair.committed.commit}`"
            cells.append([*measured(pair.row), f"{here:.4g}", f"{there:.4g}", f"**{pair.ratio:.2f}**", when])
    head = ["measurement", "implementation", "mode", "T", "ms here", "ms there", "here / there", "there"]
    return "\n".join([comparison.summary(found), "", *_table(head, cells)])


def measured(row: AnyRow) -> list[str]:
    """What a row is of, in a few words."""
    what = getattr(row, "operation", None) or getattr(row, "strategy", None) or row.benchmark
    if attention := getattr(row, "attention", None):
        what = f"{what}, {attention}"
    if (distribution := getattr(row, "distribution", None)) and row.benchmark != "decode":
        what = f"{what}, {distribution}"
    implementation = getattr(row, "implementation", None) or "-"
    return [what, implementation, getattr(row, "mode", None) or "-", f"{row.length}"]


def refusals(report: Report) -> str:
    """What could not run here: combinations of the benchmarks, cases of parity, skipped tests, steps."""
    doctor = fact(report, "environment", "doctor")
    lines = ["* What `nsa_jax.choose` refuses here stands under *environment*."] if doctor else []
    for name, result in report.results.items():
        if result.status == "SKIPPED":
            lines.append(f"* {name}: {result.reason}")
        for each in result.ran:
            told = [*each.facts.get("refused", []), *_pairs(each.facts.get("skipped"))]
            told += _pairs(each.facts.get("reasons"), "skipped {1} times: {0}")
            lines += [f"* {name}: {line}" for line in told[:MOST_REFUSED]]
            if len(told) > MOST_REFUSED:
                lines.append(f"* {name}: {len(told) - MOST_REFUSED} more in `{each.log}`")
    return "\n".join(lines) or "Nothing that was asked for."


def details(step: Step, result: Result, folder: pathlib.Path, rows: Sequence[AnyRow]) -> str:
    """The section of a step: its question, its commands, its tables and figures."""
    commands = "\n".join(each.command for each in result.ran)
    parts = [f"## {step.name}\n", f"{step.question}\n", f"```bash\n{commands}\n```\n"]
    if (doctor := _log_of(result, "nsa_jax.doctor")) is not None:
        parts.append(f"```text\n{without_json(folder / doctor.log)}\n```\n")
    if (compared := folder / step.name / "rows.jsonl").exists() and step.name in ("parity", "ranges"):
        parts.append(errors(compared))
    for run in dict.fromkeys(row.run_id for row in rows):
        parts.append(tables.markdown([row for row in rows if row.run_id == run]) + "\n")
    if (summary := _log_of(result, "benchmarks.decode_summary")) is not None:
        parts.append(f"```text\n{without_json(folder / summary.log)}\n```\n")
    figures = sorted(path for end in ("png", "svg") for path in (folder / step.name).rglob(f"*.{end}"))
    parts += [f"![{path.stem}]({path.relative_to(folder).as_posix()})\n" for path in figures]
    return "\n".join(parts)


def errors(path: pathlib.Path) -> str:
    """The largest error of each quantity over all cases, and the largest mean error, by dtype."""
    found: dict[str, dict[str, list[Facts]]] = {}
    for row in _lines(path):
        found.setdefault(row["quantity"], {}).setdefault(row["dtype"], []).append(row)
    dtypes = list(dict.fromkeys(dtype for by_dtype in found.values() for dtype in by_dtype))
    head = [
        "quantity",
        *(f"{dtype}: {what}" for dtype in dtypes for what in ("mean", "largest", "of budget")),
    ]
    cells = []
    for quantity, by_dtype in sorted(found.items()):
        words = [f"`{quantity}`"]
        for dtype in dtypes:
            rows = by_dtype.get(dtype, [])
            error, used = (_largest(row[name] for row in rows) for name in ("error", "used"))
            means = [row["mean"] for row in rows if row["mean"] is not None]  # counts have none
            mean = f"{_largest(means):.1e}" if means else "-"
            words += [mean, f"{error:.2g}", f"{100 * used:.0f} %"] if rows else ["-"] * 3
        cells.append(words)
    return "\n".join(_table(head, cells))


def rows_of(folder: pathlib.Path) -> list[AnyRow]:
    """The rows of the benchmarks of a step; those of parity are of another kind."""
    try:
        return records.read(folder / "rows.jsonl", cut_off=True)
    except InputError:
        return []


def fact(report: Report, step: str, name: str) -> Any:
    """What a program of a step found out, None if it did not."""
    result = report.results.get(step)
    return next((each.facts[name] for each in (result.ran if result else []) if name in each.facts), None)


def log_end(path: pathlib.Path) -> str:
    """The last lines of a log, without the line of JSON, which is long."""
    return "\n".join(without_json(path).splitlines()[-LOG_LINES:]) or "(empty)"


def without_json(path: pathlib.Path) -> str:
    """The text of a log."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "(gone)"
    return "\n".join(line.rstrip() for line in lines if not line.startswith("{")).strip("\n")


def counted(count: int, what: str) -> str:
    """A number of things: "1 row", "2 rows"."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def _said(each: Ran) -> str:
    """What a program that passed has to tell, in a few words."""
    facts = each.facts
    if "doctor" in facts:
        return f"{counted(len(facts['doctor'].get('checks', [])), 'check')} of operations"
    if "rows" in facts:
        refused = f", {len(facts['refused'])} refused" if "refused" in facts else ""
        return counted(facts["rows"], "row") + refused
    if "passed" in facts:
        return f"{facts['passed']} passed, {facts['failed']} failed, {facts['skipped']} skipped"
    if "quantities" in facts:
        return f"{facts['quantities']} quantities within their budgets"
    if "last_loss" in facts:
        return (
            f"{facts['steps']} steps, {facts['first_loss']:.2f} to {facts['last_loss']:.2f} bits a byte, "
            f"held out {facts['held_out']:.2f}, {facts['tokens_per_s']} tokens/s"
        )
    return ""


def _lines(path: pathlib.Path) -> Iterator[Facts]:
    """The rows of a JSONL file; a program that was killed may have left a part of one."""
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def _largest(values: Iterable[float | str]) -> float:
    """NaN and infinity are spelled as words."""
    numbers = [float(value) for value in values]
    return next((number for number in numbers if number != number), max(numbers, default=0.0))


def _log_of(result: Result, module: str) -> Ran | None:
    return next((each for each in result.ran if f" -m {module}" in each.command), None)


def _pairs(told: Mapping[str, Any] | int | None, form: str = "{0}: {1}") -> list[str]:
    return [form.format(name, value) for name, value in told.items()] if isinstance(told, Mapping) else []


def _table(head: Sequence[str], cells: Iterable[Sequence[str]]) -> list[str]:
    body = [head, ["---"] * len(head), *cells]
    return [*("| " + " | ".join(map(_cell, line)) + " |" for line in body), ""] if len(body) > 2 else []


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _bold(status: str) -> str:
    return f"**{status}**" if status in ("FAIL", "NOT RUN") else status


def _gigabytes(memory: int | None) -> str:
    return "unknown memory" if memory is None else f"{memory / 2**30:.0f} GiB"
