"""Facts that stand in two files and must stay one: version floors, commands and code of the README."""

import configparser
import pathlib
import re
import tomllib

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES_WITH_TYPES = ("nsa_jax", "nsa_torch_ref", "parity")


def requirements(lines: list[str], operator: str) -> dict[str, str]:
    matches = (re.match(rf"([\w-]+).*?{operator}([\d.]+)", line) for line in lines)
    return {match[1]: match[2] for match in matches if match}


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


def test_ci_runs_the_test_command_of_the_readme():
    commands = re.findall(r"```bash\n(.*)\n```", (ROOT / "README.md").read_text())
    (test_command,) = (command for command in commands if command.endswith("tox -e test"))

    assert test_command in (ROOT / ".ci" / "run").read_text().splitlines()


def test_example_of_the_readme_runs():
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)

    names: dict = {}
    exec(example, names)

    assert names["loss"] > 0


@pytest.mark.parametrize("package", PACKAGES_WITH_TYPES)
def test_package_says_that_it_is_typed(package):
    assert (ROOT / package / "py.typed").exists()
