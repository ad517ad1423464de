"""The machine: its operating system, memory and GPUs."""

import os
import platform
import shutil
import subprocess
from typing import Any

import jax

QUERY = "name,compute_cap,memory.total,driver_version,power.limit"


def host() -> dict[str, Any]:
    """Operating system, CPU cores that this process may use, memory in bytes and Python."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = None
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "system": platform.platform(),
        "cores": cores,
        "memory_bytes": memory,
        "python": platform.python_version(),
    }


def gpus() -> list[dict[str, Any]]:
    """NVIDIA GPUs, whether JAX sees them or not, by `nvidia-smi`; none where it is missing or finds none.

    Returns:
      For each its `name`, `capability` ("9.0"), `memory_bytes`, `driver` and `power_limit_w`.

    Raises:
      RuntimeError: `nvidia-smi` is there and does not work.
    """
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    done = subprocess.run(
        [command, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"],
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    said = (done.stdout + done.stderr).strip()
    if "No devices" in said:
        return []
    if done.returncode:
        raise RuntimeError(f"nvidia-smi must list the GPUs, got {said!r}. Install or restart the driver.")
    found = []
    for line in done.stdout.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != len(QUERY.split(",")):
            raise RuntimeError(f"nvidia-smi must list the GPUs, got {said!r}. Install or restart the driver.")
        name, capability, mebibytes, driver, watts = parts
        found.append(
            {
                "name": name,
                "capability": capability,
                "memory_bytes": int(mebibytes) * 2**20 if mebibytes.isdecimal() else None,  # or [N/A]
                "driver": driver,
                "power_limit_w": float(watts) if watts.replace(".", "", 1).isdecimal() else None,
            }
        )
    return found


def gpus_of_jax() -> list[dict[str, Any]]:
    """The NVIDIA GPUs that JAX sees, as `gpus` describes them, as far as JAX knows.

    Raises:
      RuntimeError: JAX cannot start the platform that it is told to use.
    """
    devices = [x for x in jax.local_devices() if x.platform == "gpu" and "NVIDIA" in x.device_kind.upper()]
    return [
        {
            "name": device.device_kind,
            "capability": device.compute_capability,
            "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
            "driver": None,
            "power_limit_w": None,
        }
        for device in devices
    ]
