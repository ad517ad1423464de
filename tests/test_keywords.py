"""A keyword of another library is refused with a pointer to what is not supported."""

import inspect

import jax.numpy as jnp
import pytest
from flax import nnx
from messages import has_form

import nsa_jax
from nsa_jax import nn

ONES = jnp.ones((1, 4, 2, 8))


@pytest.mark.parametrize("keyword", ["soft_cap", "sinks", "is_causal"])
@pytest.mark.parametrize(
    "call",
    [
        lambda **more: nsa_jax.window_attention(ONES, ONES, ONES, config=nsa_jax.NSAConfig(), **more),
        lambda **more: nsa_jax.gated_sum(ONES, ONES, ONES, ONES[..., :3], **more),
        lambda **more: nn.NSAAttention(4, 32, num_kv_heads=2, rngs=nnx.Rngs(0), **more),
        lambda **more: nn.DenseAttention(4, 32, num_kv_heads=2, rngs=nnx.Rngs(0), **more),
    ],
    ids=["window_attention", "gated_sum", "NSAAttention", "DenseAttention"],
)
def test_a_keyword_that_does_not_exist_points_to_the_table(call, keyword):
    with pytest.raises(TypeError, match=f"got '{keyword}'.*what is not supported") as error:
        call(**{keyword: 1})
    assert has_form(str(error.value))


def test_an_old_name_says_what_to_use():
    with pytest.raises(ImportError, match=r"got CountedStep, .* Use nsa_jax\.cache\.count_reads"):
        from nsa_jax.cache import CountedStep  # noqa: F401
    with pytest.raises(ImportError, match=r"Use nsa_jax\.cache\.count_reads"):
        from nsa_jax.array_typing import AttendedReads  # noqa: F401
    assert not hasattr(nsa_jax.cache, "CountedSteps")


def test_signatures_and_annotations_are_those_of_the_function():
    assert "query" in inspect.signature(nsa_jax.window_attention).parameters
    assert "query" in nsa_jax.window_attention.__annotations__
