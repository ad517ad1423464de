"""Pictures and tables from committed rows, so that no figure is ever typed by hand.

`python -m benchmarks.plot benchmarks/results/*.jsonl` draws, beside each file of several lengths, time
against length and the ratio to dense attention; `--markdown` prints the tables instead. Of a file with
several runs the newest is taken, or that of `--run-id`. A table in a document stands behind a line
`<!-- benchmarks/results/NAME.jsonl -->`; a test holds it to the file.
"""

import argparse
import itertools
import pathlib
from collections.abc import Iterable, Iterator, Sequence

from benchmarks import records
from benchmarks.records import AnyRow, GenerateRow, Row, TrainingRow

# What curves are called.
DENSE = {"dense_attention": "dense", "dense_layer": "dense layer"}
WHOLE = {"native_sparse_attention": "NSA", "layer": "NSA layer"}


def one_run(rows: Sequence[AnyRow], run_id: str | None = None) -> list[AnyRow]:
    """The rows of one run, the newest by default.

    Raises:
      ValueError: there is no such run.
    """
    wanted = run_id or max((row.run_id for row in rows), default=None)
    chosen = [row for row in rows if row.run_id == wanted]
    if not chosen:
        known = sorted({row.run_id for row in rows})
        raise ValueError(f"run_id must be one of {known}, got {wanted}. Choose another file.")
    return chosen


def markdown(rows: Sequence[AnyRow]) -> str:
    """Tables of one run: the whole operation beside dense attention, then single operations; or its steps."""
    if written := [row for row in rows if isinstance(row, GenerateRow)]:
        return _of_generation(written)
    steps = [row for row in rows if isinstance(row, TrainingRow)]
    return _of_steps(steps) if steps else _of_operations([row for row in rows if isinstance(row, Row)])


def _made_by(row: AnyRow) -> str:
    triton = f"triton {row.triton}, " if row.triton else ""
    return f"jax {row.jax}, {triton}commit `{row.commit}`, run `{row.run_id}`."


def _of_decoding(rows: Sequence[Row]) -> str:
    """What rows of decode steps say beside sizes; those of before 0.2 do not."""
    first = next((row for row in rows if row.compression), None)
    if first is None:
        return ""
    most = max(row.num_layers or 1 for row in rows)
    tokens = "1 token" if first.new_tokens == 1 else f"{first.new_tokens} tokens"
    return f", {tokens} a step, {first.compression} compression, {most} layers in the loop"


def _of_operations(rows: Sequence[Row]) -> str:
    first = rows[0]
    heads = f"{first.query_heads} query heads, {first.kv_heads} KV heads"
    dims = f"dim {first.key_dim}/{first.value_dim}"
    sizes = f"{first.dtype}, batch {first.batch}, {heads}, {dims}{_of_decoding(rows)}"
    lines = [f"{first.device}; {sizes}; {_made_by(first)}", ""]
    rows = sorted(rows, key=lambda row: (row.length, records.MODES.index(row.mode)))
    pairs = records.beside_dense(rows)
    lines += _table(whole_cells(row, dense) for row, dense in pairs if row.model_dim is None)
    layers = [(row, dense) for row, dense in pairs if row.model_dim is not None]
    for width, group in itertools.groupby(layers, key=lambda pair: pair[0].model_dim):
        lines += [f"Whole layers of width {width}:", "", *_table(whole_cells(*pair) for pair in group)]
    paired = {id(row) for pair in pairs for row in pair}
    lines += _table(operation_cells(row) for row in rows if id(row) not in paired)
    return "\n".join(lines).strip()


def _model_sizes(row: TrainingRow | GenerateRow) -> str:
    names = ("num_layers", "model_dim", "num_heads", "num_kv_heads", "head_dim")
    return ", ".join(f"`{name}` {row.model[name]}" for name in names)


def _of_generation(rows: Sequence[GenerateRow]) -> str:
    first = rows[0]
    cells = (
        {
            "prompt": f"{row.length}",
            "attention": row.attention,
            "first token, ms": f"{row.first_token_ms:.1f}",
            "a token, ms": f"{row.token_ms:.3f}",
            "a token and layer, us": f"{1e3 * row.token_ms / row.model['num_layers']:.1f}",
            "tokens/s": f"{row.tokens_per_s:.0f}",
            "over its parts": f"{row.over_parts:.2f}",
            "products, attention, sampling alone, ms": ", ".join(
                f"{ms:.3f}" for ms in (row.products_ms, row.attention_ms, row.sampling_ms)
            ),
        }
        for row in rows
    )
    sizes = f"{first.model['dtype']}, batch {first.batch}, {_model_sizes(first)}"
    return "\n".join([f"{first.device}; {sizes}; {_made_by(first)}", "", *_table(cells)]).strip()


def _of_steps(rows: Sequence[TrainingRow]) -> str:
    first = rows[0]
    dense = {row.length: row.median_ms for row in rows if row.attention == "dense"}
    cells = (
        {
            "T": f"{row.length}",
            "attention": f"{row.attention} ({row.implementation})",
            "ms (p20-p80)": _milliseconds(row),
            "tokens/s": f"{row.tokens_per_s:.0f}",
            "dense / this": f"**{dense[row.length] / row.median_ms:.2f}**" if row.length in dense else "-",
            "MB": f"{row.peak_bytes / 1e6:.1f}",
            "parameters": f"{row.parameters / 1e6:.0f} M",
        }
        for row in rows
    )
    sizes = f"{first.model['dtype']}, batch {first.batch}, {_model_sizes(first)}"
    return "\n".join([f"{first.device}; {sizes}; {_made_by(first)}", "", *_table(cells)]).strip()


def whole_cells(row: Row, dense: Row) -> dict[str, str]:
    """The whole operation against dense attention."""
    time, memory = records.ratio(row, dense)
    return {
        **_where(row),
        "NSA ms (p20-p80)": _milliseconds(row),
        "dense ms (p20-p80)": _milliseconds(dense),
        "dense / NSA": f"**{time:.2f}**",
        **_moved(row),
        "NSA MB": f"{row.peak_bytes / 1e6:.1f}",
        "dense MB": f"{dense.peak_bytes / 1e6:.1f}",
        "dense / NSA memory": f"{memory:.1f}",
        **_ceiling_and_overlap(row),
    }


def operation_cells(row: Row) -> dict[str, str]:
    """One row that has no dense row beside it."""
    return {
        "operation": f"`{row.operation}`",
        "implementation": row.implementation,
        **_where(row),
        "ms (p20-p80)": _milliseconds(row),
        **({} if row.dense_over_this is None else {"dense / this": f"{row.dense_over_this:.2f}"}),
        **_moved(row),
        "MB": f"{row.peak_bytes / 1e6:.1f}",
        **_ceiling_and_overlap(row),
    }


def draw(rows: Sequence[Row], path: pathlib.Path) -> None:
    """Two panels a mode: milliseconds, and dense time over NSA time, against length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    modes = [mode for mode in records.MODES if any(row.mode == mode for row in rows)]
    figure, axes = pyplot.subplots(len(modes), 2, figsize=(13, 3.5 * len(modes)), squeeze=False)
    for mode, (times, ratios) in zip(modes, axes, strict=True):
        of_mode = [row for row in rows if row.mode == mode]
        for name, line in _lines(of_mode):
            lengths, medians = [row.length for row in line], [row.median_ms for row in line]
            (curve,) = times.plot(lengths, medians, marker="o", label=name)
            low, high = [row.p20_ms for row in line], [row.p80_ms for row in line]
            times.fill_between(lengths, low, high, color=curve.get_color(), alpha=0.2)
        pairs = sorted(records.beside_dense(of_mode), key=lambda pair: (_name(pair[0]), pair[0].length))
        for name, group in itertools.groupby(pairs, key=lambda pair: _name(pair[0])):
            points = [(row.length, records.ratio(row, dense)[0]) for row, dense in group]
            ratios.plot(*zip(*points, strict=True), marker="o", label=name)
        ratios.axhline(1, color="grey", linewidth=1)
        times.set(yscale="log", ylabel="ms (median, p20-p80)", title=f"{mode}: time")
        ratios.set(ylabel="dense time / NSA time", title=f"{mode}: speed-up over dense")
        for panel in (times, ratios):
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1024:g}k")
            panel.set_xlabel("tokens")
            panel.grid(alpha=0.3)
        times.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))  # beside many lines
        if pairs:
            ratios.legend(fontsize="small")
    figure.suptitle(f"{rows[0].device}, {rows[0].dtype}, run {rows[0].run_id}", fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _lines(rows: Iterable[Row]) -> Iterator[tuple[str, list[Row]]]:
    ordered = sorted(rows, key=lambda row: (_name(row), row.length))
    for name, group in itertools.groupby(ordered, key=_name):
        yield name, list(group)


def _name(row: Row) -> str:
    if row.operation in DENSE:
        return f"{DENSE[row.operation]} ({row.implementation})"
    operation = WHOLE.get(row.operation, row.operation)
    return f"{operation} ({row.implementation}, {row.distribution})"


def _where(row: Row) -> dict[str, str]:
    return {"T": f"{row.length}", "mode": row.mode, "distribution": row.distribution}


def _milliseconds(row: Row | TrainingRow) -> str:
    short = isinstance(row, Row) and row.gb_per_s is not None and row.median_ms < 1
    digits = 5 if short else 1 if row.median_ms >= 10 else 3
    return f"{row.median_ms:.{digits}f} ({row.p20_ms:.{digits}f}-{row.p80_ms:.{digits}f})"


def _moved(row: Row) -> dict[str, str]:
    """Of decode steps alone."""
    if row.gb_per_s is None or row.copy_share is None:
        return {}
    return {"GB/s (% of copy)": f"{row.gb_per_s:.1f} ({100 * row.copy_share:.0f})"}


def _ceiling_and_overlap(row: Row) -> dict[str, str]:
    overlap = "-" if row.adjacent_share is None else f"{row.adjacent_share:.2f} / {row.mean_union_4:.1f}"
    return {"% of floor": f"{100 * row.floor_ms / row.median_ms:.0f}", "share / union of 4": overlap}


def _table(cells: Iterable[dict[str, str]]) -> list[str]:
    rows = list(cells)
    if not rows:
        return []
    header = [list(rows[0]), ["---"] * len(rows[0])]
    body = [list(row.values()) for row in rows]
    return [*("| " + " | ".join(line) + " |" for line in header + body), ""]


def main(argv: Sequence[str] | None = None) -> int:
    """Draws or prints each file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("--run-id")
    parser.add_argument("--markdown", action="store_true", help="print tables, draw nothing")
    options = parser.parse_args(argv)
    for path in options.files:
        rows = one_run(records.read(path), options.run_id)
        if options.markdown:
            print(f"<!-- {path.as_posix()} -->\n{markdown(rows)}\n")
            continue
        drawn = [row for row in rows if isinstance(row, Row)]
        if len({row.length for row in drawn}) > 1:
            picture = path.with_suffix(".png")
            draw(drawn, picture)
            print(picture)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
