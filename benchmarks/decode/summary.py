"""Prints and draws the CSV of `benchmarks.decode --csv`.

`python -m benchmarks.decode.summary CSV` prints `S total cmp% sel% win% reads(dec) reads(tot)` and draws it
beside the file. `total` is in ms. A percentage is the time of a branch alone over that of the whole step; the
three need not add up to 100, for branches alone overlap with nothing and a whole step does more than they do.
On a GPU one can be over 100: the whole step has kernels of its own, a branch alone runs those for sequences.
Reads are `actual/expected`: (dec) of all 64 steps, (tot) of the last query.
"""

import csv
import pathlib
from collections.abc import Sequence

from benchmarks.command_line import InputError, Parser, check_writable, command, missing_package

TIMES = ("total", "cmp", "sel", "win")
CSV_HEADER = (
    *("S", *(f"ms_{name}" for name in TIMES)),
    *("reads_actual", "reads_expected", "reads_actual_decode", "reads_expected_decode"),
)

type Line = dict[str, float | int | None]


def read(path: pathlib.Path) -> list[Line]:
    """The lines of the CSV; a time that was not measured is None.

    Raises:
      InputError: the file cannot be read, or `benchmarks.decode` did not write it.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines: list[Line] = [
                {
                    x: int(line[x]) if x[:2] != "ms" else float(line[x]) if line[x] else None
                    for x in CSV_HEADER
                }
                for line in csv.DictReader(file)
            ]
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise InputError(
            f"CSV must be a file that benchmarks.decode --csv wrote, got {str(path)!r} "
            f"({type(error).__name__}: {error}). Pass another file."
        ) from error
    if not lines:
        raise InputError(f"CSV must hold at least one length, got none in {str(path)!r}. Pass another file.")
    return lines


def table(lines: Sequence[Line]) -> str:
    """One line for each length."""
    cells = [["S", "total", *(f"{name}%" for name in TIMES[1:]), "reads(dec)", "reads(tot)"]]
    for line in lines:
        total, *branches = (line[f"ms_{name}"] for name in TIMES)
        shares = (f"{100 * ms / total:.1f}" if total and ms else "-" for ms in branches)
        reads = (f"{line[f'reads_actual{of}']}/{line[f'reads_expected{of}']}" for of in ("_decode", ""))
        cells.append([f"{line['S']}", f"{total:.4f}" if total else "-", *shares, *reads])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.rjust, row, widths)) for row in cells)


def draw(lines: Sequence[Line], path: pathlib.Path) -> None:
    """Two panels: milliseconds, and the reads of the last query, against length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (times, reads) = pyplot.subplots(1, 2, figsize=(13, 3.5))
    panels = {times: [f"ms_{name}" for name in TIMES], reads: ["reads_actual", "reads_expected"]}
    for panel, names in panels.items():
        for name in names:
            points = [(line["S"], line[name]) for line in lines if line[name] is not None]
            if points:
                panel.plot(*zip(*points, strict=True), marker="o", label=name.partition("_")[2])
        panel.set_xscale("log", base=2)
        panel.set_ylim(bottom=0)
        panel.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1024:g}k")
        panel.set_xlabel("tokens")
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    times.set(ylabel="ms a step and layer", title="time of a whole step, and of branches alone")
    reads.set(ylabel="keys of a query and KV head", title="reads of the last query")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


@command("benchmarks.decode.summary")
def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and draws the picture."""
    parser = Parser(prog="python -m benchmarks.decode.summary", description=__doc__)
    add = parser.add_argument
    add("csv", type=pathlib.Path, metavar="CSV", help="file that benchmarks.decode --csv wrote")
    add("--output", type=pathlib.Path, metavar="PNG", help="picture to write; default: beside the CSV")
    options = parser.parse_args(argv)
    lines = read(options.csv)
    picture = options.output or options.csv.with_suffix(".png")
    check_writable(picture, "--output")
    print(table(lines))
    try:
        draw(lines, picture)
    except ImportError as error:
        return missing_package("benchmarks.decode.summary", error, "bench")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
