"""The Mosaic GPU kernels in Pallas's interpreter: values, gradients and races, on the CPU.

They run in a process of their own with a time limit: a warpgroup that waits for ever does not end.
"""

import json
import subprocess
import sys

import pytest

pytest.importorskip(
    "jax_triton", reason="the lists are Triton kernels; installed by `tox -e test`", exc_type=ImportError
)

import host_devices
import jax
import mosaic_program

SECONDS = 900  # they take 150 on an idle machine


needs_interpreter = pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2), reason="the interpreter of JAX 0.11.1 does not load from references"
)


def interpret(*cases: str) -> subprocess.CompletedProcess[str]:
    # Callbacks that wait block threads of XLA's pool, which has as many as the machine has cores, or devices.
    return subprocess.run(
        [sys.executable, mosaic_program.__file__, *cases], env=host_devices.environment(8), timeout=SECONDS,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.slow
@needs_interpreter
def test_kernels_equal_the_oracle_without_races():
    ranges = mosaic_program.RANGES
    cases = [*mosaic_program.CASES, *ranges]
    done = interpret(*cases)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    wrong = json.loads(done.stdout.splitlines()[-1])
    assert [*wrong] == cases
    for case, found in wrong.items():
        results, checks = {"d_query", "products", "d_key", "d_value"}, {"races of d_query", "races of d_key"}
        if case not in ranges:
            checks.add("wraps")
            if mosaic_program.CASES[case].range is not None:
                results.add("d_query in parts")
        elif ranges[case].branch != "window":
            results |= {"out", "lse"}
            checks.add("races of out")
        assert found.keys() == results | checks, case
        assert not {x: y for x, y in found.items() if not y <= (1 if x in results else 0)}, case


@pytest.mark.slow
@needs_interpreter
def test_what_is_freed_while_a_product_reads_it_is_a_race():
    done = interpret("freed_early")

    assert done.returncode != 0
    assert "RACE DETECTED" in done.stderr


@pytest.mark.slow
def test_lists_are_those_of_loops():
    assert host_devices.run("mosaic_lists_program.py", devices=1).count(": ok") == 14
