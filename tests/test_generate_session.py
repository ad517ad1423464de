"""Sessions against naive decoding, in float64: a forward of all tokens for each new one, without a cache."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_layer import SMALL
from flax import nnx
from messages import refused
from modules import abstract, randomised
from test_generate import Stub
from token_table import TokenTable

from nsa_jax.generate import (
    DraftModel,
    Ended,
    advance,
    extend,
    gather,
    generate,
    repeat,
    sample,
    session,
    start,
)
from nsa_jax.model import Transformer, TransformerConfig
from nsa_jax.nn import IndexerConfig

VOCAB, ROOM, PAD = 17, 60, 99
CONFIG = TransformerConfig(
    vocab_size=VOCAB, num_layers=1, model_dim=16, num_heads=4, num_kv_heads=2, mlp_dim=16, nsa=SMALL,
    branches=("slc",), selector=IndexerConfig(dim=4), dtype="float64", param_dtype="float64",
)  # fmt: skip
RNG = np.random.default_rng(0)
PROMPTS, LENGTHS = RNG.integers(0, 11, (3, 27)), np.array([27, 3, 14])
TURN, TURNED = RNG.integers(0, 11, (3, 9)), np.array([9, 0, 1])
# No token equals VOCAB, so no row ends early. All tests share the programs of these options.
HOT = dict(temperature=1.5, key=3, eos_id=VOCAB)


@pytest.fixture(autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def model():
    with jax.enable_x64(True):
        return randomised(abstract(Transformer, CONFIG, implementation="xla"), 0.5, seed=4)


@pytest.fixture(scope="module")
def stub():
    with jax.enable_x64(True):
        return Stub()


@pytest.fixture(scope="module")
def naive(model):
    """Writes `counts` tokens behind each text; `drawn` says how many tokens each row drew before."""

    @nnx.jit
    def next_tokens(model, text, last, keys, drawn):
        logits = model(text)[jnp.arange(len(text)), last]
        return sample(logits, jax.vmap(jax.random.fold_in)(keys, drawn), temperature=HOT["temperature"])

    def write(texts, counts, drawn=(0, 0, 0)):
        texts, keys = [list(text) for text in texts], session.checks.check_key(HOT["key"], len(texts))
        for number in range(max(counts)):
            text = np.zeros((len(texts), ROOM), np.int32)
            for row, tokens in enumerate(texts):
                text[row, : len(tokens)] = tokens
            last = np.array([len(tokens) - 1 for tokens in texts])
            new = next_tokens(model, text, last, keys, np.array(drawn) + number)
            for row, token in enumerate(new.tolist()):
                if number < counts[row]:
                    texts[row].append(token)
        return texts

    return write


@pytest.fixture(scope="module")
def endless(naive):
    """The prompts with 21 tokens behind each."""
    with jax.enable_x64(True):
        return naive(texts_of(PROMPTS, LENGTHS), [21] * 3)


def texts_of(prompts, lengths):
    return [row[:length].tolist() for row, length in zip(prompts, lengths, strict=True)]


def begun(model, **settings):
    return start(model, PROMPTS, lengths=LENGTHS, max_length=ROOM, pad_id=PAD, **(HOT | settings))


def told(state, *steps):
    """The new tokens of each row, and the state after these calls of `advance`."""
    rows = [[] for _ in state.rows.token]
    for count in steps:
        state, new = advance(state, count)
        assert new.tokens.shape == (len(rows), count)
        for row, tokens, length in zip(rows, new.tokens.tolist(), new.lengths.tolist(), strict=True):
            assert tokens[length:] == [PAD] * (count - length)
            row += tokens[:length]
    return rows, state


def joined(texts, more):
    return [[*text, *new] for text, new in zip(texts, more, strict=True)]


@pytest.mark.parametrize("steps", [(21,), (8, 1, 2, 10), (1,) * 21], ids=len)
def test_continued_equals_naive(model, endless, steps):
    rows, state = told(begun(model), *steps)

    assert joined(texts_of(PROMPTS, LENGTHS), rows) == endless
    assert state.lengths.tolist() == (LENGTHS + 21).tolist()


def test_drafts_change_no_token(model, endless):
    """Some are refused and others are taken, because the other model draws with the same keys."""
    state = begun(model, drafts=DraftModel(TokenTable(VOCAB), 2))
    others = gather(state, np.array([0, 0, 2]))

    _, new = advance(state, 21)
    _, fewer = advance(others, 21)

    assert joined(texts_of(PROMPTS, LENGTHS), new.tokens.tolist()) == endless
    assert fewer.tokens.tolist() == [new.tokens[row].tolist() for row in (0, 0, 2)]
    assert 20 / 3 < int(fewer.steps) < 20


def test_a_turn_is_added_to_rows_of_different_lengths(model, naive):
    """The row with no tokens goes on where it was, with its next key."""
    first, state = told(begun(model), 10)
    texts = joined(joined(texts_of(PROMPTS, LENGTHS), first), texts_of(TURN, TURNED))

    second, state = told(extend(state, TURN, lengths=TURNED, prefill_chunk=4), 3, 7)

    assert joined(texts, second) == (expected := naive(texts, [10] * 3, drawn=(10,) * 3))
    assert state.lengths.tolist() == [len(text) for text in expected]


def test_a_row_that_ended_writes_again_after_a_turn(model, naive, endless):
    prompts = texts_of(PROMPTS, LENGTHS)
    endless = [text[: length + 10] for text, length in zip(endless, LENGTHS, strict=True)]
    eos_id = endless[0][30]
    ends = [
        text.index(eos_id, n) if eos_id in text[n:] else None
        for text, n in zip(endless, LENGTHS, strict=True)
    ]
    texts = [text[: end and end + 1] for text, end in zip(endless, ends, strict=True)]
    assert ends[0] is not None
    assert None in ends  # another row goes on

    first, state = told(begun(model, eos_id=eos_id), 4, 6)
    assert joined(prompts, first) == texts
    assert state.ended.tolist() == [Ended.NO if end is None else Ended.END_TOKEN for end in ends]

    turned = np.array([2, 0, 0])
    texts = joined(texts, texts_of(TURN, turned))
    drawn = [len(row) for row in first]
    second, state = told(extend(state, TURN, lengths=turned, prefill_chunk=4), 1)
    assert second[0] == naive(texts, [1, 0, 0], drawn)[0][-1:]
    assert int(state.rows.drawn[0]) == drawn[0] + 1


def test_repeated_rows_share_the_prompt_and_draw_texts_of_their_own(model):
    state = begun(model)
    copies = repeat(state, 3)

    rows, _ = told(gather(copies, np.array([3, 4, 5])), 12)

    assert rows[0] == told(state, 12)[0][1]  # the copies left it as it was
    assert len(set(map(tuple, rows))) == 3
    assert sum(x.nbytes for x in jax.tree.leaves(copies.rows)) == 9 * state.row_bytes


def test_a_prompt_that_nothing_was_drawn_from_is_extended(model, naive):
    """So prompts that begin alike are read once."""
    turned = np.array([9, 1, 4])
    texts = joined([PROMPTS[1, :3].tolist()] * 3, texts_of(TURN, turned))
    begin = gather(begun(model), np.array([1, 1, 1]))
    keys = begun(model).rows.keys
    begin = dataclasses.replace(begin, rows=begin.rows._replace(keys=keys))

    rows, _ = told(extend(begin, TURN, lengths=turned, prefill_chunk=4), 8)

    assert joined(texts, rows) == naive(texts, [8] * 3)


def test_rows_are_dropped_and_moved(model):
    _, state = told(begun(model), 5)
    moved = gather(state, np.array([2, 0, 0]))

    rows, _ = told(moved, 6)

    expected, _ = told(state, 6)
    assert rows == [expected[2], expected[0], expected[0]]  # a row that is taken twice keeps its key


def test_a_full_row_says_so(stub):
    """One token more than the cache has room for is drawn: it need not be in the cache."""
    rows, state = told(begun(stub), 30, 30)

    assert [len(row) for row in rows] == [ROOM + 1 - 27, 30 + 28, ROOM + 1 - 14]
    assert state.ended.tolist() == [Ended.FULL] * 3
    with refused(ValueError, r"the tokens of a row must fit the cache, got \[63, 0, 0\] with the new"):
        extend(state, TURN[:, :2], lengths=np.array([2, 0, 0]))


def test_inside_jit_a_turn_without_room_leaves_the_row_alone(stub):
    _, state = told(begun(stub), 25)
    before = gather(state, np.arange(3))

    after = jax.jit(lambda state: extend(state, TURN))(state)

    assert after.ended.tolist() == [Ended.FULL, Ended.NO, Ended.NO]
    assert after.lengths.tolist() == [52, 28 + 9, 39 + 9]
    for x, y in zip(jax.tree.leaves(after.rows.cache), jax.tree.leaves(before.rows.cache), strict=True):
        assert x[0].tolist() == y[0].tolist()


def test_a_row_that_is_not_finite_says_so_and_others_go_on(stub):
    """As soon as its logits hold NaN, a row ends without a further token, in `generate`, too."""
    stub = nnx.clone(stub)
    expected, state = told(begun(stub), 6)
    tokens, lengths = (np.asarray(state.rows.cache[name]) for name in ("tokens", "lengths"))
    states = [np.cumsum(row * np.arange(1, ROOM + 1)) % 64 for row in tokens]
    bad = int(states[1][LENGTHS[1] + 1])  # what its third token is drawn from
    never = all(bad not in states[row][LENGTHS[row] - 1 : lengths[row]] for row in (0, 2))
    assert never, "choose another seed"
    stub.table[...] = stub.table[...].at[bad, 3].set(jnp.nan)

    state, new = advance(begun(stub), 1)
    assert new.check() is new
    _, new = advance(repeat(state, 1), 5)
    with refused(ValueError, r"the logits of all rows must be finite, got NaN or infinity in rows \[1\]\."):
        new.check()
    rows, state = told(begun(stub), 1, 5)
    whole = generate(stub, PROMPTS, lengths=LENGTHS, max_new_tokens=6, max_length=ROOM, **HOT)

    assert rows == [expected[0], expected[1][:2], expected[2]]
    assert state.ended.tolist() == [Ended.NO, Ended.NOT_FINITE, Ended.NO]
    assert whole.lengths.tolist() == [6, 2, 6]
    assert whole.ended.tolist() == state.ended.tolist()


def test_a_turn_with_an_id_outside_the_vocabulary_ends_its_row():
    """Where the host does not see it. A row that gets no tokens stays as it is, whatever its padding."""
    model = TokenTable(VOCAB)
    lengths, bad = np.array([2, 0, 2]), np.array([[1, 2], [-1, -1], [3, -1]])
    expected, _ = told(extend(begun(model), np.abs(bad), lengths=lengths), 4)

    state = jax.jit(lambda state, tokens: extend(state, tokens, lengths=lengths))(begun(model), bad)
    rows, state = told(state, 4)

    assert rows == [expected[0], expected[1], []]
    assert state.ended.tolist() == [Ended.NO, Ended.NO, Ended.NOT_FINITE]


def test_a_session_is_a_pytree_that_jit_takes(stub):
    @functools.partial(jax.jit, donate_argnums=0)
    def four(rows, rest):
        state, first = advance(dataclasses.replace(rest, rows=rows), 4)
        return state.rows, first

    state = begun(stub)
    rows, first = four(state.rows, dataclasses.replace(state, rows=None))

    expected, _ = told(begun(stub), 10)
    assert first.tokens.tolist() == [row[:4] for row in expected]
    assert told(dataclasses.replace(state, rows=rows), 6)[0] == [row[4:] for row in expected]


def test_a_session_keeps_the_parameters_that_it_began_with(stub):
    """Training that goes on changes the model in place."""
    stub = nnx.clone(stub)
    state = begun(stub)
    expected, _ = told(gather(state, np.arange(3)), 6)

    stub.table[...] = -stub.table[...]

    assert told(state, 6)[0] == expected


def test_a_model_is_hashed_once_and_not_in_each_call():
    """For a model of 18 layers it takes 10 ms, in which a GPU writes more than a chunk of steps."""
    hashed = []

    class Part:
        def __hash__(self):
            hashed.append(self)
            return 1

    stub = Stub()
    stub.part = Part()

    def write():
        state, _ = advance(begun(stub), 1)
        assert hashed
        hashed.clear()
        state, _ = advance(state, 1)
        extend(gather(state, np.arange(3)), TURN)

    jax.eval_shape(write)

    assert not hashed


def test_numbers_of_steps_and_widths_of_turns_share_programs(stub):
    def programs():
        return session._start._cache_size(), session._advance._cache_size(), session._extend._cache_size()

    _, state = told(begun(stub), 2)
    told(extend(state, TURN[:, :1]), 1)
    before = programs()

    _, state = told(start(stub, PROMPTS[:, :5], max_length=ROOM, pad_id=1, **(HOT | dict(key=8))), 1, 7, 13)
    told(extend(state, TURN, lengths=TURNED), 5)

    assert programs() == before


def test_advancing_writes_the_cache_in_place(model):
    """Donated caches come out where they went in."""
    state = begun(model)
    before = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state.rows.cache)]

    state, _ = advance(state, 3)

    after = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state.rows.cache)]
    assert after == before


USED_UP = {
    "advance": lambda state: advance(state, 1),
    "extend": lambda state: extend(state, TURN),
    "repeat": lambda state: repeat(state, 2),
    "gather": lambda state: gather(state, np.array([0])),
}


def test_a_session_that_is_used_up_is_refused(stub):
    state = begun(stub)
    advance(state, 1)

    for call in USED_UP.values():
        with refused(ValueError, "session must be the newest one, got one that extend, adv"):
            call(state)
    with refused(TypeError, "session must be a Session, got int"):
        advance(3, 1)


BAD = {
    "prompt": (lambda state: start(Stub(), PROMPTS, max_length=26), "must fit the cache, got 27 tokens and"),
    "rows": (lambda state: extend(state, TURN[:2]), r"got shape \(2, 9\) and batch=3"),
    "no tokens": (lambda state: extend(state, TURN[:, :0]), r"got shape \(3, 0\) and batch=3"),
    "many": (lambda state: extend(state, TURN, lengths=np.array([10, 0, 0])), r"within 0 \.\. 9, got values"),
    "lengths": (lambda state: extend(state, TURN, lengths=np.array([1])), r"got lengths.shape=\(1,\) and"),
    "steps": (lambda state: advance(state, 0), "steps must be at least 1, got 0"),
    "count": (lambda state: repeat(state, 0), "count must be at least 1, got 0"),
    "no such row": (lambda state: gather(state, np.array([3])), r"rows must be within 0 \.\. 2, got values"),
    "no row": (lambda state: gather(state, np.array([], int)), "a vector of at least one number"),
}


@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD.keys())
def test_bad_calls_leave_the_session_as_it_was(stub, call, message):
    state = begun(stub)

    with refused(ValueError, message):
        call(state)

    assert state.lengths.tolist() == LENGTHS.tolist()


def test_ids_outside_the_vocabulary_are_refused():
    model = TokenTable(VOCAB)
    state = begun(model)

    with refused(ValueError, r"tokens must be within 0 \.\. 16, got values from .* to 17"):
        extend(state, np.full((3, 2), VOCAB))
    with refused(ValueError, "logprobs must be at most 17, got 18"):
        begun(model, logprobs=VOCAB + 1)
    padding = dict(lengths=np.zeros(3, int), prefill_chunk=4)
    assert extend(state, np.full((3, 9), VOCAB), **padding).lengths.tolist() == LENGTHS.tolist()


def test_a_cache_without_an_axis_of_rows_cannot_be_gathered(stub):
    state = begun(stub)
    state = dataclasses.replace(state, rows=state.rows._replace(cache=dict(count=jnp.zeros(()))))

    with refused(ValueError, r"must have the rows first, got \[\(\)\] and batch=3"):
        repeat(state, 2)
