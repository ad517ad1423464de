"""A decode step in plain JAX: appends the tokens, then attends to the cache by each branch."""

from typing import Any

import jax

from nsa_jax import layout
from nsa_jax.array_typing import Array, Float, Int
from nsa_jax.compression import Compress
from nsa_jax.config import BRANCHES, NSAConfig
from nsa_jax.kernels.xla import operations
from nsa_jax.layout import FirstKeys, Index, NSACache, Run, Runs, TokenKeysValues, slots
from nsa_jax.layout.appending import append, rings, window_tokens
from nsa_jax.layout.quantised import fields, held


def decode_step(
    cache: NSACache,
    query: Float[Array, "B T N H"],
    tokens: TokenKeysValues,
    gates: Float[Array, "B T N branches"] | None,
    num_tokens: Int[Array, " B"] | None,
    block_indices: Int[Array, "B T K R"] | None,
    compress: Compress | None,
    config: NSAConfig,
    scale: float,
) -> tuple[Float[Array, "B T N V"], NSACache]:
    """Appends the tokens, compresses the blocks they complete, then attends."""
    num_new = query.shape[1]
    new = slots.admit(cache.lengths, cache.max_length, num_new, num_tokens)
    written, recent = dict[str, Any](), dict[str, Any]()
    for name, ring, token, history in rings(cache, tokens, config):
        # Written first and read afterwards, so that XLA need not keep both the old and the new ring.
        written[name] = slots.write_ring(ring, token, new)
        recent[name] = slots.read_ring(written[name], new.start - history, history + num_new)
    cache = append(cache._replace(**fields(written)), tokens, recent, new, config, compress)

    history = config.window_size - 1
    placement = layout.place(
        config,
        batch=query.shape[0],
        num_queries=num_new,
        num_keys=cache.max_length,
        query_positions=Runs((Run(num_new, new.start),), num_queries=new.num_tokens),
        first_keys=FirstKeys(win=Index(new.start - history)),
    )
    outs = []
    if cache.key_cmp is not None and cache.value_cmp is not None:
        key_cmp, value_cmp = held(cache, "key_cmp"), held(cache, "value_cmp")
        cmp = operations.compressed_attention(query, key_cmp, value_cmp, placement, scale)
        outs.append(cmp.out)
        if block_indices is None:
            fixed = jax.lax.stop_gradient((query, key_cmp, cmp.lse))
            block_indices = operations.select_blocks(*fixed, placement, scale)
    assert block_indices is not None
    blocks = layout.distinct_blocks(block_indices, cache.max_length, config)
    key_slc, value_slc = held(cache, "key_slc"), held(cache, "value_slc")
    slc = operations.selected_attention(query, key_slc, value_slc, blocks, placement, scale)
    outs.append(slc.out)
    if "win" in cache.branches(gates):
        window = window_tokens(cache, recent, new, num_new, history, query.dtype)
        outs.append(operations.window_attention(query, *window, placement, scale).out)
    if len(outs) == len(BRANCHES):
        return operations.gated_sum(*outs, gates), cache
    return operations.sum_of_branches(gates, *outs), cache
