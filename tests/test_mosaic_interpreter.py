"""The Mosaic GPU kernels in Pallas's interpreter: values, gradients and races, on the CPU.

Each case runs in a process of its own with a time limit: a warpgroup that waits for ever does not end.
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

SECONDS = 300  # a case takes 10 on an idle machine


@pytest.mark.slow
@pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2), reason="the interpreter of JAX 0.11.1 does not load from references"
)
@pytest.mark.parametrize("case", mosaic_program.CASES)
def test_kernels_equal_the_oracle_without_races(case):
    # Callbacks that wait block threads of XLA's pool, which has as many as the machine has cores, or devices.
    done = subprocess.run(
        [sys.executable, mosaic_program.__file__, case], env=host_devices.environment(8), timeout=SECONDS,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    wrong = json.loads(done.stdout.splitlines()[-1])
    results = {"d_query", "d_key", "d_value", "products"}
    if mosaic_program.CASES[case].range is not None:
        results.add("d_query in parts")
    checks = {"wraps", "races of d_query", "races of d_key"}
    assert wrong.keys() == results | checks
    assert not {name: x for name, x in wrong.items() if not x <= (1 if name in results else 0)}
