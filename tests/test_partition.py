"""Plain `jit` on arrays that are sharded by rows and heads: what each device computes, and what is moved."""

import host_devices
import jax
import jax.numpy as jnp
import pytest

from nsa_jax.sharding.auto import partitioned

CHECKS = {"partition": 18, "sharded_decoding": 2}


@pytest.mark.slow
@pytest.mark.parametrize("topic", CHECKS)
def test_eight_devices_do_what_one_does(topic):
    if topic == "partition":  # its vmap is that of `kernels.triton.launch`
        pytest.importorskip("jax_triton", reason="needs jax-triton", exc_type=ImportError)
    printed = host_devices.run(f"{topic}_program.py", devices=8)

    assert printed.count(": ok") == CHECKS[topic]


def test_the_program_of_one_device_is_that_of_the_function():
    def function(query, lengths):
        return query * lengths[:, None, None, None], lengths + 1

    def lowered(function):
        x = jax.ShapeDtypeStruct((2, 3, 4, 5), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)
        return jax.jit(lambda *operands: function(*operands)).lower(*x).as_text()

    assert lowered(partitioned(function)) == lowered(function)
