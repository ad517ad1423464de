"""What the wheel holds, and facts that stand in two places and must agree: floors, commands, code."""

import configparser
import pathlib
import re
import tomllib
import zipfile

import pytest
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement

import nsa_jax

ROOT = pathlib.Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def requirements(lines: list[str], operator: str) -> dict[str, str]:
    """The version after `operator` in each requirement that has this operator, by package."""
    parsed = (Requirement(line) for line in lines)
    return {
        each.name: part.version for each in parsed for part in each.specifier if part.operator == operator
    }


def test_min_environment_installs_the_floors():
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    pinned = requirements(tox["testenv:min"]["deps"].split(), "==")

    floors = requirements(PROJECT["dependencies"] + PROJECT["optional-dependencies"]["train"], ">=")

    assert len(PROJECT["dependencies"]) == len(requirements(PROJECT["dependencies"], ">="))
    assert pinned == floors


def test_gpu_extra_shares_the_floor_of_jax():
    extra = requirements(PROJECT["optional-dependencies"]["cuda13"], ">=")

    assert extra["jax"] == requirements(PROJECT["dependencies"], ">=")["jax"]


def test_wheel_of_the_tests_is_built_as_that_of_a_release():
    extra = requirements(PROJECT["optional-dependencies"]["test"], ">=")

    assert extra["hatchling"] == requirements(PYPROJECT["build-system"]["requires"], ">=")["hatchling"]


def test_ci_runs_the_test_command_of_the_readme():
    lines = (ROOT / "README.md").read_text().splitlines()
    (test_command,) = (line for line in lines if line.endswith("/tox -e test"))

    assert test_command in (ROOT / ".ci" / "run").read_text().splitlines()


def test_citation_names_the_version():
    (version,) = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)

    assert version == nsa_jax.__version__


def test_changelog_begins_with_the_version():
    newest, *_ = re.findall(r"^## \[(.+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)

    assert newest == nsa_jax.__version__


def test_every_module_has_a_name_that_says_something():
    folders = ("nsa_jax", "nsa_torch_ref", "parity", "benchmarks", "examples", "tests")
    paths = (path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*.py"))
    parts = {part for path in paths for part in path.with_suffix("").parts}

    assert not parts & {"util", "utils", "helper", "helpers", "common", "misc"}


@pytest.fixture(scope="module")
def wheel_files(tmp_path_factory) -> set[str]:
    """Paths inside the wheel, built in this process: no network and no environment of its own."""
    folder = tmp_path_factory.mktemp("wheel")
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(path) as wheel:
        return set(wheel.namelist())


def test_wheel_holds_the_library_and_the_reference_alone(wheel_files):
    folders = {name.split("/")[0] for name in wheel_files}

    assert {name for name in folders if not name.endswith(".dist-info")} == {"nsa_jax", "nsa_torch_ref"}
    assert folders - {"nsa_jax", "nsa_torch_ref"} == {f"nsa_jax-{nsa_jax.__version__}.dist-info"}


def test_wheel_holds_every_module_and_says_that_it_is_typed(wheel_files):
    sources = {
        path.relative_to(ROOT).as_posix()
        for package in ("nsa_jax", "nsa_torch_ref")
        for path in (ROOT / package).rglob("*.py")
    }

    assert sources | {"nsa_jax/py.typed", "nsa_torch_ref/py.typed"} == {
        name for name in wheel_files if ".dist-info/" not in name
    }
