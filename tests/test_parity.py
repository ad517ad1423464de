"""`python -m parity`: it passes where it must, and it fails where something is wrong."""

import dataclasses
import functools
import importlib.util
import json
import math
import re
import types

import pytest

torch = pytest.importorskip("torch", reason="parity needs the extra `torch`")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402
from messages import has_form  # noqa: E402
from printed import last_line  # noqa: E402

import nsa_jax.nn  # noqa: E402
from nsa_jax import layout, nn  # noqa: E402
from nsa_jax.kernels import xla  # noqa: E402
from nsa_jax.kernels.xla import operations as xla_operations  # noqa: E402
from nsa_jax.kernels.xla import range_attention  # noqa: E402
from nsa_jax.nn import choosing, rotary  # noqa: E402
from parity import __main__ as program  # noqa: E402
from parity import cases, operations  # noqa: E402
from parity.budget import Row  # noqa: E402
from parity.compare import compare  # noqa: E402

SMALL = dataclasses.replace(
    cases.CASES["odd_dims"], name="small", length=91, batch=1, num_heads=2, num_kv_heads=1
)
LAYER = dataclasses.replace(cases.CASES["layer_mean"], name="layer_small", batch=1, length=91)
WEIGHTED = dataclasses.replace(cases.CASES["layer_weighted_packed"], taught=False)
IMPORTANCE = dataclasses.replace(
    cases.CASES["layer_importance_packed"], options=dict(branches=("cmp", "slc"))
)
MSA = dataclasses.replace(cases.CASES["layer_msa"], name="msa_small", batch=1, length=91)
WINDOWED = dataclasses.replace(MSA, taught=False, options=cases.MSA | dict(branches=("slc", "win")))
DECODE = dataclasses.replace(
    cases.CASES["decode"],
    name="decode_small",
    prompt_lengths=(1, 9),
    num_steps=26,
    layer=dataclasses.replace(LAYER, name=""),
)


def missed(case, dtype=torch.float32, implementation=None):
    return {row.quantity for row in compare(case, dtype, "cpu", implementation) if not row.passed}


@pytest.fixture
def replace(monkeypatch):
    """Puts a wrong function into nsa_jax, wherever it has that name, also for programs traced before."""

    def put(modules, name, function):
        jax.clear_caches()
        for module in modules:
            monkeypatch.setattr(module, name, function)

    yield put
    jax.clear_caches()


@pytest.mark.parametrize(
    "case",
    [cases.CASES["packed_query_positions"], IMPORTANCE, WEIGHTED, cases.CASES["decode_msa"]],
    ids=lambda case: case.name,
)
def test_case_is_within_its_budget(case):
    """The loss of the weighted indexer is left out: importance, and the indexer below, have theirs."""
    assert missed(case) == set()


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(SMALL, torch.bfloat16), (SMALL, torch.float16), (LAYER, torch.bfloat16), (DECODE, torch.bfloat16)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_16_bit_is_within_its_budget(case, dtype):
    assert missed(case, dtype) == set()


def test_oracle_is_within_its_budget():
    assert missed(SMALL, implementation="reference") == set()


def test_case_list_covers_what_was_promised():
    operations = [case for case in cases.CASES.values() if isinstance(case, cases.OperationCase)]
    groups = {case.num_heads // case.num_kv_heads for case in operations}
    assert {1, 16} <= groups
    assert any(case.runs for case in operations)
    assert any(cases.num_queries(case) not in (1, case.length) for case in operations)
    assert {case.ranges for case in operations} == {None, "BTKn2", "TKn2", "BTn2"}
    assert any(case.key_dim % 2 and case.value_dim % 2 for case in operations)
    assert any((case.key_dim, case.value_dim) == (192, 128) for case in operations)
    assert any(case.length < case.config.compression_block_size for case in operations)
    assert any(
        case.config.compression_block_size < case.length < case.config.window_size for case in operations
    )
    assert {1} == {case.length for case in operations if case.name == "one_token"}


XLA = (xla, xla_operations)


def test_rejects_a_wrong_scale(replace):
    right = range_attention.attend_tile

    def scaled(*args):
        *operands, scale = args
        return right(*operands, 1.01 * scale)

    replace([range_attention], "attend_tile", scaled)

    found = missed(SMALL)

    for branch in ("cmp", "slc", "win"):
        quantities = ("out", "lse", "d_query", f"d_key_{branch}", f"d_value_{branch}")
        assert {f"{branch} {x}" for x in quantities} <= found
    assert {"pinned out", "free out", "pinned d_key_win"} <= found
    assert not any(quantity.startswith("blocks") for quantity in found)


def test_rejects_a_window_off_by_one_and_a_converter_that_drops_the_last_block(replace):
    right, converted = layout.Placement.window_range, operations.block_indices_from_ranges

    def longer(self, num_keys):
        config = dataclasses.replace(self.config, window_size=self.config.window_size + 1)
        return right(dataclasses.replace(self, config=config), num_keys)

    def short(*args, **kwargs):
        return converted(*args, **kwargs).at[..., -1].set(-1)

    replace([layout.Placement], "window_range", longer)
    replace([operations], "block_indices_from_ranges", short)

    found = missed(cases.CASES["ranges_of_one_row"])

    of_window = {"win out", "win lse", "win d_value_win", "pinned d_value_win", "free out"}
    assert of_window | {"blocks from ranges"} <= found
    assert not any(quantity.startswith("cmp") for quantity in found)


def test_rejects_a_shifted_block_map_and_missing_gradients(replace):
    """Those of the gates and of the log-sum-exps: each mistake changes what the others leave as it is."""
    weights, compressed = layout.overlap_weights, xla_operations.compressed_attention
    of_short_rows, of_long_rows = xla_operations.attend_all, xla_operations.gated_sum

    @functools.wraps(compressed)
    def blocked(*args, **kwargs):
        found = compressed(*args, **kwargs)
        return found._replace(lse=lax.stop_gradient(found.lse))

    def short(query, keys_values, gates, *rest):
        return of_short_rows(query, keys_values, lax.stop_gradient(gates), *rest)

    def long(*branches_gates):
        return of_long_rows(*branches_gates[:3], lax.stop_gradient(branches_gates[3]))

    replace([layout], "overlap_weights", lambda config: tuple((i + 1, x) for i, x in weights(config)))
    replace(XLA, "compressed_attention", blocked)
    replace([xla_operations], "attend_all", short)
    replace(XLA, "gated_sum", long)

    found = missed(SMALL)

    assert {"blocks that differ", "free out"} <= found
    others = {quantity for quantity in found if not quantity.startswith(("blocks", "free"))}
    assert others == {"pinned d_gates", "cmp d_query", "cmp d_key_cmp"}


def test_rejects_rotary_pairs_that_interleave(replace):
    right = rotary.rotate

    @functools.wraps(right)  # the layer reads the shapes of its annotations
    def interleaved(x, positions, **settings):
        order = jnp.concatenate([jnp.arange(0, x.shape[-1], 2), jnp.arange(1, x.shape[-1], 2)])
        return right(x[..., order], positions, **settings)[..., jnp.argsort(order)]

    replace([rotary], "rotate", interleaved)

    gates = {f"d_gate.{name}" for name in ("kernel_in", "bias_in", "kernel_out", "bias_out")}
    assert missed(WINDOWED) >= gates | {"out", "d_x", "d_query_proj.kernel", "d_key_win_proj.kernel"}


def test_rejects_mistakes_of_an_indexer_and_its_loss(replace):
    """Keys one token off when it chooses, a target of one head, and a loss that reaches the layer's input."""
    choose, probabilities = nn.Indexer.choose, choosing.attention.block_probabilities

    def shifted(self, queries, keys, at, **where):
        return choose(self, queries, jnp.roll(keys, 1, axis=1), at, **where)

    leaking = types.SimpleNamespace(
        lax=types.SimpleNamespace(stop_gradient=lambda x: x), ShapeDtypeStruct=jax.ShapeDtypeStruct
    )
    replace([nn.Indexer], "choose", shifted)
    replace([choosing.attention], "block_probabilities", functools.partial(probabilities, reduce="max"))
    replace([choosing], "jax", leaking)

    of_indexer = {f"dense d_selector.{name}_proj.kernel" for name in ("query", "key")}
    of_others = {"dense d_others", "selected d_others"}
    assert missed(MSA) == {"blocks that differ", "free out", "dense loss"} | of_indexer | of_others


def test_rejects_a_decode_step_with_a_ring_one_slot_off(replace):
    right = nsa_jax.nn.NSAAttention.decode_step

    def shifted(self, x, cache, **kwargs):
        return right(
            self,
            x,
            cache._replace(key_win_ring=jnp.roll(cache.key_win_ring, 1, axis=1)),
            **kwargs,
        )

    replace([nsa_jax.nn.NSAAttention], "decode_step", shifted)

    assert missed(dataclasses.replace(DECODE, layer=WINDOWED)) == {"decode out"}


# The command line.

FAST = ["--case", "one_token"]


def test_command_line_prints_a_table_and_a_line_of_json(capsys):
    code = program.main(FAST)

    *table, line = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    assert code == 0
    assert table[0].split() == ["case", "dtype", "quantity", "error", "budget", "mean", "verdict"]
    assert report["passed"] is True
    assert report["quantities"] == len(table) - 1
    assert report["missed"] == []
    assert [worst["case"] for worst in report["worst"]] == ["one_token"]
    assert report["jax"] == jax.__version__


@pytest.mark.parametrize("error", [3.0, math.inf, math.nan])
def test_command_line_fails_on_a_miss(monkeypatch, capsys, error):
    rows = [Row("one_token", "float32", "good", 0.5, 1.0), Row("one_token", "float32", "bad", error, 1.0)]
    monkeypatch.setattr("parity.compare.compare", lambda *args: rows)

    assert program.main(FAST) == 1

    _, report = last_line(capsys)
    assert report["passed"] is False
    assert [row["quantity"] for row in report["missed"]] == ["bad"]
    assert [row["quantity"] for row in report["worst"]] == ["bad"]


def test_rows_go_to_a_file_with_the_mean_and_the_largest_error(monkeypatch, tmp_path):
    rows = [
        Row("one_token", "bfloat16", "slc out", 0.5, 1.0, mean=0.25, mean_budget=0.1),
        Row("one_token", "bfloat16", "blocks ill formed", math.nan, 0),
    ]
    monkeypatch.setattr("parity.compare.compare", lambda *args: rows)

    assert program.main([*FAST, "--output", str(tmp_path / "rows.jsonl")]) == 1

    slc, blocks = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert (slc["error"], slc["mean"], slc["mean_budget"], slc["passed"]) == (0.5, 0.25, 0.1, False)
    assert (blocks["error"], blocks["mean"], blocks["passed"]) == ("nan", None, False)


def test_command_line_runs_the_dtypes_and_cases_it_is_given(monkeypatch, capsys):
    seen = []

    def record(case, dtype, device, implementation):
        seen.append((case.name, dtype, device, implementation))
        return [Row(case.name, "x", "y", 0.0, 0.0)]

    monkeypatch.setattr("parity.compare.compare", record)
    repeated = [("--case", "plain"), ("--case", "layer"), ("--dtype", "bfloat16"), ("--dtype", "float32")]
    options = [word for pair in (*repeated, ("--implementation", "xla")) for word in pair]

    assert program.main(options) == 0

    wanted = [(case, dtype) for dtype in (torch.bfloat16, torch.float32) for case in ("plain", "layer")]
    assert seen == [(*each, "cpu", "xla") for each in wanted]


def complaint(capsys):
    """The one line of an error, in the house's form: rule, what was got, what to do."""
    printed = capsys.readouterr()
    assert printed.out.count("\n") <= 2  # at most the table's head and a line about a skipped case
    *_, line = printed.err.splitlines()  # before it: the progress
    assert line.startswith("parity: ")
    assert has_form(line.removeprefix("parity: ")), line
    return line


def test_torch_missing_is_one_clear_error(monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else found(name))

    assert program.main(FAST) == 2

    assert "got no module torch. Install" in complaint(capsys)


def test_no_gpu_is_one_clear_error(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert program.main(["--device", "cuda"]) == 2

    assert "torch.cuda.is_available() = False" in complaint(capsys)


def test_unknown_case_is_one_clear_error(capsys):
    assert program.main(["--case", "plain", "--case", "plane"]) == 2

    said = complaint(capsys)
    assert "got plane. Choose from those that --list prints" in said


def test_an_implementation_that_cannot_run_is_one_clear_error(monkeypatch, capsys):
    def refuse(*args):
        raise NotImplementedError("no triton here. Use xla.")

    monkeypatch.setattr("parity.compare.compare", refuse)

    assert program.main([*FAST, "--implementation", "triton"]) == 2

    assert "no triton here. Use xla." in complaint(capsys)


def test_a_case_that_cannot_run_is_skipped_with_its_reason(capsys):
    assert program.main([*FAST, "--case", "layer", "--implementation", "reference"]) == 0

    _, report = last_line(capsys)
    assert list(report["skipped"]) == ["layer float32"]
    assert "oracle" in report["skipped"]["layer float32"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_frameworks_on_one_gpu(capsys, dtype):
    code = program.main(["--device", "cuda", "--dtype", dtype, "--case", "packed", "--case", "layer"])

    assert last_line(capsys)[1]["missed"] == []
    assert code == 0


def test_list_describes_every_case_and_compares_nothing(monkeypatch, capsys):
    monkeypatch.setattr("parity.compare.compare", None)

    assert program.main(["--list"]) == 0

    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["case", "about", "compares"]
    assert [line.split()[0] for line in lines] == list(cases.CASES)
    described = [line.split(maxsplit=3)[3] for line in lines]
    assert len(set(described)) == len(lines)
    assert all(int(line.split()[1]) >= 1 for line in lines)
    assert cases.CASES.keys() >= program.SECONDS.keys()


def test_progress_is_on_stderr_beside_the_table(monkeypatch, capsys):
    monkeypatch.setattr("parity.compare.compare", lambda case, *_: [Row(case.name, "float32", "x", 0.0, 0.0)])

    assert program.main([*FAST, "--case", "layer"]) == 0

    printed = capsys.readouterr()
    start, *each = printed.err.splitlines()
    assert re.fullmatch(r"2 cases, about \d+ s on 2 CPU cores, most of it compiling", start)
    pattern = r"case {} of 2: {} float32 \(0 s elapsed, about \d+ s left\)"
    for number, (line, name) in enumerate(zip(each, ("one_token", "layer"), strict=True), 1):
        assert re.fullmatch(pattern.format(number, name), line)
    assert "elapsed" not in printed.out
    assert len(printed.out.splitlines()) == 4  # head, two rows, JSON
