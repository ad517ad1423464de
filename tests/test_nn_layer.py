"""The NSA layer as a Flax user meets it: names, dtypes, sharding, Linen, transformations, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from messages import refused
from modules import NSA, abstract, named, randomised
from selector_examples import Recent

from nsa_jax.config import NSAConfig
from nsa_jax.nn import DenseAttention, LinearScaling, NSAAttention, dense

HEADS, WIDTH, KV_HEADS, KEY_DIM, VALUE_DIM = 4, 12, 2, 5, 3
SIZES = dict(num_kv_heads=KV_HEADS, head_dim=KEY_DIM, value_dim=VALUE_DIM, config=NSA)
X = jax.ShapeDtypeStruct((2, 8, WIDTH), jnp.float32)
IDS = jax.ShapeDtypeStruct((2, 8), jnp.int32)


OPTIONS = dict(normalize_qk=True, scale=0.9, rope_scaling=LinearScaling(4))


def abstract_layer(**arguments):
    arguments = SIZES | dict(num_heads=HEADS, in_features=WIDTH) | arguments
    return abstract(NSAAttention, **arguments)


DIMS = {"key": KEY_DIM, "value": VALUE_DIM}
BRANCHES = ("cmp", "slc", "win")
LAYER_PARAMETERS = {
    "query_proj.kernel": (WIDTH, HEADS, KEY_DIM),
    **{f"{kind}_{b}_proj.kernel": (WIDTH, KV_HEADS, dim) for kind, dim in DIMS.items() for b in BRANCHES},
    "out_proj.kernel": (HEADS, VALUE_DIM, WIDTH),
    "gate.kernel_in": (WIDTH, 8),
    "gate.bias_in": (8,),
    "gate.kernel_out": (8, HEADS, 3),
    "gate.bias_out": (HEADS, 3),
}
COMPRESSOR_PARAMETERS = {
    f"compressor_{kind}.{name}": shape
    for kind, dim in DIMS.items()
    for name, shape in {
        "position_embedding": (4, dim),
        "kernel_in": (4 * dim, 2 * dim),
        "bias_in": (2 * dim,),
        "kernel_out": (2 * dim, dim),
        "bias_out": (dim,),
    }.items()
}
PROJECTION_BIASES = {
    name.replace("kernel", "bias"): (WIDTH,) if name == "out_proj.kernel" else shape[1:]
    for name, shape in LAYER_PARAMETERS.items()
    if "_proj" in name
}


NORM_SCALES = {f"{name}_norm.scale": (KEY_DIM,) for name in ("query", "key_cmp", "key_slc", "key_win")}


def shapes(**arguments):
    return {name: leaf.shape for name, leaf in named(nnx.state(abstract_layer(**arguments))).items()}


def test_parameters_have_the_names_and_shapes_that_checkpoints_rely_on():
    assert shapes() == LAYER_PARAMETERS | COMPRESSOR_PARAMETERS
    assert shapes(compression="mean") == LAYER_PARAMETERS
    assert shapes(compression="mean", use_bias=True) == LAYER_PARAMETERS | PROJECTION_BIASES
    assert shapes(compression="mean", normalize_qk=True) == LAYER_PARAMETERS | NORM_SCALES


def test_defaults_of_the_widths():
    layer = nnx.eval_shape(lambda: NSAAttention(8, 160, num_kv_heads=2, rngs=nnx.Rngs(0)))

    assert layer.config == NSAConfig()
    assert layer.query_proj.kernel.shape == (160, 8, 20)
    assert layer.value_win_proj.kernel.shape == (160, 2, 20)
    assert layer.gate.kernel_in.shape == (160, 40)


def test_initialisers_are_used():
    ones, twos, threes = (nnx.initializers.constant(value) for value in (1, 2, 3))
    arguments = dict(
        use_bias=True, kernel_init=ones, out_kernel_init=twos, bias_init=threes, compression="mean"
    )
    layer = nnx.jit(lambda: NSAAttention(HEADS, WIDTH, **SIZES, **arguments, rngs=nnx.Rngs(0)))()

    for name, value in named(nnx.state(layer)).items():
        if "_proj" in name:
            np.testing.assert_array_equal(
                value, 3 if "bias" in name else 2 if "out_proj" in name else 1, name
            )


@pytest.mark.parametrize(
    ("dtype", "param_dtype", "input_dtype", "output_dtype"),
    [
        (None, "float32", "float32", "float32"),
        (None, "float32", "bfloat16", "float32"),
        (None, "bfloat16", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "float32", "bfloat16"),
        ("float32", "bfloat16", "bfloat16", "float32"),
    ],
)
def test_dtypes_are_those_of_nnx_linear(dtype, param_dtype, input_dtype, output_dtype):
    arguments = dict(dtype=dtype, param_dtype=param_dtype)
    layer = abstract_layer(**arguments)
    linear = nnx.eval_shape(lambda: nnx.Linear(WIDTH, WIDTH, **arguments, rngs=nnx.Rngs(0)))
    x = X.update(dtype=input_dtype)

    out, of_linear = (nnx.eval_shape(lambda module, x: module(x), module, x) for module in (layer, linear))
    operands = nnx.eval_shape(lambda layer, x: layer.operands(x), layer, x)
    gradients = nnx.eval_shape(nnx.grad(lambda layer, x: layer(x).astype(jnp.float32).sum()), layer, x)

    for state in (nnx.state(layer), gradients):
        assert {leaf.dtype for leaf in named(state).values()} == {jnp.dtype(param_dtype)}
    assert out.dtype == of_linear.dtype == output_dtype
    assert {operand.dtype for operand in operands} == {jnp.dtype(output_dtype)}
    assert out.shape == X.shape


def test_cache_has_the_dtype_of_the_computation():
    def cache(of=None, **options):
        return jax.eval_shape(lambda: abstract_layer(**options).init_cache(1, 8, dtype=of))

    assert cache(dtype=jnp.bfloat16).key_cmp.dtype == jnp.bfloat16
    assert cache().key_cmp.dtype == jnp.float32
    assert cache(param_dtype=jnp.bfloat16).key_cmp.dtype == jnp.bfloat16
    assert cache(of=jnp.float16, dtype=jnp.bfloat16).value_slc.dtype == jnp.float16
    assert cache().value_slc.shape == (1, 8, KV_HEADS, VALUE_DIM)


def test_sharding_metadata_places_every_kernel():
    mesh = jax.make_mesh((1, 1), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = {"model": "fsdp", "heads": "tensor", "kv_heads": "tensor"}

    with jax.set_mesh(mesh):
        layer = nnx.as_abstract(abstract_layer(use_bias=True, sharding=sharding))
    specs = {name: leaf.sharding.spec for name, leaf in named(nnx.state(layer)).items()}

    into_heads = jax.P("fsdp", "tensor", None)
    assert (
        specs["query_proj.kernel"]
        == specs["key_cmp_proj.kernel"]
        == specs["value_win_proj.kernel"]
        == into_heads
    )
    assert specs["key_slc_proj.bias"] == jax.P("tensor", None)
    assert specs["out_proj.kernel"] == jax.P("tensor", None, "fsdp")
    assert specs["out_proj.bias"] == jax.P("fsdp")
    assert specs["gate.kernel_in"] == jax.P("fsdp", None)
    assert specs["gate.bias_in"] == jax.P(None)
    assert specs["gate.kernel_out"] == jax.P(None, "tensor", None)
    assert specs["gate.bias_out"] == jax.P("tensor", None)
    assert all(spec == jax.P() for name, spec in specs.items() if "compressor" in name)


def test_no_sharding_metadata_unless_asked_for():
    variables = nnx.to_flat_state(nnx.state(abstract_layer(use_bias=True)))

    assert [path for path, variable in variables if variable.has_metadata("out_sharding")] == []


def test_from_linen():
    """init and apply through the bridge give the NNX layer's parameters and outputs."""
    options = dict(branches=("slc",), selector=Recent)
    linen_layer = nnx.bridge.to_linen(NSAAttention, HEADS, WIDTH, **SIZES, **options)
    graph, state = nnx.split(abstract_layer(**options))
    x = np.random.default_rng(0).standard_normal(X.shape).astype(np.float32)

    variables = jax.jit(linen_layer.init)(jax.random.key(0), x)
    nnx.replace_by_pure_dict(state, variables["params"])

    assert set(variables) == {"params"}
    expected = jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, x)
    np.testing.assert_array_equal(jax.jit(linen_layer.apply)(variables, x), expected)


@pytest.mark.parametrize(
    "transform",
    [jax.vmap, jax.checkpoint, lambda f: lambda x: jax.lax.map(f, x)],
    ids=["vmap", "remat", "scan"],
)
def test_gradients_trace_through_transformations(transform):
    layer = abstract_layer()
    graph, state = nnx.split(layer)

    def gradients(state, x, ids):
        def loss(state):
            return transform(lambda x_ids: nnx.merge(graph, state)(x_ids[0], segment_ids=x_ids[1]))(
                (x, ids)
            ).sum()

        return jax.grad(loss)(state)

    lead = () if transform is jax.checkpoint else (3,)
    shapes = jax.eval_shape(
        gradients, state, X.update(shape=lead + X.shape), IDS.update(shape=lead + IDS.shape)
    )

    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, state)


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "options"])
@pytest.mark.parametrize("window_size", [None, 3], ids=["dense", "window"])
def test_dense_layer_is_a_plain_softmax_over_what_each_query_sees(window_size, options):
    """Packed rows with padding, by an explicit mask and loops over heads; float64."""
    ids = np.array([[2] * 3 + [0] + [5] * 4])
    x = np.random.default_rng(0).standard_normal((1, 8, WIDTH))
    with jax.enable_x64(True):
        arguments = dict(
            num_kv_heads=KV_HEADS, window_size=window_size, use_bias=True, param_dtype=jnp.float64, **options
        )
        layer = randomised(abstract(DenseAttention, HEADS, WIDTH, **arguments), 0.3)
        if options:
            layer.query_norm.scale[...], layer.key_norm.scale[...] = np.array([[0.5, 3, -1], [2, 1, 4.0]])
        out = np.asarray(nnx.jit(lambda layer, x, ids: layer(x, segment_ids=ids))(layer, x, ids))
        weights = {name: np.asarray(value) for name, value in named(nnx.state(layer)).items()}

    def project(name):
        return np.tensordot(x[0], weights[f"{name}_proj.kernel"], 1) + weights[f"{name}_proj.bias"]

    head_dim, half, local = WIDTH // HEADS, WIDTH // HEADS // 2, np.array([0, 1, 2, 0, 0, 1, 2, 3])
    angle = local[:, None, None] * np.array([10000.0 ** (-i / half) for i in range(half)])
    angle, scale = (angle / 4, 0.9) if options else (angle, 1 / np.sqrt(head_dim))

    def normed(name):
        heads = project(name)
        if not options:
            return heads
        return heads / np.sqrt((heads**2).mean(-1, keepdims=True) + 1e-6) * weights[f"{name}_norm.scale"]

    def turn(heads):
        pairs = (heads[..., :half] + 1j * heads[..., half : 2 * half]) * np.exp(1j * angle)
        return np.concatenate([pairs.real, pairs.imag, heads[..., 2 * half :]], -1)

    query, key, value = turn(normed("query")), turn(normed("key")), project("value")
    expected = np.zeros((8, HEADS, head_dim))
    for t in range(8):
        seen = [s for s in range(t + 1) if ids[0, s] == ids[0, t] != 0 and t - s < (window_size or 8)]
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            logits = key[seen, kv_head] @ query[t, head] * scale
            probabilities = np.exp(logits) / np.exp(logits).sum()
            expected[t, head] = probabilities @ value[seen, kv_head]
    expected = np.tensordot(expected, weights["out_proj.kernel"], 2) + weights["out_proj.bias"]
    # About 40 additions on the longest chain, of terms below 10; JAX's dense softmax is float32 at most.
    eps = np.finfo(np.float32 if window_size is None else np.float64).eps
    np.testing.assert_allclose(out[0], expected, rtol=0, atol=400 * eps)


def test_heads_that_do_not_divide():
    with refused(ValueError, r"num_kv_heads must divide num_heads, got 3 and 4\. Give"):
        abstract_layer(num_kv_heads=3)
    with refused(ValueError, r"num_heads must divide in_features .* 5 and 12\. Pass"):
        abstract_layer(num_heads=5, num_kv_heads=5, head_dim=None)


def test_segment_ids_of_numpy_go_where_the_input_lies():
    mesh = AbstractMesh((2, 2), ("data", "tensor"), (AxisType.Explicit,) * 2)
    x = jax.ShapeDtypeStruct((2, 8, WIDTH), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    graph, state = nnx.split(abstract_layer())

    def attend(state, x):
        return nnx.merge(graph, state)(x, segment_ids=np.ones((2, 8), int))

    with jax.sharding.use_abstract_mesh(mesh):
        out = jax.eval_shape(attend, state, x)

    assert out.sharding.spec[0] == "data"


def test_a_named_implementation_never_falls_back():
    layer = abstract_layer(implementation="triton")

    with refused(NotImplementedError, "triton"):
        nnx.eval_shape(lambda layer, x: layer(x), layer, X)


@pytest.mark.parametrize(
    ("shape", "dtype", "backend", "device", "expected"),
    [
        ((1, 64, 4, 128), "bfloat16", "gpu", None, "cudnn"),
        ((1, 64, 4, 128), "bfloat16", "cpu", None, None),
        ((1, 64, 4, 128), "bfloat16", "gpu", "cpu", None),
        ((1, 64, 4, 128), "bfloat16", "cpu", "gpu", "cudnn"),
        ((1, 64, 4, 128), "float32", "gpu", None, None),
        ((1, 63, 4, 128), "bfloat16", "gpu", None, None),
        ((1, 64, 4, 20), "float16", "gpu", None, None),
        ((1, 64, 4, 136), "bfloat16", "gpu", None, None),
    ],
)
def test_dense_attention_takes_cudnn_where_it_can(monkeypatch, shape, dtype, backend, device, expected):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)

    with jax.default_device(device):
        assert dense.choose_implementation(jax.ShapeDtypeStruct(shape, dtype)) == expected


def test_a_default_device_is_asked_for_its_platform(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    with jax.default_device(jax.devices("cpu")[0]):
        assert dense.choose_implementation(jax.ShapeDtypeStruct((1, 64, 4, 128), "bfloat16")) is None
