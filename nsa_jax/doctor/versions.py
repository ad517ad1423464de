"""The packages that are installed, and whether they fit together and to the GPU."""

import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import nsa_jax
from nsa_jax.kernels.triton.support import OLDEST_CAPABILITY, VERSIONS

PLUGIN = ("jax-cuda13-plugin", "jax-cuda13-pjrt")
PACKAGES = ("nsa_jax", "jax", "jaxlib", *PLUGIN, "jax-triton", "triton", "flax", "numpy", "torch")
# Those whose requirements must hold. PyTorch is not among them: it asks for one version of Triton, and runs
# with others.
ASK = ("nsa_jax", "jax", "jaxlib", "flax", "jax-triton")
OF_JAXLIB = "JAX does not load the plugin of another jaxlib"
OLDEST_DRIVER = 580  # the first that runs programs of CUDA 13


def installed() -> dict[str, str | None]:
    """Versions by package; None for those that are missing."""
    found = {name: _version(name) for name in PACKAGES}
    return found | {"nsa_jax": nsa_jax.__version__}  # metadata may be old, or missing in a clone


def problems(
    found: Mapping[str, str | None], gpus: Sequence[Mapping[str, Any]], seen: Sequence[Mapping[str, Any]]
) -> list[str]:
    """What does not fit, with what to do about it.

    A machine without a GPU needs no driver and no kernels. Nor does one on which JAX is told to leave the
    GPUs alone, by `JAX_PLATFORMS=cpu`.

    Args:
      found: versions by package, see `installed`.
      gpus: those of the machine, see `machine.gpus`.
      seen: those that JAX sees.
    """
    if not _may_use_gpus():
        gpus = []
    wrong = dict[str, str]()  # by package: a version that breaks two rules is one problem
    for package, bounds, why in _rules(found, bool(gpus)):
        version = found[package]
        if version is None or not SpecifierSet(bounds).contains(version, prereleases=True):
            text = f"{package} must be {bounds or 'installed'} ({why}), got {version or 'none installed'}. "
            wrong.setdefault(package, text + f"Run {install_command(bool(gpus))}.")
    lines = [*_driver(gpus), *wrong.values()]
    if lines or not gpus:
        return lines
    if not seen:
        return [
            f"JAX must see the {gpus[0]['name']}, got none. Run JAX_PLATFORMS=cuda python -c "
            f"'import jax; jax.devices()', which says why, then {install_command(True)}."
        ]
    if all(_capability(gpu) >= OLDEST_CAPABILITY for gpu in seen):
        # The packages are there and of the right version. Does jax-triton find what it needs in them?
        reason = nsa_jax.unsupported_reason("gated_sum", "triton", platform="cuda")
        return [reason] if reason else []
    return []


def install_command(gpu: bool) -> str:
    """The command that brings all packages in the right versions, for a machine with a GPU or without."""
    package = "nsa_jax" if _version("nsa_jax") else "."  # a clone that is not installed
    command = f'pip install "{package}[cuda13]"' if gpu else f"pip install {package}"
    return command if package == "nsa_jax" else f"{command} in the root of the clone"


def _rules(found: Mapping[str, str | None], gpu: bool) -> Iterator[tuple[str, str, str]]:
    """`(package, bounds of its version, why)`."""
    if gpu:
        for package, (bounds, why) in VERSIONS.items():
            yield package, bounds, why
        for package in PLUGIN:
            yield package, f"=={found['jaxlib']}", OF_JAXLIB
    for asking in ASK:
        for line in _requirements(asking):
            asked = Requirement(line)
            if asked.name in found and (asked.marker is None or asked.marker.evaluate({"extra": ""})):
                yield asked.name, str(asked.specifier), f"{asking} {found[asking]} needs it"


def _driver(gpus: Sequence[Mapping[str, Any]]) -> list[str]:
    drivers = sorted({gpu["driver"] for gpu in gpus if gpu["driver"]})
    return [
        f"the NVIDIA driver must be {OLDEST_DRIVER} or newer, for CUDA 13, got {driver}. Install a newer one."
        for driver in drivers
        if (major := driver.partition(".")[0]).isdecimal() and int(major) < OLDEST_DRIVER  # or [N/A]
    ]


def platforms_of_user() -> str | None:
    """What `JAX_PLATFORMS` says; None or empty where it says nothing."""
    return jax.config.jax_platforms  # type: ignore[attr-defined, no-any-return]  # made at run time


def _may_use_gpus() -> bool:
    told = platforms_of_user()
    return not told or bool({"cuda", "gpu"} & set(told.split(",")))


def _capability(gpu: Mapping[str, Any]) -> tuple[int, int]:
    major, minor = gpu["capability"].split(".")
    return int(major), int(minor)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _requirements(package: str) -> list[str]:
    try:
        return importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []
