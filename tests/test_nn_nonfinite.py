"""A model passes on no NaN from tokens that it may not see, in a forward and in decoding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_model import CONFIG, LENGTH, make_model, tokens

BAD = CONFIG.vocab_size - 1  # the token whose embedding is NaN


# Compiled once for all places, and for the clean and the spoilt model.
forward = jax.jit(lambda model, ids, segment_ids: model(ids, segment_ids=segment_ids))
prefill = jax.jit(lambda model, *x: model.prefill(*x))


@pytest.fixture(scope="module")
def models():
    """The same model, without and with a token that spoils everything it reaches."""
    clean, spoilt = (make_model(dataclasses.replace(CONFIG, num_layers=1)) for _ in range(2))
    embedding = spoilt.embed.embedding
    embedding[...] = embedding[...].at[BAD].set(jnp.nan)
    return clean, spoilt


def harmless():
    return np.minimum(tokens(), BAD - 1)


@pytest.mark.parametrize("place", ["other_row", "future", "padding", "other_sequence"])
def test_forward(models, place):
    ids, segment_ids = harmless(), np.ones((2, LENGTH), np.int32)
    hidden = np.zeros((2, LENGTH), bool)
    if place == "other_row":
        hidden[0] = True
    elif place == "future":
        hidden[:, 9:] = True
    else:
        hidden[:, 4:9] = True
        segment_ids[:, 4:9] = 0 if place == "padding" else 2
        segment_ids[:, 9:] = 3
    found = np.asarray(forward(models[1], np.where(hidden, BAD, ids), segment_ids))
    expected = np.asarray(forward(models[1], ids, segment_ids))

    columns = np.arange(CONFIG.vocab_size) != BAD  # BAD's logit is NaN: the output is tied to the embedding
    assert np.abs(found - expected)[~hidden][:, columns].max() < 1e-5 * np.abs(expected)[..., columns].max()
    assert np.isnan(found)[hidden].all()


def test_decoding(models):
    """All tokens of row 0, the padding of row 1's prompt and the unused slots of both rows are spoilt."""
    clean, spoilt = models
    ids = harmless()
    prompt = np.where(np.arange(9) < np.array([[9], [5]]), ids[:, :9], BAD)
    prompt[0] = BAD
    held = jax.tree.map(lambda x: np.full_like(x, np.nan) if x.ndim == 4 else x, spoilt.init_cache(2, LENGTH))
    _, held = prefill(spoilt, prompt, held, np.array([9, 5]))
    _, fresh = prefill(clean, prompt, clean.init_cache(2, LENGTH), np.array([9, 5]))
    step = jax.jit(lambda model, *x: model.decode_step(*x))
    columns = np.arange(CONFIG.vocab_size) != BAD
    for t in range(5, 13):
        ours, held = step(spoilt, np.array([[BAD], ids[1, t : t + 1]]), held, np.ones(2, np.int32))
        theirs, fresh = step(clean, ids[:, t : t + 1], fresh, np.ones(2, np.int32))

        ours, theirs = np.asarray(ours), np.asarray(theirs)
        assert np.abs(ours - theirs)[1][..., columns].max() < 1e-5 * np.abs(theirs).max()
        assert np.isnan(ours[0]).all()
