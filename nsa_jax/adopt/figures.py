"""The pictures of the page: needles by depth and held-out loss by position, dense beside NSA."""

import contextlib
import hashlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from nsa_jax.adopt.findings import MODELS, all_needles, losses
from nsa_jax.evaluate import Needles

NEEDLES, LOSSES = "needles.svg", "losses.svg"

# Blue is NSA and red dense attention, which is wide, so that it is seen where the two are equal. Models that
# are not trained on the text are dashed.
DENSE: Any = dict(color="#e0897f", linewidth=5, markersize=9)
NSA: Any = dict(color="#0b5fa5", linewidth=1.8, markersize=5)
LINES: dict[str, Any] = {
    "dense": DENSE | dict(linestyle="--"),
    "dense_trained": DENSE,
    "converted": NSA | dict(linestyle="--"),
    "sparse": NSA,
}
PARTS = 8  # of the depths: more jump with the luck of few questions
STYLE: Any = {  # keys of matplotlib.rcParams
    "svg.hashsalt": "nsa_jax",  # the same numbers give the same file
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e0e0e0",
    "lines.marker": "o",
    "savefig.facecolor": "white",  # legible on dark pages, too
}


def draw(measured: dict[str, Any], folder: pathlib.Path) -> list[str]:
    """Writes the figures of what a run measured (`measured` of its `report.json`) into a folder.

    Returns:
      The names of their files.

    Raises:
      ImportError: matplotlib is not installed.
    """
    asked = {name: found for name, found in all_needles(measured).items() if name in LINES}
    if asked:
        draw_needles(asked, folder / NEEDLES)
    starts, found = losses(measured)
    with _panels(1, folder / LOSSES, [starts, found]) as (panel,):
        for name, line in LINES.items():
            if name in found:
                panel.plot(starts, found[name].by_position, label=MODELS[name], **line)
        panel.set(xlabel="from position", ylabel="nats a token", title="Loss on held-out text")
    return [NEEDLES] * bool(asked) + [LOSSES]


def draw_needles(asked: dict[str, Needles], path: pathlib.Path) -> None:
    """Draws which share of the questions each model answered, by depth; a panel for each length."""
    first = next(iter(asked.values()))
    with _panels(len(first.lengths), path, shown(asked)) as panels:
        for row, panel in enumerate(panels):
            for name, line in LINES.items():
                if name in asked:
                    merged = asked[name].merged(PARTS)
                    percent = 100 * merged.found[row] / merged.asked
                    panel.plot(100 * np.array(merged.depths), percent, label=MODELS[name], **line)
            title = f"Needles in {first.lengths[row]} tokens, {first.asked * len(first.depths)} questions"
            panel.set(xlabel="depth of the needle, %", ylabel="found, %", title=title)
            panel.set(xlim=(0, 100), ylim=(-3, 103))


def shown(asked: dict[str, Needles]) -> list[Any]:
    """The numbers that the figure of needles shows, as JSON can hold them."""
    return [(name, of.lengths, of.depths, of.asked, of.found.tolist()) for name, of in asked.items()]


def fingerprint(numbers: Any) -> str:
    """A hash of the numbers that a figure shows. It stands in its file, as in those of benchmarks."""
    return hashlib.sha256(json.dumps(numbers).encode()).hexdigest()[:16]


@contextlib.contextmanager
def _panels(number: int, path: pathlib.Path, numbers: Any) -> Iterator[Any]:
    """Axes side by side, which are saved with their legend at the end."""
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot, which would choose a display

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.5 * number, 4.2))
        panels = figure.subplots(1, number, squeeze=False)[0]
        yield panels
        handles, names = panels[0].get_legend_handles_labels()
        figure.tight_layout(rect=(0, 0.13, 1, 1))
        figure.legend(handles, names, loc="lower center", ncol=2, frameon=False)
        figure.savefig(path, metadata={"Date": None, "Identifier": fingerprint(numbers)})
