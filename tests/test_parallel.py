"""Rows whose tokens lie on several devices: orders, errors, and a program of its own with sixteen devices."""

import dataclasses
import functools

import host_devices
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from messages import has_form
from modules import MODEL, abstract, randomised

from nsa_jax.compression import Compression
from nsa_jax.config import NSAConfig
from nsa_jax.model import Transformer, TransformerConfig
from nsa_jax.nn import NSAAttention
from nsa_jax.parallel import (
    context_attention,
    context_selection,
    from_zigzag,
    padded_length,
    to_zigzag,
    token_indices,
)

CONFIG = NSAConfig()
CHECKS = (  # every check that the program must report
    *("8 devices, packed", "declared order", "layer, any placement", "layer on three axes"),
)


@pytest.mark.slow
def test_tokens_on_several_devices_give_what_one_device_gives():
    printed = host_devices.run("context_program.py", devices=16)

    assert tuple(printed.splitlines()) == CHECKS


@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_zigzag_order_pairs_the_first_chunk_with_the_last(num_devices, axis):
    chunks = 2 * num_devices
    x = np.moveaxis(np.arange(4 * chunks * 3 * 2).reshape(3, 4 * chunks, 2), 1, axis)

    found = to_zigzag(x, num_devices, axis=axis)

    shards = np.split(found, num_devices, axis=axis)
    parts = np.split(x, chunks, axis=axis)
    for i, shard in enumerate(shards):
        np.testing.assert_array_equal(shard, np.concatenate([parts[i], parts[chunks - 1 - i]], axis=axis))
    np.testing.assert_array_equal(from_zigzag(found, num_devices, axis=axis), x)
    np.testing.assert_array_equal(jax.jit(lambda x: to_zigzag(x, num_devices, axis=axis))(x), found)


def test_the_indices_of_tokens_are_those_of_the_order():
    assert token_indices(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert token_indices(8, 2, "contiguous").tolist() == list(range(8))


@pytest.mark.parametrize(
    ("length", "devices", "order", "padded"),
    [
        (65536, 2, "zigzag", 65536),
        (65537, 2, "zigzag", 65536 + 64),
        (65537, 2, "contiguous", 65536 + 32),
        (100, 2, "zigzag", 4 * 512),  # the shortest chunk that holds a window
        (4096, 4, "zigzag", 4096),
    ],
)
def test_padding_to_whole_chunks(length, devices, order, padded):
    assert padded_length(length, devices, CONFIG, order) == padded


def call(tokens=2048, axis="context", mapped="context", operation=context_attention, **settings):
    """Traces the operation on two devices; nothing runs."""
    mesh = AbstractMesh((2, 2), ("data", "context"), (AxisType.Auto,) * 2)
    shapes = [(1, tokens, 4, 16), *[(1, tokens, 2, 16)] * 6, (1, tokens, 4, 3)]
    operands = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    operands = operands[: 8 if operation is context_attention else 3]

    def local(*operands):
        given = dict(compress=Compression(), config=CONFIG, axis=axis) | settings
        return operation(*operands, **given)

    spec = PartitionSpec(None, mapped)
    return jax.eval_shape(
        jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={mapped}), *operands
    )


INSIDE = r"must run inside jax\.shard_map over its axis, got the axis "
ERRORS = {
    "unmapped axis": (dict(mapped="data"), INSIDE + "'context'"),
    "unknown axis": (dict(axis="tensor"), INSIDE + "'tensor'"),
    "unknown order": (dict(order="ring"), r"order must be one of .*, got 'ring'"),
    "short chunks": (dict(tokens=1024), "at least max.* - 1 = 511 tokens, got 256"),
    "odd chunks": (dict(tokens=2052), "2 chunks of a multiple of compression_stride = 16 tokens, got 1026"),
    "no compression": (dict(compress=None), "compress must be a Compression or a function, got NoneType"),
    "two axes": (dict(axis=("data", "context")), r"axis must be the name of one axis, got \('data', 'cont"),
    "a wrong scale": (dict(scale=float("inf")), "scale must be finite, got inf"),
}


@pytest.mark.parametrize("operation", [context_attention, context_selection])
@pytest.mark.parametrize(("settings", "rule"), ERRORS.values(), ids=ERRORS)
def test_calls_that_make_no_sense(settings, rule, operation):
    with pytest.raises((ValueError, TypeError), match=rule) as raised:
        call(operation=operation, **settings)
    assert has_form(str(raised.value)), str(raised.value)


def test_calls_outside_of_a_shard_map():
    x = jnp.ones((1, 1024, 1, 8))
    with pytest.raises(ValueError, match=rf"{INSIDE}'context' where no axis is mapped") as raised:
        context_selection(x, x, x, compress=Compression(), config=CONFIG, axis="context")
    assert has_form(str(raised.value)), str(raised.value)


def test_shapes_of_a_call():
    assert call().shape == (1, 2048, 4, 16)
    assert call(operation=context_selection).shape == (1, 2048, 2, 16)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: padded_length(8, 0, CONFIG), r"num_devices must be at least 1, got 0\. Pass"),
        (lambda: to_zigzag(np.zeros((1, 8)), 0), r"num_devices must be at least 1, got 0\. Pass"),
        (
            lambda: from_zigzag(np.zeros((4, 4)), 2, axis=3),
            r"axis must be an axis of the array, got 3 .*",
        ),
        (lambda: to_zigzag(np.zeros((1, 8)), 2.0), r"num_devices must be an int, got float\. Pass"),
        (
            lambda: token_indices(5, 2, "contiguous"),
            "contiguous order needs whole chunks for each of 2 devices, so a multiple of 2 tokens, got 5",
        ),
    ],
)
def test_orders_that_cannot_be(call, message):
    with pytest.raises((ValueError, TypeError), match=message) as raised:
        call()
    assert has_form(str(raised.value))


def test_tokens_that_do_not_divide():
    with pytest.raises(ValueError, match=r"a multiple of 4 tokens, got 6\. Pad") as raised:
        to_zigzag(np.arange(6), 2, axis=0)
    assert has_form(str(raised.value)), str(raised.value)


def layer(**options):
    sizes = dict(num_kv_heads=1, head_dim=8, config=CONFIG)
    return nnx.eval_shape(lambda: NSAAttention(2, 16, **sizes, **options, rngs=nnx.Rngs(0)))


def apply(layer, mesh):
    """Traces a call of the layer with a mesh in context, or none."""
    graph, state = nnx.split(layer)
    x = jax.ShapeDtypeStruct((1, 2048, 16), jnp.float32)
    with jax.sharding.use_abstract_mesh(mesh or AbstractMesh((), ())):
        return jax.eval_shape(lambda state, x: nnx.merge(graph, state)(x), state, x)


def test_a_layer_finds_its_axis_in_the_mesh():
    mesh = AbstractMesh((2, 2), ("data", "context"), (AxisType.Auto,) * 2)

    assert apply(layer(context_axis="context"), mesh).shape == (1, 2048, 16)
    for given, got in ((None, "no mesh"), (mesh, r"the axes \('data', 'context'\)")):
        rule = f"must be an axis of the mesh in context, got 'seq' and {got}"
        with pytest.raises(ValueError, match=rule) as raised:
            apply(layer(context_axis="seq"), given)
        assert has_form(str(raised.value)), str(raised.value)


def test_a_layer_opens_its_own_shard_map():
    mesh, spec = AbstractMesh((2,), ("context",), (AxisType.Auto,)), PartitionSpec(None, "context")
    graph, state = nnx.split(layer(context_axis="context"))

    def call(state, x):
        return jax.shard_map(nnx.merge(graph, state), mesh=mesh, in_specs=spec, out_specs=spec)(x)

    with pytest.raises(ValueError, match="opens a shard_map of its own, got 'context' inside") as raised:
        jax.eval_shape(call, state, jnp.zeros((1, 2048, 16)))
    assert has_form(str(raised.value)), str(raised.value)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_packed_rows_trace_inside_a_shard_map_over_another_axis(axis_type):
    graph, state = nnx.split(layer(context_axis="context"))

    def call(state, x, segment_ids):
        return nnx.merge(graph, state)(x, segment_ids=segment_ids)

    spec, mesh = PartitionSpec("data"), AbstractMesh((2, 2), ("data", "context"), (axis_type,) * 2)
    where = NamedSharding(mesh, spec) if axis_type == AxisType.Explicit else None
    x, ids = (jax.ShapeDtypeStruct((2, 2048, *more), jnp.int32, sharding=where) for more in ((16,), ()))
    with jax.sharding.use_abstract_mesh(mesh):
        over_rows = jax.shard_map(
            call, in_specs=(PartitionSpec(), spec, spec), out_specs=spec, axis_names={"data"}
        )
        out = jax.eval_shape(over_rows, state, x.update(dtype=jnp.float32), ids)

    assert out.shape == (2, 2048, 16)


def test_a_model_whose_layers_are_computed_again_traces():
    config = dataclasses.replace(MODEL, num_layers=1, nsa=CONFIG, remat=True, share_keys_values=True)
    graph, state = nnx.split(abstract(Transformer, config, context_axis="context"))
    tokens = jax.ShapeDtypeStruct((2, 2048), jnp.int32)
    with jax.sharding.use_abstract_mesh(CONTEXT):
        gradient = jax.eval_shape(jax.grad(lambda state, x: nnx.merge(graph, state)(x).sum()), state, tokens)

    assert jax.tree.map(jnp.shape, gradient) == jax.tree.map(jnp.shape, state)


def test_hessian_vector_products_of_packed_rows():
    """Along a context axis of one device, as gradients without it change. JAX once refused their `jvp`."""
    sizes = NSAConfig(
        compression_block_size=4, compression_stride=2, selection_block_size=4, num_selected_blocks=3,
        window_size=4,
    )  # fmt: skip
    options = dict(num_kv_heads=1, head_dim=2, config=sizes, dtype="float64", param_dtype="float64")
    x, way = np.random.default_rng(0).standard_normal((2, 1, 12, 16))
    segment_ids, step = np.array([[1] * 7 + [2] * 5]), 1e-5

    def gradient(layer, x):
        return jax.grad(lambda x: (layer(x, segment_ids=segment_ids) ** 2).sum())(x)

    def product(layer, x):
        return jax.jvp(functools.partial(gradient, layer), (x,), (way,))[1]

    with jax.enable_x64(True):
        plain, spread = (
            randomised(abstract(NSAAttention, 12, 16, context_axis=axis, **options), 0.3)
            for axis in (None, "context")
        )
        compiled = nnx.jit(gradient)
        after, before = (np.asarray(compiled(plain, x + step * sign * way)) for sign in (1, -1))
        with jax.set_mesh(jax.make_mesh((1,), ("context",), axis_types=(AxisType.Auto,))):
            found = nnx.jit(product)(spread, x)

    # Differences of gradients are exact to eps / step, and to step^2 times the next derivatives: about 1e-10.
    expected = (after - before) / (2 * step)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-7 * np.abs(expected).max())


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
def test_segment_ids_of_numpy(order):
    """A layer without a context axis takes them; with one it was an AttributeError of `sharding`."""
    sharded = layer(context_axis="context", context_order=order)
    segment_ids = np.ones((1, 2048), np.int32)

    with jax.set_mesh(jax.make_mesh((1,), ("context",), axis_types=(AxisType.Auto,))):
        graph, state = nnx.split(sharded)
        out = jax.eval_shape(
            lambda state, x: nnx.merge(graph, state)(x, segment_ids=segment_ids),
            state,
            jax.ShapeDtypeStruct((1, 2048, 16), jnp.float32),
        )

    assert out.shape == (1, 2048, 16)


class Counting(nnx.Module):
    """A compressor that counts its calls, as one with dropout does."""

    def __init__(self, *_, rngs):
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, blocks):
        self.calls[...] += 1
        return blocks.mean(axis=2)


CONTEXT = AbstractMesh((2, 2), ("data", "context"), (AxisType.Auto,) * 2)
EXPLICIT = AbstractMesh((2, 2), ("data", "context"), (AxisType.Explicit,) * 2)


@pytest.mark.parametrize(
    ("options", "mesh", "given", "message"),
    [
        ({}, CONTEXT, dict(tokens=2049, positions=True), "must divide the tokens of a row, got 2 devices"),
        ({}, EXPLICIT, dict(rows="context"), "must spread tokens alone, got rows over context and heads"),
        ({}, CONTEXT, dict(block_indices=[0]), "block_indices must be an array, got list"),
        (
            dict(compressor=Counting),
            CONTEXT,
            {},
            r"must not change their .* of \['compressor_key\.calls', 'c",
        ),
    ],
    ids=["tokens", "rows", "list", "state"],
)
def test_calls_of_a_layer_that_make_no_sense(options, mesh, given, message):
    graph, state = nnx.split(layer(**{"context_axis": "context"} | options))
    shape = (2, given.pop("tokens", 2048))
    rows = NamedSharding(mesh, PartitionSpec(given.pop("rows", None)))
    x = jax.ShapeDtypeStruct((*shape, 16), jnp.float32, sharding=rows)
    if given.pop("positions", False):
        given["positions"] = np.broadcast_to(np.arange(shape[1]), shape)
    refused = pytest.raises((ValueError, TypeError, NotImplementedError), match=message)
    with jax.sharding.use_abstract_mesh(mesh), refused as raised:
        jax.eval_shape(lambda state, x: nnx.merge(graph, state)(x, **given), state, x)

    assert has_form(str(raised.value)), str(raised.value)


def test_what_a_layer_with_a_context_axis_does_not_offer():
    with pytest.raises(NotImplementedError, match=r"operands are those of whole rows") as raised:
        layer(context_axis="context").operands(jnp.zeros((1, 2048, 16)))
    assert has_form(str(raised.value)), str(raised.value)
    with pytest.raises(ValueError, match=r"order must be one of .*, got 'ring'"):
        layer(context_axis="context", context_order="ring")
    dense = TransformerConfig(
        vocab_size=8, num_layers=1, model_dim=8, num_heads=1, num_kv_heads=1, attention="dense"
    )
    with pytest.raises(NotImplementedError, match="context_axis needs NSA layers, got") as raised:
        Transformer(dense, context_axis="context", rngs=nnx.Rngs(0))
    assert has_form(str(raised.value)), str(raised.value)
