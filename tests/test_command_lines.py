"""The commands of a clone: bad input is one line and exit code 2, and every option explains itself."""

import argparse
import builtins
import importlib
import pathlib
import re
import runpy
import subprocess
import sys
from unittest import mock

import pytest
from messages import has_form

pytest.importorskip("optax", reason="the examples need the extra `train`")
pytest.importorskip("tqdm", reason="the examples need the extra `train`")
pytest.importorskip("matplotlib", reason="the examples need the extra `train`")
pytest.importorskip("safetensors", reason="adopt needs the extra `pretrained`")
pytest.importorskip("tokenizers", reason="adopt needs the extra `pretrained`")

COMMANDS = {
    "nsa_jax.adopt": "nsa_jax.adopt.__main__",
    "nsa_jax.chat": "nsa_jax.chat.__main__",
    "nsa_jax.doctor": "nsa_jax.doctor.__main__",
    "parity": "parity.__main__",
    "benchmarks.attention": "benchmarks.attention",
    "benchmarks.decode": "benchmarks.decode.__main__",
    "benchmarks.decode.summary": "benchmarks.decode.summary",
    "benchmarks.generate": "benchmarks.generate",
    "benchmarks.indexer": "benchmarks.indexer",
    "benchmarks.parallel": "benchmarks.parallel",
    "benchmarks.plot": "benchmarks.plot",
    "benchmarks.report": "benchmarks.report.__main__",
    "benchmarks.roofline": "benchmarks.roofline",
    "benchmarks.tables": "benchmarks.tables",
    "benchmarks.targets": "benchmarks.targets",
    "benchmarks.training": "benchmarks.training",
    "examples.adopt_corpus": "examples.adopt_corpus.__main__",
    "examples.recall": "examples.recall.__main__",
    "examples.serve": "examples.serve.__main__",
    "examples.train_lm": "examples.train_lm.__main__",
    "examples.train_lm.report": "examples.train_lm.report",
}
ROWS = str(pathlib.Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "h100_training.jsonl")
MEASURING = (
    *("benchmarks.attention", "benchmarks.decode", "benchmarks.generate", "benchmarks.parallel"),
    *("benchmarks.indexer", "benchmarks.targets", "benchmarks.training"),
)


def exit_code(name: str, arguments: list[str]) -> int | str | None:
    try:
        return importlib.import_module(COMMANDS[name]).main(arguments)
    except SystemExit as end:
        return end.code


BAD = [
    *((name, ["--no-such-option"], "the options must be as --help says") for name in COMMANDS),
    *((name, ["--heads=3", "--kv-heads=2"], "divide --heads, got 2 and 3.") for name in MEASURING),
    *((name, [f"--{size}=0"], "got 0.") for name in MEASURING for size in ("batch", "lengths", "heads")),
    *((name, ["--kv-heads=-1"], "at least 1, got -1.") for name in MEASURING),
    *((name, ["--budget-s=nan"], "seconds above 0, got nan.") for name in MEASURING),
    *((name, ["--output", "{file}/rows.jsonl"], "must name a file that") for name in MEASURING),
    ("nsa_jax.chat", ["{none}"], "source must be a folder, a .gguf file or the name of a repository"),
    ("nsa_jax.chat", ["{file}", "--top-p=1.5"], "must be a number above 0 and up to 1, got 1.5"),
    ("nsa_jax.chat", ["{file}", "--max-length=0"], "must be a whole number of at least 1, got 0"),
    ("nsa_jax.doctor", ["--seed=-1"], "--seed must be at least 0, got -1"),
    ("benchmarks.decode", ["--csv={file}/x.csv"], "--csv must name a file that can be written"),
    ("benchmarks.generate", ["--new-tokens=8"], "--new-tokens must be 1 plus a multiple of 8"),
    ("benchmarks.generate", ["--devices=999"], "--devices must be at most the [0-9]+ of this machine"),
    ("benchmarks.training", ["--devices=999"], "--devices must be at most the [0-9]+ of this machine"),
    ("benchmarks.parallel", ["--devices=999"], "--devices must be at most the [0-9]+ of this machine"),
    ("benchmarks.decode.summary", ["{none}"], "got '.*none' .FileNotFoundError"),
    ("benchmarks.decode.summary", ["{file}"], "CSV must be a file that benchmarks.decode --csv wrote"),
    ("benchmarks.decode.summary", ["{empty}"], "CSV must hold at least one length"),
    ("benchmarks.plot", ["{none}"], "a results file must hold the rows of a benchmark"),
    ("benchmarks.plot", [ROWS, "--output={file}/a"], "--output must name a file that can be written"),
    ("benchmarks.report", ["--steps=bad"], "steps must be of environment, tests"),
    ("benchmarks.report", ["--output={file}/x"], "--output must be a folder that can be made"),
    ("benchmarks.report", ["--output={none}", "--resume"], "--resume must find a report of commit"),
    ("benchmarks.report", ["--within=0"], "seconds above 0, got 0."),
    ("benchmarks.report", ["--commit=a/b"], "--commit must be letters"),
    ("benchmarks.tables", ["{none}"], "a results file must hold the rows of a benchmark"),
    ("benchmarks.tables", ["{file}"], "a results file must hold the rows of a benchmark"),
    ("benchmarks.tables", ["{empty}"], "run_id must be one of"),
    ("examples.train_lm.report", ["--document={none}"], "--document must be a text file"),
    ("examples.train_lm", ["--output={file}/run"], "--output must be a folder that can be made"),
    ("examples.adopt_corpus", ["{file}/x.jsonl"], "FILE must name a file that can be written"),
    ("examples.adopt_corpus", ["{none}", "--packages={file}"], "--packages must name a file"),
    ("examples.adopt_corpus", ["{none}", "--list={none}"], "--list must be a file that can be read"),
    ("examples.adopt_corpus", ["{none}", "--list={file}"], "--list must be a file that can be read"),
    ("examples.adopt_corpus", ["{none}", "--list={empty}"], "--list must be what `sha256sum` writes"),
    ("examples.serve", ["{none}", "--port=65536"], "--port must be at least 0 and below 65536, got 65536"),
    ("examples.recall", ["--results={file}/x.jsonl"], "--results must name a file that can be written"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "message"), BAD, ids=lambda value: str(value)[:40])
def test_bad_input_is_one_line_and_exit_code_2(name, arguments, message, tmp_path, capsys):
    paths = {which: tmp_path / which for which in ("none", "file", "empty")}
    paths["file"].write_bytes(b"no\nrows, \xff\n")
    paths["empty"].write_bytes(b"")

    assert exit_code(name, [argument.format(**paths) for argument in arguments]) == 2

    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith(f"{name}: ")
    assert has_form(line), line
    assert re.search(message, line), line
    assert sorted(tmp_path.iterdir()) == sorted((paths["empty"], paths["file"]))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_help_text_with_its_default(name, monkeypatch):
    parsers = []

    def note(self, *_):
        parsers.append(self)
        raise SystemExit(0)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", note)
    exit_code(name, [])

    (parser,) = parsers
    added_by_formatter = parser.formatter_class is argparse.ArgumentDefaultsHelpFormatter
    for action in parser._actions:
        assert action.help, action
        assert not action.help.startswith("see "), action
        if action.option_strings and action.nargs != 0 and not added_by_formatter:
            assert "default" in action.help, action


MISSING = {
    "benchmarks.training": ("optax", "train"),
    "examples.drop_in": ("optax", "train"),
    "examples.scan_layers": ("optax", "train"),
    "examples.recall.__main__": ("tqdm", "train"),
    "examples.train_lm.__main__": ("matplotlib", "train"),
    "examples.train_lm.report": ("matplotlib.figure", "train"),
}


@pytest.mark.parametrize(("module", "package", "extra"), [(m, *x) for m, x in MISSING.items()])
def test_missing_package_says_what_to_install(monkeypatch, capsys, module, package, extra):
    found = builtins.__import__

    def without(name, *rest, **more):
        if name == package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return found(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)

    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(SystemExit) as end:
        runpy.run_module(module, run_name="not the module itself")

    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f'Install them in the root of the clone: pip install ".[{extra}]".')
    assert has_form(line), line


def test_the_server_says_what_to_install_before_it_loads_a_model(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "examples.serve.api", raising=False)

    assert exit_code("examples.serve", ["no/such/model"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith('Install them in the root of the clone: pip install ".[serve]".')
    assert has_form(line), line


def test_interrupted_command_has_code_130_and_no_traceback(monkeypatch, capsys):
    from benchmarks import attention

    monkeypatch.setattr(attention, "Run", mock.Mock(side_effect=KeyboardInterrupt))

    assert attention.main([]) == 130
    assert capsys.readouterr().err == "\nbenchmarks.attention: interrupted\n"


@pytest.mark.parametrize(("name", "begins"), [("drop_in", "DenseDecoder"), ("scan_layers", "ScannedLayers")])
def test_interrupted_examples_end_as_commands_do(monkeypatch, capsys, name, begins):
    pytest.importorskip("optax", reason="the example needs the extra `train`")
    example = importlib.import_module(f"examples.{name}")
    monkeypatch.setattr(example, begins, mock.Mock(side_effect=KeyboardInterrupt))

    assert example.main([]) == 130
    assert capsys.readouterr().err.endswith(f"\nexamples.{name}: interrupted\n")


def test_examples_without_options_refuse_some():
    """Given a real process, then its stderr is that line and nothing else."""
    done = subprocess.run(
        [sys.executable, "-m", "examples.drop_in", "--steps", "3"], capture_output=True, text=True
    )

    assert done.returncode == 2
    assert done.stderr.startswith("examples.drop_in: the options must be as --help says")
    assert done.stderr.count("\n") == 1
