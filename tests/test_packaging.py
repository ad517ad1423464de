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
from nsa_jax.kernels.triton.support import VERSIONS

ROOT = pathlib.Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def requirements(lines: list[str], operator: str) -> dict[str, str]:
    """The version after `operator` in each requirement that has this operator, by package."""
    parsed = (Requirement(line) for line in lines)
    return {
        each.name: part.version for each in parsed for part in each.specifier if part.operator == operator
    }


@pytest.fixture(scope="module")
def tox() -> configparser.ConfigParser:
    found = configparser.ConfigParser(interpolation=None)
    found.read(ROOT / "tox.ini")
    return found


def test_min_environment_installs_the_floors(tox):
    pinned = requirements(tox["testenv:min"]["deps"].split(), "==")

    floors = requirements(PROJECT["dependencies"] + PROJECT["optional-dependencies"]["train"], ">=")

    assert len(PROJECT["dependencies"]) == len(requirements(PROJECT["dependencies"], ">="))
    assert pinned == floors


def test_gpu_extra_shares_the_floor_of_jax():
    extra = requirements(PROJECT["optional-dependencies"]["cuda13"], ">=")

    assert extra["jax"] == requirements(PROJECT["dependencies"], ">=")["jax"]


KERNELS = [f"{package}{bounds}" for package, (bounds, _) in VERSIONS.items()]
FLOORS, CAPS = requirements(KERNELS, ">="), requirements(KERNELS, "<")


def test_gpu_extra_has_the_versions_of_the_kernels():
    extra = [Requirement(line) for line in PROJECT["optional-dependencies"]["cuda13"]]

    assert {each.name: each.specifier for each in extra} == {
        each.name: each.specifier for each in map(Requirement, KERNELS)
    }


def test_tox_has_the_caps_of_the_kernels_in_one_place(tox):
    capped = [f"{package}{bounds}" for package, bounds in tox["caps"].items()]
    elsewhere = [
        line
        for section in tox.sections()
        if section != "caps"
        for value in tox[section].values()
        for line in value.splitlines()
        if re.search(r"\b(jax|triton)\b[^{#]*<", line)
    ]

    assert requirements(capped, "<") == CAPS
    assert requirements(capped, ">=").items() <= FLOORS.items()
    assert not elsewhere


def test_documents_name_the_versions_of_the_kernels():
    files = (ROOT / "README.md", ROOT / "docs" / "install.md", ROOT / "docs" / "faq.md")
    readme, install, faq = (" ".join(file.read_text().split()) for file in files)
    jax, cap = FLOORS["jax"], CAPS["jax"]
    major, minor = map(int, cap.split("."))

    assert f"and JAX {jax} to {major}.{minor - 1} (" in readme
    assert f"**JAX from {jax} and below {cap}.**" in install
    assert f"**Triton {FLOORS['triton']}.**" in install
    assert f"With Triton {CAPS['triton']} " in install
    assert f"JAX from {jax}, " in faq
    assert f"JAX must be below {cap}:" in faq
    for text in (install, faq):
        assert {*re.findall(r"below (\d+\.\d+)\b", text)} == {cap}


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
