"""The record of a finished run: one JSON object, and how runs of both attentions are set side by side."""

import dataclasses
import pathlib
from typing import Any

import jax

from benchmarks.records import environment
from examples.train_lm import bigram
from examples.train_lm.flops import flops_per_trained_token
from examples.train_lm.run_folder import RunFolder, read_rows
from examples.train_lm.settings import Settings
from examples.train_lm.text import Corpus
from examples.train_lm.training import Trained
from nsa_jax.array_typing import Array

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
RESULTS = pathlib.Path("examples/results/train_lm.jsonl")
CURVES = pathlib.Path("examples/results/train_lm_curves.jsonl")
OTHER = {"nsa": "dense", "dense": "nsa"}


@dataclasses.dataclass(frozen=True)
class Finished:
    """The record of a finished run and its rows a step."""

    row: dict[str, Any]
    curve: list[dict[str, Any]]


def identity(settings: Settings, corpus: Corpus) -> dict[str, Any]:
    """What two runs must share to be the same run."""
    return settings.to_json() | {"data": corpus.name, "data_sha256": corpus.sha256}


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
        "bigram_bits_per_byte": bigram.bits_per_byte(corpus.training, scored),
    }


def in_folder(path: pathlib.Path) -> list[Finished]:
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
