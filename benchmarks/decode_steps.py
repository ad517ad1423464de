"""What `benchmarks.decode` measures: one decode step in NSA and in dense attention, checked and counted."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import gate, timing
from benchmarks.inputs import ARGUMENTS, Shape, tensor
from nsa_jax import attention, cache, layout
from nsa_jax.array_typing import Array, Float, Int32
from nsa_jax.config import NSAConfig

NEW_TOKENS = 64  # steps of one round, and the room beyond `S`
COMPRESS = cache.Compression()  # not rotated: the angle changes no time
TOKEN_NAMES = cache.TokenKeysValues._fields


class Decoding:
    """A compiled step and the state that it carries, at `S` tokens and the `NEW_TOKENS - 1` lengths after."""

    def __init__(self, step: Callable[..., Any], state: Any, operands: tuple[Any, ...], length: int):
        self.compiled = timing.compile_for(step, (state, *operands), donate=0)
        self.state, self.operands, self.length, self.taken = state, operands, length, 0

    def run(self) -> Any:
        """One token; returns what the step gives beside the state."""
        if self.taken == NEW_TOKENS:  # starts again: the slots beyond `S` are written anew
            lengths = jnp.full_like(self.state.lengths, self.length)
            self.state, self.taken = self.state._replace(lengths=lengths), 0
        out, self.state, *rest = jax.block_until_ready(self.compiled.call(self.state, *self.operands))
        self.taken += 1
        return out, *rest


class DenseCache(NamedTuple):
    """Keys and values of `lengths[b]` tokens a row, in arrays of fixed capacity."""

    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K V"]
    lengths: Int32[Array, "B"]


def nsa_decoding(shape: Shape, config: NSAConfig, implementation: str, **options: Any) -> Decoding:
    """The library's step on a cache that holds `shape.length` random tokens a row."""
    step = functools.partial(cache.decode_step, **_settings(config, implementation), **options)
    return Decoding(step, _filled(_empty(shape, config), shape.length), _token(shape, config), shape.length)


def dense_decoding(shape: Shape, config: NSAConfig) -> Decoding:
    """A step of dense attention over arrays of the same capacity."""
    empty = _empty(shape, config)
    state = _filled(DenseCache(empty.key_slc, empty.value_slc, empty.lengths), shape.length)
    query, tokens, _ = _token(shape, config)
    return Decoding(dense_step, state, (query, tokens.key_slc, tokens.value_slc), shape.length)


def dense_step(state: DenseCache, query: Array, key: Array, value: Array) -> tuple[Array, DenseCache]:
    """Appends one token a row and attends over all of its tokens."""
    row = jnp.arange(state.lengths.shape[0])
    keys = state.key.at[row, state.lengths].set(key[:, 0])
    values = state.value.at[row, state.lengths].set(value[:, 0])
    lengths = state.lengths + 1
    out = jax.nn.dot_product_attention(query, keys, values, key_value_seq_lengths=lengths)
    return out, DenseCache(keys, values, lengths)


def count_reads(shape: Shape, config: NSAConfig, implementation: str) -> list[tuple[int, ...]]:
    """What the three branches gathered, per query and KV head, in each of the `NEW_TOKENS` steps."""
    decoding = nsa_decoding(shape, config, implementation, count_reads=True)
    counted = (decoding.run()[1] for _ in range(NEW_TOKENS))
    return [tuple(int(branch[0, 0, 0]) for branch in reads) for reads in counted]


def branches(shape: Shape, config: NSAConfig, implementation: str) -> dict[str, Callable[[], Any]]:
    """Each branch's own operations, alone, for one query at the end of the sequence."""
    short = dataclasses.replace(shape, length=min(shape.length, config.window_size))
    window = tensor("key_win", short, config), tensor("value_win", short, config)
    names = ("key_cmp", "value_cmp", "key_slc", "value_slc")
    key_cmp, value_cmp, key_slc, value_slc = (tensor(name, shape, config) for name in names)
    query, _, _ = _token(shape, config)
    settings: dict[str, Any] = {"config": config, "implementation": implementation}
    at_end = settings | {"query_positions": jnp.full((shape.batch, 1), shape.length - 1, jnp.int32)}

    def select_and_attend(query: Array, key_cmp: Array, lse_cmp: Array, key: Array, value: Array) -> Any:
        blocks = attention.select_blocks(query, key_cmp, lse_cmp=lse_cmp, **at_end)
        return attention.selected_attention(query, key, value, blocks, **at_end)

    compressed: Callable[..., Any] = functools.partial(attention.compressed_attention, **at_end)
    _, lse_cmp = compressed(query, key_cmp, value_cmp)
    programs: dict[str, tuple[Callable[..., Any], tuple[Array, ...]]] = {
        "cmp": (compressed, (query, key_cmp, value_cmp)),
        "sel": (select_and_attend, (query, key_cmp, lse_cmp, key_slc, value_slc)),
        "win": (functools.partial(attention.window_attention, **settings), (query, *window)),
    }
    return {
        name: timing.compile_for(function, operands).run for name, (function, operands) in programs.items()
    }


def check(shape: Shape, config: NSAConfig, implementation: str) -> gate.Verdict:
    """Prefills a small sequence, decodes past a compression edge, compares those tokens with dense maths."""
    shape = gate.gate_shape(shape, config)
    positions = np.arange(shape.length, shape.length + config.compression_stride + 1)
    whole = dataclasses.replace(shape, length=shape.length + len(positions))
    raw = _tokens(whole, config)
    settings = _settings(config, implementation)
    prefill = jax.jit(functools.partial(cache.prefill, **settings))
    step = jax.jit(functools.partial(cache.decode_step, **settings))
    _, state = prefill(_empty(shape, config), *_part(raw, 0, shape.length))
    outs = []
    for token in positions:
        out, state = step(state, *_part(raw, int(token), int(token) + 1))
        outs.append(out)

    first = np.arange(layout.num_compression_blocks(whole.length, config)) * config.compression_stride
    window = first[:, None] + np.arange(config.compression_block_size)
    compressed = {name: raw[name][:, window].mean(axis=2) for name in ("key_cmp", "value_cmp")}
    now = {name: raw[name][:, positions] for name in ("query", "gates")}
    operands = {name: (raw | compressed | now)[name] for name in ARGUMENTS["native_sparse_attention"]}
    at = jnp.asarray(positions, jnp.int32)[None]
    select: dict[str, Any] = {"config": config, "implementation": implementation, "query_positions": at}
    blocks = jax.jit(functools.partial(attention.select_blocks, **select))(
        operands["query"], operands["key_cmp"]
    )
    rows = (jnp.concatenate(outs, axis=1),)
    return gate.compare_rows("native_sparse_attention", rows, operands, positions, blocks, config)


def _settings(config: NSAConfig, implementation: str) -> dict[str, Any]:
    return {"config": config, "compress": COMPRESS, "implementation": implementation}


def _empty(shape: Shape, config: NSAConfig) -> cache.NSACache:
    dims = {"key_dim": shape.key_dim, "value_dim": shape.value_dim}
    sizes: dict[str, Any] = dims | {"num_kv_heads": shape.kv_heads}
    room = shape.length + NEW_TOKENS
    return cache.init_cache(shape.batch, room, config=config, dtype=shape.dtype, **sizes)


def _filled(state: Any, length: int) -> Any:
    def fill(x: Array) -> Array:
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        return jax.random.normal(jax.random.key(x.size), x.shape).astype(x.dtype) if floating else x

    return jax.tree.map(fill, state)._replace(lengths=jnp.full_like(state.lengths, length))


def _tokens(shape: Shape, config: NSAConfig) -> dict[str, Array]:
    # What the compressed branch is given is raw: as many keys as there are tokens.
    names = {name: name.replace("_cmp", "_raw") for name in ("query", "gates", *TOKEN_NAMES)}
    return {name: tensor(drawn, shape, config) for name, drawn in names.items()}


def _part(raw: dict[str, Array], first: int, last: int) -> tuple[Array, cache.TokenKeysValues, Array]:
    part = {name: x[:, first:last] for name, x in raw.items()}
    tokens = cache.TokenKeysValues(**{name: part[name] for name in TOKEN_NAMES})
    return part["query"], tokens, part["gates"]


def _token(shape: Shape, config: NSAConfig) -> tuple[Array, cache.TokenKeysValues, Array]:
    return _part(_tokens(dataclasses.replace(shape, length=1), config), 0, 1)
