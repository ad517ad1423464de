"""What machine this is, as a process of its own sees it: one that looks must not hold the GPU's memory.

`python -m benchmarks.report.host` prints it in JSON.
"""

import dataclasses
import json
import os
import subprocess
import sys

import jax

from benchmarks import records
from benchmarks.command_line import InputError

TIMEOUT_S = 180  # the first look at a GPU may load a driver


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """A machine and the versions on it; `platform` is JAX's name of its devices."""

    device: str
    platform: str
    count: int
    jax: str
    jaxlib: str
    triton: str | None


def look() -> Host:
    """The machine that the steps will run on.

    Raises:
      InputError: JAX does not start there.
    """
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | os.environ
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.report.host"], capture_output=True, text=True, check=True,
            timeout=TIMEOUT_S, env=environment, cwd=records.ROOT,
        )  # fmt: skip
        return Host(**json.loads(done.stdout.splitlines()[-1]))
    except subprocess.CalledProcessError as error:
        said = (error.stderr.strip().splitlines() or ["nothing"])[-1]
    except (subprocess.TimeoutExpired, OSError, ValueError, IndexError, TypeError) as error:
        said = str(error)
    raise InputError(f"JAX must start on this machine, got {said.rstrip('.')}. Run python -m nsa_jax.doctor.")


def main() -> int:
    """Prints the fields of `Host`."""
    here = vars(records.environment()) | {"platform": jax.default_backend(), "count": jax.device_count()}
    print(json.dumps({field.name: here[field.name] for field in dataclasses.fields(Host)}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
