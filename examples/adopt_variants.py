"""Variants of one model beside each other: each goes through `nsa_jax.adopt` and adds its rows to a file.

    python -m examples.adopt_variants SOURCE --text FILES... --output RUNS --results FILE --variants n8 n32

All other options are those of that command, for all variants alike: `--distil-steps 0 --sparse-steps 0`
measures models that are converted and not trained. Each variant has its own folder in RUNS; the same command
goes on where it was stopped, and adds no row twice.
"""

import json
import pathlib
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from nsa_jax.adopt import __main__ as adopt
from nsa_jax.adopt import findings
from nsa_jax.adopt.command_line import Parser, complain
from nsa_jax.adopt.text import FILES

PROGRAM = "examples.adopt_variants"
VARIANTS = {
    "n8": ["--n=8"],
    "n16": ["--n=16"],
    "n32": ["--n=32"],
    "windows": ["--attention", *["nsa", "nsa", "window"] * 10],  # of the 30 layers of SmolLM2-135M
    "importance": ["--selector=importance", "--branches", "cmp", "slc", "win", "--block=64"],
    "both": ["--selector=indexer", "--branches", "cmp", "slc", "win", "--block=64"],
}
SETTINGS = ("source", "selector", "branches", "attention", "block", "n", "w", "length", "selection_target")
STAGES = findings.MODELS.keys() - {"dense", "converted"}


def main(arguments: list[str] | None = None) -> int:
    """Runs the variants one after the other, and returns the exit code of the first that does not succeed."""
    parser = Parser(
        prog=f"python -m {PROGRAM}", description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False,
        epilog="All other options: python -m nsa_jax.adopt --help",
    )  # fmt: skip
    add, path = parser.add_argument, pathlib.Path
    told = "folder with a run of each variant, new or to go on with; no default"
    add("--output", type=path, required=True, metavar="RUNS", help=told)
    told = "JSONL file that the rows are added to; no default"
    add("--results", type=path, required=True, metavar="FILE", help=told)
    add("--variants", choices=VARIANTS, nargs="+", default=[*VARIANTS], help="which; default: all of them")
    options, same = parser.parse_known_args(arguments)
    try:
        options.results.open("a").close()  # said at once, not after hours
    except OSError as error:
        told = f"{str(options.results)!r} ({error.strerror})"
        return complain(f"--results must name a file that can be written, got {told}. Name another.", PROGRAM)
    for name in options.variants:
        folder = options.output / name
        _share_text(options.output, folder)
        if code := adopt.main([*same, *VARIANTS[name], f"--output={folder}"]):
            return code
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        known = options.results.read_text(encoding="utf-8").splitlines()
        lines = [json.dumps(dict(variant=name) | row) for row in rows_of(report)]
        with options.results.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines if line not in known)
    return 0


def rows_of(report: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each model that a run measured, of its `report.json`."""
    settings, measured, stages = (report[name] for name in ("settings", "measured", "stages"))
    same = {name: settings[name] for name in SETTINGS if name in settings}
    same |= {name: report[name] for name in ("text", "device", "versions")}
    needles = findings.all_needles(measured)
    losses = findings.losses(measured)[1]
    for name, found in losses.items():
        row: dict[str, Any] = dict(kind=findings.MODELS[name], loss=found.all, agreement=found.agreement)
        row["loss_over_dense"] = found.all - losses["dense"].all
        if name in STAGES:
            row["trained_tokens"] = stages["dense" if name == "dense_trained" else name]["tokens"]
        if name in needles:
            quarters = needles[name].merged(4)
            row |= dict(needles=int(quarters.found.sum()), needles_asked=quarters.asked * quarters.found.size)
            row["by_quarter"] = quarters.found.sum(0).tolist()
        if recall := measured.get(name, {}).get("recall"):
            row |= {what: float(np.mean(recall[what])) for what in ("best_free", "mass")}
        yield row | same


def _share_text(runs: pathlib.Path, folder: pathlib.Path) -> None:
    """Copies what another run tokenised; `adopt` takes it if its text is the same."""
    others = [path.parent for path in sorted(runs.glob(f"*/{FILES[-1]}"))]
    if others and not folder.exists():
        folder.mkdir()
        for name in FILES:
            shutil.copy(others[0] / name, folder)


if __name__ == "__main__":
    sys.exit(main())
