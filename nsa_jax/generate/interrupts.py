"""Ctrl-C, held back while a state is between two forms."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Lets Ctrl-C take effect at the end of the block. Only the main thread ever gets it.

    Python raises KeyboardInterrupt as soon as a call returns, also that of a program to which arrays were
    donated: its results, which take their place, would be lost.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[Any] = []
    signal.signal(signal.SIGINT, lambda *given: came.append(given))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])
