"""The kernels that share the slots of few queries become machine code."""

import jax
import jax.numpy as jnp
import pytest
import triton_kernels

from nsa_jax import NSAConfig, Run, Runs, attention
from nsa_jax.kernels.triton.sizes import FEW_QUERIES, FewQueriesSizes

CONFIG = NSAConfig(selection_block_size=128)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "tokens", "heads", "dim", "dtype"),
    [(90, 1, 16, 128, "bfloat16"), (90, 8, 3, 96, "float32"), (80, 1, 64, 256, "bfloat16")],
)
def test_kernels_become_machine_code(capability, tokens, heads, dim, dtype):
    def array(*shape):
        return jax.ShapeDtypeStruct((8, *shape), dtype)

    def attend(query, key, value, blocks, lengths):
        where = Runs((Run(tokens, lengths),))
        settings = dict(config=CONFIG, query_positions=where, implementation="triton")
        return attention.selected_attention(query, key, value, blocks, **settings)

    keys = array(65536, 4, dim), array(65536, 4, dim)
    blocks = jax.ShapeDtypeStruct((8, tokens, 4, 16), jnp.int32)
    lengths = jax.ShapeDtypeStruct((8,), jnp.int32)
    found = triton_kernels.compiled(
        attend, array(tokens, 4 * heads, dim), *keys, blocks, lengths, capability=capability
    )

    assert [kernel.name for kernel in found] == ["nsa_selected_parts", "nsa_selected_merge"]
    for kernel in found:
        print(kernel._replace(ptx=""))
        assert kernel.spill_bytes == 0
    assert found[0].shared_bytes <= 99 * 1024


def test_shares_fill_the_gpu():
    """A program for each slot where there are few rows, one for all where there are many."""
    sizes = FewQueriesSizes(64, 4, 3)
    assert [sizes.shares(tokens, 16) for tokens in (1, 4, 32, 100, 512, 10**6)] == [16, 16, 16, 4, 1, 1]
    assert sizes.shares(1, 3) == 2
    assert FEW_QUERIES == 8  # as many as a step may append by default
