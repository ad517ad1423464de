"""Runs a program of this folder in a process of its own, in which the host has several devices."""

import os
import pathlib
import subprocess
import sys

TESTS = pathlib.Path(__file__).parent


def environment(devices: int) -> dict[str, str]:
    """This process's environment, with so many devices. Its flags of XLA, which compile fast, stay."""
    flags = os.environ.get("XLA_FLAGS", ""), f"--xla_force_host_platform_device_count={devices}"
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags).strip(), "PYTHONPATH": paths}


def run(program: str, *arguments: str, devices: int) -> str:
    """What the program printed. Fails with its last lines if it failed."""
    done = subprocess.run(
        [sys.executable, str(TESTS / program), *arguments],
        env=environment(devices),
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout
