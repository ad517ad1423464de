"""`report.md`: what a reader sees, made of `report.json` and the files of the steps by `template.md`."""

import collections
import contextlib
import itertools
import json
import pathlib
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks import records, tables
from benchmarks.command_line import InputError
from benchmarks.records import Row
from benchmarks.report import comparison
from benchmarks.report.state import Report, Result, without_places
from benchmarks.report.steps import Step

TEMPLATE = pathlib.Path(__file__).with_name("template.md")
FILE = "report.md"
LOG_LINES = 15
MOST_REFUSED = 12
# What these print is on the page.
SHOWN = ("nsa_jax.doctor", "benchmarks.roofline", "benchmarks.decode.summary")


def render(report: Report, folder: pathlib.Path, steps: Mapping[str, Step]) -> str:
    """The page."""
    rows = {name: _rows_of(folder / name) for name in report.results}
    found = comparison.pairs(itertools.chain(*rows.values()), comparison.committed_rows())
    results = {name: report.results[name] for name in steps if name in report.results}
    page = string.Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=f"Report: {report.host['device']}",
        verdict=verdict(report),
        host="\n".join(f"| {name} | {value} |" for name, value in _about(report).items()),
        steps="\n".join(_step_line(name, report.results.get(name)) for name in steps),
        beside=_together(results),
        failures=_failures(report, folder),
        comparison=_ratios(found),
        refused=_refusals(results),
        details="\n".join(
            _details(steps[name], result, folder, rows[name])
            for name, result in results.items()
            if result.ran
        ),
    )
    return without_places(re.sub(r"\n{3,}", "\n\n", page).rstrip() + "\n", folder)


def verdict(report: Report) -> str:
    """The first line that a reader wants."""
    counts = collections.Counter(result.status for result in report.results.values())
    told = ", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "nothing ran yet"
    failed = report.named("FAIL")
    word = "PASS" if report.passed else "FAIL" if failed else "NOT FINISHED"
    return f"**{word}**: {told}." + (f" Failed: {', '.join(failed)}." if failed else "")


def _about(report: Report) -> dict[str, str]:
    """Device, versions, commit and run; the step `environment` says more."""
    host, size = report.host, "quick" if report.identity["quick"] else "full"
    versions = (f"{name} {host[name]}" for name in ("jax", "jaxlib", "triton") if host[name])
    return {
        "device": f"{host['device']} ({host['count']} seen by JAX)",
        "versions": ", ".join(versions),
        "commit": f"`{report.identity['commit']}`",
        "run": f"{size}, begun {report.started}, {report.seconds:.0f} s",
    }


def _step_line(name: str, result: Result | None) -> str:
    if result is None:
        return f"| {name} | SKIPPED | | not asked for |"
    time = f"{result.seconds:.0f} s" if result.ran else ""
    time = f"({time})" if time and result.beside else time
    said = result.reason or "; ".join(each.said for each in result.ran if each.said)
    status = f"**{result.status}**" if result.status in ("FAIL", "NOT RUN") else result.status
    return f"| {name} | {status} | {time} | {_cell(said)} |"


def _together(results: Mapping[str, Result]) -> str:
    """What the brackets around a time mean."""
    names = ", ".join(name for name, result in results.items() if result.beside)
    shared = f"A time in brackets: the step shared the machine with others ({names}). "
    return shared + "What it says of speed is too slow.\n" if names else ""


def _failures(report: Report, folder: pathlib.Path) -> str:
    """What failed, with the end of its log."""
    parts = ["## What failed\n"] if report.named("FAIL") else []
    for name in report.named("FAIL"):
        result = report.results[name]
        parts.append(f"**{name}**: {_cell(result.reason)}\n")
        for each in result.ran:
            if each.problems:
                end = "\n".join(_without_json(folder / each.log).splitlines()[-LOG_LINES:]) or "(empty)"
                parts.append(f"The end of `{each.log}`:\n\n```text\n{end}\n```\n")
    return "\n".join(parts)


def _ratios(found: Sequence[comparison.Pair]) -> str:
    """A line on all rows, and a table of those that have a committed one."""
    if not found:
        return "No step measured a time."
    cells = (
        _measured(row)
        | {
            "ms here": f"{comparison.milliseconds(row):.4g}",
            "ms there": f"{comparison.milliseconds(there):.4g}",
            "here / there": f"**{comparison.ratio(row, there):.2f}**",
            "there": f"{there.device}, `{there.commit}`",
        }
        for row, there in found
        if there is not None
    )
    return "\n".join([comparison.summary(found), "", *tables.table(cells)])


def _measured(row: Row) -> dict[str, str]:
    distribution = None if row.benchmark == "decode" else row.distribution
    what = (row.operation or row.strategy or row.benchmark, row.attention, distribution)
    return {
        "measurement": ", ".join(filter(None, what)),
        "implementation": row.implementation or "-",
        "mode": row.mode or "-",
        "T": f"{row.length}",
    }


def _refusals(results: Mapping[str, Result]) -> str:
    """What could not run here: combinations of the benchmarks, cases of parity, skipped tests, steps."""
    lines = []
    for name, result in results.items():
        if result.status == "SKIPPED":
            lines.append(f"* {name}: {result.reason}")
        for each in result.ran:
            lines += [f"* {name}: {line}" for line in each.refused[:MOST_REFUSED]]
            if len(each.refused) > MOST_REFUSED:
                lines.append(f"* {name}: {len(each.refused) - MOST_REFUSED} more in `{each.log}`")
    return "\n".join(lines) or "Nothing that was asked for."


def _details(step: Step, result: Result, folder: pathlib.Path, rows: Sequence[Row]) -> str:
    """The section of a step: its question, its commands, its tables and figures."""
    commands = "\n".join(each.command for each in result.ran)
    parts = [f"## {step.name}\n", f"{step.question}\n", f"```bash\n{commands}\n```\n"]
    if step.name in ("parity", "ranges"):
        parts.append(_errors(folder / step.name / "rows.jsonl"))
    for run in dict.fromkeys(row.run_id for row in rows):
        parts.append(tables.markdown([row for row in rows if row.run_id == run]) + "\n")
    for each in result.ran:
        if any(f" -m {module}" in each.command for module in SHOWN):
            parts.append(f"```text\n{_without_json(folder / each.log)}\n```\n")
    figures = sorted(path for end in ("png", "svg") for path in (folder / step.name).rglob(f"*.{end}"))
    parts += [f"![{path.stem}]({path.relative_to(folder).as_posix()})\n" for path in figures]
    return "\n".join(parts)


def _errors(path: pathlib.Path) -> str:
    """The largest error of each quantity over all cases, and the largest mean error, by dtype."""
    found: dict[str, dict[str, list[Any]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for row in _lines(path):
        found[row["quantity"]][row["dtype"]].append(row)
    dtypes = list(dict.fromkeys(dtype for by_dtype in found.values() for dtype in by_dtype))
    cells = []
    for quantity, by_dtype in sorted(found.items()):
        line = {"quantity": f"`{quantity}`"}
        for dtype in dtypes:
            for name, what, form in (
                ("mean", "mean", "{:.1e}"), ("error", "largest", "{:.2g}"), ("used", "of budget", "{:.0%}"),
            ):  # fmt: skip
                largest = _largest([row[name] for row in by_dtype[dtype]])
                line[f"{dtype}: {what}"] = "-" if largest is None else form.format(largest)
        cells.append(line)
    return "\n".join(tables.table(cells))


def _rows_of(folder: pathlib.Path) -> list[Row]:
    """The rows of the benchmarks of a step; those of parity are of another kind."""
    try:
        return records.read(folder / "rows.jsonl", cut_off=True)
    except InputError:
        return []


def _without_json(path: pathlib.Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "(gone)"
    return "\n".join(line.rstrip() for line in lines if not line.startswith("{")).strip("\n")


def _lines(path: pathlib.Path) -> Iterator[Any]:
    """The rows of a JSONL file; a program that was killed may have left a part of one, or none."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def _largest(values: Sequence[float | str | None]) -> float | None:
    """NaN and infinity are spelled as words; counts have no mean."""
    numbers = [float(value) for value in values if value is not None]
    return next((number for number in numbers if number != number), max(numbers, default=None))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
