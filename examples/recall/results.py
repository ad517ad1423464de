"""What was measured: one row for each seed and model, as JSON lines and as tables."""

import dataclasses
import json
import pathlib
from collections.abc import Iterable
from typing import Any, Literal

from examples.recall.inspection import BRANCHES, Inspection
from examples.recall.task import NEEDED_ACCURACY, WINDOW_BAR, RecallTask, window_reach
from nsa_jax.config import NSAConfig

COMMITTED = pathlib.Path(__file__).resolve().parent.parent / "results" / "recall.jsonl"
type Arm = Literal["nsa", "indexer", "window"]

NAMES: dict[Arm, str] = {"nsa": "NSA", "indexer": "NSA with an indexer", "window": "window alone"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One model of one seed; `seconds` is its training, compilation and validations counted in."""

    run_id: str
    example: str
    attention: Arm
    seed: int
    steps: int
    seconds: float
    accuracy: float
    loss: float
    chance: float
    scored_answers: int
    parameters: int
    inspection: dict[str, Any] | None
    task: dict[str, Any]
    model: dict[str, Any]
    schedule: dict[str, Any]
    device: str
    jax: str
    jaxlib: str
    triton: str | None = None  # None where it is not installed, and in rows of before it was noted
    flax: str
    commit: str


def append(path: pathlib.Path, row: Row) -> None:
    """Adds a row as soon as it is measured, so that an interrupted run keeps what it has."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(dataclasses.asdict(row)) + "\n")


def read(path: pathlib.Path) -> list[Row]:
    """All rows of a file.

    Raises:
      ValueError: the file is missing or holds something else than rows.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [Row(**json.loads(line)) for line in lines if line.strip()]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"results must be rows of this example, got {reason}. Pass a file it wrote."
        ) from error
    if not rows:
        raise ValueError(f"results must hold at least one row, got none in {path.name}. Run the example.")
    return rows


def markdown(rows: list[Row]) -> str:
    """The rows as Markdown: what was asked, the accuracies, what the last NSA model does."""
    return "\n\n".join(filter(None, (_setting(rows[-1]), _accuracies(rows), _inspections(rows))))


def verdict(rows: Iterable[Row]) -> str:
    """Whether the rows show what the example claims."""
    lines = []
    for row in rows:
        if row.attention == "window":
            met, bar = row.accuracy < WINDOW_BAR, f"< {WINDOW_BAR:.0%}"
        else:
            met, bar = row.accuracy >= NEEDED_ACCURACY, f">= {NEEDED_ACCURACY:.0%}"
        lines.append(
            f"seed {row.seed}, {NAMES[row.attention]}: {row.accuracy:.2%}, wanted {bar}: "
            f"{'met' if met else 'MISSED'} (chance {row.chance:.2%})"
        )
    return "\n".join(lines)


def _setting(row: Row) -> str:
    task, nsa = row.task, NSAConfig(**row.model["nsa"])
    selected = nsa.num_selected_blocks * nsa.selection_block_size
    distance = RecallTask(**task).min_distance
    layers = row.model["num_layers"]
    return (
        f"T = {task['length']}, {task['num_pairs']} pairs, {task['num_queries']} queries, at least "
        f"{distance} tokens from a value to its query. {layers} layers; l = {nsa.compression_block_size}, "
        f"d = {nsa.compression_stride}, l' = {nsa.selection_block_size}, n = {nsa.num_selected_blocks}, "
        f"w = {nsa.window_size}: n l' + w = {selected + nsa.window_size} of {task['length']} tokens, windows "
        f"reach less than {window_reach(nsa, layers)}. Chance {row.chance:.2%}. "
        f"{row.device}, jax {row.jax}, commit {row.commit}."
    )


def _accuracies(rows: list[Row]) -> str:
    return _table(
        ("seed", "model", "accuracy", "loss (nats)", "steps", "seconds", "parameters"),
        [
            (
                str(row.seed),
                NAMES[row.attention],
                f"{row.accuracy:.2%}",
                f"{row.loss:.3f}",
                str(row.steps),
                f"{row.seconds:.0f}",
                str(row.parameters),
            )
            for row in sorted(rows, key=lambda row: (row.seed, row.attention))
        ],
    )


def _inspections(rows: list[Row]) -> str:
    """Which branch recalls in each NSA model, and the sharing of blocks, averaged over them."""
    inspected = sorted((row for row in rows if row.inspection), key=lambda row: row.seed)
    if not inspected:
        return ""
    found = [Inspection.from_json(row.inspection or {}) for row in inspected]
    layers = range(len(found[0].answer_block_selected))
    branches = _table(
        (
            "seed",
            *(f"accuracy without {branch}" for branch in BRANCHES),
            *(f"answer's block selected, layer {i + 1}" for i in layers),
        ),
        [
            (
                str(row.seed),
                *(f"{one.accuracy_without[branch]:.2%}" for branch in BRANCHES),
                *(f"{share:.1%}" for share in one.answer_block_selected),
            )
            for row, one in zip(inspected, found, strict=True)
        ],
    )
    shares = []
    for same in zip(*(one.sharing for one in found), strict=True):
        n = same[0].num_selected_blocks
        share = sum(one.adjacent_share for one in same) / len(same)
        union = sum(one.mean_union_4 for one in same) / len(same)
        shares.append((same[0].selection, str(n), f"{share:.1%}", f"{union:.2f}", f"{union / n:.2f}"))
    header = ("selection", "n", "adjacent share", "mean union of 4 tokens", "union / n")
    return branches + "\n\n" + _table(header, shares)


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table that is Markdown and lines up in a terminal too."""
    cells = [header, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])
