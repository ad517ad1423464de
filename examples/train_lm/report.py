"""The record of a finished run, and the comparison of NSA with dense: in words, as a picture, in a document.

`python -m examples.train_lm.report` adds finished runs to the repository and prints their section of
`docs/examples.md`.
"""

import dataclasses
import pathlib
import sys
from typing import Any

import jax
import numpy as np

from benchmarks.command_line import InputError, Parser, command, missing_package

try:
    from matplotlib.figure import Figure
except ImportError as missing:
    raise SystemExit(missing_package("examples.train_lm.report", missing, "train")) from missing

from benchmarks.records import environment
from examples.train_lm.run_folder import RunFolder, identity, read_rows, write, write_picture, write_rows
from examples.train_lm.settings import Settings
from examples.train_lm.text import Corpus, bigram_bits_per_byte
from examples.train_lm.training import Trained, flops_per_trained_token
from nsa_jax.array_typing import Array

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
RESULTS = pathlib.Path("examples/results/train_lm.jsonl")
CURVES = pathlib.Path("examples/results/train_lm_curves.jsonl")
OTHER = {"nsa": "dense", "dense": "nsa"}
DOCUMENTS = pathlib.Path("docs")
IMAGES = DOCUMENTS / "images"
LOSS, BLOCKS = IMAGES / "train_lm_loss.png", IMAGES / "train_lm_blocks.png"
BEGIN, END = "<!-- train_lm: begin -->", "<!-- train_lm: end -->"
EXCERPT = 400
COLOURS = {"nsa": "tab:blue", "dense": "tab:orange"}
# Training loss of single batches is noisy; the line is a running mean over this share of the steps.
SMOOTHED_SHARE = 1 / 40


@dataclasses.dataclass(frozen=True)
class Finished:
    """The record of a finished run and its rows a step."""

    row: dict[str, Any]
    curve: list[dict[str, Any]]


def record(settings: Settings, corpus: Corpus, trained: Trained) -> dict[str, Any]:
    """Everything measured, with what it was measured on."""
    here = environment()
    rows = corpus.held_out_rows(settings.length)
    scored = corpus.held_out[: len(rows) * settings.length + 1]
    last = trained.curve[-1]
    tokens = settings.steps * settings.batch * settings.length
    flops = flops_per_trained_token(settings.model, settings.length)
    leaves: list[Array] = jax.tree.leaves(trained.model)
    return identity(settings, corpus) | {
        "example": "train_lm",
        "run_id": here.run_id,
        "device": here.device,
        "jax": here.jax,
        "jaxlib": here.jaxlib,
        "triton": here.triton,
        "commit": here.commit,
        "parameters": sum(leaf.size for leaf in leaves),
        "training_bytes": len(corpus.training),
        "held_out_bytes": len(scored) - 1,
        "trained_tokens": tokens,
        "compile_seconds": round(trained.compile_seconds, 1),
        "training_seconds": round(last["seconds"], 1),
        "tokens_per_second": round(tokens / last["seconds"]),
        "mflop_per_token": round(flops / 1e6, 3),
        "gflop_per_second": round(flops * tokens / last["seconds"] / 1e9, 1),
        "held_out_bits_per_byte": last["held_out"],
        "bigram_bits_per_byte": bigram_bits_per_byte(corpus.training, scored),
    }


def finished_in(path: pathlib.Path) -> list[Finished]:
    """The finished run in a folder, if there is one."""
    folder = RunFolder(path)
    return [Finished(row, read_rows(folder.curve)) for row in read_rows(folder.result)]


def committed(root: pathlib.Path = ROOT) -> list[Finished]:
    """The runs whose records are part of the repository."""
    curves = read_rows(root / CURVES)
    return [
        Finished(row, [point for point in curves if point["run_id"] == row["run_id"]])
        for row in read_rows(root / RESULTS)
    ]


def find_other(row: dict[str, Any], candidates: list[Finished]) -> Finished | None:
    """The first run that differs from `row` in nothing but its attention."""
    return next((other for other in candidates if comparable(row, other.row)), None)


def comparable(row: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two runs differ in nothing but their attention."""
    shared = Settings().to_json().keys() | {"data_sha256"}
    same = all(row.get(name) == other.get(name) for name in shared - {"attention"})
    return same and other.get("attention") == OTHER[row["attention"]]


def both(runs: list[Finished]) -> dict[str, Finished]:
    """The first NSA run and the dense run with the same settings and data.

    Raises:
      InputError: there is no such pair.
    """
    nsa = next((run for run in runs if run.row["attention"] == "nsa"), None)
    other = nsa and find_other(nsa.row, runs)
    if nsa is None or other is None:
        found = [(run.row["attention"], run.row["steps"], run.row["seed"]) for run in runs]
        raise InputError(
            f"a report needs a finished NSA run and a dense one with the same settings, got {found}. "
            "Run examples.train_lm with --attention nsa and with --attention dense."
        )
    return {"nsa": nsa, "dense": other}


def summary(row: dict[str, Any], other: Finished | None) -> str:
    """The comparison in words."""
    bits, baseline = row["held_out_bits_per_byte"], row["bigram_bits_per_byte"]
    lines = [
        f"held-out: {bits:.4f} bits/byte over {row['held_out_bytes']} bytes",
        f"bigram:   {baseline:.4f} bits/byte; this model {bits / baseline - 1:+.1%}",
    ]
    name = OTHER[row["attention"]]
    if other is None:
        lines.append(f"{name}: no finished run with these settings; make one with --attention {name}")
    else:
        theirs = other.row["held_out_bits_per_byte"]
        lines.append(
            f"{name + ':':9} {theirs:.4f} bits/byte at equal steps; this model {bits / theirs - 1:+.2%}"
        )
    return "\n".join(lines)


def draw_losses(path: pathlib.Path, curves: dict[str, list[dict[str, Any]]], bigram: float) -> None:
    """Training loss (lines) and held-out loss (dots) of runs named by their attention, and the baseline."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        steps = np.array([row["step"] for row in curve])
        losses = np.array([row["bits_per_byte"] for row in curve])
        width = max(int(len(losses) * SMOOTHED_SHARE), 1)
        smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
        axes.plot(steps[width - 1 :], smooth, color=COLOURS[name], label=f"{name}, training")
        held_out = [(row["step"], row["held_out"]) for row in curve if "held_out" in row]
        axes.plot(*zip(*held_out, strict=True), "o", color=COLOURS[name], label=f"{name}, held out")
    axes.axhline(bigram, color="grey", linestyle="--", label="bigram, held out")
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.set_ylim(top=min(axes.get_ylim()[1], 1.6 * bigram))
    axes.grid(alpha=0.3)
    axes.legend()
    write_picture(path, figure)


def markdown(pair: dict[str, Finished]) -> str:
    """Table, pictures and a text sample, for a page in `docs`."""
    nsa, dense = pair["nsa"].row, pair["dense"].row
    rows = [
        ("held-out bits per byte", *(f"{run['held_out_bits_per_byte']:.3f}" for run in (nsa, dense))),
        ("against the byte bigram", *(_against(run, nsa["bigram_bits_per_byte"]) for run in (nsa, dense))),
        ("against dense", _against(nsa, dense["held_out_bits_per_byte"]), ""),
        ("parameters", *(f"{run['parameters'] / 1e6:.2f} M" for run in (nsa, dense))),
    ]
    sizes = nsa["nsa"]
    most = sizes["num_selected_blocks"] * sizes["selection_block_size"] + sizes["window_size"]
    on_nsa, on_dense = (f"{run['device']}, jax {run['jax']}, commit {run['commit']}" for run in (nsa, dense))
    if on_nsa == on_dense:
        measured = f"Measured on {on_nsa}."
        rows += [
            ("tokens/s in training", *(f"{run['tokens_per_second']}" for run in (nsa, dense))),
            ("whole command", *(f"{run['seconds']:.0f} s" for run in (nsa, dense))),
        ]
    else:
        measured = (
            f"NSA was measured on {on_nsa}; dense on {on_dense}. Speeds, which do not compare, are left out."
        )
    table = ["| | NSA | dense |", "|---|---|---|", *("| " + " | ".join(row) + " |" for row in rows)]
    sample = f"...{nsa['prompt'][-EXCERPT // 2 :]}[HERE]{nsa['sample'][:EXCERPT]}...".replace("```", "'''")
    return "\n".join(
        [
            f"{nsa['data']}: {nsa['training_bytes']} bytes to train on, {nsa['held_out_bytes']} held out; "
            f"{nsa['steps']} steps of {nsa['batch']} x {nsa['length']} bytes, seed {nsa['seed']}. "
            f"With NSA a query reads at most {most} selected and recent tokens (n l' + w) of "
            f"{nsa['length']}, beside the compressed ones. The bigram needs "
            f"{nsa['bigram_bits_per_byte']:.3f} bits per byte. {measured}",
            "",
            *table,
            "",
            f"![loss]({LOSS.relative_to(DOCUMENTS).as_posix()})",
            "",
            f"![selected blocks]({BLOCKS.relative_to(DOCUMENTS).as_posix()})",
            "",
            "Held-out text, continued by the model from `[HERE]` on:",
            "",
            "```text",
            sample,
            "```",
        ]
    )


def _against(run: dict[str, Any], baseline: float) -> str:
    return f"{100 * (run['held_out_bits_per_byte'] / baseline - 1):+.1f} %"


def inserted(document: str, text: str) -> str:
    """`document` with `text` between the two marks."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InputError(
            f"--document must have the lines {BEGIN!r} and {END!r}, got a file without. Add them."
        )
    return f"{before}{begin}\n{text}\n{end}{after}"


def publish(folders: list[pathlib.Path], root: pathlib.Path = ROOT) -> None:
    """Replaces the committed records and pictures by those of two finished runs."""
    pair = both([run for folder in folders for run in finished_in(folder)])
    nsa_folder = next(f for f in folders for run in finished_in(f) if run.row["attention"] == "nsa")
    points = [{"run_id": run.row["run_id"], **point} for run in pair.values() for point in run.curve]
    write_rows(root / RESULTS, [run.row for run in pair.values()])
    write_rows(root / CURVES, points)
    write(root / BLOCKS, (nsa_folder / "blocks.png").read_bytes())
    curves = {name: run.curve for name, run in pair.items()}
    draw_losses(root / LOSS, curves, pair["nsa"].row["bigram_bits_per_byte"])


@command("examples.train_lm.report")
def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    parser = Parser(prog="python -m examples.train_lm.report")
    parser.add_argument(
        "folders",
        nargs="*",
        type=pathlib.Path,
        help="a finished NSA run and the dense run like it, to be committed",
    )
    parser.add_argument(
        "--document",
        type=pathlib.Path,
        help=f"replace what stands between {BEGIN} and {END} in this file; default: none",
    )
    options = parser.parse_args(arguments)
    if options.folders:
        publish(options.folders)
    text = markdown(both(committed()))
    if options.document:
        try:
            write(options.document, inserted(options.document.read_text(encoding="utf-8"), text))
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"--document must be a text file that can be read and written, got {error}. Check the path."
            ) from error
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
