"""What the commands of this clone share: one line for bad input, for a missing package and for progress."""

import argparse
import contextlib
import functools
import math
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

BAD_INPUT, INTERRUPTED = 2, 130
# What sizes mean that several benchmarks have.
MEANINGS = {
    "batch": "sequences",
    "heads": "query heads",
    "kv-heads": "KV heads; must divide --heads",
    "key-dim": "dimension of queries and keys",
    "value-dim": "dimension of values",
    "head-dim": "dimension of queries, keys and values",
    "layers": "decoder layers",
    "model-dim": "width of the residual stream",
    "vocab": "size of the vocabulary",
}


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


def add_dtype(parser: argparse.ArgumentParser, default: str, of: str) -> None:
    """Adds `--dtype`; `of` says what has it."""
    dtypes = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=dtypes, default=default, help=f"{of}; default: {default}")


def measuring_parser(
    program: str, description: str, *, dtype: tuple[str, str], sizes: Mapping[str, int],
    own_sizes: Mapping[str, tuple[int | None, str]],
    choices: Mapping[str, tuple[Sequence[str], Sequence[str] | str, str]], lengths: Sequence[int] = (),
) -> Parser:  # fmt: skip
    """The options that the benchmarks share; read them with `parse_sizes`.

    Args:
      program: the module.
      description: of `--help`.
      dtype: the default of `--dtype`, and what has it.
      sizes: defaults of sizes with one of the `MEANINGS`, whole numbers of at least 1.
      own_sizes: defaults and meanings of others; the meaning says a default that is None.
      choices: allowed words, default and meaning of options that take one of them, or several.
      lengths: the default of `--lengths`; without, the program adds its own.
    """
    parser = Parser(prog=f"python -m {program}", description=description)
    if lengths:
        told = f"tokens of a sequence, or in the cache; default: {' '.join(map(str, lengths))}"
        parser.add_argument("--lengths", nargs="+", type=positive, default=lengths, metavar="T", help=told)
    for name, (words, chosen, meaning) in choices.items():
        one = isinstance(chosen, str)
        told, nargs = f"{meaning}; default: {chosen if one else ' '.join(chosen)}", None if one else "+"
        parser.add_argument(f"--{name}", nargs=nargs, choices=words, default=chosen, help=told)
    add_dtype(parser, *dtype)
    meant = {name: (size, MEANINGS[name]) for name, size in sizes.items()}
    for name, (size, meaning) in (meant | dict(own_sizes)).items():
        told = meaning if size is None else f"{meaning}; default: {size}"
        parser.add_argument(f"--{name}", type=positive, default=size, help=told)
    told = "seconds of samples for each timing, at least 3 samples; default: 5"
    parser.add_argument("--budget-s", type=positive_seconds, default=5.0, help=told)
    parser.add_argument("--output", type=pathlib.Path, help="JSONL file to append rows to; default: none")
    return parser


def parse_sizes(parser: Parser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads options of `measuring_parser`.

    Raises:
      InputError: KV heads do not serve equally many query heads, or the output cannot be written.
    """
    options = parser.parse_args(argv)
    if options.heads % options.kv_heads:
        raise InputError(
            f"--kv-heads must divide --heads, got {options.kv_heads} and {options.heads}. Choose a divisor."
        )
    check_writable(options.output, "--output")
    return options


def positive(text: str) -> int:
    """Reads a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text}. Pass another.")
    return int(text)


def positive_seconds(text: str) -> float:
    """Reads a finite number above 0."""
    value = math.nan
    with contextlib.suppress(ValueError):
        value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text}. Pass another.")
    return value


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
