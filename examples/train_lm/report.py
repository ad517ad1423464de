"""`python -m examples.train_lm.report`: makes finished runs part of the repository and of the README."""

import argparse
import pathlib
import sys
from typing import Any

from examples.train_lm import figures, results, run_folder
from examples.train_lm.errors import InputError
from examples.train_lm.results import Finished

IMAGES = pathlib.Path("docs/images")
LOSS, BLOCKS = IMAGES / "train_lm_loss.png", IMAGES / "train_lm_blocks.png"
BEGIN, END = "<!-- train_lm: begin -->", "<!-- train_lm: end -->"
EXCERPT = 400


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.train_lm.report")
    parser.add_argument(
        "folders",
        nargs="*",
        type=pathlib.Path,
        help="a finished NSA run and the dense run like it, to be committed",
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print the committed results as Markdown (default)"
    )
    parser.add_argument("--readme", type=pathlib.Path, help=f"put it between {BEGIN} and {END} of this file")
    options = parser.parse_args(arguments)
    try:
        if options.folders:
            publish(options.folders)
        text = markdown(both(results.committed()))
        if options.readme:
            run_folder.write(options.readme, inserted(options.readme.read_text(encoding="utf-8"), text))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0


def publish(folders: list[pathlib.Path], root: pathlib.Path = results.ROOT) -> None:
    """Replaces the committed records and pictures by those of two finished runs."""
    pair = both([run for folder in folders for run in results.in_folder(folder)])
    nsa_folder = next(f for f in folders for run in results.in_folder(f) if run.row["attention"] == "nsa")
    points = [{"run_id": run.row["run_id"], **point} for run in pair.values() for point in run.curve]
    run_folder.write_rows(root / results.RESULTS, [run.row for run in pair.values()])
    run_folder.write_rows(root / results.CURVES, points)
    run_folder.write(root / BLOCKS, (nsa_folder / "blocks.png").read_bytes())
    curves = {name: run.curve for name, run in pair.items()}
    figures.draw_losses(root / LOSS, curves, pair["nsa"].row["bigram_bits_per_byte"])


def markdown(pair: dict[str, Finished]) -> str:
    """Table, pictures and a text sample, for the README."""
    nsa, dense = pair["nsa"].row, pair["dense"].row
    rows = [
        ("held-out bits per byte", *(f"{run['held_out_bits_per_byte']:.3f}" for run in (nsa, dense))),
        ("against the byte bigram", *(_against(run, nsa["bigram_bits_per_byte"]) for run in (nsa, dense))),
        ("against dense", _against(nsa, dense["held_out_bits_per_byte"]), ""),
        ("parameters", *(f"{run['parameters'] / 1e6:.2f} M" for run in (nsa, dense))),
        ("tokens/s in training", *(f"{run['tokens_per_second']}" for run in (nsa, dense))),
        ("whole command", *(f"{run['seconds']:.0f} s" for run in (nsa, dense))),
    ]
    table = ["| | NSA | dense |", "|---|---|---|", *("| " + " | ".join(row) + " |" for row in rows)]
    sizes = nsa["nsa"]
    most = sizes["num_selected_blocks"] * sizes["selection_block_size"] + sizes["window_size"]
    devices = sorted({f"{run['device']}, jax {run['jax']}, commit {run['commit']}" for run in (nsa, dense)})
    sample = f"...{nsa['prompt'][-EXCERPT // 2 :]}[HERE]{nsa['sample'][:EXCERPT]}...".replace("```", "'''")
    return "\n".join(
        [
            f"{nsa['data']}: {nsa['training_bytes']} bytes to train on, {nsa['held_out_bytes']} held out; "
            f"{nsa['steps']} steps of {nsa['batch']} x {nsa['length']} bytes, seed {nsa['seed']}. "
            f"With NSA a query reads at most {most} selected and recent tokens (n l' + w) of "
            f"{nsa['length']}, beside the compressed ones. The bigram needs "
            f"{nsa['bigram_bits_per_byte']:.3f} bits per byte. Measured on {'; '.join(devices)}.",
            "",
            *table,
            "",
            f"![loss]({LOSS.as_posix()})",
            "",
            f"![selected blocks]({BLOCKS.as_posix()})",
            "",
            "Held-out text, continued by the model from `[HERE]` on:",
            "",
            "```text",
            sample,
            "```",
        ]
    )


def inserted(document: str, text: str) -> str:
    """`document` with `text` between the two marks."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InputError(f"--readme must have the lines {BEGIN!r} and {END!r}, got a file without. Add them.")
    return f"{before}{begin}\n{text}\n{end}{after}"


def _against(run: dict[str, Any], baseline: float) -> str:
    return f"{100 * (run['held_out_bits_per_byte'] / baseline - 1):+.1f} %"


def both(runs: list[Finished]) -> dict[str, Finished]:
    """The first NSA run and the dense run with the same settings and data.

    Raises:
      InputError: there is no such pair.
    """
    nsa = next((run for run in runs if run.row["attention"] == "nsa"), None)
    other = nsa and results.find_other(nsa.row, runs)
    if nsa is None or other is None:
        found = [(run.row["attention"], run.row["steps"], run.row["seed"]) for run in runs]
        raise InputError(
            f"a report needs a finished NSA run and a dense one with the same settings, got {found}. "
            "Run examples.train_lm with --attention nsa and with --attention dense."
        )
    return {"nsa": nsa, "dense": other}


if __name__ == "__main__":
    sys.exit(main())
