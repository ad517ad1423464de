"""What the output of a program says beyond its exit status.

A program that measured, compared or tested nothing has a problem, whatever its exit status.
"""

import collections
import json
import math
import pathlib
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from typing import Any, NamedTuple

MOST_NAMED = 5  # problems of one program that are named, and reasons of skips
MOST_OF_A_LINE = 300


class Verdict(NamedTuple):
    """Problems in one line each, what a program has to tell, and what it refused or skipped."""

    problems: list[str]
    said: str = ""
    refused: Sequence[str] = ()


def judge(arguments: Sequence[str], status: int, log: str) -> Verdict:
    """The verdict on a program that ended by itself, with `status`."""
    module = arguments[arguments.index("-m") + 1] if "-m" in arguments else ""
    failed = [f"exit status {status}: {last_words(log)}"] if status else []
    told, verdict = last_json(log), Verdict([])
    try:
        if module == "pytest":
            verdict = _of_tests(arguments)
        elif module == "examples.train_lm":
            verdict = _of_example(arguments)
        elif module in BY_JSON and told:
            verdict = BY_JSON[module](told)
        elif module in BY_JSON and not failed:
            verdict = Verdict(["its last line must be JSON, got none"])
    except (LookupError, TypeError, ValueError, AttributeError, OSError, ElementTree.ParseError) as error:
        verdict = Verdict([f"its results cannot be read: {type(error).__name__}, {error}"])
    # What a program found out about its subject says more than its exit status.
    problems = verdict.problems if told and verdict.problems else failed + verdict.problems
    refused = [*verdict.refused, *re.findall(r"^refused: (.+)$", log, re.MULTILINE)]
    return verdict._replace(problems=problems, refused=refused)


def last_json(log: str) -> dict[str, Any]:
    """The last line that is a JSON object, which the commands of this repository end with; {} if none is."""
    for line in reversed(log.splitlines()):
        if line.startswith("{"):
            try:
                return dict(json.loads(line))
            except ValueError:
                continue
    return {}


def last_words(log: str) -> str:
    """The last line that is not empty, which holds the error of a program that failed."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1][:MOST_OF_A_LINE] if lines else "it said nothing"


def _named(problems: Sequence[str]) -> list[str]:
    """The first few, and how many more there are."""
    more = len(problems) - MOST_NAMED
    return [*problems[:MOST_NAMED], *([f"and {more} more"] if more > 0 else [])]


def _of_doctor(told: dict[str, Any]) -> Verdict:
    wrong = told["problems"] or ([] if told["ok"] else ["the doctor is not content, and says not why"])
    return Verdict(_named(wrong), f"{len(told.get('checks', []))} checks of operations")


def _of_roofline(told: dict[str, Any]) -> Verdict:
    rates = [told["copy_gb_per_s"], told["matmul_gflop_per_s"]]
    good = all(math.isfinite(rate) and rate > 0 for rate in rates)
    return Verdict([] if good else [f"rates must be above 0, got {rates}"])


def _of_parity(told: dict[str, Any]) -> Verdict:
    missed = [
        f"{row['case']} {row['dtype']} {row['quantity']} is over its budget: error {row['error']} of "
        f"{row['budget']}, mean {row['mean']} of {row.get('mean_budget', 'any')}"
        for row in told["missed"]
    ]
    none = [] if told["quantities"] else ["a quantity must be compared, got none"]
    skipped = [f"{name}: {why}" for name, why in told["skipped"].items()]
    return Verdict(_named(missed) + none, f"{told['quantities']} quantities within their budgets", skipped)


def _of_benchmark(told: dict[str, Any]) -> Verdict:
    wrong = [f"the gate is red: {what}" for what in told.get("red", [])]
    wrong += [f"not measured: {what}" for what in told.get("unmeasured", [])]
    none = [] if told["rows"] else ["a row must be measured, got none"]
    return Verdict(_named(wrong) or none, f"{told['rows']} rows")


def _of_tests(arguments: Sequence[str]) -> Verdict:
    option = "--junitxml="
    path = next(word.removeprefix(option) for word in arguments if word.startswith(option))
    passed, failed = 0, []
    reasons: collections.Counter[str] = collections.Counter()
    for test in ElementTree.parse(path).iter("testcase"):
        outcomes = {child.tag: child.get("message") or "" for child in test}
        if bad := outcomes.keys() & {"failure", "error"}:
            why = (outcomes[min(bad)].splitlines() or [""])[0]
            failed.append(f"{test.get('name')} failed: {why}"[:MOST_OF_A_LINE])
        elif "skipped" in outcomes:
            reasons[outcomes["skipped"] or "no reason"] += 1
        else:
            passed += 1
    problems, skipped = _named(failed), reasons.total()
    if not passed:
        why = f" and {skipped} skipped: {'; '.join([*reasons][:MOST_NAMED])}" if reasons else ""
        problems.append(f"a test must pass, got none{why}")
    told = [f"skipped {count} times: {reason}" for reason, count in reasons.items()]
    return Verdict(problems, f"{passed} passed, {len(failed)} failed, {skipped} skipped", told)


def _of_example(arguments: Sequence[str]) -> Verdict:
    folder = pathlib.Path(arguments[arguments.index("--output") + 1])
    curve, (row,) = (
        [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]
        for name in ("curve.jsonl", "result.jsonl")
    )
    first, last = (point["bits_per_byte"] for point in (curve[0], curve[-1]))
    fell = math.isfinite(last) and last < first
    said = (
        f"{row['steps']} steps, {first:.2f} to {last:.2f} bits a byte, held out "
        f"{row['held_out_bits_per_byte']:.2f}, {row['tokens_per_second']} tokens/s"
    )
    return Verdict([] if fell else [f"the loss must fall, got {first:.3f} and at the end {last:.3f}"], said)


# Programs whose last line is JSON.
BY_JSON = {
    "nsa_jax.doctor": _of_doctor,
    "benchmarks.roofline": _of_roofline,
    "parity": _of_parity,
    **dict.fromkeys(
        (f"benchmarks.{name}" for name in ("attention", "decode", "generate", "parallel", "training")),
        _of_benchmark,
    ),
}
