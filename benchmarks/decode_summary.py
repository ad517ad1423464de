"""What does the CSV of `benchmarks.decode --csv` say?

`python -m benchmarks.decode_summary CSV` prints `S total cmp% sel% win% reads(dec) reads(tot)` and draws it
beside the file. `total` is in ms. A percentage is the time of a branch alone over that of the whole step; the
three need not add up to 100, for branches alone overlap with nothing and a whole step does more than they do.
Reads are `actual/expected`: (dec) of all 64 steps, (tot) of the last query.
"""

import argparse
import csv
import pathlib
from collections.abc import Sequence

BRANCHES = ("cmp", "sel", "win")

type Line = dict[str, str]


def read(path: pathlib.Path) -> list[Line]:
    """The lines of the CSV; a time that was not measured is empty."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def table(lines: Sequence[Line]) -> str:
    """One line for each length."""
    head = ("S", "total", *(f"{name}%" for name in BRANCHES), "reads(dec)", "reads(tot)")
    cells = [head, *(_cells(line) for line in lines)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rows = ([cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in cells)
    return "\n".join("  ".join(row) for row in rows)


def draw(lines: Sequence[Line], path: pathlib.Path) -> None:
    """Two panels: milliseconds, and the reads of the last query, against length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (times, reads) = pyplot.subplots(1, 2, figsize=(13, 3.5))
    for name in ("total", *BRANCHES):
        points = [(int(line["S"]), float(line[f"ms_{name}"])) for line in lines if line[f"ms_{name}"]]
        if points:
            times.plot(*zip(*points, strict=True), marker="o", label=name)
    lengths = [int(line["S"]) for line in lines]
    for name in ("actual", "expected"):
        reads.plot(lengths, [int(line[f"reads_{name}"]) for line in lines], marker="o", label=name)
    times.set(ylabel="ms a step and layer", title="time")
    reads.set(ylabel="keys of a query and KV head", title="reads of the last query")
    for panel in (times, reads):
        panel.set_xscale("log", base=2)
        panel.set_ylim(bottom=0)
        panel.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1024:g}k")
        panel.set_xlabel("tokens")
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _cells(line: Line) -> tuple[str, ...]:
    total = line["ms_total"]
    shares = (
        f"{100 * float(line[f'ms_{name}']) / float(total):.1f}" if total and line[f"ms_{name}"] else "-"
        for name in BRANCHES
    )
    reads = (f"{line[f'reads_actual{of}']}/{line[f'reads_expected{of}']}" for of in ("_decode", ""))
    return line["S"], f"{float(total):.4f}" if total else "-", *shares, *reads


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and draws the picture."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode_summary", description=__doc__)
    parser.add_argument("csv", type=pathlib.Path)
    parser.add_argument("--output", type=pathlib.Path, metavar="PNG", help="beside the CSV by default")
    options = parser.parse_args(argv)
    lines = read(options.csv)
    print(table(lines))
    draw(lines, options.output or options.csv.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
