"""A step updates its cache in place: XLA copies nothing of the size of the capacity, alone or in a loop."""

import jax
import jax.numpy as jnp
import pytest
from cache_layer import SMALL, Layer, decode_step

# Many tiles of compressed keys, and rows that a loop writes; or one tile and one row, which XLA compiles
# differently.
CASES = {
    "many tiles": (Layer.make(length=4), 2**18),
    "one tile": (Layer.make(length=4, batch=1, key_dim=64, value_dim=64), 2**13),
}


SHARED = dict(share_keys_values=True)


def step(held, operands):
    return decode_step(held, *operands, config=SMALL)


def loop(held, operands):
    """Loops as `generate` does: a while loop over chunks of a fixed number of steps."""

    def body(_, carry):
        held, out = carry
        query, *rest = operands
        out, held = step(held, (query + 0 * out[..., :1], *rest))
        return held, out

    def chunk(carry):
        return jax.lax.fori_loop(0, 4, body, carry)

    out = jnp.zeros_like(operands[0][..., : held.value_slc.shape[-1]])
    held, out = jax.lax.while_loop(lambda carry: carry[0].lengths[0] < 32, chunk, (held, out))
    return out, held


@pytest.mark.parametrize(
    ("function", "case", "sharing"),
    [
        (step, "one tile", {}),
        (loop, "many tiles", {}),
        (loop, "one tile", SHARED),
    ],
    ids=["step-one tile", "loop-many tiles", "loop-one tile-one pair"],
)
def test_donated_cache_is_updated_in_place(function, case, sharing):
    layer, capacity = CASES[case]
    held = jax.eval_shape(lambda: layer.empty(capacity, **sharing))
    query, tokens, gates = layer.slice(0, 1)
    if sharing:
        tokens = tokens._replace(key_win=None, value_win=None)

    compiled = jax.jit(function, donate_argnums=0).lower(held, (query, tokens, gates)).compile()

    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(held))
    # `value_cmp` is the smallest array that grows with the capacity, so a copy of any such array would exceed
    # its size. A step's scores grow, too, but stay below it: for each compressed block and KV head they are
    # one number with many tiles, where `value_cmp` has 5, and ten with one tile, where it has 64.
    assert memory.temp_size_in_bytes < held.value_cmp.size * held.value_cmp.dtype.itemsize
