"""`python -m nsa_jax.doctor` passes a machine that works, and names what does not work."""

import functools
import inspect
import json
import math
import re
import subprocess
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest
from messages import has_form, refused

from benchmarks.report import verdicts
from nsa_jax import budget, dispatch, reference
from nsa_jax.doctor import __main__ as doctor
from nsa_jax.doctor import checks, choices, machine, operations, steps, targets, text, versions
from nsa_jax.doctor.subject import Subject
from nsa_jax.kernels import chip, xla
from nsa_jax.kernels.triton import gpu, support

KEYS = ["doctor", "ok", "problems", "host", "gpus", "versions", "choices", "checks", "seconds"]
H100 = {
    "name": "NVIDIA H100 PCIe",
    "capability": "9.0",
    "memory_bytes": 80 * 2**30,
    "driver": "580.65.06",
    "power_limit_w": 350.0,
}
# Runs the command in a process in which what the library does not need cannot be imported.
BARE = """
import runpy, sys
import tests.fewer_collections
sys.modules.update(dict.fromkeys(("torch", "optax", "pytest", "matplotlib", "jax_triton", "triton")))
sys.argv = ["doctor"]
runpy.run_module("nsa_jax.doctor", run_name="__main__")
"""


def last_line(printed: str) -> dict:
    """The report. `NaN` and `Infinity` are no JSON, though Python reads them."""
    return json.loads(printed.splitlines()[-1], parse_constant=pytest.fail)


@pytest.fixture
def examine(monkeypatch, capsys):
    """Runs the command in this process; `only` names the operations to check."""

    def run(*arguments, only=()):
        monkeypatch.setattr(doctor, "checks", functools.partial(checks.checks, only=only))
        monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        code = doctor.main(list(arguments))
        return code, last_line(capsys.readouterr().out)

    return run


def test_a_reader_that_has_enough_ends_the_command_quietly():
    command = f"{sys.executable} -m nsa_jax.doctor | head -n 1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=300)

    assert "cores " in done.stdout
    assert done.stderr == ""


@pytest.mark.slow
def test_a_machine_without_gpu_torch_and_extras_is_well():
    done = subprocess.run([sys.executable, "-c", BARE], capture_output=True, text=True, timeout=300)

    assert done.returncode == 0, done.stdout + done.stderr
    report = last_line(done.stdout)
    assert list(report) == KEYS
    checks = f"{len(report['checks'])} checks of operations"
    assert verdicts.judge(["python", "-m", "nsa_jax.doctor"], 0, done.stdout)[:2] == ([], checks)
    assert report["doctor"] == 1
    assert report["ok"]
    assert report["problems"] == []
    assert {check["operation"] for check in report["checks"]} == set(dispatch.OPERATIONS)
    assert all(0 <= check["error"] <= check["budget"] for check in report["checks"])
    gradients = [check for check in report["checks"] if check["quantity"].startswith("d_")]
    assert {check["operation"] for check in gradients} == set(dispatch.OPERATIONS) - {
        *("select_blocks", "select_by_index", "top_blocks", "block_probabilities", "selected_probabilities"),
        *("decode_step", "dense_decode_step"),
    }
    (outcome,) = report["choices"]
    assert outcome["implementation"] == "xla"
    assert outcome["operations"] == list(dispatch.OPERATIONS)


def planted(operation, monkeypatch, change):
    """Puts a fault into an operation of `xla`: `change(function, arguments)` runs instead of the function."""
    function = getattr(xla, operation)
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrong(*arguments, **more):
        return change(function, signature.bind(*arguments, **more).arguments)

    monkeypatch.setattr(xla, operation, wrong)


PLAIN = {*support.WITHOUT_KERNELS}  # operations that every platform runs as xla
SCALED = ("compressed_attention", "selected_attention", "window_attention", "decode_step")


@pytest.mark.parametrize("operation", SCALED)
def test_a_wrong_scale_is_named(operation, monkeypatch, examine):
    planted(operation, monkeypatch, lambda run, given: run(**{**given, "scale": 1.01 * given["scale"]}))

    code, report = examine("--json", only=(operation,))

    assert code == 1
    (problem,) = report["problems"]
    assert problem.startswith(f"{operation} as xla in float32 must agree with the reference")
    assert has_form(problem)
    wrong = {check["quantity"] for check in report["checks"] if not check["ok"]}
    assert "out" in wrong
    assert operation == "decode_step" or "lse" in wrong


def fails_with(error):
    def fail(*_, **__):
        raise error

    return fail


BEYOND = "must agree with the reference within .* in"
FAULTS = {  # operation, what it does instead, what is told
    "nan": ("gated_sum", lambda run, x: run(**x).at[0, 0, 0, 0].set(jnp.nan), f"{BEYOND} out, got inf "),
    "cut": ("gated_sum", lambda run, x: run(**{k: v[:, :1] for k, v in x.items()}), "must run here, got V"),
    "error": ("gated_sum", fails_with(MemoryError("no room")), "must run here, got MemoryError: no room"),
    "other": (
        "select_blocks",
        lambda run, x: run(**x | dict(query=-x["query"])),
        f"{BEYOND} scores, got [0-9.]+e",
    ),
    "descending": ("select_blocks", lambda run, x: run(**x)[..., ::-1], f"{BEYOND} scores, got inf "),
}


@pytest.mark.parametrize(("operation", "change", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_is_named(operation, change, message, monkeypatch, examine):
    planted(operation, monkeypatch, change)

    code, report = examine("--json", only=(operation,))

    assert code == 1
    (problem,) = report["problems"]
    assert re.match(f"{operation} as xla in float32 {message}", problem), problem
    assert has_form(problem)
    assert not all(check["ok"] for check in report["checks"])


@pytest.mark.parametrize(
    ("errors", "why", "line"),
    [
        (dict(out=(1e-6, 4e-6), lse=(0.0, 1e-6)), "", "  ok   .* 1.5 s  25% of the budget \\(out\\)"),
        (dict(out=(math.inf, math.nan)), "MemoryError: no room", "  FAIL .* 1.5 s  raised"),
    ],
    ids=["right", "raised"],
)
def test_a_line_says_what_a_check_found(errors, why, line):
    run = checks.Run("gated_sum", "xla", "float32", 1.5, errors, why)

    assert re.fullmatch(line, str(run))


def test_an_oracle_that_is_not_finite_proves_nothing(monkeypatch, examine):
    right = reference.gated_sum
    monkeypatch.setattr(reference, "gated_sum", lambda *arrays: jnp.nan * right(*arrays))

    code, report = examine("--json", only=("gated_sum",))

    assert code == 1
    (problem,) = report["problems"]
    assert problem.startswith("gated_sum as xla in float32 must agree with the reference within inf in ")
    assert has_form(problem)
    assert {(check["budget"], check["ok"]) for check in report["checks"]} == {(None, False)}


FITS = {
    "nsa_jax": "0.2.0", "jax": "0.11.2", "jaxlib": "0.11.2", "jax-cuda13-plugin": "0.11.2",
    "jax-cuda13-pjrt": "0.11.2", "jax-triton": "0.4.1", "triton": "3.8.0", "flax": "0.12.12",
    "numpy": "2.5.0", "torch": None,
}  # fmt: skip
ASK = {
    "nsa_jax": ["flax>=0.12.10", "jax>=0.11.1", "numpy>=2.1", "torch>=2.11; extra == 'torch'"],
    "jax": ["jaxlib<=0.11.2,>=0.11.2", 'jax-cuda13-plugin==0.11.2; extra == "cuda13"', "scipy>=1.15"],
}


@pytest.fixture
def packages(monkeypatch):
    """The packages `FITS`, on a machine whose Triton kernels can run; JAX may use every platform."""
    monkeypatch.setattr(versions, "_requirements", lambda package: ASK.get(package, []))
    monkeypatch.setattr(versions, "_version", FITS.get)
    monkeypatch.setattr(versions.nsa_jax, "unsupported_reason", lambda *_, **__: None)
    platforms = types.SimpleNamespace(jax_platforms=None)
    monkeypatch.setattr(versions, "jax", types.SimpleNamespace(config=platforms))
    return platforms


CPU_ONLY = dict.fromkeys(("jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-triton", "triton"))


@pytest.mark.parametrize(
    ("other", "gpus", "seen"),
    [
        ({}, [], []),
        (CPU_ONLY, [], []),
        ({"jax-cuda13-plugin": "0.11.1", "triton": "3.9.0"}, [], []),  # not used without a GPU
        ({}, [H100], [H100]),
        ({"torch": "2.14.1"}, [H100], [H100]),
        ({}, [{**H100, "capability": "7.5"}], [{**H100, "capability": "7.5"}]),  # xla runs there
    ],
)
def test_versions_that_fit_are_no_problem(packages, other, gpus, seen):
    assert versions.problems(FITS | other, gpus, seen) == []


OF_JAXLIB = f"jax-cuda13-plugin must be ==0.11.2 ({versions.OF_JAXLIB})"
OF_KERNELS = {name: f"{name} must be {bounds} ({why})" for name, (bounds, why) in support.VERSIONS.items()}


@pytest.mark.parametrize(
    ("package", "found", "rule"),
    [
        ("flax", None, "flax must be >=0.12.10 (nsa_jax 0.2.0 needs it)"),
        ("jax", "0.10.1", "jax must be >=0.11.1 (nsa_jax 0.2.0 needs it)"),
        ("jaxlib", "0.11.1", "jaxlib must be <=0.11.2,>=0.11.2 (jax 0.11.2 needs it)"),
        ("jax-cuda13-plugin", None, OF_JAXLIB),
        ("jax-cuda13-plugin", "0.11.1", OF_JAXLIB),
        ("triton", "3.9.0", OF_KERNELS["triton"]),
        ("jax-triton", None, OF_KERNELS["jax-triton"]),
    ],
)
def test_versions_that_do_not_fit_come_with_the_command_that_mends_them(packages, package, found, rule):
    gpus = [H100] if "triton" in package or "plugin" in package else []

    (problem,) = versions.problems(FITS | {package: found}, gpus, gpus)

    remedy = 'Run pip install "nsa_jax[cuda13]".' if gpus else "Run pip install nsa_jax."
    assert problem == f"{rule}, got {found or 'none installed'}. {remedy}"
    assert has_form(problem)


def test_a_driver_that_is_too_old(packages):
    old = [{**H100, "driver": "570.86"}]

    (problem,) = versions.problems(FITS, old, old)

    assert problem == "the NVIDIA driver must be 580 or newer, for CUDA 13, got 570.86. Install a newer one."
    assert has_form(problem)


def test_a_clone_that_is_not_installed_is_installed_from_its_root(packages, monkeypatch):
    monkeypatch.setattr(versions, "_version", lambda _: None)

    assert versions.install_command(gpu=True) == 'pip install ".[cuda13]" in the root of the clone'


def test_a_gpu_that_jax_does_not_see_is_a_problem_unless_jax_was_told_so(packages):
    (problem,) = versions.problems(FITS, [H100], [])
    assert problem.startswith(
        "JAX must see the NVIDIA H100 PCIe, got none. Run JAX_PLATFORMS=cuda python -c "
    )
    assert 'pip install "nsa_jax[cuda13]"' in problem

    packages.jax_platforms = "cpu"
    assert versions.problems(FITS | CPU_ONLY, [H100], []) == []
    packages.jax_platforms = "cuda,cpu"
    assert versions.problems(FITS, [H100], []) == [problem]


REASON = "the Triton kernels need jax-triton, got an error. Install it."


def test_kernels_that_refuse_a_gpu_that_they_support_are_a_problem(packages, monkeypatch):
    monkeypatch.setattr(versions.nsa_jax, "unsupported_reason", lambda *_, **__: REASON)

    assert versions.problems(FITS, [H100], [H100]) == [REASON]


def test_a_missing_package_makes_the_command_fail(monkeypatch, examine):
    found = versions._version
    monkeypatch.setattr(versions, "_version", lambda name: None if name == "flax" else found(name))

    code, report = examine("--json")

    assert code == 1
    assert report["versions"]["flax"] is None
    (problem,) = report["problems"]
    assert problem.startswith("flax must be >=")


@pytest.fixture
def a_gpu(monkeypatch):
    """`choose` decides as on a GPU of this compute capability, with all packages."""

    def of(capability):
        monkeypatch.setattr(dispatch, "default_platform", lambda: "cuda")
        monkeypatch.setattr(support, "_installation", lambda: None)
        monkeypatch.setattr(chip, "capability", lambda: capability)
        monkeypatch.setattr(gpu, "capability", lambda: capability)
        monkeypatch.setattr("nsa_jax.kernels.mosaic_gpu.support._jaxlib", lambda: "0.11.2")

    return of


def test_choices_on_hopper(a_gpu):
    a_gpu((9, 0))

    outcomes = choices.choices()

    found = {
        (operation, sizes, dtype): outcome.implementation
        for outcome in outcomes
        for operation in outcome.operations
        for sizes in outcome.sizes
        for dtype in outcome.dtypes
    }
    every = [str(sizes) for sizes in choices.SIZES]
    assert len(found) == len(dispatch.OPERATIONS) * len(every) * len(choices.DTYPES)
    selected = ("selected_attention", "native_sparse_attention")
    assert {case for case, name in found.items() if name == "mosaic_gpu"} == {
        (operation, sizes, dtype)
        for operation in selected
        for sizes in every[:2]
        for dtype in ("bfloat16", "float16")
    }
    assert {operation for (operation, *_), name in found.items() if name == "xla"} == PLAIN
    assert set(found.values()) == {"mosaic_gpu", "triton", "xla"}
    assert len(outcomes) <= 9
    lines = list(text.choices(outcomes))
    assert any("no faster with fewer than 15 query heads" in line for line in lines)


def test_choices_on_an_ampere_gpu(a_gpu):
    a_gpu((8, 0))

    found = {name: outcome.implementation for outcome in choices.choices() for name in outcome.operations}

    assert {name for name, implementation in found.items() if implementation == "xla"} == PLAIN
    assert set(found.values()) == {"triton", "xla"}


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_every_implementation_is_checked_where_it_can_run(capability, a_gpu, monkeypatch):
    a_gpu(capability)
    for module in (operations, steps, targets):  # no oracle is computed
        monkeypatch.setattr(module, "Subject", lambda *what: Subject(*what[:-1], dict))
    monkeypatch.setattr(checks, "_check", lambda subject, name, *_: (subject.operation, name))

    ran = list(checks.checks(["bfloat16"]))

    every = {(operation, name) for operation in dispatch.OPERATIONS for name in ("xla", "triton")}
    every -= {(operation, "triton") for operation in PLAIN}
    hopper = {(name, "mosaic_gpu") for name in ("selected_attention", "native_sparse_attention")}
    assert set(ran) == (every | hopper if capability == (9, 0) else every)
    assert len(ran) == len(set(ran))


@pytest.mark.parametrize(
    ("module", "function", "error", "left"),
    [
        (doctor, "choices", ValueError("an outcome\nof two lines"), ["host", "versions", "checks"]),
        (doctor, "default_platform", RuntimeError("no backend 'cuda'"), ["host", "versions"]),
        (versions, "problems", KeyError("jax"), ["host", "versions", "choices", "checks"]),
        (doctor, "choices", KeyboardInterrupt(), ["host", "versions"]),
    ],
    ids=["choices", "JAX does not start", "versions", "Ctrl-C"],
)
def test_the_report_comes_last_whatever_is_raised(module, function, error, left, monkeypatch, examine):
    monkeypatch.setattr(module, function, fails_with(error))

    code, report = examine(only=("top_blocks",))

    interrupted = isinstance(error, KeyboardInterrupt)
    assert code == (130 if interrupted else 1)
    assert list(report) == KEYS
    (problem,) = report["problems"]
    assert type(error).__name__ in problem
    assert problem.endswith("Run it again.") == interrupted
    assert has_form(problem)
    assert [part for part in KEYS[3:8] if report[part]] == left


@pytest.mark.parametrize(
    ("told", "start", "remedy"),
    [("cuda", "the start of JAX on 'cuda'", "Name other platforms"), (None, "the start of JAX", "Report it")],
)
def test_platforms_that_are_not_there_are_the_users_to_change(told, start, remedy, monkeypatch, examine):
    monkeypatch.setattr(doctor, "default_platform", fails_with(AssertionError()))
    monkeypatch.setattr(versions, "platforms_of_user", lambda: told)

    code, report = examine("--json")

    assert code == 1
    assert report["problems"][0].startswith(f"{start} must go to its end, got AssertionError. {remedy}")
    assert has_form(report["problems"][0])


def test_json_prints_one_line_and_the_dtypes_that_are_asked_for(examine, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "checks", functools.partial(checks.checks, only=("top_blocks",)))

    assert doctor.main(["--json", "--dtype=float16", "--dtype=bfloat16", "--seed=3"]) == 0

    (line,) = capsys.readouterr().out.splitlines()
    assert {check["dtype"] for check in last_line(line)["checks"]} == {"float16", "bfloat16"}


def test_gpu_memory_is_not_taken_in_advance_unless_the_user_says_so(examine, monkeypatch):
    import os

    for value, expected in ((None, "false"), ("true", "true")):
        with monkeypatch.context() as patch:
            patch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
            if value:
                patch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", value)
            patch.setattr(doctor, "examine", lambda *_: None)
            doctor.main(["--json"])
            assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == expected


SAID = {
    "one": ("NVIDIA H100 PCIe, 9.0, 81559, 580.65.06, 350.00", 0, 1),
    "two": ("NVIDIA L4, 8.9, 23034, 580.1, 72.00\nNVIDIA L4, 8.9, 23034, 580.1, 72.00", 0, 2),
    "shared memory": ("NVIDIA GB10, 12.1, [N/A], 580.95.05, [N/A]", 0, 1),
    "none": ("No devices were found", 6, 0),
}


@pytest.mark.parametrize("case", SAID)
def test_gpus_are_those_of_nvidia_smi(case, monkeypatch, tmp_path):
    said, code, number = SAID[case]
    nvidia_smi(tmp_path, monkeypatch, said, code)

    found = machine.gpus()

    assert len(found) == number
    assert all(gpu["capability"] in ("9.0", "8.9", "12.1") for gpu in found)
    assert all(gpu["driver"].startswith("580.") for gpu in found)
    if case == "one":
        assert found[0] == H100 | {"memory_bytes": 81559 * 2**20}


@pytest.mark.parametrize("code", [0, 18])
def test_a_broken_nvidia_smi_is_a_problem(code, monkeypatch, tmp_path, examine):
    nvidia_smi(tmp_path, monkeypatch, "Failed to initialize NVML: Driver/library version mismatch", code)

    status, report = examine("--json")

    assert status == 1
    (problem,) = report["problems"]
    assert "nvidia-smi must list the GPUs" in problem
    assert "Driver/library version mismatch" in problem


def test_what_nvidia_smi_does_not_know_is_no_problem(monkeypatch, tmp_path):
    nvidia_smi(tmp_path, monkeypatch, "NVIDIA L4, 8.9, 23034, [N/A], N/A", 0)

    (found,) = machine.gpus()

    assert found["power_limit_w"] is None
    assert versions._driver([found]) == []


def test_no_nvidia_smi_is_no_problem(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))

    assert machine.gpus() == []


def nvidia_smi(folder, monkeypatch, said, code):
    """Puts a program of that name on the path, which says this."""
    (folder / "said").write_text(said)
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n/bin/cat {folder}/said\nexit {code}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_results_of_two_shapes_have_no_budget():
    with refused(ValueError, r"one shape, got \(2,\) and \(3,\)"):
        budget.allowance(np.zeros(2), np.zeros(3), 1e-3)
    assert budget.distance(np.zeros(2), np.zeros(3)) == np.inf
