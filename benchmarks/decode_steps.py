"""What `benchmarks.decode` measures: a decode step of one layer, in NSA, a branch alone and dense attention.

All are of one form, `step(state, x, operands) -> (x of the next layer, state)`: the output of a layer is the
query, or the input, of the next, as in a model.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import layers
from benchmarks.inputs import Shape, key, tensor
from nsa_jax import Run, Runs, attention, cache, layout
from nsa_jax.array_typing import Array, Int32
from nsa_jax.config import NSAConfig
from nsa_jax.dispatch import Implementation
from nsa_jax.nn import Compressor, DenseAttention, NSAAttention, rotate

NUM_STEPS = 64  # of one loop; the room beyond `S` is for their tokens
TOKEN_NAMES = cache.TokenKeysValues._fields
# The operations of the branches, by the names of `--branch`.
BRANCHES = {"cmp": "compressed_attention", "slc": "selected_attention", "win": "window_attention"}

type Compression = Literal["mean", "mlp"]
type Step = Callable[[Any, Array, Any], tuple[Array, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Sizes of one measurement; `shape.length` tokens a row are in the cache before the first step."""

    shape: Shape
    config: NSAConfig
    implementation: Implementation
    new_tokens: int = 1
    compression: Compression = "mean"

    @property
    def max_length(self) -> int:
        """Tokens of a row after the last step."""
        return self.shape.length + NUM_STEPS * self.new_tokens

    @property
    def new(self) -> Shape:
        """That of the tokens of a step."""
        return dataclasses.replace(self.shape, length=self.new_tokens)

    @property
    def cache_sizes(self) -> dict[str, Any]:
        """Arguments of the caches' constructors."""
        shape = self.shape
        dims = {"key_dim": shape.key_dim, "value_dim": shape.value_dim, "dtype": shape.dtype}
        return dims | {"num_kv_heads": shape.kv_heads}


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A step, and what the layers are that take it.

    Attributes:
      operation: what its rows are called.
      implementation: what runs it.
      step: of one layer.
      x: input of the first layer.
      draw: makes the state of a layer, `S` random tokens a row, and its operands, from the layer's number.
    """

    operation: str
    implementation: str
    step: Step
    x: Array
    draw: Callable[[int], tuple[Any, Any]]


class Position(NamedTuple):
    """The state of a branch alone: how many tokens are before the next one. Its keys do not change."""

    lengths: Int32[Array, " B"]


def nsa(setting: Setting) -> Program:
    """The attention step of the library."""
    settings: dict[str, Any] = {"config": setting.config, "implementation": setting.implementation}

    def step(state: cache.NSACache, query: Array, operands: Any) -> tuple[Array, cache.NSACache]:
        tokens, gates, compress = operands
        out, state = cache.decode_step(state, query, tokens, gates, compress=compress, **settings)
        return _as_query(out, query), state

    def draw(number: int) -> tuple[Any, Any]:
        tokens = cache.TokenKeysValues(**{name: _token(name, number, setting) for name in TOKEN_NAMES})
        gates = tensor("gates", setting.new, setting.config)
        return _nsa_cache(number, setting), (tokens, gates, compression(setting, number))

    x = tensor("query", setting.new, setting.config)
    return Program("native_sparse_attention", setting.implementation, step, x, draw)


def dense(setting: Setting, implementation: str) -> Program:
    """A step of dense attention: the library's, or `jax_nn`."""

    def step(state: cache.DenseCache, query: Array, operands: Any) -> tuple[Array, cache.DenseCache]:
        out, state = _dense_step(implementation)(state, query, *operands)
        return _as_query(out, query), state

    def draw(number: int) -> tuple[Any, Any]:
        operands = tuple(_token(name, number, setting) for name in ("key_slc", "value_slc"))
        return _dense_cache(number, setting), operands

    x = tensor("query", setting.new, setting.config)
    return Program("dense_attention", implementation, step, x, draw)


def branch(setting: Setting, name: str) -> Program:
    """The operations of one branch alone: of `slc`, the selection and the attention to what it chose."""
    config, num_new = setting.config, setting.new_tokens
    settings: dict[str, Any] = {"config": config, "implementation": setting.implementation}

    def attend(query: Array, lengths: Array, *arrays: Array) -> Array:
        at: dict[str, Any] = settings | {"query_positions": Runs((Run(num_new, lengths),))}
        if name == "cmp":
            return attention.compressed_attention(query, *arrays, **at).out
        if name == "win":
            first = lengths - (config.window_size - 1)
            return attention.window_attention(query, *arrays, first_key=first, **at).out
        key_cmp, lse_cmp, key_slc, value_slc = arrays
        blocks = attention.select_blocks(query, key_cmp, lse_cmp=lse_cmp, **at)
        return attention.selected_attention(query, key_slc, value_slc, blocks, **at).out

    def step(state: Position, query: Array, arrays: Any) -> tuple[Array, Position]:
        # The barrier makes arrays that depend on the query: nothing of them is computed before the loop.
        query, arrays = jax.lax.optimization_barrier((query, arrays))
        out = attend(query, state.lengths, *arrays)
        return _as_query(out, query), Position(state.lengths + num_new)

    def draw(number: int) -> tuple[Any, Any]:
        num_blocks = layout.num_compression_blocks(setting.max_length, config)
        pairs = {"cmp": num_blocks, "slc": setting.max_length, "win": config.window_size - 1 + num_new}
        drawn: tuple[Array, ...] = _pair(name, pairs[name], number, setting)
        if name == "slc":
            # A constant, for it scales the scores of a head and changes no time.
            lse = jnp.full((*tensor("query", setting.new, config).shape[:3],), math.log(max(num_blocks, 1)))
            drawn = (_pair("cmp", num_blocks, number, setting)[0], lse, *drawn)
        return Position(_lengths(setting)), drawn

    x = tensor("query", setting.new, config)
    return Program(BRANCHES[name], setting.implementation, step, x, draw)


def layer(setting: Setting) -> Program:
    """`NSAAttention.decode_step`: with projections, rotary embedding, MLP compressors and gates."""

    def step(state: cache.NSACache, x: Array, values: Any) -> tuple[Array, cache.NSACache]:
        own = layers.merged("layer", setting.implementation, setting.shape, setting.config, values)
        assert isinstance(own, NSAAttention)
        return own.decode_step(x, state)

    def draw(number: int) -> tuple[Any, Any]:
        _, *values = layers.arguments("layer", setting.new, setting.config)
        return _nsa_cache(number, setting), tuple(values)

    return Program("layer", setting.implementation, step, tensor("x", setting.new, setting.config), draw)


def dense_layer(setting: Setting, implementation: str) -> Program:
    """The same of `DenseAttention`, with ours or `jax_nn` between its projections."""

    def step(state: cache.DenseCache, x: Array, values: Any) -> tuple[Array, cache.DenseCache]:
        own = layers.merged("dense_layer", "", setting.shape, setting.config, values)
        assert isinstance(own, DenseAttention)
        at = state.lengths[:, None] + jnp.arange(setting.new_tokens, dtype=jnp.int32)
        query, key = rotate(own.query_proj(x), at), rotate(own.key_proj(x), at)
        out, state = _dense_step(implementation)(state, query, key, own.value_proj(x))
        return own.out_proj(out), state

    def draw(number: int) -> tuple[Any, Any]:
        _, *values = layers.arguments("dense_layer", setting.new, setting.config)
        return _dense_cache(number, setting), tuple(values)

    return Program("dense_layer", implementation, step, tensor("x", setting.new, setting.config), draw)


def compression(setting: Setting, number: int) -> Any:
    """The mean without rotation, which as an angle changes no time; or the MLP, with rotation."""
    if setting.compression == "mean":
        return cache.MeanCompression()
    shape, rngs = setting.shape, nnx.Rngs(number)
    both = tuple(
        Compressor(dim, setting.config, param_dtype=jnp.dtype(shape.dtype), rngs=rngs)
        for dim in (shape.key_dim, shape.value_dim)
    )
    graph, parameters = nnx.split(both)
    # The last layer starts at zero.
    noisy = jax.tree.map(lambda x: x + layers.NOISE * jax.random.normal(rngs(), x.shape, x.dtype), parameters)
    return jax.tree_util.Partial(functools.partial(_compress, graph), noisy)


def jax_nn_step(
    state: cache.DenseCache, query: Array, key: Array, value: Array
) -> tuple[Array, cache.DenseCache]:
    """`jax.nn.dot_product_attention` over arrays of the same capacity."""
    index = state.lengths[:, None] + jnp.arange(query.shape[1], dtype=jnp.int32)
    row = jnp.arange(query.shape[0])[:, None]
    keys, values = state.key.at[row, index].set(key), state.value.at[row, index].set(value)
    state = state._replace(key=keys, value=values, lengths=state.lengths + query.shape[1])
    seen: dict[str, Any] = {"key_value_seq_lengths": state.lengths}
    if query.shape[1] > 1:  # its causal mask counts queries from key 0
        seen = {"mask": (jnp.arange(keys.shape[1]) <= index[..., None])[:, None]}
    return jax.nn.dot_product_attention(query, keys, values, **seen), state


def count_reads(setting: Setting) -> dict[str, np.ndarray]:
    """Keys that each operation gathered for each query of each step, in one KV head, `[steps, T]`.

    Counted from the masks of `xla`. Heads, dims and compression have no part in it, so they are small here;
    dense attention gathers all keys.
    """
    shape = Shape(length=setting.shape.length, query_heads=1, kv_heads=1, key_dim=8, value_dim=8)
    setting = dataclasses.replace(setting, shape=shape, compression="mean")
    program = nsa(setting)
    state, (tokens, gates, compress) = program.draw(0)

    def step(state: cache.NSACache, _: None) -> tuple[cache.NSACache, cache.Reads]:
        counted = cache.decode_step(
            state, program.x, tokens, gates, config=setting.config, compress=compress, count_reads=True,
            implementation="xla",
        )  # fmt: skip
        return counted.cache, counted.reads

    _, reads = jax.jit(lambda state: jax.lax.scan(step, state, length=NUM_STEPS))(state)
    counted = {BRANCHES[name]: np.asarray(x)[:, 0, :, 0] for name, x in reads._asdict().items()}
    lengths = np.arange(shape.length + 1, setting.max_length + 1).reshape(NUM_STEPS, setting.new_tokens)
    return counted | {"dense_attention": lengths}


def _as_query(out: Array, query: Array) -> Array:
    """The output, with dims of the old query where values are narrower than keys."""
    return jnp.concatenate([out, query[..., out.shape[-1] :]], axis=-1)


def _dense_step(implementation: str) -> Callable[..., tuple[Array, cache.DenseCache]]:
    if implementation == "jax_nn":
        return jax_nn_step
    named = cast(Implementation, implementation)
    return functools.partial(cache.dense_decode_step, implementation=named)


def _compress(graph: Any, parameters: Any, key_windows: Array, value_windows: Array, first: Array) -> Any:
    compress_key, compress_value = nnx.merge(graph, parameters)
    return rotate(compress_key(key_windows), first), compress_value(value_windows)


def _nsa_cache(number: int, setting: Setting) -> cache.NSACache:
    make = functools.partial(
        cache.init_cache, setting.shape.batch, setting.max_length, config=setting.config,
        step_capacity=max(8, setting.new_tokens), **setting.cache_sizes,
    )  # fmt: skip
    return _filled(jax.eval_shape(make), number, setting)


def _dense_cache(number: int, setting: Setting) -> cache.DenseCache:
    make = functools.partial(
        cache.init_dense_cache, setting.shape.batch, setting.max_length, **setting.cache_sizes
    )
    return _filled(jax.eval_shape(make), number, setting)


def _filled(empty: Any, number: int, setting: Setting) -> Any:
    """A cache of random keys and values; nothing is allocated beside it."""

    def fill(name: str, x: jax.ShapeDtypeStruct) -> Array:
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        return _normal(f"{name} {number}", x.shape, x.dtype.name) if floating else jnp.zeros(x.shape, x.dtype)

    arrays = {name: fill(name, x) for name, x in empty._asdict().items()}
    return empty._replace(**arrays | {"lengths": _lengths(setting)})


def _lengths(setting: Setting) -> Array:
    return jnp.full(setting.shape.batch, setting.shape.length, jnp.int32)


def _token(name: str, number: int, setting: Setting) -> Array:
    """Keys or values of the new tokens of a layer."""
    dim = setting.shape.key_dim if name.startswith("key") else setting.shape.value_dim
    size = (setting.shape.batch, setting.new_tokens, setting.shape.kv_heads, dim)
    return _normal(f"new {name} {number}", size, setting.shape.dtype)


def _pair(name: str, length: int, number: int, setting: Setting) -> tuple[Array, Array]:
    shape = setting.shape
    dims = {f"key_{name}": shape.key_dim, f"value_{name}": shape.value_dim}
    sizes = {kind: (shape.batch, length, shape.kv_heads, dim) for kind, dim in dims.items()}
    key, value = (_normal(f"{kind} {number}", size, shape.dtype) for kind, size in sizes.items())
    return key, value


def _normal(name: str, shape: tuple[int, ...], dtype: str) -> Array:
    return _draw(key(name), shape, dtype)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _draw(key: Array, shape: tuple[int, ...], dtype: str) -> Array:
    """Compiled, so that no float32 array stands beside a large one of 16 bits."""
    return jax.random.normal(key, shape).astype(dtype)
