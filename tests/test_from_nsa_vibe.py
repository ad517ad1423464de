"""`docs/from_nsa_vibe.md` answers every switch, and its figures of ours are those of the rows."""

import pathlib
import re

from test_cache_reads import DESIGN_FIGURES

from benchmarks import records
from benchmarks.decode.inputs import NUM_STEPS
from nsa_jax import NSAConfig
from nsa_jax.cache import expected_reads

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/from_nsa_vibe.md").read_text(encoding="utf-8")
SWITCHES = {
    *("NSA_USE_TRITON_SEL", "NSA_TRITON_SEL_FORCE", "NSA_SEL_TRITON_ALLOW_GRAD", "NSA_SEL_TRITON_MIN_L"),
    *("NSA_SEL_TRITON_GROUP", "NSA_USE_FA2", "NSA_FA2_MIN_LEN_WIN", "NSA_FA2_MIN_LEN_CMP"),
    *("NSA_FA2_FORCE_VARLEN", "NSA_FA2_FORCE_DENSE", "NSA_DEBUG_LOG", "NSA_LOG_LIMIT", "NSA_DEBUG_TIMING"),
    *("NSA_DEBUG_COMPARE", "NSA_TEST_FA2", "NSA_TEST_TRITON_SEL", "NSA_TEST_TRAIN"),
}


def table(start: str) -> list[list[str]]:
    """The rows of the table whose header begins like this."""
    (rows,) = [block.splitlines()[2:] for block in PAGE.split("\n\n") if block.startswith(f"| {start} |")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_every_switch_has_an_answer():
    answers = {switch.strip("`"): here for switch, _, here in table("switch")}

    assert set(answers) == SWITCHES
    assert all(answers.values())


def test_figures_of_ours_are_those_of_the_rows():
    ours = [row for row in table("run") if row[0].startswith("`nsa_jax`")]
    lengths = [int(word) for word in re.findall(r"\d+", PAGE.partition("| run |")[2].splitlines()[0])]

    assert ours
    for run, file, mode, *cells in ours:
        rows = {
            row.length: row
            for row in records.read(ROOT / f"benchmarks/results/{file.strip('`')}.jsonl")
            if (row.operation, f"`{row.mode}`") == ("layer", mode.split(":")[0])
        }
        found = [rows[length] for length in lengths]
        assert cells == [f"{row.median_ms:.3f}" for row in found], run
        assert run == f"`nsa_jax`, {found[0].device.removeprefix('NVIDIA ')}, {found[0].dtype}"
        shape = {(row.batch, row.model_dim, row.query_heads, row.kv_heads, row.key_dim) for row in found}
        assert shape == {(1, 256, 8, 2, 32)}, run


def test_reads_of_ours_are_those_of_the_cache():
    """`test_cache_reads` counts them."""
    rows = {int(before) + NUM_STEPS: cells for before, *cells in table("tokens before the steps")}

    assert {length: int(cells[2]) for length, cells in rows.items()} == DESIGN_FIGURES
    for length, (_, theirs, _, ours) in rows.items():
        assert int(theirs) == int(ours) == expected_reads(length, NSAConfig())
