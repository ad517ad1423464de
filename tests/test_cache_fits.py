"""A cache of another layer, model or batch is refused with one clear error before anything is computed.

The modules are abstract, so a computation with their parameters would fail with another error.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import refused
from modules import MODEL, NSA, abstract

from nsa_jax.model import Transformer
from nsa_jax.nn import NSAAttention

ROWS, WIDTH = 3, 12


def layer(num_kv_heads=2, **changes):
    arguments = dict(num_kv_heads=num_kv_heads, head_dim=5, value_dim=3, config=NSA) | changes
    return abstract(NSAAttention, 4, WIDTH, **arguments)


def model(**changes):
    return abstract(Transformer, dataclasses.replace(MODEL, **changes))


def held(made, rows=ROWS):
    cache = jax.eval_shape(lambda: made.init_cache(rows, 16))
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), cache)


OTHER_STRIDE = dataclasses.replace(NSA, compression_stride=1)
OF_A_LAYER = {
    "rows": (lambda: held(layer(), 2), ValueError, "as many rows as the input, got 2 for 3. Call"),
    "KV heads": (lambda: held(layer(4)), ValueError, "heads and dims of its layer, got {'num_kv_heads': 4,"),
    "key dim": (lambda: held(layer(head_dim=6)), ValueError, "'key_dim': 6, 'value_dim': 3} for"),
    "value dim": (lambda: held(layer(value_dim=4)), ValueError, "'value_dim': 4} for"),
    "config": (lambda: held(layer(config=OTHER_STRIDE)), ValueError, "must be given the config of its cache"),
    "a model's caches": (lambda: (held(layer()),), TypeError, "must be an NSACache, got tuple. Pass what"),
}


@pytest.mark.parametrize("step", ["prefill", "decode_step"])
@pytest.mark.parametrize(("make", "error", "told"), OF_A_LAYER.values(), ids=OF_A_LAYER.keys())
def test_a_layer_refuses_another_cache(step, make, error, told):
    x = np.ones((ROWS, 2, WIDTH), np.float32)

    with refused(error, re.escape(told)):
        getattr(layer(), step)(x, make())


def last_of_another():
    return *held(model())[:1], *held(model(num_kv_heads=4))[1:]


OF_A_MODEL = {
    "rows": (lambda: held(model(), 2), ValueError, "as many rows as the input, got 2 for 3. Call"),
    "a layer's cache": (lambda: held(model())[0], TypeError, "a tuple of one cache per layer, got NSACache."),
    "too few": (lambda: held(model())[:1], ValueError, "must have one cache per layer, got 1 for 2 layers."),
    "too many": (lambda: held(model(num_layers=3)), ValueError, "got 3 for 2 layers. Pass"),
    "the last layer's": (last_of_another, ValueError, "heads and dims of its layer, got {'num_kv_heads': 4"),
}


@pytest.mark.parametrize("step", ["prefill", "decode_step"])
@pytest.mark.parametrize(("make", "error", "told"), OF_A_MODEL.values(), ids=OF_A_MODEL.keys())
def test_a_model_refuses_other_caches(step, make, error, told):
    tokens = np.ones((ROWS, 2), np.int32)

    with refused(error, re.escape(told)):
        getattr(model(), step)(tokens, make())


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_model_takes_its_own_caches(kind):
    made, tokens = model(), jax.ShapeDtypeStruct((ROWS, 2), jnp.int32)

    logits, caches = nnx.eval_shape(
        lambda made, tokens: made.decode_step(tokens, kind(made.init_cache(ROWS, 16))), made, tokens
    )

    assert logits.shape == (ROWS, 2, MODEL.vocab_size)
    assert isinstance(caches, tuple)


@pytest.mark.parametrize("num_kv_heads", [3, 0, 8])
def test_kv_heads_that_do_not_divide_the_query_heads(num_kv_heads):
    """The configuration refuses them for every kind of attention, and so does the layer."""
    told = rf"num_kv_heads must (divide num_heads|be at least 1), got {num_kv_heads}"
    for make in (
        lambda: dataclasses.replace(MODEL, num_kv_heads=num_kv_heads),
        lambda: dataclasses.replace(MODEL, num_kv_heads=num_kv_heads, attention="dense"),
        lambda: layer(num_kv_heads),
    ):
        with refused(ValueError, told):
            make()


def test_a_model_width_that_its_heads_do_not_divide():
    with refused(ValueError, r"num_heads must divide in_features .* got 4 and 14\. Pass head_dim"):
        dataclasses.replace(MODEL, model_dim=14)

    assert dataclasses.replace(MODEL, model_dim=14, head_dim=3).head_dim == 3
