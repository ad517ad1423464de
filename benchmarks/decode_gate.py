"""The correctness gate of decode steps: the timed steps, at a small length, against dense maths in float64.

As many rows as are timed are filled up to a small odd length, then decoded past the end of a compression
block, `T` tokens a step.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import gate, layers
from benchmarks.decode_inputs import TOKEN_NAMES, Setting, compression
from benchmarks.decode_steps import BRANCHES, Program, dense, dense_layer, layer, nsa
from benchmarks.inputs import ARGUMENTS, LAYERS, Draw, Shape, tensor
from benchmarks.selections import check_form
from benchmarks.verdict import Verdict, worst
from nsa_jax import attention, cache, layout
from nsa_jax.array_typing import Array
from nsa_jax.nn import DenseAttention, NSAAttention, rotate


def check(operation: str, implementation: str, setting: Setting) -> Verdict:
    """Checks the steps that rows of `operation` time; of branches, which decode nothing, the operations."""
    if operation in BRANCHES.values():
        parts = ("select_blocks", operation) if operation == "selected_attention" else (operation,)
        verdicts = [
            gate.check_small(part, implementation, "fwd", setting.shape, setting.config) for part in parts
        ]
        return max(verdicts, key=lambda verdict: verdict.share)
    shape = gate.gate_shape(setting.shape, setting.config)
    small = dataclasses.replace(setting, shape=dataclasses.replace(shape, batch=setting.shape.batch))
    if operation == "native_sparse_attention":
        return _check_nsa(nsa(small), small)
    if operation == "layer":
        return _check_layer(layer(small), small)
    make = dense_layer if operation == "dense_layer" else dense
    return _check_dense(make(small, implementation), small)


def _positions(setting: Setting) -> np.ndarray:
    """Tokens that are decoded: whole steps, and more than a stride."""
    num_steps = -(-(setting.config.compression_stride + 1) // setting.new_tokens)
    return np.arange(num_steps * setting.new_tokens) + setting.shape.length


def _at(setting: Setting) -> Array:
    """Positions of the decoded tokens of all rows."""
    positions = jnp.asarray(_positions(setting), jnp.int32)
    return jnp.broadcast_to(positions, (setting.shape.batch, positions.size))


def _whole(setting: Setting) -> Shape:
    """The shape of the sequence up to the last decoded token."""
    return dataclasses.replace(setting.shape, length=int(_positions(setting)[-1]) + 1)


def _empty(program: Program) -> Any:
    """A cache that holds no token, only random numbers that nothing may read."""
    state, _ = program.draw(0)
    return state._replace(lengths=jnp.zeros_like(state.lengths))


def _check_nsa(program: Program, setting: Setting) -> Verdict:
    shape, config, length = _whole(setting), setting.config, setting.shape.length
    # Keys of the compressed branch are not compressed yet: one for each token.
    names = {name: name.replace("_cmp", "_raw") for name in ("query", "gates", *TOKEN_NAMES)}
    raw = {name: tensor(drawn, shape, config) for name, drawn in names.items()}

    def part(first: int, last: int) -> tuple[Array, cache.TokenKeysValues, Array]:
        taken = {name: x[:, first:last] for name, x in raw.items()}
        tokens = cache.TokenKeysValues(**{name: taken[name] for name in TOKEN_NAMES})
        return taken["query"], tokens, taken["gates"]

    _, (_, _, compress) = program.draw(0)
    settings: dict[str, Any] = {"config": config, "implementation": setting.implementation}
    prefill = jax.jit(functools.partial(cache.prefill, compress=compress, **settings))
    step = jax.jit(program.step)
    _, state = prefill(_empty(program), *part(0, length))
    outs, positions = [], _positions(setting)
    for first in positions[:: setting.new_tokens].tolist():
        query, tokens, gates = part(first, first + setting.new_tokens)
        out, state = step(state, query, (tokens, gates, compress))
        outs.append(out[..., : shape.value_dim])

    num_blocks = layout.num_compression_blocks(shape.length, config)
    first_positions = np.arange(num_blocks) * config.compression_stride
    window = first_positions[:, None] + np.arange(config.compression_block_size)
    key_windows, value_windows = (raw[name][:, window] for name in ("key_cmp", "value_cmp"))
    first = jnp.asarray(first_positions, jnp.int32)[None]
    compressed = compression(setting, 0)(key_windows, value_windows, first)
    now = {name: raw[name][:, positions] for name in ("query", "gates")}
    operands = raw | dict(zip(("key_cmp", "value_cmp"), compressed, strict=True)) | now
    # The selection comes from the keys in the cache: keys that are rounded otherwise may select other blocks.
    select = jax.jit(functools.partial(attention.select_blocks, **settings, query_positions=_at(setting)))
    blocks = select(now["query"], state.key_cmp[:, :num_blocks])
    named = {name: operands[name] for name in ARGUMENTS["native_sparse_attention"]}
    rows = (jnp.concatenate(outs, axis=1),)
    verdict = gate.compare_rows("native_sparse_attention", rows, named, positions, blocks, config)
    return worst(verdict, check_form(np.asarray(blocks), positions, config))


def _check_layer(program: Program, setting: Setting) -> Verdict:
    shape, length, config = _whole(setting), setting.shape.length, setting.config
    x, *values = layers.arguments("layer", shape, config)
    positions = _positions(setting)

    def merged(values: Any) -> NSAAttention:
        own = layers.merged("layer", setting.implementation, shape, config, values)
        assert isinstance(own, NSAAttention)
        return own

    @jax.jit
    def prefill(state: Any, x: Array, values: Any) -> tuple[Array, Any]:
        return merged(values).prefill(x, state)

    @jax.jit
    def query(state: Any, x: Array, values: Any) -> tuple[Array, Array]:
        own, at = merged(values), state.lengths[:, None] + jnp.arange(x.shape[1])
        return rotate(own.query_proj(x), at), own.decode_step(x, state)[0]

    _, state = prefill(_empty(program), x[:, :length], tuple(values))
    rows, after = _decode(program, state, x, tuple(values), setting)
    # The selection comes from the keys in the cache, and from queries that are computed in one program with a
    # step, so that XLA projects them as in the step. A forward rounds otherwise, and may select other blocks.
    queries = []
    for first in positions[:: setting.new_tokens].tolist():
        now = x[:, first : first + setting.new_tokens]
        queries.append(
            query(state._replace(lengths=jnp.full_like(state.lengths, first)), now, tuple(values))[0]
        )
    keys = after.key_cmp[:, : layout.num_compression_blocks(shape.length, config)]
    chosen = attention.select_blocks(
        jnp.concatenate(queries, axis=1), keys, config=config, query_positions=_at(setting),
        implementation=setting.implementation,
    )  # fmt: skip
    blocks = jnp.zeros((shape.batch, shape.length, *chosen.shape[2:]), chosen.dtype)
    blocks = blocks.at[:, positions].set(chosen)
    return _compare(program, rows, Draw("random", x, blocks), setting)


def _check_dense(program: Program, setting: Setting) -> Verdict:
    shape, config, operation = _whole(setting), setting.config, program.operation
    if operation in LAYERS:
        x, *values = layers.arguments(operation, shape, config)
        own = layers.merged(operation, "", shape, config, tuple(values))
        assert isinstance(own, DenseAttention)
        key, value = rotate(own.key_proj(x), jnp.arange(shape.length)[None]), own.value_proj(x)
    else:
        x, values = tensor("query", shape, config), None
        key, value = tensor("key_win", shape, config), tensor("value_win", shape, config)
    held = slice(0, setting.shape.length)
    state = _empty(program)
    state = state._replace(
        key=state.key.at[:, held].set(key[:, held]),
        value=state.value.at[:, held].set(value[:, held]),
        lengths=jnp.full_like(state.lengths, setting.shape.length),
    )
    operands = (key, value) if values is None else tuple(values)
    rows, _ = _decode(program, state, x, operands, setting)
    return _compare(program, rows, Draw("random", x), setting)


def _decode(
    program: Program, state: Any, x: Array, operands: tuple[Array, ...], setting: Setting
) -> tuple[Array, Any]:
    """Decodes `x` from the state on: the new rows and the state behind them."""
    step, rows = jax.jit(program.step), []
    for first in _positions(setting)[:: setting.new_tokens].tolist():
        now = slice(first, first + setting.new_tokens)
        given = operands if program.operation in LAYERS else tuple(y[:, now] for y in operands)
        out, state = step(state, x[:, now], given)
        rows.append(out if program.operation in LAYERS else out[..., : setting.shape.value_dim])
    return jnp.concatenate(rows, axis=1), state


def _compare(program: Program, rows: Array, draw: Draw, setting: Setting) -> Verdict:
    """Compares decoded rows with those of the whole sequence."""
    shape, positions = _whole(setting), _positions(setting)
    whole = jnp.zeros((shape.batch, shape.length, *rows.shape[2:]), rows.dtype).at[:, positions].set(rows)
    return gate.check_rows(program.operation, whole, positions, draw, shape, setting.config)
