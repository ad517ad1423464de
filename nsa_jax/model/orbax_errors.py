"""What Orbax raises and prints when a read or write fails, as a few words."""

import contextlib
import dataclasses
import gc
import logging
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator

import jax

# These are about the machine and not about files, and are raised as they are.
OF_THE_MACHINE = (MemoryError, jax.errors.JaxRuntimeError)
# After one array could not be read or written, TensorStore still reports the others, to a closed event loop.
WAIT_FOR_OTHERS_S = 0.1
LONGEST = 400


@dataclasses.dataclass
class Failure:
    """Why a call failed, in a few words."""

    said: str


def attempt[T](call: Callable[[], T]) -> T | Failure:
    """Returns the result of `call`, or why it failed.

    If it fails nothing of it is printed, neither by other threads nor when its remains are collected. For
    that the error itself is not kept.
    """
    with _silence() as records:
        try:
            return call()
        except OF_THE_MACHINE:
            raise
        except Exception as error:
            failure = Failure(_in_words(error))
        _settle(records)
    return failure


def _settle(records: list[logging.LogRecord]) -> None:
    """Waits until nothing of a failed call is left that could print, and drops what it logged."""
    time.sleep(WAIT_FOR_OTHERS_S)
    gc.collect()
    while records:  # each holds an error, and this what is collected and logged next
        records.clear()
        gc.collect()


def _in_words(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if number := re.search(r"os_error_code='(\d+)'", str(error)):  # as TensorStore writes it
        return os.strerror(int(number[1]))
    text = " ".join(f"{type(error).__name__}: {error}".split()).partition(" [tensorstore_spec")[0]
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"


class _Held(logging.Filter):
    """Holds back the warnings and errors that Orbax logs, and those that asyncio logs in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        ours = record.thread == self.thread if record.name == "asyncio" else "orbax" in record.pathname
        if ours and record.levelno >= logging.WARNING:
            self.records.append(record)
            return False
        return True


@contextlib.contextmanager
def _silence() -> Iterator[list[logging.LogRecord]]:
    """Yields the list of what is held back; what is left there at the end is logged then."""
    held, hook = _Held(), sys.unraisablehook
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    for logger in loggers:
        logger.addFilter(held)
    sys.unraisablehook = lambda unraisable: None if _of_orbax(unraisable) else hook(unraisable)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            yield held.records
    finally:
        sys.unraisablehook = hook
        for logger in loggers:
            logger.removeFilter(held)
        for record in held.records:
            logging.getLogger(record.name).handle(record)


def _of_orbax(unraisable: "sys.UnraisableHookArgs") -> bool:
    coroutine = getattr(unraisable.object, "cr_code", None)
    closed = str(unraisable.exc_value) == "Event loop is closed"
    return closed or (coroutine is not None and "orbax" in coroutine.co_filename)
