"""Operands and gradients of the selected branch, for GPU tests of several implementations."""

import jax
import jax.numpy as jnp
import numpy as np

from nsa_jax import layout
from nsa_jax.config import NSAConfig

# Tokens of the sequences of packed rows; padding is before, between and after them.
SEGMENTS = np.repeat([0, 1, 2, 0, 3, 0], [3, 298, 216, 13, 460, 10])


def random_blocks(placed, block, slots, kv_heads, seed=5):
    """The own block of each query and others at random, -1 in unused slots; query 7 chooses nothing."""
    own = jnp.maximum(placed.position, 0)[:, :, None, None] // block
    number = jnp.arange(int(own.max()) + 1)
    score = jax.random.uniform(jax.random.key(seed), (*placed.position.shape, kv_heads, number.size))
    score = jnp.where(number == own, 2, jnp.where(number < own, score, -1))
    score = jnp.where(placed.position[:, :, None, None] >= 0, score, -1)
    best, found = jax.lax.top_k(score, min(slots, number.size))
    found = jnp.sort(jnp.where(best >= 0, found, 2**30), -1)
    found = jnp.where(found == 2**30, -1, found).astype(jnp.int32)
    found = jnp.pad(found, ((0, 0), (0, 0), (0, 0), (0, slots - found.shape[-1])), constant_values=-1)
    return found.at[:, 7].set(-1)


def problem(
    batch=1, length=1000, keys=None, heads=16, kv_heads=4, key_dim=128, value_dim=128, block=64, slots=16,
    dtype="bfloat16", packed=False,
):  # fmt: skip
    """Operands, the gradients of an implementation as a function of its name, and blocks."""
    keys = keys or length
    config = NSAConfig(selection_block_size=block, num_selected_blocks=slots)
    segments = jnp.asarray(np.broadcast_to(SEGMENTS, (batch, keys)), jnp.int32) if packed else None
    placed = layout.place(config, batch=batch, num_queries=length, num_keys=keys, segment_ids=segments)
    blocks = random_blocks(placed, block, slots, kv_heads)

    def normal(seed, *shape, dtype=dtype):
        return jax.random.normal(jax.random.key(seed), (batch, *shape), dtype)

    rows = length, heads * kv_heads
    arrays = (
        normal(1, *rows, key_dim),
        normal(2, keys, kv_heads, key_dim),
        normal(3, keys, kv_heads, value_dim),
    )
    cotangents = normal(4, *rows, value_dim), normal(6, *rows, dtype="float32")
    call = dict(config=config, segment_ids=segments)

    def gradients(attend, *arrays):
        def both(*arrays):
            return tuple(attend(*arrays, blocks, **call))[:2]

        (out, lse), pull_back = jax.vjp(both, *arrays)
        seen = jnp.isfinite(lse)
        return (
            out,
            lse,
            *pull_back(
                (cotangents[0].astype(out.dtype), jnp.where(seen, cotangents[1], 0).astype(lse.dtype))
            ),
        )

    gradients.call = call
    return arrays, blocks, gradients
