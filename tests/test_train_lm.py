"""The language model example: its text, its baseline, its files, its command from start to resumed end."""

import dataclasses
import json
import math
import os
import pathlib
import random
import shutil
import signal
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import has_form
from modules import randomised

pytest.importorskip("optax", reason="the example needs the extra `train`")
pytest.importorskip("orbax.checkpoint", reason="the example needs the extra `train`")
pytest.importorskip("tqdm", reason="the example needs the extra `train`")
pytest.importorskip("matplotlib", reason="the example needs the extra `train`")

from benchmarks.command_line import InputError
from examples.train_lm import __main__ as command
from examples.train_lm import report, run_folder, sampling, text, training
from examples.train_lm.run_folder import RunFolder
from examples.train_lm.settings import NSA, Settings
from nsa_jax.config import NSAConfig
from nsa_jax.model import restore
from nsa_jax.nn import Selection

STEPS = 6
# So many heads that there are more than 128 rows: for fewer, `xla` compiles a second way to attend.
TINY = f"--steps {STEPS} --batch 2 --length 32 --layers 1 --width 16 --heads 8 --warmup 2".split()
SETTINGS = Settings(steps=STEPS, batch=2, length=32, layers=1, width=16, heads=8, warmup=2)


@pytest.fixture(scope="module", autouse=True)
def new_models_are_drawn_once():
    """Runs begin with the same parameters, and the program that draws them is compiled for each.

    The first is drawn as for a user, others by NumPy.
    """
    draw, drawn = Settings.new_model, {}

    def new_model(settings, mesh):
        if settings not in drawn:
            made = randomised(settings.abstract_model(mesh), 0.3) if drawn else draw(settings, mesh)
            graph, state = nnx.split(made)
            drawn[settings] = graph, jax.tree.map(np.array, state)
        graph, state = drawn[settings]
        return nnx.merge(graph, jax.tree.map(jnp.array, state))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Settings, "new_model", new_model)
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> pathlib.Path:
    """A short text of random words, some of them not ASCII."""
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("data") / "words.txt"
    path.write_text(" ".join(rng.choice(["sparse", "and", "naïve", "dense", "a"]) for _ in range(400)))
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory, data) -> RunFolder:
    """A run from the first step to the last, by the command."""
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "whole")
    assert run("--data", data, "--output", folder.path) == 0
    return folder


def run(*arguments) -> int:
    return command.main([*TINY, *map(str, arguments)])


def contents(path: pathlib.Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def state(folder: RunFolder) -> list[np.ndarray]:
    """Parameters and optimizer state of a run's last checkpoint."""
    parameters, moments, step, _ = folder.load(SETTINGS, training.zero_moments(SETTINGS))
    return [np.asarray(leaf) for leaf in jax.tree.leaves((parameters, moments, step))]


def losses(folder: RunFolder) -> list[tuple[float | None, ...]]:
    rows = run_folder.read_rows(folder.curve)
    return [(row["step"], row["bits_per_byte"], row.get("held_out")) for row in rows]


def test_batches_are_a_pure_function_and_an_epoch_reads_no_byte_twice(data):
    corpus = text.load(data, 32)
    per_epoch = (len(corpus.training) - 1) // 32 - 1
    order = dict(batch=1, length=32, seed=3)

    starts = [
        next(i for i in range(len(corpus.training)) if (corpus.training[i : i + 33] == row).all())
        for row in (corpus.batch(step, **order)[0] for step in range(per_epoch))
    ]

    assert (corpus.batch(5, **order) == text.load(data, 32).batch(5, **order)).all()
    assert (corpus.batch(5, **order) != corpus.batch(5, **order | {"seed": 4})).any()
    assert (corpus.batch(0, **order) != corpus.batch(per_epoch, **order)).any()
    assert (np.diff(np.sort(starts)) >= 32).mean() > 0.9  # a repeated passage is found at its first place
    rows = corpus.batch(1, **order | {"batch": 4})
    assert (rows == np.concatenate([corpus.batch(step, **order) for step in range(4, 8)])).all()


def test_held_out_rows_predict_every_byte_once(data):
    corpus = text.load(data, 32)

    predicted = corpus.held_out_rows(32)[:, 1:].ravel()

    assert len(corpus.held_out) - 1 - len(predicted) in range(32)
    assert (predicted == corpus.held_out[1 : len(predicted) + 1]).all()
    whole = data.read_bytes()
    assert corpus.training.tobytes() + corpus.held_out.tobytes() == whole
    assert len(corpus.held_out) == int(0.1 * len(whole))


def test_default_text_holds_out_no_paragraph_that_it_trains_on():
    corpus = text.load(None, 1024)

    paragraphs = [
        part.tobytes().decode(errors="replace").split("\n\n") for part in (corpus.training, corpus.held_out)
    ]

    shared = {p.strip() for p in paragraphs[0]} & {p.strip() for p in paragraphs[1]}
    assert shared == set()
    assert len(corpus.training) > 200_000


def test_bigram_matches_counting_by_hand():
    training_text, held_out = np.frombuffer(b"abababac", np.uint8), np.frombuffer(b"abac", np.uint8)
    unigram = {c: (b"abababac".count(c) + 1) / (8 + 256) for c in b"abc"}
    pairs = [b"abababac"[i : i + 2] for i in range(7)]

    def bits(strength):
        chance = [
            (pairs.count(bytes(pair)) + strength * unigram[pair[1]])
            / (sum(first == pair[0] for first, _ in pairs) + strength)
            for pair in zip(b"aba", b"bac", strict=True)
        ]
        return -sum(map(math.log2, chance)) / 3

    expected = min(bits(strength) for strength in (0.1, 1, 10, 100, 1000))
    assert text.bigram_bits_per_byte(training_text, held_out) == pytest.approx(expected, rel=1e-12)


def test_bigram_gives_no_byte_a_probability_of_zero():
    never_seen = np.array([255, 254, 255], np.uint8)

    assert math.isfinite(text.bigram_bits_per_byte(np.frombuffer(b"abababac", np.uint8), never_seen))


def test_flops_count_the_keys_that_each_query_sees():
    def attention_of_token(position, attention):
        """What attention costs at `position` beyond what it costs at a sequence's first token."""

        def of_sequence(length):
            settings = dataclasses.replace(SETTINGS, length=length, attention=attention)
            return training.flops_per_trained_token(settings.model, length) * length

        return of_sequence(position + 1) - of_sequence(position) - of_sequence(1)

    # Token 200 sees the compressed blocks that end by it, 5 blocks of 32 and 9 tokens of its own, a window.
    compressed = sum(first + 16 <= 201 for first in range(0, 201, 8))
    keys = compressed + (5 * 32 + 9) + 64
    # Forward and backward are 6 operations a product; heads are 16 wide in all; the first token sees 2 keys.
    assert attention_of_token(200, "nsa") == pytest.approx(6 * 16 * (2 * (keys - 2) + compressed), rel=1e-9)
    assert attention_of_token(200, "dense") == pytest.approx(6 * 16 * 2 * 200, rel=1e-9)


def test_block_states_name_what_each_query_did():
    config = NSAConfig(
        compression_block_size=2,
        compression_stride=2,
        selection_block_size=2,
        num_selected_blocks=4,
        window_size=2,
    )
    chosen = np.full((10, 2, 4), -1)
    chosen[8] = [[0, 1, 3, 4], [0, 2, 3, 4]]  # two KV heads
    chosen[9] = [[0, 1, 3, 4], [0, 1, 3, 4]]

    states = sampling.block_states(chosen, config)

    names = {sampling.NOT_SELECTED: ".", sampling.FORCED: "f", sampling.CHOSEN: "c", sampling.FUTURE: " "}
    assert ["".join(names[s] for s in row) for row in states[[0, 8, 9]]] == [".    ", "fccff", "fc.ff"]


def test_gate_shares_sum_to_one():
    gates = np.random.default_rng(0).uniform(0.01, 1, (5, 4, 3))

    shares = sampling.gate_shares(gates)

    np.testing.assert_allclose(shares.sum(-1), 1, rtol=1e-12)
    np.testing.assert_allclose(shares[2, 1], np.mean([g[1] / sum(g) for g in gates[2]]), rtol=1e-12)
    np.testing.assert_allclose(sampling.smoothed(shares).sum(-1), 1, rtol=1e-12)


def test_pictures_can_be_drawn_of_several_layers(tmp_path):
    layer = Selection(np.zeros((1, 40, 1, 6), np.int32), np.full((1, 40, 2, 3), 0.5))

    sampling.draw_selections(tmp_path / "blocks.png", [layer, layer], NSA, prompt_length=20)
    curve = [{"step": 1, "bits_per_byte": 8.0}, {"step": 2, "bits_per_byte": 7.0, "held_out": 7.5}]
    report.draw_losses(tmp_path / "loss.png", {"nsa": curve, "dense": curve}, 3.5)

    for name in ("blocks.png", "loss.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_every_line_of_the_blocks_is_in_the_legend(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(sampling, "write_picture", lambda path, figure: figures.append(figure))
    layer = Selection(np.zeros((1, 40, 1, 6), np.int32), np.full((1, 40, 2, 3), 0.5))

    sampling.draw_selections(tmp_path / "blocks.png", [layer], NSA, prompt_length=20)

    drawn, explained = (
        {(line.get_color(), line.get_linestyle()) for line in lines}
        for lines in (
            [line for axes in figures[0].axes for line in axes.lines],
            figures[0].legends[0].get_lines(),
        )
    )
    assert drawn == explained == {("black", ":")}


def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    run_folder.write_rows(path, [{"a": 1}])
    monkeypatch.setattr(run_folder.os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))

    with pytest.raises(OSError, match="disk full"):
        run_folder.write_rows(path, [{"a": 2}])

    assert run_folder.read_rows(path) == [{"a": 1}]
    assert list(tmp_path.iterdir()) == [path]


BAD_DATA = {
    "missing": (None, r"--data must be a file that can be read, got '.*' \(No such file"),
    "empty": (b"", "got '.*' of 0 bytes"),
    "not UTF-8": ("grüße".encode("latin-1") * 100, "must be UTF-8 text, got '.*' with byte 0xfc at offset 2"),
    "binary": (b"a" * 50 + b"\0" * 1000, "must be text, got '.*' with a NUL at offset 50"),
    "too short": (b"a" * 329, r"--length 32, got 329 bytes\. Pass a text of at least 331 bytes"),
}


@pytest.mark.parametrize(("content", "message"), BAD_DATA.values(), ids=BAD_DATA.keys())
def test_bad_data_is_one_clear_error_and_writes_nothing(content, message, tmp_path, capsys):
    path = tmp_path / "data.txt"
    if content is not None:
        path.write_bytes(content)

    assert run("--data", path, "--output", tmp_path / "run") == 2

    assert_error(capsys, message)
    assert not (tmp_path / "run").exists()


def test_shortest_text_is_long_enough(tmp_path):
    path = tmp_path / "data.txt"
    path.write_bytes(b"a" * 331)

    assert len(text.load(path, 32).held_out_rows(32)) == 1


BAD_OPTIONS = {
    "steps": ("--steps 0", "--steps must be at least 1, got 0"),
    "kv heads": ("--kv-heads 0", "--kv-heads must be at least 1, got 0"),
    "seed": ("--seed -1", "--seed must be at least 0, got -1"),
    "large seed": ("--seed 4294967296", r"--seed must be below 2\*\*32, got 4294967296"),
    "one byte": ("--length 1", "--length must be at least 2, for a prompt and a byte to write, got 1"),
    "rate": ("--learning-rate 0", r"--learning-rate must be above 0 and finite, got 0\.0"),
    "rate that is none": ("--learning-rate nan", "--learning-rate must be above 0 and finite, got nan"),
    "infinite rate": ("--learning-rate inf", "--learning-rate must be above 0 and finite, got inf"),
    "heads": ("--heads 3", "--heads must divide --width, got 3 and 16"),
    "other kv heads": ("--heads 4 --kv-heads 3", "--kv-heads must divide --heads, got 3 and 4"),
    "stop": ("--stop-at 0", "--stop-at must be at least 1, got 0"),
    "empty prompt": ("--prompt=", "--prompt must have at least one byte, got ''"),
    "long prompt": (f"--prompt={'a' * 32}", "--prompt must be shorter than --length, got 32 bytes and 32"),
    "nothing to resume": ("--resume", "--resume must find a run in --output, got none in"),
}


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS.values(), ids=BAD_OPTIONS.keys())
def test_bad_option_is_one_clear_error_and_writes_nothing(options, message, data, tmp_path, capsys):
    assert run("--data", data, "--output", tmp_path / "run", *options.split()) == 2

    assert_error(capsys, message)
    assert not (tmp_path / "run").exists()


def test_output_that_is_a_file_is_refused(data, tmp_path, capsys):
    (tmp_path / "run").write_text("mine")

    assert run("--data", data, "--output", tmp_path / "run") == 2

    assert_error(capsys, "--output must be a folder that can be made and written, got")
    assert (tmp_path / "run").read_text() == "mine"


def test_a_process_that_is_alone_is_no_cluster(data, tmp_path, monkeypatch, capsys):
    def alone():
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", alone)

    assert run("--data", data, "--output", tmp_path / "run", "--distributed") == 2

    assert_error(capsys, "got the error 'coordinator_address should be defined'. Start it with srun")
    assert not (tmp_path / "run").exists()


def assert_error(capsys, message: str) -> None:
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("examples.train_lm: ")
    assert has_form(line), line
    assert pytest.raises(InputError, match=message).matches(InputError(line)), line


@pytest.mark.slow
def test_command_writes_what_it_promises(finished, data):
    (row,) = run_folder.read_rows(finished.result)
    curve = run_folder.read_rows(finished.curve)

    assert {"device", "jax", "commit", "seconds", "run_id", "prompt", "sample"} <= row.keys()
    assert row["held_out_bits_per_byte"] == curve[-1]["held_out"]
    assert [point["step"] for point in curve] == list(range(1, STEPS + 1))
    assert row["trained_tokens"] == STEPS * 2 * 32
    assert row["nsa"] == dataclasses.asdict(NSA)
    for name in ("loss.png", "blocks.png"):
        assert (finished.path / name).read_bytes().startswith(b"\x89PNG")
    held_out = text.load(data, 32).held_out
    assert row["prompt"].encode() == held_out[:24].tobytes()
    assert sampling.MARK in (finished.path / "sample.txt").read_text()


@pytest.mark.slow
def test_reported_loss_is_that_of_the_checkpointed_model(finished, data):
    model = restore(finished.checkpoint)
    rows = text.load(data, 32).held_out_rows(32)

    chances = jax.nn.log_softmax(nnx.jit(model)(rows[:, :-1]))
    bits = -np.take_along_axis(np.asarray(chances, np.float64), rows[:, 1:, None], 2).mean() / math.log(2)

    # 1e-5: the mean of float32 losses around 8, each right to a few parts in 1e7.
    assert run_folder.read_rows(finished.result)[0]["held_out_bits_per_byte"] == pytest.approx(bits, rel=1e-5)


def interrupt(monkeypatch, step: int, times: int) -> None:
    """Sends SIGINT, so often, while this step is under way; 0 is before the first one."""
    right = training._compile_update

    def compiled(settings, mesh):
        graph, update = right(settings, mesh)
        begun = 0

        def interrupted(*arguments):
            nonlocal begun
            begun += 1
            for _ in range(times if begun == step else 0):
                os.kill(os.getpid(), signal.SIGINT)
            return update(*arguments)

        if step == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return graph, interrupted

    monkeypatch.setattr(training, "_compile_update", compiled)


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
def test_a_run_in_parts_equals_the_whole_run_bit_for_bit(finished, data, tmp_path, monkeypatch, capsys):
    """Ctrl-C ends the first part, once the step under way is saved, and `--stop-at` the second one."""
    parts = RunFolder(tmp_path / "parts")
    arguments = ("--data", data, "--output", parts.path)
    with monkeypatch.context() as patch:
        interrupt(patch, 2, 1)
        assert run(*arguments) == 130
    told = capsys.readouterr().err.splitlines()
    assert told[-1] == "examples.train_lm: interrupted; step 2 is saved; --resume goes on from there"
    assert state(parts)[-1] == 2
    assert run(*arguments, "--resume", "--stop-at", 3) == 0
    assert not parts.result.exists()
    # A run that is killed may have written its curve and not yet the checkpoint.
    ahead = run_folder.read_rows(parts.curve)
    run_folder.write_rows(parts.curve, [*ahead, {"step": 4, "seconds": 1.0, "bits_per_byte": 99.0}])

    assert run(*arguments, "--resume") == 0

    for mine, theirs in zip(state(parts), state(finished), strict=True):
        assert mine.tobytes() == theirs.tobytes()
    assert losses(parts) == losses(finished)
    assert run_folder.read_rows(parts.result)[0]["resumed"]
    assert (parts.path / "sample.txt").read_bytes() == (finished.path / "sample.txt").read_bytes()


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(("step", "times"), [(0, 1), (2, 2)], ids=["before the first step", "twice"])
def test_interrupt_that_saves_nothing_says_so(data, tmp_path, monkeypatch, capsys, step, times):
    folder = RunFolder(tmp_path / "run")
    interrupt(monkeypatch, step, times)

    assert run("--data", data, "--output", folder.path) == 130

    assert capsys.readouterr().err.splitlines()[-1] == (
        "examples.train_lm: interrupted; no step was saved yet; --resume starts from the first step"
    )
    assert not folder.checkpoint.exists()


def test_interrupt_says_what_resume_finds(tmp_path):
    folder = RunFolder(tmp_path / "run")
    assert folder.what_resume_finds() == "nothing was saved; start it again without --resume"
    folder.open_new({})
    assert folder.what_resume_finds() == "no step was saved yet; --resume starts from the first step"
    folder.saving = 50
    assert folder.what_resume_finds().endswith("step 50 if it was saved whole, else from the first step")
    folder.saved = 50
    folder.saving = 100
    assert folder.what_resume_finds().endswith("step 100 if it was saved whole, else from step 50")
    folder.saved, folder.saving = 100, None
    assert folder.what_resume_finds() == "step 100 is saved; --resume goes on from there"


def test_a_full_disk_is_one_clear_error(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError("path must take a whole checkpoint, got 'No space left on device' at 'a'. Make room.")

    monkeypatch.setattr("examples.train_lm.run_folder.save", full)

    message = r"--output must be a folder that takes step 5, got the error .* Make room.\. Pass --resume"
    with pytest.raises(InputError, match=message):
        RunFolder(tmp_path).save(None, None, 5, [])


@pytest.mark.parametrize("content", [b"{", b"\xff"], ids=["cut off", "not text"])
def test_broken_settings_are_one_clear_error(content, data, tmp_path, capsys):
    (tmp_path / "settings.json").write_bytes(content)

    assert run("--data", data, "--output", tmp_path, "--resume") == 2

    assert_error(capsys, "--resume must find a readable settings.json in --output, got ")


@pytest.mark.slow
def test_taken_output_and_other_settings_are_refused_and_nothing_is_lost(finished, data, tmp_path, capsys):
    before = contents(finished.path)
    taken = ("--data", data, "--output", finished.path)

    assert run(*taken) == 2
    assert_error(capsys, "--output must be a new or empty folder, got '.*' with files in it")
    assert run(*taken, "--resume", "--seed", 1) == 2
    assert_error(capsys, "--resume must continue the run that --output holds, got seed=1 where it has seed=0")
    other = tmp_path / "other.txt"
    other.write_text(data.read_text() + "x")
    assert run("--data", other, "--output", finished.path, "--resume") == 2
    assert_error(capsys, "data='other.txt'.* where it has data='words.txt'")

    assert contents(finished.path) == before


@pytest.mark.slow
def test_checkpoint_of_another_configuration_is_refused(finished, data, tmp_path, capsys):
    folder = RunFolder(tmp_path / "mixed")
    shutil.copytree(finished.path, folder.path)
    settings = json.loads((folder.path / "settings.json").read_text())
    (folder.path / "settings.json").write_text(json.dumps(settings | {"width": 32}))
    before = contents(folder.path)

    assert run("--data", data, "--output", folder.path, "--resume", "--width", 32) == 2

    assert_error(
        capsys,
        "--resume must find a whole checkpoint of this run: .*model_dim=32 where it has model_dim=16",
    )
    assert contents(folder.path) == before


@pytest.mark.slow
def test_finished_run_continues_another_prompt_and_keeps_its_record(finished, data, tmp_path, monkeypatch):
    folder, prompt = RunFolder(tmp_path / "again"), "naïve and sparse"
    shutil.copytree(finished.path, folder.path)

    def generate(model, tokens, *, max_new_tokens, **_):
        assert tokens.tolist() == [[*prompt.encode()]]
        return types.SimpleNamespace(tokens=np.full((1, max_new_tokens), ord("b")))

    monkeypatch.setattr(sampling, "generate", generate)
    assert run("--data", data, "--output", folder.path, "--resume", "--prompt", prompt) == 0

    assert folder.result.read_bytes() == finished.result.read_bytes()
    assert (folder.path / "sample.txt").read_text() == f"{prompt}\n{sampling.MARK}\n{'b' * 15}\n"


@pytest.mark.slow
def test_dense_run_is_set_beside_the_nsa_run_and_both_are_published(finished, data, tmp_path, capsys):
    nsa = tmp_path / "train_lm_nsa"
    shutil.copytree(finished.path, nsa)
    dense = tmp_path / "train_lm_dense"

    assert run("--data", data, "--output", dense, "--attention", "dense") == 0

    printed = capsys.readouterr().out
    (nsa_row,), (dense_row,) = (run_folder.read_rows(path / "result.jsonl") for path in (nsa, dense))
    assert f"nsa:      {nsa_row['held_out_bits_per_byte']:.4f} bits/byte at equal steps" in printed
    report.publish([dense, nsa], tmp_path)
    assert [run.row for run in report.committed(tmp_path)] == [nsa_row, dense_row]
    assert len(report.committed(tmp_path)[1].curve) == STEPS
    assert (tmp_path / report.BLOCKS).read_bytes() == (nsa / "blocks.png").read_bytes()
    written = report.markdown(report.both(report.committed(tmp_path)))
    assert (
        f"| {nsa_row['held_out_bits_per_byte']:.3f} | {dense_row['held_out_bits_per_byte']:.3f} |" in written
    )
    document = f"# a\n{report.BEGIN}\nold\n{report.END}\nb\n"
    assert report.inserted(document, written) == f"# a\n{report.BEGIN}\n{written}\n{report.END}\nb\n"


def test_report_of_one_run_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"a report needs .*, got \[\]") as error:
        report.both(report.committed(tmp_path))
    assert has_form(str(error.value))
    with pytest.raises(InputError, match="--document must have the lines"):
        report.inserted("# no marks", "text")


def test_document_says_what_the_committed_runs_measured():
    document = (report.ROOT / "docs" / "examples.md").read_text(encoding="utf-8")

    assert report.inserted(document, report.markdown(report.both(report.committed()))) == document


def test_committed_runs_reach_the_targets():
    pair = report.both(report.committed())
    nsa, dense = pair["nsa"].row, pair["dense"].row

    assert nsa["held_out_bits_per_byte"] <= 0.9 * nsa["bigram_bits_per_byte"]
    assert nsa["held_out_bits_per_byte"] <= 1.03 * dense["held_out_bits_per_byte"]
    assert nsa["seconds"] <= 600
    assert nsa["steps"] == Settings().steps
