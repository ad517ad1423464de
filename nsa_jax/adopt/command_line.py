"""What a command says of bad input, one line and exit code 2; and the numbers that it reads."""

import argparse
import math
import re
import sys
from typing import NoReturn

PROGRAM = "nsa_jax.adopt"
BAD_INPUT = 2


class InputError(ValueError):
    """Bad input, with the message `<rule>, got <values>. <what to do>.`; the command exits with code 2."""


# What messages of the library tell a user of Python, and the same for one of the command.
_IN_OPTIONS = {
    r"\bPass ignore=\('(.+?)',\)": r"Pass --ignore \1",
    r'\bPass attention="nsa", or one for each layer': "Pass --attention nsa, or a kind for each layer",
    r"\bPass an IndexerConfig\.": "Pass --selector importance --branches cmp slc win.",
    r'\bPass selector=IndexerConfig\(\), or add "cmp"': "Pass --selector indexer, or --branches with cmp",
    r"\bBuild DenseAttention with .*": "Pass --branches with slc.",
    r'\bselector="indexer"': "--selector indexer",
    r"^(attention|branches)\b": r"--\1",
    r"\brope_base\b": "--rope-base",
    r"\bcompression_block_size\b": "--l",
    r"\bcompression_stride\b": "--d",
    r"\bselection_block_size\b": "--block",
    r"\bnum_selected_blocks\b": "--n",
    r"\bwindow_size\b": "--w",
}


def in_options(error: Exception) -> str:
    """What the library says, to a user of the command."""
    message = str(error)
    for pattern, told in _IN_OPTIONS.items():
        message = re.sub(pattern, told, message)
    return message


class Parser(argparse.ArgumentParser):
    """Reports wrong options in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Ends the program with code 2."""
        if ", got " not in message:
            message = f"the options must be as --help says, got the error {message!r}. Run it with --help"
        self.exit(BAD_INPUT, f"{self.prog.removeprefix('python -m ')}: {message.rstrip('.')}.\n")


def complain(reason: Exception | str, program: str = PROGRAM) -> int:
    """Prints the reason in one line and returns the exit code for bad input."""
    print(f"{program}: {' '.join(str(reason).split())}", file=sys.stderr)
    return BAD_INPUT


def positive(text: str) -> int:
    """Reads a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text}. Pass another.")
    return int(text)


def count(text: str) -> int:
    """Reads a whole number of at least 0."""
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"must be a whole number below 2**32, got {text}. Pass another.")
    return int(text)


def share(text: str) -> float:
    """Reads a number between 0 and 1."""
    return _number(text, 1.0, "between 0 and 1")


def up_to_1(text: str) -> float:
    """Reads a number above 0 and up to 1."""
    return _number(text, math.nextafter(1, 2), "above 0 and up to 1")


def rate(text: str) -> float:
    """Reads a finite number above 0."""
    return _number(text, math.inf, "above 0")


def weight(text: str) -> float:
    """Reads a finite number of at least 0."""
    return 0.0 if text in ("0", "0.0") else _number(text, math.inf, "of at least 0")


def _number(text: str, below: float, told: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < below:
        raise argparse.ArgumentTypeError(f"must be a number {told}, got {text}. Pass another.")
    return value
