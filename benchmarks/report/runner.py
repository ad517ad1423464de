"""Runs a program in a process group of its own, with a log and a time limit, and leaves nothing behind."""

import asyncio
import contextlib
import os
import pathlib
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from benchmarks.records import ROOT

GRACE_S = 10.0  # between asking to end and killing: pytest and the benchmarks write what they have
BEAT_S = 20.0


async def run(
    arguments: Sequence[str], log: pathlib.Path, limit_s: float, variables: Mapping[str, str],
    beat: Callable[[float], None],
) -> tuple[int | None, float]:  # fmt: skip
    """Runs the program with all it says in `log`; calls `beat` every 20 s. Cancelling ends it.

    Returns:
      Its exit status, None where the time limit ended it; and its seconds.

    Raises:
      OSError: the log cannot be written, or the program cannot be started.
    """
    begin, status = time.perf_counter(), None
    # Unbuffered, so that a log shows how far a program came, and its streams in their order.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **variables}
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *arguments, cwd=ROOT, env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=file,
            stderr=asyncio.subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            while status is None and (left_s := begin + limit_s - time.perf_counter()) > 0:
                try:
                    status = await asyncio.wait_for(process.wait(), min(BEAT_S, left_s))
                except TimeoutError:
                    beat(time.perf_counter() - begin)
            return status, time.perf_counter() - begin
        finally:
            await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Asks the group of a program to end, and kills what is left of it, also children that outlived it."""
    try:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGINT)
            await asyncio.wait_for(process.wait(), GRACE_S)
    except (ProcessLookupError, TimeoutError):
        pass
    finally:  # also after a second Ctrl-C, which ends the waiting
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
