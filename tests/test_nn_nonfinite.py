"""A model passes on no NaN from tokens that it may not see; steps through a cache are in test_cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_model import CONFIG, LENGTH, make_model, tokens

BAD = CONFIG.vocab_size - 1  # the token whose embedding is NaN


# Compiled once for all places.
forward = jax.jit(lambda model, ids, segment_ids: model(ids, segment_ids=segment_ids))


@pytest.fixture(scope="module")
def model():
    """With a token that spoils everything it reaches."""
    spoilt = make_model(dataclasses.replace(CONFIG, num_layers=1))
    embedding = spoilt.embed.embedding
    embedding[...] = embedding[...].at[BAD].set(jnp.nan)
    return spoilt


@pytest.mark.parametrize("place", ["other_row", "future", "padding", "other_sequence"])
def test_forward(model, place):
    ids, segment_ids = np.minimum(tokens(), BAD - 1), np.ones((2, LENGTH), np.int32)
    hidden = np.zeros((2, LENGTH), bool)
    if place == "other_row":
        hidden[0] = True
    elif place == "future":
        hidden[:, 9:] = True
    else:
        hidden[:, 4:9] = True
        segment_ids[:, 4:9] = 0 if place == "padding" else 2
        segment_ids[:, 9:] = 3
    found = np.asarray(forward(model, np.where(hidden, BAD, ids), segment_ids))
    expected = np.asarray(forward(model, ids, segment_ids))

    columns = np.arange(CONFIG.vocab_size) != BAD  # BAD's logit is NaN: the output is tied to the embedding
    assert np.abs(found - expected)[~hidden][:, columns].max() < 1e-5 * np.abs(expected)[..., columns].max()
    assert np.isnan(found)[hidden].all()
