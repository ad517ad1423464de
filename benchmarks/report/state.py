"""What a report knows: `report.json`, written whole or not at all."""

import dataclasses
import json
import pathlib
import re
import sys
from typing import Any, Literal

from benchmarks.command_line import InputError
from benchmarks.records import ROOT

type Status = Literal["PASS", "FAIL", "SKIPPED", "NOT RUN"]
FILE = "report.json"


@dataclasses.dataclass(kw_only=True)
class Ran:
    """A program of a step: its problems in one line each, what it has to tell, and what it refused.

    `status` is None where a limit ended it.
    """

    command: str
    log: str
    status: int | None
    seconds: float
    problems: list[str]
    said: str = ""
    refused: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(kw_only=True)
class Result:
    """A step; `reason` is empty where it passed. The steps `beside` it ran at the same time."""

    status: Status
    reason: str = ""
    ran: list[Ran] = dataclasses.field(default_factory=list)
    beside: list[str] = dataclasses.field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Of its programs."""
        return sum(each.seconds for each in self.ran)


@dataclasses.dataclass(kw_only=True)
class Report:
    """A machine, a commit, and the steps by name; what `--resume` must find again stands in `identity`.

    `seconds` are those of all calls of the command.
    """

    identity: dict[str, Any]
    host: dict[str, Any]
    started: str
    seconds: float = 0.0
    results: dict[str, Result] = dataclasses.field(default_factory=dict)

    def named(self, *statuses: Status) -> list[str]:
        """The steps with one of these results."""
        return [name for name, result in self.results.items() if result.status in statuses]

    @property
    def passed(self) -> bool:
        """Whether something passed, nothing failed, and nothing is left to be run."""
        return bool(self.named("PASS")) and not self.named("FAIL", "NOT RUN")

    def write(self, folder: pathlib.Path) -> None:
        """Writes `report.json`."""
        told = {"passed": self.passed} | dataclasses.asdict(self)
        text = json.dumps(told, indent=1, ensure_ascii=False) + "\n"
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
            for name, result in told.pop("results").items()
        }
        del told["passed"]
        return Report(**told | {"identity": dict(told["identity"])}, results=results)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(
            f"--resume must find a report, got {type(error).__name__} for {FILE} in {folder.name!r}. "
            "Start without --resume."
        ) from error


def write_whole(path: pathlib.Path, text: str) -> None:
    """Replaces a file at once: whoever reads it finds the old text or the new one."""
    new = path.with_name(f".{path.name}")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def without_places(text: str, folder: pathlib.Path) -> str:
    """The text with paths from the folder of the report, the clone, Python's own or the home folder on."""
    names = {folder: "report", ROOT: ".", pathlib.Path(sys.prefix): "PYTHON"}
    names |= {pathlib.Path(sys.base_prefix): "PYTHON", pathlib.Path.home(): "~"}
    for path, name in names.items():
        if path.is_absolute() and path != pathlib.Path("/"):
            text = re.sub(rf"(?<![\w.-]){re.escape(str(path))}(?![\w-])", name, text)
    return text
