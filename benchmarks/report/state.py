"""What a report knows: `report.json`, written whole or not at all."""

import contextlib
import dataclasses
import json
import os
import pathlib
import tempfile
from typing import Any, Literal

from benchmarks.command_line import InputError
from benchmarks.report.places import without_places

type Status = Literal["PASS", "FAIL", "SKIPPED", "NOT RUN"]
FILE = "report.json"
FORMAT = 1


@dataclasses.dataclass(kw_only=True)
class Ran:
    """A program of a step. `status` is None where a limit ended it; `facts` are what its output says."""

    command: str
    log: str
    status: int | None
    seconds: float
    problems: list[str]
    facts: dict[str, Any]


@dataclasses.dataclass(kw_only=True)
class Result:
    """A step; `reason` is empty where it passed. The steps `beside` it ran at the same time."""

    name: str
    status: Status
    reason: str = ""
    seconds: float = 0.0
    ran: list[Ran] = dataclasses.field(default_factory=list)
    beside: list[str] = dataclasses.field(default_factory=list)

    @property
    def is_done(self) -> bool:
        """Whether `--resume` leaves it as it is."""
        return self.status == "PASS"


@dataclasses.dataclass(kw_only=True)
class Report:
    """A machine, a commit, and the steps by name; what `--resume` must find again stands in `identity`."""

    identity: dict[str, Any]
    host: dict[str, Any]
    started: str
    results: dict[str, Result] = dataclasses.field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Of all steps, in however many calls they ran; of those at the same time the longest counts."""
        longest: dict[frozenset[str], float] = {}
        for name, result in self.results.items():
            group = frozenset((name, *result.beside))
            longest[group] = max(result.seconds, longest.get(group, 0.0))
        return sum(longest.values())

    @property
    def failed(self) -> list[str]:
        """The steps that failed."""
        return [name for name, result in self.results.items() if result.status == "FAIL"]

    @property
    def passed(self) -> bool:
        """Whether something passed, nothing failed, and nothing is left to be run."""
        statuses = {result.status for result in self.results.values()}
        return "PASS" in statuses and statuses <= {"PASS", "SKIPPED"}

    def write(self, folder: pathlib.Path) -> None:
        """Writes `report.json`."""
        told = {"report": FORMAT, "passed": self.passed, "seconds": round(self.seconds, 1)}
        text = json.dumps(told | dataclasses.asdict(self), indent=1, ensure_ascii=False) + "\n"
        write_whole(folder / FILE, without_places(text, folder))


def read(folder: pathlib.Path) -> Report:
    """The report of a folder.

    Raises:
      InputError: there is none, or it cannot be read.
    """
    try:
        told = json.loads((folder / FILE).read_text(encoding="utf-8"))
        results = {
            name: Result(**result | {"ran": [Ran(**each) for each in result["ran"]]})
            for name, result in told["results"].items()
        }
        return Report(
            identity=dict(told["identity"]), host=dict(told["host"]), started=told["started"], results=results
        )  # fmt: skip
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(
            f"--resume must find a report, got {type(error).__name__} for {FILE} in {folder.name!r}. "
            "Start without --resume."
        ) from error


def write_whole(path: pathlib.Path, text: str) -> None:
    """Replaces a file at once: whoever reads it finds the old text or the new one, also when a disk is full.

    Raises:
      OSError: it cannot be written; the old one is still there.
    """
    number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)  # a temporary file is readable by its owner alone
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
