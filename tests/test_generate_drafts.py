"""Sessions with drafts write what sessions without them write, in fewer steps where the drafts agree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import refused
from test_generate import Stub
from token_table import TokenTable

from nsa_jax.generate import (
    Batcher,
    DraftModel,
    Ended,
    LookUp,
    advance,
    drafts,
    extend,
    gather,
    generate,
    start,
    stream,
)  # fmt: skip
from nsa_jax.generate.rows import Rows

VOCAB, ROOM = 17, 60
RNG = np.random.default_rng(0)
PROMPTS, LENGTHS = RNG.integers(0, 11, (3, 27)), np.array([27, 3, 14])
TURN, TURNED = RNG.integers(0, 11, (3, 9)), np.array([9, 0, 1])
MODEL, OTHER = TokenTable(VOCAB), TokenTable(VOCAB, seed=1)
AGREES, DIFFERS, LOOKS = DraftModel(MODEL, 4), DraftModel(OTHER, 4), LookUp(5, match=1)


def no_threes(logits, newest, drawn):
    return logits.at[:, 3].set(-jnp.inf)


# Sequences and tokens that end some rows; penalties, hook and keys depend on what was drawn before.
EVERYTHING = dict(
    temperature=np.array([0.0, 1.0, 1.5]), repetition_penalty=1.1, presence_penalty=0.2,
    stop=[[4, 7, 7], [10, 0]], eos_id=15, logprobs=2, logits_hook=no_threes, key=5,
)  # fmt: skip
# Other values of the same options, which end no row and penalise nothing, so that all share their programs.
ENDLESS = EVERYTHING | dict(
    temperature=np.full(3, 1.2), repetition_penalty=1.0, presence_penalty=0.0, stop=[[99] * 3, [99] * 2],
    eos_id=99, key=1,
)  # fmt: skip


def written(model, drafts, calls=((21,), (15,)), **options):
    """What each call of `advance` gives, with a turn between, and the session."""
    state = start(model, PROMPTS, lengths=LENGTHS, max_length=ROOM, drafts=drafts, pad_id=99, **options)
    told = []
    for number, steps in enumerate(calls):
        state = extend(state, TURN, lengths=TURNED, prefill_chunk=5) if number else state
        for count in steps:
            state, new = advance(state, count)
            told.append(jax.device_get(new))
    return told, state


def steps_of(told):
    return sum(int(new.steps) for new in told)


def assert_same(told, expected):
    for new, want in zip(told, expected, strict=True):
        assert [x.tolist() for x in new[:3]] == [x.tolist() for x in want[:3]]
        jax.tree.map(np.testing.assert_array_equal, new.logprobs, want.logprobs)


@pytest.mark.parametrize("made", [LOOKS, AGREES, DIFFERS], ids=["looks", "agrees", "differs"])
def test_drafts_change_no_token(made):
    expected, plain = written(MODEL, None, **EVERYTHING)
    ended = expected[0].ended.tolist() + expected[1].ended.tolist()
    assert {Ended.NO, Ended.STOP, Ended.END_TOKEN} <= set(ended)

    told, state = written(MODEL, made, **EVERYTHING)

    assert_same(told, expected)
    assert steps_of(told) < steps_of(expected)
    assert state.lengths.tolist() == plain.lengths.tolist()
    assert state.rows.cache[0].lengths.tolist() == state.rows.held.tolist()


def test_a_model_that_always_agrees_spares_all_steps_but_one_in_five():
    """21 tokens: one from the prompt, then five in each step, the last of them drawn behind four drafts."""
    told, _ = written(MODEL, AGREES, calls=((21,),), **ENDLESS)

    assert steps_of(told) == 4


def test_rows_that_are_gathered_keep_what_their_drafts_have_read():
    state = start(MODEL, PROMPTS, lengths=LENGTHS, max_length=ROOM, drafts=AGREES, pad_id=99, **ENDLESS)
    others = gather(state, np.array([0, 0, 2]))

    _, new = advance(state, 21)
    _, fewer = advance(others, 21)

    assert fewer.tokens.tolist() == [new.tokens[row].tolist() for row in (0, 0, 2)]
    assert int(fewer.steps) == int(new.steps) == 4


def test_a_refused_draft_leaves_nothing_behind():
    """As many steps as a loop counts that knows where the two tables choose alike, also behind a turn."""
    other = TokenTable(VOCAB)
    other.table[...] = jnp.where((jnp.arange(64) % 5 == 0)[:, None], OTHER.table[...], MODEL.table[...])
    tables = (np.delete(np.asarray(each.table[...]), 3, axis=1) for each in (MODEL, other))
    choices = [table.argmax(axis=1) for table in tables]
    greedy = ENDLESS | dict(temperature=np.zeros(3))

    told, state = written(MODEL, DraftModel(other, 4), calls=((24,), (9,)), **greedy)

    texts = state.rows.history.tolist()
    behind = [(length + 1, length + 24) for length in LENGTHS]  # from the first draw to the last
    last = LENGTHS + 24 + TURNED
    behind_turn = zip((last + (TURNED > 0)).tolist(), (last + 9).tolist(), strict=True)
    for new, ends in zip(told, (behind, behind_turn), strict=True):
        counts = []
        for text, (done, end) in zip(texts, ends, strict=True):
            steps = 0
            while done < end:
                agreed = 0
                while agreed < min(4, end - done - 1):
                    row = (
                        sum((token + 1) * place for place, token in enumerate(text[: done + agreed], 1)) % 64
                    )
                    if len({choice[row] for choice in choices}) > 1:
                        break
                    agreed += 1
                done, steps = done + agreed + 1, steps + 1
            counts.append(steps)
        assert int(new.steps) == max(counts)


@pytest.mark.parametrize("made", [AGREES, DIFFERS], ids=["agrees", "differs"])
def test_however_the_steps_are_divided(made):
    """Between two calls the cache of the drafts lacks one token of a row, or two."""
    whole, _ = written(MODEL, made, **ENDLESS)

    told, _ = written(MODEL, made, calls=((1, 2, 7, 4, 1, 6), (3, 12)), **ENDLESS)

    parts = [np.concatenate([new.tokens for new in part], axis=1) for part in (told[:6], told[6:])]
    assert [part.tolist() for part in parts] == [new.tokens.tolist() for new in whole]


def test_a_row_without_room_for_drafts_is_filled_to_the_last_token():
    expected, _ = written(MODEL, None, calls=((60,),), **ENDLESS)
    assert expected[0].ended.tolist() == [Ended.FULL] * 3

    for made in (LOOKS, AGREES):
        told, _ = written(MODEL, made, calls=((60,),), **ENDLESS)

        assert_same(told, expected)
        assert steps_of(told) < steps_of(expected)


def test_a_row_that_is_not_finite_ends_there():
    spoilt = TokenTable(VOCAB)
    spoilt.table[...] = spoilt.table[...].at[::20].set(jnp.nan)
    expected, plain = written(spoilt, None, **ENDLESS)
    assert Ended.NOT_FINITE in expected[0].ended.tolist()

    told, state = written(spoilt, LOOKS, **ENDLESS)

    assert_same(told, expected)
    assert state.rows.held.tolist() == plain.rows.held.tolist()


def test_a_stream_gives_the_same():
    expected, _ = written(MODEL, None, calls=((21,),), **ENDLESS)
    state = start(MODEL, PROMPTS, lengths=LENGTHS, max_length=ROOM, drafts=LOOKS, pad_id=99, **ENDLESS)

    pieces = list(stream(state, 21, chunk_size=6))

    tokens = np.concatenate([piece.tokens for piece in pieces], axis=1)
    assert tokens.tolist() == expected[0].tokens.tolist()


def test_requests_of_a_batcher_get_the_same():
    batcher = Batcher(MODEL, 2, max_length=ROOM, sampling=("temperature",), drafts=DIFFERS, chunk_size=6)
    system = batcher.read_prefix([4, 1, 4])

    requests = [
        batcher.submit(PROMPTS[0, :length], prefix=prefix, max_new_tokens=count, temperature=1.2, key=length)
        for length, prefix, count in ((27, None, 20), (5, system, 9), (3, None, 31), (8, system, 1))
    ]
    while batcher.step():
        pass

    for request, begin in zip(requests, ([], [4, 1, 4], [], [4, 1, 4]), strict=True):
        prompt, count = np.array([[*begin, *request.asked.prompt]]), len(request.tokens)
        key = len(request.asked.prompt)
        want = generate(MODEL, prompt, max_new_tokens=count, temperature=1.2, key=key, max_length=ROOM)
        assert request.tokens == want.tokens[0].tolist()
        assert (request.ended, count) == (Ended.ENOUGH, request.asked.max_new_tokens)


ROWS = Rows(*[None] * 12)


@pytest.mark.parametrize("match", [1, 2, 3])
def test_look_up_repeats_what_came_last_after_the_same_tokens(match):
    rng, rows = np.random.default_rng(match), 60
    tokens, counts = rng.integers(0, 3, (rows, 30)), rng.integers(1, 31, rows)
    most = rng.integers(-1, 6, rows)

    def by_loops(text, most):
        newest = text[len(text) - match :]
        for place in range(len(text) - match - 1, -1, -1):
            if text[place : place + match] == newest:
                return (text[place + match :] * 4)[: min(4, max(most, 0))]
        return []

    held = ROWS._replace(history=tokens, held=counts - 1, pending=counts > 0)
    propose = drafts.drafter(LookUp(4, match=match), None).propose
    found, number = jax.jit(lambda held, most: propose(held, most, None)[:2])(held, most)

    proposed = [row[:count] for row, count in zip(found.tolist(), number.tolist(), strict=True)]
    texts = [row[:count] for row, count in zip(tokens.tolist(), counts, strict=True)]
    assert proposed == [by_loops(text, limit) for text, limit in zip(texts, most, strict=True)]
    assert set(map(len, proposed)) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("match", [30, 31, 40])
def test_more_tokens_than_a_row_has_are_never_found(match):
    held = ROWS._replace(history=jnp.ones((2, 30), int), held=jnp.array([9, 29]), pending=jnp.ones(2, bool))

    _, number, _ = drafts.drafter(LookUp(match=match), None).propose(held, jnp.array([5, 5]), None)

    assert number.tolist() == [0, 0]


def test_what_cannot_draft_is_refused():
    begin = dict(lengths=LENGTHS, max_length=ROOM)
    with refused(TypeError, "drafts must be a LookUp or a DraftModel, got TokenTable"):
        start(MODEL, PROMPTS, drafts=OTHER, **begin)
    with refused(ValueError, "num_tokens must be at most 7"):
        LookUp(8)
    with refused(ValueError, "match must be at least 1"):
        LookUp(match=0)
    with refused(TypeError, "model must have the methods of Decoder, got str"):
        DraftModel("small")
    with refused(ValueError, "a DraftModel must have the vocabulary of the model, got 11 and 17 tokens"):
        start(MODEL, PROMPTS, drafts=DraftModel(TokenTable(11)), **begin)
    told = (
        "caches of a model must be made of NSACache and DenseCache to go back in them, got ShapeDtypeStruct"
    )
    with refused(TypeError, told):
        start(Stub(), PROMPTS, drafts=LookUp(), **begin)
    with refused(TypeError, told):
        start(MODEL, PROMPTS, drafts=DraftModel(Stub()), **begin)
    with refused(TypeError, told):
        Batcher(Stub(), 2, max_length=ROOM, drafts=LookUp())
