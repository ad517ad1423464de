"""The floors of the project: which module may import which, read from the source without running it.

A module of `nsa_jax` imports only from lower floors of `FLOORS`; the package's own `__init__` is above all.
"""

import ast
import pathlib
from collections.abc import Iterator, Mapping

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("nsa_jax", "nsa_torch_ref", "parity", "benchmarks", "examples", "tests")

# The lowest floor first; parts of one floor do not import each other.
FLOORS = (
    ("nsa_jax.option_checks", "nsa_jax.remat", "nsa_jax.call_log", "nsa_jax.keywords"),
    ("nsa_jax.config",),
    ("nsa_jax.array_typing",),
    ("nsa_jax.array_checks",),
    ("nsa_jax.compression",),
    ("nsa_jax.layout",),
    ("nsa_jax.sharding",),
    ("nsa_jax.budget", "nsa_jax.reference", "nsa_jax.kernels.chip"),
    ("nsa_jax.kernels.xla", "nsa_jax.kernels.triton"),
    ("nsa_jax.kernels.mosaic_gpu",),
    ("nsa_jax.dispatch",),
    ("nsa_jax.arguments",),
    ("nsa_jax.attention",),
    ("nsa_jax.debug", "nsa_jax.convert"),
    ("nsa_jax.parallel",),
    ("nsa_jax.cache",),
    ("nsa_jax.nn",),
    ("nsa_jax.model",),
    ("nsa_jax.generate",),
)
ABOVE_THE_HOUSE = "nsa_jax.doctor"  # a command that uses the library as its users do
KERNEL_LANGUAGES = ("triton", "jax_triton", "jax.experimental.pallas", "jax.experimental.mosaic")
MAY_USE_KERNEL_LANGUAGES = (
    *("nsa_jax.kernels.chip", "nsa_jax.kernels.triton", "nsa_jax.kernels.mosaic_gpu", "tests"),
    "benchmarks.one_token",  # the kernel that ours is measured against
)
MAY_USE_REFERENCE = ("nsa_jax.reference", "nsa_jax.doctor", "parity", "tests")
NOT_IN_THE_LIBRARY = ("torch", "nsa_torch_ref", "parity", "benchmarks", "examples", "tests")
NOT_IN_THE_TWIN = ("jax", "jaxlib", "flax", "nsa_jax", "parity", "benchmarks", "examples", "tests")
EMPTY_NAMES = {"util", "utils", "helper", "helpers", "common", "misc"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb"}
SETS_ENVIRONMENT = ("nsa_jax.doctor.__main__",)  # a command: how much GPU memory JAX takes when it starts


def within(module: str, parts: tuple[str, ...]) -> bool:
    return any(module == part or module.startswith(part + ".") for part in parts)


def floor_of(module: str) -> tuple[int, str] | None:
    """Height and part that a module of `nsa_jax` belongs to, None if it has no place."""
    if module == "nsa_jax":
        return len(FLOORS), module
    if within(module, (ABOVE_THE_HOUSE,)):
        return len(FLOORS) + 1, ABOVE_THE_HOUSE
    for height, parts in enumerate(FLOORS):
        for part in parts:
            if within(module, (part,)):
                return height, part
    return None


def module_name(path: str) -> str:
    parts = pathlib.PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: str, source: str, modules: set[str]) -> Iterator[str]:
    """Every module that a file imports, anywhere in it, as an absolute dotted name.

    `from a import b` gives `a.b` if that is one of `modules` or no module of ours is called `a`, else `a`.
    """
    package = pathlib.PurePosixPath(path).parent.parts
    for node in ast.walk(ast.parse(source, path)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=base, names=names, level=level):
                above = package[: len(package) - level + 1] if level else ()
                origin = ".".join([*above, *([base] if base else [])])
                for alias in names:
                    inner = f"{origin}.{alias.name}"
                    yield inner if inner in modules or origin not in modules else origin
            case ast.Call(func=ast.Attribute(attr="import_module") | ast.Name(id="import_module")):
                yield from (arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant))


def reads_environment(source: str) -> bool:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(attr=name) if name in ENVIRONMENT:
                return True
            case ast.ImportFrom(module="os", names=names) if ENVIRONMENT & {alias.name for alias in names}:
                return True
    return False


def placed_already(floors: tuple[tuple[str, ...], ...]) -> list[str]:
    """Parts that are listed in vain: `floor_of` finds the same name, or a package around it, before them."""
    parts = [part for floor in floors for part in floor]
    return [part for number, part in enumerate(parts) if within(part, tuple(parts[:number]))]


def violations(files: Mapping[str, str]) -> list[str]:
    """What is wrong with `files`, which maps path to source, and with FLOORS; a line for each violation."""
    modules = {module_name(path) for path in files}
    wrong = [f"FLOORS: {part} has a place already" for part in placed_already(FLOORS)]
    for path, source in files.items():
        module = module_name(path)
        if EMPTY_NAMES & set(module.split(".")):
            wrong.append(f"{path}: the name says nothing")
        library = within(module, ("nsa_jax",))
        if library and not within(module, SETS_ENVIRONMENT) and reads_environment(source):
            wrong.append(f"{path}: the library reads no environment variable")
        for name in imported(path, source, modules):
            if library and within(name, ("nsa_jax",)):
                wrong += wrong_floor(path, module, name)
            if within(name, ("nsa_jax.reference",)) and not within(module, MAY_USE_REFERENCE):
                wrong.append(f"{path}: {name} is for tests and parity only")
            if within(name, KERNEL_LANGUAGES) and not within(module, MAY_USE_KERNEL_LANGUAGES):
                wrong.append(f"{path}: {name} is for kernels/triton and kernels/mosaic_gpu only")
            if library and within(name, NOT_IN_THE_LIBRARY):
                wrong.append(f"{path}: the library does not import {name}")
            if within(module, ("nsa_torch_ref",)) and within(name, NOT_IN_THE_TWIN):
                wrong.append(f"{path}: the PyTorch reference does not import {name}")
    return wrong


def wrong_floor(path: str, module: str, name: str) -> list[str]:
    here, there = floor_of(module), floor_of(name)
    if module == "nsa_jax.kernels":
        return [f"{path}: it stays empty, so that no kernel language is imported unasked"]
    if here is None:
        return [f"{path}: give {module} a place in FLOORS"]
    if there is None:
        return [f"{path}: {name} has no place in FLOORS"]
    if here[1] != there[1] and here[0] <= there[0]:
        return [f"{path}: {there[1]} does not stand left of {here[1]}"]
    return []


def test_repository_keeps_its_floors():
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    files = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}

    assert any(path.startswith("nsa_jax/") for path in files)
    assert violations(files) == []


NEIGHBOURS = {
    f"nsa_jax/{name}.py": ""
    for name in ("__init__", "config", "layout", "reference", "dispatch", "nn", "kernels/__init__")
} | {"nsa_jax/kernels/xla/__init__.py": "", "nsa_jax/kernels/xla/softmax.py": ""}

BAD = {
    "upwards": ("nsa_jax/layout.py", "from nsa_jax.dispatch import choose", "does not stand left"),
    "upwards by name": ("nsa_jax/layout.py", "from nsa_jax import dispatch", "does not stand left"),
    "upwards, plain": ("nsa_jax/layout.py", "import nsa_jax.dispatch", "does not stand left"),
    "upwards, relative": ("nsa_jax/layout.py", "from .dispatch import choose", "does not stand left"),
    "upwards, relative by name": ("nsa_jax/layout.py", "from . import dispatch", "does not stand left"),
    "upwards, two dots": ("nsa_jax/kernels/xla/softmax.py", "from ... import dispatch", "not stand left"),
    "upwards, in a package": ("nsa_jax/kernels/xla/__init__.py", "from ...nn import Gate", "not stand left"),
    "upwards, late": ("nsa_jax/layout.py", "def f():\n  from nsa_jax import nn", "does not stand left"),
    "upwards, by string": ("nsa_jax/layout.py", "import_module('nsa_jax.nn')", "does not stand left"),
    "upwards, from kernels": ("nsa_jax/kernels/xla/softmax.py", "import nsa_jax.arguments", "not stand left"),
    "the whole house": ("nsa_jax/layout.py", "import nsa_jax", "does not stand left"),
    "sideways": ("nsa_jax/kernels/xla/softmax.py", "import nsa_jax.kernels.triton", "does not stand left"),
    "no place": ("nsa_jax/extra.py", "from nsa_jax import config", "give nsa_jax.extra a place"),
    "to no place": ("nsa_jax/nn.py", "import nsa_jax.extra", "has no place"),
    "kernels do something": ("nsa_jax/kernels/__init__.py", "from nsa_jax.kernels import xla", "stays empty"),
    "oracle in the library": ("nsa_jax/nn.py", "from nsa_jax import reference", "for tests and parity"),
    "oracle in the root": ("nsa_jax/__init__.py", "from .reference import x", "for tests and parity"),
    "oracle in a benchmark": ("benchmarks/speed.py", "import nsa_jax.reference", "for tests and parity"),
    "pallas": ("nsa_jax/kernels/xla/softmax.py", "from jax.experimental import pallas", "kernels/triton"),
    "triton": ("nsa_jax/dispatch.py", "def f(): import triton.language as tl", "kernels/triton"),
    "jax_triton": ("benchmarks/speed.py", "import jax_triton as jt", "kernels/triton"),
    "torch": ("nsa_jax/nn.py", "import torch.nn", "library does not import torch.nn"),
    "jax in the twin": ("nsa_torch_ref/masks.py", "import jax.numpy as jnp", "does not import jax.numpy"),
    "nsa_jax in the twin": ("nsa_torch_ref/masks.py", "import nsa_jax", "does not import nsa_jax"),
    "environ": ("nsa_jax/dispatch.py", "import os\nos.environ['A']", "environment"),
    "getenv": ("nsa_jax/dispatch.py", "from os import getenv", "environment"),
    "the doctor": ("nsa_jax/__init__.py", "from nsa_jax.doctor import checks", "does not stand left"),
    "environ of the doctor": ("nsa_jax/doctor/machine.py", "import os\nos.environ['A']", "environment"),
    "empty name": ("parity/utils.py", "", "the name says nothing"),
    "empty folder name": ("tests/common/case.py", "", "the name says nothing"),
}


@pytest.mark.parametrize(("path", "source", "message"), BAD.values(), ids=BAD.keys())
def test_checker_rejects(path, source, message):
    found = violations(NEIGHBOURS | {path: source})

    assert len(found) >= 1
    assert all(path in line for line in found)
    assert message in found[0]


@pytest.mark.parametrize(
    ("floors", "found"),
    [
        ((("a.low",), ("a.high", "a.low")), ["a.low"]),
        ((("a.low", "a.low"), ("a.high",)), ["a.low"]),
        ((("a.kernels",), ("a.high", "a.kernels.xla")), ["a.kernels.xla"]),
        ((("a.kernels.xla",), ("a.kernels",), ("a.kernels_and_more",)), []),
    ],
    ids=["two floors", "one floor", "inside a package", "once each"],
)
def test_checker_finds_parts_that_have_a_place_already(floors, found):
    assert placed_already(floors) == found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("nsa_jax/dispatch.py", "from nsa_jax.kernels import xla\nfrom nsa_jax.layout import x"),
        ("nsa_jax/kernels/xla/__init__.py", "from nsa_jax.kernels.xla.softmax import x\nfrom . import y"),
        ("nsa_jax/kernels/triton/selected.py", "import jax_triton\nfrom triton import language"),
        ("nsa_jax/kernels/mosaic_gpu/selected.py", "from jax.experimental.pallas import mosaic_gpu as plgpu"),
        ("nsa_jax/__init__.py", "from nsa_jax import nn\nfrom nsa_jax.config import NSAConfig"),
        ("nsa_jax/doctor/checks.py", "import nsa_jax\nfrom nsa_jax import reference"),
        ("nsa_jax/doctor/__main__.py", "import os\nos.environ.setdefault('A', 'b')"),
        ("parity/compare.py", "from nsa_jax import reference\nimport torch"),
        ("tests/test_reference.py", "from nsa_jax.reference import select_blocks"),
    ],
)
def test_checker_accepts(path, source):
    assert violations(NEIGHBOURS | {path: source}) == []
