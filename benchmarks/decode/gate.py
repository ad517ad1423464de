"""The correctness gate of decode steps: the timed steps, at a small length, against dense maths in float64.

As many rows as are timed are filled up to a small odd length, then decoded past the end of a compression
block, `T` tokens a step.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import definitions, gate, layers
from benchmarks.decode.indexed import choose, index_tokens, indexed
from benchmarks.decode.inputs import TOKEN_NAMES, Setting, compression
from benchmarks.decode.steps import BRANCHES, Program, dense, dense_layer, layer, nsa
from benchmarks.indexer import WHOLE, judge_scores
from benchmarks.inputs import ARGUMENTS, LAYERS, Draw, Shape, tensor
from benchmarks.selections import check_form
from benchmarks.verdict import Verdict, worst
from nsa_jax import attention, cache, layout
from nsa_jax.array_typing import Array
from nsa_jax.layout import Quantised
from nsa_jax.layout.quantised import quantised, widened
from nsa_jax.nn import rotate


def check(operation: str, implementation: str, setting: Setting) -> Verdict:
    """Checks the steps that rows of `operation` time; of branches, which decode nothing, the operations."""
    if operation in BRANCHES.values():
        parts = ("select_blocks", operation) if operation == "selected_attention" else (operation,)
        return worst(*(gate.check_small(part, implementation, "fwd", setting.shape) for part in parts))
    shape = dataclasses.replace(gate.gate_shape(setting.shape), batch=setting.shape.batch)
    small = dataclasses.replace(setting, shape=shape)
    if operation == "native_sparse_attention":
        return _check_nsa(nsa(small), small)
    if operation == WHOLE:
        return _check_indexed(indexed(small), small)
    if operation == "layer":
        return _check_layer(layer(small), small)
    make = dense_layer if operation == "dense_layer" else dense
    return _check_dense(make(small, implementation), small)


def _positions(setting: Setting) -> np.ndarray:
    """Tokens that are decoded: whole steps, and more than a stride."""
    num_steps = -(-(setting.shape.config.compression_stride + 1) // setting.new_tokens)
    return np.arange(num_steps * setting.new_tokens) + setting.shape.length


def _steps(setting: Setting) -> list[slice]:
    """The tokens of each step."""
    firsts = _positions(setting)[:: setting.new_tokens].tolist()
    return [slice(first, first + setting.new_tokens) for first in firsts]


def _whole(setting: Setting) -> Shape:
    """The shape of the sequence up to the last decoded token."""
    return dataclasses.replace(setting.shape, length=int(_positions(setting)[-1]) + 1)


def _empty(program: Program) -> Any:
    """A cache that holds no token, only random numbers that nothing may read."""
    state, _ = program.draw(0)
    return state._replace(lengths=jnp.zeros_like(state.lengths))


def _holding(program: Program, setting: Setting, **tokens: Array) -> Any:
    """A cache that holds these tokens of a row up to the first that is decoded."""
    state, held = _empty(program), slice(0, setting.shape.length)
    written = {name: getattr(state, name).at[:, held].set(x[:, held]) for name, x in tokens.items()}
    return state._replace(**written, lengths=jnp.full_like(state.lengths, held.stop))


def _check_nsa(program: Program, setting: Setting) -> Verdict:
    shape, config, positions = _whole(setting), setting.shape.config, _positions(setting)
    # Keys of the compressed branch are not compressed yet: one for each token.
    names = {name: name.replace("_cmp", "_raw") for name in ("query", "gates", *TOKEN_NAMES)}
    raw = {name: tensor(drawn, shape) for name, drawn in names.items()}
    _, (_, _, compress) = program.draw(0)

    def part(now: slice) -> tuple[cache.TokenKeysValues, Array]:
        return cache.TokenKeysValues(*(raw[name][:, now] for name in TOKEN_NAMES)), raw["gates"][:, now]

    settings: dict[str, Any] = {"config": config, "implementation": setting.implementation}
    prefill = jax.jit(lambda *operands: cache.prefill(*operands, compress=compress, **settings)[1])
    held = slice(0, setting.shape.length)
    state = prefill(_empty(program), raw["query"][:, held], *part(held))
    rows, state = _decode(program, state, raw["query"], lambda now: (*part(now), compress), setting)

    num_blocks = layout.num_compression_blocks(shape.length, config)
    first_positions = np.arange(num_blocks) * config.compression_stride
    window = first_positions[:, None] + np.arange(config.compression_block_size)
    windows = (raw[name][:, window] for name in ("key_cmp", "value_cmp"))
    compress_blocks: Any = compression(setting, 0)
    compressed = compress_blocks(*windows, jnp.asarray(first_positions, jnp.int32)[None])
    now = {name: raw[name][:, positions] for name in ("query", "gates")}
    operands = raw | dict(zip(("key_cmp", "value_cmp"), compressed, strict=True))
    if setting.cache_dtype is not None:  # what rounding changes is not the step's error
        rounded = {name: quantised(operands[name], setting.cache_dtype) for name in TOKEN_NAMES}
        operands |= widened(rounded, jnp.dtype(shape.dtype))
    operands |= now
    blocks = _selected(now["query"], state, setting)
    named = {name: operands[name] for name in ARGUMENTS["native_sparse_attention"]}
    exact = functools.partial(definitions.results, operation="native_sparse_attention", shape=shape)
    verdict = gate.compare(exact, {"out": rows}, (named,), positions, blocks, shape.kv_heads)
    return worst(verdict, check_form(np.asarray(blocks), positions, config))


def _check_indexed(program: Program, setting: Setting) -> Verdict:
    shape, config, positions = _whole(setting), setting.shape.config, _positions(setting)
    query, key, value = (tensor(name, shape) for name in ("query", "key_slc", "value_slc"))
    query_index, key_index = index_tokens("gate", shape.length, setting)
    state = _holding(program, setting, key_slc=key, value_slc=value, kept=key_index)

    def operands(now: slice) -> Any:
        tokens = cache.TokenKeysValues(None, None, key[:, now], value[:, now])
        return tokens, query_index[:, now], key_index[:, now]

    rows, state = _decode(program, state, query, operands, setting)
    # By the same program as in a step, so that it rounds alike: later tokens are not seen.
    choose_blocks = jax.jit(functools.partial(choose, setting=setting))
    chosen = [
        choose_blocks(state._replace(lengths=jnp.full_like(state.lengths, now.start)), query_index[:, now])
        for now in _steps(setting)
    ]
    blocks = jnp.concatenate(chosen, axis=1)
    form = check_form(np.asarray(blocks), positions, config)
    if not form.green:
        return form
    scores = judge_scores(blocks, query_index[:, positions][:, :, :, 0], key_index, positions, shape)
    named = {"query": query[:, positions], "key_slc": key, "value_slc": value}
    exact = functools.partial(definitions.results, operation="selected_attention", shape=shape)
    return worst(gate.compare(exact, {"out": rows}, (named,), positions, blocks, shape.kv_heads), scores)


def _check_layer(program: Program, setting: Setting) -> Verdict:
    shape = _whole(setting)
    x, *arrays = layers.arguments("layer", shape)
    values, merged = tuple(arrays), functools.partial(layers.merged, "layer", setting.implementation, shape)

    # The queries come from the program of a step, so that XLA projects them as in the step. A forward rounds
    # otherwise, and may select other blocks.
    def step(state: Any, x: Array, values: Any) -> tuple[Any, Any]:
        at = state.lengths[:, None] + jnp.arange(x.shape[1])
        out, after = program.step(state, x, values)
        return (rotate(merged(values).query_proj(x), at), out), after

    prefill = jax.jit(lambda state, x, values: merged(values).prefill(x, state)[1])
    state = prefill(_empty(program), x[:, : setting.shape.length], values)
    both = dataclasses.replace(program, step=step)
    (queries, rows), state = _decode(both, state, x, lambda _: values, setting)
    draw = Draw("random", x, _spread(_selected(queries, state, setting), setting))
    return _compare(program, rows, draw, setting)


def _check_dense(program: Program, setting: Setting) -> Verdict:
    shape, operation = _whole(setting), program.operation
    if operation in LAYERS:
        x, *values = layers.arguments(operation, shape)
        own = layers.merged(operation, "", shape, tuple(values))
        key, value = rotate(own.key_proj(x), jnp.arange(shape.length)[None]), own.value_proj(x)
    else:
        x, key, value = (tensor(name, shape) for name in ARGUMENTS[operation])
        values = []
    state = _holding(program, setting, key=key, value=value)
    rows, _ = _decode(
        program, state, x, lambda now: tuple(values) or (key[:, now], value[:, now]), setting
    )  # fmt: skip
    return _compare(program, rows, Draw("random", x), setting)


def _selected(query: Array, state: cache.NSACache, setting: Setting) -> Array:
    """The blocks of the decoded queries, from the keys in the cache: others are rounded otherwise."""
    at, length = jnp.asarray(_positions(setting), jnp.int32), _whole(setting).length
    select = functools.partial(
        attention.select_blocks, config=setting.shape.config, implementation=setting.implementation,
        query_positions=jnp.broadcast_to(at, (setting.shape.batch, at.size)),
    )  # fmt: skip
    num_blocks = layout.num_compression_blocks(length, setting.shape.config)
    assert state.key_cmp is not None
    keys = state.key_cmp
    if state.key_cmp_scale is not None:  # in bfloat16 they would be rounded once more
        query, keys = query.astype(jnp.float32), Quantised(keys, state.key_cmp_scale).widened(jnp.float32)
    return jax.jit(select)(query, keys[:, :num_blocks])


def _decode(
    program: Program, state: Any, x: Array, operands: Callable[[slice], Any], setting: Setting
) -> tuple[Any, Any]:
    """Decodes `x` from the state on: what the steps give, for all new tokens, and the state behind them."""
    step, rows = jax.jit(program.step), []
    for now in _steps(setting):
        out, state = step(state, x[:, now], operands(now))
        rows.append(out if program.operation in LAYERS else out[..., : setting.shape.value_dim])
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *rows), state


def _spread(rows: Array, setting: Setting) -> Array:
    """A whole sequence, of zeros but for the rows of the decoded tokens."""
    size = (rows.shape[0], _whole(setting).length, *rows.shape[2:])
    return jnp.zeros(size, rows.dtype).at[:, _positions(setting)].set(rows)


def _compare(program: Program, rows: Array, draw: Draw, setting: Setting) -> Verdict:
    """Compares decoded rows with those of the whole sequence."""
    rows = _spread(rows, setting)
    return gate.check_rows(program.operation, rows, _positions(setting), draw, _whole(setting))
