"""A layer that is small, random in every parameter and yet sparse, and its steps through a cache."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nsa_jax.config import NSAConfig
from nsa_jax.nn import NSAAttention

# Six blocks, of which a query chooses one freely beside the initial and its own.
CONFIG = NSAConfig(
    compression_block_size=4,
    compression_stride=2,
    selection_block_size=4,
    num_selected_blocks=3,
    num_local_blocks=1,
    window_size=5,
)
HEADS, WIDTH, KV_HEADS, KEY_DIM, VALUE_DIM = 4, 12, 2, 5, 3
ROWS, LENGTH = 4, 23

# The longest chain (projection, phi, logits, average, gates, output) adds about 100 terms, each with a
# relative rounding of eps / 2; the terms are at most 10 times their sum's scale. A gradient passes twice.
ROUNDING = 100 * 10 * np.finfo(np.float64).eps


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def make_layer(param_dtype=jnp.float32, **arguments):
    """A layer whose every parameter is random, biases and the zero-initialised ones too."""
    arguments = dict(param_dtype=param_dtype, use_bias=True, config=CONFIG) | arguments
    sizes = dict(num_kv_heads=KV_HEADS, head_dim=KEY_DIM, value_dim=VALUE_DIM)
    graph, state = nnx.split(
        nnx.eval_shape(lambda: NSAAttention(HEADS, WIDTH, **sizes, **arguments, rngs=nnx.Rngs(0)))
    )
    for index, (_, variable) in enumerate(nnx.to_flat_state(state)):
        shape = variable.get_value().shape
        if isinstance(variable, nnx.RngState):  # of dropout
            key = isinstance(variable, nnx.RngKey)
            variable.set_value(jax.random.key(index) if key else jnp.zeros((), jnp.uint32))
            continue
        scale = 0.5 / max(len(shape) - 1, 1)
        variable.set_value(jnp.asarray((scale * random(*shape, seed=index)).astype(jnp.dtype(param_dtype))))
    return nnx.merge(graph, state)


class WeightedSum(nnx.Module):
    """A compressor: the tokens of a block by learned weights."""

    def __init__(self, head_dim, config, *, rngs):
        self.weights = nnx.Param(rngs.params.normal((config.compression_block_size,)))

    def __call__(self, blocks):
        return jnp.einsum("bmlkh,l->bmkh", blocks, self.weights[...])


def fixed_gate(in_features, num_heads, *, rngs):
    """Makes a gate that is a plain function: the first inputs decide."""
    return lambda x: jax.nn.softmax(x[..., : num_heads * 3].reshape(*x.shape[:2], num_heads, 3))


def turn_first_pair(heads, positions):
    """A rotary embedding of one pair: the first two numbers of a head."""
    angle = 0.25 * positions[:, :, None].astype(heads.dtype)
    first, second = heads[..., 0], heads[..., 1]
    turned = (
        first * jnp.cos(angle) - second * jnp.sin(angle),
        second * jnp.cos(angle) + first * jnp.sin(angle),
    )
    return jnp.concatenate([jnp.stack(turned, axis=-1), heads[..., 2:]], axis=-1)


def assert_close(actual, expected, tolerance, what=""):
    scale = max(np.abs(np.asarray(expected, np.float64)).max(initial=0), 1e-3)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * scale, err_msg=what)


@nnx.jit
def decode_step(layer, x, cache, num_tokens):
    return layer.decode_step(x, cache, num_tokens=num_tokens)


def assert_chunks_give(full, layer, x, take=decode_step, chunks=7):
    """Chunks of ragged rows, of steps or by `take`: each output is the row of `full`; in float64."""
    full = np.asarray(full)  # NumPy's slices: JAX would compile each

    cache = jax.jit(lambda: layer.init_cache(ROWS, LENGTH))()
    for most in ([3, 1, 5, 0], [5, 5, 4, 2], *[[4, 5, 3, 5]] * 5)[:chunks]:
        chunk, start = np.zeros((ROWS, 5, WIDTH)), np.asarray(cache.lengths)
        num_tokens = np.minimum(most, LENGTH - start)
        for row, count in enumerate(num_tokens):
            chunk[row, :count] = x[row, start[row] : start[row] + count]
        out, cache = take(layer, chunk, cache, num_tokens)
        out = np.asarray(out)
        for row, count in enumerate(num_tokens):
            assert_close(out[row, :count], full[row, start[row] : start[row] + count], ROUNDING)
    assert not np.any(cache.overflowed)
    return cache


def assert_steps_give(full, layer, x):
    """Two chunks of a prompt, then single tokens: each output is the row of `full`; in float64."""
    prefill = nnx.jit(lambda layer, x, cache, count: layer.prefill(x, cache, num_tokens=count))
    step, full = jax.jit(layer.decode_step), np.asarray(full)

    cache = assert_chunks_give(full, layer, x, prefill, chunks=2)
    while (np.asarray(cache.lengths) < LENGTH).any():
        unfinished = np.asarray(cache.lengths) < LENGTH
        rows = np.arange(ROWS), np.minimum(np.asarray(cache.lengths), LENGTH - 1)
        out, cache = step(x[rows][:, None], cache, num_tokens=unfinished.astype(int))
        assert_close(np.asarray(out)[unfinished, 0], full[rows][unfinished], ROUNDING)
    assert not np.any(cache.overflowed)
