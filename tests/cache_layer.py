"""What a layer would hand to the cache: random projections of a whole sequence, and their full forward."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np

from nsa_jax import cache, layout, reference
from nsa_jax.cache import TokenKeysValues
from nsa_jax.config import NSAConfig

SMALL = NSAConfig(
    compression_block_size=4,
    compression_stride=2,
    selection_block_size=8,
    num_selected_blocks=4,
    window_size=8,
)
KEY_DIM, VALUE_DIM = 6, 5


# What is compiled here runs a few times on a few tokens: optimising its code takes longer than it saves. The
# program is the one that users get.
jit = functools.partial(jax.jit, compiler_options=dict(xla_backend_optimization_level=0))


def compress(config, key_windows, value_windows, first_positions):
    """Weighs the tokens of a block differently, is not linear, and turns keys with their position."""
    size = config.compression_block_size
    weights = jnp.linspace(0.5, 1.5, size, dtype=key_windows.dtype)[:, None, None] / size
    angle = first_positions.astype(key_windows.dtype)[:, :, None, None]
    key = (key_windows * weights).sum(2) * jnp.cos(0.1 * angle) + jnp.sin(0.3 * angle)
    return jnp.tanh(key), jnp.tanh((value_windows * weights).sum(2))


def prefill(*operands, config, **arguments):
    return cache.prefill(*operands, config=config, compress=functools.partial(compress, config), **arguments)


def decode_step(*operands, config, **arguments):
    return cache.decode_step(
        *operands, config=config, compress=functools.partial(compress, config), **arguments
    )


compiled_prefill = jit(prefill, static_argnames="config")
compiled_decode_step = jit(decode_step, static_argnames="config")
init_cache = jax.jit(cache.init_cache, static_argnames=[*inspect.signature(cache.init_cache).parameters])


def in_numpy(step):
    """The outputs of a step as NumPy's, of which JAX would compile each slice."""
    return step._replace(out=np.asarray(step.out))


@functools.partial(jit, static_argnames="config")
def full_forward(query, tokens, gates, blocks, *, config):
    """The outputs of whole rows, in float32 at least."""
    operands = Layer(config, query, tokens, gates).operands()
    out = reference.native_sparse_attention(*operands, config=config, block_indices=blocks)
    return out.astype(jnp.promote_types(out.dtype, jnp.float32))


@dataclasses.dataclass(frozen=True)
class Layer:
    """What a layer would hand to the cache for all tokens of a sequence."""

    config: NSAConfig
    query: np.ndarray
    tokens: TokenKeysValues
    gates: np.ndarray
    blocks: np.ndarray | None = None  # a selection to use; None if scores choose

    @classmethod
    def make(
        cls, config=SMALL, *, batch=2, length, num_heads=4, num_kv_heads=2,
        key_dim=KEY_DIM, value_dim=VALUE_DIM, dtype=jnp.float32, seed=0,
    ):  # fmt: skip
        rng = np.random.default_rng(seed)

        def draw(heads, dim):
            return rng.standard_normal((batch, length, heads, dim)).astype(jnp.dtype(dtype))

        tokens = TokenKeysValues(*(draw(num_kv_heads, dim) for dim in (key_dim, value_dim) * 3))
        query, logits = draw(num_heads, key_dim), draw(num_heads, 3).astype(np.float32)
        return cls(config, query, tokens, (1 / (1 + np.exp(-logits))).astype(query.dtype))

    @property
    def arrays(self):
        return self.query, self.tokens, self.gates

    def map(self, function):
        return Layer(self.config, *jax.tree.map(function, self.arrays), self.blocks)

    def operands(self):
        """Arguments of the full forward."""
        batch, length = self.query.shape[:2]
        first = (
            jnp.arange(layout.num_compression_blocks(length, self.config)) * self.config.compression_stride
        )
        inside = first[:, None] + jnp.arange(self.config.compression_block_size)
        positions = jnp.broadcast_to(first, (batch, len(first)))
        compressed = compress(
            self.config, self.tokens.key_cmp[:, inside], self.tokens.value_cmp[:, inside], positions
        )
        return self.query, *compressed, *self.tokens[2:], self.gates

    @functools.cached_property
    def full(self):
        """Rows of the full forward, in the dtype of the layer."""
        return np.asarray(full_forward(*self.arrays, self.blocks, config=self.config))

    @functools.cached_property
    def exact(self):
        """The full forward in the next wider dtype: float64 for float32, float32 for narrower ones."""
        if self.query.dtype != jnp.float32:
            return self.map(lambda x: x.astype(jnp.float32)).full
        with jax.enable_x64(True):
            return self.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64)).full

    def agree(self, out, rows):
        """Asserts that `out` is within the error budget of these rows of the exact forward: twice the error
        of the reference in the layer's own dtype, plus 8 units of rounding."""
        exact = self.exact[rows]
        scale = np.abs(self.exact).max()
        budget = 2 * np.abs(self.full - self.exact).max() + 8 * float(jnp.finfo(self.query.dtype).eps) * scale
        error = np.abs(np.asarray(out, exact.dtype) - exact).max(initial=0)
        assert error <= budget, f"{error=:.3g} {budget=:.3g}"

    def empty(self, max_length, **arguments):
        """A cache for this layer, with room for steps of 4 tokens."""
        batch, _, num_kv_heads, key_dim = self.tokens.key_slc.shape
        value_dim = self.tokens.value_slc.shape[-1]
        sizes = dict(num_kv_heads=num_kv_heads, key_dim=key_dim, value_dim=value_dim, step_capacity=4)
        rest = dict(config=self.config, dtype=self.query.dtype)
        return init_cache(batch, max_length, **(sizes | rest | arguments))

    def filled(self, lengths, max_length):
        """A cache of random keys and values that says it holds `lengths` tokens."""
        rng = np.random.default_rng(1)
        held = jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(x.dtype), self.empty(max_length))
        overflowed = np.zeros(len(self.query), bool)
        return held._replace(lengths=np.asarray(lengths, np.int32), overflowed=overflowed)

    def prefill(self, held, *operands, **arguments):
        return in_numpy(compiled_prefill(held, *operands, config=self.config, **arguments))

    def decode_step(self, held, *operands, **arguments):
        return in_numpy(compiled_decode_step(held, *operands, config=self.config, **arguments))

    def slice(self, start, count):
        """Query, tokens and gates of `count` tokens from `start[b]` on, with zeros after the last."""
        starts = np.broadcast_to(start, len(self.query))

        def pick(x):
            x = np.pad(x, ((0, 0), (0, count), (0, 0), (0, 0)))
            return np.stack([row[first : first + count] for row, first in zip(x, starts, strict=True)])

        return jax.tree.map(pick, self.arrays)

    def prefill_in_chunks(self, held, lengths, chunk):
        """Prefills an empty cache; returns the rows of the longest prompt, and the cache."""
        lengths = np.broadcast_to(lengths, len(self.query))
        outputs = [np.zeros((*self.query.shape[:1], 0, *self.query.shape[2:3], VALUE_DIM), self.query.dtype)]
        for start in range(0, lengths.max(), chunk):
            real = np.clip(lengths - start, 0, chunk).astype(np.int32)
            out, held = self.prefill(held, *self.slice(start, chunk), num_tokens=real)
            outputs.append(out)
        return np.concatenate(outputs, axis=1)[:, : lengths.max()], held
