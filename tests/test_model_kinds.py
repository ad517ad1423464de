"""Layers of their own kind, window and rotary base: what they compute, cache, select, and what is refused."""

import dataclasses
import pickle

import jax
import numpy as np
import pytest
from flax import nnx
from messages import has_form
from modules import MODEL, abstract, randomised
from selector_examples import Recent

from nsa_jax.cache import DenseCache, NSACache
from nsa_jax.model import Transformer
from nsa_jax.nn import DenseAttention, NSAAttention

MIXED = dataclasses.replace(
    MODEL,
    num_layers=4,
    head_dim=4,  # two pairs; the first turns alike with every rotary base
    attention=["window", "nsa", "window", "dense"],
    window_size=[3, None, None, None],
    rope_base=[50.0, 1e4, 1e4, 1e6],
)
ONE_BRANCH = dict(branches=("slc",), selector=Recent)  # which is quick to compile
SIZES = dict(num_heads=4, in_features=12, num_kv_heads=2, head_dim=4, dtype="float32")
LENGTH = 17


def tokens():
    return np.random.default_rng(0).integers(0, MIXED.vocab_size, (2, LENGTH))


def by_hand(model, ids):
    """The logits of a model, with attention layers made here and given the parameters of its own."""
    attentions = (
        abstract(DenseAttention, **SIZES, window_size=3, rope_base=50.0),
        abstract(NSAAttention, **SIZES, config=MODEL.nsa, **ONE_BRANCH),
        abstract(DenseAttention, **SIZES, window_size=MODEL.nsa.window_size),
        abstract(DenseAttention, **SIZES, rope_base=1e6),
    )
    x = model.embed(ids)
    for layer, attention in zip(model.layers, attentions, strict=True):
        attention = nnx.merge(nnx.graphdef(attention), nnx.state(layer.attention))
        x = x + attention(layer.attention_norm(x))
        x = x + layer.mlp(layer.mlp_norm(x))
    return model.final_norm(x) @ model.embed.embedding[...].T


def test_a_mixed_model_is_that_of_layers_made_by_hand():
    """The same additions in one program, which may fuse them differently."""
    config = dataclasses.replace(MIXED, **ONE_BRANCH)
    graph, state = nnx.split(randomised(abstract(Transformer, config), scale=0.3))

    @jax.jit
    def run(state, ids):
        model = nnx.merge(graph, state)
        return model(ids), by_hand(model, ids)

    found, expected = run(state, tokens())

    # Four layers of about 100 additions each.
    tolerance = 400 * np.finfo(np.float32).eps * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


def test_each_layer_has_the_cache_of_its_kind():
    """A window layer holds a ring of `window_size + step_capacity - 1` tokens, the others all of a row."""
    model = abstract(Transformer, MIXED)

    caches = jax.eval_shape(lambda: model.init_cache(2, 64, step_capacity=2))

    assert [type(cache) for cache in caches] == [DenseCache, NSACache, DenseCache, DenseCache]
    assert [cache.key.shape[1] for cache in caches if isinstance(cache, DenseCache)] == [4, 6, 64]


def test_a_mixed_model_inspects_its_nsa_layers():
    model = abstract(Transformer, MIXED)
    ids = jax.ShapeDtypeStruct((2, LENGTH), np.int32)

    selections = nnx.eval_shape(lambda model, ids: model.inspect(ids), model, ids)

    assert [each.gates.shape for each in selections] == [(2, LENGTH, 4, 3)]


def test_tokens_over_an_axis_need_nsa_in_every_layer():
    sequence = dataclasses.replace(MODEL, attention=("nsa", "nsa"))
    abstract(Transformer, sequence, context_axis="tokens")

    with pytest.raises(NotImplementedError, match=r"needs NSA layers, got attention=\('nsa', 'dense'\)\. Bu"):
        abstract(Transformer, dataclasses.replace(MODEL, attention=("nsa", "dense")), context_axis="tokens")


def test_a_mixed_configuration_is_a_value():
    """It is hashable though it was given lists, equal to its copies, and a static argument of `jit`."""
    copy = pickle.loads(pickle.dumps(MIXED))
    assert (copy, hash(copy)) == (MIXED, hash(MIXED))
    assert dataclasses.replace(MIXED, rope_base=(50.0, 1e4, 1e4, 1e5)) != MIXED
    assert MIXED.window_size == (3, None, None, None)
    numbers = dataclasses.replace(MIXED, window_size=[np.int8(3), None, np.int64(7), None]).window_size
    assert [type(size) for size in numbers] == [int, type(None), int, type(None)]

    @nnx.jit(static_argnums=0)
    def depth(config):
        return len(config.per_layer)

    assert depth(MIXED) == depth(copy) == 4


def test_one_window_size_is_that_of_all_window_layers():
    config = dataclasses.replace(MIXED, window_size=2)

    layers = [each.attention for each in abstract(Transformer, config).layers]

    assert [each.window and each.window.window_size for each in (layers[0], *layers[2:])] == [2, 2, None]
    assert layers[1].config == MODEL.nsa


WRONG = {
    "too few kinds": (
        dict(attention=("nsa", "dense")),
        ValueError,
        "attention must have one value for each layer, got 2 for 4 layers. Pass",
    ),
    "too many windows": (dict(window_size=(3,) * 5), ValueError, "window_size must have one value for each"),
    "no bases": (dict(rope_base=[]), ValueError, "rope_base must have one value for each layer, got 0 for 4"),
    "kind": (
        dict(attention=("window", "nsa", "sparse", "dense")),
        ValueError,
        "attention[2] must be one of ('nsa', 'dense', 'window'), got 'sparse'. Choose",
    ),
    "size": (
        dict(window_size=(3, None, 0, None)),
        ValueError,
        "window_size[2] must be at least 1, got 0. Pass",
    ),
    "kind of size": (dict(window_size=2.5), TypeError, "window_size must be an int, got float. Pass"),
    "base": (
        dict(rope_base=(1e4, 1e4, 0.0, 1e4)),
        ValueError,
        "rope_base[2] must be finite and above 0, got",
    ),
    "kind of base": (
        dict(rope_base=("a", 1, 1, 1)),
        TypeError,
        "rope_base[0] must be a number, got str. Pass",
    ),
    "window of NSA": (
        dict(window_size=(3, 3, None, None)),
        ValueError,
        'window_size must be None except for "window" layers, got (3, 3, None, None) for attention=(\'window',
    ),
    "window without a window layer": (
        dict(window_size=3, attention="nsa"),
        ValueError,
        "window_size must be None except for \"window\" layers, got 3 for attention='nsa'. Leave",
    ),
    "base of a layer beside a function": (
        dict(rotary=lambda heads, positions: heads),
        ValueError,
        "rope_base and rope_scaling must be left out if a rotary function is given, got 50.0",
    ),
}


@pytest.mark.parametrize(("changes", "error", "message"), WRONG.values(), ids=WRONG.keys())
def test_values_that_do_not_suit_the_layers(changes, error, message):
    with pytest.raises(error) as raised:
        dataclasses.replace(MIXED, **changes)
    assert str(raised.value).startswith(message)
    assert has_form(str(raised.value))
