"""Figures of documents from committed rows: time, speed-up over dense attention and memory against length.

`python -m benchmarks.plot benchmarks/results/*.jsonl` draws each file of several lengths into `docs/images`:
`NAME.svg` has the times of whole operations, `NAME_memory.svg` their temporary memory. With `--together NAME`
the speed-ups of all files, which differ in their heads, go into one figure. A figure carries the names of its
files and a hash of the rows it shows. A test fails for a figure that is older than its rows.
"""

import argparse
import collections
import contextlib
import hashlib
import itertools
import json
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks import records
from benchmarks.command_line import Parser, check_writable, command, missing_package
from benchmarks.records import Row
from benchmarks.tables import one_run

IMAGES = pathlib.Path("docs/images")

MODES = {
    "fwd": "Forward",
    "bwd": "Backward",
    "fwd_bwd": "Forward and backward",
    "decode": "One decode step, started by the host",
    "decode_loop": "One decode step in a compiled loop",
}
BLOCKS = {
    "random": "random blocks",
    "coherent": "neighbours share blocks",
    "trained": "neighbours share as in a trained model",
}
# One colour a curve in all figures: blue, violet and green are NSA, red is dense attention.
RED, BLUE = "#c8372d", "#0b5fa5"
DENSE = {  # its name and colour by implementation
    "cudnn": ("dense attention (cuDNN)", RED),
    "xla": ("dense attention (XLA)", RED),
    "jax_nn": ("dense attention (jax.nn, XLA)", "#e8938b"),
    "triton": ("dense attention (ours)", RED),
}
NSA = {  # its name on a GPU by implementation, and its colours by distribution
    "triton": ("NSA", {"coherent": BLUE, "random": "#6cb0e0", "trained": "#6a51a3"}),
    "xla": ("NSA (XLA)", {"random": "#b07d2b"}),
    "mosaic_gpu": (
        "NSA (Pallas gradients)",
        {"coherent": "#1b7837", "random": "#7fbf7b", "trained": "#9e9ac8"},
    ),
}
COLOURS = {
    "NSA": BLUE,
    **{
        f"{name}, {BLOCKS[spread]}": colour
        for name, colours in NSA.values()
        for spread, colour in colours.items()
    },
    "NSA layer": BLUE,
    "dense layer": RED,
    **dict(DENSE.values()),
}
STYLE: Any = {  # keys of matplotlib.rcParams
    "svg.hashsalt": "nsa_jax",  # the same rows give the same file
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e0e0e0",
    "lines.linewidth": 2,
    "lines.marker": "o",
    "lines.markersize": 5,
    "savefig.facecolor": "white",  # legible on dark pages, too
}

type Points = tuple[tuple[int, float], ...]  # (tokens, value)


def fingerprint(rows: Sequence[Row]) -> str:
    """A hash of the rows that a figure shows."""
    return hashlib.sha256("\n".join(map(json.dumps, rows)).encode()).hexdigest()[:16]


def draw(rows: Sequence[Row], path: pathlib.Path, *, source: str = "") -> None:
    """Two panels a mode: the time, and the time of dense attention over it, against length."""
    lengths = {mode: {row.length for row in _shown(rows) if row.mode == mode} for mode in records.MODES}
    modes = [mode for mode, several in lengths.items() if len(several) > 1]
    with _panels((len(modes), 2), rows, path, source) as axes:
        for mode, (times, ratios) in zip(modes, axes, strict=True):
            of_mode = [row for row in _shown(rows) if row.mode == mode]
            unit, factor = ("us", 1e3) if max(row.median_ms for row in of_mode) < 2 else ("ms", 1.0)
            for name, line in _lines(of_mode).items():
                tokens = [row.length for row in line]
                middle, low, high = (
                    [factor * row[p] for row in line] for p in ("median_ms", "p20_ms", "p80_ms")
                )
                times.plot(tokens, middle, color=COLOURS[name], label=name)
                times.fill_between(tokens, low, high, color=COLOURS[name], alpha=0.2, linewidth=0)
            _logarithmic(times)
            times.set(title=MODES[mode], ylabel=f"{unit} (median, p20 to p80)")
            speed_ups = _speed_ups(of_mode)
            for side, (name, points) in zip(itertools.cycle(("right", "left")), speed_ups.items()):
                ratios.plot(*zip(*points, strict=True), color=COLOURS[name], label=name)
                if len(speed_ups) <= 2:  # the marks of more would cover one another
                    _mark_crossovers(ratios, points, COLOURS[name], side)
            ratios.axhline(1, color=RED, linewidth=1, marker="")
            ratios.set_ylim(bottom=0)
            ratios.set(title="Speed-up over dense attention", ylabel="dense time / this time")
            for panel in (times, ratios):
                _tokens(panel, mode)


def draw_memory(rows: Sequence[Row], path: pathlib.Path, *, source: str = "") -> None:
    """Temporary memory of the forward and backward pass against length."""
    curves: dict[Points, list[str]] = collections.defaultdict(list)
    for name, line in _lines([row for row in _shown(rows) if row.mode == "fwd_bwd"]).items():
        curves[tuple((row.length, row.peak_bytes / 1e6) for row in line)].append(name)
    with _panels((1, 1), rows, path, source) as axes:
        (panel,) = axes[0]
        for points, names in curves.items():  # which blocks are chosen does not change the memory
            label = names[0] if len(names) == 1 else "NSA"
            panel.plot(*zip(*points, strict=True), color=COLOURS[names[0]], label=label)
        _logarithmic(panel)
        panel.set(title="Forward and backward: temporary memory", ylabel="MB")
        _tokens(panel, "fwd_bwd")


def draw_together(files: Sequence[Sequence[Row]], path: pathlib.Path, *, source: str = "") -> None:
    """The speed-up of the forward and backward pass against length, a curve for the heads of each file."""
    rows = [row for file in files for row in file]
    with _panels((1, 2), rows, path, source, heads=False) as axes:
        for panel, blocks in zip(axes[0], (BLOCKS["random"], BLOCKS["trained"]), strict=True):
            for number, file in enumerate(files):
                lines = _speed_ups([row for row in file if row.mode == "fwd_bwd"])
                (points,) = (line for name, line in lines.items() if name.endswith(blocks))
                label = f"{file[0].query_heads} / {file[0].kv_heads} heads of {file[0].key_dim}"
                panel.plot(*zip(*points, strict=True), color=f"C{number}", label=label)
            panel.axhline(1, color=RED, linewidth=1, marker="")
            panel.set(title=blocks, ylabel="dense time / NSA time", xlim=(3700, 36000), ylim=(0, 3.5))
            _tokens(panel, "fwd_bwd")


def _shown(rows: Sequence[Row]) -> list[Row]:
    """Whole operations. Of decode steps those in a compiled loop, if there are any."""
    whole = [row for row in rows if _name(row) in COLOURS]
    return [row for row in whole if row.mode == "decode_loop"] or whole


@contextlib.contextmanager
def _panels(
    shape: tuple[int, int], rows: Sequence[Row], path: pathlib.Path, source: str, *, heads: bool = True
) -> Iterator[Any]:
    """Axes of that many rows and columns, which are saved with title and legend at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    first = rows[0]
    dims = f"{first.key_dim}" if first.key_dim == first.value_dim else f"{first.key_dim}/{first.value_dim}"
    batch = f", {first.batch} rows" if first.batch > 1 else ""
    sizes = (
        f", {first.query_heads} query heads, {first.kv_heads} KV head{'s' * (first.kv_heads > 1)}, dim {dims}"
    )
    with matplotlib.rc_context(STYLE):
        size = max(7, 5 * shape[1]), 3.6 * shape[0]
        figure, axes = pyplot.subplots(*shape, figsize=size, squeeze=False)
        yield axes
        title = f"{first.device}, {first.dtype}{batch}{sizes if heads else ''}"
        figure.suptitle(title, fontsize=11, color="#555555")
        known: dict[str, Any] = {}
        for panel in axes.flat:
            for handle, name in zip(*panel.get_legend_handles_labels(), strict=True):
                known.setdefault(name, handle)
        below = 0.3 * math.ceil(len(known) / 3) / figure.get_figheight()
        figure.tight_layout(rect=(0, below, 1, 1))
        figure.legend(known.values(), known.keys(), loc="lower center", ncol=3, frameon=False, fontsize=10)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None, "Source": source, "Identifier": fingerprint(rows)})
        pyplot.close(figure)


def _logarithmic(panel: Any) -> None:
    from matplotlib import ticker

    panel.set_yscale("log")
    low, high = panel.get_ylim()
    panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if high / low < 200 else (1,)))
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.yaxis.set_minor_locator(ticker.NullLocator())


def _tokens(panel: Any, mode: str) -> None:
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter(
        lambda tokens, _: f"{tokens / 1024:g}k" if tokens >= 1024 else f"{tokens:g}"
    )
    panel.set_xlabel("tokens in the cache" if mode.startswith("decode") else "tokens of a sequence")


def _speed_ups(rows: Sequence[Row]) -> dict[str, Points]:
    """For each curve of NSA, how many times as fast as dense attention it is."""
    dense = {id(row): records.ratio(row, dense)[0] for row, dense in records.beside_dense(rows)}
    lines = {name: [row for row in line if id(row) in dense] for name, line in _lines(rows).items()}
    return {name: tuple((row.length, dense[id(row)]) for row in line) for name, line in lines.items() if line}


def crossovers(points: Points) -> list[float]:
    """Lengths at which the line through the measured ratios rises above 1, on a logarithmic axis."""
    return [
        length * (next_length / length) ** ((1 - ratio) / (next_ratio - ratio))
        for (length, ratio), (next_length, next_ratio) in itertools.pairwise(points)
        if ratio < 1 <= next_ratio
    ]


def _mark_crossovers(panel: Any, points: Points, colour: str, side: str) -> None:
    shift = {"xytext": (-4 if side == "right" else 4, 6), "textcoords": "offset points"}
    for tokens in crossovers(points):
        panel.plot([tokens, tokens], [0, 1], color=colour, linestyle=":", marker="")
        text = f"from {tokens / 1024:.1f}k"
        panel.annotate(text, (tokens, 0), color=colour, fontsize=10, ha=side, **shift)


def _lines(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each curve by length."""
    ordered = sorted(rows, key=lambda row: (_name(row), row.length))
    return {name: list(group) for name, group in itertools.groupby(ordered, key=_name)}


def _name(row: Row) -> str:
    if row.operation == "dense_attention":
        return DENSE[row.implementation][0]
    if row.operation != "native_sparse_attention":
        return {"layer": "NSA layer", "dense_layer": "dense layer"}.get(row.operation, "")
    if row.mode.startswith("decode"):
        return "NSA"
    name = NSA[row.implementation][0] if "NVIDIA" in row.device else "NSA"
    return f"{name}, {BLOCKS[row.distribution]}"


@command("benchmarks.plot")
def main(argv: Sequence[str] | None = None) -> int:
    """Draws each file that has several lengths."""
    parser = Parser(prog="python -m benchmarks.plot", description=__doc__.split("\n\n")[0])
    parser.add_argument("files", nargs="+", type=pathlib.Path, help="JSONL files of benchmarks")
    parser.add_argument("--run-id", help="the run to draw; default: the newest of each file")
    parser.add_argument("--output", type=pathlib.Path, default=IMAGES, help="folder, default: %(default)s")
    told = "draw the speed-ups of all files, of forward and backward, into NAME.svg; default: each file alone"
    parser.add_argument("--together", metavar="NAME", help=told)
    options = parser.parse_args(argv)
    if options.together:
        return _draw(options, options.files, {f"{options.together}.svg": draw_together})
    for path in options.files:
        rows = one_run(records.read(path), options.run_id)
        points = {(row.mode, row.length) for row in _shown(rows)}
        if max(collections.Counter(mode for mode, _ in points).values(), default=0) < 2:
            print(f"{path}: no mode has two lengths of a whole operation, nothing to draw")
            continue
        both = any(row.mode == "fwd_bwd" for row in rows)
        drawn = {f"{path.stem}.svg": draw} | ({f"{path.stem}_memory.svg": draw_memory} if both else {})
        if status := _draw(options, [path], drawn):
            return status
    return 0


def _draw(options: argparse.Namespace, files: Sequence[pathlib.Path], figures: Mapping[str, Any]) -> int:
    """Draws figures of some files."""
    runs = [one_run(records.read(path), options.run_id) for path in files]
    source = " ".join(path.as_posix() for path in files)
    for name, draw_rows in figures.items():
        check_writable(options.output / name, "--output")
        try:
            draw_rows(runs if options.together else runs[0], options.output / name, source=source)
        except ImportError as error:
            return missing_package("benchmarks.plot", error, "bench")
        print(options.output / name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
