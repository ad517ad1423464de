"""A run that asks for GPU tests fails unless one passed (hooks of `conftest.py`), also under xdist."""

import pathlib
import subprocess
import sys

import pytest

CONFTEST = pathlib.Path(__file__).with_name("conftest.py")
SKIPS = "import pytest\n@pytest.mark.gpu\ndef test_kernel(): pytest.skip('no kernel')\n"
RUNS = SKIPS + "@pytest.mark.gpu\ndef test_other_kernel(): pass\n"


def run_gpu_tests(folder: pathlib.Path, source: str, *options: str) -> subprocess.CompletedProcess:
    # `_has_gpu` is replaced so that the verdict is the same on every machine.
    (folder / "conftest.py").write_text(CONFTEST.read_text() + "\ndef _has_gpu(): return True\n")
    (folder / "test_kernels.py").write_text(source)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["one-process", "xdist"])
def test_a_gpu_run_of_skips_fails(tmp_path, options):
    result = run_gpu_tests(tmp_path, SKIPS, *options)

    assert result.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "and none did" in result.stdout


def test_a_run_that_only_collects_is_no_gpu_run(tmp_path):
    assert run_gpu_tests(tmp_path, SKIPS, "--collect-only").returncode == pytest.ExitCode.OK


def test_a_gpu_run_that_ran_a_test_passes(tmp_path):
    result = run_gpu_tests(tmp_path, RUNS)

    assert result.returncode == pytest.ExitCode.OK
    assert "and none did" not in result.stdout
