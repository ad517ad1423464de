"""Runs the steps, and writes the report again after each."""

import asyncio
import os
import pathlib
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence

from benchmarks.command_line import progress
from benchmarks.report import page, runner, verdicts
from benchmarks.report.host import Host
from benchmarks.report.state import Ran, Report, Result, without_places, write_whole
from benchmarks.report.steps import Plan, Step, spelled

NOT_STARTED_S = 1.0  # with less time left, a program is not started


class OutOfTime(Exception):
    """The time for the whole call is over."""


class Collector:
    """One call of the command: the report so far, and the time until it must end."""

    def __init__(
        self, report: Report, folder: pathlib.Path, steps: Mapping[str, Step], host: Host, quick: bool,
        within_s: float | None, variables: dict[str, str],
    ):  # fmt: skip
        self.report, self.folder, self.steps, self.host, self.quick = report, folder, steps, host, quick
        self.within_s, self.variables = within_s, variables
        self.begin, self.before_s = time.perf_counter(), report.seconds
        self.has_run = False
        self.unwritten: Exception | None = None

    def run(self, names: Sequence[str], required: Sequence[str] = ()) -> None:
        """Runs the steps `names`, of which those in `required` fail if they cannot run here.

        A step that does not fit into the time that is left makes room for smaller ones.

        Raises:
          KeyboardInterrupt: after Ctrl-C or SIGTERM, once every program has ended and the report is written.
        """
        for name in names:  # whatever ends this process, no page says that all is done
            self.report.results.setdefault(name, Result(status="NOT RUN", reason="not yet"))
        able = [name for name in names if not self._lacks(name, required)]
        self._write()
        before_this = signal.getsignal(signal.SIGTERM)
        try:
            asyncio.run(self._run(able))
        except asyncio.CancelledError:
            signal.default_int_handler(signal.SIGINT, None)  # raises KeyboardInterrupt
        finally:
            signal.signal(signal.SIGTERM, before_this)

    def _lacks(self, name: str, required: Sequence[str]) -> bool:
        """Whether a step cannot run here; notes why."""
        step = self.steps[name]
        if lack := step.lacks(self.host):
            progress(lack)
            fails = name in required or step.lacks_package()
            self.report.results[name] = Result(status="FAIL" if fails else "SKIPPED", reason=lack)
        return bool(lack)

    async def _run(self, names: Sequence[str]) -> None:
        # Whoever stops the command from outside gets what is there, as after Ctrl-C.
        this = asyncio.current_task()
        assert this is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
        # Those that may run beside one another begin together, with the first of them.
        beside = [name for name in names if self._plan(name).beside]
        groups = [beside if name in beside else [name] for name in names if name not in beside[1:]]
        for number, group in enumerate(groups, 1):
            progress(f"{number} of {len(groups)}: {', '.join(group)}")
            await asyncio.gather(*(self._run_step(name, group) for name in group))

    def _plan(self, name: str) -> Plan:
        return self.steps[name].plan(self.host, self.quick)

    async def _run_step(self, name: str, group: Sequence[str]) -> None:
        try:
            await self._try_step(name, group)
        except OutOfTime as reason:
            progress(f"no time for {name}: {reason}")
        finally:
            self._write()

    async def _try_step(self, name: str, group: Sequence[str]) -> None:
        plan, out = self._plan(name), self.folder / name
        progress(f"{name}, about {plan.expected_s:.0f} s, at most {plan.limit_s:.0f} s")
        self._check_time(_share_s(plan))
        ran = self._ran_before(name, plan)
        if not ran:
            shutil.rmtree(out, ignore_errors=True)  # of a run that failed
        result = Result(status="FAIL", ran=ran, beside=[other for other in group if other != name])
        reasons = []
        try:
            await self._run_commands(name, plan, ran)
        except OSError as error:
            reasons = [f"the step cannot write its files ({error.strerror})"]
        except (asyncio.CancelledError, OutOfTime) as stop:
            interrupted = isinstance(stop, asyncio.CancelledError)
            why = "interrupted" if interrupted else f"--within {self.within_s:g} s is over"
            result.status, result.reason = "NOT RUN", f"stopped: {why}"
            self.report.results[name] = result
            raise
        for leftover in self.steps[name].leftovers:
            shutil.rmtree(out / leftover, ignore_errors=True)
        reasons += [problem for each in ran for problem in each.problems]
        if missing := len(plan.commands) - len(ran):
            reasons.append(f"{missing} of its commands did not run")
        result.status, result.reason = "FAIL" if reasons else "PASS", "; ".join(reasons)
        self.report.results[name] = result
        progress(f"{result.status} {name}, {result.seconds:.0f} s{': ' * bool(reasons)}{result.reason}")

    def _ran_before(self, name: str, plan: Plan) -> list[Ran]:
        """The first programs of a step that was stopped between them: they need not run again."""
        before = self.report.results[name]
        done = [each.command for each in before.ran] == list(plan.commands[: len(before.ran)])
        return before.ran.copy() if before.status == "NOT RUN" and done else []

    async def _run_commands(self, name: str, plan: Plan, ran: list[Ran]) -> None:
        """Runs those that are not in `ran`, and adds them, until the time of the step is over."""
        out = self.folder / name
        out.mkdir(exist_ok=True)
        for number, command in list(enumerate(plan.commands, 1))[len(ran) :]:
            left_s = plan.limit_s - sum(each.seconds for each in ran)
            if left_s < NOT_STARTED_S:
                return
            self._check_time(_share_s(plan))
            sizes = {path: path.stat().st_size for path in out.glob("*.jsonl")}
            try:
                ran.append(await self._run_command(command, out, number, left_s))
            except (asyncio.CancelledError, OutOfTime):
                for path in out.glob("*.jsonl"):  # its rows come again when it does
                    os.truncate(path, sizes.get(path, 0))
                raise

    async def _run_command(self, command: str, out: pathlib.Path, number: int, limit_s: float) -> Ran:
        variables, arguments = spelled(command, out)
        title = arguments[arguments.index("-m") + 1] if "-m" in arguments else pathlib.Path(arguments[0]).name
        log = out / f"{number}_{title}.log"
        self.has_run = True
        status, seconds = await runner.run(
            [sys.executable if word == "python" else word for word in arguments[:1]] + arguments[1:],
            log, min(limit_s, self._left_s()), self.variables | variables,
            lambda seconds: progress(f"  {title}, {seconds:.0f} s: {verdicts.last_words(_text(log))}"),
        )  # fmt: skip
        if status is None:
            self._check_time(NOT_STARTED_S)
            verdict = verdicts.Verdict([f"timed out after {seconds:.0f} s"])
        else:
            verdict = verdicts.judge(arguments, status, _text(log))
        return Ran(
            command=command, log=log.relative_to(self.folder).as_posix(), status=status,
            seconds=round(seconds, 1), said=verdict.said, refused=[*verdict.refused],
            problems=[f"{title}: {without_places(problem, self.folder)}" for problem in verdict.problems],
        )  # fmt: skip

    def _left_s(self) -> float:
        end = float("inf") if self.within_s is None else self.begin + self.within_s
        return end - time.perf_counter()

    def _check_time(self, needed_s: float) -> None:
        """Raises OutOfTime if a program would not end in time; the first one may try in any case."""
        left_s = self._left_s()
        if left_s < (needed_s if self.has_run else NOT_STARTED_S):
            raise OutOfTime(
                f"--within must leave {needed_s:.0f} s for its next program, got {max(left_s, 0):.0f} s. "
                "Pass --resume to go on."
            )

    def _write(self) -> None:
        """Writes both files. Neither a full disk nor a page that cannot be made costs the steps to come."""
        self.report.seconds = round(self.before_s + time.perf_counter() - self.begin, 1)
        try:
            self.report.write(self.folder)
            write_whole(self.folder / page.FILE, page.render(self.report, self.folder, self.steps))
            self.unwritten = None
        except Exception as error:
            self.unwritten = error
            progress(f"the report could not be written ({error!r}); what was there before is whole")


def _share_s(plan: Plan) -> float:
    """About what a program of the plan takes."""
    return max(plan.expected_s / len(plan.commands), NOT_STARTED_S)


def _text(log: pathlib.Path) -> str:
    return log.read_text("utf-8", "replace")
