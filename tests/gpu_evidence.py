"""Evidence that the GPU tests passed on the code as it is: what ran, on which device, versions and code.

The code that a GPU run vouches for stands in rooms, and each room has a hash. A test depends on the room of
its own file, which holds all that the file imports, directly or not: oracles, layers, operations. Kernels
have rooms of their own, because most tests need only some. A test is stale unless it passed in the last run
that it took part in, on a GPU and with versions that count, and none of its rooms has changed since. Stale
tests stand in `gpu_pending.json`.

    python -m pytest -m gpu --evidence FILE      on a GPU: adds what passed and what failed to FILE
    python tests/gpu_evidence.py merge FILE...   adds what was recorded elsewhere, drops what is no test any
                                                 more, and writes the list
    python tests/gpu_evidence.py list            writes the list of what is stale
    python tests/gpu_evidence.py check           fails unless the list says what is stale
    python tests/gpu_evidence.py release         fails also if a test is stale that needs but one GPU

A changed room needs a new run, even if no kernel changed. To compare what the tests lower before and after
would take longer. We measured it for 27 tests, with JAX 0.11.2 on two busy cores without a GPU: assertions
off, all but small programs traced and not executed, Triton IR built for each kernel. A test of parity took 9
seconds of processor time, most of it for PyTorch's oracle, another test 3. All 202 would take 10 minutes on
two cores, before and after 20, and the tests themselves take 12 on a GPU. Two of the 27 could not be lowered
so, tests of two GPUs neither, and results that were never computed would decide what some lower next.
"""

import ast
import functools
import hashlib
import importlib.util
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Set
from concurrent import futures
from importlib import metadata
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
FILE = ROOT / "tests" / "gpu_evidence.json"
PENDING = ROOT / "tests" / "gpu_pending.json"
SUPPORT = "nsa_jax/kernels/triton/support.py"  # says which versions count

DEVICES = ("NVIDIA H100", "NVIDIA H200")  # those that the documentation has results of
PACKAGES = ("jax", "jaxlib", "jax-triton", "triton", "torch", "flax")  # recorded; SUPPORT says which count

TRITON = "nsa_jax/kernels/triton"
KERNELS = {
    "ranges": (f"{TRITON}/ranges/**/*.py", f"{TRITON}/sizes/ranges.py"),
    "selected": (f"{TRITON}/selected/**/*.py", f"{TRITON}/decode/parts.py", f"{TRITON}/sizes/selected.py"),
    "selection": (f"{TRITON}/selection/**/*.py", f"{TRITON}/sizes/selection.py"),
    "probabilities": (f"{TRITON}/probabilities/**/*.py", f"{TRITON}/sizes/probabilities.py"),
    "nonfinite": (f"{TRITON}/nonfinite/**/*.py", f"{TRITON}/sizes/nonfinite.py"),
    "decode": (f"{TRITON}/decode/**/*.py",),
    "mosaic": ("nsa_jax/kernels/mosaic_gpu/**/*.py",),
}
EVERY = tuple(KERNELS)
FAILED = "it failed when it ran last"
OF_OPERATIONS = ("ranges", "selected", "selection", "nonfinite")
NATIVE = "tests/test_gpu_native.py::"
SAMPLED = f"{NATIVE}test_sampled_rows_of_64k_tokens"
PARITY = "tests/test_gpu_parity.py::"
TWO_GPUS = "tests/test_gpu_parallel.py::"
# Kernels that a test depends on, by how its name begins; the first that fits counts. Others depend on all.
KERNELS_OF_TESTS = {
    "tests/test_gpu_decode.py::test_step_kernels_are_what_runs_by_default": ("decode", "mosaic"),
    "tests/test_gpu_dense_decode.py::test_step_kernels_are_what_runs_by_default": ("decode", "mosaic"),
    "tests/test_gpu_decode.py::": ("decode",),
    "tests/test_gpu_dense_decode.py::": ("decode",),
    "tests/test_gpu_few_heads.py::": OF_OPERATIONS,
    "tests/test_gpu_index.py::": ("selection",),
    "tests/test_gpu_mosaic.py::": (*OF_OPERATIONS, "mosaic"),
    f"{PARITY}test_case_is_within_its_budget[decode": (*OF_OPERATIONS, "decode"),
    PARITY: OF_OPERATIONS,
    f"{NATIVE}test_the_kernels_are_what_runs_by_default": (*OF_OPERATIONS, "mosaic"),
    f"{NATIVE}test_tokens_that_select_nothing": ("selected", "nonfinite"),
    f"{NATIVE}test_a_block_named_twice_counts_once": ("selected", "nonfinite"),
    f"{NATIVE}test_offsets_beyond_two_to_the_31": ("ranges", "selected", "nonfinite"),
    f"{SAMPLED}[compressed_attention": ("ranges", "nonfinite"),
    f"{SAMPLED}[window_attention": ("ranges", "nonfinite"),
    f"{SAMPLED}[selected_attention": ("selected", "nonfinite"),
    NATIVE: OF_OPERATIONS,
    "tests/test_gpu_selection.py::": ("ranges", "selected", "probabilities", "nonfinite"),
}


def rooms_of(test: str) -> tuple[str, ...]:
    """The rooms that a test depends on."""
    fitting = (rooms for beginning, rooms in KERNELS_OF_TESTS.items() if test.startswith(beginning))
    return test.split("::")[0], *next(fitting, EVERY)


class _Source(NamedTuple):
    code: str  # without docstrings, overloads and the messages of errors
    imports: frozenset[str]  # dotted names of all that the file may import


def room_hashes(root: pathlib.Path = ROOT) -> dict[str, str]:
    """SHA-256 of the syntax of each room's files, without docstrings and the messages of errors."""
    sources = read_sources(root)
    return {room: hash_of(root, files, sources) for room, files in room_files(root, sources).items()}


def read_sources(root: pathlib.Path) -> dict[pathlib.Path, str]:
    """The text of all Python files that a test could import, but for this program."""
    folders = ("nsa_jax", "nsa_torch_ref", "parity", "benchmarks", "tests")
    files = (file for folder in folders for file in root.glob(f"{folder}/**/*.py"))
    return {file: file.read_text() for file in files if file.name != pathlib.Path(__file__).name}


def room_files(root: pathlib.Path, sources: Mapping[pathlib.Path, str]) -> dict[str, set[pathlib.Path]]:
    """The files of each room."""
    rooms = {
        room: {file for pattern in patterns for file in root.glob(pattern)}
        for room, patterns in KERNELS.items()
    }
    kernels = {file for files in rooms.values() for file in files}
    for file in sorted(root.glob("tests/test_gpu_*.py")):
        if re.search(r"^pytestmark = pytest\.mark\.gpu$", _read(sources[file]).code, re.MULTILINE):
            rooms[file.relative_to(root).as_posix()] = _imported(root, file, sources) - kernels
    return rooms


def _imported(
    root: pathlib.Path, test_file: pathlib.Path, sources: Mapping[pathlib.Path, str]
) -> set[pathlib.Path]:
    """A test file, conftest.py and all that they import, directly or not, but for this program."""
    found: set[pathlib.Path] = set()
    ahead = {test_file, root / "tests" / "conftest.py"} & sources.keys()
    while ahead:
        found |= ahead
        names = {name for file in ahead for name in _read(sources[file]).imports}
        ahead = {file for name in names for file in _modules(root, name)} & sources.keys() - found
    return found


@functools.cache
def _modules(root: pathlib.Path, name: str) -> frozenset[pathlib.Path]:
    """The files that the import of a dotted name may run: its packages and itself."""
    parts = name.split(".")
    paths = [
        folder.joinpath(*parts[:i]) for folder in (root, root / "tests") for i in range(1, len(parts) + 1)
    ]
    return frozenset(x for path in paths for x in (path / "__init__.py", path.with_name(f"{path.name}.py")))


@functools.cache
def _read(text: str) -> _Source:
    tree = ast.parse(text)
    imports = frozenset(_imports(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
        if isinstance(node, ast.ClassDef):  # an overload is for type checkers alone
            node.body = [x for x in node.body if not _is_overload(x)]
        if isinstance(node, ast.ImportFrom) and node.module == "typing":
            node.names = [alias for alias in node.names if alias.name != "overload"]
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            node.exc.args.clear()
    return _Source(ast.unparse(tree), imports)


def _is_overload(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and "overload" in map(ast.unparse, node.decorator_list)


def _imports(tree: ast.Module) -> Iterator[str]:
    """What a file may import, anywhere in it. `nsa_jax.dispatch` has names of modules in strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"imports must be absolute, got line {node.lineno}. Name the package.")
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"\w+(\.\w+)+", str(node.value)):
            yield str(node.value)


def hash_of(root: pathlib.Path, files: Iterable[pathlib.Path], sources: Mapping[pathlib.Path, str]) -> str:
    """The hash of a room."""
    total = hashlib.sha256()
    for file in sorted(files):
        code = _read(sources[file]).code
        if code != "pass":  # a file of documentation only
            total.update(f"{file.relative_to(root).as_posix()}\n{code}\n".encode())
    return total.hexdigest()


def stale(
    tests: Iterable[str], runs: Iterable[Mapping[str, Any]], hashes: Mapping[str, str]
) -> dict[str, str]:
    """Those of `tests` that no run proves for code with these hashes, and why."""
    run_of = {test: run for run in runs for test in _ran(run)}

    def reason(test: str) -> str | None:
        if test not in run_of:
            return "it never ran"
        run = run_of[test]
        if test in run["failed"]:
            return FAILED
        changed = ", ".join(_changed_rooms(test, run, hashes))
        return refusal(run) or (f"changed since it passed: {changed}" if changed else None)

    reasons = {test: reason(test) for test in sorted(tests)}
    return {test: why for test, why in reasons.items() if why is not None}


def _changed_rooms(test: str, run: Mapping[str, Any], hashes: Mapping[str, str]) -> list[str]:
    return [room for room in rooms_of(test) if run["rooms"].get(room) != hashes.get(room, "no such room")]


def refusal(run: Mapping[str, Any]) -> str | None:
    """Why a run proves nothing, whatever its code was; None if it does."""
    from packaging.specifiers import SpecifierSet

    if not run["device"].startswith(DEVICES):
        return f"evidence must be of {' or '.join(DEVICES)}, got {run['device']}. Run on one of them."
    for package, (bounds, _) in _versions_that_count(ROOT / SUPPORT).items():
        found = run["versions"].get(package, "0")
        if not SpecifierSet(bounds).contains(found, prereleases=True):
            return f"evidence must be of {package}{bounds}, got {found}. Run with a version that counts."
    return None


@functools.cache
def _versions_that_count(file: pathlib.Path) -> dict[str, tuple[str, str]]:
    """`VERSIONS` of the code beside this program, which need not be the one that is installed."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "VERSIONS":
            return ast.literal_eval(node.value)
    raise ValueError(f"{file} must define VERSIONS, got no such name. Correct SUPPORT in {__file__}.")


def problems(found: Mapping[str, str], listed: Iterable[str]) -> list[str]:
    """What is stale and not listed, and what is listed and not stale, a line each."""
    listed = set(listed)
    return [
        f"stale, and not in the list: {test} ({why})" for test, why in found.items() if test not in listed
    ] + [f"in the list, and not stale: {test}" for test in sorted(listed - found.keys())]


def record(runs: Iterable[dict[str, Any]], run: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs with a new one. A test stands where it ran last: there it passed or failed."""
    kept = [_only(old, _ran(old) - _ran(run)) for old in runs]
    same = [old for old in kept if all(old[key] == run[key] for key in ("device", "versions", "rooms"))]
    others = [old for old in kept if old not in same]
    passed = {test: seconds for old in (*same, run) for test, seconds in old["passed"].items()}
    failed = {test for old in (*same, run) for test in old["failed"]}
    joined = run | {"passed": dict(sorted(passed.items())), "failed": sorted(failed)}
    return [one for one in (*others, joined) if _ran(one)]


def _ran(run: Mapping[str, Any]) -> set[str]:
    return {*run["passed"], *run["failed"]}


def _only(run: dict[str, Any], tests: Set[str]) -> dict[str, Any]:
    """The part of a run that is of these tests."""
    passed = {test: seconds for test, seconds in run["passed"].items() if test in tests}
    return run | {"passed": passed, "failed": [test for test in run["failed"] if test in tests]}


def rooms_at_start() -> dict[str, str]:
    """`room_hashes` for a run that begins: of this code, which must be what the tests import.

    Raises:
      ValueError: the tests would import another copy of nsa_jax.
    """
    spec = importlib.util.find_spec("nsa_jax")
    origin = None if spec is None else spec.origin
    if origin is None or not pathlib.Path(origin).resolve().is_relative_to(ROOT):
        raise ValueError(
            f"evidence must be of the nsa_jax in {ROOT}, got {origin}. Set PYTHONPATH to {ROOT}."
        )
    return room_hashes()


def write(
    path: pathlib.Path, rooms: dict[str, str], passed: Mapping[str, float], failed: Iterable[str]
) -> str | None:
    """Adds a run to the evidence in `path`: the GPU tests of `rooms`, with seconds of those that passed.

    Any GPU may write a file of its own. In the project's file a run that proves nothing would replace those
    that do: it is left out, and the result says why.
    """
    import jax

    run = {
        "device": jax.local_devices()[0].device_kind,
        "versions": {name: metadata.version(name) for name in PACKAGES},
        "rooms": rooms,
        "passed": {name: round(seconds, 2) for name, seconds in passed.items() if name not in failed},
        "failed": list(failed),
    }
    run = _only(run, {test for test in _ran(run) if test.split("::")[0] in rooms})
    if path.resolve() == FILE and (reason := refusal(run)):
        return f"{path} stays as it was: {reason}"
    save(path, record(load(path) if path.exists() else [], run))
    return None


def load(path: pathlib.Path) -> list[dict[str, Any]]:
    """The runs in a file of evidence. At first they had no failures."""
    return [{"failed": []} | run for run in json.loads(path.read_text())["runs"]]


def save(path: pathlib.Path, runs: list[dict[str, Any]]) -> None:
    """Writes a file of evidence."""
    path.write_text(json.dumps({"runs": runs}, indent=1) + "\n")


def merge(paths: Iterable[pathlib.Path], tests: Set[str], hashes: Mapping[str, str]) -> str | None:
    """Adds the runs of other files, as far as they are of code with these hashes. Says why one cannot be.

    What ran and is none of `tests` any more, because it was renamed or removed, is dropped.
    """
    runs = load(FILE)
    for path in paths:
        for run in load(path):
            if reason := refusal(run):
                return f"{path} is not merged: {reason}"
            changed = {test: rooms for test in _ran(run) if (rooms := _changed_rooms(test, run, hashes))}
            others = ", ".join(sorted(set().union(*changed.values())))
            if changed.keys() == _ran(run):
                return f"{path} is not merged: its tests are of other code, by {others}. Run them again."
            run = _only(run, _ran(run) - changed.keys())
            print(f"{path}: {len(run['passed'])} passed, {len(run['failed'])} failed", end="")
            print(f"; left out {len(changed)} of other code, by {others}." if changed else ".")
            runs = record(runs, run)
    if gone := set().union(*map(_ran, runs)) - tests:
        print(f"dropped {len(gone)} that are tests no more: {', '.join(sorted(gone))}.")
    save(FILE, [kept for run in runs if _ran(kept := _only(run, tests))])
    return None


def gpu_tests() -> list[str]:
    """Names of the GPU tests of the kernels, as pytest collects them."""
    if importlib.util.find_spec("torch") is None:
        sys.exit("The cases of parity are GPU tests, too, and need torch. Run this where `tox -e test` runs.")
    files = [file.relative_to(ROOT).as_posix() for file in sorted(ROOT.glob("tests/test_gpu_*.py"))]
    options = ["--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    tests = [line for line in done.stdout.splitlines() if line.startswith("tests/") and "::" in line]
    if done.returncode or not tests:
        sys.exit(f"pytest could not collect the GPU tests:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return tests


def main(arguments: list[str]) -> int | str:
    """Runs a command; the result is the exit status, or the text of a failure."""
    command, *files = arguments or [""]
    if command not in ("merge", "list", "check", "release") or bool(files) != (command == "merge"):
        return __doc__
    with futures.ThreadPoolExecutor() as pool:  # pytest collects in a process of its own
        collected = pool.submit(gpu_tests)
        hashes = room_hashes()
    tests = collected.result()
    if command == "merge" and (failure := merge(map(pathlib.Path, files), set(tests), hashes)):
        return failure
    found = stale(tests, load(FILE), hashes)
    if command in ("merge", "list"):
        PENDING.write_text(json.dumps(list(found), indent=1) + "\n")
        print(f"{len(found)} GPU tests are stale.")
        return 0
    if wrong := problems(found, json.loads(PENDING.read_text())):
        advice = "Run them on a GPU with --evidence, or write the list: python tests/gpu_evidence.py list"
        return "\n".join([*wrong, advice])
    print(f"{len(found)} GPU tests are stale, as tests/gpu_pending.json says.")
    if command == "release" and (more := not_for_a_release(found)):
        return "\n".join([*more, "A release needs them proven: run them on a GPU with --evidence."])
    return 0


def not_for_a_release(found: Mapping[str, str]) -> list[str]:
    """Stale tests with which no release is made, a line each: not those that no machine with two GPUs ran."""
    return [
        f"stale: {test} ({why})"
        for test, why in found.items()
        if not test.startswith(TWO_GPUS) or why == FAILED
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
