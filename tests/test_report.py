"""`python -m benchmarks.report`: whatever fails, hangs or is missing is named, and the others go on."""

import asyncio
import dataclasses
import errno
import json
import os
import pathlib
import re
import shutil
import signal
import sys
import time

import pytest
from messages import has_form
from test_docs_code import wrong_with

from benchmarks import records
from benchmarks.decode.summary import CSV_HEADER
from benchmarks.report import __main__ as program
from benchmarks.report import comparison, host, page, runner, steps, verdicts
from benchmarks.report.host import Host
from benchmarks.report.steps import Plan, Step

ROOT = pathlib.Path(__file__).resolve().parent.parent
HOST = Host(device="a CPU, 2 cores", platform="cpu", count=1, jax="1", jaxlib="2", triton=None)
GOOD = "python -c pass"
pytestmark = pytest.mark.usefixtures("ctrl_c")


@pytest.fixture(autouse=True)
def _this_machine(monkeypatch):
    monkeypatch.setattr(host, "look", lambda: HOST)
    monkeypatch.delenv(records.COMMIT_VARIABLE, raising=False)


def step(name, *commands, limit_s=60.0, beside=False, **more):
    plan = Plan(limit_s, 1.0, commands, beside)
    plans = {(place, size): plan for place in ("cpu", "gpu") for size in ("quick", "full")}
    return Step(name=name, question="Does it?", plans=plans, **more)


def run(folder, table, *options):
    """The exit status, the page and `report.json`."""
    status = program.main(
        ["--output", str(folder), "--commit", "abc", *options], {each.name: each for each in table}
    )
    folder = folder / "abc"
    return status, (folder / "report.md").read_text(), json.loads((folder / "report.json").read_text())


def statuses(report):
    return {name: result["status"] for name, result in report["results"].items()}


def line_of(name, text):
    return next(line for line in text.splitlines() if line.startswith(f"| {name} |"))


def test_steps_that_pass_give_a_page_and_status_0(tmp_path, capsys):
    status, text, report = run(tmp_path, [step("one", "python -c 'print(\"done\")'"), step("two", GOOD)])

    assert status == 0
    assert report["passed"]
    assert statuses(report) == {"one": "PASS", "two": "PASS"}
    assert "**PASS**: 2 PASS." in text
    assert "Does it?" in text
    assert (tmp_path / "abc" / "one" / "1_python.log").read_text() == "done\n"
    printed = capsys.readouterr()
    assert json.loads(printed.out.splitlines()[-1])["steps"] == {"one": "PASS", "two": "PASS"}
    assert "2 of 2: two\ntwo, about 1 s, at most 60 s\n" in printed.err


def test_a_step_that_fails_is_named_and_the_others_go_on(tmp_path):
    wrong = 'python -c \'import sys; print("all of it"); sys.exit("the kernel is wrong")\''
    status, text, report = run(tmp_path, [step("bad", wrong, GOOD), step("good", GOOD)])

    assert status == 1
    assert statuses(report) == {"bad": "FAIL", "good": "PASS"}
    assert "Failed: bad." in text
    assert "exit status 1: the kernel is wrong" in line_of("bad", text)
    assert "all of it\nthe kernel is wrong" in text
    assert [each["status"] for each in report["results"]["bad"]["ran"]] == [1, 0]


HANGS = """
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(600)
"""


def is_alive(pid):
    stat = pathlib.Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_a_step_that_hangs_is_killed_with_its_children(tmp_path, monkeypatch):
    """Given a program that ignores Ctrl-C and has a child of its own."""
    monkeypatch.setattr(runner, "GRACE_S", 0.2)
    (tmp_path / "hangs.py").write_text(HANGS)
    hang = step("hang", f"python {tmp_path}/hangs.py {tmp_path}/pid", GOOD, limit_s=2.0)

    begin = time.monotonic()
    status, text, report = run(tmp_path, [hang, step("good", GOOD)])

    assert time.monotonic() - begin < 30
    assert status == 1
    assert statuses(report) == {"hang": "FAIL", "good": "PASS"}
    assert "timed out after 2 s" in line_of("hang", text)
    assert "1 of its commands did not run" in line_of("hang", text)
    if pathlib.Path("/proc/self/stat").exists():
        assert not is_alive((tmp_path / "pid").read_text())


def test_a_step_whose_package_is_missing_fails_and_the_others_go_on(tmp_path, capsys):
    table = [step("compare", GOOD, needs={"no_such_package": "torch"}), step("good", GOOD)]

    status, text, report = run(tmp_path / "all", table)

    assert status == 1
    assert statuses(report) == {"compare": "FAIL", "good": "PASS"}
    reason = 'compare needs no_such_package, got no such module. Install it: pip install ".[torch]".'
    assert has_form(reason)
    assert reason in line_of("compare", text)
    assert sum(reason in line for line in capsys.readouterr().err.splitlines()) == 1

    status, _, report = run(tmp_path / "without", table, "--skip", "compare")

    assert status == 0
    assert statuses(report) == {"good": "PASS"}


def test_a_step_for_several_devices_is_skipped_on_one(tmp_path):
    _, text, report = run(tmp_path, [step("good", GOOD), step("spread", GOOD, devices=2)])

    assert statuses(report)["spread"] == "SKIPPED"
    assert "spread needs 2 devices, got 1 (a CPU, 2 cores). Skip it" in line_of("spread", text)


WRONG_SCALE = """
import sys
from nsa_jax.kernels.xla import range_attention
right = range_attention.attend_tile
range_attention.attend_tile = lambda *args: right(*args[:-1], 1.05 * args[-1])
from parity.__main__ import main
sys.exit(main(["--case", "odd_dims", "--output", sys.argv[1]]))
"""


@pytest.mark.slow
def test_a_kernel_with_a_wrong_scale_is_over_its_budget_and_named(tmp_path):
    """Given the real parity, with a planted fault; `-m parity` says whose output it is."""
    pytest.importorskip("torch", reason="parity needs the extra `torch`")
    (tmp_path / "wrong.py").write_text(WRONG_SCALE)
    planted = step("parity", f"python {tmp_path}/wrong.py $OUT/rows.jsonl -m parity", limit_s=300.0)

    status, text, report = run(tmp_path, [planted])

    assert status == 1
    assert statuses(report) == {"parity": "FAIL"}
    assert re.search(r"odd_dims float32 \w+ \w+ is over its budget: error", line_of("parity", text))
    assert "| `slc out` |" in text


@pytest.mark.parametrize(
    ("body", "expected"), [("pytest.skip('no kernel here')", "FAIL"), ("pass", "PASS")], ids=["skips", "runs"]
)
def test_a_run_whose_tests_are_all_skipped_fails(tmp_path, body, expected):
    """Given a pytest that itself calls a run of skips a success."""
    source = f"import pytest\ndef test_kernel(): {body}\ndef test_other(): pytest.skip('no Hopper')\n"
    (tmp_path / "test_kernels.py").write_text(source)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    options = f"-p no:cacheprovider -c {tmp_path}/pytest.ini --junitxml=$OUT/junit.xml"
    tests = step("tests", f"python -m pytest {options} {tmp_path}/test_kernels.py")

    status, text, report = run(tmp_path, [tests])

    assert statuses(report) == {"tests": expected}
    assert status == (expected == "FAIL")
    if expected == "FAIL":
        assert "a test must pass, got none and 2 skipped: no kernel here; no Hopper" in line_of("tests", text)
    else:
        assert "1 passed, 0 failed, 1 skipped" in line_of("tests", text)
    assert "* tests: skipped 1 times: no Hopper" in text


def test_tests_that_fail_are_named(tmp_path):
    (tmp_path / "junit.xml").write_text(
        "<testsuites><testsuite><testcase name='a'/><testcase name='b'><failure message='1 is not 2&#10;at'/>"
        "</testcase><testcase name='c'><error message='no import'/></testcase></testsuite></testsuites>"
    )
    arguments = ["python", "-m", "pytest", f"--junitxml={tmp_path}/junit.xml"]

    problems, said, _ = verdicts.judge(arguments, 1, "1 failed\n")

    assert problems == ["exit status 1: 1 failed", "b failed: 1 is not 2", "c failed: no import"]
    assert said == "1 passed, 2 failed, 0 skipped"


@pytest.mark.parametrize(
    ("module", "status", "log", "expected"),
    [
        ("benchmarks.attention", 0, '{"rows": 3, "red": []}', []),
        ("benchmarks.attention", 0, '{"rows": 0, "red": []}', ["a row must be measured, got none"]),
        ("benchmarks.decode", 1, '{"rows": 0, "red": ["a step"]}', ["the gate is red: a step"]),
        ("benchmarks.decode", 0, "nothing", ["its last line must be JSON, got none"]),
        ("benchmarks.decode", -9, "", ["exit status -9: text"]),
        ("benchmarks.roofline", 0, '{"copy_gb_per_s": 0.0, "matmul_gflop_per_s": 1.0}', ["rates must be"]),
        ("nsa_jax.doctor", 1, '{"ok": false, "problems": ["no plugin"]}', ["no plugin"]),
        ("nsa_jax.doctor", 1, "Traceback\nKeyError: 1", ["exit status 1: KeyError: 1"]),
        ("nsa_jax.doctor", 0, '{"doctor": 1}', ["its results cannot be read: KeyError, 'problems'"]),
        ("parity", 0, '{"quantities": 3, "missed": [], "skipped": {}}', []),
        ("parity", 2, "parity: no torch", ["exit status 2: parity: no torch"]),
    ],
)
def test_what_the_output_of_a_program_says(module, status, log, expected):
    problems, *_ = verdicts.judge(["python", "-m", module], status, f"text\n{log}\n")

    assert len(problems) == len(expected)
    assert all(problem.startswith(start) for problem, start in zip(problems, expected, strict=True))


def test_a_loss_that_does_not_fall_is_a_failure(tmp_path):
    row = dict(steps=2, held_out_bits_per_byte=8.0, bigram_bits_per_byte=3.0, tokens_per_second=5)
    (tmp_path / "result.jsonl").write_text(json.dumps(row) + "\n")
    arguments = ["python", "-m", "examples.train_lm", "--output", str(tmp_path)]
    for last, expected in ((7.0, []), (9.0, ["the loss must fall, got 8.000 and at the end 9.000"])):
        curve = [json.dumps({"bits_per_byte": value}) for value in (8.0, last)]
        (tmp_path / "curve.jsonl").write_text("\n".join(curve))

        assert verdicts.judge(arguments, 0, "")[0] == expected


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_fills_up_ends_in_status_1_with_whole_files(tmp_path, monkeypatch, capsys):
    """Given a disk that is full from the second step on: what was written before it stays readable."""
    right, calls = pathlib.Path.write_text, []

    def fills_up(path, text, **options):
        calls.append(path)
        if len(calls) > 5:  # two files at first, and after the first step
            right(path, text[: len(text) // 2], **options)
            full()
        return right(path, text, **options)

    monkeypatch.setattr(pathlib.Path, "write_text", fills_up)

    status, text, report = run(tmp_path, [step("first", GOOD), step("second", GOOD)])

    assert status == 1
    assert statuses(report) == {"first": "PASS", "second": "NOT RUN"}
    assert "| first | PASS |" in text
    printed = capsys.readouterr()
    assert "the report could not be written (OSError(28, 'No space left on device'))" in printed.err
    assert "| second | PASS |" in printed.out  # the page goes to the terminal instead


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_step_that_finds_the_disk_full_is_named(tmp_path):
    fills = step("fills", 'python -c \'print(1, file=open("/dev/full", "w"), flush=True)\'')

    status, text, _ = run(tmp_path, [fills, step("good", GOOD)])

    assert status == 1
    assert "No space left on device" in line_of("fills", text)
    assert "| good | PASS |" in text


def test_resume_runs_what_is_missing_or_failed(tmp_path):
    """Given a step that failed for want of a file, and one that was not asked for."""
    counts = step("counts", f'python -c \'open("{tmp_path}/count", "a").write("x")\'')
    needs = step("needs", f"python -c 'open(\"{tmp_path}/file\")'")
    table = [counts, needs, step("later", GOOD)]

    first, _, before = run(tmp_path, table, "--steps", "counts", "needs")
    (tmp_path / "file").touch()
    second, text, after = run(tmp_path, table, "--resume")

    assert (first, second) == (1, 0)
    assert statuses(before) == {"counts": "PASS", "needs": "FAIL"}
    assert statuses(after) == {"counts": "PASS", "needs": "PASS", "later": "PASS"}
    assert (tmp_path / "count").read_text() == "x"
    assert before["results"]["counts"] == after["results"]["counts"]
    assert after["seconds"] > before["seconds"]
    assert "**PASS**: 3 PASS." in text


def test_time_that_is_over_leaves_programs_for_resume(tmp_path):
    """Given a step whose first program was done when the time was over: it does not run again.

    Rows of the second one do not stay, because it does.
    """
    slow = f"import os, sys, time; open(sys.argv[1], 'a').write('2'); os.path.exists('{tmp_path}/fast')"
    (tmp_path / "slow.py").write_text(f"{slow} or time.sleep(60)")
    count = 'python -c \'open("$OUT/rows.jsonl", "a").write("1")\''
    again = f"python {tmp_path}/slow.py $OUT/rows.jsonl"
    table = [step("good", GOOD), step("slow", count, again), step("later", GOOD)]

    first, text, before = run(tmp_path, table, "--within", "3")
    (tmp_path / "fast").touch()
    second, _, after = run(tmp_path, table, "--resume", "--within", "100")

    assert (first, second) == (1, 0)
    assert statuses(before) == {"good": "PASS", "slow": "NOT RUN", "later": "NOT RUN"}
    assert "**NOT FINISHED**" in text
    assert "stopped: --within 3 s is over" in line_of("slow", text)
    assert set(statuses(after).values()) == {"PASS"}
    assert (tmp_path / "abc" / "slow" / "rows.jsonl").read_text() == "12"
    assert len(after["results"]["slow"]["ran"]) == 2


def test_a_step_that_does_not_fit_makes_room_for_smaller_ones(tmp_path, capsys):
    """Given a failed step that would take longer than there is: it is not begun, and what it left stays."""
    bad = step("long", "python -c 'import sys; sys.exit(3)'")
    long_plan = dataclasses.replace(next(iter(bad.plans.values())), expected_s=500.0, limit_s=900.0)
    long = dataclasses.replace(bad, plans=dict.fromkeys(bad.plans, long_plan))
    table = [step("first", GOOD), long, step("short", GOOD)]
    run(tmp_path, table, "--steps", "long")

    status, _, report = run(tmp_path, table, "--resume", "--within", "100")

    assert status == 1
    assert statuses(report) == {"long": "FAIL", "first": "PASS", "short": "PASS"}
    assert len(report["results"]["long"]["ran"]) == 1
    assert "no time for long: --within must leave 500 s for its next program, got" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_report_has_what_is_there(number, tmp_path, capsys):
    stops = f"import os, signal, time; os.kill(os.getppid(), {number:d}); time.sleep(60)"
    table = [step("good", GOOD), step("stops", f"python -c '{stops}'"), step("later", GOOD)]

    status, text, report = run(tmp_path, table)

    assert status == 130
    assert statuses(report) == {"good": "PASS", "stops": "NOT RUN", "later": "NOT RUN"}
    assert "stopped: interrupted" in line_of("stops", text)
    assert "not yet" in line_of("later", text)
    assert capsys.readouterr().err.endswith("benchmarks.report: interrupted\n")


MEETS = """
import pathlib, sys, time
here, other, status = sys.argv[1:]
pathlib.Path(here).touch()
begin = time.monotonic()
while not pathlib.Path(other).exists():
    time.sleep(0.01)
    assert time.monotonic() - begin < 30
time.sleep(0.2)
sys.exit(int(status))
"""


def test_steps_beside_one_another_run_at_the_same_time(tmp_path, capsys):
    """Each waits for the other; one fails, and stops neither its neighbour nor the step between."""
    (tmp_path / "meets.py").write_text(MEETS)
    meets = f"python {tmp_path}/meets.py"
    table = [
        step("one", f"{meets} {tmp_path}/one {tmp_path}/two 3", beside=True),
        step("between", GOOD),
        step("two", f"{meets} {tmp_path}/two {tmp_path}/one 0", beside=True),
        step("spread", GOOD, beside=True, devices=2),
    ]

    status, text, report = run(tmp_path, table)

    assert status == 1
    assert statuses(report) == {"one": "FAIL", "two": "PASS", "between": "PASS", "spread": "SKIPPED"}
    results = report["results"]
    assert (results["one"]["beside"], results["two"]["beside"]) == (["two"], ["one"])
    assert results["between"]["beside"] == []
    assert re.search(r"\| \(\d+ s\) \|", line_of("two", text))
    assert "(" not in line_of("between", text)
    assert "A time in brackets: the step shared the machine with others (one, two)." in text
    said = capsys.readouterr().err
    assert said.index("two, about 1 s") < said.index("between, about 1 s")


def test_a_step_that_runs_again_alone_says_so(tmp_path):
    (tmp_path / "meets.py").write_text(MEETS)
    meets = f"python {tmp_path}/meets.py"
    table = [
        step("one", f"{meets} {tmp_path}/one {tmp_path}/two 3", beside=True),
        step("two", f"{meets} {tmp_path}/two {tmp_path}/one 0", beside=True),
    ]
    run(tmp_path, table)
    table[0] = step("one", GOOD, beside=True)

    status, text, report = run(tmp_path, table, "--resume")

    assert status == 0
    assert report["results"]["one"]["beside"] == []
    assert "(" not in line_of("one", text)
    assert "(" in line_of("two", text)


@pytest.mark.parametrize(
    "signals",
    [(signal.SIGTERM, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT), (signal.SIGINT, signal.SIGTERM)],
    ids=["twice_from_outside", "then_ctrl_c", "after_ctrl_c"],
)
def test_a_second_signal_keeps_what_is_there(signals, tmp_path, capfd):
    """The program ignores the first, as one may that is compiling. What ran before it need not run again."""
    kills = "; ".join(f"os.kill(os.getppid(), {each:d}); time.sleep(0.5)" for each in signals)
    ignore = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
    keep = f'open("{tmp_path}/pid", "w").write(str(os.getpid()))'
    (tmp_path / "stops.py").write_text(
        f"import os, signal, time\n{ignore}; {keep}; {kills}; time.sleep(60)\n"
    )

    begin = time.monotonic()
    status, text, report = run(
        tmp_path, [step("stops", GOOD, f"python {tmp_path}/stops.py"), step("later", GOOD)]
    )

    assert time.monotonic() - begin < runner.GRACE_S
    assert status == 130
    assert statuses(report) == {"stops": "NOT RUN", "later": "NOT RUN"}
    assert "stopped: interrupted" in line_of("stops", text)
    assert len(report["results"]["stops"]["ran"]) == 1
    assert not is_alive((tmp_path / "pid").read_text())
    said = capfd.readouterr().err
    assert said.endswith("\nbenchmarks.report: interrupted\n")
    assert "Traceback" not in said
    assert "coroutine" not in said
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_an_interrupt_ends_all_steps_that_run(tmp_path, capsys):
    source = "import os, signal, time; open('{}', 'w').write(str(os.getpid())); {} time.sleep(60)"
    wait = f"while not os.path.exists('{tmp_path}/one'): time.sleep(0.01)"
    kill = f"exec({wait!r}); time.sleep(0.3); os.kill(os.getppid(), signal.SIGINT);"
    (tmp_path / "one.py").write_text(source.format(tmp_path / "one", ""))
    (tmp_path / "two.py").write_text(source.format(tmp_path / "two", kill))
    table = [step(name, f"python {tmp_path}/{name}.py", beside=True) for name in ("one", "two")]

    begin = time.monotonic()
    status, text, report = run(tmp_path, [*table, step("later", GOOD)])

    assert time.monotonic() - begin < 30
    assert status == 130
    assert set(statuses(report).values()) == {"NOT RUN"}
    assert all("stopped: interrupted" in line_of(name, text) for name in ("one", "two"))
    assert not any(is_alive((tmp_path / name).read_text()) for name in ("one", "two"))


def refusal(capsys, *arguments):
    """The only line that bad input gives."""
    capsys.readouterr()
    table = {"good": step("good", GOOD)}
    assert program.main([*map(str, arguments)], table) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert has_form(line), line
    return line


def test_resume_refuses_what_is_of_another_commit_size_or_device(tmp_path, monkeypatch, capsys):
    run(tmp_path, [step("good", GOOD)])
    before = (tmp_path / "abc" / "report.json").read_bytes()
    same = ("--output", tmp_path, "--resume")

    line = refusal(capsys, *same, "--commit", "def")
    assert "--resume must find a report of commit def in --output, got ['abc']" in line
    assert "'quick': True" in refusal(capsys, *same, "--commit", "abc", "--quick")
    monkeypatch.setattr(host, "look", lambda: dataclasses.replace(HOST, device="NVIDIA H200"))
    assert "'device': 'NVIDIA H200'" in refusal(capsys, *same, "--commit", "abc")
    shutil.copytree(tmp_path / "abc", tmp_path / "def")
    assert "'commit': 'def'" in refusal(capsys, *same, "--commit", "def")

    assert (tmp_path / "abc" / "report.json").read_bytes() == before


def test_bad_input_is_one_line_and_loses_nothing(tmp_path, capsys):
    run(tmp_path, [step("good", GOOD)])
    (tmp_path / "file").touch()

    assert "steps must be of good, got bad." in refusal(capsys, "--steps", "bad", "--output", tmp_path)
    assert "got bad." in refusal(capsys, "--skip", "bad", "--output", tmp_path)
    assert "must not hold a report" in refusal(capsys, "--output", tmp_path, "--commit", "abc")
    assert "that can be made and written" in refusal(capsys, "--output", tmp_path / "file" / "x")
    assert "--commit must be letters" in refusal(capsys, "--output", tmp_path, "--commit", "../x")
    skip_all = "--steps", "good", "--skip", "good"
    assert "--skip must leave a step, got" in refusal(capsys, *skip_all, "--output", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    for text in ("{", "[1]", '{"results": []}', '{"identity": 3, "host": {}, "started": "", "results": {}}'):
        (tmp_path / "abc" / "report.json").write_text(text)
        resume = "--output", tmp_path, "--commit", "abc", "--resume"
        assert "must find a report, got" in refusal(capsys, *resume), text


@pytest.mark.parametrize("what", ["read", "write"])
def test_a_folder_that_is_not_ours_is_one_line(what, tmp_path, monkeypatch, capsys):
    """Given a report of somebody else, whose folder nobody else may open, or change."""

    def forbidden(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    run(tmp_path, [step("good", GOOD)])
    if what == "read":
        monkeypatch.setattr(pathlib.Path, "exists", forbidden)
    else:
        monkeypatch.setattr(pathlib.Path, "write_text", forbidden)

    named = "--output", tmp_path, "--commit"
    for arguments in ((*named, "new"), (*named, "abc", "--resume")):
        line = refusal(capsys, *arguments)
        assert "--output must be a folder that can be made and written, got" in line
        assert "(Permission denied)" in line


def test_a_step_that_is_named_twice_runs_once(tmp_path):
    count = step("counts", f'python -c \'open("{tmp_path}/count", "a").write("x")\'')

    run(tmp_path, [count], "--steps", "counts", "counts")

    assert (tmp_path / "count").read_text() == "x"


def test_without_git_the_folder_says_so(tmp_path, monkeypatch, capsys):
    def no_git(*_, **__):
        raise FileNotFoundError("git")

    monkeypatch.setattr(records.subprocess, "run", no_git)

    assert program.main(["--output", str(tmp_path)], {"good": step("good", GOOD)}) == 0

    assert (tmp_path / "unknown-commit" / "report.md").exists()
    assert "git says nothing about this folder" in capsys.readouterr().err


def test_programs_know_the_commit_that_was_given(tmp_path):
    tell = "python -c 'from benchmarks import records; print(records.commit())'"

    run(tmp_path, [step("tell", tell)])

    assert (tmp_path / "abc" / "tell" / "1_python.log").read_text() == "abc\n"


def test_a_page_has_no_paths_of_the_machine(tmp_path):
    code = "import sys; print(sys.prefix, sys.argv); sys.exit(sys.argv[1])"
    home = pathlib.Path.home()
    tell = step("tell", f"python -c '{code}' $OUT/x {ROOT}/parity {home}/notes")

    _, text, report = run(tmp_path, [tell])

    shown = [text.replace(f"{ROOT}/parity", "").replace(f"{home}/notes", ""), json.dumps(report["results"])]
    assert "report/tell/x" in text
    for path in (tmp_path, ROOT, sys.prefix):
        assert str(path) not in text, path
        assert str(path) not in shown[1], path


def test_a_page_that_cannot_be_made_costs_no_step(tmp_path, monkeypatch):
    def broken(*_):
        raise AttributeError("no such fact")

    monkeypatch.setattr(page, "render", broken)
    table = {"good": step("good", GOOD), "next": step("next", GOOD)}
    with pytest.raises(AttributeError):  # at the end, when it is to be printed
        program.main(["--output", str(tmp_path), "--commit", "abc"], table)

    report = json.loads((tmp_path / "abc" / "report.json").read_text())
    assert statuses(report) == {"good": "PASS", "next": "PASS"}


DECODED = records.read(ROOT / "benchmarks" / "results" / "h200_decode_b8.jsonl")
NSA = "native_sparse_attention"
ROWS = [row for row in DECODED if row.mode == "decode_loop"]


def changed(row, **new):
    return records.Row(**{**row, **new})


def test_rows_are_compared_with_the_nearest_device():
    here = changed(ROWS[0], device="NVIDIA H200 NVL", median_ms=2 * ROWS[0].median_ms)
    far = changed(ROWS[0], device="NVIDIA A100", median_ms=1.0)
    old = changed(ROWS[0], run_id="2020", median_ms=1.0)
    cpu = changed(ROWS[0], device="Intel, 2 cores", median_ms=1.0)

    (pair,) = comparison.pairs([here], [far, *ROWS, old, cpu])

    assert pair == (here, ROWS[0])
    assert comparison.ratio(*pair) == 2
    assert "1 of the 1 measurements" in comparison.summary([pair])


def test_rows_without_a_committed_one_say_so():
    other = changed(ROWS[0], batch=7)
    cpu = changed(ROWS[0], device="Intel, 2 cores")

    found = comparison.pairs([other, cpu], ROWS)

    assert [committed for _, committed in found] == [None, None]
    assert comparison.summary(found) == "The repository has none of the 2 measurements of this machine."


def test_decode_steps_are_compared_in_one_setting():
    here = changed(ROWS[0], mode="decode")

    for name, other in (("num_layers", 7), ("new_tokens", 2), ("compression", "mlp")):
        assert comparison.pairs([here], [changed(here, **{name: other})]) == [(here, None)]


def test_every_committed_row_is_found_by_its_own_setting():
    rows = comparison.committed_rows()

    assert all(committed is not None for _, committed in comparison.pairs(rows, rows))


def test_a_step_on_one_kind_of_cache_is_not_compared_with_another():
    rows = [row for row in comparison.committed_rows() if row.benchmark == "decode" and row.operation == NSA]

    for row, committed in comparison.pairs(rows, rows):
        assert committed.cache_dtype == row.cache_dtype
    assert {row.cache_dtype for row in rows} >= {None, "int8"}


def test_a_step_has_its_tables_and_its_ratios_on_the_page(tmp_path):
    lines = "\n".join(json.dumps(row) for row in ROWS)
    (tmp_path / "rows.jsonl").write_text(f"{lines}\n{lines[:80]}")  # the disk was full
    copies = f'import shutil, sys; shutil.copy("{tmp_path}/rows.jsonl", sys.argv[1])'

    _, text, _ = run(tmp_path, [step("decode", f"python -c '{copies}' $OUT")])

    assert f"The repository has {len(ROWS)} of the {len(ROWS)} measurements" in text
    assert "median **1.00**, from 1.00 to 1.00" in text
    assert "NVIDIA H200; bfloat16, batch 8" in text


def test_full_limits_on_one_gpu_are_forty_minutes():
    table = steps.load()
    one_gpu = [each for each in table.values() if each.devices == 1]

    assert sum(each.plans["gpu", "full"].limit_s for each in one_gpu) <= 40 * 60
    quick = [each.plans["gpu", "quick"] for each in one_gpu]
    beside = max(plan.expected_s for plan in quick if plan.beside)
    assert beside + sum(plan.expected_s for plan in quick if not plan.beside) <= 5 * 60
    assert sum(each.plans["cpu", "quick"].expected_s for each in one_gpu) <= 10 * 60


def test_every_step_has_four_plans_whose_commands_are_those_of_the_repository():
    pattern = (
        r"(XLA_PYTHON_CLIENT_(ALLOCATOR=platform|PREALLOCATE=false) )?python -m "
        r"(pytest|parity|benchmarks|examples|nsa_jax)\b"
    )
    for each in steps.load().values():
        assert sorted(each.plans) == [(x, y) for x in ("cpu", "gpu") for y in ("full", "quick")]
        for plan in each.plans.values():
            assert 0 < plan.expected_s < plan.limit_s
            assert all(re.match(pattern, command) for command in plan.commands)


def test_every_command_of_the_steps_takes_its_options(monkeypatch, tmp_path):
    """Those of a GPU, too, which no machine of ours runs on every change."""
    pytest.importorskip("optax", reason="the training needs the extra `train`")
    for each in steps.load().values():
        for plan in each.plans.values():
            for command in plan.commands:
                arguments = steps.spelled(command, tmp_path)[1]
                assert wrong_with(arguments, monkeypatch) is None, command


def test_a_second_interrupt_leaves_nothing_behind(monkeypatch, tmp_path):
    """The program ignores Ctrl-C, as one may that is compiling; the second one comes while we wait for it."""
    started = tmp_path / "pid"
    stubborn = (
        "import os, pathlib, signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        f"pathlib.Path({str(started)!r}).write_text(str(os.getpid())); time.sleep(60)"
    )

    def interrupt(*_):
        os.kill(os.getpid(), signal.SIGINT)

    def interrupt_twice(_):
        if started.exists() and started.read_text():
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            interrupt()

    monkeypatch.setattr(runner, "BEAT_S", 0.05)
    before = signal.signal(signal.SIGALRM, interrupt)
    begin = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(
                runner.run([sys.executable, "-c", stubborn], tmp_path / "log", 30, {}, interrupt_twice)
            )
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

    assert time.monotonic() - begin < runner.GRACE_S
    assert not is_alive(started.read_text())


def test_a_command_is_spelled_as_a_shell_does(tmp_path):
    variables, words = steps.spelled("A=1 B=2 python -m x 'a or b' --y=$OUT/z tests/test_gpu_g*.py", tmp_path)

    assert variables == {"A": "1", "B": "2"}
    assert words[:5] == ["python", "-m", "x", "a or b", f"--y={tmp_path}/z"]
    assert words[5:] == ["tests/test_gpu_gate.py", "tests/test_gpu_generate.py"]


def test_the_machine_is_seen_by_a_process_of_its_own(monkeypatch):
    monkeypatch.undo()

    seen = host.look()

    assert seen.platform == "cpu"
    assert seen.device == records.device()


# Instead of decode steps: one operation at one short length, and a quick look at the ceiling. What the doctor
# really says is judged in test_doctor, what decode steps and the ceiling say in test_benchmarks, and what
# parity says above.
QUICK_CEILING = """
import functools, sys
from benchmarks import attention, roofline
roofline.measure_ceiling = functools.partial(roofline.measure_ceiling, matmul_size=64, copy_bytes=1 << 16)
sys.exit(attention.main(sys.argv[3:]))
"""
SHORT = (
    "python {folder}/quick.py -m benchmarks.attention --lengths 64:fwd --operations dense_attention "
    "--heads 1 --key-dim 8 --value-dim 8 --budget-s 0.01 --output $OUT/rows.jsonl",
    "python -m benchmarks.decode.summary {folder}/steps.csv --output $OUT/steps.png",
)


@pytest.mark.slow
def test_a_short_run_of_a_real_step_passes(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="the summary of decode steps needs the extra `bench`")
    monkeypatch.undo()
    (tmp_path / "quick.py").write_text(QUICK_CEILING)
    (tmp_path / "steps.csv").write_text(f"{','.join(CSV_HEADER)}\n90,2.0,1.0,0.5,0.1,1,1,1,1\n")
    decode, short = steps.load()["decode"], [x.replace("{folder}", str(tmp_path)) for x in SHORT]
    plans = dict.fromkeys(decode.plans, Plan(300.0, 30.0, short))

    status, text, report = run(tmp_path, [dataclasses.replace(decode, plans=plans)], "--quick")

    assert statuses(report) == {"decode": "PASS"}, text
    assert status == 0
    assert "![steps](decode/steps.png)" in text
    assert "reads(dec)" in text
    assert "| `dense_attention` | xla | 64 | fwd |" in text
    assert (tmp_path / "abc" / "decode" / "steps.png").exists()
