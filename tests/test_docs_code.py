"""The documentation's code does what it says: `python` blocks run, `py` blocks parse, commands exist.

The `python` blocks of a page run in order and share their names, so a page is one test. A block that cannot
run everywhere stands below `<!-- skip: next if(condition, reason="...") -->`, which the reader does not see.
"""

import argparse
import configparser
import importlib.util
import inspect
import pathlib
import re
import shlex
import subprocess
import sys
import tomllib
import unittest
from collections.abc import Iterator

import host_devices
import pytest
from sybil import Document, Example
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = [
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "benchmarks/*.md", "docs/**/*.md")
    for path in sorted(ROOT.glob(pattern))
]
# What the blocks of a page import beyond the library, by the extra that brings it.
NEEDS = {
    "docs/guide/nsa_in_your_model.md": {"optax": "train"},
    "docs/guide/training.md": {"optax": "train"},
    "docs/guide/saving.md": {"optax": "train", "orbax.checkpoint": "train"},
    "docs/guide/pytorch.md": {"torch": "torch"},
    "docs/guide/from_a_dense_model.md": {"safetensors": "pretrained"},
}
ON_SEVERAL_DEVICES = ["docs/parallel.md"]
OURS = ("parity", "benchmarks", "examples", "nsa_jax", "nsa_torch_ref")
INLINE = re.compile(r"`((?:python -m |tox -e |pip install )[^`]+)`")
PLACEHOLDER = re.compile(r"\[[^\]]*\]|\b[A-Z]+(\.jsonl)?\b|\.\.\.|\*")  # `[--markdown]`, FILE, WIDTH, ...


class Parsed(Exception):
    """The arguments were accepted; the program itself must not run."""


class Refused(Exception):
    """The arguments were refused."""


def with_blocks(language: str) -> list[str]:
    return [page for page in PAGES if f"```{language}\n" in (ROOT / page).read_text(encoding="utf-8")]


def run_python(path: pathlib.Path) -> str | None:
    """Runs the Python blocks of a page, in order; says which were skipped. A failure is raised as it is."""
    skipped, ran = [], 0
    for example in Document.parse(str(path), PythonCodeBlockParser(), SkipParser()):
        try:
            example.evaluate()
            ran += isinstance(example.parsed, str)
        except unittest.SkipTest as reason:
            skipped.append(f"line {example.line}: {reason}")
    return f"{ran} blocks ran, but {'; '.join(skipped)}" if skipped else None


@pytest.mark.parametrize("page", [page for page in with_blocks("python") if page not in ON_SEVERAL_DEVICES])
def test_python_blocks_run(page, tmp_path, monkeypatch):
    for module, extra in NEEDS.get(page, {}).items():
        pytest.importorskip(module, reason=f"the page needs the extra `{extra}`")
    monkeypatch.chdir(tmp_path)  # a page may write files

    if skipped := run_python(ROOT / page):
        pytest.skip(skipped)


@pytest.mark.slow
@pytest.mark.parametrize("page", ON_SEVERAL_DEVICES)
def test_python_blocks_run_on_several_devices(page):
    host_devices.run("test_docs_code.py", page, devices=8)


def test_a_python_block_that_fails_is_found_where_it_stands(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```python\na = 1\n```\n\n```python\n\nassert a == 2\n```\n")

    with pytest.raises(AssertionError) as failure:
        run_python(page)

    assert (str(failure.traceback[-1].path), failure.traceback[-1].lineno + 1) == (str(page), 9)


def test_a_block_is_skipped_with_its_reason(tmp_path):
    page = tmp_path / "page.md"
    skip = '<!-- skip: next if({}, reason="there is no b") -->\n'
    page.write_text(
        "```python\na = 1\n```\n"
        + skip.format("a == 1")
        + "```python\nb\n```\n"
        + skip.format("a == 2")
        + "```python\nassert a == 1\n```\n"
    )

    assert run_python(page) == "2 blocks ran, but line 5: there is no b"


def check_syntax(example: Example) -> None:
    compile("\n" * example.line + example.parsed, example.path, "exec", dont_inherit=True)


def parse_py(path: pathlib.Path) -> None:
    for example in Document.parse(str(path), CodeBlockParser("py", check_syntax)):
        example.evaluate()


@pytest.mark.parametrize("page", with_blocks("py"))
def test_py_blocks_parse(page):
    parse_py(ROOT / page)


def test_a_py_block_that_does_not_parse_is_found_where_it_stands(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```py\na = 1\nb = = 2\n```\n")

    with pytest.raises(SyntaxError) as failure:
        parse_py(page)

    assert failure.value.lineno == 5


def bash_blocks(path: pathlib.Path) -> list[str]:
    document = Document.parse(str(path), CodeBlockParser("bash", lambda example: None))
    return [str(example.parsed) for example in document]


def commands(script: str) -> Iterator[list[str]]:
    """The simple commands of a script, each as a list of words, without assignments in front of it."""
    for line in script.replace("\\\n", " ").splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars="&|;")
        words.whitespace_split = True
        words.commenters = "#"
        command: list[str] = []
        for word in [*words, ";"]:
            if set(word) <= set("&|;"):
                if command:
                    yield command
                command = []
            elif command or not re.fullmatch(r"\w+=.*", word):
                command.append(word)


def wrong_with(command: list[str], monkeypatch) -> str | None:
    """Why a command cannot do what its page says, as far as that can be told without running it."""
    match pathlib.PurePosixPath(command[0]).name, *command[1:]:
        case "python", "-m", module, *arguments if module.split(".")[0] in OURS:
            return wrong_with_module(module, arguments, monkeypatch)
        case "tox", "-e", environments, *rest:
            return wrong_with_tox(environments.split(","), rest)
        case "pip", "install", *requirements:
            return wrong_with_extras(requirements)
    return None


def wrong_with_module(module: str, arguments: list[str], monkeypatch) -> str | None:
    name = f"{module}.__main__" if _has(f"{module}.__main__") else module
    if not _has(name):
        return f"there is no module {module}"
    main = getattr(importlib.import_module(name), "main", None)
    if main is None:
        return f"{module} has no main, so it is not a command"
    if not inspect.signature(main).parameters:
        return f"{module} takes no arguments, got {arguments}" if arguments else None
    parse = argparse.ArgumentParser.parse_args

    def parse_alone(parser, args=None, namespace=None):
        parse(parser, args, namespace)
        raise Parsed

    def leave(parser, status=0, message=None):
        raise Refused(message) if status else SystemExit

    with monkeypatch.context() as patched:
        patched.setattr(argparse.ArgumentParser, "parse_args", parse_alone)
        patched.setattr(argparse.ArgumentParser, "exit", leave)
        try:
            main(arguments)
        except Parsed:
            return None
        except Refused as message:
            return f"{module} refuses it: {message}"
        except SystemExit:  # `--help`
            return None
    return f"{module} ran instead of parsing its arguments"


def wrong_with_tox(environments: list[str], rest: list[str]) -> str | None:
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    for name in environments:
        if f"testenv:{name}" not in tox:
            return f"tox.ini has no environment {name}"
        if rest[:1] == ["--"] and "{posargs" not in tox[f"testenv:{name}"]["commands"]:
            return f"the environment {name} takes no arguments, got {rest[1:]}"
    return f"tox takes its arguments behind --, got {rest}" if rest and rest[0] != "--" else None


def wrong_with_extras(requirements: list[str]) -> str | None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for requirement in requirements:
        if named := re.fullmatch(r"(?:\.|nsa_jax)\[(.+)\]", requirement):
            unknown = set(named[1].split(",")) - set(extras)
            if unknown:
                return f"there is no extra {', '.join(sorted(unknown))}"
    return None


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package it is in
        return False


def wrong_commands(path: pathlib.Path, monkeypatch) -> list[str]:
    """What is wrong with the commands of a page: those of its bash blocks, and those within its text."""
    found = []
    blocks = bash_blocks(path)
    for block in blocks:
        checked = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True, check=False)
        if checked.returncode:
            found.append(checked.stderr.strip())
    inline = INLINE.findall(path.read_text(encoding="utf-8"))
    scripts = [*blocks, *(text for text in inline if not PLACEHOLDER.search(text))]
    for script in scripts if not found else []:
        for command in commands(script):
            wrong = wrong_with(command, monkeypatch)
            names_a_program = script in inline and len(command) == 3 and "are required" in str(wrong)
            if wrong and not names_a_program:
                found.append(f"{shlex.join(command)}: {wrong}")
    return found


def with_commands() -> list[str]:
    return [page for page in PAGES if bash_blocks(ROOT / page) or INLINE.search((ROOT / page).read_text())]


@pytest.mark.parametrize("page", with_commands())
def test_commands_exist(page, monkeypatch):
    assert wrong_commands(ROOT / page, monkeypatch) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("```bash\nif true; then\n```\n", "syntax error"),
        ("```bash\npython -m benchmarks.attention --lengths 64 --speed\n```\n", "refuses"),
        ("```bash\nA=1 .venv/bin/python -m benchmarks.attention \\\n  --lengths x\n```\n", "refuses"),
        ("```bash\npython -m benchmarks.tables\n```\n", "are required"),
        ("Run `python -m benchmarks.tables --fast`.\n", "refuses"),
        ("```bash\ntrue && python -m examples.drop_in --fast\n```\n", "unrecognized arguments: --fast"),
        ("Run `python -m benchmarks.report.host --fast`.\n", "takes no arguments"),
        ("Run `python -m benchmarks.gone`.\n", "there is no module benchmarks.gone"),
        ("Run `python -m benchmarks.timing`.\n", "is not a command"),
        ("```bash\n.venv/bin/tox -e lint,gone\n```\n", "no environment gone"),
        ("Run `tox -e lint -- --fix`.\n", "takes no arguments"),
        ("Run `tox -e test tests/test_docs.py`.\n", "behind --"),
        ('```bash\npip install ".[cuda12,train]"\n```\n', "no extra cuda12"),
    ],
    ids=lambda value: value.strip("`\n") if len(value) > 30 else "",
)
def test_a_command_that_does_not_exist_is_found(text, found, tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(text)

    (wrong,) = wrong_commands(page, monkeypatch)

    assert found in wrong


def test_commands_that_exist_are_accepted(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(
        "```bash\nXLA_FLAGS=--a python -m benchmarks.attention \\\n  --lengths 64  # short\n"
        "cd nsa_jax && .venv/bin/tox -e test -- tests/test_layout.py; python -m venv .venv\n```\n"
        "Run `python -m examples.drop_in`, `python -m benchmarks.tables` or "
        '`pip install ".[cuda13,train]"`.\n'
    )

    assert wrong_commands(page, monkeypatch) == []
    assert [command[0] for command in commands(*bash_blocks(page))] == [
        *("python", "cd", ".venv/bin/tox", "python")
    ]


if __name__ == "__main__":
    import fewer_collections  # noqa: F401

    run_python(ROOT / sys.argv[1])
