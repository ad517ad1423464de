"""A step updates its cache in place: XLA copies nothing of the size of the capacity, alone or in a loop."""

import jax
import jax.numpy as jnp
import pytest
from cache_layer import SMALL, Layer, decode_step

LAYER = Layer.make(length=4)
HELD = jax.eval_shape(lambda: LAYER.empty(2**18))
# The smallest array that grows with the capacity: a copy of any does not fit below. A step's scores do, which
# grow, too, but are one number a compressed block and KV head where this array has 5.
LIMIT = HELD.value_cmp.size * HELD.value_cmp.dtype.itemsize


def step(held, operands):
    return decode_step(held, *operands, config=SMALL)


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
    compiled = jax.jit(function, donate_argnums=0).lower(HELD, LAYER.slice(0, 1)).compile()

    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(HELD))
    assert memory.temp_size_in_bytes < LIMIT
