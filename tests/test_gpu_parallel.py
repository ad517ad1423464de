"""Plain `jit` on arrays that are spread over two GPUs gives what one GPU gives, and moves nothing."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from nsa_jax import budget

pytest.importorskip("jax_triton", reason="needs jax-triton", exc_type=ImportError)

from nsa_jax import attention, cache, layout
from nsa_jax.cache import Compression, TokenKeysValues
from nsa_jax.config import NSAConfig
from nsa_jax.generate import generate
from nsa_jax.model import Transformer, TransformerConfig

pytestmark = pytest.mark.gpu
IMPLEMENTATION = "triton"
CONFIG = NSAConfig()
# Initial and local blocks fill all slots, so no score decides which blocks a step chooses.
FIXED = NSAConfig(num_selected_blocks=4, num_initial_blocks=1, num_local_blocks=3)
HEADS, KV_HEADS, DIM = 32, 2, 64
SPECS = {"rows": PartitionSpec("x"), "heads": PartitionSpec(None, None, "x")}
COLLECTIVE = re.compile(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(-start)?\(")


@pytest.fixture(scope="module")
def mesh():
    if jax.device_count() < 2:
        pytest.skip(f"needs two devices, got {jax.device_count()}")
    return jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])


def normal(seed, *shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), (2, *shape), dtype)


def place(mesh, axis, arrays):
    """Arrays with heads and arrays without them, on two devices."""

    def placed(x):
        spec = SPECS[axis] if axis == "rows" or x.ndim > 2 else PartitionSpec()
        return jax.device_put(x, NamedSharding(mesh, spec))

    return jax.tree.map(placed, arrays)


def same(found, other):
    """Two results of the same maths, added in other orders: neither is exact, so each has a budget."""
    allowed = 2 * 8 * float(jnp.finfo(found.dtype).eps) * budget.size(other)
    assert budget.distance(found, other) <= allowed


def with_gradients(cotangent, *arrays):
    attend = functools.partial(
        attention.native_sparse_attention, config=CONFIG, implementation=IMPLEMENTATION
    )
    _, pull_back = jax.vjp(attend, *arrays)
    return attend(*arrays), *pull_back(cotangent)


@pytest.mark.parametrize("axis", SPECS)
def test_two_gpus_attend_as_one(mesh, axis):
    """The output bit for bit. Key gradients are added in as many parts as there are rows and KV heads for."""
    length = 1001
    blocks = layout.num_compression_blocks(length, CONFIG)
    keys = [normal(i, n, KV_HEADS, DIM) for i, n in enumerate((blocks, blocks, *[length] * 4))]
    gates = jax.nn.sigmoid(normal(9, length, HEADS, 3))
    arrays = normal(7, length, HEADS, DIM), normal(8, length, HEADS, DIM), *keys, gates
    expected = jax.jit(with_gradients)(*arrays)

    spread = place(mesh, axis, arrays)
    program = jax.jit(with_gradients).lower(*spread).compile()
    assert not COLLECTIVE.search(program.as_text())
    found = program(*spread)
    assert np.array_equal(*(np.asarray(x[0], np.float32) for x in (found, expected)))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.sharding.shard_shape(ours.shape) != ours.shape
        same(ours, theirs)


@pytest.mark.parametrize("axis", SPECS)
def test_two_gpus_step_as_one(mesh, axis):
    """The sizes of a step depend on how many KV heads a GPU has, so sums are in another order."""
    lengths, max_length = jnp.asarray((577, 4000), jnp.int32), 4096
    empty = cache.init_cache(
        2, max_length, num_kv_heads=KV_HEADS, key_dim=DIM, value_dim=DIM, config=FIXED, dtype=jnp.bfloat16
    )
    held = jax.tree.map(lambda x: normal(x.shape[1], *x.shape[1:]) if x.ndim > 2 else x, empty)
    tokens = TokenKeysValues(*(normal(i, 2, KV_HEADS, DIM) for i in range(6)))
    operands = held._replace(lengths=lengths), normal(7, 2, HEADS, DIM), tokens, normal(8, 2, HEADS, 3)
    step = functools.partial(
        cache.decode_step, config=FIXED, compress=Compression(), implementation=IMPLEMENTATION
    )
    expected = jax.jit(step)(*operands)

    spread = place(mesh, axis, operands)
    program = jax.jit(step, donate_argnums=0).lower(*spread).compile()
    assert not COLLECTIVE.search(program.as_text())
    assert program.memory_analysis().alias_size_in_bytes >= sum(x.nbytes for x in jax.tree.leaves(held)) // 2
    found = program(*spread)
    same(found.out, expected.out)
    for ours, theirs in zip(*map(jax.tree.leaves, (found.cache, expected.cache)), strict=True):
        if ours.ndim > 2:
            same(ours, theirs)
        else:
            np.testing.assert_array_equal(ours, theirs)


def test_two_gpus_generate_as_one(mesh):
    """In float32, which leaves a tie of two tokens to chance only once in many thousand."""
    config = TransformerConfig(
        vocab_size=101, num_layers=2, model_dim=128, num_heads=8, num_kv_heads=2, head_dim=DIM, nsa=FIXED
    )
    settings = dict(implementation=IMPLEMENTATION, rngs=nnx.Rngs(0))
    prompts = np.random.default_rng(0).integers(0, config.vocab_size, (2, 300))
    expected = generate(Transformer(config, **settings), prompts, max_new_tokens=200, temperature=1.0)
    with jax.set_mesh(mesh):
        names = dict.fromkeys(("heads", "kv_heads", "mlp"), "x")
        model = Transformer(config, sharding=names, **settings | dict(rngs=nnx.Rngs(0)))
    found = generate(model, prompts, max_new_tokens=200, temperature=1.0)

    np.testing.assert_array_equal(found.tokens, expected.tokens)


@pytest.mark.parametrize("axis", SPECS)
def test_two_gpus_give_the_logits_of_one(mesh, axis):
    """Of a prompt and of the step after it, in bfloat16: no further from float32 than the budget allows."""
    config = TransformerConfig(
        vocab_size=101, num_layers=2, model_dim=128, num_heads=8, num_kv_heads=2, head_dim=DIM, nsa=FIXED,
        dtype="bfloat16", param_dtype="bfloat16",
    )  # fmt: skip

    def made(config, **sharding):
        return Transformer(config, implementation=IMPLEMENTATION, rngs=nnx.Rngs(0), **sharding)

    @nnx.jit
    def logits(model, tokens):
        prompt, held = model.prefill(tokens[:, :300], model.init_cache(2, 512))
        return prompt, model.decode_step(tokens[:, 300:], held)[0]

    whole, exact = made(config), made(dataclasses.replace(config, dtype="float32", param_dtype="float32"))
    nnx.update(exact, jax.tree.map(lambda x: x.astype(jnp.float32), nnx.state(whole)))
    if axis == "heads":
        with jax.set_mesh(mesh):
            model = made(config, sharding=dict.fromkeys(("heads", "kv_heads", "mlp"), "x"))
    else:
        model = nnx.clone(whole)
        nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(mesh, PartitionSpec())))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 301)).astype(np.int32)
    spread = jax.device_put(tokens, NamedSharding(mesh, SPECS[axis] if axis == "rows" else PartitionSpec()))

    for found, alone, right in zip(
        logits(model, spread), logits(whole, tokens), logits(exact, tokens), strict=True
    ):
        assert found.sharding.num_devices == 2
        assert budget.distance(found, right) <= budget.allowance(
            alone, right, float(jnp.finfo("bfloat16").eps)
        )
