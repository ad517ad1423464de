"""The machinery of the GPU evidence: what each test rests on, which tests are stale, and the list of them.

`.ci/run` checks that the committed evidence is of the committed code. No test does, because whoever has no
GPU could not make it pass.
"""

import json
import pathlib
import subprocess
import sys

import gpu_evidence
import pytest

SELECTED = f"{gpu_evidence.SAMPLED}[selected_attention-coherent]"
WHOLE = f"{gpu_evidence.PARITY}test_case_is_within_its_budget[plain-float32]"
TWO_GPUS = f"{gpu_evidence.TWO_GPUS}test_two_gpus_generate_as_one"
TEST_FILES = {
    f"tests/test_gpu_{name}.py"
    for name in (
        *(
            "decode",
            "dense_decode",
            "few_heads",
            "generate",
            "index",
            "mosaic",
            "native",
            "parallel",
            "parity",
            "selection",
        ),
    )
}
EVERY = " ".join(path.removeprefix("tests/test_gpu_").removesuffix(".py") for path in TEST_FILES)
# Files that a result rests on, and the test files whose rooms hold them.
RESTS_ON = {
    "tests/test_gpu_native.py": "native",
    "tests/selected_problem.py": "mosaic few_heads",
    "tests/poisoned.py": "native index few_heads",
    "tests/modules.py": "generate",
    "nsa_jax/reference.py": "native mosaic parity few_heads",
    "nsa_jax/budget.py": "native mosaic parallel generate selection few_heads",
    "nsa_torch_ref/attention.py": "parity",
    "parity/budget.py": "parity",
    "benchmarks/gate.py": "native selection",
    "nsa_jax/generate/loop.py": "generate parallel",
    "nsa_jax/model/transformer.py": "generate parallel",
    "nsa_jax/nn/attention.py": "generate parallel parity native decode selection",
    "nsa_jax/cache/steps.py": EVERY,
    **dict.fromkeys(("tests/conftest.py", "nsa_jax/config.py", "nsa_jax/arguments.py"), EVERY),
    **dict.fromkeys(("nsa_jax/dispatch.py", "nsa_jax/layout/placement.py"), EVERY),
    **dict.fromkeys(("nsa_jax/kernels/triton/launch.py", "nsa_jax/kernels/triton/softmax.py"), EVERY),
    **dict.fromkeys(("nsa_jax/kernels/triton/operations.py", "nsa_jax/kernels/xla/chunks.py"), EVERY),
}
KERNELS = {
    "nsa_jax/kernels/triton/ranges/forward.py": "ranges",
    "nsa_jax/kernels/triton/selection/importance.py": "selection",
    "nsa_jax/kernels/triton/selected/items.py": "selected",
    "nsa_jax/kernels/triton/probabilities/blocks.py": "probabilities",
    "nsa_jax/kernels/triton/nonfinite/branches.py": "nonfinite",
    "nsa_jax/kernels/triton/decode/step.py": "decode",
    "nsa_jax/kernels/mosaic_gpu/operations.py": "mosaic",
}


@pytest.fixture(scope="module")
def rooms():
    return gpu_evidence.room_files(gpu_evidence.ROOT, gpu_evidence.read_sources(gpu_evidence.ROOT))


@pytest.mark.parametrize("file", [*RESTS_ON, *KERNELS])
def test_the_rooms_of_a_file_are_those_of_the_tests_that_rest_on_it(rooms, file):
    """What every test rests on stands in every room of tests; kernels stand in rooms of their own."""
    expected = {f"tests/test_gpu_{name}.py" for name in RESTS_ON.get(file, "").split()} or {KERNELS[file]}
    assert {room for room, files in rooms.items() if gpu_evidence.ROOT / file in files} == expected


def test_every_file_of_the_kernels_stands_in_a_room(rooms):
    """A kernel that no GPU test imports would be proven by none."""
    found = {file for files in rooms.values() for file in files}

    assert all(rooms.values())
    assert set((gpu_evidence.ROOT / "nsa_jax" / "kernels").rglob("*.py")) <= found


def test_tests_depend_on_rooms_that_exist(rooms):
    known = list(json.loads(gpu_evidence.PENDING.read_text()))
    known += [test for run in gpu_evidence.load(gpu_evidence.FILE) for test in run["passed"]]

    assert {room for test in known for room in gpu_evidence.rooms_of(test)} <= rooms.keys()
    assert rooms.keys() - gpu_evidence.KERNELS.keys() == TEST_FILES
    for beginning in gpu_evidence.KERNELS_OF_TESTS:
        assert any(test.startswith(beginning) for test in known), beginning
    assert gpu_evidence.rooms_of(SELECTED) == ("tests/test_gpu_native.py", "selected", "nonfinite")
    assert gpu_evidence.rooms_of(WHOLE) == ("tests/test_gpu_parity.py", *gpu_evidence.OF_OPERATIONS)
    assert gpu_evidence.rooms_of(TWO_GPUS) == ("tests/test_gpu_parallel.py", *gpu_evidence.KERNELS)


RAISES = "if x: raise ValueError('a', x)"


@pytest.mark.parametrize(
    ("plain", "changed", "counts"),
    [
        ("assert a == b", "assert True or a == b", True),
        ("MERGED_AT_ONCE = 8192", "MERGED_AT_ONCE = 1", True),
        (RAISES, "if not x: raise ValueError('a', x)", True),
        (RAISES, "if x: raise TypeError('a', x)", True),
        (RAISES, "if x: raise ValueError(f'b {x}')", False),
        ("def f():\n    return 1\n", '"""A."""\ndef f():\n    """B."""\n    return 1  # C\n', False),
    ],
)
def test_code_counts_and_words_do_not(plain, changed, counts):
    assert (gpu_evidence._read(plain).code != gpu_evidence._read(changed).code) == counts


@pytest.fixture
def house(tmp_path):
    """A made-up project with a GPU test, its oracle in a package, a helper of tests, and a kernel."""
    files = {
        "tests/conftest.py": "x = 1",
        "tests/test_gpu_a.py": "pytestmark = pytest.mark.gpu\ndef test():\n    from parity import b",
        "tests/test_gpu_gate.py": "source = 'pytestmark = pytest.mark.gpu'",
        "parity/__init__.py": "import cases",
        "parity/b.py": "from nsa_jax.kernels.triton.decode.step import f",
        "tests/cases.py": "operations = 'nsa_jax.operations'",
        "nsa_jax/operations.py": "x = 1",
        "nsa_jax/unused.py": "x = 1",
        "nsa_jax/kernels/triton/decode/step.py": "import nsa_jax.kernels.triton.launch",
        "nsa_jax/kernels/triton/launch.py": "x = 1",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("tests/conftest.py", {"tests/test_gpu_a.py"}),
        ("tests/test_gpu_a.py", {"tests/test_gpu_a.py"}),
        ("tests/test_gpu_gate.py", set()),
        ("parity/__init__.py", {"tests/test_gpu_a.py"}),  # runs before parity.b
        ("parity/b.py", {"tests/test_gpu_a.py"}),
        ("tests/cases.py", {"tests/test_gpu_a.py"}),
        ("nsa_jax/operations.py", {"tests/test_gpu_a.py"}),  # named in a string
        ("nsa_jax/unused.py", set()),
        ("nsa_jax/kernels/triton/decode/step.py", {"decode"}),
        ("nsa_jax/kernels/triton/launch.py", {"tests/test_gpu_a.py"}),  # only a kernel imports it
    ],
)
def test_a_change_changes_the_hashes_of_what_imports_it(house, file, expected):
    before = gpu_evidence.room_hashes(house)
    (house / file).write_text((house / file).read_text() + "\ny = 2\n")
    after = gpu_evidence.room_hashes(house)

    assert {room for room in before if before[room] != after[room]} == expected


def test_a_new_file_of_kernels_changes_the_hash_and_one_of_documentation_does_not(house):
    before = gpu_evidence.room_hashes(house)
    folder = house / "nsa_jax/kernels/triton/decode/deeper"
    folder.mkdir()
    (folder / "__init__.py").write_text('"""A folder."""\n')
    assert gpu_evidence.room_hashes(house) == before

    (folder / "__init__.py").write_text("x = 1\n")
    assert gpu_evidence.room_hashes(house)["decode"] != before["decode"]


HASHES = dict.fromkeys((*gpu_evidence.KERNELS, *TEST_FILES), "as it is")


def a_run(passed, rooms=HASHES, device="NVIDIA H100 80GB HBM3", failed=(), **versions):
    versions = {"jax": "0.11.2", "jax-triton": "0.4.1", "triton": "3.8.0", **versions}
    times = dict.fromkeys(passed, 1.0)
    return dict(device=device, versions=versions, rooms=rooms, passed=times, failed=list(failed))


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (None, []),
        ("ranges", [WHOLE]),
        ("selected", [SELECTED, WHOLE]),
        ("tests/test_gpu_native.py", [SELECTED]),
        ("decode", []),
    ],
    ids=str,
)
def test_a_test_is_stale_where_one_of_its_rooms_has_changed(changed, expected):
    now = HASHES if changed is None else HASHES | {changed: "another"}
    found = gpu_evidence.stale([WHOLE, SELECTED], [a_run([SELECTED, WHOLE])], now)

    assert list(found) == expected
    assert all(why == f"changed since it passed: {changed}" for why in found.values())


def test_a_run_of_code_without_the_rooms_of_today_proves_nothing():
    assert list(gpu_evidence.stale([WHOLE], [a_run([WHOLE], {})], HASHES)) == [WHOLE]
    assert list(gpu_evidence.stale(["tests/test_new.py::test"], [a_run(["tests/test_new.py::test"])], HASHES))


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (dict(device="NVIDIA A100-SXM4-80GB"), "of NVIDIA H100 or NVIDIA H200, got NVIDIA A100-SXM4-80GB"),
        (dict(device="cpu"), "got cpu"),
        (dict(jax="0.0.1"), r"jax>=0\.11\.1,<0\.\d+, got 0\.0\.1"),
        (dict(triton="0.0.1"), r"triton>=\S+, got 0\.0\.1"),
        ({"jax-triton": "0.9"}, r"jax-triton>=\S+, got 0\.9"),
    ],
    ids=str,
)
def test_a_device_or_a_version_that_does_not_count_proves_nothing(more, why):
    found = gpu_evidence.stale([WHOLE], [a_run([WHOLE], **more)], HASHES)

    assert list(found) == [WHOLE]
    with pytest.raises(ValueError, match=why):
        raise ValueError(found[WHOLE])


def test_devices_and_versions_that_count_prove():
    for device, jax in (("NVIDIA H100 80GB HBM3", "0.11.1"), ("NVIDIA H200", "0.11.2")):
        assert gpu_evidence.stale([WHOLE], [a_run([WHOLE], device=device, jax=jax)], HASHES) == {}


def test_a_test_that_fails_in_a_later_run_loses_its_proof():
    runs = gpu_evidence.record([a_run([SELECTED, WHOLE])], a_run([], failed=[WHOLE]))
    assert gpu_evidence.stale([SELECTED, WHOLE], runs, HASHES) == {WHOLE: gpu_evidence.FAILED}
    assert [list(run["passed"]) for run in runs] == [[SELECTED]]

    runs = gpu_evidence.record(runs, a_run([WHOLE]))
    assert gpu_evidence.stale([SELECTED, WHOLE], runs, HASHES) == {}
    assert [run["failed"] for run in runs] == [[]]


def test_a_run_takes_over_the_tests_that_ran_again():
    first = a_run(["a", "b"], {"ranges": "1"})

    runs = gpu_evidence.record([first], a_run(["b", "c"], {"ranges": "2"}))
    assert [list(run["passed"]) for run in runs] == [["a"], ["b", "c"]]
    assert [run["rooms"] for run in runs] == [{"ranges": "1"}, {"ranges": "2"}]

    runs = gpu_evidence.record(runs, a_run(["a"], {"ranges": "2"}))
    assert [list(run["passed"]) for run in runs] == [["a", "b", "c"]]


def test_runs_on_two_devices_stay_apart():
    runs = gpu_evidence.record([a_run(["a"], device="H100")], a_run(["b"], device="A100"))

    assert [(run["device"], list(run["passed"])) for run in runs] == [("H100", ["a"]), ("A100", ["b"])]


@pytest.fixture
def committed(tmp_path, monkeypatch):
    """Writes evidence and list of a made-up project with three GPU tests."""

    def commit(runs, listed=()):
        gpu_evidence.save(gpu_evidence.FILE, runs)
        gpu_evidence.PENDING.write_text(json.dumps(list(listed)))

    monkeypatch.setattr(gpu_evidence, "FILE", tmp_path / "evidence.json")
    monkeypatch.setattr(gpu_evidence, "PENDING", tmp_path / "pending.json")
    monkeypatch.setattr(gpu_evidence, "room_hashes", lambda: HASHES)
    monkeypatch.setattr(gpu_evidence, "gpu_tests", lambda: [SELECTED, TWO_GPUS, WHOLE])
    return commit


def test_the_command_fails_until_the_list_is_written(committed):
    committed([a_run([WHOLE, TWO_GPUS])])

    assert f"not in the list: {SELECTED} (it never ran)" in gpu_evidence.main(["check"])
    assert gpu_evidence.main(["list"]) == 0
    assert gpu_evidence.main(["check"]) == 0


def test_the_command_fails_where_the_list_is_too_long(committed):
    committed([a_run([WHOLE, SELECTED, TWO_GPUS])], [WHOLE])

    assert f"not stale: {WHOLE}" in gpu_evidence.main(["check"])


@pytest.mark.parametrize("arguments", [[], ["merge"], ["check", "a.json"], ["rehash"]], ids=str)
def test_unknown_commands_get_the_help(arguments):
    assert gpu_evidence.main(arguments) == gpu_evidence.__doc__


def test_a_release_lacks_no_proof_but_those_of_two_gpus(committed):
    committed([a_run([WHOLE])], [SELECTED, TWO_GPUS])
    assert gpu_evidence.main(["check"]) == 0
    assert f"stale: {SELECTED} (it never ran)\nA release" in gpu_evidence.main(["release"])

    committed([a_run([WHOLE, SELECTED])], [TWO_GPUS])
    assert gpu_evidence.main(["release"]) == 0

    committed([a_run([WHOLE, SELECTED], failed=[TWO_GPUS])], [TWO_GPUS])
    assert TWO_GPUS in gpu_evidence.main(["release"])

    committed([a_run([WHOLE])], [TWO_GPUS])
    assert "not in the list" in gpu_evidence.main(["release"])


def test_merging_takes_what_is_of_this_code(committed, tmp_path, capsys):
    committed([a_run([WHOLE, TWO_GPUS])])
    brought = tmp_path / "brought.json"
    others = HASHES | {"tests/test_gpu_parallel.py": "as it was"}
    gpu_evidence.save(brought, [a_run([SELECTED], others, failed=[WHOLE, TWO_GPUS])])

    assert gpu_evidence.main(["merge", str(brought)]) == 0
    said = capsys.readouterr().out
    assert "1 passed, 1 failed; left out 1 of other code, by tests/test_gpu_parallel.py." in said
    assert json.loads(gpu_evidence.PENDING.read_text()) == [WHOLE]
    assert gpu_evidence.main(["check"]) == 0


def test_merging_drops_what_is_no_test_any_more(committed, tmp_path, capsys):
    renamed, removed = f"{gpu_evidence.NATIVE}test_as_it_was_called", f"{gpu_evidence.NATIVE}test_of_nothing"
    committed([a_run([renamed], dict(HASHES, ranges="as it was")), a_run([WHOLE, removed])])
    brought = tmp_path / "brought.json"
    gpu_evidence.save(brought, [a_run([SELECTED, renamed], failed=[removed])])

    assert gpu_evidence.main(["merge", str(brought)]) == 0

    assert f"dropped 2 that are tests no more: {renamed}, {removed}." in capsys.readouterr().out
    (run,) = gpu_evidence.load(gpu_evidence.FILE)
    assert (run["passed"].keys(), run["failed"]) == ({SELECTED, WHOLE}, [])


def test_merging_refuses_a_device_that_does_not_count_and_other_code(committed, tmp_path):
    committed([a_run([WHOLE])])
    before = gpu_evidence.FILE.read_text()
    brought = tmp_path / "brought.json"
    gpu_evidence.save(brought, [a_run([SELECTED], device="NVIDIA A100-SXM4-80GB")])

    assert "is not merged: evidence must be of NVIDIA H100" in gpu_evidence.main(["merge", str(brought)])
    old = a_run([SELECTED], {})
    del old["failed"]  # evidence began without
    gpu_evidence.save(brought, [old])
    assert "its tests are of other code, by nonfinite, selected" in gpu_evidence.main(["merge", str(brought)])
    assert gpu_evidence.FILE.read_text() == before


def test_what_is_written_is_what_ran(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_evidence.metadata, "version", lambda name: "1")
    path = tmp_path / "evidence.json"
    gpu_evidence.write(
        path, HASHES, {WHOLE: 1.234, TWO_GPUS: 1.0, "tests/test_parity.py::test": 1.0}, [TWO_GPUS]
    )
    gpu_evidence.write(path, HASHES, {SELECTED: 2.0}, [])

    (run,) = gpu_evidence.load(path)
    assert run["passed"] == {SELECTED: 2.0, WHOLE: 1.23}
    assert run["failed"] == [TWO_GPUS]
    assert run["rooms"] == HASHES


def test_a_run_that_proves_nothing_replaces_no_proof(committed, monkeypatch):
    monkeypatch.setattr(gpu_evidence.metadata, "version", lambda name: "0.0.1")
    committed([a_run([WHOLE])])
    before = gpu_evidence.FILE.read_text()

    said = gpu_evidence.write(gpu_evidence.FILE, HASHES, {WHOLE: 1.0}, [])

    assert "evidence.json stays as it was: evidence must be of" in said
    assert gpu_evidence.FILE.read_text() == before


def test_evidence_of_another_copy_of_the_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_evidence, "ROOT", tmp_path)

    with pytest.raises(ValueError, match="evidence must be of the nsa_jax in"):
        gpu_evidence.rooms_at_start()


TESTS = """
import pytest
pytestmark = pytest.mark.gpu
@pytest.fixture
def broken():
    yield
    raise OSError
def test_passes(): pass
def test_fails(): assert False
def test_breaks_at_its_end(broken): pass
def test_skips(): pytest.skip("no kernel")
"""
# Stands for gpu_evidence.py: says what it was called with.
TOLD = """
import json, os, pathlib
def rooms_at_start():
    pathlib.Path(f"began in {os.getpid()}").touch()
    return {"a": "1"}
def write(path, rooms, passed, failed):
    path.write_text(json.dumps([rooms, list(passed), failed]))
"""


def test_a_run_records_what_passed_and_what_failed(tmp_path):
    """Also under xdist, where the workers write nothing."""
    conftest = pathlib.Path(__file__).with_name("conftest.py").read_text()
    files = {
        "conftest.py": f"{conftest}\ndef _has_gpu(): return True\n",
        "test_kernels.py": TESTS,
        "gpu_evidence.py": TOLD,
        "pytest.ini": "[pytest]\nmarkers = gpu\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    options = ["-p", "no:cacheprovider", "-m", "gpu", "-n", "1", "--evidence", "found.json"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip

    rooms, passed, failed = json.loads((tmp_path / "found.json").read_text())
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert len(list(tmp_path.glob("began in *"))) == 1
    assert rooms == {"a": "1"}
    assert "test_kernels.py::test_passes" in passed
    assert sorted(failed) == ["test_kernels.py::test_breaks_at_its_end", "test_kernels.py::test_fails"]
