"""The steps of `steps.toml`: what each asks of a machine, what it runs there, and what it needs."""

import dataclasses
import importlib.util
import pathlib
import shlex
import tomllib
from collections.abc import Mapping
from typing import Any

from benchmarks.records import ROOT
from benchmarks.report.host import Host

FILE = pathlib.Path(__file__).with_name("steps.toml")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Commands, the seconds that they may take together, and about how many they do.

    Plans that say `beside` run at the same time; no time of theirs is compared with other machines.
    """

    limit_s: float
    expected_s: float
    commands: tuple[str, ...]
    beside: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A question about a machine; `steps.toml` says what the fields mean.

    `plans` are keyed by `"cpu"` or `"gpu"`, and `"quick"` or `"full"`.
    """

    name: str
    question: str
    plans: Mapping[tuple[str, str], Plan]
    needs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    devices: int = 1
    leftovers: tuple[str, ...] = ()

    def plan(self, host: Host, quick: bool) -> Plan:
        """What it runs on this machine."""
        return self.plans["gpu" if host.platform == "gpu" else "cpu", "quick" if quick else "full"]

    def lacks(self, host: Host) -> str | None:
        """Why it cannot run on this machine, and what to do; None if it can."""
        if reason := self.lacks_package():
            return reason
        if host.count < self.devices:
            seen = f"{host.count} ({host.device})"
            return f"{self.name} needs {self.devices} devices, got {seen}. Skip it on this machine."
        return None

    def lacks_package(self) -> str | None:
        """Which package is missing, and how to install it; None if all are there."""
        for module, extra in self.needs.items():
            try:
                found = importlib.util.find_spec(module) is not None
            except ModuleNotFoundError:  # not even the package around it is there
                found = False
            if not found:
                return (
                    f'{self.name} needs {module}, got no such module. Install it: pip install ".[{extra}]".'
                )
        return None


def load(path: pathlib.Path = FILE) -> dict[str, Step]:
    """The steps by name, in the order in which they run."""
    return {name: _step(name, told) for name, told in tomllib.loads(path.read_text("utf-8")).items()}


def _step(name: str, told: dict[str, Any]) -> Step:
    plans = {
        (place, size): Plan(**plan | {"commands": tuple(" ".join(text.split()) for text in plan["commands"])})
        for place in ("cpu", "gpu")
        for size, plan in told.pop(place).items()
    }
    return Step(name=name, plans=plans, **told)


def spelled(command: str, out: pathlib.Path) -> tuple[dict[str, str], list[str]]:
    """The variables in front of a command, and its words, with `$OUT` and `*` replaced as a shell does."""
    words = shlex.split(command)
    variables: dict[str, str] = {}
    while "=" in words[0]:
        name, _, variables[name] = words.pop(0).partition("=")
    arguments: list[str] = []
    for word in words:
        files = (
            sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(word)) if "*" in word else [word]
        )
        arguments += [file.replace("$OUT", str(out)) for file in files]
    return variables, arguments
