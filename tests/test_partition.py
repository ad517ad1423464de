"""Plain `jit` on arrays that are sharded by rows and heads: what each device computes, and what is moved."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from nsa_jax.kernels.partition import partitioned

CHECKS = {"partition": 18, "sharded_decoding": 1}


@pytest.mark.slow
@pytest.mark.parametrize("topic", CHECKS)
def test_eight_devices_do_what_one_does(topic):
    """In a process of its own, in which the host has eight devices."""
    program = pathlib.Path(__file__).with_name(f"{topic}_program.py")
    root = program.parent.parent
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
        "PYTHONPATH": os.pathsep.join([str(root), str(program.parent)]),
    }
    done = subprocess.run(
        [sys.executable, str(program)], env=environment, cwd=root, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count(": ok") == CHECKS[topic]


def test_the_program_of_one_device_is_that_of_the_function():
    def function(query, lengths):
        return query * lengths[:, None, None, None], lengths + 1

    def lowered(function):
        x = jax.ShapeDtypeStruct((2, 3, 4, 5), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)
        return jax.jit(lambda *operands: function(*operands)).lower(*x).as_text()

    assert lowered(partitioned(function)) == lowered(function)
