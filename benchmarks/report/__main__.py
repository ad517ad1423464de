"""Runs the steps of a report on this machine and writes `report.md`: does it work here, and how fast is it?

`python -m benchmarks.report` runs everything, `--quick` a part of it that takes minutes. All files are in
`OUTPUT/COMMIT/`. The exit status is 0 if no step failed, 1 if one did or had no turn, 2 for bad input and 130
after Ctrl-C. `--resume` runs what is missing or failed.
"""

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks import records
from benchmarks.command_line import InputError, Parser, command, positive_seconds, progress
from benchmarks.report import host, page, state, steps
from benchmarks.report.collect import Collector
from benchmarks.report.state import Report
from benchmarks.report.steps import Step

# What a report judges, beside what the benchmarks measure.
CODE = (*records.MEASURED_CODE, "benchmarks/*.toml", "parity", "nsa_torch_ref", "tests/*.py")


def parse(argv: Sequence[str] | None, known: Sequence[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = Parser(prog="python -m benchmarks.report", description=__doc__.split("\n\n")[0])
    options: dict[str, dict[str, Any]] = {
        "output": dict(
            type=pathlib.Path, default=pathlib.Path("runs/report"),
            help="folder for the folders of commits, default: %(default)s",
        ),
        "steps": dict(
            nargs="+", metavar="STEP",
            help=f"steps to run, of {' '.join(known)}; one that cannot run here fails; default: all that can",
        ),
        "skip": dict(nargs="+", default=[], metavar="STEP", help="steps to leave out; default: none"),
        "quick": dict(
            action="store_true",
            help="small sizes: minutes instead of 40 on a GPU and two hours on 2 CPU cores; default: full",
        ),
        "resume": dict(
            action="store_true", help="run what is missing or failed in --output; default: a new report"
        ),
        "within": dict(
            type=positive_seconds, metavar="SECONDS",
            help="stop after this time, so that --resume can go on; default: when all steps are done",
        ),
        "commit": dict(
            metavar="ID", help="name of the code, for a copy without git; default: what git says"
        ),
    }  # fmt: skip
    for name, settings in options.items():
        parser.add_argument(f"--{name}", **settings)
    chosen = parser.parse_args(argv)
    if unknown := [name for name in [*(chosen.steps or []), *chosen.skip] if name not in known]:
        raise InputError(f"steps must be of {', '.join(known)}, got {', '.join(unknown)}. Choose from these.")
    chosen.names = [name for name in dict.fromkeys(chosen.steps or known) if name not in chosen.skip]
    if not chosen.names:
        raise InputError("--skip must leave a step, got all that would run. Skip fewer.")
    if chosen.commit is not None and not re.fullmatch(r"[0-9A-Za-z][0-9A-Za-z._-]{0,63}", chosen.commit):
        raise InputError(
            f"--commit must be letters, digits, '.', '_' and '-', got {chosen.commit!r}. Pass a short hash."
        )
    return chosen


@command("benchmarks.report")
def main(argv: Sequence[str] | None = None, table: Mapping[str, Step] | None = None) -> int:
    """Runs the command; `table` other than that of `steps.toml` is for tests."""
    table = steps.load() if table is None else table
    options = parse(argv, list(table))
    commit = options.commit or commit_of_tree()
    folder = pathlib.Path(os.path.abspath(options.output)) / commit
    with accessible(folder):
        if not options.resume:
            make(folder)
        report = find(folder) if options.resume else None
        here = host.look()
        identity = {"commit": commit, "quick": options.quick, "device": here.device}
        if report is None:
            now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
            report = Report(identity=identity, host=vars(here).copy(), started=now)
        check_same(report, identity)
        report.write(folder)
    done = [name for name in options.names if name in report.named("PASS")]
    if done:
        progress(f"passed before: {', '.join(done)}")
    variables = {} if options.commit is None else {records.COMMIT_VARIABLE: options.commit}
    collector = Collector(
        report, folder, table, here, quick=options.quick, within_s=options.within, variables=variables
    )
    collector.run([name for name in options.names if name not in done], required=options.steps or ())
    told = {name: result.status for name, result in report.results.items()}
    print(f"{page.verdict(report)}\n{folder / page.FILE}")
    if collector.unwritten is not None:
        print(page.render(report, folder, table))
    print(json.dumps({"report": str(folder), "passed": report.passed, "steps": told}))
    return 0 if report.passed and collector.unwritten is None else 1


def commit_of_tree() -> str:
    """The commit, `-dirty` if the tree differs from it; says so where there is no git."""
    commit = records.commit(CODE)
    if commit == records.UNKNOWN_COMMIT:
        progress("git says nothing about this folder: the report is of unknown-commit; --commit ID names it")
        return "unknown-commit"
    return commit


def make(folder: pathlib.Path) -> None:
    """Makes the folder of a new report.

    Raises:
      InputError: it holds a report.
      OSError: it cannot be made or written.
    """
    if (folder / state.FILE).exists():
        raise InputError(
            f"--output must not hold a report of this commit, got one in {str(folder)!r}. "
            "Pass --resume to go on with it, or name another folder."
        )
    folder.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def accessible(folder: pathlib.Path) -> Iterator[None]:
    """Says in one line that a folder cannot be made, read or written."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"--output must be a folder that can be made and written, got {str(folder)!r} "
            f"({error.strerror}). Name another."
        ) from error


def find(folder: pathlib.Path) -> Report:
    """The report to go on with.

    Raises:
      InputError: there is none of this commit.
    """
    if not (folder / state.FILE).exists():
        others = sorted(path.parent.name for path in folder.parent.glob(f"*/{state.FILE}")) or "nothing"
        raise InputError(
            f"--resume must find a report of commit {folder.name} in --output, got {others}. "
            "Start without --resume, or check out that commit."
        )
    return state.read(folder)


def check_same(report: Report, wanted: Mapping[str, Any]) -> None:
    """Raises InputError where a report is of another commit, size or device."""
    if differing := {name: value for name, value in wanted.items() if report.identity.get(name) != value}:
        has = {name: report.identity.get(name) for name in differing}
        raise InputError(
            f"--resume must go on with the same commit, device and --quick, got {differing} for a report of "
            f"{has}. Name another --output."
        )


if __name__ == "__main__":
    sys.exit(main())
