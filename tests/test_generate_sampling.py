"""Top-k and top-p against loops, draws against their probabilities."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from nsa_jax.generate import sample, truncate

VOCAB = 12
truncated, drawn = jax.jit(truncate), jax.jit(sample)  # numbers of any value share a program


def brute_force(row, top_k, top_p):
    """Ids of the kept tokens, taken one by one, the most likely first; of equal ones the lower id first."""
    ranked = sorted(range(len(row)), key=lambda token: (-row[token], token))
    ranked = ranked[: top_k or len(row)]
    if top_p is None:
        return set(ranked)
    weights = np.exp(row[ranked].astype(np.float64) - row.max())
    kept, mass = [], 0.0
    for token, weight in zip(ranked, weights / weights.sum(), strict=True):
        if kept and mass >= top_p:
            break
        kept.append(token)
        mass += weight
    return set(kept)


def rows(kind):
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((40, VOCAB)).astype(np.float32) * 2
    if kind == "ties":
        return np.round(logits)
    if kind == "impossible tokens":
        return np.where(rng.random(logits.shape) < 0.3, -np.inf, logits).astype(np.float32)
    return logits


@pytest.mark.parametrize("top_p", [None, 1e-9, 0.1, 0.5, 0.93, 1.0])
@pytest.mark.parametrize("top_k", [None, 1, 3, VOCAB, 10**6])
def test_truncate_equals_brute_force(top_k, top_p):
    logits = np.concatenate([rows(kind) for kind in ("random", "ties", "impossible tokens")])

    kept = np.asarray(truncated(logits, top_k=top_k, top_p=top_p))

    for row, out in zip(logits, kept, strict=True):
        possible = {token for token in brute_force(row, top_k, top_p) if row[token] > -np.inf}
        assert {int(token) for token in np.flatnonzero(out > -np.inf)} == possible
        assert (out[list(possible)] == row[list(possible)]).all()


def test_top_p_counts_among_what_top_k_left():
    logits = np.log(np.array([[0.4, 0.3, 0.2, 0.1]], np.float32))

    alone, among_two = (np.asarray(truncated(logits, top_k=k, top_p=0.5)) for k in (None, 2))

    assert (alone > -np.inf).tolist() == [[True, True, False, False]]
    assert (among_two > -np.inf).tolist() == [[True, False, False, False]]


@pytest.mark.parametrize("top_k", [None, 2])
def test_top_p_of_one_changes_nothing(top_k):
    """Even if the first probability is rounded to 1, so that nothing is left for the others."""
    logits = np.array([[0.0, -40.0, -80.0, -120.0], [-200.0, 0.0, -1.0, -1.0]], np.float32)

    assert truncated(logits, top_k=top_k, top_p=1.0).tolist() == truncated(logits, top_k=top_k).tolist()


def test_top_p_stops_as_soon_as_there_is_enough():
    """Four equal tokens have exactly a quarter each."""
    kept = np.asarray(truncated(np.zeros((1, 4), np.float32), top_p=0.5)) > -np.inf

    assert kept.tolist() == [[True, True, False, False]]


def test_greedy_takes_the_lowest_of_equal_tokens():
    logits = np.array([[0.0, 2.0, 2.0], [3.0, 1.0, 3.0]], np.float32)

    assert drawn(logits, jax.random.split(jax.random.key(0), 2)).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, None, None), (0.5, None, None), (2.0, 4, None), (1.0, None, 0.8), (2.0, None, 0.7), (1.5, 5, 0.9)],
)
def test_draws_follow_their_probabilities(temperature, top_k, top_p):
    """Chi-square of 20,000 draws with fixed keys; a correct sampler fails for one key in ten thousand."""
    row, draws = rows("random")[0] / 2, 20_000
    kept = sorted(brute_force(row / temperature, top_k, top_p))
    weights = np.exp(row[kept].astype(np.float64) / temperature)
    keys = jax.random.split(jax.random.key(11), draws)

    tokens = drawn(np.tile(row, (draws, 1)), keys, temperature=temperature, top_k=top_k, top_p=top_p)

    counts = np.bincount(tokens, minlength=VOCAB)
    assert len(kept) > 1
    assert counts[kept].sum() == draws
    assert scipy.stats.chisquare(counts[kept], draws * weights / weights.sum()).pvalue > 1e-4


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_draw_depends_on_its_own_row_alone(impl):
    logits, keys = jnp.asarray(rows("random")), jax.random.split(jax.random.key(1, impl=impl), 40)
    draw = jax.jit(lambda logits, keys: sample(logits, keys, temperature=1.0, top_p=0.9))

    together = draw(logits, keys)

    assert together.tolist() == [int(draw(logits[row], keys[row])[0]) for row in np.arange(40)[:, None]]


def test_tiny_temperature_is_greedy_and_does_not_overflow():
    logits, keys = rows("random"), jax.random.split(jax.random.key(1), 40)

    for settings in (
        {"temperature": 1e-30},
        {"temperature": 1e-40, "top_p": 0.5},
        {"temperature": 1e-300, "top_k": 3},
    ):
        draw = jax.jit(functools.partial(sample, **settings))
        assert draw(logits, keys).tolist() == logits.argmax(axis=-1).tolist()


def test_half_precision_logits_are_drawn_in_float32():
    """In bfloat16 the sum of the probabilities of 2048 equal tokens would stop growing well below 1."""
    logits = jnp.zeros((64, 2048), jnp.bfloat16)

    tokens = np.asarray(drawn(logits, jax.random.split(jax.random.key(0), 64), temperature=1.0, top_p=0.9))

    assert tokens.max() > 1024
    assert tokens.max() < 0.9 * 2048 + 1
