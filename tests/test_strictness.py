"""Every operation and step traces where JAX promotes neither dtypes nor ranks on its own."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import pytest
from cache_layer import SMALL, Layer
from cases import BY_NAME

from nsa_jax import attention, cache
from nsa_jax.generate import sample

# In this order: lists of blocks, packed rows, few queries, all branches at once, no compressed keys.
NAMES = ("plain", "packed_rows", "last_queries_of_the_row", "everything_covered", "one_token")


@contextlib.contextmanager
def strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "bfloat16") for name in NAMES), ("packed_rows", "float32"), ("everything_covered", "float32")],
)
def test_operations_and_their_gradients(name, dtype):
    case = BY_NAME[name]
    shared = dict(
        config=case.config, query_positions=jnp.asarray(case.query_positions), implementation="xla",
        segment_ids=None if case.runs is None else jnp.asarray(case.segment_ids),
    )  # fmt: skip

    def everything(operands):
        query, key_cmp, value_cmp, *keys_values, gates = operands
        cmp = attention.compressed_attention(query, key_cmp, value_cmp, **shared)
        blocks = attention.select_blocks(query, key_cmp, lse_cmp=cmp.lse, **shared)
        slc = attention.selected_attention(query, *keys_values[:2], blocks, **shared)
        win = attention.window_attention(query, *keys_values[2:], **shared)
        attention.select_blocks(query, key_cmp, **shared)
        attention.native_sparse_attention(*operands, **shared, block_indices=blocks.astype(jnp.int8))
        attention.native_sparse_attention(
            *operands, **shared, block_indices=blocks, return_probabilities=True
        )
        attention.block_probabilities(query, keys_values[0], **shared, lse=slc.lse, reduce="max")
        target = attention.selected_probabilities(query, keys_values[0], blocks, **shared)
        attention.selection_loss(
            attention.importance_scores(query, key_cmp, **shared)[..., :1], target[..., :1]
        )
        # Gates may have a dtype of their own.
        wide = attention.gated_sum(cmp.out, slc.out, win.out, gates.astype(jnp.float32))
        return wide, cmp.lse, slc.lse, win.lse, attention.native_sparse_attention(*operands, **shared)

    def with_gradients(operands):
        results, pull_back = jax.vjp(everything, operands)
        return results, pull_back(results)

    operands = jax.tree.map(lambda x: jnp.asarray(x, dtype), case.draw())
    with strict():
        results, (gradients,) = jax.eval_shape(with_gradients, operands)

    assert results[-1].dtype == dtype
    assert jax.tree.map(lambda x: (x.shape, x.dtype), gradients) == jax.tree.map(
        lambda x: (x.shape, x.dtype), operands
    )


@pytest.mark.parametrize("step", [cache.prefill, cache.decode_step])
def test_steps_of_a_cache(step):
    layer = Layer.make(length=4, dtype=jnp.bfloat16)
    held, operands = layer.empty(16), layer.slice(0, 4)
    step = functools.partial(step, config=SMALL, compress=compress_first)
    with strict():
        out, after = jax.eval_shape(
            lambda held, *operands: step(held, *operands, num_tokens=jnp.array([4, 2])), held, *operands
        )

    assert out.dtype == jnp.bfloat16
    assert jax.tree.structure(after) == jax.tree.structure(held)


@pytest.mark.parametrize(
    "drawing",
    [{}, dict(temperature=0.7), dict(temperature=0.7, top_k=3, top_p=0.9)],
    ids=["greedy", "all", "some"],
)
def test_draws(drawing):
    logits, keys = jax.ShapeDtypeStruct((2, 7), jnp.bfloat16), jax.random.split(jax.random.key(0), 2)
    with strict():
        tokens = jax.eval_shape(lambda logits, drawing: sample(logits, keys, **drawing), logits, drawing)

    assert tokens == jax.ShapeDtypeStruct((2,), jnp.int32)


def compress_first(key_windows, value_windows, first_positions):
    """The first token of each block. A caller's compressor must itself need no promotion."""
    return key_windows[:, :, 0], value_windows[:, :, 0]
