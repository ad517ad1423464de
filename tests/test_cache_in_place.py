"""A step updates its cache in place: XLA copies nothing of the size of the capacity, alone or in a loop."""

import jax
import jax.numpy as jnp
import pytest
from cache_layer import SMALL, Layer

from nsa_jax import cache

CAPACITY = 8192
LAYER = Layer.make(length=4)
# The smallest array that a step must not copy; what a step of SMALL works on is far below.
LIMIT = LAYER.empty(CAPACITY).value_cmp.nbytes


def step(held, operands):
    return cache.decode_step(held, *operands, config=SMALL, compress=LAYER.compress)


def loop(held, operands):
    """As `generate` loops: a while loop over chunks of a fixed number of steps."""

    def body(_, carry):
        held, out = carry
        query, *rest = operands
        out, held = step(held, (query + 0 * out[..., :1], *rest))
        return held, out

    def chunk(carry):
        return jax.lax.fori_loop(0, 4, body, carry)

    out = jnp.zeros_like(operands[0][..., :5])
    held, out = jax.lax.while_loop(lambda carry: carry[0].lengths[0] < 32, chunk, (held, out))
    return out, held


@pytest.mark.parametrize("function", [step, loop])
def test_donated_cache_is_updated_in_place(function):
    held = LAYER.empty(CAPACITY)
    compiled = jax.jit(function, donate_argnums=0).lower(held, LAYER.slice(0, 1)).compile()

    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(x.nbytes for x in jax.tree.leaves(held))
    assert memory.temp_size_in_bytes < LIMIT / 2
