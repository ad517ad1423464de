"""What `benchmarks.decode` measures: a decode step of one layer, of a branch alone, of dense attention.

All are of one form, `step(state, x, operands) -> (x of the next layer, state)`: the output of a layer is the
query, or the input, of the next, as in a model.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import layers
from benchmarks.decode import inputs
from benchmarks.decode.inputs import NUM_STEPS, Setting, compression, pair
from benchmarks.inputs import Shape, tensor
from nsa_jax import Run, Runs, attention, cache, layout
from nsa_jax.array_typing import Array, Int32
from nsa_jax.dispatch import Implementation
from nsa_jax.nn import rotate

# The operations of the branches, by the names of `--branch`.
BRANCHES = {"cmp": "compressed_attention", "slc": "selected_attention", "win": "window_attention"}

type Step = Callable[[Any, Array, Any], tuple[Array, Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A step, and the layers that take it.

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
    """The state of a branch alone: the number of tokens before the next one. Its keys do not change."""

    lengths: Int32[Array, " B"]


def nsa(setting: Setting) -> Program:
    """The attention step of the library."""
    settings: dict[str, Any] = {"config": setting.shape.config, "implementation": setting.implementation}

    def step(state: cache.NSACache, query: Array, operands: Any) -> tuple[Array, cache.NSACache]:
        tokens, gates, compress = operands
        out, state = cache.decode_step(state, query, tokens, gates, compress=compress, **settings)
        return as_query(out, query), state

    def draw(number: int) -> tuple[Any, Any]:
        pairs = (pair(f"{name} new", setting.new_tokens, number, setting) for name in BRANCHES)
        tokens = cache.TokenKeysValues(*itertools.chain(*pairs))
        gates = tensor("gates", setting.new)
        return inputs.nsa_cache(number, setting), (tokens, gates, compression(setting, number))

    x = tensor("query", setting.new)
    return Program("native_sparse_attention", setting.implementation, step, x, draw)


def dense(setting: Setting, implementation: str) -> Program:
    """A step of dense attention: the library's, or `jax_nn`."""

    def step(state: cache.DenseCache, query: Array, operands: Any) -> tuple[Array, cache.DenseCache]:
        out, state = _dense_step(implementation)(state, query, *operands)
        return as_query(out, query), state

    def draw(number: int) -> tuple[Any, Any]:
        return inputs.dense_cache(number, setting), pair("slc new", setting.new_tokens, number, setting)

    x = tensor("query", setting.new)
    return Program("dense_attention", implementation, step, x, draw)


def branch(setting: Setting, name: str) -> Program:
    """The operations of one branch alone; for `slc` the selection and the attention to the chosen blocks."""
    config, num_new = setting.shape.config, setting.new_tokens
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
        return as_query(out, query), Position(state.lengths + num_new)

    def draw(number: int) -> tuple[Any, Any]:
        num_blocks = layout.num_compression_blocks(setting.max_length, config)
        pairs = {"cmp": num_blocks, "slc": setting.max_length, "win": config.window_size - 1 + num_new}
        drawn: tuple[Array, ...] = pair(name, pairs[name], number, setting)
        if name == "slc":
            # A constant: it scales the scores of a head, which changes no time.
            lse = jnp.full((*tensor("query", setting.new).shape[:3],), math.log(max(num_blocks, 1)))
            drawn = (pair("cmp", num_blocks, number, setting)[0], lse, *drawn)
        return Position(inputs.first_lengths(setting)), drawn

    x = tensor("query", setting.new)
    return Program(BRANCHES[name], setting.implementation, step, x, draw)


def layer(setting: Setting) -> Program:
    """`NSAAttention.decode_step`: with projections, rotary embedding, MLP compressors and gates."""

    def step(state: cache.NSACache, x: Array, values: Any) -> tuple[Array, cache.NSACache]:
        return layers.merged("layer", setting.implementation, setting.shape, values).decode_step(x, state)

    def draw(number: int) -> tuple[Any, Any]:
        _, *values = layers.arguments("layer", setting.new)
        return inputs.nsa_cache(number, setting), tuple(values)

    return Program("layer", setting.implementation, step, tensor("x", setting.new), draw)


def dense_layer(setting: Setting, implementation: str) -> Program:
    """The same of `DenseAttention`, with ours or `jax_nn` between its projections."""

    def step(state: cache.DenseCache, x: Array, values: Any) -> tuple[Array, cache.DenseCache]:
        own = layers.merged("dense_layer", "", setting.shape, values)
        at = state.lengths[:, None] + jnp.arange(setting.new_tokens, dtype=jnp.int32)
        query, key = rotate(own.query_proj(x), at), rotate(own.key_proj(x), at)
        out, state = _dense_step(implementation)(state, query, key, own.value_proj(x))
        return own.out_proj(out), state

    def draw(number: int) -> tuple[Any, Any]:
        _, *values = layers.arguments("dense_layer", setting.new)
        return inputs.dense_cache(number, setting), tuple(values)

    return Program("dense_layer", implementation, step, tensor("x", setting.new), draw)


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

    Counted from the masks of `xla`. Heads, dims and compression do not change the counts, so they are small;
    dense attention gathers all keys.
    """
    shape = Shape(
        length=setting.shape.length, query_heads=1, kv_heads=1, key_dim=8, value_dim=8,
        config=setting.shape.config,
    )  # fmt: skip
    setting = Setting(shape, "xla", setting.new_tokens)
    program = nsa(setting)
    state, operands = program.draw(0)

    def step(state: cache.NSACache, _: None) -> tuple[cache.NSACache, cache.Reads]:
        state = program.step(state, program.x, operands)[1]
        return state, cache.count_reads(state, program.x, config=setting.shape.config)

    _, reads = jax.jit(lambda state: jax.lax.scan(step, state, length=NUM_STEPS))(state)
    counted = {BRANCHES[name]: np.asarray(x)[:, 0, :, 0] for name, x in reads._asdict().items()}
    lengths = np.arange(shape.length + 1, setting.max_length + 1).reshape(NUM_STEPS, setting.new_tokens)
    return counted | {"dense_attention": lengths}


def as_query(out: Array, query: Array) -> Array:
    """The output as the next query; if values are narrower than keys, other dims are the old query's."""
    return jnp.concatenate([out, query[..., out.shape[-1] :]], axis=-1)


def _dense_step(implementation: str) -> Callable[..., tuple[Array, cache.DenseCache]]:
    if implementation == "jax_nn":
        return jax_nn_step
    named = cast(Implementation, implementation)
    return functools.partial(cache.dense_decode_step, implementation=named)
