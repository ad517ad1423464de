"""Runs the steps of a report on this machine and writes `report.md`: does it work here, and how fast is it?

`python -m benchmarks.report` runs everything, `--quick` a part of it that takes minutes. All files are in
`OUTPUT/COMMIT/`. The exit status is 0 if no step failed, 1 if one did or had no turn, 2 for bad input and 130
after Ctrl-C. `--resume` runs what is missing or failed.
"""

import argparse
import datetime
import json
import os
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence

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
    sizes = "small sizes: minutes instead of 40 on a GPU and two hours on 2 CPU cores"
    one = f"steps to run, of {' '.join(known)}; one that cannot run here fails"
    parser = Parser(prog="python -m benchmarks.report", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--output", type=pathlib.Path, default="runs/report", help="folder of folders, default: %(default)s")
    add("--steps", nargs="+", metavar="STEP", help=f"{one}; default: all that can")
    add("--skip", nargs="+", default=[], metavar="STEP", help="steps to leave out; default: none")
    add("--quick", action="store_true", help=f"{sizes}; default: full")
    add("--resume", action="store_true", help="run what is missing or failed; default: a new report")
    add("--within", type=positive_seconds, metavar="SECONDS", help="stop after this time; default: never")
    add("--commit", metavar="ID", help="name of the code, for a copy without git; default: what git says")
    options = parser.parse_args(argv)
    if unknown := [name for name in [*(options.steps or []), *options.skip] if name not in known]:
        raise InputError(f"steps must be of {', '.join(known)}, got {', '.join(unknown)}. Choose from these.")
    options.names = [name for name in dict.fromkeys(options.steps or known) if name not in options.skip]
    if not options.names:
        raise InputError("--skip must leave a step, got all that would run. Skip fewer.")
    if options.commit is not None and not re.fullmatch(r"[0-9A-Za-z][0-9A-Za-z._-]{0,63}", options.commit):
        raise InputError(
            f"--commit must be letters, digits, '.', '_' and '-', got {options.commit!r}. Pass a short hash."
        )
    return options


@command("benchmarks.report")
def main(argv: Sequence[str] | None = None, table: Mapping[str, Step] | None = None) -> int:
    """Runs the command; `table` other than that of `steps.toml` is for tests."""
    table = steps.load() if table is None else table
    options = parse(argv, list(table))
    folder = pathlib.Path(os.path.abspath(options.output)) / (options.commit or commit_of_tree())
    try:
        report, here = opened(folder, options)
    except OSError as error:
        raise InputError(
            f"--output must be a folder that can be made and written, got {str(folder)!r} "
            f"({error.strerror}). Name another."
        ) from error
    done = [name for name in options.names if name in report.named("PASS")]
    if done:
        progress(f"passed before: {', '.join(done)}")
    variables = {} if options.commit is None else {records.COMMIT_VARIABLE: options.commit}
    collector = Collector(report, folder, table, here, options.quick, options.within, variables)
    collector.run([name for name in options.names if name not in done], required=options.steps or ())
    print(f"{page.verdict(report)}\n{folder / page.FILE}")
    if collector.unwritten is not None:
        print(page.render(report, folder, table))
    told = {name: result.status for name, result in report.results.items()}
    print(json.dumps({"report": str(folder), "passed": report.passed, "steps": told}))
    return 0 if report.passed and collector.unwritten is None else 1


def commit_of_tree() -> str:
    """The commit, `-dirty` if the tree differs from it; says so where there is no git."""
    commit = records.commit(CODE)
    if commit != records.UNKNOWN_COMMIT:
        return commit
    progress("git says nothing about this folder: the report is of unknown-commit; --commit ID names it")
    return "unknown-commit"


def opened(folder: pathlib.Path, options: argparse.Namespace) -> tuple[Report, host.Host]:
    """A new report in the folder, or the one to go on with; and this machine.

    Raises:
      InputError: there is one already; or none to go on with, or one of another commit, size or device.
      OSError: the folder cannot be made, read or written.
    """
    exists = (folder / state.FILE).exists()
    if exists and not options.resume:
        raise InputError(
            f"--output must not hold a report of this commit, got one in {str(folder)!r}. "
            "Pass --resume to go on with it, or name another folder."
        )
    if options.resume and not exists:
        others = sorted(path.parent.name for path in folder.parent.glob(f"*/{state.FILE}")) or "nothing"
        raise InputError(
            f"--resume must find a report of commit {folder.name} in --output, got {others}. "
            "Start without --resume, or check out that commit."
        )
    folder.mkdir(parents=True, exist_ok=True)
    before = state.read(folder) if options.resume else None
    here = host.look()
    identity = {"commit": folder.name, "quick": options.quick, "device": here.device}
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    report = before or Report(identity=identity, host=vars(here).copy(), started=now)
    if differing := {name: value for name, value in identity.items() if report.identity.get(name) != value}:
        has = {name: report.identity.get(name) for name in differing}
        raise InputError(
            f"--resume must go on with the same commit, device and --quick, got {differing} for a report of "
            f"{has}. Name another --output."
        )
    report.write(folder)
    return report, here


if __name__ == "__main__":
    sys.exit(main())
