"""Rules for every test: GPU tests need a GPU, a run that asks for them must run one, float64 stays local.

Tests that want float64 use `with jax.enable_x64(True):`. It is never switched on globally, because the same
test would then mean something else when it runs alone.
"""

import os
import pathlib
import re
import signal
import sys

import pytest

_OPTIMISE_LITTLE = "--xla_backend_optimization_level=0"
_ROOMS = pytest.StashKey[dict[str, str]]()  # of a run with --evidence: hashes of the code that it tests


def pytest_configure(config):
    """Makes XLA compile faster, since that is what tests on a CPU spend most of their time on.

    Only the last step, from LLVM code to machine code, optimises less. Fusion and buffers stay those that
    users get, so the tests of memory still hold. The optimised code is tested by `python -m parity`, by the
    gate of the benchmarks, and by GPU tests, which do not get the flag. JAX also tells XLA no line of code
    for each operation, which saves a tenth of the time.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if not _asks_for_gpu(config) and "xla_backend_optimization_level" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_OPTIMISE_LITTLE}".strip()
        os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")


def pytest_addoption(parser):
    parser.addoption(
        "--evidence",
        type=pathlib.Path,
        metavar="FILE",
        help="with -m gpu: add the GPU tests that passed, and those that failed, to this JSON",
    )


def pytest_sessionstart(session):
    """Evidence is of the code as it is before the first test. Under pytest-xdist the controller writes it."""
    evidence = session.config.getoption("--evidence", None)
    if evidence is not None and not hasattr(session.config, "workerinput"):
        import gpu_evidence

        try:
            session.config.stash[_ROOMS] = gpu_evidence.rooms_at_start()
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None


def pytest_collection_modifyitems(items):
    """Slow tests first: one that began last would run while the other workers have nothing left to do."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture
def ctrl_c():
    """Ctrl-C raises KeyboardInterrupt. A shell starts what runs in the background with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not _has_gpu():
        pytest.skip("JAX sees no GPU")


@pytest.fixture(autouse=True)
def _float64_stays_local():
    yield
    jax = sys.modules.get("jax")
    assert jax is None or not jax.config.jax_enable_x64, "the test left jax_enable_x64 on for those after it"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session, exitstatus):
    """Writes the evidence, and fails a run that asked for GPU tests and ran none: pytest calls it a success.

    The evidence comes first: a run that is cut off may not live through the end of its workers.
    """
    if _ROOMS in session.config.stash:
        import gpu_evidence

        terminal = session.config.pluginmanager.get_plugin("terminalreporter")
        passed, failed, wrong = (terminal.stats.get(key, []) for key in ("passed", "failed", "error"))
        refusal = gpu_evidence.write(
            session.config.getoption("--evidence"),
            session.config.stash[_ROOMS],
            {report.nodeid: report.duration for report in passed},
            [report.nodeid for report in (*failed, *wrong)],
        )
        if refusal is not None:
            terminal.write_line(f"\n{refusal}", red=True)
    result = yield
    if exitstatus == pytest.ExitCode.OK and _lacks_gpu_tests(session.config):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
    return result


def pytest_terminal_summary(terminalreporter, config):
    if _lacks_gpu_tests(config):
        terminalreporter.write_line("A run with -m gpu must pass a GPU test, and none did.", red=True)


def _has_gpu() -> bool:
    import jax

    return any(device.platform == "gpu" for device in jax.local_devices())


def _lacks_gpu_tests(config) -> bool:
    if hasattr(config, "workerinput") or config.option.collectonly:
        return False  # under pytest-xdist only the controller sees all reports
    passed = config.pluginmanager.get_plugin("terminalreporter").stats.get("passed")
    return _asks_for_gpu(config) and not passed


def _asks_for_gpu(config) -> bool:
    return bool(re.search(r"(?<!\bnot )\bgpu\b", config.option.markexpr))
