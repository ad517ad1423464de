"""What a person reads: lines of at most 100 columns."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nsa_jax.dispatch import OPERATIONS, PREFERENCE
from nsa_jax.doctor.checks import Check
from nsa_jax.doctor.choices import DTYPES, SIZES, Outcome

WIDTH = 100
GIBIBYTE = 2**30


def machine(
    host: Mapping[str, Any],
    gpus: Sequence[Mapping[str, Any]],
    versions: Mapping[str, str | None],
    platform: str,
) -> Iterator[str]:
    """The machine and its packages, and the platform that JAX takes."""
    memory = f", {host['memory_bytes'] / GIBIBYTE:.0f} GiB" if host["memory_bytes"] else ""
    yield _line(f"{host['system']}, {host['cores']} CPU cores{memory}, Python {host['python']}")
    for gpu in gpus:
        memory = f", {gpu['memory_bytes'] / GIBIBYTE:.0f} GiB" if gpu["memory_bytes"] else ""
        driver = f", driver {gpu['driver']}" if gpu["driver"] else ""
        power = f", at most {gpu['power_limit_w']:.0f} W" if gpu["power_limit_w"] else ""
        yield _line(f"{gpu['name']}, compute capability {gpu['capability']}{memory}{driver}{power}")
    yield _line(f"{'' if gpus else 'no NVIDIA GPU; '}JAX runs on: {platform}")
    yield _line(", ".join(f"{name} {version or 'missing'}" for name, version in versions.items()))


def choices(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """What runs here and what does not: one paragraph for each outcome."""
    yield f"\nWhat runs here: the first of {', '.join(PREFERENCE)} that is good for the call."
    for outcome in outcomes:
        of = (
            _all_or_named(outcome.operations, OPERATIONS, "operations"),
            _all_or_named(outcome.sizes, [str(sizes) for sizes in SIZES], "sizes"),
            _all_or_named(outcome.dtypes, DTYPES, "dtypes"),
        )
        line = f"  {outcome.implementation}: {'; '.join(of)}"
        rules = dict[str, list[str]]()
        for name, rule in outcome.refused:
            rules.setdefault(rule, []).append(name)
        for rule, names in rules.items():
            line += f". Not {' or '.join(names)}: {rule}"
        yield _line(line)
    yield _line(f"  Sizes asked for: {', '.join(str(sizes) for sizes in SIZES)}")


def checks_heading(dtypes: Sequence[str]) -> str:
    """Says what the lines of `check` are."""
    return _line(
        f"\nOutputs and gradients against the reference, on small random operands, in {', '.join(dtypes)}:"
    )


def check(checks: Sequence[Check]) -> str:
    """One operation by one implementation in one dtype."""
    worst = max(checks, key=lambda check: check.used)
    first = checks[0]
    verdict = "ok  " if all(check.ok for check in checks) else "FAIL"
    if worst.why:
        used = "raised an exception"
    else:
        used = f"{100 * worst.used:.0f} % of the budget ({worst.quantity})"
    what = f"{first.operation:<24} {first.implementation:<10} {first.dtype:<8}"
    return f"  {verdict} {what} {used:<36} {first.seconds:5.1f} s"


def problems(found: Sequence[str]) -> Iterator[str]:
    """What is wrong, and what to do."""
    if not found:
        yield "\nAll is well."
    else:
        yield f"\n{len(found)} problem{'s' if len(found) > 1 else ''}:"
        yield from (_line(f"  * {line}", indent="    ") for line in found)


def _all_or_named(names: Sequence[str], every: Sequence[str], what: str) -> str:
    return f"all {what}" if set(names) == set(every) else ", ".join(names)


def _line(text: str, indent: str = "    ") -> str:
    return textwrap.fill(
        text, WIDTH, subsequent_indent=indent, break_on_hyphens=False, replace_whitespace=False
    )
