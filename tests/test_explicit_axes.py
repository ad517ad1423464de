"""Explicit axes of a mesh, as `jax.make_mesh` gives them: what runs there, and what is refused."""

import host_devices
import jax
import jax.numpy as jnp
import pytest
from cases import OVERLAPPING
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from messages import has_form
from small_layer import WIDTH, make_layer

from nsa_jax import attention, cache
from nsa_jax.model import Transformer, TransformerConfig

MESH = AbstractMesh((2, 4), ("data", "tensor"), (AxisType.Explicit,) * 2)
HEADS = P("data", None, "tensor")


def test_a_layer_refuses_sharded_tokens():
    layer = make_layer()
    x = jax.ShapeDtypeStruct((4, 8, WIDTH), jnp.float32, sharding=NamedSharding(MESH, P("data", "tensor")))
    with jax.sharding.use_abstract_mesh(MESH), pytest.raises(ValueError, match="batch rows only") as refused:
        jax.eval_shape(lambda x: layer(x), x)

    assert has_form(str(refused.value))


@pytest.mark.slow
def test_sharded_equals_whole():
    assert host_devices.run("explicit_axes_program.py", devices=8).count(": ok") == 12


@pytest.mark.parametrize(
    ("sharding", "message"),
    [
        ({"heads": "model"}, "must name axes of the mesh in context, got 'model' for 'heads' and the axes"),
        ({"kv_heads": "tensor"}, "must divide .*, got 4 devices along 'tensor' and 2 for 'kv_heads'. Use"),
        ({"vocab": "tensor"}, "got 4 devices along 'tensor' and 10 for 'vocab'"),
        ({"mlp": "data"}, "got 2 devices along 'data' and 33 for 'mlp'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_parameters_that_the_mesh_cannot_divide(sharding, message):
    config = TransformerConfig(
        vocab_size=10, num_layers=1, model_dim=16, num_heads=4, num_kv_heads=2, mlp_dim=33, nsa=OVERLAPPING
    )
    with jax.sharding.use_abstract_mesh(MESH), pytest.raises(ValueError, match=message) as refused:
        nnx.eval_shape(lambda: Transformer(config, sharding=sharding, rngs=nnx.Rngs(0)))

    assert has_form(str(refused.value))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (P(None, "tensor"), "by batch rows and heads only, got key_index of type "),
        (
            P("tensor"),
            "must be sharded alike, got axis 0 over tensor in key_index and over data in query_index",
        ),
    ],
)
def test_an_index_key_for_all_heads_is_split_by_rows_alone(keys, message):
    query, key = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(MESH, spec))
        for shape, spec in (((4, 8, 4, 1, 8), HEADS), ((4, 8, 1, 8), keys))
    )
    with jax.sharding.use_abstract_mesh(MESH), pytest.raises(ValueError, match=message) as refused:
        jax.eval_shape(lambda *x: attention.select_by_index(*x, config=OVERLAPPING), query, key)

    assert has_form(str(refused.value))


@pytest.mark.parametrize("step", [cache.prefill, cache.decode_step])
def test_a_subclass_of_a_compression_gets_the_blocks_of_all_rows_and_heads(step):
    """Like any function: it may hold numbers of its own for each head."""
    seen = []

    class Mine(cache.Compression):
        def __call__(self, key_windows, *more):
            seen.append(key_windows.shape)
            return super().__call__(key_windows, *more)

    def run(query, keys):
        held = cache.init_cache(
            4, 32, config=OVERLAPPING, num_kv_heads=4, key_dim=8, value_dim=8, dtype=jnp.float32
        )
        new = cache.TokenKeysValues(*[keys] * 6)
        return step(held, query, new, query[..., :3], config=OVERLAPPING, compress=Mine()).out

    arrays = [jax.ShapeDtypeStruct((4, 4, 4, 8), jnp.float32, sharding=NamedSharding(MESH, HEADS))] * 2
    with jax.sharding.use_abstract_mesh(MESH):
        jax.eval_shape(run, *arrays)

    assert {(shape[0], shape[3]) for shape in seen} == {(4, 4)}


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
