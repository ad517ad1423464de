"""`python -m nsa_jax.adopt`: what its stages train, how they are resumed, what is measured and refused."""

import builtins
import collections
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import types

import host_devices
import numpy as np
import pytest
from messages import has_form, refused
from modules import abstract
from pretrained_files import fields_of, tensors_of, write_folder, write_gguf

pytest.importorskip("optax", reason="adopt needs the extra `train`")
pytest.importorskip("orbax.checkpoint", reason="adopt needs the extra `train`")
pytest.importorskip("tqdm", reason="adopt needs the extra `train`")
pytest.importorskip("safetensors", reason="adopt needs the extra `pretrained`")
pytest.importorskip("tokenizers", reason="adopt needs the extra `pretrained`")

import jax
import jax.numpy as jnp
import tokenizers
from flax import nnx

from examples import adopt as example
from examples import adopt_variants
from nsa_jax.adopt import __main__ as command
from nsa_jax.adopt import figures, findings, measure, report, text, training
from nsa_jax.adopt.files import digests, documents
from nsa_jax.adopt.run_folder import RunFolder
from nsa_jax.adopt.text import Documents, Packed
from nsa_jax.config import BRANCHES
from nsa_jax.model import Transformer, TransformerConfig, restore, transformer
from nsa_jax.model.abstract import parameters
from nsa_jax.pretrained import ChatFormat, conversion, load, load_chat_format

SIZES = dict(l=8, d=4, block=8, n=4, w=8, length=64, batch=2, rows=3, dtype="float32")
SIZES |= dict(selector="importance", branches=BRANCHES)
STEPS = {"distil-steps": 60, "sparse-steps": 3, "warmup": 1, "new-learning-rate": 1e-2, "logit-weight": 0.5}
WHOLE = SIZES | STEPS | {"branches": ("cmp", "slc"), "needles": 1, "needle-lengths": 160, "rope-base": 400.0}
WHOLE |= {"remat": "none"}  # is compiled faster
SHORT = SIZES | {"needles": 0, "distil-steps": 2, "sparse-steps": 0}


# Tokens are bytes, and the word "a".
TOKENS = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "Ġa"]
FIELDS = fields_of("llama", vocab_size=len(TOKENS))


@pytest.fixture(scope="module", autouse=True)
def new_parameters_are_drawn_once():
    """Runs have the same seed, and compiling the program that draws takes a second of each short one."""
    draw, drawn = conversion._initial, {}

    def initial(config, options, rngs, names):
        wanted = parameters(abstract(Transformer, config, **options))
        shapes = tuple((name, wanted[name].shape) for name in names)
        if shapes not in drawn:
            drawn[shapes] = jax.tree.map(np.array, draw(config, options, rngs, names))
        return jax.tree.map(jnp.array, drawn[shapes])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "_initial", initial)
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> pathlib.Path:
    """A dense model of SmolLM2's architecture, with two layers."""
    folder = write_folder(tmp_path_factory.mktemp("models") / "dense", FIELDS, tensors_of(FIELDS))
    vocabulary = {token: number for number, token in enumerate(TOKENS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[("Ġ", "a")]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    words = dict(chat_template="{{ messages }}", eos_token=TOKENS[0])
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    return folder


@pytest.fixture(scope="module")
def one_layer(source, tmp_path_factory) -> pathlib.Path:
    """The same model with its first layer alone, for what does not depend on their number."""
    fields = FIELDS | {"num_hidden_layers": 1}
    folder = shutil.copytree(source, tmp_path_factory.mktemp("models") / "one_layer")
    return write_folder(folder, fields, tensors_of(fields))


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[pathlib.Path]:
    """A book, and a file of short documents."""
    folder, rng = tmp_path_factory.mktemp("text"), random.Random(0)

    def words(number: int) -> str:
        return " ".join(rng.choice(["sparse", "and", "naïve", "dense", "a"]) for _ in range(number))

    (folder / "book.txt").write_text(words(60))
    rows = [json.dumps({"text": words(rng.randint(1, 40))}) for _ in range(30)]
    (folder / "pages.jsonl").write_text("\n".join([*rows, "", json.dumps({"text": " "})]))
    return [folder / "book.txt", folder / "pages.jsonl"]


def run(source, files, output, options, *arguments, main=command.main) -> int:
    given = [source, "--text", *files, "--output", output]
    for name, value in options.items():
        given += [f"--{name}", *value] if isinstance(value, tuple) else [f"--{name}={value}"]
    given += arguments
    try:
        return main(list(map(str, given)))
    except SystemExit as end:
        return end.code


@pytest.fixture(scope="module")
def finished(tmp_path_factory, one_layer, files) -> pathlib.Path:
    """Of the example, whose computation is in float32."""
    output = tmp_path_factory.mktemp("runs") / "whole"
    options = {name: value for name, value in WHOLE.items() if name != "dtype"}
    assert run(one_layer, files, output, options, "--train-dense", main=example.main) == 0
    return output


def of(folder: pathlib.Path) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in parameters(restore(folder)).items()}


def rows(output: pathlib.Path, stage: str) -> list[dict]:
    found = [json.loads(line) for line in (output / f"{stage}.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "ms"} for row in found]


@pytest.mark.slow
def test_distil_changes_what_chooses_alone_and_its_loss_falls(finished, one_layer):
    """A run of two layers, below, changes both."""
    assert changed_by_distil(finished, one_layer) == {
        f"layers.0.attention.compressor_key.{name}"
        for name in ("bias_in", "bias_out", "kernel_in", "kernel_out", "position_embedding")
    }
    losses = [row["selection"] for row in rows(finished, "distil")]
    assert len(losses) == 60
    assert np.mean(losses[-20:]) < np.mean(losses[:20])
    measured = json.loads((finished / "measured.json").read_text())
    before, after = (np.mean(measured[name]["recall"]["best_free"]) for name in ("converted", "distil"))
    assert after > before


def changed_by_distil(output: pathlib.Path, source: pathlib.Path) -> set[str]:
    """Names of parameters that are not, bit for bit, those of the converted model."""
    converted = parameters(command._convert(load(source)[0], settings_of(output)))
    distilled = of(output / "checkpoints" / "distil")
    return {
        name for name, value in distilled.items() if value.tobytes() != np.asarray(converted[name]).tobytes()
    }


def settings_of(output: pathlib.Path) -> command.Settings:
    values = json.loads((output / "settings.json").read_text())
    del values["files"]
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return command.Settings(**values)


@pytest.mark.slow
def test_sparse_trains_everything_with_the_selection_loss_and_the_dense_model(finished):
    before, after = (of(finished / "checkpoints" / stage) for stage in ("distil", "sparse"))

    assert before.keys() == after.keys()
    assert all((before[name] != after[name]).any() for name in before)
    assert [set(row) for row in rows(finished, "sparse")] == [{"step", "loss", "selection", "divergence"}] * 3
    assert [set(row) for row in rows(finished, "dense")] == [{"step", "loss"}] * 3


def test_losses_are_added_up_by_their_weights():
    class Model:
        def loss(self, tokens, segment_ids, **asked):
            assert asked.get("distil", "selected") == "selected"
            found = dict(loss=1.0, distil=10.0, teacher=100.0)
            found = [found[name] for name in found if name == "loss" or name in asked]
            return found if asked else found[0]

    settings = command.Settings(source="", selection_weight=2, logit_weight=3)
    by_name = {
        stage.name: stage for stage in training.stages(dataclasses.replace(settings, train_dense=True))
    }
    for stage, teacher, weight, total in (
        ("sparse", None, 2, 21),
        ("sparse", "dense", 2, 321),
        ("sparse", "dense", 0, 301),
        ("dense", None, 2, 1),
    ):
        of = dataclasses.replace(settings, selection_weight=weight, selection_target="selected")
        assert training._losses(Model(), by_name[stage], of, None, None, teacher)[0] == total


def test_matrices_decay_and_biases_and_norms_do_not():
    """Biases of heads and those of gates have two axes, as matrices have."""
    sizes = dict(vocab_size=5, num_layers=1, model_dim=8, num_heads=2, num_kv_heads=1)
    config = TransformerConfig(**sizes, qkv_bias=True, out_bias=True, normalize_qk=True)
    settings = command.Settings(source="")
    stage = training.Stage("sparse", 10, 0, training.GROUPS)
    _, learning, _ = training._divided(abstract(Transformer, config), stage, settings)

    @jax.jit
    def update():
        found = {}
        for name, group in learning.items():
            ones, zeros = (jax.tree.map(lambda x, to=to: jnp.full(x.shape, to), group) for to in (1.0, 0.0))
            optimizer = training._optimizer(settings, stage, name)
            found[name], _ = optimizer.update(zeros, optimizer.init(ones), ones)
        return found

    updates = jax.tree.leaves_with_path(update())
    changed = {jax.tree_util.keystr(path): np.asarray(x).any() for path, x in updates}

    assert sum("bias" in name for name in changed) == 14
    assert sum("norm" in name for name in changed) == 7
    for name, decays in changed.items():
        assert decays == ("bias" not in name and "norm" not in name), name


def test_the_dense_model_teaches_in_bfloat16(one_layer, files, tmp_path, monkeypatch):
    """The default dtype, in which a run with `--logit-weight` ended as *sparse* began."""
    monkeypatch.setattr(command.Measurements, "measure", lambda *_: None)
    monkeypatch.setattr(command, "write_report", lambda *_: None)
    right, told = training._update, {}

    @functools.partial(jax.jit, static_argnames=("graph", "stage", "settings", "of_dense"))
    def losses(graph, stage, settings, learning, fixed, moments, tokens, segment_ids, of_dense, dense):
        model, teacher = training._whole(graph, learning, fixed), nnx.merge(of_dense, dense)
        return training._losses(model, stage, settings, tokens, segment_ids, teacher)[1]

    def update(graph, stage, settings, learning, fixed, moments, *rest):
        if settings.dtype == "bfloat16":
            right.trace(graph, stage, settings, learning, fixed, moments, *rest)  # where the run ended
        return learning, moments, losses(graph, stage, settings, learning, fixed, moments, *rest)

    monkeypatch.setattr(training, "_update", update)
    taught = SHORT | {"distil-steps": 0, "sparse-steps": 1, "logit-weight": 0.5}
    taught |= dict(selector="indexer", branches="slc")
    for dtype in ("bfloat16", "float32"):
        assert run(one_layer, files, tmp_path / dtype, taught | dict(dtype=dtype)) == 0
        (told[dtype],) = rows(tmp_path / dtype, "sparse")

    assert told["float32"]["divergence"] > 0
    for name in ("loss", "divergence"):
        assert told["bfloat16"][name] == pytest.approx(told["float32"][name], rel=0.1)


@pytest.mark.slow
def test_the_model_of_the_run_can_be_loaded(finished):
    model, tokenizer = load(finished / "model")
    template = ChatFormat("{{ messages }}", (), dict(eos_token=TOKENS[0]))
    assert load_chat_format(finished / "model") == template
    assert model.config.rope_base == WHOLE["rope-base"]
    assert model.config.branches == WHOLE["branches"]

    assert tokenizer.encode("a").ids
    trained = of(finished / "checkpoints" / "sparse")
    assert {name: np.asarray(value).tobytes() for name, value in parameters(model).items()} == {
        name: value.tobytes() for name, value in trained.items()
    }


@pytest.mark.slow
def test_the_report_has_its_tables(finished, files):
    page, found = ((finished / name).read_text() for name in ("report.md", "report.json"))

    for line in (
        "| stage | steps | tokens | epochs | ms a step | first losses | last losses |",
        " times as long as one of *dense*.",
        "| from position | dense, as loaded | NSA, converted | NSA after distil | NSA after sparse | dense, ",
        "| layer | NSA, converted | NSA after distil | NSA after sparse | chance |",
        "2 prompts of 160 tokens, and 57 new ones",
        "| ms a token of all rows | ",
        "| ms to the first | ",
    ):
        assert line in page
    assert page.count("| 160 | ") == 5  # needles of two dense models, and of three of NSA
    found = json.loads(found)
    assert found["settings"]["length"] == 64
    assert found["text"]["files"] == [
        [file.name, hashlib.sha256(file.read_bytes()).hexdigest()]
        for file in files  # as `sha256sum` prints it
    ]
    assert found["stages"]["distil"]["tokens"] == 60 * 2 * 64
    assert found["stages"]["sparse"]["ms_per_step"] > 0
    for model in ("converted", "distil", "sparse"):
        assert np.shape(found["measured"][model]["recall"]["best_free"]) == (1, 2)  # layers, KV heads
        assert len(found["measured"][model]["losses"]["losses"]) == 8
    assert sum(found["measured"]["dense"]["needles"]["found"][0]) <= 16
    assert "decoding" not in found["measured"]["sparse"]  # as fast as the converted model
    assert {"dense", "nsa"} < found["measured"]["converted"]["decoding"].keys()


def test_the_report_has_versions_and_the_commit_where_they_are_known(tmp_path, monkeypatch):
    def git(*command):
        named = ("-c", "user.name=me", "-c", "user.email=me@example.org")
        subprocess.run(["git", *named, *command], cwd=tmp_path, check=True, capture_output=True)

    if shutil.which("git") is None:
        pytest.skip("there is no git")
    monkeypatch.setattr(report, "PACKAGE", tmp_path / "package")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / ".gitignore").touch()
    git("init")
    git("add", ".gitignore")
    git("commit", "--message=Another project's")
    assert report._commit() is None
    git("add", ".")
    git("commit", "--message=Ours")
    commit = report._commit()
    assert re.fullmatch("[0-9a-f]{7,}", commit)
    found = report.versions()
    assert found["nsa_jax"].endswith(f" (commit {commit})")
    assert list(found)[:6] == ["nsa_jax", "Python", "jax", "jaxlib", "flax", "optax"]
    (tmp_path / "package" / "__init__.py").write_text("changed")
    assert report._commit() == f"{commit}-dirty"

    def version(name):
        if name == "triton":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setenv("PATH", "")
    assert report.versions().keys() == {"nsa_jax", "Python", "jax", "jaxlib", "flax", "optax"}
    assert "commit" not in report.versions()["nsa_jax"]


@pytest.mark.parametrize(("seconds", "samples"), [(0.1, 5), (2, 2), (20, 1)])
def test_decoding_is_timed_in_turns_without_the_first_token_and_what_compiles(monkeypatch, seconds, samples):
    now, calls = 0.0, []

    def generate(model, prompts, *, max_new_tokens):
        nonlocal now
        assert prompts.tolist() == [[0, 1, 2, 0, 1], [2, 0, 1, 2, 0]]
        now += seconds + max_new_tokens * (0.002 if model == "dense" else -1e-9)
        now += 1000 * ((model, max_new_tokens) not in calls)  # it compiles
        calls.append((model, max_new_tokens))
        return prompts

    monkeypatch.setattr(measure, "generate", generate)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now)
    settings = command.Settings(source="", n=1, block=2, length=3, batch=2, needle_lengths=(4, 5))
    held_out = Documents(np.arange(3), np.array([0]), np.array([3]))

    found = measure.Measurements(None, settings, held_out, None)._decoding("NSA", "dense")

    assert calls == [("dense", 1), ("dense", 57), ("NSA", 1), ("NSA", 57)] * (1 + samples)
    assert found["dense"] == dict(
        first_token_ms=pytest.approx(1e3 * seconds + 2), token_ms=pytest.approx(2), samples=samples
    )
    assert found["nsa"] == dict(first_token_ms=pytest.approx(1e3 * seconds), token_ms=None, samples=samples)


@pytest.mark.slow
def test_the_page_shows_its_figures_or_says_what_draws_them(finished, tmp_path, monkeypatch):
    page, drawn = (finished / "report.md").read_text(), {path.name for path in finished.glob("*.svg")}
    if drawn:  # with matplotlib
        assert drawn == {figures.NEEDLES, figures.LOSSES}
        assert all(f"]({name})" in page for name in drawn)
    settings, folder = dataclasses.replace(settings_of(finished), remat=WHOLE["remat"]), RunFolder(tmp_path)
    for path in (finished / "measured.json", *finished.glob("*.jsonl")):
        shutil.copy(path, tmp_path)
    for package in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, package, None)
    counted = json.loads((finished / "report.json").read_text())["text"]
    report.write_report(folder, settings, training.stages(settings), counted, 1)

    assert not list(tmp_path.glob("*.svg"))
    told = "Its figures need matplotlib: pip install 'nsa_jax[train]', and run the same command again."
    sections = (tmp_path / "report.md").read_text().split("\n\n")
    sections.remove(told)
    assert sections == re.sub(r"!\[.*\n\n", "", page).split("\n\n")


def test_a_report_of_the_same_numbers_keeps_where_they_come_from(tmp_path, monkeypatch):
    """A finished run goes on when its command is given again, for its figures, with other versions."""
    monkeypatch.setattr(figures, "draw", lambda *_: None)
    folder, settings = RunFolder(tmp_path), command.Settings(source="")
    shutil.copy(COMMITTED / "adopt_smollm2" / "report.json", tmp_path / "committed.json")
    measured = json.loads((tmp_path / "committed.json").read_text())["measured"]
    folder.measured.write_text(json.dumps(measured))
    counted = dict(tokens=2, documents=2, held_out_tokens=1, held_out_documents=1, files=[])

    def told(version, devices):
        monkeypatch.setattr(report, "versions", lambda: dict(nsa_jax=version))
        report.write_report(folder, settings, [], counted, devices)
        found = json.loads((tmp_path / "report.json").read_text())
        assert f"{found['devices']} x " in (tmp_path / "report.md").read_text()
        return found["versions"]["nsa_jax"], found["devices"]

    assert told("first", 4) == ("first", 4)
    assert told("second", 1) == ("first", 4)
    folder.note("sparse", "needles", measured["dense"]["needles"])
    assert told("second", 1) == ("second", 1)
    (tmp_path / "report.json").write_text("half")
    assert told("third", 2) == ("third", 2)


COMMITTED = pathlib.Path(__file__).parent.parent / "docs" / "examples"


@pytest.mark.parametrize("name", ["adopt_smollm2", "adopt_smollm2_32k"])
def test_the_committed_figures_show_the_committed_numbers(name):
    folder = COMMITTED / name
    measured = json.loads((folder / "report.json").read_text())["measured"]
    asked = {name: of for name, of in findings.all_needles(measured).items() if name in figures.LINES}
    numbers = {figures.NEEDLES: figures.shown(asked), figures.LOSSES: findings.losses(measured)}

    for file, shown in numbers.items():
        drawn = (folder / file).read_text()
        assert figures.fingerprint(shown) in drawn, f"figures.draw(measured, folder) draws {file}"


@pytest.mark.parametrize("name", ["adopt_smollm2", "adopt_smollm2_32k"])
def test_the_committed_page_is_made_from_the_committed_numbers(name):
    title, told, rest = (COMMITTED / name / "report.md").read_text().split("\n\n", 2)
    found = json.loads((COMMITTED / name / "report.json").read_text())

    assert told.startswith("> What `python -m nsa_jax.adopt ")
    assert report.page(found, [figures.NEEDLES, figures.LOSSES]) == f"{title}\n\n{rest}"


def test_the_page_tells_epochs_and_the_ratio_of_steps():
    of = dict(steps=3, tokens=30, first=dict(loss=2.0), last=dict(loss=1.0))
    stages = dict(sparse=of | dict(ms_per_step=30.0), dense=of | dict(ms_per_step=20.0))

    assert "| sparse | 3 | 30 | 0.25 | 30.0 | loss 2.0000 | loss 1.0000 |" in report._training(stages, 120)
    (told,) = report._ratio(stages)
    assert "1.50 times" in told
    assert not list(report._ratio(dict(sparse=stages["sparse"])))
    assert not list(report._ratio(stages | dict(dense=of | dict(ms_per_step=None))))  # of one step


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_same_bits(finished, one_layer, files, tmp_path, monkeypatch, capsys):
    output, right = tmp_path / "run", training._update
    shutil.copytree(finished, output)  # a run that has measured, and not trained yet
    shutil.rmtree(output / "checkpoints")
    stops = {("distil", 3): signal.SIGINT, ("sparse", 1): signal.SIGTERM}
    done, left = collections.Counter(), dict(stops)

    def interrupted(graph, which, *arguments):
        done[which.name] += 1
        if number := left.pop((which.name, done[which.name]), None):
            os.kill(os.getpid(), number)
        return right(graph, which, *arguments)

    monkeypatch.setattr(training, "_update", interrupted)
    for (stage, step), number in stops.items():
        assert run(one_layer, files, output, WHOLE, "--train-dense") == 128 + number
        told = capsys.readouterr().err
        assert f"interrupted; step {step} of {stage} is saved; the same command goes on" in told
        assert len(rows(output, stage)) == step

    assert run(one_layer, files, output, WHOLE, "--train-dense") == 0
    for each in ("distil", "sparse", "dense"):
        mine, theirs = (of(folder / "checkpoints" / each) for folder in (output, finished))
        assert {name: value.tobytes() for name, value in mine.items()} == {
            name: value.tobytes() for name, value in theirs.items()
        }
        assert rows(output, each) == rows(finished, each)


@pytest.mark.slow
def test_a_mesh_trains_as_one_device_does(one_layer, files, tmp_path):
    arguments = map(str, (one_layer, files[0], tmp_path))
    printed = host_devices.run("adopt_mesh_program.py", *arguments, devices=4)

    for check in (
        "equal to one device",
        "resumed bit for bit",
        "a mesh that does not divide the model is refused",
    ):
        assert check in printed


@pytest.mark.slow
def test_other_settings_are_refused_by_name(finished, one_layer, files, tmp_path, capsys):
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}

    assert run(one_layer, files, finished, WHOLE | dict(seed=1, w=16), "--train-dense") == 2
    told = capsys.readouterr().err
    assert "got w=16, seed=1 where" in told
    assert has_form(told.strip())

    changed = tmp_path / files[0].name
    changed.write_text("another text")
    assert run(one_layer, [changed, files[1]], finished, WHOLE, "--train-dense") == 2
    assert "files=" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_the_example_teaches_an_indexer_alone_from_a_gguf_file(source, files, tmp_path, monkeypatch):
    monkeypatch.setattr(command.Measurements, "measure", lambda *_: None)
    monkeypatch.setattr(command, "write_report", lambda *_: None)
    options = SHORT | dict(selector="indexer", branches="slc")
    bpe = TOKENS, ["Ġ a"], [1] * len(TOKENS), "smollm"
    file = write_gguf(tmp_path / "dense.gguf", FIELDS, tensors_of(FIELDS), bpe=bpe)

    assert run(file, files, tmp_path / "run", options, main=example.main) == 0

    assert changed_by_distil(tmp_path / "run", source) == {
        f"layers.{layer}.attention.selector.{part}_proj.kernel"
        for layer in (0, 1)
        for part in ("query", "key")
    }


def test_failures_of_the_device_and_the_disk_are_one_line(source, files, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command.Measurements, "measure", lambda *_: None)
    for fail, told in (
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nmore"),
            "for distil, got 'RESOURCE_EXHAUSTED: Out of memory'; nothing is trained yet. Use --remat layer "
            "or more devices by --mesh with the same --output, or a smaller --batch or --length in another.",
        ),
        (
            OSError(28, "No space left on device"),
            "No space left on device'; nothing is trained yet. Make room",
        ),
    ):

        def update(*_, fail=fail):
            raise fail

        monkeypatch.setattr(training, "_update", update)
        assert run(source, files, tmp_path / "run", SHORT) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert told in line
        assert has_form(line)

    def update(graph, stage, settings, learning, fixed, moments, *_):
        return learning, moments, {"selection": np.float32("nan")}

    monkeypatch.setattr(training, "_update", update)
    assert run(source, files, tmp_path / "run", SHORT) == 2
    assert "the loss must stay finite, got {'selection': nan} in step 1" in capsys.readouterr().err


def test_what_needs_less_memory_goes_on_where_there_was_none(source, files, tmp_path, monkeypatch, capsys):
    right, layers, remats = training._update, transformer.run_layers, []

    def update(graph, stage, settings, learning, fixed, moments, *rest):
        if settings.remat != "layer" and (tmp_path / "run" / "checkpoints").exists():
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        right.trace(graph, stage, settings, learning, fixed, moments, *rest)  # to run it would compile it
        return learning, moments, {"selection": np.float32(1)}

    def run_layers(*arguments, remat, scan):
        remats.append(remat)
        return layers(*arguments, remat=remat, scan=scan)

    def losses(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    measure, noted = command.Measurements.measure, []
    monkeypatch.setattr(command.Measurements, "measure", lambda *_: None)
    monkeypatch.setattr(command.Measurements, "_losses", losses)
    monkeypatch.setattr(training, "_update", update)
    monkeypatch.setattr(training, "SAVE_EVERY", 1)
    monkeypatch.setattr(transformer, "run_layers", run_layers)
    monkeypatch.setattr(command, "write_report", lambda *_: noted.append("done"))

    assert run(source, files, tmp_path / "run", SHORT) == 2
    assert "; step 1 of distil is saved. Use --remat layer" in capsys.readouterr().err
    assert set(remats) == {"attention"}
    remats.clear()
    assert run(source, files, tmp_path / "run", SHORT, "--remat=layer") == 0
    assert set(remats) == {True}
    assert [row["step"] for row in rows(tmp_path / "run", "distil")] == [1, 2]
    assert noted == ["done"]

    monkeypatch.setattr(command.Measurements, "measure", measure)
    assert run(source, files, tmp_path / "run", SHORT, "--remat=layer") == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "for measuring converted, got" in line
    assert "Use shorter --needle-lengths, fewer --rows or a smaller --batch, in another" in line
    assert has_form(line)


REFUSED = {
    "no text": ([], "", "--text must be files that can be read, got .*none.txt"),
    "empty text": ([], " \n", "--text must hold text, got none in text.txt"),
    "short text": ([], "a few words", "for rows of 64 and --held-out 0.05. Pass more text, or"),
    "all held out": (["--held-out=0.9"], "a" * 256, "--held-out 0.9. Pass .* smaller --length or --held-out"),
    "not UTF-8": ([], b"\xff", "--text must be files of UTF-8, got 'text.txt'"),
    "no source": ([], "words", "source must be a folder, a .gguf file or the name of a repository"),
    "no tokenizer": ([], "words", "SOURCE must have a tokenizer, got"),
    "a file": ([], "words", "--output must be a folder that is new or holds a run, got .* Name another"),
    "another folder": ([], "words", "holds a run, got 'mine' in .* Name another"),
    "covered": (["--length=32"], "words", "--length must be longer than the selected blocks, got 32 for 4"),
    "untaught": (["--compression=mean", "--distil-steps=1"], "words", "--distil-steps must be 0 where no"),
    "blocks": (["--d=3"], "words", "--d must divide --l, got 3 and 8"),
    "layers": (["--attention", *["nsa"] * 3], "words", "--attention must have .* got 3 for 2 layers"),
    "kind": (["--attention=all"], "words", "argument --attention: invalid choice: 'all'"),
    "zero": (["--batch=0"], "words", "argument --batch: must be a whole number of at least 1, got 0"),
    "share": (["--held-out=1"], "words", "argument --held-out: must be a number between 0 and 1, got 1"),
    "axes": (["--mesh=rows=2"], "words", "argument --mesh: must be AXIS=SIZE pairs .* got 'rows=2'"),
    "twice": (["--mesh=data=2,data=2"], "words", "argument --mesh: must be AXIS=SIZE pairs of different"),
    "rows": (["--mesh=data=2,fsdp=2"], "words", "--batch must be a multiple of data x fsdp = 4, got 2. Pass"),
    "devices": (["--mesh=tensor=512"], "words", "--mesh must not have more devices than there are, got 512"),
    "choice": (["--selector=given"], "words", "the options must be as --help says, got the error"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_bad_input_is_one_line(what, source, tmp_path, capsys):
    arguments, content, told = REFUSED[what]
    file, output = tmp_path / "text.txt", tmp_path / "run"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    match what:
        case "no text":
            file = tmp_path / "none.txt"
        case "no source":
            source = tmp_path / "nowhere"
        case "no tokenizer":
            source = shutil.copytree(source, tmp_path / "source")
            (source / "tokenizer.json").unlink()
        case "a file":
            output = file
        case "another folder":
            output.mkdir()
            (output / "mine").touch()

    assert run(source, [file], output, SIZES, *arguments) == 2

    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("nsa_jax.adopt: ")
    assert re.search(told, line), line
    assert has_form(line), line
    assert not (tmp_path / "run" / "settings.json").exists()


def test_needles_that_do_not_fit_say_how_to_begin_again(source, files, tmp_path, capsys):
    """The folder has its settings by then, and refuses other ones."""
    assert run(source, files, tmp_path / "run", SIZES) == 2

    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search("64 for .* Pass other --needle-lengths, or --needles 0, in another --output", line), line
    assert has_form(line), line


def test_a_run_that_was_killed_as_it_began_goes_on(tmp_path):
    (tmp_path / "tokens.bin").touch()
    (tmp_path / ".settings.json.123").touch()

    RunFolder(tmp_path).check({})
    (tmp_path / ".settings").touch()
    with refused(command.InputError, "must be a folder that is new or holds a run, got '.settings' in"):
        RunFolder(tmp_path).check({})


def test_measurements_that_were_cut_are_one_line(tmp_path):
    (tmp_path / "measured.json").write_text('{"dense": ')
    with refused(command.InputError, "hold whole measurements, got .* in '.*measured.json'. Start again"):
        RunFolder(tmp_path).results()


GEMMA = fields_of("gemma 3 by layer", vocab_size=len(TOKENS))
FOLLOWED = {
    "a field": (FIELDS | dict(foo_bar=1), [], "foo_bar=1. Pass --ignore foo_bar if", ["--ignore=foo_bar"]),
    "windows alone": (
        fields_of("mistral", vocab_size=len(TOKENS), head_dim=8), [],
        "Pass --attention nsa, or a kind for each layer", ["--attention=nsa"],
    ),
    "heads of 6": (
        fields_of("llama", vocab_size=len(TOKENS), head_dim=6), ["--selector=indexer", "--branches=slc"],
        "--selector indexer needs heads .* Pass --selector importance --branches cmp slc win",
        ["--selector=importance", "--branches", "cmp", "slc", "win"],
    ),
    "no compression": (
        FIELDS, ["--branches=slc"], "Pass --selector indexer, or --branches with cmp", ["--selector=indexer"]
    ),
    "no selection": (FIELDS, ["--branches=cmp"], "Pass --branches with slc", ["--branches", "cmp", "slc"]),
    "a stride": (FIELDS, ["--d=3"], "--d must divide --l, got 3 and 8. Choose a stride", ["--d=2"]),
    "bases of layers": (
        GEMMA, ["--rope-base=400"], "--rope-base must be left out .* in a copy of its config.json",
        dict(rope_parameters={kind: dict(rope_theta=400.0) for kind in GEMMA["rope_parameters"]}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", FOLLOWED)
def test_a_remedy_can_be_followed(what, source, tmp_path, monkeypatch, capsys):
    fields, arguments, told, remedy = FOLLOWED[what]
    folder = write_folder(tmp_path / "model", fields, tensors_of(fields))
    shutil.copy(source / "tokenizer.json", folder)
    file, seen = tmp_path / "text.txt", []
    file.write_text("words")

    def read(*_):
        seen.append("what comes after the model")
        raise command.InputError("")

    def initial(config, options, rngs, names):
        wanted = parameters(abstract(Transformer, config, **options))
        return {name: np.zeros(wanted[name].shape) for name in names}

    monkeypatch.setattr(conversion, "_initial", initial)
    monkeypatch.setattr(command.text, "read", read)
    assert run(folder, [file], tmp_path / "run", SIZES, *arguments) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(told, line), line
    assert has_form(line), line
    assert not seen

    if isinstance(remedy, dict):
        (folder / "config.json").write_text(json.dumps(fields | remedy))
        arguments, remedy = [], []
    assert run(folder, [file], tmp_path / "run", SIZES, *arguments, *remedy) == 2
    assert seen, capsys.readouterr().err


def test_each_layer_may_have_a_kind(source, files, tmp_path, monkeypatch):
    """Such layers are not scanned, and `nnx.remat` refused parameters that do not learn."""
    right = training._update

    def update(graph, stage, settings, learning, fixed, moments, *rest):
        right.trace(graph, stage, settings, learning, fixed, moments, *rest)  # to run it would compile it
        return jax.tree.map(lambda x: x + 1, learning), moments, {"selection": np.float32(1)}

    monkeypatch.setattr(training, "_update", update)
    monkeypatch.setattr(command.Measurements, "measure", lambda *_: None)
    monkeypatch.setattr(command, "write_report", lambda *_: None)

    assert run(source, files, tmp_path / "run", SHORT | dict(attention=("window", "nsa"))) == 0

    config = load(tmp_path / "run" / "model")[0].config
    assert config.attention == ("window", "nsa")
    assert not config.remat  # with which it was trained
    assert not config.scan_layers
    assert config.per_layer[0].window_size is None  # that of `--w`
    assert config.nsa.window_size == SIZES["w"]
    assert {name.split(".")[1] for name in changed_by_distil(tmp_path / "run", source)} == {"1"}


def test_a_row_of_variants_says_what_the_page_says():
    found = json.loads((COMMITTED / "adopt_smollm2" / "report.json").read_text())
    by_kind = {row["kind"]: row for row in adopt_variants.rows_of(found)}

    assert by_kind.keys() == set(findings.MODELS.values())
    row = by_kind["NSA after sparse"]
    assert (row["needles"], row["needles_asked"], row["by_quarter"]) == (106, 128, [15, 30, 30, 31])
    assert row["loss"] == pytest.approx(2.3227, abs=5e-5)
    assert row["loss_over_dense"] == pytest.approx(-0.2504, abs=5e-5)
    assert row["best_free"] == pytest.approx(0.996, abs=5e-4)
    assert row["mass"] == pytest.approx(0.938, abs=5e-4)
    assert row["trained_tokens"] == 19660800
    assert (row["n"], row["block"], row["length"]) == (16, 128, 8192)
    assert by_kind["dense, trained"]["trained_tokens"] == 19660800
    assert by_kind["dense, as loaded"]["loss_over_dense"] == 0
    assert "trained_tokens" not in by_kind["dense, as loaded"]


@pytest.mark.slow
def test_variants_are_runs_of_their_own_and_add_their_rows_once(source, files, tmp_path, monkeypatch, capsys):
    ms = dict(token_ms=None, first_token_ms=1.0, samples=1)
    decoding = dict(rows=1, length=64, new_tokens=1, dense=ms, nsa=ms)
    shares = dict(best_free=[[0.5]], mass=[[0.5]], chance=[[0.5]])
    monkeypatch.setattr(command.Measurements, "_decoding", lambda *_: decoding)
    monkeypatch.setattr(command.Measurements, "_recall", lambda *_: dict(layers=[1], **shares))
    of = {"fewer": ["--n=3"], "windows": ["--attention", "window", "nsa"]}
    monkeypatch.setattr(adopt_variants, "VARIANTS", of)
    results, tokenise, tokenised = tmp_path / "rows.jsonl", text._tokenise, []

    def counted(*arguments):
        tokenised.append("once")
        return tokenise(*arguments)

    monkeypatch.setattr(text, "_tokenise", counted)
    options = SIZES | {"needles": 0, "distil-steps": 0, "sparse-steps": 0}
    given = (source, files, tmp_path / "runs", options, f"--results={results}")

    assert run(*given, main=adopt_variants.main) == 0
    first = results.read_text()
    assert run(*given, main=adopt_variants.main) == 0
    assert results.read_text() == first
    found = [json.loads(line) for line in first.splitlines()]
    assert [(row["variant"], row["kind"]) for row in found] == [
        (variant, kind) for variant in of for kind in ("dense, as loaded", "NSA, converted")
    ]
    assert [row["n"] for row in found] == [3, 3, 4, 4]
    assert found[-1]["attention"] == ["window", "nsa"]
    assert found[1]["loss"] != found[3]["loss"]
    assert found[0]["loss"] == found[2]["loss"]
    assert tokenised == ["once"]

    capsys.readouterr()
    assert run(*given, "--results", tmp_path / "none" / "rows", main=adopt_variants.main) == 2
    line = capsys.readouterr().err.strip()
    assert line.startswith("examples.adopt_variants: --results must name a file that can be written")
    assert has_form(line)


def test_results_that_cannot_be_written_are_said_at_once(source, tmp_path, capsys):
    """A folder can be touched, and was found to be none hours later."""
    given = source, [tmp_path / "none.txt"], tmp_path / "runs", {}, "--results", tmp_path

    assert run(*given, main=adopt_variants.main) == 2
    assert "--results must name a file that can be written, got" in capsys.readouterr().err


def test_a_token_that_the_model_does_not_have_is_named(source, files, tmp_path, capsys):
    folder, text_file = shutil.copytree(source, tmp_path / "source"), tmp_path / "text.txt"
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    text_file.write_text("a <extra> word")

    with pytest.warns(UserWarning, match="<extra> beyond it"):
        assert run(folder, [*files, text_file], tmp_path / "run", SHORT) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "must have tokens of the model alone, got '<extra>' beyond its vocabulary of 257" in line
    assert has_form(line)


@pytest.mark.parametrize("name", ["pages.jsonl", "pages.ndjson", "PAGES.JSONL", "text.txt"])
def test_a_byte_order_mark_is_no_text(name, tmp_path):
    file = tmp_path / name
    content = "words" if name.endswith("txt") else json.dumps(dict(text="words"))
    file.write_text(content, encoding="utf-8-sig")

    assert list(documents(file, "text")) == ["words"]


DEEP = pytest.param("[" * 100_000, id="too deep")


@pytest.mark.parametrize("line", ["no JSON", '{"other": 1}', '{"text": 1}', "[]", DEEP])
def test_a_bad_line_of_a_jsonl_file_is_named(line, tmp_path):
    file = tmp_path / "pages.jsonl"
    file.write_text('{"text": "fine"}\n' + line)

    told = "must be a string in the field 'text', got another in line 2 of 'pages.jsonl'"
    with refused(command.InputError, told):
        list(documents(file, "text"))


def test_half_of_a_surrogate_pair_is_named(tmp_path):
    """JSON can escape it, UTF-8 cannot hold it, and a tokenizer takes no such text."""
    file = tmp_path / "pages.jsonl"
    file.write_text('{"text": "whole \\ud83d\\ude00"}\n{"text": "half \\ud83d"}\n')

    with refused(
        command.InputError, r"must be Unicode, got '\\ud83d' \(surrogates not allowed\) in line 2 of"
    ):
        list(documents(file, "text"))


def test_a_dataset_on_disk_is_read(tmp_path):
    datasets = pytest.importorskip("datasets", reason="tox -e adopt has it")
    rows = datasets.Dataset.from_dict({"body": ["one", " ", "two"], "size": [1, 2, 3]})
    rows.save_to_disk(tmp_path / "rows")
    datasets.DatasetDict(train=rows).save_to_disk(tmp_path / "parts")

    assert list(documents(tmp_path / "rows", "body")) == ["one", "two"]
    assert list(documents(tmp_path / "parts" / "train", "body")) == ["one", "two"]
    bad = {"rows": ("text", "the column 'text', got body, size"), "parts": ("body", "with train"),
           "rows/..": ("body", "what Dataset.save_to_disk wrote")}  # fmt: skip
    for name, (field, told) in bad.items():
        with refused(command.InputError, told):
            list(documents(tmp_path / name, field))
    with refused(command.InputError, "in the field 'size', got another in row 0"):
        list(documents(tmp_path / "rows", "size"))
    before = digests([tmp_path / "rows"])
    datasets.Dataset.from_dict({"body": ["one", " ", "too"]}).save_to_disk(tmp_path / "rows")
    assert digests([tmp_path / "rows"]) != before


def test_a_folder_needs_a_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with refused(command.InputError, "a folder of text needs the package datasets"):
        list(documents(tmp_path, "text"))


@pytest.mark.parametrize("package", ["optax", "tqdm", "tokenizers"])
def test_a_missing_package_says_what_to_install(monkeypatch, capsys, package):
    found = builtins.__import__

    def without(name, *rest, **more):
        if name == package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return found(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.delitem(sys.modules, "nsa_jax.adopt.__main__")
    with pytest.raises(SystemExit) as end:
        runpy.run_module("nsa_jax.adopt.__main__", run_name="not the module itself")

    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("Install them with: pip install 'nsa_jax[pretrained,train]'.")
    assert has_form(line)


def documents_of(sizes: list[int]) -> Documents:
    """Documents whose tokens say 1000 times their document and their place in it."""
    tokens = np.concatenate([1000 * number + np.arange(size) for number, size in enumerate(sizes)])
    return Documents(tokens, np.cumsum(sizes) - sizes, np.array(sizes))


def test_an_epoch_packs_each_token_once_and_never_joins_documents():
    documents = documents_of([7, 1, 40, 13, 19])  # 80 tokens: 10 rows of 8
    packed = Packed(documents, 8, seed=3)
    tokens, segments = (
        np.concatenate(each) for each in zip(*(packed.batch(i, 2) for i in range(5)), strict=True)
    )

    assert sorted(tokens.ravel()) == sorted(documents.tokens)
    for row, ids in zip(tokens, segments, strict=True):
        follows = np.diff(row) == 1
        assert (np.diff(ids) == ~follows).all()
        assert ids[0] == 1
    again, _ = Packed(documents, 8, seed=3).batch(7, 2)  # in the second epoch
    assert (again == packed.batch(7, 2)[0]).all()
    assert (again != packed.batch(2, 2)[0]).any()
    assert (Packed(documents, 8, seed=4).batch(0, 2)[0] != tokens[:2]).any()


def test_held_out_documents_are_whole_and_not_trained_on():
    documents = documents_of([30, 5, 20, 8, 50, 9])
    kept, held = text.split(documents, length=10, share=0.25, seed=0)

    assert sorted([*kept.sizes, *held.sizes]) == sorted(documents.sizes)
    assert set(kept.joined()).isdisjoint(held.joined())
    assert held.sizes.min() >= 10
    assert held.sizes.sum() >= 0.25 * 122
    found = held.rows(10, 100)
    assert len(found) == sum(held.sizes // 10)
    assert (np.diff(found) == 1).all()  # each in one document
    assert (held.rows(10, 2) == found[:2]).all()
    again = text.split(documents, length=10, share=0.25, seed=0)[1]
    assert (again.starts == held.starts).all()


@pytest.mark.parametrize("sizes", [[7, 1000, 9, 4], [40, 30, 7, 1000, 9, 4], [500, 500]])
def test_a_document_that_is_too_long_to_hold_out_is_cut(sizes):
    """A book among short pages was held out whole, most of the text."""
    documents, wanted = documents_of(sizes), 0.05 * sum(sizes)
    for seed in range(10):
        kept, held = text.split(documents, length=10, share=0.05, seed=seed)

        assert sorted([*kept.joined(), *held.joined()]) == sorted(documents.tokens)
        assert held.sizes.min() >= 10
        assert wanted - 1 < held.sizes.sum() < 2 * wanted + 1
        for starts, lengths in ((kept.starts, kept.sizes), (held.starts, held.sizes)):
            for start, size in zip(starts, lengths, strict=True):
                assert (np.diff(documents.tokens[start : start + size]) == 1).all()  # of one document


def test_the_end_of_a_single_document_is_held_out():
    kept, held = text.split(documents_of([100]), length=10, share=0.2, seed=0)

    assert kept.joined().tolist() == list(range(80))
    assert held.joined().tolist() == list(range(80, 100))


def test_no_copy_of_a_held_out_document_is_trained_on():
    """As when a file is named twice, or a page stands in two collections."""
    once = documents_of([30, 5, 20, 8, 50, 9])
    twice = Documents(
        np.tile(once.tokens, 2), np.append(once.starts, once.starts + 122), np.tile(once.sizes, 2)
    )
    for seed in range(10):
        kept, held = text.split(twice, length=10, share=0.25, seed=seed)

        assert set(kept.joined()).isdisjoint(held.joined())
        assert len(set(held.joined())) == held.sizes.sum()
        others = set(once.tokens) - set(held.joined())
        assert sorted(kept.joined()) == sorted(2 * [*others])


def test_the_end_of_a_document_is_held_out_where_all_are_its_copies():
    once = documents_of([100])
    kept, held = text.split(
        Documents(np.tile(once.tokens, 3), np.array([0, 100, 200]), np.array([100] * 3)),
        length=10, share=0.2, seed=0,
    )  # fmt: skip

    assert kept.sizes.sum() + held.sizes.sum() == 100
    assert set(kept.joined()).isdisjoint(held.joined())


def test_a_stage_shows_its_first_and_its_last_ten_steps():
    settings, stage = types.SimpleNamespace(batch=2, length=8), types.SimpleNamespace(steps=25)
    rows = [dict(step=number, ms=None if number == 0 else 3.0, loss=float(number)) for number in range(25)]

    found = report._of_stage(stage, rows, settings)

    assert (found["first"], found["last"]) == (dict(loss=4.5), dict(loss=19.5))
    assert (found["tokens"], found["ms_per_step"], found["seconds"]) == (25 * 16, 3.0, 0.1)
