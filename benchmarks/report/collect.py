"""Runs the steps, and writes the report again after each."""

import asyncio
import contextlib
import os
import pathlib
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence

from benchmarks.command_line import progress
from benchmarks.records import ROOT
from benchmarks.report import page, runner, state, verdicts
from benchmarks.report.host import Host
from benchmarks.report.places import without_places
from benchmarks.report.state import Ran, Report, Result, Status
from benchmarks.report.steps import Plan, Step, spelled

ROOM, ROOM_BYTES = ".room", 1 << 19
NOT_STARTED_S = 1.0  # with less time left, a program is not started


class OutOfTime(Exception):
    """The time for the whole call is over."""


class Collector:
    """One call of the command: the report so far, and the time until it must end."""

    def __init__(
        self, report: Report, folder: pathlib.Path, steps: Mapping[str, Step], host: Host, *, quick: bool,
        within_s: float | None = None, variables: Mapping[str, str] | None = None,
    ):  # fmt: skip
        self.report, self.folder, self.steps, self.host, self.quick = report, folder, steps, host, quick
        self.variables = dict(variables or {})
        self.within_s = within_s
        self.begin = time.perf_counter()
        self.required: Sequence[str] = ()
        self.running: dict[str, set[str]] = {}  # each with those that have run at the same time
        self.has_run = False
        self.unwritten: Exception | None = None

    def run(self, names: Sequence[str], required: Sequence[str] = ()) -> None:
        """Runs the steps `names`, of which those in `required` fail if they cannot run here.

        A step that does not fit into the time that is left makes room for smaller ones.

        Raises:
          KeyboardInterrupt: after Ctrl-C or SIGTERM, once every program has ended and the report is written.
        """
        for name in names:  # whatever ends this process, no page says that all is done
            self.report.results.setdefault(name, Result(name=name, status="NOT RUN", reason="not yet"))
        self.required = required
        with room_for_a_report(self.folder):
            self._write()
            before_this = signal.getsignal(signal.SIGTERM)
            try:
                asyncio.run(self._run(names))
            except asyncio.CancelledError:
                signal.default_int_handler(signal.SIGINT, None)  # raises KeyboardInterrupt
            finally:
                signal.signal(signal.SIGTERM, before_this)

    async def _run(self, names: Sequence[str]) -> None:
        # Whoever stops the command from outside gets what is there, as after Ctrl-C.
        this = asyncio.current_task()
        assert this is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
        numbers = {name: f"step {number} of {len(names)}" for number, name in enumerate(names, 1)}
        groups = self._groups(names)
        for begun, group in enumerate(groups):
            left_s = sum(self._expected_s(each) for each in groups[begun:])
            elapsed_s = time.perf_counter() - self.begin
            times = f"{elapsed_s:.0f} s elapsed, about {left_s:.0f} s left"
            await asyncio.gather(*(self._run_step(name, numbers[name], times) for name in group))

    def _groups(self, names: Sequence[str]) -> list[list[str]]:
        """The steps in their order; those that may run beside one another begin together, with the first."""
        beside = [name for name in names if self._plan(name).beside and not self.steps[name].lacks(self.host)]
        alone = [[name] for name in names if name not in beside[1:]]
        return [beside if group == beside[:1] else group for group in alone]

    def _plan(self, name: str) -> Plan:
        return self.steps[name].plan(self.host, self.quick)

    def _expected_s(self, group: Sequence[str]) -> float:
        can_run = [name for name in group if not self.steps[name].lacks(self.host)]
        return max((self._plan(name).expected_s for name in can_run), default=0.0)

    async def _run_step(self, name: str, number: str, times: str) -> None:
        try:
            await self._try_step(name, number, times)
        except OutOfTime as reason:
            progress(f"{number}: no time for {name}: {reason}")
        finally:
            self._write()

    async def _try_step(self, name: str, number: str, times: str) -> None:
        step = self.steps[name]
        if lack := step.lacks(self.host):
            progress(f"{number}: {lack}")
            fails = name in self.required or step.lacks_package()
            status: Status = "FAIL" if fails else "SKIPPED"
            self.report.results[name] = Result(name=name, status=status, reason=lack)
            return
        plan = self._plan(name)
        progress(f"{number}: {name}, about {plan.expected_s:.0f} s, at most {plan.limit_s:.0f} s; {times}")
        self._check_time(_share_s(plan))
        ran = self._ran_before(name, plan)
        if not ran:
            shutil.rmtree(self.folder / name, ignore_errors=True)  # of a run that failed
        reasons = []
        beside = self._began(name)
        try:
            await self._run_commands(step, plan, ran)
        except OSError as error:
            reasons = [f"the step cannot write its files ({error.strerror})"]
        except (asyncio.CancelledError, OutOfTime) as stop:
            interrupted = isinstance(stop, asyncio.CancelledError)
            why = "interrupted" if interrupted else f"--within {self.within_s:g} s is over"
            self.report.results[name] = result_of(name, "NOT RUN", [f"stopped: {why}"], ran, beside)
            raise
        finally:
            del self.running[name]
        for leftover in step.leftovers:
            shutil.rmtree(self.folder / name / leftover, ignore_errors=True)
        reasons += [problem for each in ran for problem in each.problems]
        if missing := len(plan.commands) - len(ran):
            reasons.append(f"{missing} of its commands did not run")
        if reasons and shutil.disk_usage(self.folder).free < ROOM_BYTES:
            reasons.append("the disk is full")  # a program cannot write that into its log
        result = result_of(name, "FAIL" if reasons else "PASS", reasons, ran, beside)
        self.report.results[name] = result
        progress(f"{result.status} {name}, {result.seconds:.0f} s{': ' * bool(reasons)}{result.reason}")

    def _began(self, name: str) -> set[str]:
        """The set of steps that run at the same time as this one; it grows while this one runs."""
        for others in self.running.values():
            others.add(name)
        self.running[name] = set(self.running)
        return self.running[name]

    def _ran_before(self, name: str, plan: Plan) -> list[Ran]:
        """The first programs of a step that was stopped between them: they need not run again."""
        before = self.report.results.get(name)
        if before is None or before.status != "NOT RUN" or any(each.problems for each in before.ran):
            return []
        same = [each.command for each in before.ran] == list(plan.commands[: len(before.ran)])
        return before.ran.copy() if same else []

    async def _run_commands(self, step: Step, plan: Plan, ran: list[Ran]) -> None:
        """Runs those that are not in `ran`, and adds them, until the time of the step is over."""
        out = self.folder / step.name
        out.mkdir(exist_ok=True)
        for number, command in list(enumerate(plan.commands, 1))[len(ran) :]:
            left_s = plan.limit_s - sum(each.seconds for each in ran)
            if left_s < NOT_STARTED_S:
                return
            self._check_time(_share_s(plan))
            sizes = {path: path.stat().st_size for path in out.glob("*.jsonl")}
            try:
                ran.append(await self._run_command(step.name, command, out, number, left_s))
            except (asyncio.CancelledError, OutOfTime):
                for path in out.glob("*.jsonl"):  # its rows come again when it does
                    os.truncate(path, sizes.get(path, 0))
                raise

    async def _run_command(
        self, step: str, command: str, out: pathlib.Path, number: int, limit_s: float
    ) -> Ran:
        variables, arguments = spelled(command, out)
        log = out / f"{number}_{_title(arguments)}.log"
        self.has_run = True
        ended = await runner.run(
            [sys.executable if word == "python" else word for word in arguments[:1]] + arguments[1:],
            log=log, limit_s=min(limit_s, self._left_s()), folder=ROOT,
            environment=self.variables | variables,
            beat=lambda seconds: progress(f"  {step}: {_title(arguments)}, {seconds:.0f} s: {_said(log)}"),
        )  # fmt: skip
        if ended.status is None:
            self._check_time(NOT_STARTED_S)
            verdict: verdicts.Verdict = ([f"timed out after {ended.seconds:.0f} s"], {})
        else:
            verdict = verdicts.judge(arguments, ended.status, log.read_text("utf-8", "replace"))
        problems = [f"{_title(arguments)}: {without_places(problem, self.folder)}" for problem in verdict[0]]
        return Ran(
            command=command, log=log.relative_to(self.folder).as_posix(), status=ended.status,
            seconds=round(ended.seconds, 1), problems=problems, facts=verdict[1],
        )  # fmt: skip

    def _left_s(self) -> float:
        if self.within_s is None:
            return float("inf")
        return self.begin + self.within_s - time.perf_counter()

    def _check_time(self, needed_s: float) -> None:
        """Raises OutOfTime if a program would not end in time; the first one may try in any case."""
        left_s = self._left_s()
        if left_s < (needed_s if self.has_run else NOT_STARTED_S):
            raise OutOfTime(
                f"--within must leave {needed_s:.0f} s for its next program, got {max(left_s, 0):.0f} s. "
                "Pass --resume to go on."
            )

    def _write(self) -> None:
        """Writes both files. A disk that is full stops no step: what the next one frees may do."""
        try:
            try:
                self._write_both()
            except OSError:
                give_up_room(self.folder)
                self._write_both()
            self.unwritten = None
        except OSError as error:
            self.unwritten = error
            progress(f"the report could not be written ({error.strerror}); what was there before is whole")
        except Exception as error:  # a page that cannot be made must not cost the steps that are to come
            self.unwritten = error
            progress(f"{page.FILE} could not be made, {state.FILE} is there: {traceback.format_exc()}")

    def _write_both(self) -> None:
        self.report.write(self.folder)
        page.write(self.report, self.folder, self.steps)


@contextlib.contextmanager
def room_for_a_report(folder: pathlib.Path) -> Iterator[None]:
    """Keeps some of the disk meanwhile, so that a report can still say that the disk is full."""
    try:
        with contextlib.suppress(OSError):
            (folder / ROOM).write_bytes(bytes(ROOM_BYTES))
        yield
    finally:
        give_up_room(folder)


def give_up_room(folder: pathlib.Path) -> None:
    """Frees what was kept."""
    (folder / ROOM).unlink(missing_ok=True)


def _share_s(plan: Plan) -> float:
    """About what a program of the plan takes."""
    return max(plan.expected_s / len(plan.commands), NOT_STARTED_S)


def result_of(
    name: str, status: Status, reasons: Sequence[str], ran: list[Ran], beside: Iterable[str]
) -> Result:
    """The result of a step whose programs ran, at the same time as the steps `beside` it."""
    seconds = round(sum(each.seconds for each in ran), 1)
    return Result(
        name=name, status=status, reason="; ".join(reasons), seconds=seconds, ran=ran, beside=sorted(beside)
    )


def _title(arguments: Sequence[str]) -> str:
    """The module that a program runs, or the program."""
    return arguments[arguments.index("-m") + 1] if "-m" in arguments else pathlib.Path(arguments[0]).name


def _said(log: pathlib.Path) -> str:
    try:
        return verdicts.last_words(log.read_text("utf-8", "replace"))
    except OSError:
        return "nothing yet"
