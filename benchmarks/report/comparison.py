"""How rows of this machine compare with those that the repository holds, on the nearest device."""

import collections
import difflib
import statistics
from collections.abc import Iterable, Sequence

from benchmarks import records
from benchmarks.records import Row

# What two rows must share to be of the same measurement.
SETTING = (
    *("benchmark", "operation", "mode", "distribution", "strategy", "mesh", "attention", "batch", "length"),
    *("query_heads", "kv_heads", "key_dim", "value_dim", "model_dim", "dtype", "config"),
    *("cache_dtype", "new_tokens", "compression", "num_layers"),
)
# Of a model: its later options have defaults that older rows do not name.
MODEL = ("num_layers", "model_dim", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "dtype")

type Pair = tuple[Row, Row | None]  # of this machine, and the committed one that is nearest to it


def milliseconds(row: Row) -> float:
    """The figure of a row that is compared."""
    return row.token_ms or row.median_ms


def setting(row: Row) -> tuple[str, ...]:
    """What was measured, and on what kind of device: times of CPUs say nothing about GPUs."""
    found = ("NVIDIA" in row.device, row.implementation, row.devices or 1, *map(row.get, SETTING))
    return tuple(map(str, (*found, *map((row.model or {}).get, MODEL))))


def committed_rows() -> list[Row]:
    """All rows of the repository."""
    files = sorted((records.ROOT / "benchmarks" / "results").glob("*.jsonl"))
    return [row for path in files for row in records.read(path)]


def pairs(rows: Iterable[Row], committed: Iterable[Row]) -> list[Pair]:
    """Each row with the newest committed one of the same setting on the device with the nearest name."""
    known = collections.defaultdict(list)
    for row in committed:
        known[setting(row)].append(row)

    def nearest(row: Row) -> Row | None:
        def likeness(other: Row) -> tuple[float, str]:
            return difflib.SequenceMatcher(None, row.device, other.device).ratio(), other.run_id

        return max(known[setting(row)], key=likeness, default=None)

    return [(row, nearest(row)) for row in rows]


def ratio(row: Row, committed: Row) -> float:
    """Time here over the committed time: above 1, this machine is slower."""
    return milliseconds(row) / milliseconds(committed)


def summary(found: Sequence[Pair]) -> str:
    """How many rows have a committed one, and the ratios in one line."""
    ratios = [ratio(row, committed) for row, committed in found if committed is not None]
    if not ratios:
        return f"The repository has none of the {len(found)} measurements of this machine."
    return (
        f"The repository has {len(ratios)} of the {len(found)} measurements of this machine. Time here over "
        f"the committed time: median **{statistics.median(ratios):.2f}**, from {min(ratios):.2f} to "
        f"{max(ratios):.2f}."
    )
