"""Nothing of size [T, S] or [T, C] is stored beyond a chunk of queries, as traced and as allocated."""

import functools

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from programs import OPTIONS

from nsa_jax import attention, layout, reference
from nsa_jax.config import NSAConfig

PAPER = NSAConfig()
GROWTH = 4


def shapes(length, config=PAPER, dim=8):
    def array(tokens, heads, dim):
        return jax.ShapeDtypeStruct((1, tokens, heads, dim), jnp.float32)

    compressed = layout.num_compression_blocks(length, config)
    keys = [array(n, 1, dim) for n in (compressed, compressed, *[length] * 4)]
    return array(length, 2, dim), *keys, array(length, 2, 3)


def values_and_gradients(module, config, packed, *operands):
    def attend(*operands):
        segment_ids = jnp.ones(operands[0].shape[:2], jnp.int32) if packed else None
        return module.native_sparse_attention(*operands, config=config, segment_ids=segment_ids)

    out, pull_back = jax.vjp(attend, *operands)
    return out, pull_back(out)


def arrays(jaxpr):
    """Sizes of all arrays that the equations of a program and of those inside it make, in their order."""
    for equation in jaxpr.eqns:
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from arrays(inner)
        yield from (int(np.prod(x.aval.shape, dtype=np.int64)) for x in equation.outvars)


def array_sizes(module, length, packed):
    trace = jax.make_jaxpr(functools.partial(values_and_gradients, module, PAPER, packed))
    return np.array(list(arrays(trace(*shapes(length)).jaxpr)))


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_no_array_grows_faster_than_the_rows(packed):
    short, long = (array_sizes(attention, length, packed) for length in (16384, GROWTH * 16384))

    assert len(short) == len(long) > 500
    assert (long <= 1.05 * GROWTH * short).all()


def test_arrays_of_the_reference_do_grow_with_the_square():
    """This shows that `arrays` finds what is inside the programs."""
    short, long = (array_sizes(reference, length, packed=False) for length in (256, GROWTH * 256))

    assert long.max() > 0.9 * GROWTH**2 * short.max()


def test_temporary_memory_grows_no_faster_than_the_rows():
    config = NSAConfig(
        num_selected_blocks=4, window_size=64
    )  # so that the shorter length fills a chunk of each kind
    program = jax.jit(functools.partial(values_and_gradients, attention, config, False))
    short, long = (
        program.lower(*shapes(n, config)).compile(OPTIONS["reference"]).memory_analysis().temp_size_in_bytes
        for n in (2048, 8192)
    )

    assert 0 < long < 1.05 * GROWTH * short
    assert long < 8192 * 8192 * 4 / 4  # a quarter of one [T, S] array of one head
