"""What the output of a program says beyond its exit status: problems in one line each, and facts.

A program that measured, compared or tested nothing has a problem, whatever its exit status.
"""

import collections
import json
import math
import pathlib
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from typing import Any

MOST_NAMED = 5  # problems of one program that are named, and reasons of skips
MOST_OF_A_LINE = 300

type Facts = dict[str, Any]
type Verdict = tuple[list[str], Facts]


def judge(arguments: Sequence[str], status: int, log: str) -> Verdict:
    """Problems and facts of a program that ended by itself, with `status`."""
    module = arguments[arguments.index("-m") + 1] if "-m" in arguments else ""
    said = [f"exit status {status}: {last_words(log)}"] if status else []
    told = last_json(log)
    try:
        if module in BY_FILES:
            problems, facts = BY_FILES[module](arguments)
        elif module not in BY_JSON:
            problems, facts = [], {}
        elif told:
            problems, facts = BY_JSON[module](told)
        else:
            problems, facts = ([] if said else ["its last line must be JSON, got none"]), {}
    except (LookupError, TypeError, ValueError, AttributeError, OSError, ElementTree.ParseError) as error:
        problems, facts = [f"its results cannot be read: {type(error).__name__}, {error}"], {}
    if refused := re.findall(r"^refused: (.+)$", log, re.MULTILINE):
        facts = facts | {"refused": refused}
    # What a program found out about its subject says more than its exit status.
    return (problems if told and problems else said + problems), facts


def last_json(log: str) -> Facts:
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


def named(problems: Sequence[str]) -> list[str]:
    """The first few, and how many more there are."""
    more = len(problems) - MOST_NAMED
    return [*problems[:MOST_NAMED], *([f"and {more} more"] if more > 0 else [])]


def _of_doctor(told: Facts) -> Verdict:
    wrong = told["problems"] or ([] if told["ok"] else ["the doctor is not content, and says not why"])
    return named(wrong), {"doctor": told}


def _of_roofline(told: Facts) -> Verdict:
    rates = [told["copy_gb_per_s"], told["matmul_gflop_per_s"]]
    good = all(math.isfinite(rate) and rate > 0 for rate in rates)
    return ([] if good else [f"rates must be above 0, got {rates}"]), {"ceiling": told}


def _of_parity(told: Facts) -> Verdict:
    missed = [
        f"{row['case']} {row['dtype']} {row['quantity']} is over its budget: error {row['error']} of "
        f"{row['budget']}, mean {row['mean']} of {row.get('mean_budget', 'any')}"
        for row in told["missed"]
    ]
    none = [] if told["quantities"] else ["a quantity must be compared, got none"]
    return named(missed) + none, {name: told[name] for name in ("quantities", "skipped", "device", "torch")}


def _of_benchmark(told: Facts) -> Verdict:
    red = [f"the gate is red: {what}" for what in told.get("red", [])]
    unmeasured = [f"not measured: {what}" for what in told.get("unmeasured", [])]
    problems = named(red + unmeasured) or ([] if told["rows"] else ["a row must be measured, got none"])
    return problems, {"rows": told["rows"]}


def _of_tests(arguments: Sequence[str]) -> Verdict:
    option = "--junitxml="
    path = next(word.removeprefix(option) for word in arguments if word.startswith(option))
    counts: collections.Counter[str] = collections.Counter()
    reasons: collections.Counter[str] = collections.Counter()
    failed = []
    for test in ElementTree.parse(path).iter("testcase"):
        outcomes = {child.tag: child.get("message") or "" for child in test}
        if bad := outcomes.keys() & {"failure", "error"}:
            counts["failed"] += 1
            why = (outcomes[min(bad)].splitlines() or [""])[0]
            failed.append(f"{test.get('name')} failed: {why}"[:MOST_OF_A_LINE])
        elif "skipped" in outcomes:
            counts["skipped"] += 1
            reasons[outcomes["skipped"] or "no reason"] += 1
        else:
            counts["passed"] += 1
    problems = named(failed)
    if not counts["passed"]:
        why = f" and {counts['skipped']} skipped: {'; '.join([*reasons][:MOST_NAMED])}" if reasons else ""
        problems.append(f"a test must pass, got none{why}")
    return problems, {name: counts[name] for name in ("passed", "failed", "skipped")} | {
        "reasons": dict(reasons)
    }


def _of_example(arguments: Sequence[str]) -> Verdict:
    folder = pathlib.Path(arguments[arguments.index("--output") + 1])
    curve, (row,) = _lines(folder / "curve.jsonl"), _lines(folder / "result.jsonl")
    first, last = (point["bits_per_byte"] for point in (curve[0], curve[-1]))
    fell = math.isfinite(last) and last < first
    facts = {
        "steps": row["steps"], "first_loss": first, "last_loss": last,
        "held_out": row["held_out_bits_per_byte"], "bigram": row["bigram_bits_per_byte"],
        "tokens_per_s": row["tokens_per_second"],
    }  # fmt: skip
    return ([] if fell else [f"the loss must fall, got {first:.3f} and at the end {last:.3f}"]), facts


def _lines(path: pathlib.Path) -> list[Facts]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


MEASURING = ("attention", "decode", "generate", "parallel", "training")
# Programs whose last line is JSON, and those that write their results to files.
BY_JSON: dict[str, Callable[[Facts], Verdict]] = {
    "nsa_jax.doctor": _of_doctor,
    "benchmarks.roofline": _of_roofline,
    "parity": _of_parity,
    **{f"benchmarks.{name}": _of_benchmark for name in MEASURING},
}
BY_FILES: dict[str, Callable[[Sequence[str]], Verdict]] = {
    "pytest": _of_tests,
    "examples.train_lm": _of_example,
}
