"""`python -m nsa_jax.doctor`: whether nsa_jax works on this machine, what runs here, and why.

Looks at the machine and its packages, asks `nsa_jax.choose` for a few shapes, and compares outputs and
gradients of every implementation that can run here with the reference. The last line is JSON.
Exit code 0: all is well; 1: something that should work does not; 2: the options are wrong; 130: Ctrl-C.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from nsa_jax.dispatch import default_platform
from nsa_jax.doctor import machine, text, versions
from nsa_jax.doctor.checks import checks
from nsa_jax.doctor.choices import DTYPES, choices

INTERRUPTED = 130  # what a shell says of a command that Ctrl-C ended
REPORT = "Report it with this output"  # what to do about an exception of our own

type Say = Callable[[Iterable[str]], None]


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    options = parse(arguments)
    # JAX would otherwise take most of the GPU's memory, which others may be using; read when it starts.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    began = time.perf_counter()
    found: dict[str, Any] = {"doctor": 1, "ok": False, "problems": []}
    found |= {"host": {}, "gpus": [], "versions": {}, "choices": [], "checks": []}

    def say(lines: Iterable[str]) -> None:
        for line in lines:
            if not options.json:
                print(line, flush=True)

    interrupted = False
    try:
        examine(options, found, say)
    except BaseException as error:  # the JSON line comes last whatever happens, also after Ctrl-C
        interrupted = isinstance(error, KeyboardInterrupt)
        found["problems"].append(_raised("the examination", error, "Run it again" if interrupted else REPORT))
    found["problems"] = [" ".join(line.split()) for line in found["problems"]]
    found |= {"ok": not found["problems"], "seconds": round(time.perf_counter() - began, 1)}
    say(text.problems(found["problems"]))
    print(json.dumps(found, allow_nan=False), flush=True)
    return INTERRUPTED if interrupted else 0 if found["ok"] else 1


def examine(options: argparse.Namespace, found: dict[str, Any], say: Say) -> None:
    """Fills `found` part by part. A part that raises is a problem, and the others go on."""
    problems = found["problems"]
    gpus, seen, platform = [], [], None
    found["host"], found["versions"] = machine.host(), versions.installed()
    with _part(problems, "the list of GPUs"):
        gpus = machine.gpus()
    told = versions.platforms_of_user()
    start = ("the start of JAX", REPORT)
    if told:
        start = (f"the start of JAX on {told!r}", "Name other platforms in JAX_PLATFORMS, or leave it out")
    with _part(problems, *start):
        platform = default_platform()
        seen = machine.gpus_of_jax()
    found["gpus"] = gpus or seen
    with _part(problems, "the check of versions"):
        problems += versions.problems(found["versions"], found["gpus"], seen)
    say(text.machine(found, platform))
    if platform is None:
        return
    with _part(problems, "nsa_jax.choose"):
        outcomes = choices()
        found["choices"] = [{**each._asdict(), "refused": dict(each.refused)} for each in outcomes]
        say(text.choices(outcomes))
    with _part(problems, "the check of results"):
        dtypes = options.dtype or (["bfloat16"] if seen else ["float32"])
        say([f"\nOutputs and gradients against the reference, on random operands, in {', '.join(dtypes)}:"])
        for run in checks(dtypes, seed=options.seed):
            found["checks"] += run.plain()
            say([str(run)])
            problems += filter(None, [run.problem()])


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Options; what may be repeated is a list."""
    parser = _Parser(prog="python -m nsa_jax.doctor", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    parser.add_argument(
        "--dtype", choices=DTYPES, action="append",
        help="of the operands that are checked; may be repeated; default: bfloat16 on a GPU, else float32",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=int, default=0, help="of the random operands, at least 0; default: %(default)s"
    )
    options = parser.parse_args(arguments)
    if options.seed < 0:
        parser.error(f"--seed must be at least 0, got {options.seed}. Pass another")
    return options


class _Parser(argparse.ArgumentParser):
    """Reports wrong options in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        if ", got " not in message:
            message = f"the options must be as --help says, got the error {message!r}. Run it with --help"
        self.exit(2, f"{self.prog.removeprefix('python -m ')}: {message}.\n")


@contextlib.contextmanager
def _part(problems: list[str], what: str, remedy: str = REPORT) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        problems.append(_raised(what, error, remedy))


def _raised(what: str, error: BaseException, remedy: str = REPORT) -> str:
    got = f"{type(error).__name__}: {error}".rstrip(": .")
    return f"{what} must go to its end, got {got}. {remedy}."


if __name__ == "__main__":
    try:
        code = main()
    except BrokenPipeError:  # whoever reads the output has enough, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)
