"""Tables of documents from committed rows, so that no figure is ever typed by hand.

`python -m benchmarks.tables benchmarks/results/*.jsonl` prints the tables of each file. Of a file with
several runs it takes the newest, or that of `--run-id`. In a document a table stands right behind the line
`<!-- benchmarks/results/NAME.jsonl -->`, and a test compares it with the file.
"""

import itertools
import pathlib
from collections.abc import Iterable, Mapping, Sequence

from benchmarks import records
from benchmarks.command_line import InputError, Parser, command
from benchmarks.records import AnyRow, GenerateRow, ParallelRow, Row, TrainingRow


def one_run(rows: Sequence[AnyRow], run_id: str | None = None) -> list[AnyRow]:
    """The rows of one run, the newest by default.

    Raises:
      ValueError: there is no such run.
    """
    wanted = run_id or max((row.run_id for row in rows), default=None)
    chosen = [row for row in rows if row.run_id == wanted]
    if not chosen:
        known = sorted({row.run_id for row in rows})
        raise InputError(f"run_id must be one of {known}, got {wanted}. Choose another file.")
    return chosen


def markdown(rows: Sequence[AnyRow]) -> str:
    """Tables of one run: the whole operation beside dense attention, then single operations; or its steps."""
    if written := [row for row in rows if isinstance(row, GenerateRow)]:
        return _of_generation(written)
    if spread := [row for row in rows if isinstance(row, ParallelRow)]:
        return _of_strategies(spread)
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
    several = len({row.implementation for row, _ in pairs}) > 1
    lines += _table(whole_cells(*pair, several) for pair in pairs if pair[0].model_dim is None)
    layers = [(row, dense) for row, dense in pairs if row.model_dim is not None]
    for width, group in itertools.groupby(layers, key=lambda pair: pair[0].model_dim):
        lines += [
            f"Whole layers of width {width}:",
            "",
            *_table(whole_cells(*pair, several) for pair in group),
        ]
    paired = {id(row) for pair in pairs for row in pair}
    lines += _table(operation_cells(row) for row in rows if id(row) not in paired)
    return "\n".join(lines).strip()


def _model_sizes(row: TrainingRow | GenerateRow) -> str:
    names = ("num_layers", "model_dim", "num_heads", "num_kv_heads", "head_dim")
    return ", ".join(f"`{name}` {row.model[name]}" for name in names)


def _of_generation(rows: Sequence[GenerateRow]) -> str:
    first = rows[0]
    several = any(row.devices > 1 for row in rows)
    cells = (
        {
            "prompt": f"{row.length}",
            "attention": row.attention,
            **({"batch": f"{row.batch}", "devices": _spread(row)} if several else {}),
            "first token, ms": f"{row.first_token_ms:.1f}",
            "a token, ms": f"{row.token_ms:.3f}",
            "a token and layer, us": f"{1e3 * row.token_ms / row.model['num_layers']:.1f}",
            "tokens/s": f"{row.tokens_per_s:.0f}",
            "over its parts": "-" if row.over_parts is None else f"{row.over_parts:.2f}",
            "products, attention, sampling alone, ms": ", ".join(
                "-" if ms is None else f"{ms:.3f}"
                for ms in (row.products_ms, row.attention_ms, row.sampling_ms)
            ),
        }
        for row in rows
    )
    batch = "" if several else f"batch {first.batch}, "
    sizes = f"{first.model['dtype']}, {batch}{_model_sizes(first)}"
    return "\n".join([f"{first.device}; {sizes}; {_made_by(first)}", "", *_table(cells)]).strip()


def _spread(row: GenerateRow) -> str:
    return "1" if row.devices == 1 else f"{row.devices}, by {row.spread}"


def _of_steps(rows: Sequence[TrainingRow]) -> str:
    first = rows[0]
    dense = {row.length: row.median_ms for row in rows if row.attention == "dense"}
    one = {row.length: row.median_ms for row in rows if row.attention == "nsa" and row.devices == 1}
    several = any(row.devices > 1 for row in rows)
    cells = (
        {
            "T": f"{row.length}",
            "attention": f"{row.attention} ({row.implementation})",
            **({"devices": f"{row.devices}", "one device / this": _times(row, one)} if several else {}),
            "ms (p20-p80)": _milliseconds(row),
            "tokens/s": f"{row.tokens_per_s:.0f}",
            "dense / this": _times(row, dense),
            "MB": f"{row.peak_bytes / 1e6:.1f}",
            "parameters": f"{row.parameters / 1e6:.0f} M",
        }
        for row in rows
    )
    sizes = f"{first.model['dtype']}, batch {first.batch}, {_model_sizes(first)}"
    return "\n".join([f"{first.device}; {sizes}; {_made_by(first)}", "", *_table(cells)]).strip()


def _times(row: TrainingRow, others: Mapping[int, float]) -> str:
    return f"**{others[row.length] / row.median_ms:.2f}**" if row.length in others else "-"


def _setting(row: ParallelRow) -> tuple[object, ...]:
    return row.length, row.mode, row.distribution


def _of_strategies(rows: Sequence[ParallelRow]) -> str:
    def faster(row: ParallelRow) -> str:
        return f"**{one[_setting(row)] / row.median_ms:.2f}**" if _setting(row) in one else "-"

    one = {_setting(row): row.median_ms for row in rows if row.strategy == "one"}
    cells = (
        {
            "T": f"{row.length}",
            "mode": row.mode,
            "selection": row.distribution,
            "strategy": row.strategy.replace("heads_jit", "heads, plain jit"),
            "mesh": row.mesh,
            "ms (p20-p80)": _milliseconds(row),
            "one device / this": faster(row),
            "MB of each device": f"{row.peak_bytes / 1e6:.1f}",
        }
        for row in sorted(rows, key=_setting)
    )
    return "\n".join([_sizes_of_strategies(rows), "", *_table(cells)]).strip()


def _sizes_of_strategies(rows: Sequence[ParallelRow]) -> str:
    first = rows[0]
    heads = (
        f"{first.query_heads} query heads, {first.kv_heads} KV heads, dim {first.key_dim}/{first.value_dim}"
    )
    sizes = f"{first.implementation}, {first.dtype}, batch {first.batch}, {heads}"
    return f"{first.device}; {sizes}; {_made_by(first)}"


def whole_cells(row: Row, dense: Row, several: bool) -> dict[str, str]:
    """The whole operation against dense attention; `several` implementations are told apart."""
    time, memory = records.ratio(row, dense)
    return {
        **({"implementation": row.implementation} if several else {}),
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


def _where(row: Row) -> dict[str, str]:
    return {"T": f"{row.length}", "mode": row.mode, "distribution": row.distribution}


def _milliseconds(row: Row | TrainingRow | ParallelRow) -> str:
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


@command("benchmarks.tables")
def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables of each file."""
    parser = Parser(prog="python -m benchmarks.tables", description=__doc__.split("\n\n")[0])
    parser.add_argument("files", nargs="+", type=pathlib.Path, help="JSONL files of benchmarks")
    parser.add_argument("--run-id", help="the run to print; default: the newest of each file")
    options = parser.parse_args(argv)
    for path in options.files:
        print(f"<!-- {path.as_posix()} -->\n{markdown(one_run(records.read(path), options.run_id))}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
