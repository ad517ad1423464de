"""Prints and draws the CSV of `benchmarks.decode --csv`.

`python -m benchmarks.decode_summary CSV` prints `S total cmp% sel% win% reads(dec) reads(tot)` and draws it
beside the file. `total` is in ms. A percentage is the time of a branch alone over that of the whole step; the
three need not add up to 100, for branches alone overlap with nothing and a whole step does more than they do.
On a GPU one can be over 100: the whole step has kernels of its own, a branch alone runs those for sequences.
Reads are `actual/expected`: (dec) of all 64 steps, (tot) of the last query.
"""

import csv
import pathlib
from collections.abc import Sequence

from benchmarks.command_line import InputError, Parser, check_writable, command, missing_package

BRANCHES = ("cmp", "sel", "win")

type Line = dict[str, str]


def read(path: pathlib.Path) -> list[Line]:
    """The lines of the CSV; a time that was not measured is empty.

    Raises:
      InputError: the file cannot be read, or `benchmarks.decode` did not write it.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = list(csv.DictReader(file))
        _ = [_numbers(line) for line in lines]
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise InputError(
            f"CSV must be a file that benchmarks.decode --csv wrote, got {str(path)!r} "
            f"({type(error).__name__}: {error}). Pass another file."
        ) from error
    if not lines:
        raise InputError(f"CSV must hold at least one length, got none in {str(path)!r}. Pass another file.")
    return lines


def _numbers(line: Line) -> list[float]:
    times = (line[f"ms_{name}"] for name in ("total", *BRANCHES))
    reads = (line[f"reads_{name}{of}"] for name in ("actual", "expected") for of in ("", "_decode"))
    return [int(line["S"]), *(float(time) for time in times if time), *map(int, reads)]


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
    times.set(ylabel="ms a step and layer", title="time of a whole step, and of branches alone")
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


@command("benchmarks.decode_summary")
def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and draws the picture."""
    parser = Parser(prog="python -m benchmarks.decode_summary", description=__doc__)
    parser.add_argument(
        "csv", type=pathlib.Path, metavar="CSV", help="file that benchmarks.decode --csv wrote"
    )
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        metavar="PNG",
        help="picture to write; default: beside the CSV",
    )
    options = parser.parse_args(argv)
    lines = read(options.csv)
    picture = options.output or options.csv.with_suffix(".png")
    check_writable(picture, "--output")
    print(table(lines))
    try:
        draw(lines, picture)
    except ImportError as error:
        return missing_package("benchmarks.decode_summary", error, "bench")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
