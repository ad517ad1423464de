"""Needles that a model finds or cannot find, and the blocks that dense attention likes best, by loops."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import has_form, refused
from modules import MODEL, NSA, abstract, randomised

from nsa_jax.evaluate import MagicNumber, Needles, PassKey, TokenPairs, block_recall, find_needles, recall
from nsa_jax.model import Transformer

VOCAB, FILLER = 16, np.arange(4)
NAMES, VALUES = range(4, 9), range(9, 16)


class Finder(nnx.Module):
    """Writes what follows the first place of its newest token, if this is among the last `reach` tokens.

    Else it writes the lowest of the values.
    """

    def __init__(self, reach):
        self.reach, self.prompts = reach, Log()

    def init_cache(self, batch, max_length):
        return dict(tokens=jnp.zeros((batch, max_length), jnp.int32), lengths=jnp.zeros(batch, jnp.int32))

    def prefill(self, tokens, cache, num_tokens):
        jax.debug.callback(self.prompts.append, tokens)
        logits, cache = self.decode_step(tokens, cache, num_tokens)
        return logits[:, 0], cache

    def decode_step(self, tokens, cache, num_tokens):
        rows, offset = jnp.arange(len(tokens))[:, None], jnp.arange(tokens.shape[1])
        slot = jnp.where(offset < num_tokens[:, None], cache["lengths"][:, None] + offset, 10**6)
        held, end = cache["tokens"].at[rows, slot].set(tokens, mode="drop"), cache["lengths"] + num_tokens
        newest = jnp.take_along_axis(held, end[:, None] - 1, axis=1)
        place = (held == newest).argmax(1)
        follows = jnp.take_along_axis(held, place[:, None] + 1, axis=1)[:, 0]
        seen = (place < end - 1) & (place >= end - self.reach)
        written = jnp.where(seen, follows, min(VALUES))
        return jax.nn.one_hot(written, VOCAB)[:, None], dict(tokens=held, lengths=end)


class Log(list):
    """Compared by identity, as a static attribute of a module must be."""

    __hash__, __eq__ = object.__hash__, object.__eq__


FORGETFUL = Finder(25)  # one, as each has programs of its own


@pytest.mark.parametrize("length", [1, 2])
def test_a_model_that_finds_needles_of_its_last_tokens(length):
    """Of 40 tokens, the facts at depths 0, 1/4, 1/2, 3/4, 1 begin about 39, 30, 21, 12, 3 from the end."""
    task = TokenPairs(NAMES, VALUES, length=length)
    given = dict(lengths=(24, 40), depths=(0, 0.25, 0.5, 0.75, 1), asked=4, batch=3, start=[0])

    found = find_needles(FORGETFUL, task, FILLER, **given)

    assert found.found[0].tolist() == [4] * 5
    assert found.found[1, 2:].tolist() == [4] * 3
    assert found.found[1, :2].sum() <= 2  # by luck: the lowest value may be right
    assert found.share == found.found.sum() / 40
    assert found.chance == 1 / 7**length


def test_a_model_without_finite_logits_finds_nothing():
    """Not even token 0, which usually fills a row after its end."""

    class Broken(Finder):
        def prefill(self, tokens, cache, num_tokens):
            logits, cache = super().prefill(tokens, cache, num_tokens)
            return jnp.full_like(logits, jnp.nan), cache

    found = find_needles(Broken(25), TokenPairs(NAMES, [0, 1]), FILLER + 9, lengths=[24], depths=2, asked=3)

    assert found.found.tolist() == [[0, 0]]


def test_prompts():
    """Each has its length, begins with `start`, ends with the question, and has each fact, where asked."""
    model, task = Finder(100), TokenPairs(NAMES, VALUES, length=2, keys=3)
    given = dict(depths=4, asked=2, batch=5, start=[3, 2], seed=1)

    found = find_needles(model, task, FILLER, lengths=[33], **given)
    again = find_needles(model, task, FILLER, lengths=[33], **given)

    jax.effects_barrier()
    assert {len(rows) for rows in model.prompts} == {given["batch"]}  # one program
    prompts = np.concatenate(model.prompts)[:8, :33]
    assert (prompts[:, :2] == [3, 2]).all()
    room = 33 - 2 - 3 * 3 - 1
    for prompt, depth in zip(prompts, np.repeat(found.depths, 2), strict=True):
        tokens = prompt.tolist()
        places = [i for i, token in enumerate(tokens[:-1]) if token in NAMES]
        assert len(places) == 3
        assert tokens[-1] in [tokens[i] for i in places]
        assert all({*tokens[i + 1 : i + 3]} <= {*VALUES} for i in places)
        fact = tokens.index(tokens[-1])
        others = sum(i < fact for i in places)
        assert fact == 2 + round(depth * room) + 3 * others
        text = [token for token in tokens[2:-1] if token < 4]
        assert [(a + 1) % 4 for a in text[:-1]] == text[1:]  # the filler goes on after a fact
    np.testing.assert_array_equal(found.found, again.found)
    assert found.depths == (0.125, 0.375, 0.625, 0.875)
    assert found.chance == 1 / 3


def test_tables():
    found = Needles((8, 16), (0.25, 0.75), 2, np.array([[2, 1], [0, 2]]), 0.1)

    assert str(found).splitlines() == [
        "| length | 25% | 75% | all | chance |",
        "|---|---|---|---|---|",
        "| 8 | 2 of 2 | 1 of 2 | 3 of 4 | 0.1 |",
        "| 16 | 0 of 2 | 2 of 2 | 2 of 4 | 0.1 |",
    ]
    assert str(found.merged(1)).splitlines()[2:] == [
        "| 8 | 3 of 4 | 3 of 4 | 0.1 |",
        "| 16 | 2 of 4 | 2 of 4 | 0.1 |",
    ]
    assert found.merged(1).depths == (0.5,)
    with refused(ValueError, "parts must divide the number of depths, got 3 for 2"):
        found.merged(3)


def encode(text):
    return [ord(each) for each in text]


def said(ids):
    return "".join(map(chr, ids))


@pytest.mark.parametrize("keys", [1, 4])
def test_questions_in_words(keys):
    task = MagicNumber(encode, digits=3, keys=keys)
    facts, question, answer = task.draw(np.random.default_rng(0))
    assert len({*facts}) == keys
    assert said(facts[0]) == said(question) + said(answer) + "."
    assert said(question).startswith(" The special magic number for ")
    assert len(said(answer)) == 4
    assert 100 <= int(said(answer)) <= 999
    assert task.chance == (1 / 4 if keys == 4 else 1 / 900)


def test_pass_keys():
    task = PassKey(encode, digits=2)
    (fact,), question, answer = task.draw(np.random.default_rng(0))
    key = said(answer)
    assert said(fact) == f" The pass key is{key}. Remember it.{key} is the pass key."
    assert said(question) == " The pass key is"
    assert task.chance == 1 / 90


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (dict(lengths=[3]), ValueError, "room for the facts and the question, got 3 for 4 tokens"),
        (dict(lengths=[0]), ValueError, r"lengths\[0\] must be at least 1, got 0"),
        (dict(lengths=8), TypeError, "lengths must be a sequence of ints, got int"),
        (dict(lengths=[]), ValueError, r"lengths must have at least one number, got \[\]"),
        (dict(depths=[0.5, 1.5]), ValueError, r"depths\[1\] must be from 0 to 1, got 1.5"),
        (dict(depths=[]), ValueError, "depths must be at least 1, got 0"),
        (dict(asked=0), ValueError, "asked must be at least 1, got 0"),
        (dict(filler=np.zeros((2, 3), int)), ValueError, r"filler must be one row of token ids, got shape"),
        (dict(filler=[1, 2]), TypeError, "filler must be an array, got list"),
        (dict(start=[-1]), ValueError, r"start\[0\] must be at least 0, got -1"),
        (dict(start=1), TypeError, "start must be a sequence of ints, got int"),
        (
            dict(task=MagicNumber(lambda text: [7] * (" 7" in text or "m" in text))),
            ValueError,
            "an answer must have at least one token, got none. Give",
        ),
        (dict(task="a needle"), TypeError, "task must draw questions and know its chance, got str"),
        (dict(model=[]), TypeError, "model must"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused_arguments(given, error, message):
    defaults = dict(model=Finder(9), task=TokenPairs(NAMES, VALUES, length=2), filler=FILLER, lengths=[20])

    with refused(error, message):
        find_needles(**defaults | dict(depths=2) | given)


@pytest.mark.parametrize(
    "make",
    [
        lambda: TokenPairs([1], VALUES, keys=2),
        lambda: TokenPairs([1, 1], VALUES),
        lambda: TokenPairs(NAMES, [3]),
        lambda: MagicNumber(ord, digits=10),
        lambda: MagicNumber(ord, keys=31),
        lambda: PassKey(ord, digits=0),
    ],
)
def test_refused_tasks(make):
    with pytest.raises(ValueError, match="got") as raised:
        make()
    assert has_form(str(raised.value))


# Two documents and padding; one document. Three blocks of 4 tokens are selected, two of them in any case.
SEGMENTS = np.array([[1] * 25 + [2] * 13 + [0] * 5, [7] * 43])
BLOCKS = dataclasses.replace(NSA, num_selected_blocks=3, num_initial_blocks=1, num_local_blocks=1)
RECALLED = dataclasses.replace(
    MODEL, num_layers=2, attention=("window", "nsa"), nsa=BLOCKS, dtype="float64", param_dtype="float64",
    embedding_scale=4.0,
)  # fmt: skip


@nnx.jit
def query_key_and_blocks(model, tokens, segment_ids):
    """What the second layer attends with."""
    layer = model.layers[1]
    x = model.layers[0](4 * model.embed(tokens), None, segment_ids)[0]
    operands, selection = (
        getattr(layer.attention, name)(layer.attention_norm(x), segment_ids=segment_ids)
        for name in ("operands", "inspect")
    )
    return operands.query, operands.key_slc, selection.block_indices


def recall_by_loops(model, tokens, segment_ids, counted):
    """Number of queries, and the means of best, best_free, mass and chance for each KV head."""
    layer = model.layers[1]
    query, key, blocks = map(np.asarray, query_key_and_blocks(model, tokens, segment_ids))
    measured = [[] for _ in range(2)]
    for b, t, kv in np.ndindex(*tokens.shape, 2):
        begin = int((segment_ids[b] == segment_ids[b, t]).argmax())
        visible = (t - begin) // 4 + 1
        chosen = {int(j) for j in blocks[b, t, kv] if j >= 0}
        if segment_ids[b, t] == 0 or not counted[b, t] or visible <= len(chosen):
            continue
        shares = np.zeros(visible)
        for n in (2 * kv, 2 * kv + 1):
            logits = key[b, begin : t + 1, kv] @ query[b, t, n] * layer.attention.scale
            weights = np.exp(logits - logits.max())
            for s, weight in enumerate(weights / weights.sum()):
                shares[s // 4] += weight / 2
        free = [j for j in range(visible) if j not in (0, visible - 1)]
        best_free = max(free, key=lambda j: shares[j])
        mass = sum(shares[j] for j in chosen)
        chance = len(chosen & {*free}) / len(free)
        measured[kv].append((shares.argmax() in chosen, best_free in chosen, mass, chance))
    return len(measured[0]), np.mean(measured, axis=1).T


def test_block_recall_by_loops(monkeypatch):
    """Of some queries. Pages and runs of adopt count them all."""
    monkeypatch.setattr(recall, "PROBABILITIES_AT_ONCE", 2 * 2 * 11 * 10)  # chunks of ten queries or fewer
    tokens = np.random.default_rng(0).integers(0, MODEL.vocab_size, SEGMENTS.shape)
    counted = np.random.default_rng(1).random(SEGMENTS.shape) < 0.5
    with jax.enable_x64(True):
        model = randomised(abstract(Transformer, RECALLED), scale=0.5)
        expected = recall_by_loops(model, tokens, SEGMENTS, counted)
        found = block_recall(model, tokens, segment_ids=SEGMENTS, counted=counted)

    assert found.layers == (1,)
    assert found.queries == expected[0] > 5
    measures = np.stack([getattr(found, name)[0] for name in ("best", "best_free", "mass", "chance")])
    np.testing.assert_allclose(measures, expected[1], rtol=1e-12)
    rows = str(found).splitlines()
    assert rows[2] == "| 1 | " + " | ".join(f"{each:.3f}" for each in measures.mean(1)) + " |"


def test_a_model_without_nsa_selects_no_blocks():
    model, tokens = (
        abstract(Transformer, dataclasses.replace(MODEL, attention="dense")),
        np.zeros((1, 4), int),
    )

    with refused(NotImplementedError, "block_recall needs NSA layers, got attention='dense'"):
        block_recall(model, tokens)
    with refused(TypeError, "model must be a Transformer, got list"):
        block_recall([], tokens)
