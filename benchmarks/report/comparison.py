"""How rows of this machine compare with those that the repository holds, on the nearest device."""

import dataclasses
import difflib
import pathlib
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks import records
from benchmarks.records import AnyRow, GenerateRow, Row

COMMITTED = records.ROOT / "benchmarks" / "results"
# What two rows must share to be of the same measurement.
SETTING = (
    *("benchmark", "operation", "mode", "distribution", "strategy", "mesh", "attention"),
    *("batch", "length", "query_heads", "kv_heads", "key_dim", "value_dim", "model_dim"),
    *("dtype", "config"),
)
# The same of decode steps; rows of before version 0.2 say none of it, and had one setting.
OF_DECODING = ("new_tokens", "compression", "num_layers")
# Of a model: its later options have defaults that older rows do not name.
MODEL = ("num_layers", "model_dim", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "dtype")


@dataclasses.dataclass(frozen=True)
class Pair:
    """A row of this machine, and the committed one that is nearest to it, if there is one."""

    row: AnyRow
    committed: AnyRow | None

    @property
    def ratio(self) -> float | None:
        """Time here over the committed time: above 1, this machine is slower."""
        return None if self.committed is None else milliseconds(self.row) / milliseconds(self.committed)


def milliseconds(row: AnyRow) -> float:
    """The figure of a row that is compared."""
    return row.token_ms if isinstance(row, GenerateRow) else row.median_ms


def setting(row: AnyRow) -> tuple[Any, ...]:
    """What was measured, without where and when."""
    found = [implementation(row), *(getattr(row, name, None) for name in SETTING)]
    model = getattr(row, "model", {})
    return tuple(map(str, [*found, *(model.get(name) for name in MODEL)]))


def committed_rows(folder: pathlib.Path = COMMITTED) -> list[AnyRow]:
    """All rows of the repository."""
    return [row for path in sorted(folder.glob("*.jsonl")) for row in records.read(path)]


def pairs(rows: Iterable[AnyRow], committed: Iterable[AnyRow]) -> list[Pair]:
    """Each row with the newest committed one of the same setting on the device with the nearest name."""
    known: dict[tuple[Any, ...], list[AnyRow]] = {}
    for row in committed:
        known.setdefault(setting(row), []).append(row)

    def nearest(row: AnyRow) -> AnyRow | None:
        same = [other for other in known.get(setting(row), []) if is_gpu(other) == is_gpu(row)]
        same = [other for other in same if decodes_alike(row, other)]
        return max(same, key=lambda other: (likeness(row, other), other.run_id), default=None)

    return [Pair(row, nearest(row)) for row in rows]


def implementation(row: AnyRow) -> str | None:
    """What ran. In decode rows of before version 0.2 dense attention by xla was that of `jax.nn`."""
    if isinstance(row, Row) and row.benchmark == "decode" and row.num_layers is None:
        return "jax_nn" if row.operation == "dense_attention" else row.implementation
    return getattr(row, "implementation", None)


def decodes_alike(row: AnyRow, committed: AnyRow) -> bool:
    """Whether a committed row is of the same kind of step, as far as it says so."""
    told = {name: getattr(committed, name, None) for name in OF_DECODING}
    return all(value is None or value == getattr(row, name, None) for name, value in told.items())


def is_gpu(row: AnyRow) -> bool:
    """Whether the row is of an NVIDIA GPU; times of CPUs say nothing about those."""
    return "NVIDIA" in row.device


def likeness(row: AnyRow, other: AnyRow) -> float:
    """From 0 to 1: how much the names of two devices have in common."""
    return difflib.SequenceMatcher(None, row.device, other.device).ratio()


def summary(found: Sequence[Pair]) -> str:
    """How many rows have a committed one, and the ratios in one line."""
    ratios = [pair.ratio for pair in found if pair.ratio is not None]
    if not ratios:
        return f"The repository has none of the {len(found)} measurements of this machine."
    return (
        f"The repository has {len(ratios)} of the {len(found)} measurements of this machine. Time here over "
        f"the committed time: median **{statistics.median(ratios):.2f}**, from {min(ratios):.2f} to "
        f"{max(ratios):.2f}."
    )
