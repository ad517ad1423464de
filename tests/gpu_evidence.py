"""Evidence that the GPU tests passed on the kernels as they are: what ran, where, and on which code.

The code that a GPU run vouches for stands in rooms, and each room has a hash. A test is stale if one of its
rooms has changed since it passed on a GPU, or if it never ran. Stale tests stand in `gpu_pending.json`. That
list may hold tests while an issue is under way; it is empty when the issue ends.

    python -m pytest -m gpu --evidence tests/gpu_evidence.json    on a GPU: records what passed
    python tests/gpu_evidence.py list                             writes the list of what is stale
    python tests/gpu_evidence.py check                            fails unless the list says what is stale
"""

import ast
import hashlib
import importlib.util
import json
import pathlib
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
FILE = ROOT / "tests" / "gpu_evidence.json"
PENDING = ROOT / "tests" / "gpu_pending.json"

TRITON = "nsa_jax/kernels/triton"
ROOMS = {
    "ranges": (f"{TRITON}/ranges/**/*.py",),
    "blocks": (f"{TRITON}/blocks/**/*.py", "nsa_jax/kernels/lists/**/*.py"),
    "selection": (f"{TRITON}/selection/**/*.py",),
    "nonfinite": (f"{TRITON}/nonfinite/**/*.py",),
    "decode": (f"{TRITON}/decode/**/*.py", "nsa_jax/cache/**/*.py", "nsa_jax/compression.py"),
    "mosaic": (
        "nsa_jax/kernels/mosaic_gpu/**/*.py",
        "nsa_jax/kernels/gradients_in_parts.py",
        "nsa_jax/kernels/mixed.py",
    ),
    "shared": (
        f"{TRITON}/*.py",
        *(f"nsa_jax/kernels/{name}.py" for name in ("launch", "partition", "dims")),
    ),
    "calls": (
        "nsa_jax/attention/**/*.py",
        "nsa_jax/layout/**/*.py",
        "nsa_jax/arguments.py",
        "nsa_jax/dispatch.py",
        "nsa_jax/sharding.py",
    ),
}
ALWAYS = ("nonfinite", "shared", "calls")
NATIVE = "tests/test_gpu_native.py::"
SAMPLED = f"{NATIVE}test_sampled_rows_of_64k_tokens"
OF_TRITON = tuple(room for room in ROOMS if room != "mosaic")
# Rooms of tests that need no others, by how the test's name begins. All other tests depend on every room of
# Triton but that of decoding.
ROOMS_OF_TESTS = {
    "tests/test_gpu_decode.py::": ("decode", "shared", "calls"),
    "tests/test_gpu_dense_decode.py::": ("decode", "shared", "calls"),
    "tests/test_gpu_mosaic.py::": ("mosaic", *(room for room in OF_TRITON if room != "decode")),
    "tests/test_gpu_generate.py::": OF_TRITON,
    "tests/test_gpu_parallel.py::": OF_TRITON,
    "tests/test_gpu_parity.py::test_case_is_within_its_budget[decode": OF_TRITON,
    f"{NATIVE}test_tokens_that_select_nothing": ("blocks", *ALWAYS),
    f"{NATIVE}test_a_block_named_twice_counts_once": ("blocks", *ALWAYS),
    f"{NATIVE}test_offsets_beyond_two_to_the_31": ("ranges", "blocks", *ALWAYS),
    f"{SAMPLED}[compressed_attention": ("ranges", *ALWAYS),
    f"{SAMPLED}[window_attention": ("ranges", *ALWAYS),
    f"{SAMPLED}[selected_attention": ("blocks", *ALWAYS),
}


def room_hashes(root: pathlib.Path = ROOT) -> dict[str, str]:
    """SHA-256 of the syntax of each room's files, without docstrings and the messages of errors."""
    return {room: _hash(root, _files(root, patterns)) for room, patterns in ROOMS.items()}


def _files(root: pathlib.Path, patterns: Iterable[str]) -> list[pathlib.Path]:
    return sorted({file for pattern in patterns for file in root.glob(pattern)})


def _hash(root: pathlib.Path, files: Iterable[pathlib.Path]) -> str:
    total = hashlib.sha256()
    for file in files:
        code = _without_words(file.read_text())
        if code != "pass":  # a file of documentation only
            total.update(f"{file.relative_to(root).as_posix()}\n{code}\n".encode())
    return total.hexdigest()


def _without_words(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            node.exc.args.clear()
    return ast.unparse(tree)


def rooms_of(test: str) -> tuple[str, ...]:
    """The rooms that a test depends on."""
    for beginning, rooms in ROOMS_OF_TESTS.items():
        if test.startswith(beginning):
            return rooms
    return tuple(room for room in OF_TRITON if room != "decode")


def stale(tests: Iterable[str], runs: Iterable[Mapping[str, Any]], hashes: Mapping[str, str]) -> list[str]:
    """Those of `tests` that passed in none of the runs, or in one whose rooms were others than `hashes`."""
    run_of = {test: run["rooms"] for run in runs for test in run["passed"]}

    def as_it_is(test: str) -> bool:
        return test in run_of and all(run_of[test].get(room) == hashes[room] for room in rooms_of(test))

    return sorted(test for test in tests if not as_it_is(test))


def problems(stale_tests: Iterable[str], listed: Iterable[str]) -> list[str]:
    """What is stale and not listed, and what is listed and not stale, a line each."""
    stale_tests, listed = set(stale_tests), set(listed)
    return [f"stale, and not in the list: {test}" for test in sorted(stale_tests - listed)] + [
        f"in the list, and not stale: {test}" for test in sorted(listed - stale_tests)
    ]


def record(runs: list[dict[str, Any]], run: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs with a new one: a test counts for the run that it passed in last."""
    kept = [
        old | {"passed": {test: s for test, s in old["passed"].items() if test not in run["passed"]}}
        for old in runs
    ]
    same = [old for old in kept if all(old[key] == run[key] for key in ("device", "versions", "rooms"))]
    others = [old for old in kept if old not in same and old["passed"]]
    passed = {test: seconds for old in (*same, run) for test, seconds in old["passed"].items()}
    return [*others, run | {"passed": dict(sorted(passed.items()))}]


def write(path: pathlib.Path, durations: Mapping[str, float]) -> None:
    """Adds a run to the evidence in `path`: the tests that passed now, on the code as it is now."""
    import jax

    packages = ("jax", "jaxlib", "jax-triton", "triton", "torch", "flax")
    run = {
        "device": jax.local_devices()[0].device_kind,
        "versions": {name: metadata.version(name) for name in packages},
        "rooms": room_hashes(),
        "passed": {name: round(seconds, 2) for name, seconds in durations.items()},
    }
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    path.write_text(json.dumps({"runs": record(runs, run)}, indent=1) + "\n")


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
    """Runs `check` or `list`; the result is the exit status, or the text of a failure."""
    if arguments not in (["check"], ["list"]):
        return __doc__
    found = stale(gpu_tests(), json.loads(FILE.read_text())["runs"], room_hashes())
    if arguments == ["list"]:
        PENDING.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{len(found)} GPU tests are stale.")
        return 0
    wrong = problems(found, json.loads(PENDING.read_text()))
    if wrong:
        advice = "Run them on a GPU with --evidence, or write the list: python tests/gpu_evidence.py list"
        return "\n".join([*wrong, advice])
    print(f"{len(found)} GPU tests are stale, as tests/gpu_pending.json says.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
