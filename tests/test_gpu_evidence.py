"""The machinery of the GPU evidence: a hash for each room, which tests are stale, and the list of them.

`.ci/run` checks that the committed evidence is of the committed code. No test does, because whoever has no
GPU could not make it pass.
"""

import json

import gpu_evidence
import pytest

ROOM_FILES = {
    "ranges": "nsa_jax/kernels/triton/ranges/forward.py",
    "blocks": "nsa_jax/kernels/triton/blocks/deeper/lists.py",
    "selection": "nsa_jax/kernels/triton/selection/importance.py",
    "nonfinite": "nsa_jax/kernels/triton/nonfinite/visible_keys.py",
    "shared": "nsa_jax/kernels/launch.py",
    "mosaic": "nsa_jax/kernels/mosaic_gpu/ring.py",
    "decode": "nsa_jax/cache/steps.py",
    "calls": "nsa_jax/layout/placement.py",
}
IN_CALLS = ("nsa_jax/arguments.py", "nsa_jax/dispatch.py", "nsa_jax/attention/window.py")
SELECTED = f"{gpu_evidence.NATIVE}test_sampled_rows_of_64k_tokens[selected_attention-coherent]"
WHOLE = "tests/test_gpu_parity.py::test_case_is_within_its_budget[plain-float32]"


@pytest.fixture
def house(tmp_path):
    for file in (*ROOM_FILES.values(), *IN_CALLS):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("def f():\n    return 1\n")
    return tmp_path


def a_run(passed, rooms, device="H100"):
    return dict(device=device, versions={"jax": "1"}, rooms=rooms, passed=dict.fromkeys(passed, 1.0))


@pytest.mark.parametrize(
    ("room", "file"), [*ROOM_FILES.items(), *(("calls", file) for file in IN_CALLS)], ids=str
)
def test_a_change_changes_the_hash_of_its_room_alone(house, room, file):
    before = gpu_evidence.room_hashes(house)
    (house / file).write_text("def f():\n    return 2\n")
    after = gpu_evidence.room_hashes(house)

    assert {name for name in before if before[name] != after[name]} == {room}


def test_a_new_file_changes_the_hash_and_one_of_documentation_does_not(house):
    before = gpu_evidence.room_hashes(house)
    folder = (house / ROOM_FILES["blocks"]).parent
    (folder / "__init__.py").write_text('"""A folder."""\n')
    assert gpu_evidence.room_hashes(house) == before

    (folder / "__init__.py").write_text("x = 1\n")
    assert gpu_evidence.room_hashes(house)["blocks"] != before["blocks"]


def test_words_do_not_count_but_code_does():
    without_words = gpu_evidence._without_words
    plain = without_words("def f():\n    return 1\n")
    assert without_words('"""A."""\ndef f():\n    """B."""\n    return 1  # C\n') == plain
    assert without_words("def f():\n    return 2\n") != plain

    refusing = without_words("def f(x):\n    if x:\n        raise ValueError('a', x)\n")
    assert without_words("def f(x):\n    if x:\n        raise ValueError(f'b {x}')\n") == refusing
    assert without_words("def f(x):\n    if not x:\n        raise ValueError('a', x)\n") != refusing
    assert without_words("def f(x):\n    if x:\n        raise TypeError('a', x)\n") != refusing


def test_every_file_of_the_kernels_stands_in_one_room():
    """A new folder of kernels needs a room; otherwise a change there would make no test stale."""
    root = gpu_evidence.ROOT
    rooms = {room: gpu_evidence._files(root, patterns) for room, patterns in gpu_evidence.ROOMS.items()}
    files = [file for room in rooms.values() for file in room]

    assert all(rooms.values())
    assert len(set(files)) == len(files)
    assert set((root / gpu_evidence.TRITON).rglob("*.py")) <= set(files)


def test_tests_depend_on_rooms_that_exist():
    assert {room for rooms in gpu_evidence.ROOMS_OF_TESTS.values() for room in rooms} <= set(
        gpu_evidence.ROOMS
    )
    known = list(json.loads(gpu_evidence.PENDING.read_text()))
    known += [test for run in json.loads(gpu_evidence.FILE.read_text())["runs"] for test in run["passed"]]
    for beginning in gpu_evidence.ROOMS_OF_TESTS:
        assert any(test.startswith(beginning) for test in known), beginning
    assert gpu_evidence.rooms_of(SELECTED) == ("blocks", "nonfinite", "shared", "calls")
    assert gpu_evidence.rooms_of(WHOLE) == ("ranges", "blocks", "selection", "nonfinite", "shared", "calls")


@pytest.mark.parametrize(
    ("changed", "expected"),
    [(None, []), ("ranges", [WHOLE]), ("blocks", [SELECTED, WHOLE]), ("calls", [SELECTED, WHOLE])],
    ids=str,
)
def test_a_test_is_stale_where_one_of_its_rooms_has_changed(house, changed, expected):
    runs = [a_run([SELECTED, WHOLE], gpu_evidence.room_hashes(house))]
    if changed is not None:
        (house / ROOM_FILES[changed]).write_text("def f():\n    return 2\n")

    assert gpu_evidence.stale([WHOLE, SELECTED], runs, gpu_evidence.room_hashes(house)) == expected


def test_a_test_that_never_ran_is_stale(house):
    hashes = gpu_evidence.room_hashes(house)

    assert gpu_evidence.stale([SELECTED, WHOLE], [a_run([WHOLE], hashes)], hashes) == [SELECTED]


def test_a_run_of_code_without_the_rooms_of_today_proves_nothing(house):
    assert gpu_evidence.stale([WHOLE], [a_run([WHOLE], {})], gpu_evidence.room_hashes(house)) == [WHOLE]


def test_the_list_holds_what_is_stale_and_nothing_else():
    assert gpu_evidence.problems(["a", "b"], ["b", "a"]) == []
    assert gpu_evidence.problems(["a", "b"], ["a"]) == ["stale, and not in the list: b"]
    assert gpu_evidence.problems([], ["a"]) == ["in the list, and not stale: a"]


def test_a_run_takes_over_the_tests_that_passed_again():
    first = a_run(["a", "b"], {"ranges": "1"})

    runs = gpu_evidence.record([first], a_run(["b", "c"], {"ranges": "2"}))
    assert [list(run["passed"]) for run in runs] == [["a"], ["b", "c"]]
    assert [run["rooms"] for run in runs] == [{"ranges": "1"}, {"ranges": "2"}]

    runs = gpu_evidence.record(runs, a_run(["a"], {"ranges": "2"}))
    assert [list(run["passed"]) for run in runs] == [["a", "b", "c"]]


def test_runs_on_two_devices_stay_apart():
    runs = gpu_evidence.record([a_run(["a"], {}, "H100")], a_run(["b"], {}, "A100"))

    assert [(run["device"], list(run["passed"])) for run in runs] == [("H100", ["a"]), ("A100", ["b"])]


@pytest.fixture
def committed(house, monkeypatch):
    """Writes evidence and list of a made-up project with GPU tests SELECTED and WHOLE; also its hashes."""

    def commit(runs, listed):
        gpu_evidence.FILE.write_text(json.dumps({"runs": runs}))
        gpu_evidence.PENDING.write_text(json.dumps(listed))

    hashes = gpu_evidence.room_hashes(house)
    monkeypatch.setattr(gpu_evidence, "FILE", house / "evidence.json")
    monkeypatch.setattr(gpu_evidence, "PENDING", house / "pending.json")
    monkeypatch.setattr(gpu_evidence, "room_hashes", lambda: hashes)
    monkeypatch.setattr(gpu_evidence, "gpu_tests", lambda: [SELECTED, WHOLE])
    return commit, hashes


def test_the_command_fails_until_the_list_is_written(committed):
    commit, hashes = committed
    commit([a_run([WHOLE], hashes)], [])

    assert f"not in the list: {SELECTED}" in gpu_evidence.main(["check"])
    assert gpu_evidence.main(["list"]) == 0
    assert gpu_evidence.main(["check"]) == 0


def test_the_command_fails_where_the_list_is_too_long(committed):
    commit, hashes = committed
    commit([a_run([WHOLE, SELECTED], hashes)], [WHOLE])

    assert f"not stale: {WHOLE}" in gpu_evidence.main(["check"])


def test_what_is_written_is_of_the_code_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_evidence.metadata, "version", lambda name: "1")
    path = tmp_path / "evidence.json"
    gpu_evidence.write(path, {WHOLE: 1.234})
    gpu_evidence.write(path, {SELECTED: 2.0})
    monkeypatch.setattr(gpu_evidence, "FILE", path)

    (run,) = json.loads(path.read_text())["runs"]
    assert run["passed"] == {SELECTED: 2.0, WHOLE: 1.23}
    assert gpu_evidence.stale([SELECTED, WHOLE], [run], gpu_evidence.room_hashes()) == []
