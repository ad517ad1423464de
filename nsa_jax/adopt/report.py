"""The page at the end of a run, and the same as JSON."""

import contextlib
import dataclasses
import importlib.metadata
import json
import pathlib
import platform
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

import nsa_jax
from nsa_jax.adopt import figures
from nsa_jax.adopt.findings import MODELS, all_needles, losses
from nsa_jax.adopt.run_folder import RunFolder, write
from nsa_jax.adopt.settings import Settings
from nsa_jax.adopt.training import Stage
from nsa_jax.evaluate.table import markdown

PACKAGE = pathlib.Path(nsa_jax.__file__).parent


def write_report(
    folder: RunFolder, settings: Settings, stages: Sequence[Stage], text: dict[str, Any], devices: int
) -> None:
    """Writes `report.md` and `report.json`, and the figures if there is matplotlib.

    Args:
      folder: of the run, which has its measurements and steps.
      settings: of the run.
      stages: those that trained.
      text: what its text consists of, by name: numbers of tokens and documents, and the SHA-256 of its files.
      devices: how many trained it.
    """
    kept = dict(
        settings=dataclasses.asdict(settings),
        text=text,
        versions=versions(),
        device=jax.devices()[0].device_kind,
        devices=devices,
        stages={stage.name: _of_stage(stage, folder.rows(stage.name), settings) for stage in stages},
        measured=folder.results(),
    )
    as_json = json.dumps(kept | _origin(folder, kept), indent=1)
    write(folder.path / "report.json", as_json + "\n")
    found = json.loads(as_json)
    try:
        drawn = figures.draw(found["measured"], folder.path)
    except ImportError:
        drawn = None
    write(folder.path / "report.md", page(found, drawn))


def _origin(folder: RunFolder, kept: dict[str, Any]) -> dict[str, Any]:
    """Versions and devices of an earlier report with the same numbers, which come from those; or nothing."""
    try:
        found = json.loads((folder.path / "report.json").read_text(encoding="utf-8"))
        same = all(found[name] == json.loads(json.dumps(kept[name])) for name in ("stages", "measured"))
        return {name: found[name] for name in ("versions", "device", "devices")} if same else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def page(found: dict[str, Any], drawn: Sequence[str] | None) -> str:
    """The page in Markdown.

    Args:
      found: what `report.json` holds.
      drawn: names of the figures beside the page; None where there is no matplotlib.
    """
    return "\n\n".join(_sections(found, drawn)) + "\n"


def _sections(found: dict[str, Any], drawn: Sequence[str] | None) -> Iterable[str]:
    measured, settings, text = found["measured"], found["settings"], found["text"]
    yield f"# {settings['source']} with NSA"
    yield (
        f"{text['tokens']} tokens in {text['documents']} documents, held out {text['held_out_tokens']} in "
        f"{text['held_out_documents']}. {found['devices']} x {found['device']}, "
        + ", ".join(f"{name} {version}" for name, version in found["versions"].items())
        + "."
    )
    yield (
        "## Training\n\nMeans over the first and the last ten steps, of different text. `selection` is the "
        "selection loss, added up over the layers; `divergence` is that from the dense model's distributions."
        " An epoch is all tokens that are not held out."
    )
    yield _training(found["stages"], text["tokens"] - text["held_out_tokens"])
    yield from _ratio(found["stages"])
    if "decoding" in measured.get("converted", {}):
        yield from _decoding(measured["converted"]["decoding"])
    if drawn is None:
        yield "Its figures need matplotlib: pip install 'nsa_jax[train]', and run the same command again."
    yield f"## Loss by position\n\nNats a token, on {settings['rows']} held-out rows at most."
    yield from (f"![Loss by position]({name})" for name in drawn or () if name == figures.LOSSES)
    yield _losses(measured)
    if settings["needles"]:
        yield "## Needles\n\nA number to find in a text, by its depth. The question follows 100%."
        yield from (f"![Needles by depth]({name})" for name in drawn or () if name == figures.NEEDLES)
        for name, counts in all_needles(measured).items():
            yield f"**{MODELS[name]}**\n\n{counts.merged(4)}"
    yield (
        "## Recall of blocks\n\nHow often the block that dense attention likes best, of those that are not "
        "always selected, is selected: a number for each KV head."
    )
    yield _recall(measured)
    yield "## Settings"
    yield markdown(("setting", "value"), [(name, f"`{value}`") for name, value in settings.items()])


def _training(stages: dict[str, dict[str, Any]], tokens: int) -> str:
    heads = "stage", "steps", "tokens", "epochs", "ms a step", "first losses", "last losses"
    rows = []
    for name, of in stages.items():
        ms = "" if of["ms_per_step"] is None else of["ms_per_step"]
        told = [
            ", ".join(f"{loss} {of[which][loss]:z.4f}" for loss in of[which]) for which in ("first", "last")
        ]
        rows.append((name, of["steps"], of["tokens"], f"{of['tokens'] / tokens:.2f}", ms, *told))
    return markdown(heads, rows)


def _ratio(stages: dict[str, dict[str, Any]]) -> Iterable[str]:
    sparse, dense = (stages.get(name, {}).get("ms_per_step") for name in ("sparse", "dense"))
    if sparse and dense:
        yield f"A step of *sparse* took {sparse / dense:.2f} times as long as one of *dense*."


def _decoding(of: dict[str, Any]) -> Iterable[str]:
    yield (
        f"## Decoding\n\nGreedy, by `generate`: {of['rows']} prompts of {of['length']} tokens, and "
        f"{of['new_tokens']} new ones. Medians of {of['dense']['samples']} calls, the two models in turns."
    )
    rows = [
        (what, *("" if of[model][key] is None else f"{of[model][key]:.2f}" for model in ("dense", "nsa")))
        for what, key in (("ms a token of all rows", "token_ms"), ("ms to the first", "first_token_ms"))
    ]
    yield markdown(("", MODELS["dense"], MODELS["converted"]), rows)


def _losses(measured: dict[str, Any]) -> str:
    starts, found = losses(measured)
    columns, dense = found.values(), found["dense"]
    rows: list[tuple[Any, ...]] = [
        (start, *(f"{column.by_position[i]:.4f}" for column in columns)) for i, start in enumerate(starts)
    ]
    rows.append(("all", *(f"{column.all:.4f}" for column in columns)))
    rows.append(("over dense", *(f"{column.all - dense.all:+.4f}" for column in columns)))
    rows.append(("same first choice as dense", *(f"{column.agreement:.1%}" for column in columns)))
    return markdown(("from position", *(MODELS[name] for name in found)), rows)


def _recall(measured: dict[str, Any]) -> str:
    found = {name: measured[name]["recall"] for name in MODELS if "recall" in measured.get(name, {})}
    first = next(iter(found.values()))
    rows = [
        (
            layer,
            *(
                " ".join(f"{head:.2f}" for head in of["best_free"][i])
                for of in (*found.values(), _chance(first))
            ),
        )
        for i, layer in enumerate(first["layers"])
    ]
    means = [np.mean(of["best_free"]) for of in (*found.values(), _chance(first))]
    rows.append(("all", *(f"{mean:.3f}" for mean in means)))
    mass = [f"{np.mean(of['mass']):.3f}" for of in found.values()]
    rows.append(("probability in the selected blocks", *mass, ""))
    return markdown(("layer", *(MODELS[name] for name in found), "chance"), rows)


def _chance(of: dict[str, Any]) -> dict[str, Any]:
    return {"best_free": of["chance"]}


def _of_stage(stage: Stage, rows: list[dict[str, Any]], settings: Settings) -> dict[str, Any]:
    times = [row["ms"] for row in rows if row["ms"] is not None]
    kept = [{name: row[name] for name in row if name not in ("step", "ms")} for row in rows]
    return dict(
        steps=stage.steps,
        tokens=stage.steps * settings.batch * settings.length,
        ms_per_step=round(statistics.median(times), 1) if times else None,
        seconds=round(sum(times) / 1e3, 1),
        first=_mean(kept[:10]),
        last=_mean(kept[-10:]),
    )


def _mean(rows: list[dict[str, float]]) -> dict[str, float]:
    """Means over a few steps, because single batches differ."""
    return {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}


def versions() -> dict[str, str]:
    """What numbers may depend on; without what is not installed or not known."""
    commit = _commit()
    found = {"nsa_jax": nsa_jax.__version__ + (f" (commit {commit})" if commit else "")}
    found["Python"] = platform.python_version()
    for name in ("jax", "jaxlib", "flax", "optax", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _commit() -> str | None:
    """Short hash of the checkout that this package is in, `-dirty` where it was changed; None without one."""

    def git(*command: str) -> str:
        done = subprocess.run(["git", *command], cwd=PACKAGE, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # a checkout may be that of another project
        changed = git("status", "--porcelain", "--", ".")
        return git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
