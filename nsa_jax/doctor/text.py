"""What a person reads."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nsa_jax.dispatch import PREFERENCE
from nsa_jax.doctor.choices import Outcome


def machine(found: Mapping[str, Any], platform: str | None) -> Iterator[str]:
    """The machine and its packages, and the platform that JAX takes."""
    for thing in (found["host"], *found["gpus"]):
        told = {**thing, "memory": thing["memory_bytes"] and f"{thing['memory_bytes'] / 2**30:.0f} GiB"}
        yield ", ".join(f"{name} {value}" for name, value in told.items() if value and name != "memory_bytes")
    none = "" if found["gpus"] else "no NVIDIA GPU; "
    yield f"{none}JAX runs on: {platform or 'nothing, it does not start'}"
    yield ", ".join(f"{name} {version or 'missing'}" for name, version in found["versions"].items())


def choices(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """What runs here and what does not."""
    yield f"\nWhat runs here: the first of {', '.join(PREFERENCE)} that is good for the call."
    for outcome in outcomes:
        calls = outcome.operations, outcome.sizes, outcome.dtypes
        yield f"  {outcome.implementation}: {'; '.join(map(', '.join, calls))}"
        yield from (f"    not {name}: {rule}" for name, rule in outcome.refused)


def problems(found: Sequence[str]) -> Iterator[str]:
    """What is wrong, and what to do."""
    yield "\nProblems:" if found else "\nAll is well."
    yield from (f"  * {line}" for line in found)
