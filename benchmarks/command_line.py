"""What the commands of this clone share: one line for bad input, for a missing package and for progress."""

import argparse
import functools
import math
import pathlib
import sys
from collections.abc import Callable
from typing import NoReturn

BAD_INPUT, INTERRUPTED = 2, 130


class InputError(ValueError):
    """Bad input, with the message `<rule>, got <values>. <what to do>.`; the command exits with code 2."""


def command[**P](program: str) -> Callable[[Callable[P, int]], Callable[P, int]]:
    """Decorates a `main`: an `InputError` becomes one line on stderr and exit code 2, Ctrl-C code 130."""

    def decorate(main: Callable[P, int]) -> Callable[P, int]:
        @functools.wraps(main)
        def run(*args: P.args, **kwargs: P.kwargs) -> int:
            try:
                return main(*args, **kwargs)
            except InputError as error:
                return complain(program, error)
            except KeyboardInterrupt:
                print(f"\n{program}: interrupted", file=sys.stderr)
                return INTERRUPTED

        return run

    return decorate


def complain(program: str, reason: Exception | str) -> int:
    """Prints the reason in one line and returns the exit code for bad input."""
    print(f"{program}: {' '.join(str(reason).split())}", file=sys.stderr)
    return BAD_INPUT


def missing_package(program: str, error: ImportError, extra: str) -> int:
    """Says how to install the packages of an optional extra; returns the exit code."""
    return complain(
        program,
        f'this command needs the packages of the extra "{extra}", got {error}. '
        f'Install them in the root of the clone: pip install ".[{extra}]".',
    )


def progress(text: str) -> None:
    """Says on stderr what begins now, so that stdout holds results alone."""
    print(text, file=sys.stderr, flush=True)


class Parser(argparse.ArgumentParser):
    """Reports wrong options in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Ends the program with code 2."""
        if ", got " not in message:
            message = f"the options must be as --help says, got the error {message!r}. Run it with --help"
        self.exit(BAD_INPUT, f"{self.prog.removeprefix('python -m ')}: {message.rstrip('.')}.\n")


def add_sizes(parser: argparse.ArgumentParser, *sizes: tuple[str, int, str]) -> None:
    """Adds an option for each `(name, default, meaning)`: whole numbers of at least 1."""
    for name, default, meaning in sizes:
        parser.add_argument(
            f"--{name}", type=positive, default=default, help=f"{meaning}; default: {default}"
        )


def add_dtype(parser: argparse.ArgumentParser, default: str, of: str) -> None:
    """Adds `--dtype`; `of` says what has it."""
    dtypes = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=dtypes, default=default, help=f"{of}; default: {default}")


def add_sampling(parser: argparse.ArgumentParser, of: str = "row") -> None:
    """Adds `--budget-s`, the time for each `of`, and `--output`."""
    parser.add_argument(
        "--budget-s",
        type=positive_seconds,
        default=5.0,
        help=f"seconds of samples for each {of}, at least 3 samples; default: %(default)s",
    )
    parser.add_argument("--output", type=pathlib.Path, help="JSONL file to append rows to; default: none")


def positive(text: str) -> int:
    """Reads a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text}. Pass another.")
    return int(text)


def positive_seconds(text: str) -> float:
    """Reads a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text}. Pass another.")
    return value


def check_heads(heads: int, kv_heads: int) -> None:
    """Raises InputError unless every KV head serves the same number of query heads."""
    if heads % kv_heads:
        raise InputError(
            f"--kv-heads must divide --heads, got {kv_heads} and {heads}. Choose a number that divides it."
        )


def check_writable(path: pathlib.Path | None, option: str) -> None:
    """Raises InputError unless the file can be written; leaves no new file behind."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        path.open("a").close()
        if new:
            path.unlink()
    except OSError as error:
        raise InputError(
            f"{option} must name a file that can be written, got {str(path)!r} ({error.strerror}). "
            "Choose another path."
        ) from error
