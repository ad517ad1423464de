"""Explicit axes of a mesh, as `jax.make_mesh` gives them: what runs there, and what is refused."""

import host_devices
import jax
import jax.numpy as jnp
import pytest
from cases import OVERLAPPING
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from messages import has_form
from small_layer import WIDTH, make_layer

from nsa_jax import attention

MESH = AbstractMesh((2, 4), ("data", "tensor"), (AxisType.Explicit,) * 2)
HEADS = P("data", None, "tensor")


def test_a_layer_refuses_sharded_tokens():
    layer = make_layer()
    x = jax.ShapeDtypeStruct((4, 8, WIDTH), jnp.float32, sharding=NamedSharding(MESH, P("data", "tensor")))
    with jax.sharding.use_abstract_mesh(MESH), pytest.raises(ValueError, match="batch rows only") as refused:
        jax.eval_shape(lambda x: layer(x), x)

    assert has_form(str(refused.value))


def test_sharded_equals_whole():
    assert host_devices.run("explicit_axes_program.py", devices=8).count(": ok") == 7


@pytest.mark.parametrize(
    ("query", "keys", "kv_heads", "message"),
    [
        (
            P("data", "tensor"),
            P("data"),
            4,
            "by batch rows and heads only, got query of type ",
        ),
        (HEADS, P("data", None, None, "tensor"), 4, "by batch rows and heads only, got key_win of type "),
        (HEADS, P("tensor"), 4, r"must be sharded alike, got axis 0 over data in query and over tensor in "),
        (HEADS, P("data"), 2, r"must divide the KV heads, got 4 devices along tensor and key_win of type "),
    ],
    ids=["tokens", "features", "other rows", "few KV heads"],
)
def test_refused(query, keys, kv_heads, message):
    def array(heads, spec):
        return jax.ShapeDtypeStruct((4, 8, heads, 8), jnp.float32, sharding=NamedSharding(MESH, spec))

    operands = array(8, query), array(kv_heads, keys), array(kv_heads, keys)
    with jax.sharding.use_abstract_mesh(MESH), pytest.raises(ValueError, match=message) as refused:
        jax.eval_shape(lambda *arrays: attention.window_attention(*arrays, config=OVERLAPPING), *operands)

    assert has_form(str(refused.value))
