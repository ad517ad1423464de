"""Tables of documents from committed rows, so that no figure is ever typed by hand.

`python -m benchmarks.tables benchmarks/results/*.jsonl` prints the tables of each file. Of a file with
several runs it takes the newest, or that of `--run-id`. In a document a table stands right behind the line
`<!-- benchmarks/results/NAME.jsonl -->`, and a test compares it with the file.
"""

import itertools
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks import records
from benchmarks.command_line import InputError, Parser, command
from benchmarks.records import Row

type Cells = dict[str, str]


def one_run(rows: Sequence[Row], run_id: str | None = None) -> list[Row]:
    """The rows of one run, the newest by default.

    Raises:
      InputError: there is no such run.
    """
    wanted = run_id or max((row.run_id for row in rows), default=None)
    chosen = [row for row in rows if row.run_id == wanted]
    if not chosen:
        known = sorted({row.run_id for row in rows})
        raise InputError(f"run_id must be one of {known}, got {wanted}. Choose another file.")
    return chosen


def markdown(rows: Sequence[Row]) -> str:
    """Tables of one run: the whole operation beside dense attention, then single operations; or its steps."""
    tables = {
        "batcher": _of_requests,
        "generate": _of_generation,
        "parallel": _of_strategies,
        "targets": _of_targets,
        "training": _of_steps,
    }
    first = rows[0]
    sizes, lines = tables.get(first.benchmark, _of_operations)(rows)
    triton = f"triton {first.triton}, " if first.triton else ""
    made_by = f"jax {first.jax}, {triton}commit `{first.commit}`, run `{first.run_id}`."
    return "\n".join([f"{first.device}; {sizes}; {made_by}", "", *lines]).strip()


def _of_operations(rows: Sequence[Row]) -> tuple[str, list[str]]:
    rows = sorted(rows, key=lambda row: (row.length, records.MODES.index(row.mode)))
    pairs = records.beside_dense(rows)
    several = len({row.implementation for row, _ in pairs}) > 1
    lines = table(_whole(*pair, several) for pair in pairs if pair[0].model_dim is None)
    layers = [pair for pair in pairs if pair[0].model_dim is not None]
    for width, group in itertools.groupby(layers, key=lambda pair: pair[0].model_dim):
        lines += [f"Whole layers of width {width}:", "", *table(_whole(*pair, several) for pair in group)]
    paired = {id(row) for pair in pairs for row in pair}
    lines += table(_alone(row) for row in rows if id(row) not in paired)
    first = next((row for row in rows if row.compression), rows[0])
    sizes = f"{first.dtype}, batch {first.batch}, {_heads(first)}"
    if first.new_tokens:  # rows of decode steps
        tokens = "1 token" if first.new_tokens == 1 else f"{first.new_tokens} tokens"
        most = max(row.num_layers or 1 for row in rows)
        compression = f", {first.compression} compression" if first.compression else ""
        sizes += f", {tokens} a step{compression}, {most} layers in the loop"
        sizes += f", cache in {first.cache_dtype}" if first.cache_dtype else ""
    return sizes, lines


def _whole(row: Row, dense: Row, several: bool) -> Cells:
    """The whole operation against dense attention; `several` implementations are told apart."""
    time, memory = records.ratio(row, dense)
    return {
        **({"implementation": row.implementation} if several else {}),
        **_where(row),
        "NSA ms (p20-p80)": _milliseconds(row),
        "dense ms (p20-p80)": _milliseconds(dense),
        "dense / NSA": f"**{time:.2f}**",
        **({} if row.bound_ms is None else {"bound, ms": f"{row.bound_ms:.5f}"}),
        **_moved(row),
        "NSA MB": f"{row.peak_bytes / 1e6:.1f}",
        "dense MB": f"{dense.peak_bytes / 1e6:.1f}",
        "dense / NSA memory": f"{memory:.1f}",
        **_ceiling_and_overlap(row),
    }


def _alone(row: Row) -> Cells:
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


def _of_generation(rows: Sequence[Row]) -> tuple[str, list[str]]:
    several, streams = any(row.spread for row in rows), any(row.streamed_ms for row in rows)
    one = {row.length: row.tokens_per_s for row in rows if row.attention == "nsa" and not row.spread}

    def on_several(row: Row) -> Cells:
        times = f"**{row.tokens_per_s / one[row.length]:.2f}**" if row.length in one else "-"
        spread = f"{row.devices}, by {row.spread}" if row.spread else "1"
        return {"devices": spread, "rows": f"{row.batch}", "this / one device, tokens/s": times}

    def cells(row: Row) -> Cells:
        parts = (row.products_ms, row.attention_ms, row.sampling_ms)
        return {
            "prompt": f"{row.length}",
            "attention": row.attention,
            **(on_several(row) if several else {}),
            "first token, ms": f"{row.first_token_ms:.1f}",
            "a token, ms": f"{row.token_ms:.3f}",
            **({"streamed, ms": _or_dash(row.streamed_ms, ".3f")} if streams else {}),
            "a token and layer, us": f"{1e3 * row.token_ms / row.model['num_layers']:.1f}",
            "tokens/s": f"{row.tokens_per_s:.0f}",
            "over its parts": _or_dash(row.over_parts, ".2f"),
            "products, attention, sampling alone, ms": ", ".join(_or_dash(ms, ".3f") for ms in parts),
        }

    return _model_sizes(rows[0]), table(map(cells, rows))


def _of_steps(rows: Sequence[Row]) -> tuple[str, list[str]]:
    several = any((row.devices or 1) > 1 for row in rows)
    dense = {row.length: row.median_ms for row in rows if row.attention == "dense"}
    one = {row.length: row.median_ms for row in rows if row.attention == "nsa" and row.devices in (None, 1)}

    def cells(row: Row) -> Cells:
        faster = {"devices": f"{row.devices}", "one device / this": _times(row, one, row.length)}
        return {
            "T": f"{row.length}",
            "attention": f"{row.attention} ({row.implementation})",
            **(faster if several else {}),
            "ms (p20-p80)": _milliseconds(row),
            "tokens/s": f"{row.tokens_per_s:.0f}",
            "dense / this": _times(row, dense, row.length),
            "MB": f"{row.peak_bytes / 1e6:.1f}",
            "parameters": f"{row.parameters / 1e6:.0f} M",
        }

    return _model_sizes(rows[0]), table(map(cells, rows))


def _of_requests(rows: Sequence[Row]) -> tuple[str, list[str]]:
    def cells(row: Row) -> Cells:
        return {
            "what": row.strategy,
            "attention": row.attention,
            "seconds": f"{row.median_ms / 1e3:.2f}",
            "tokens/s": f"{row.tokens_per_s:.0f}",
            "first token of one more, ms": f"{row.first_token_ms:.1f}",
            "a step of the others, ms": _or_dash(row.token_ms, ".3f"),
        }

    return _model_sizes(rows[0]), table(map(cells, rows))


def _of_strategies(rows: Sequence[Row]) -> tuple[str, list[str]]:
    def setting(row: Row) -> tuple[Any, ...]:
        return row.length, row.mode, row.distribution

    def cells(row: Row) -> Cells:
        return {
            "T": f"{row.length}",
            "mode": row.mode,
            "selection": row.distribution,
            "strategy": row.strategy.replace("heads_jit", "heads, plain jit"),
            "mesh": row.mesh,
            "ms (p20-p80)": _milliseconds(row),
            "one device / this": _times(row, one, setting(row)),
            "MB of each device": f"{row.peak_bytes / 1e6:.1f}",
        }

    first, one = rows[0], {setting(row): row.median_ms for row in rows if row.strategy == "one"}
    sizes = f"{first.implementation}, {first.dtype}, batch {first.batch}, {_heads(first)}"
    return sizes, table(map(cells, sorted(rows, key=setting)))


def _of_targets(rows: Sequence[Row]) -> tuple[str, list[str]]:
    def setting(row: Row) -> tuple[Any, ...]:
        return row.length, row.mode, row.config["selection_block_size"], row.distribution

    def cells(row: Row) -> Cells:
        added = "-" if row.added_share is None else f"**{100 * row.added_share:.1f} %**"
        length, mode, block_size, distribution = setting(row)
        return {
            "T": f"{length}",
            "operation": f"`{row.operation}`, {row.strategy}",
            "implementation": row.implementation,
            "mode": mode,
            "blocks of": f"{block_size}",
            "selection": distribution,
            "ms (p20-p80)": _milliseconds(row),
            **({"dense / this": _times(row, dense, setting(row))} if dense else {"added": added}),
            **_ceiling_and_overlap(row),
        }

    first = rows[0]
    dense = {setting(row): row.median_ms for row in rows if row.strategy == "dense"}
    sizes = f"{first.dtype}, batch {first.batch}, {_heads(first)}"
    return sizes, table(map(cells, sorted(rows, key=setting)))


def _heads(row: Row) -> str:
    return f"{row.query_heads} query heads, {row.kv_heads} KV heads, dim {row.key_dim}/{row.value_dim}"


def _model_sizes(row: Row) -> str:
    names = ("num_layers", "model_dim", "num_heads", "num_kv_heads", "head_dim")
    sizes = (f"`{name}` {row.model[name]}" for name in names)
    return f"{row.model['dtype']}, batch {row.batch}, {', '.join(sizes)}"


def _where(row: Row) -> Cells:
    return {"T": f"{row.length}", "mode": row.mode, "distribution": row.distribution}


def _milliseconds(row: Row) -> str:
    short = row.gb_per_s is not None and row.median_ms < 1
    digits = 5 if short else 1 if row.median_ms >= 10 else 3
    return f"{row.median_ms:.{digits}f} ({row.p20_ms:.{digits}f}-{row.p80_ms:.{digits}f})"


def _times(row: Row, others: Mapping[Any, float], setting: Any) -> str:
    return f"**{others[setting] / row.median_ms:.2f}**" if setting in others else "-"


def _moved(row: Row) -> Cells:
    """Of decode steps alone."""
    if row.gb_per_s is None:
        return {}
    return {"GB/s (% of copy)": f"{row.gb_per_s:.1f} ({100 * row.copy_share:.0f})"}


def _ceiling_and_overlap(row: Row) -> Cells:
    overlap = "-" if row.adjacent_share is None else f"{row.adjacent_share:.2f} / {row.mean_union_4:.1f}"
    share = None if row.floor_share is None else 100 * row.floor_share
    return {"% of floor": _or_dash(share, ".0f"), "share / union of 4": overlap}


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def table(cells: Iterable[Cells]) -> list[str]:
    """The lines of a table with a column for each key, and an empty one; none for no rows."""
    rows = list(cells)
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(row.values() for row in rows)] if rows else []
    return [*("| " + " | ".join(line) + " |" for line in lines), *([""] if rows else [])]


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
