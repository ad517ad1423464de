"""A decode step of a layer whose only branch attends to blocks that an indexer chooses, as in MSA.

A step writes the index key of the new tokens, chooses blocks by the index keys of all of them, and attends
from a cache of the selected branch alone: what `NSAAttention(branches=("slc",), selector=IndexerConfig())`
does in a step between its projections. There is one index head for each KV head, and one index key of a
token for all of them.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.decode import inputs
from benchmarks.decode.inputs import Setting, pair
from benchmarks.decode.steps import Program, as_query
from benchmarks.indexer import WHOLE
from benchmarks.inputs import Shape, abstract_arguments, normal, tensor
from benchmarks.roofline import Ceiling, Cost
from nsa_jax import Run, Runs, attention, cache, dispatch
from nsa_jax.array_typing import Array, Int32
from nsa_jax.layout import slots

# What a step may take: a share of the time of copying its bytes, and what its launches take beside that.
BOUND_OVER_BYTES, BOUND_MS = 1.25, 0.012


def indexed(setting: Setting) -> Program:
    """The step; its operands are the new tokens with their index queries and keys."""
    settings: dict[str, Any] = {"config": setting.shape.config, "implementation": setting.implementation}

    def step(state: cache.NSACache, query: Array, operands: Any) -> tuple[Array, cache.NSACache]:
        tokens, query_index, key_index = operands
        # An index query is made of the layer's input. The barrier makes it depend on the query.
        query, query_index = jax.lax.optimization_barrier((query, query_index))
        state = cache.keep(state, key_index)
        blocks = choose(state, query_index, setting)
        out, state = cache.decode_step(
            state, query, tokens, None, compress=None, block_indices=blocks, **settings
        )
        return as_query(out, query), state

    def draw(number: int) -> tuple[Any, Any]:
        state = inputs.nsa_cache(number, setting, branches=("slc",))
        kept = index_keys(f"index keys {number}", setting.max_length, setting)
        new = pair("slc new", setting.new_tokens, number, setting)
        drawn = index_tokens(f"new {number}", setting.new_tokens, setting)
        return state._replace(kept=kept), (cache.TokenKeysValues(None, None, *new), *drawn)

    x = tensor("query", setting.new)
    return Program(WHOLE, setting.implementation, step, x, draw)


def index_keys(name: str, length: int, setting: Setting) -> Array:
    """One index key of each token, as wide as a key."""
    shape = setting.shape
    return normal(name, (shape.batch, length, 1, shape.key_dim), shape.dtype)


def index_tokens(name: str, length: int, setting: Setting) -> tuple[Array, Array]:
    """Index queries `[B, T, K, 1, E]` and index keys `[B, T, 1, E]` of tokens."""
    shape = setting.shape
    size = (shape.batch, length, shape.kv_heads, 1, shape.key_dim)
    return normal(f"index query {name}", size, shape.dtype), index_keys(f"index key {name}", length, setting)


def choose(state: cache.NSACache, query_index: Array, setting: Setting) -> Int32[Array, "B T K R"]:
    """The blocks of new tokens whose index keys are written already, chosen as a layer does."""
    num_new = query_index.shape[1]
    admitted = slots.admit(state.lengths, state.max_length, num_new, None)
    runs = Runs((Run(num_new, admitted.start),), num_queries=admitted.num_tokens)
    return attention.select_by_index(
        query_index, state.kept, config=setting.shape.config, query_positions=runs,
        implementation=setting.implementation,
    )  # fmt: skip


def refusal(setting: Setting) -> str | None:
    """Why the step cannot run here, None if it can."""
    shape = setting.shape
    why = functools.partial(dispatch.unsupported_reason, config=shape.config)
    query, *_, blocks = abstract_arguments("selected_attention", setting.new)
    _, key, value, _ = abstract_arguments("selected_attention", shape)
    sizes = (*blocks.shape[:3], 1, shape.key_dim), (*key.shape[:2], 1, shape.key_dim)
    of_index = (jax.ShapeDtypeStruct(size, shape.dtype) for size in sizes)
    return why("select_by_index", setting.implementation, *of_index) or why(
        "decode_step", setting.implementation, query, key, value, blocks
    )


def cost(reads: Mapping[str, np.ndarray], shape: Shape) -> Cost:
    """One step, the mean of those whose `reads` these are, counted as in `roofline.decode_cost`.

    Index keys of a row are moved once for all its KV heads, and no other keys but those that are selected.
    """
    chosen, visible = reads["selected_attention"].sum(axis=1), reads["dense_attention"]
    num_new, dims = visible.shape[1], shape.key_dim + shape.value_dim
    words = shape.kv_heads * dims * (chosen.mean() + num_new)
    words += shape.key_dim * (visible[:, -1].mean() + num_new)
    flops = 2 * shape.query_heads * dims * chosen.mean()
    flops += 2 * shape.kv_heads * shape.key_dim * visible.sum(axis=1).mean()
    width = jnp.dtype(shape.dtype).itemsize
    return Cost(round(shape.batch * flops), round(shape.batch * words * width))


def bound_ms(of_step: Cost, ceiling: Ceiling) -> float:
    """What a step may take at most."""
    return 1e3 * BOUND_OVER_BYTES * of_step.bytes / ceiling.bytes_per_s + BOUND_MS
