"""NaN and infinity in unseen slots of a cache change nothing; in a token they reach queries that see it."""

import dataclasses

import jax
import numpy as np
import pytest
from cache_layer import Layer

LENGTH, PROMPT = 40, 9
every_number = pytest.mark.parametrize("number", [np.nan, np.inf], ids=str)


@pytest.fixture(scope="module")
def layer():
    return Layer.make(length=LENGTH)


def decoded(layer, held):
    """A prompt in chunks of 7, then steps: the outputs of all tokens, as a full forward gives them."""
    out, held = layer.prefill_in_chunks(held, PROMPT, 7)
    outputs = [out]
    for t in range(PROMPT, LENGTH):
        out, held = layer.decode_step(held, *layer.slice(t, 1))
        outputs.append(out)
    return np.concatenate(outputs, axis=1)


@every_number
def test_unused_slots_may_hold_anything(layer, number):
    held = jax.tree.map(lambda x: np.full_like(x, number) if x.ndim == 4 else x, layer.empty(LENGTH))

    layer.agree(decoded(layer, held), np.s_[:])


@every_number
def test_other_rows_and_heads_may_hold_anything(layer, number):
    """All of row 0 is spoilt, and KV head 0 of row 1."""

    def spoil(x):
        x = np.array(x)
        x[0], x[1, :, : x.shape[2] // 2] = number, number
        return x

    out = decoded(layer.map(spoil), layer.empty(LENGTH))

    layer.agree(out[1, :, 2:], np.s_[1, :, 2:])
    assert not np.isfinite(out[1, :, :2]).any()


@every_number
def test_padding_of_a_step_may_hold_anything(layer, number):
    """Neither the real tokens of a chunk nor any later step sees the padding after them."""
    held, lengths = layer.empty(LENGTH), np.array([0, 0])
    steps = [(layer.prefill, [5, 3]), (layer.decode_step, [1, 3]), (layer.decode_step, [0, 4])]
    for step, counts in [*steps, (layer.prefill, [4, 2]), (layer.decode_step, [4, 4])]:
        padding = (np.arange(7) >= np.array(counts)[:, None])[..., None, None]
        operands = layer.slice(lengths, 7 if step == layer.prefill else 4)
        operands = jax.tree.map(lambda x, p=padding: np.where(p[:, : x.shape[1]], number, x), operands)
        out, held = step(held, *operands, num_tokens=np.array(counts))
        for row, count in enumerate(counts):
            layer.agree(out[row, :count], np.s_[row, lengths[row] : lengths[row] + count])
        lengths = lengths + counts


@pytest.mark.parametrize(
    "name", ["query", "key_cmp", "value_cmp", "key_slc", "value_slc", "key_win", "value_win"]
)
def test_nan_in_a_token_reaches_the_queries_that_see_it(layer, name):
    """NaN in row 1, KV head 0, at token 5, which leaves the window at token 13: as in the full forward."""

    def spoil(x):
        x = np.array(x)
        x[1, 5, : x.shape[2] // 2] = np.nan
        return x

    if name == "query":
        spoilt = dataclasses.replace(layer, query=spoil(layer.query))
    else:
        tokens = layer.tokens._replace(**{name: spoil(getattr(layer.tokens, name))})
        spoilt = dataclasses.replace(layer, tokens=tokens)
    out = decoded(spoilt, layer.empty(LENGTH))

    assert np.isnan(out).any()
    assert (np.isnan(out) == np.isnan(spoilt.full)).all()
    clean = ~np.isnan(out)
    layer.agree(np.where(clean, out, layer.exact), np.s_[:])
