"""Links lead somewhere, figures are as new as their rows, and the reference has every public name.

The site itself is built by `tox -e docs`, which fails on broken links between pages. These tests check what
that build cannot see.
"""

import importlib
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from benchmarks import plot, records
from benchmarks.records import Row
from benchmarks.tables import one_run

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
DECODE_STEPS = {
    "h200": "| rows | what | batch |",
    "h100": "| rows | what, on an H100 | batch |",
}
DUBLIN_CORE = "{http://purl.org/dc/elements/1.1/}"
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
# Documents that are read in the repository, where the site does not check them.
OUTSIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
# The reference documents the `__all__` of these packages, and the names in MORE.
PUBLIC = (
    *("nsa_jax", "nsa_jax.nn", "nsa_jax.model", "nsa_jax.generate", "nsa_jax.cache", "nsa_jax.parallel"),
    *("nsa_jax.evaluate", "nsa_jax.pretrained", "nsa_torch_ref"),
)
MORE = {
    *("nsa_jax.array_typing.Attended", "nsa_jax.dispatch.Choice"),
    *("nsa_jax.remat.SAVED_NAMES", "nsa_torch_ref.loading.load_layers"),
    *(f"nsa_jax.debug.check_{what}" for what in ("block_indices", "cu_seqlens", "query_positions", "runs")),
    *("nsa_jax.debug.check_segment_ids", "nsa_jax.debug.checked"),
}


def heading_ids(document: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a document."""
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken_links(document: Path) -> list[str]:
    found = []
    for target, anchor in LINK.findall(document.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path = document.parent / target
        if not path.exists():
            found.append(target)
        elif anchor and anchor[1:] not in heading_ids(path):
            found.append(target + anchor)
    return found


@pytest.mark.parametrize("document", OUTSIDE)
def test_links_lead_somewhere(document):
    assert broken_links(ROOT / document) == []


def test_links_that_lead_nowhere_are_found(tmp_path):
    (tmp_path / "other.md").write_text("# A first heading, `x`\n")
    page = tmp_path / "page.md"
    page.write_text("[a](other.md) [b](other.md#a-first-heading-x) [c](gone.md) [d](other.md#second)\n")

    assert broken_links(page) == ["gone.md", "other.md#second"]


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def shown_by(figure: Path) -> tuple[str, str]:
    """The file that a figure was drawn from, and the hash of its rows."""
    metadata = ElementTree.parse(figure)
    source, identifier = (metadata.find(f".//{DUBLIN_CORE}{name}") for name in ("source", "identifier"))
    return source.text, identifier.text


@pytest.mark.parametrize("figure", sorted(DOCS.rglob("images/*.svg")), ids=lambda path: path.name)
def test_figures_are_as_new_as_their_rows(figure):
    source, fingerprint = shown_by(figure)
    rows = [
        row for file in source.split() for row in one_run(records.read(ROOT / file)) if isinstance(row, Row)
    ]

    assert plot.fingerprint(rows) == fingerprint, f"run python -m benchmarks.plot {source}"


def steps_of_rows(file: str, length: int) -> list[str]:
    """The cells of a decode step: batch, length; in a loop times, ratio, share of a copy; by the host."""
    rows = [row for row in one_run(records.read(RESULTS / f"{file}.jsonl")) if row.length == length]
    pairs = {row.mode: (row, dense) for row, dense in records.beside_dense(rows)}
    (row, dense), by_host = pairs["decode_loop"], pairs["decode"]
    ratio, _ = records.ratio(row, dense)
    times = [f"{1e3 * step.median_ms:.1f}" for step in (row, dense)]
    started = ", ".join(f"{1e3 * step.median_ms:.0f}" for step in by_host)
    share = f"{100 * row.copy_share:.0f}"
    return [f"{row.batch}", f"{length}", *times, f"**{ratio:.2f}**", share, started]


@pytest.mark.parametrize("gpu", DECODE_STEPS)
def test_decode_steps_are_those_of_the_rows(gpu):
    page = (DOCS / "decode.md").read_text(encoding="utf-8")
    table = page.partition(DECODE_STEPS[gpu])[2].split("\n\n")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]

    shown = {(file.strip("`"), int(cells[1])): cells for file, _, *cells in lines}

    assert shown == {(file, length): steps_of_rows(file, length) for file, length in shown}
    assert {file for file, _ in shown} == {path.stem for path in RESULTS.glob(f"{gpu}_decode_*.jsonl")}


@pytest.mark.parametrize("first_cell", ["query / KV heads, dim", "as in"])
def test_models_are_those_of_the_rows(first_cell):
    table = (DOCS / "results.md").read_text(encoding="utf-8").partition(f"\n| {first_cell} |")[2]
    names, _, *models = table.split("\n\n")[0].splitlines()
    columns = [first_cell, *(name.strip() for name in names.strip("|").split("|"))]
    models = [
        dict(zip(columns, (cell.strip() for cell in line.split("|")[1:-1]), strict=True)) for line in models
    ]

    for model in models:
        file, wanted = model["rows"].strip("`"), "mosaic_gpu" if "Pallas" in model["as in"] else "triton"
        pairs = records.beside_dense(one_run(records.read(RESULTS / f"{file}.jsonl")))
        pairs = [(row, dense) for row, dense in pairs if row.implementation == wanted]
        ratio = {(row.length, row.distribution): records.ratio(row, dense)[0] for row, dense in pairs}
        if "faster from, trained" in model:
            trained = tuple((tokens, ratio[tokens, x]) for tokens, x in sorted(ratio) if x == "trained")
            first = next(iter(plot.crossovers(trained)), trained[0][0])  # or faster wherever it was measured
            assert model["faster from, trained"] == f"{first / 1024:.1f}k".replace(".0k", "k")
        for length, shown in model.items():
            if length.partition("k")[0].isdigit() and shown:
                tokens = 1024 * int(length.partition("k")[0])
                drawn = [f"{ratio[tokens, each]:.2f}" for each in ("random", "trained", "coherent")]
                assert shown.replace("*", "") == ", ".join(drawn), (file, length)


def test_all_figures_are_shown():
    documents = [ROOT / "README.md", *DOCS.rglob("*.md")]
    text = "".join(document.read_text(encoding="utf-8") for document in documents)
    pictures = [path for folder in ("images", "drawings") for path in DOCS.rglob(f"{folder}/*")]

    assert [path.name for path in pictures if f"{path.parent.name}/{path.name}" not in text] == []


def test_reference_has_every_public_name():
    documented = [
        name
        for page in (DOCS / "api").glob("*.md")
        for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    public = {
        f"{package}.{name}"
        for package in PUBLIC
        for name in _all(package)
        if not name.startswith("__")  # `__version__`
    }

    assert sorted(documented) == sorted(public | MORE)


def _all(package: str) -> list[str]:
    if package == "nsa_torch_ref":
        pytest.importorskip("torch", reason="nsa_torch_ref needs PyTorch")
    return importlib.import_module(package).__all__
