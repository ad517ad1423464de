"""The benchmarks tell the truth: what they feed, count, refuse and write. Speeds are not tested."""

import dataclasses
import functools
import itertools
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from modules import abstract, named, randomised
from printed import last_line
from quick_benchmarks import jax_draws, quick_ceiling, quick_draws  # noqa: F401

from benchmarks import (
    attention,
    batcher,
    gate,
    generate,
    indexer,
    inputs,
    layers,
    parallel,
    plot,
    records,
    roofline,
    strategies,
    tables,
    targets,
    timing,
    token_parts,
    training,
)
from benchmarks.decode import __main__ as decode
from benchmarks.decode import gate as decode_gate
from benchmarks.decode import indexed as decode_indexed
from benchmarks.decode import loops as decode_loops
from benchmarks.decode import steps as decode_steps
from benchmarks.decode import summary as decode_summary
from benchmarks.inputs import Overlap, Shape
from benchmarks.report import verdicts
from nsa_jax import attention as operations
from nsa_jax import layout
from nsa_jax.config import NSAConfig
from nsa_jax.generate import prepare
from nsa_jax.model import Transformer, TransformerConfig

ROOT = pathlib.Path(__file__).resolve().parent.parent
SMALL = NSAConfig(
    compression_block_size=8,
    compression_stride=4,
    selection_block_size=16,
    num_selected_blocks=4,
    window_size=24,
)
# At the lengths that are timed `xla` compiles less where it need not look blocks up: they are half of a row.
HALF = dataclasses.replace(SMALL, num_selected_blocks=10)
FIELDS = {
    *("run_id", "benchmark", "operation", "implementation", "mode", "distribution", "batch", "length"),
    *("query_heads", "kv_heads", "key_dim", "value_dim", "dtype", "median_ms", "p20_ms", "p80_ms"),
    *("compile_s", "peak_bytes", "floor_ms", "adjacent_share", "mean_union_4"),
    *("device", "jax", "jaxlib", "triton", "commit"),
}
SIZES = ["--heads", "2", "--key-dim", "8", "--value-dim", "8", "--budget-s", "0.01"]


def test_attention_writes_rows_of_one_run(monkeypatch, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    # What remains is the gate at the timed length: compiling the whole operation twice is most of the time.
    monkeypatch.setattr(gate, "check_small", lambda *_: gate.Verdict(0.5, "out"))
    command = ["--lengths", "300", "--modes", "fwd", "--output", str(path), *SIZES]

    status = attention.main([*command, "--distributions", "random"], HALF)

    printed, summary = last_line(capsys)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert status == 0
    assert [row["operation"] for row in rows] == ["native_sparse_attention", "dense_attention"]
    assert all(set(row) >= FIELDS for row in rows)
    assert {row["run_id"] for row in rows} == {summary["run_id"]}
    assert rows[0]["adjacent_share"] > 0
    assert rows[0]["mean_union_4"] > 0
    assert rows[1]["adjacent_share"] is None
    assert rows[0]["config"]["window_size"] == HALF.window_size
    assert all(row["p20_ms"] <= row["median_ms"] <= row["p80_ms"] for row in rows)
    assert [ratio["length"] for ratio in summary["dense_over_nsa"]] == [300]
    assert "ceiling in float32: copy" in printed
    assert printed.count(": green: error") == 4


def test_attention_prints_reasons_of_refusal(capsys):
    command = ["--lengths", "300:fwd,bwd", "--operations", "select_blocks", "dense_attention", *SIZES]

    attention.main([*command, "--implementations", "triton", "--dense-up-to", "200"], SMALL)

    printed, summary = last_line(capsys)
    assert summary["rows"] == 0
    assert re.search(r"refused: select_blocks triton fwd .*: the Triton kernels need ", printed)
    assert re.search(r"refused: select_blocks triton bwd .*: no gradient flows", printed)
    assert re.search(r"refused: dense_attention xla fwd .*: longer than --dense-up-to 200", printed)


@pytest.mark.parametrize("length", ["0", "3", "-4", "x", "64:forward", "64:decode", ":fwd"])
def test_lengths_are_checked_before_anything_runs(capsys, length):
    with pytest.raises(SystemExit):
        attention.main([f"--lengths={length}"])

    assert f"got {length}" in capsys.readouterr().err


def test_too_short_for_coherent_or_trained_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(gate, "check_small", lambda *_: gate.Verdict(0.5, "out"))
    command = ["--lengths", "300:fwd", "--operations", "selected_attention", "--distributions"]

    attention.main([*command, "coherent", "trained", *SIZES], SMALL)

    printed, summary = last_line(capsys)
    assert summary["rows"] == 0
    assert "refused: selected_attention xla fwd coherent T=300: a coherent selection must have" in printed
    assert (
        "refused: selected_attention xla fwd trained T=300: neighbours of a trained selection must" in printed
    )


def test_overlap_by_hand():
    rows = [[0, 1, -1], [0, 1, -1], [0, 2, 3], [0, 2, 4], [0, 4, 5], [0, 4, 5], [0, 5, 6], [0, 5, 6]]

    measured = inputs.overlap(np.array(rows)[None, :, None])

    assert measured.adjacent_share == pytest.approx((1 + 1 / 3 + 2 / 3 + 2 / 3 + 1 + 2 / 3 + 1) / 7)
    assert measured.mean_union_4 == pytest.approx((5 + 4) / 2)  # {0,1,2,3,4} and {0,4,5,6}


@pytest.mark.usefixtures("jax_draws")
@pytest.mark.parametrize("distribution", inputs.DISTRIBUTIONS)
def test_drawn_blocks_are_selections(distribution):
    shape = Shape(length=4100, kv_heads=2, key_dim=8)

    draw = inputs.draw_blocks(shape, distribution)

    blocks = np.asarray(draw.block_indices)
    assert blocks.shape == (1, 4100, 2, 16)
    position = np.arange(4100)[None, :, None]
    used = blocks >= 0
    np.testing.assert_array_equal(used.sum(-1), np.minimum(position // 64 + 1, 16).repeat(2, -1))
    assert (np.diff(np.where(used, blocks, 1 << 20), axis=-1) > 0)[used[..., 1:]].all()
    assert (blocks <= position[..., None] // 64).all()
    for forced in (np.zeros_like(position), position // 64, np.maximum(position // 64 - 1, 0)):
        assert (blocks == forced[..., None]).any(-1).all()


@pytest.mark.usefixtures("jax_draws")
def test_random_blocks_overlap_by_chance_only():
    draw = inputs.draw_blocks(Shape(length=8192), "random")
    late = inputs.overlap(draw.block_indices[:, 4096:])

    # 13 of the past blocks that are not forced, independently for each token: closed form, block by block.
    free = np.arange(4096, 8192, 64) // 64 - 2
    union = np.mean(3 + free * (1 - (1 - 13 / free) ** 4))
    share = np.mean((3 + 13 * 13 / free) / 16)

    assert late.mean_union_4 == pytest.approx(union, rel=0.01)
    assert late.adjacent_share == pytest.approx(share, abs=0.01)


@pytest.mark.usefixtures("jax_draws")
def test_coherent_queries_give_a_coherent_selection():
    shape = Shape(length=4096, query_heads=2, key_dim=32)
    select = jax.jit(lambda query, key: operations.select_blocks(query, key, config=shape.config))
    choose = functools.partial(select, key=inputs.tensor("key_cmp", shape))

    draw = inputs.draw_queries(shape, "coherent", choose)

    assert draw.overlap == inputs.overlap(draw.block_indices)
    assert draw.overlap.adjacent_share <= inputs.MAX_ADJACENT_SHARE
    assert draw.overlap.mean_union_4 >= inputs.MIN_MEAN_UNION_4
    np.testing.assert_array_equal(draw.block_indices, choose(draw.query))
    random = inputs.overlap(choose(inputs.tensor("query", shape)))
    assert draw.overlap.adjacent_share > random.adjacent_share + 0.1
    assert draw.noise in inputs.NOISES
    chance = random.adjacent_share
    trained = inputs.draw_queries(shape, "trained", choose).overlap.adjacent_share
    assert trained == pytest.approx(chance + inputs.TRAINED_AGREEMENT * (1 - chance), abs=0.01)


@pytest.mark.usefixtures("jax_draws")
@pytest.mark.parametrize("operation", inputs.OPERATIONS)
def test_arguments_have_the_shapes_and_dtypes_that_floors_count(operation):
    shape = Shape(length=150, query_heads=2, key_dim=8, value_dim=8, dtype="bfloat16", config=SMALL)
    draw = inputs.draw_blocks(shape, "random")

    found = inputs.arguments(operation, draw, shape)

    for name, array in zip(inputs.ARGUMENTS[operation], found, strict=True):
        assert array.shape == inputs.tensor_shape(name, shape), name
        assert array.dtype == inputs.tensor_dtype(name, shape), name


def pairs_by_definition(operation: str, length: int, config: NSAConfig) -> int:
    c, total = config, 0
    for t in range(length):
        blocks = [i for i in range(length) if i * c.compression_stride + c.compression_block_size - 1 <= t]
        candidates = [j for j in range(length) if j * c.selection_block_size <= t]
        chosen = candidates[-c.num_selected_blocks :]
        total += {
            "compressed_attention": len(blocks),
            "select_blocks": len(blocks),
            "window_attention": len([s for s in range(t + 1) if s > t - c.window_size]),
            "selected_attention": len([s for s in range(t + 1) if s // c.selection_block_size in chosen]),
            "dense_attention": t + 1,
        }[operation]
    return total


@pytest.mark.parametrize("operation", [name for name in inputs.OPERATIONS if "attention" in name[6:]][1:])
@pytest.mark.parametrize("length", [1, 7, 16, 100])
def test_floor_counts_visible_pairs(operation, length):
    assert roofline.visible_pairs(operation, length, SMALL) == pairs_by_definition(operation, length, SMALL)


def test_floor_counts_by_hand():
    shape = Shape(batch=2, length=4, query_heads=2, key_dim=3, value_dim=5, dtype="bfloat16", config=SMALL)
    query, key, value, out = 2 * 4 * 2 * 3, 2 * 4 * 3, 2 * 4 * 5, 2 * 4 * 2 * 5

    forward = roofline.cost("dense_attention", "fwd", shape)
    backward = roofline.cost("dense_attention", "bwd", shape)

    pairs = 2 * 2 * (1 + 2 + 3 + 4)
    assert forward.flops == 2 * pairs * (3 + 5)
    assert backward.flops == 2 * pairs * (3 + 3 + 3 + 5 + 5)
    assert forward.bytes == 2 * (query + key + value + out)
    assert backward.bytes == 2 * (2 * (query + key + value) + out)
    assert roofline.cost("dense_attention", "fwd_bwd", shape) == forward + backward
    assert roofline.Ceiling(100.0, 1e9).floor_ms(forward) == 1e3 * forward.bytes / 100
    assert roofline.Ceiling(1e9, 100.0).floor_ms(forward) == 1e3 * forward.flops / 100


def test_the_ceiling_is_printed_and_judged(capsys):
    status = roofline.main([])

    printed, rates = last_line(capsys)
    assert re.match(r"ceiling in float32: copy [\d.]+ GB/s, matmul ", printed)
    assert verdicts.judge(["python", "-m", "benchmarks.roofline"], status, printed) == ([], "", [])
    rates["copy_gb_per_s"] = 0.0
    (problem,), *_ = verdicts.judge(["python", "-m", "benchmarks.roofline"], status, json.dumps(rates))
    assert problem.startswith("rates must be above 0")


def test_floor_of_a_decode_step_by_hand():
    sizes = dict(query_heads=4, kv_heads=2, key_dim=3, value_dim=5)
    shape = Shape(batch=2, length=70, dtype="bfloat16", config=SMALL, **sizes)
    reads = {
        "compressed_attention": [[16, 17]],
        "selected_attention": [[3 * 16 + 6, 3 * 16 + 7]],
        "window_attention": [[24, 24]],
        "dense_attention": [[70, 71]],
    }
    reads = {name: np.array(x) for name, x in reads.items()}
    first = {name: x[:, :1] for name, x in reads.items()}

    nsa, both = (roofline.decode_cost("native_sparse_attention", x, shape) for x in (first, reads))
    dense, dense_both = (roofline.decode_cost("dense_attention", x, shape) for x in (first, reads))
    selected = roofline.decode_cost("selected_attention", first, shape)
    window = roofline.decode_cost("window_attention", reads, shape)

    dims, appended, word = 3 + 5, 3 + 1 / 4, 2 * 2 * 2
    assert nsa.bytes == word * dims * (16 + 54 + 24 + appended)
    assert nsa.flops == 2 * 2 * 4 * (dims * (16 + 54 + 24) + 3 * 16)
    # In 8 bits a key and its value have a scale of 4 bytes each; what awaits compression stays as it is.
    kept = roofline.decode_cost("native_sparse_attention", first, shape, "int8")
    assert kept.bytes == 2 * 2 * ((dims + 2 * 4) * (16 + 54 + 24 + appended - 1) + 2 * dims)
    assert kept.flops == nsa.flops
    # What both tokens see counts once, a selected block as often as it was selected.
    assert both.bytes == word * dims * (17 + 54 + 55 + 25 + 2 * appended)
    assert both.flops == 2 * 2 * 4 * (dims * (33 + 109 + 48) + 3 * 33)
    assert dense.bytes == word * dims * (70 + 1)
    assert dense.flops == 2 * 2 * 4 * dims * 70
    assert dense_both.bytes == word * dims * (71 + 2)
    assert selected.bytes == word * (dims * 54 + 3 * 16)
    assert window.bytes == word * dims * 25


def test_the_fastest_dense_attention_counts():
    nsa, fast = make_row(), make_row(operation="dense_attention", median_ms=5.0)
    slow = make_row(operation="dense_attention", implementation="jax_nn", median_ms=6.0)

    assert records.beside_dense([fast, nsa, slow]) == [(nsa, fast)]
    assert records.beside_dense([slow, nsa, fast]) == [(nsa, fast)]


def test_floor_counts_of_the_published_setting():
    shape = Shape(length=65536, query_heads=64, kv_heads=4, key_dim=128, value_dim=128, dtype="bfloat16")
    tera = {name: roofline.cost(name, "fwd", shape).flops / 1e12 for name in inputs.OPERATIONS}

    # Those figures charge every query with as many keys as the last one has; the first ones have fewer.
    published = {"selected_attention": 2.2, "compressed_attention": 4.4, "select_blocks": 2.2}
    for name, teraflops in (published | {"window_attention": 1.1}).items():
        assert 0.95 * teraflops < tera[name] < 1.005 * teraflops
    assert tera["dense_attention"] == pytest.approx(0.638 * 110.3, rel=0.01)
    parts = [
        tera[name] for name in inputs.OPERATIONS if name not in ("native_sparse_attention", "dense_attention")
    ]
    assert tera["native_sparse_attention"] == pytest.approx(sum(parts))


def test_samples_take_turns(monkeypatch):
    order = []
    seconds = {"slow": 2.0, "fast": 0.5}
    runs = {name: (lambda name=name: order.append(name) or seconds[name]) for name in seconds}
    monkeypatch.setattr(timing, "seconds_of", lambda run, calls=1: run())

    timings = timing.measure(runs, budget_s=3.0)

    assert [len(timings[name].samples_ms) for name in runs] == [3, 6]
    assert order == ["slow", "fast", *["slow", "fast", "fast"] * 3]
    assert timings["fast"].median_ms == 500

    order.clear()
    timing.measure(runs, budget_s=4.0, max_rounds=2)
    assert order == ["slow", "fast", *["slow"], *["fast"] * 4, *["slow"] * 2, *["fast"] * 4]


def test_a_sample_may_be_several_calls(monkeypatch):
    now = [0.0]
    waited_for = []

    def run():
        now[0] += 3.0 if now[0] == 0.0 else 0.25  # the first call loads the program
        return now[0]

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing.jax, "block_until_ready", waited_for.append)

    taken = timing.measure({"short": run}, budget_s=4.0, sample_s=0.9)["short"]

    assert taken.samples_ms == (250.0,) * 4
    assert waited_for == [3.0, 3.25, 4.25, 5.25, 6.25, 7.25]  # the last of every four calls


def test_a_long_first_run_is_a_sample(monkeypatch):
    durations = iter([30.0, 20.0, 25.0])
    monkeypatch.setattr(timing, "seconds_of", lambda *_: next(durations))

    taken = timing.measure({"long": lambda: None}, budget_s=1.0)["long"]

    assert taken.samples_ms == (30000.0, 20000.0, 25000.0)
    assert taken.median_ms == 25000


def changed(row: records.Row, **new) -> records.Row:
    return records.Row(**{**row, **new})


def make_row(**changed) -> records.Row:
    shape = dataclasses.asdict(Shape(length=4096))
    told = {"run_id": "a", "device": "d", "jax": "1", "jaxlib": "1", "commit": "c", "benchmark": "attention"}
    told |= {"operation": "native_sparse_attention", "implementation": "xla", "mode": "fwd", "samples": 3}
    told |= {"distribution": "random", "median_ms": 2.0, "p20_ms": 1.0, "p80_ms": 3.0, "compile_s": 1.0}
    told |= {"peak_bytes": 10, "floor_ms": 0.5, "adjacent_share": None, "mean_union_4": None, "noise": None}
    return records.Row(**shape | told | {"config": {}} | changed)


def test_only_rows_alike_are_compared_with_dense():
    nsa, dense = make_row(), make_row(operation="dense_attention", median_ms=5.0, peak_bytes=40)
    others = [make_row(run_id="b"), make_row(mode="bwd"), make_row(length=8192), make_row(dtype="bfloat16")]

    layer = make_row(operation="layer", model_dim=8)
    dense_layer = make_row(operation="dense_layer", model_dim=8)
    others += [layer, make_row(operation="dense_layer", model_dim=16)]

    assert records.beside_dense([*others, nsa, dense]) == [(nsa, dense)]
    assert records.beside_dense([*others, dense_layer]) == [(layer, dense_layer)]
    assert records.ratio(nsa, dense) == (2.5, 4.0)


@pytest.mark.parametrize("field", ["operation", "implementation", "mode", "distribution"])
def test_rows_have_a_vocabulary(field):
    with pytest.raises(ValueError, match=f"{field} must be one of .*, got 'other'"):
        make_row(**{field: "other"})


def test_rows_have_every_needed_field_and_no_unknown_one():
    row = make_row()
    assert (row.floor_ms, row.devices) == (0.5, None)
    with pytest.raises(AttributeError):
        _ = row.speed
    with pytest.raises(ValueError, match=r"got \['speed'\]"):
        changed(row, speed=1.0)
    del row["jax"]
    with pytest.raises(ValueError, match=r"got \['jax'\]"):
        changed(row)


def test_pictures_and_tables_come_from_the_newest_run(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    dense = make_row(
        operation="dense_attention", median_ms=50.0, p20_ms=49.0, p80_ms=51.0, peak_bytes=40_000_000
    )
    window = make_row(operation="window_attention")
    longer = make_row(length=8192)
    rows = [longer, make_row(median_ms=20.0, adjacent_share=0.9, mean_union_4=19.0), dense, window]
    older = [changed(row, run_id="0", median_ms=1.0) for row in rows]
    records.append(path, [*rows, *older])

    alone, points = path.with_name("alone.jsonl"), path.with_name("points.jsonl")
    records.append(alone, [window])
    records.append(points, [make_row(mode="fwd"), make_row(mode="bwd", length=8192)])

    plot.main([str(path), str(alone), str(points), "--output", str(tmp_path)])
    tables.main([str(path)])

    printed = capsys.readouterr().out
    assert path.with_suffix(".svg").stat().st_size > 10_000
    assert not alone.with_suffix(".svg").exists()  # no curve
    assert not points.with_suffix(".svg").exists()  # a point for each mode
    assert "| 4096 | fwd | random | 20.0 (1.0-3.0) | 50.0 (49.0-51.0) | **2.50** |" in printed
    assert "0.90 / 19.0" in printed
    assert "| `window_attention` | xla | 4096 | fwd |" in printed
    for command in (plot, tables):
        assert command.main([str(path), "--run-id", "z"]) == 2
        assert "run_id must be one of" in capsys.readouterr().err


def test_a_figure_of_several_files_has_a_curve_for_each(tmp_path):
    files = [tmp_path / f"{heads}.jsonl" for heads in (8, 16)]
    for path in files:
        kinds = [dict(distribution=x) for x in ("random", "trained")] + [dict(operation="dense_attention")]
        made = [
            make_row(mode="fwd_bwd", length=length, query_heads=int(path.stem), **kind)
            for kind in kinds for length in (4096, 8192)
        ]  # fmt: skip
        records.append(path, made)

    status = plot.main([*map(str, files), "--together", "both", "--output", str(tmp_path)])

    text = (tmp_path / "both.svg").read_text()
    assert status == 0
    assert ">" + " ".join(map(str, files)) + "<" in text
    for label in ("8 / 1 heads of 64", "16 / 1 heads of 64", "random blocks"):
        assert f"<!-- {label} -->" in text


def test_a_figure_names_its_rows_and_changes_with_them(tmp_path):
    def drawn(**changed):
        rows = [make_row(mode="fwd_bwd", length=length, **changed) for length in (4096, 8192)]
        plot.draw(rows, tmp_path / "a.svg", source="b.jsonl")
        plot.draw_memory(rows, tmp_path / "memory.svg", source="b.jsonl")
        text = (tmp_path / "a.svg").read_text()
        assert f">{plot.fingerprint(rows)}<" in text
        assert ">b.jsonl<" in text
        return text, (tmp_path / "memory.svg").read_text()

    before = drawn()
    assert drawn() == before
    assert drawn(median_ms=2.1)[0] != before[0]
    assert drawn(peak_bytes=11)[1] != before[1]


def test_crossovers_lie_between_the_lengths_around_them():
    assert plot.crossovers(((4096, 0.5), (16384, 1.5))) == [8192]
    assert plot.crossovers(((4096, 1.5), (8192, 0.5), (16384, 1.0), (32768, 2.0))) == [16384]
    assert plot.crossovers(((4096, 0.1), (8192, 0.9))) == []


def stale_tables(root: pathlib.Path) -> list[str]:
    """Documents with a table that is not what `tables` makes of the rows it names."""
    found = []
    for document in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        parts = re.split(r"<!-- (benchmarks/results/\S+\.jsonl) -->\n", document.read_text(encoding="utf-8"))
        for results, text in itertools.batched(parts[1:], 2):
            if not text.startswith(tables.markdown(tables.one_run(records.read(root / results)))):
                found.append(f"{document.name}: {results}")
    return found


def test_tables_in_documents_are_those_of_the_rows(tmp_path):
    results = tmp_path / "benchmarks" / "results" / "x.jsonl"
    rows = [make_row(), make_row(operation="dense_attention")]
    records.append(results, rows)
    table = f"# Title\n<!-- benchmarks/results/x.jsonl -->\n{tables.markdown(rows)}\n\nMore.\n"
    (tmp_path / "README.md").write_text(table.replace("2.000", "1.999"))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "good.md").write_text(table)

    assert stale_tables(tmp_path) == ["README.md: benchmarks/results/x.jsonl"]
    assert stale_tables(ROOT) == [], "run python -m benchmarks.tables and paste what it prints"


def test_committed_rows_have_the_paper_configuration():
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.jsonl")):
        for row in records.read(path):
            if row.model:
                assert row.model["nsa"] == dataclasses.asdict(NSAConfig()), path
                continue
            paper = NSAConfig()
            # Dense attention, which has no blocks, takes turns with either.
            sizes = [indexer.MSA] if row.operation == indexer.WHOLE else [paper]
            sizes += [indexer.MSA] if row.operation == "dense_attention" or row.benchmark == "indexer" else []
            if row.benchmark == "targets":  # which the size of a block alone changes
                sizes.append(dataclasses.replace(paper, selection_block_size=128))
            assert row.config in map(dataclasses.asdict, sizes), path
            if row.distribution == "coherent":
                assert row.adjacent_share is not None
                assert row.mean_union_4 is not None
                assert Overlap(row.adjacent_share, row.mean_union_4).counts_as_coherent, path


DECODE_SIZES = [
    *("--heads", "2", "--kv-heads", "1", "--head-dim", "8", "--num-layers", "1", "--budget-s", "0.01"),
]


@pytest.fixture
def not_judged(monkeypatch):
    """Every program is green."""
    monkeypatch.setattr(decode, "check", lambda *_: gate.Verdict(0.5, "out"))


@pytest.fixture
def not_timed(monkeypatch, not_judged):
    """Every program is green, and takes 2, 3, 4, ... ms without being compiled."""
    compiled = timing.Compiled(None, (), 0.0, 0, 0)

    def measure(found, *_):
        return {name: (timing.Timing((2.0 + i,)), compiled) for i, name in enumerate(found)}

    monkeypatch.setattr(decode, "measure", measure)


@pytest.mark.usefixtures("not_timed")
def test_decode_writes_rows_and_csv(tmp_path, capsys):
    rows_path, csv_path = tmp_path / "rows.jsonl", tmp_path / "decode.csv"

    status = decode.main(
        ["--lengths", "90", *DECODE_SIZES, "--output", str(rows_path), "--csv", str(csv_path)], SMALL
    )

    printed, summary = last_line(capsys)
    rows = records.read(rows_path)
    assert status == 0
    loops = [(row.operation, row.implementation) for row in rows if row.mode == "decode_loop"]
    single = [(row.operation, row.implementation) for row in rows if row.mode == "decode"]
    alone = [(operation, "xla") for operation in decode_steps.BRANCHES.values()]
    dense = [("dense_attention", "xla"), ("dense_attention", "jax_nn")]
    assert loops == [("native_sparse_attention", "xla"), *alone, *dense]
    assert single == [("native_sparse_attention", "xla"), *dense]
    assert summary["dense_over_this"].keys() == {"90"}
    assert "gate native_sparse_attention xla decode: green" in printed
    assert verdicts.judge(["python", "-m", "benchmarks.decode"], status, printed) == ([], "9 rows", [])
    for mode in ("decode", "decode_loop"):
        of_mode = [row for row in rows if row.mode == mode]
        fastest = min(row.median_ms for row in of_mode if row.operation == "dense_attention")
        for row in of_mode:
            assert row.dense_over_this == fastest / row.median_ms
            assert row.gb_per_s == pytest.approx(row.bytes / row.median_ms / 1e6)
            assert row.copy_share > 0
            assert (row.new_tokens, row.num_layers) == (1, 1)
    assert "| GB/s (% of copy) |" in tables.markdown(rows)
    header, line = csv_path.read_text().splitlines()
    assert header == "S,ms_total,ms_cmp,ms_sel,ms_win,reads_actual,reads_expected," \
        "reads_actual_decode,reads_expected_decode"  # fmt: skip
    medians = [round(row.median_ms, 6) for row in rows[:4]]
    assert [float(x) for x in line.split(",")[:5]] == [90, *medians]
    lengths = range(91, 155)

    def reads(length: int) -> int:  # the last block is read up to the query; 4 whole blocks are charged
        selected = 3 * 16 + (length - 1) % 16 + 1
        return layout.num_compression_blocks(length, SMALL) + selected + 24

    def charged(length: int) -> int:
        return layout.num_compression_blocks(length, SMALL) + 4 * 16 + 24

    totals = [reads(154), charged(154), sum(map(reads, lengths)), sum(map(charged, lengths))]
    assert [int(x) for x in line.split(",")[5:]] == totals


@pytest.mark.usefixtures("not_timed")
def test_a_branch_alone_leaves_the_others_empty(tmp_path, capsys):
    csv_path = tmp_path / "decode.csv"

    decode.main(["--lengths", "90", *DECODE_SIZES, "--branch", "win", "--csv", str(csv_path)], SMALL)

    _, summary = last_line(capsys)
    assert summary["rows"] == 3
    assert csv_path.read_text().splitlines()[1].split(",")[1:5] == ["", "", "", "2.0"]


def test_decode_reports_no_speed_on_a_red_gate(monkeypatch, capsys):
    monkeypatch.setattr(decode, "check", lambda *_: gate.Verdict(1.5, "out"))

    assert decode.main(["--lengths", "90"], SMALL) == 1

    printed, summary = last_line(capsys)
    assert "gate native_sparse_attention xla decode: RED" in printed
    assert "gate dense_attention jax_nn decode: RED" in printed
    assert summary["rows"] == 0


@pytest.mark.parametrize(
    "options",
    [
        ["--value-dim", "128"],
        ["--layer", "32", "--branch", "cmp"],
        ["--layer", "32", "--compression", "mean"],
        ["--layer", "32", "--cache-dtype", "int8"],
        ["--branch", "slc", "--cache-dtype", "int8"],
        ["--selector", "indexer", "--branch", "slc"],
        ["--selector", "indexer", "--layer", "32"],
        ["--selector", "indexer", "--cache-dtype", "int8"],
        ["--selector", "indexer", "--compression", "mlp"],
    ],
)
def test_decode_options_that_exclude_each_other(capsys, options):
    with pytest.raises(SystemExit):
        decode.parse(options)

    assert "got " in capsys.readouterr().err


def setting_of(length=90, *, new_tokens=1, compression="mean", **sizes) -> decode_steps.Setting:
    sizes = {"query_heads": 2, "key_dim": 8, "value_dim": 8} | sizes
    return decode_steps.Setting(Shape(length=length, config=SMALL, **sizes), "xla", new_tokens, compression)


def same(x, y) -> bool:
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, x, y)))


def test_a_loop_takes_the_steps_that_the_host_would():
    setting = setting_of(batch=2, new_tokens=3)
    step = decode_steps.dense(setting, "xla")
    loop = decode_loops.Decoding(step, setting, 2)
    # Two steps a call: XLA makes no loop of one, and then rounds otherwise in the last bit.
    pairs = decode_loops.Decoding(step, setting, 2, num_steps=2)

    in_loop = loop.run()
    from_host = [pairs.run() for _ in range(decode_steps.NUM_STEPS // 2)][-1]

    assert np.isfinite(in_loop).all()
    assert same(in_loop, from_host)
    assert same(loop.states, pairs.states)
    for state in loop.states:
        assert (state.lengths == 90 + 3 * decode_steps.NUM_STEPS).all()
        assert not state.overflowed.any()


PROGRAMS = {
    "nsa": lambda setting: decode_steps.nsa(dataclasses.replace(setting, compression="mlp")),
    "indexed": decode_indexed.indexed,
    "layer": decode_steps.layer,
    "dense": lambda setting: decode_steps.dense(setting, "xla"),
    "jax_nn": lambda setting: decode_steps.dense(setting, "jax_nn"),
    "dense layer": lambda setting: decode_steps.dense_layer(setting, "jax_nn"),
    **{name: lambda setting, name=name: decode_steps.branch(setting, name) for name in decode_steps.BRANCHES},
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_layer_of_a_loop_is_dead(name):
    setting = setting_of(query_heads=1, model_dim=8)
    loop = decode_loops.Decoding(PROGRAMS[name](setting), setting, 2)

    def doubled(x):
        return x * 2 if jnp.issubdtype(x.dtype, jnp.floating) and x.ndim == 4 else x

    # A branch is given its keys, all others carry them, in arrays that the program takes.
    place = "operands" if name in decode_steps.BRANCHES else "states"
    drawn = jax.tree.map(np.asarray, getattr(loop, place))

    def run(number=None):
        layers = [jax.tree.map(doubled, x) if i == number else x for i, x in enumerate(drawn)]
        setattr(loop, place, jax.tree.map(jnp.array, tuple(layers)))
        return np.asarray(loop.run())

    before = run()
    assert same(run(), before)
    assert not same(run(0), before)
    assert not same(run(1), before)


@pytest.mark.parametrize("name", decode_steps.BRANCHES)
def test_nothing_of_a_branch_is_computed_before_its_loop(name):
    setting = setting_of(length=400, dtype="bfloat16", key_dim=16, value_dim=16)
    loop = decode_loops.Decoding(decode_steps.branch(setting, name), setting, 1)

    text = loop.compiled.call.as_text()

    keys = min(x.size for x in loop.operands[0] if x.ndim == 4)
    found = re.findall(r"= \w+\[([\d,]*)\]\S* (\w+)\(", text[text.index("\nENTRY") :])
    made = [shape for shape, kind in found if kind not in ("parameter", "get-tuple-element")]
    assert "while(" in text
    assert max(np.prod([int(x) for x in shape.split(",") if x] or [1]) for shape in made) < keys / 2


def test_decoding_starts_again_before_the_cache_overflows():
    setting = setting_of()

    def step(state, x, _):
        return state.lengths, decode_steps.Position(state.lengths + 1)

    def draw(_):
        return decode_steps.Position(jnp.array([90])), ()

    program = decode_steps.Program("window_attention", "xla", step, jnp.array([0]), draw)
    decoding = decode_loops.Decoding(program, setting, 1, num_steps=1)

    seen = [int(decoding.run()[0]) for _ in range(decode_steps.NUM_STEPS + 2)]

    assert seen == [*range(90, 90 + decode_steps.NUM_STEPS), 90, 91]


@pytest.mark.usefixtures("not_judged")
def test_a_step_of_an_indexer_has_its_bytes_and_its_bound(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    command = ["--lengths", "90", *DECODE_SIZES, "--batch", "2", "--selector", "indexer"]

    status = decode.main([*command, "--output", str(path)], SMALL)

    _, summary = last_line(capsys)
    rows = records.read(path)
    ours = [row for row in rows if row.operation == indexer.WHOLE]
    lengths = range(91, 155)
    # 3 whole blocks of 16 and that of the query, and the new token; 8 numbers in float32 each, or twice 8
    selected = [3 * 16 + (length - 1) % 16 + 1 + 1 for length in lengths]
    numbers = sum(16 * x for x in selected) + sum(8 * (length + 1) for length in lengths)
    assert status == 0
    assert all(set(row) >= FIELDS for row in rows)
    assert [row.mode for row in ours] == ["decode_loop", "decode"]
    assert [row.bytes for row in ours] == [2 * 4 * numbers // 64] * 2
    assert ours[0].bound_ms == pytest.approx(1.25 * ours[0].floor_ms + 0.012)
    assert {row.operation for row in rows if row.bound_ms is None} == {"dense_attention"}
    assert summary["operation"] == indexer.WHOLE
    assert list(summary["dense_over_this"]) == ["90"]
    table = tables.markdown(rows)
    assert "1 token a step, 1 layers in the loop" in table
    assert f"| {ours[0].bound_ms:.5f} |" in table


def test_decode_gate_sees_a_wrong_choice_and_wrong_attention_of_an_indexer(monkeypatch):
    def judge():
        return decode_gate.check(indexer.WHOLE, "xla", setting_of(new_tokens=3, batch=2))

    assert 0 < judge().share <= 1

    right = operations.select_by_index
    with monkeypatch.context() as patch:
        patch.setattr(operations, "select_by_index", lambda *x, **more: right(-x[0], *x[1:], **more))
        verdict = judge()
        assert verdict.where == "block_indices"
        assert not verdict.green

    monkeypatch.setattr(decode_indexed, "as_query", lambda out, _: out.at[1:].multiply(1.001))

    assert not judge().green


def test_decode_gate_of_nsa_rounds_as_a_quantised_cache_does():
    """In float32, where rounding to 8 bits is a thousand times the budget.

    What it compares with is what sees wrong attention of an indexer, above.
    """
    setting = dataclasses.replace(setting_of(new_tokens=3), cache_dtype="int8")

    assert 0 < decode_gate.check("native_sparse_attention", "xla", setting).share <= 1


@pytest.fixture
def layers_of_numpy(monkeypatch):
    """The parameters of a layer are not drawn by JAX either."""

    def arguments(operation, shape):
        layer = randomised(abstract(layers.create, operation, "", shape), 0.3)
        return inputs.tensor("x", shape), *named(nnx.state(layer, nnx.Param)).values()

    monkeypatch.setattr(layers, "arguments", arguments)


@pytest.mark.usefixtures("layers_of_numpy")
@pytest.mark.parametrize("operation", ["dense_attention", "dense_layer"])
def test_decode_gate_sees_a_shifted_mask_in_one_row_of_the_timed_batch(monkeypatch, operation):
    def judge():
        return decode_gate.check(operation, "jax_nn", setting_of(new_tokens=2, model_dim=24, batch=2))

    assert 0 < judge().share <= 1

    right = jax.nn.dot_product_attention

    def shifted(*arrays, mask):
        return right(*arrays, mask=mask.at[1:].set(jnp.roll(mask[1:], 1, axis=-1)))

    monkeypatch.setattr(jax.nn, "dot_product_attention", shifted)

    assert not judge().green


@pytest.mark.usefixtures("layers_of_numpy")
def test_decode_gate_of_a_layer_is_green():
    """What it compares with is what sees a wrong step of a dense layer, above."""
    verdict = decode_gate.check("layer", "xla", setting_of(new_tokens=2, model_dim=24))

    assert 0 < verdict.share <= 1


def test_summary_prints_shares_and_draws(tmp_path, capsys):
    path, picture = tmp_path / "decode.csv", tmp_path / "picture.png"
    header = ",".join(decode.CSV_HEADER)
    path.write_text(f"{header}\n512,2.0,1.0,0.5,0.1,1123,1571,60,80\n1024,0.04,,,0.01,1603,1603,70,70\n")

    decode_summary.main([str(path), "--output", str(picture)])

    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["S", "total", "cmp%", "sel%", "win%", "reads(dec)", "reads(tot)"]
    assert lines[1] == ["512", "2.0000", "50.0", "25.0", "5.0", "60/80", "1123/1571"]
    assert lines[2] == ["1024", "0.0400", "-", "-", "25.0", "70/70", "1603/1603"]
    assert picture.stat().st_size > 10_000


def test_a_wrong_selection_by_an_indexer_has_no_speed(monkeypatch, tmp_path, capsys):
    """What attends to the blocks is right, and takes turns with dense attention."""
    path, right = tmp_path / "rows.jsonl", operations.select_by_index
    monkeypatch.setattr(operations, "select_by_index", lambda *x, **more: right(-x[0], *x[1:], **more))
    command = ["--lengths", "300", "--heads", "2", "--key-dim", "8", "--budget-s", "0.01"]

    status = indexer.main([*command, "--distributions", "random", "--output", str(path)], HALF)

    printed, summary = last_line(capsys)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert status == 1
    assert summary["red"] == ["select_by_index fwd random T=300"]
    assert {(row["operation"], row["mode"]) for row in rows} == {
        ("select_blocks", "fwd"),
        *((name, mode) for name in ("indexed_attention", "dense_attention") for mode in ("fwd", "bwd")),
    }
    assert printed.count(": green: error") == 2
    assert list(summary["dense_over_this"]) == ["random 300 fwd", "random 300 bwd"]


def test_a_right_selection_by_an_indexer_is_green():
    shape = Shape(length=300, query_heads=2, key_dim=8, value_dim=8, config=HALF)  # as above

    draw, keys = indexer.draw_index(shape, "random", "xla")

    assert indexer.judge_blocks(draw.block_indices, draw, keys, shape).green


@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_targets_take_turns_with_dense_attention(reduce, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    command = ["--lengths", "300", "--heads", "2", "--key-dim", "8", "--budget-s", "0.01"]

    status = targets.main([*command, "--output", str(path), "--reduce", reduce], SMALL)

    printed, summary = last_line(capsys)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert status == 0
    assert [row["strategy"] for row in rows] == [targets.GIVEN, targets.TWO_PASSES, "dense"]
    assert all(set(row) >= FIELDS | {"config"} for row in rows)
    assert printed.count(": green: error / budget") == 2
    assert list(summary["dense_over_this"]["300"]) == [targets.GIVEN, targets.TWO_PASSES]


def test_wrong_targets_have_no_speed(monkeypatch, capsys):
    right = operations.block_probabilities
    monkeypatch.setattr(operations, "block_probabilities", lambda *x, **more: 1.001 * right(*x, **more))

    command = ["--lengths", "300", "--heads", "2", "--key-dim", "8", "--budget-s", "0.01"]  # as above

    status = targets.main(command, SMALL)

    printed, summary = last_line(capsys)
    assert status == 1
    assert printed.count(": red: error / budget") == 2
    assert summary["rows"] == 1


def traced(run, arguments, **_) -> timing.Compiled:
    """In place of `timing.compile_for`: nothing is compiled, and nothing runs."""
    jax.eval_shape(run, *arguments)
    return timing.Compiled(lambda *given: given[:3], (), 0.0, 0, 0)


@pytest.fixture
def models_of_numpy(monkeypatch):
    """The parameters of a model are not drawn by JAX, which compiles a program for each shape."""

    def made(config, *, rngs, **options):
        return randomised(abstract(Transformer, config, **options), 0.1)

    for module in (batcher, generate, training):
        monkeypatch.setattr(module, "Transformer", made)


@pytest.mark.usefixtures("models_of_numpy")
def test_training_writes_a_row_of_each_attention(monkeypatch, tmp_path, capsys):
    """The step with NSA is traced alone."""
    path, compile_step = tmp_path / "rows.jsonl", training.compile_step

    def step_of(config, *sizes):
        with monkeypatch.context() as patch:
            if config.attention == "nsa":
                patch.setattr(timing, "compile_for", traced)
            return compile_step(config, *sizes)

    monkeypatch.setattr(training, "compile_step", step_of)
    sizes = ["--layers", "1", "--model-dim", "32", "--heads", "2", "--kv-heads", "1", "--head-dim", "16"]
    sizes += ["--vocab", "300", "--remat", "attention", "--scan-layers"]

    status = training.main(
        ["--lengths", "70", "--dtype", "float32", *sizes, "--budget-s", "0.01", "--output", str(path)]
    )

    _, summary = last_line(capsys)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert status == 0
    assert [row["attention"] for row in rows] == ["nsa", "dense"]
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(70 / row["median_ms"] * 1e3)
        assert row["model"]["attention"] == row["attention"]
        assert row["model"]["vocab_size"] == 300
        assert (row["model"]["remat"], row["model"]["scan_layers"]) == ("attention", True)
    assert "| 70 | nsa (xla) | " in tables.markdown(records.read(path))
    ratio = rows[1]["median_ms"] / rows[0]["median_ms"]
    assert summary["dense_over_nsa"]["70"] == pytest.approx(ratio, abs=1e-3)


def test_a_training_step_goes_on_from_the_last_one():
    step = timing.Compiled(lambda state, moments, x, y: (state + x, moments * y, state), (), 0.0, 0, 0)
    steps = training.Training(step, (0, 1), (3, 2))

    assert [steps.start() for _ in range(3)] == [0, 3, 6]
    assert steps.held == (9, 8)


PARALLEL = ["--lengths", "256", "--distributions", "random", "--modes", "fwd", "--kv-heads", "1"]


def test_parallel_writes_a_row_of_each_strategy(monkeypatch, tmp_path, capsys):
    """On one device all strategies are the same; the program of context parallelism still runs."""
    path = tmp_path / "rows.jsonl"
    monkeypatch.setattr(strategies, "check", lambda *_: gate.Verdict(0.5, "out"))  # compiles as much again
    chosen = ["--strategies", "one", "context"]

    status = parallel.main([*PARALLEL, *chosen, *SIZES, "--output", str(path)], HALF)

    _, summary = last_line(capsys)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert status == 0
    assert [(row["strategy"], row["mesh"]) for row in rows] == [("one", "one"), ("context", "context=1")]
    assert all(row["peak_bytes"] > 0 and row["adjacent_share"] > 0 for row in rows)
    (faster,) = summary["faster_than_one_device"]
    assert faster["times"] == pytest.approx(rows[0]["median_ms"] / rows[1]["median_ms"], abs=1e-3)
    assert f"**{rows[0]['median_ms'] / rows[1]['median_ms']:.2f}**" in tables.markdown(records.read(path))


def test_parallel_reports_no_speed_on_a_red_gate(monkeypatch, capsys):
    """The gate judges gradients at the timed length and batch."""
    attend = strategies.context_attention
    halved = jax.custom_vjp(lambda x: x)
    halved.defvjp(lambda x: (x, None), lambda _, gradient: (0.5 * gradient,))

    def wrong_in_batches(key_win, **arrays):
        return attend(key_win=halved(key_win) if key_win.shape[:2] == (2, 256) else key_win, **arrays)

    monkeypatch.setattr(strategies, "context_attention", wrong_in_batches)

    options = ["--strategies", "context", "--batch", "2", "--modes", "fwd_bwd"]
    status = parallel.main([*PARALLEL, *options, *SIZES], HALF)

    printed, summary = last_line(capsys)
    assert status == 1
    assert summary["red"] == ["context"]
    assert summary["rows"] == 0
    assert "gate context: RED" in printed


def test_parallel_judges_the_output_alone_where_no_gradient_is_timed(monkeypatch, capsys):
    attend, compared = strategies.context_attention, []
    monkeypatch.setattr(strategies, "context_attention", lambda **arrays: 1.01 * attend(**arrays))
    compare = gate.compare

    def spy(dense, got, *rest):
        compared.append(set(got))
        return compare(dense, got, *rest)

    monkeypatch.setattr(gate, "compare", spy)

    status = parallel.main([*PARALLEL, "--strategies", "context", *SIZES], HALF)

    printed, summary = last_line(capsys)
    assert (status, summary["red"]) == (1, ["context"])
    assert "in out " in printed
    assert compared == [{"out"}]


GENERATE = [
    *("--lengths", "70", "--new-tokens", "9", "--batch", "2", "--dtype", "float32", "--layers", "1"),
    *("--model-dim", "32", "--heads", "2", "--kv-heads", "1", "--head-dim", "16", "--vocab", "11"),
    *("--budget-s", "0.01"),
]


@pytest.mark.usefixtures("models_of_numpy")
def test_generate_writes_what_a_token_takes_beside_its_parts(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"

    many = ("--new-tokens", "257")  # so many that they take more than the noise of the first one
    status = generate.main([*GENERATE, *many, "--attention", "dense", "--output", str(path)], SMALL)

    printed, summary = last_line(capsys)
    (row,) = records.read(path)
    assert (status, summary["rows"]) == (0, 1)
    assert row.tokens_per_s == pytest.approx(2 / row.token_ms * 1e3)
    figures = row.first_token_ms, row.streamed_ms, row.products_ms, row.attention_ms, row.sampling_ms
    assert min(figures) > 0
    assert row.attention_bytes == 2 * 70 * 2 * 16 * 4  # keys and values of dim 16
    assert row.sampling_bytes == 2 * 11 * 4
    config = TransformerConfig(**(row.model | {"nsa": SMALL}))
    model = abstract(Transformer, config)
    assert row.parameters == sum(x.size for x in named(nnx.split(model)[1]).values())
    joined = nnx.eval_shape(lambda: prepare(Transformer(config, rngs=nnx.Rngs(0))))
    assert row.products_bytes == 4 * sum(x.size for x in named(nnx.split(joined)[1]).values())
    assert f"over_parts {row.over_parts:.5g}  products_ms {row.products_ms:.5g}" in printed
    assert "| 70 | dense | " in tables.markdown([row])


def test_a_token_of_nsa_reads_no_compressor_and_few_keys(monkeypatch):
    """What the parts run is traced alone."""
    sizes = dict(vocab_size=11, num_layers=1, model_dim=32, num_heads=2, num_kv_heads=1)
    model = randomised(abstract(Transformer, TransformerConfig(**sizes, nsa=SMALL)))
    monkeypatch.setattr(timing, "compile_for", traced)

    read = {name: make(model, 2, 70).bytes for name, make in token_parts.PARTS.items()}

    # 16 blocks of 8 tokens every 4, 4 blocks of 16 tokens and a window of 24: keys and values of dim 16.
    assert read["attention"] == 2 * (16 + 64 + 24) * 2 * 16 * 4
    joined = {name: x.size for name, x in named(nnx.split(prepare(model))[1]).items()}
    assert read["products"] == 4 * sum(n for name, n in joined.items() if "compressor" not in name)


@pytest.mark.usefixtures("models_of_numpy")
def test_batcher_compares_requests_with_equal_rows(monkeypatch, tmp_path, capsys):
    path, written = tmp_path / "rows.jsonl", set()

    def write(model, prompts, *, max_new_tokens, max_length, chunk_size):
        assert prompts.shape[1] + max_new_tokens <= max_length
        written.add((len(prompts), max_new_tokens, chunk_size))

    monkeypatch.setattr(batcher, "generate", write)
    sizes = [*GENERATE[6:], "--dtype", "float32", "--lengths", "70", "--shortest", "60", "--layers", "1"]

    counts = ["--requests", "4", "--slots", "2", "--new-tokens", "3", "--chunk-size", "2"]
    status = batcher.main([*sizes, *counts, "--attention", "dense", "--output", str(path)], SMALL)

    _, summary = last_line(capsys)
    requests, rows = records.read(path)
    assert (status, summary["rows"]) == (0, 2)
    assert requests.strategy == "4 requests of 60 to 70 tokens, at most 8192 at a time"
    assert rows.strategy.startswith("2 times 2 rows of 6")
    assert written == {(2, 3, 2), (1, 1, 2)}
    assert summary["share_of_generate"] == [round(rows.median_ms / requests.median_ms, 3)]
    for row in (requests, rows):
        assert row.tokens_per_s == pytest.approx(4 * 3 / row.median_ms * 1e3)
        assert row.first_token_ms > 0
    assert f"| {requests.token_ms:.3f} |" in tables.markdown([requests, rows])


@pytest.mark.usefixtures("models_of_numpy")
def test_generate_refuses_a_time_that_drowns_in_noise(monkeypatch, tmp_path, capsys):
    same = timing.Timing(samples_ms=(3.0, 3.0, 3.0))
    monkeypatch.setattr(timing, "seconds_of", lambda _: 1.0)
    monkeypatch.setattr(timing, "measure", lambda calls, **_: dict.fromkeys(calls, same))

    status = generate.main([*GENERATE, "--attention", "nsa", "--output", str(tmp_path / "rows.jsonl")], SMALL)

    printed, summary = last_line(capsys)
    assert (status, summary["rows"]) == (1, 0)
    assert "nsa T=70: the tokens after the first must take more than the noise, got 0 ms" in printed
    problems, *_ = verdicts.judge(["python", "-m", "benchmarks.generate"], status, printed)
    assert problems == [f"not measured: {summary['unmeasured'][0]}"]
    assert not (tmp_path / "rows.jsonl").exists()


def test_generate_prints_why_a_model_is_refused(monkeypatch, capsys):
    def refuse(*_):
        raise NotImplementedError("no cache")

    monkeypatch.setattr(generate, "measure", refuse)

    status = generate.main([*GENERATE, "--attention", "dense"])

    printed, summary = last_line(capsys)
    assert (status, summary["rows"]) == (0, 0)
    assert "refused: dense T=70: no cache" in printed


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_products_of_a_token_are_those_with_all_weights(attention):
    """Each weight moves the logits, but those of the compressors, which see no single token."""
    config = TransformerConfig(
        vocab_size=11, num_layers=1, model_dim=12, num_heads=2, num_kv_heads=1, nsa=SMALL, attention=attention
    )
    model = randomised(abstract(Transformer, config))
    for layer in model.layers:
        layer.attention = token_parts.Products(layer.attention)

    gradient = nnx.jit(nnx.grad(lambda model: (model(jnp.array([[3], [5]])) ** 2).sum()))(model)

    moved = {name: np.asarray(x).any() for name, x in named(gradient).items()}
    assert moved == {name: "compressor" not in name for name in moved}


LAYER = ["--operations", "layer", "--model-dim", "24", *SIZES]


@pytest.mark.slow
@pytest.mark.usefixtures("layers_of_numpy")
def test_layers_write_rows_beside_the_dense_layer(monkeypatch, tmp_path, capsys):
    """The gate judges every gradient in the timed batch, and sees one that is missing."""
    path, judged, check = tmp_path / "rows.jsonl", {}, gate.check_program
    monkeypatch.setattr(gate, "check_small", lambda *_: gate.Verdict(0.5, "out"))

    def noted(operation, *given):
        judged[operation] = given
        # Of a dense layer the gate is judged below; two more programs would compute its gradients.
        return check(operation, *given) if operation == "layer" else gate.Verdict(0.5, "out")

    monkeypatch.setattr(gate, "check_program", noted)
    command = ["--lengths", "300:fwd_bwd", "--batch", "2", *LAYER]

    status = attention.main([*command, "--output", str(path)], HALF)

    printed, summary = last_line(capsys)
    layer, dense = records.read(path)
    assert status == 0
    assert (layer.operation, dense.operation) == ("layer", "dense_layer")
    assert layer.model_dim == dense.model_dim == 24
    assert layer.mean_union_4 > 1
    assert dense.mean_union_4 is None
    assert printed.count("16 queries: green: error") == 1
    assert printed.count("256 queries: green: error") == 1
    assert len(judged["dense_layer"][2]) == 256
    (ratio,) = summary["dense_over_nsa"]
    assert ratio["operation"] == "layer"
    assert ratio["time"] == pytest.approx(dense.median_ms / layer.median_ms, abs=1e-3)
    table = tables.markdown([layer, dense])
    assert "Whole layers of width 24:" in table
    assert "dense / NSA" in table

    mode, program, *given, shape = judged["layer"]
    names = "x", *layers.parameters("layer", shape)

    def forgetful(taken, cotangents):
        out, gradients = program.call(taken, cotangents)
        gradients = zip(names, gradients, strict=True)
        return out, [jnp.zeros_like(x) if "gate." in name else x for name, x in gradients]

    verdict = check("layer", mode, dataclasses.replace(program, call=forgetful), *given, shape)
    assert not verdict.green
    assert "gate." in verdict.where


def test_gate_of_a_dense_layer_is_green_with_every_gradient():
    shape = Shape(length=300, query_heads=2, key_dim=8, value_dim=8, model_dim=24, config=SMALL)

    verdict = gate.check_small("dense_layer", "xla", "bwd", shape)

    assert 0 < verdict.share <= 1


@pytest.mark.usefixtures("layers_of_numpy")
def test_a_layer_whose_gate_is_red_has_no_speed_and_the_dense_one_has(monkeypatch, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    monkeypatch.setattr(
        gate, "check_small", lambda *of: gate.Verdict(1.5 if of[0] == "layer" else 0.5, "out")
    )

    status = attention.main(["--lengths", "300:fwd", *LAYER, "--output", str(path)], HALF)

    printed, summary = last_line(capsys)
    assert status == 1
    assert "gate layer xla fwd: RED" in printed
    assert summary["red"] == ["layer xla fwd"]
    assert [row.operation for row in records.read(path)] == ["dense_layer"]


def test_floor_of_a_layer_by_hand():
    sizes = dict(query_heads=4, kv_heads=2, key_dim=3, value_dim=3)
    shape = Shape(batch=2, length=70, model_dim=5, config=SMALL, **sizes)
    tokens, blocks, block = 2 * 70, 2 * 16 * 2, SMALL.compression_block_size
    projections = 5 * (4 * 3 + 6 * 2 * 3 + 4 * 3) + 5 * 8 + 8 * 4 * 3  # the gate is 8 wide
    compressor = block * 3 * 6 + 6 * 3

    nsa = roofline.cost("layer", "fwd", shape)
    inner = roofline.cost("native_sparse_attention", "fwd", shape)
    backward = roofline.cost("dense_layer", "bwd", shape)
    dense = roofline.cost("dense_attention", "bwd", shape)

    assert nsa.flops - inner.flops == 2 * (tokens * projections + 2 * blocks * compressor)
    weights = projections + 2 * compressor + 8 + 12 + 2 * (block * 3 + 6 + 3)  # with biases and embeddings
    assert nsa.bytes == 4 * (2 * tokens * 5 + weights)
    weights = 5 * (4 * 3 + 2 * 2 * 3 + 4 * 3)
    assert backward.flops - dense.flops == 2 * 2 * tokens * weights
    assert backward.bytes == 4 * (3 * tokens * 5 + 2 * weights)


def test_layers_are_refused_as_what_they_attend_with(capsys):
    attention.main(
        ["--lengths", "300:fwd", *LAYER, "--implementations", "triton", "one_token", "--dense-up-to", "200"]
    )

    printed, summary = last_line(capsys)
    assert summary["rows"] == 0
    assert re.search(r"refused: layer triton fwd .*: the Triton kernels need ", printed)
    assert re.search(
        r"refused: layer one_token fwd .*: one_token is there for selected_attention alone$",
        printed,
        re.MULTILINE,
    )
    assert re.search(r"refused: dense_layer xla fwd .*: longer than --dense-up-to 200", printed)


TARGET_OF_BRANCH = (
    *("--target", "selected", "--distributions", "random", "--lengths", "300", "--heads", "2"),
    *("--key-dim", "8", "--block-size", "32", "--budget-s", "0.01"),
)


def test_the_selected_branch_takes_turns_with_and_without_probabilities(tmp_path, capsys, monkeypatch):
    """And wrong probabilities have no speed."""
    path, compiled, compile_for = tmp_path / "rows.jsonl", [], timing.compile_for

    def kept(*given):
        compiled.append(compile_for(*given))
        return compiled[-1]

    monkeypatch.setattr(timing, "compile_for", kept)

    status = targets.main([*TARGET_OF_BRANCH, "--output", str(path)], HALF)

    printed, summary = last_line(capsys)
    rows = records.read(path)
    alone, weighed = rows
    assert status == 0
    assert all(set(row) >= FIELDS | {"config"} for row in rows)
    assert [row.strategy for row in rows] == [targets.ALONE, targets.WEIGHED]
    assert {(row.operation, row.mode) for row in rows} == {("selected_attention", "fwd_bwd")}
    assert {row.config["selection_block_size"] for row in rows} == {32}
    assert alone.added_share is None
    assert weighed.added_share == weighed.median_ms / alone.median_ms - 1
    assert printed.count(": green: error / budget out ") == 2
    assert summary["added_share"] == {"random 300": round(weighed.added_share, 4)}
    assert f"| **{100 * weighed.added_share:.1f} %** |" in tables.markdown(rows)

    without, right = compiled

    def wrong(*arguments):
        (out, probabilities), gradients = right.call(*arguments)
        return (out, 1.001 * probabilities), gradients

    again = iter((without, dataclasses.replace(right, call=wrong)))
    monkeypatch.setattr(timing, "compile_for", lambda *_: next(again))

    status = targets.main(TARGET_OF_BRANCH, HALF)

    _, summary = last_line(capsys)
    assert status == 1
    assert summary["red"] == [f"{targets.WEIGHED} random T=300"]
    assert summary["rows"] == 1


def test_probabilities_of_the_selected_branch_are_sums(capsys):
    with pytest.raises(SystemExit):
        targets.parse(["--target", "selected", "--reduce", "max"])

    assert "got --target selected beside --reduce max" in capsys.readouterr().err
