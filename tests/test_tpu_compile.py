"""The `xla` implementation compiles for a TPU v5e, forward and backward, on a machine without a TPU.

`tox -e tpu` installs libtpu, the compiler that comes with `jax[tpu]`. Nothing is run.
"""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from nsa_jax import NSAConfig, attention

if importlib.util.find_spec("libtpu") is None:
    pytest.skip("libtpu, the compiler for TPUs, is not installed: `tox -e tpu`", allow_module_level=True)

CONFIG = NSAConfig(num_selected_blocks=4, window_size=128)
BATCH, HEADS, KV_HEADS, DIM = 1, 4, 2, 64
LONG, SHORT = 1000, 300  # blocks are looked up, or masked


@pytest.fixture(scope="module")
def device():
    """The first of four chips that exist only as a description."""
    return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]


def shapes(dtype, length):
    """Operands of `native_sparse_attention`, in its order, as shapes."""
    compressed = (length - 32) // 16 + 1
    keys = [(BATCH, tokens, KV_HEADS, DIM) for tokens in (compressed, length, length) for _ in range(2)]
    arrays = [(BATCH, length, HEADS, DIM), *keys, (BATCH, length, HEADS, 3)]
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in arrays]


def compiled_text(function, arrays, device):
    on_chip = jax.sharding.SingleDeviceSharding(device)
    return jax.jit(function, in_shardings=on_chip, out_shardings=on_chip).lower(*arrays).compile().as_text()


def attend(*arrays, segment_ids=None):
    return attention.native_sparse_attention(
        *arrays, config=CONFIG, segment_ids=segment_ids, implementation="xla"
    )


def with_gradients(cotangent, *arrays, segment_ids=None):
    out, pull_back = jax.vjp(functools.partial(attend, segment_ids=segment_ids), *arrays)
    return out, *pull_back(cotangent)


@pytest.mark.parametrize(
    ("dtype", "packed", "length"),
    [("bfloat16", False, LONG), ("float32", True, SHORT)],
    ids=["plain-bfloat16", "packed-float32"],
)
def test_forward_and_backward_compile(device, dtype, packed, length):
    operands = shapes(dtype, length)
    arrays = [operands[0], *operands]
    if packed:
        arrays.append(jax.ShapeDtypeStruct((BATCH, length), jnp.int32))

    def run(*arrays):
        return with_gradients(*arrays[:9], segment_ids=arrays[9] if packed else None)

    text = compiled_text(run, arrays, device)

    assert "nsa_jax.xla.native_sparse_attention" in text
    assert "transpose(jvp" in text  # the backward is in it, too


def test_a_decode_step_compiles(device):
    """One query at the end of the row."""
    query, *others, gates = shapes("bfloat16", LONG)
    one = [jax.ShapeDtypeStruct((BATCH, 1, *x.shape[2:]), x.dtype) for x in (query, gates)]

    text = compiled_text(attend, [one[0], *others, one[1]], device)

    assert "nsa_jax.xla.native_sparse_attention" in text
