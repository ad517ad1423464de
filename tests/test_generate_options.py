"""How a session chooses tokens and what ends its rows, against loops in Python, row by row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import refused
from test_generate import LENGTHS, PROMPTS, VOCAB, Stub
from test_generate_sampling import brute_force

from nsa_jax.generate import Ended, advance, extend, gather, generate, sample, session, start

ROOM, PAD, KEY, HOT = 64, 99, 3, dict(temperature=2.0)
# Ends that never come: as many as in the tests, up to four of up to four tokens, so all share a program.
NEVER = dict(stop=[[96] * 4, [97], [98]], eos_id=[96, 97, 98])


@pytest.fixture(scope="module")
def model():
    return Stub()


def begun(model, **options):
    return start(model, PROMPTS, lengths=LENGTHS, max_length=ROOM, pad_id=PAD, key=KEY, **options)


def told(state, *steps):
    rows = [[] for _ in state.rows.token]
    for count in steps:
        state, new = advance(state, count)
        for row, tokens, length in zip(rows, new.tokens.tolist(), new.lengths.tolist(), strict=True):
            row += tokens[:length]
    return rows, state


def logits_after(model, text):
    return np.asarray(model.table[...])[sum(token * place for place, token in enumerate(text, start=1)) % 64]


def naive(model, count, **options):
    """The new tokens of each row, one after the other. Options are one number, or one for each row."""
    rows = []
    for row, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        own = {name: x[row] if np.ndim(x) else x for name, x in options.items()}
        key = jax.random.fold_in(jax.random.key(KEY), row)
        rows.append(written(model, prompt[:length].tolist(), count, key, own))
    return rows


def written(model, prompt, count, key, own):
    """The new tokens of one row with options of its own."""
    text, new = list(prompt), []
    for number in range(count):
        logits = logits_after(model, text).copy()
        for token in set(text):
            factor = np.float32(own.get("repetition_penalty", 1))
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        for token in set(new):
            logits[token] -= np.float32(own.get("presence_penalty", 0))
        new.append(drawn(logits, jax.random.fold_in(key, number), own))
        text.append(new[-1])
    return new


def drawn(logits, key, own):
    if not own.get("temperature"):
        return int(np.argmax(logits))
    logits = (logits - logits.max()) / np.float32(own["temperature"])
    kept = brute_force(logits, own.get("top_k"), own.get("top_p"))
    kept = [token for token in kept if np.exp(logits[token]) >= own.get("min_p", 0)]
    masked = np.full(VOCAB, -np.inf, np.float32)
    masked[kept] = logits[kept]
    return int(jax.random.categorical(key, jnp.asarray(masked)))


# One that changes nothing has the program of all.
NOTHING = dict(
    temperature=np.full(3, 2.0), top_k=np.full(3, VOCAB), top_p=np.ones(3), min_p=np.zeros(3),
    repetition_penalty=np.ones(3), presence_penalty=np.zeros(3),
)  # fmt: skip
EACH = {
    "temperature": NOTHING | dict(temperature=np.array([0.5, 0.0, 3.0])),
    "top_k": NOTHING | dict(top_k=np.array([1, 11, 3])),
    "top_p": NOTHING | dict(top_p=np.array([0.4, 1.0, 0.7], np.float32)),
    "min_p": NOTHING | dict(min_p=np.array([0.9, 0.0, 0.2])),
    "penalties": dict(
        repetition_penalty=np.array([1.0, 1.3, 4.0]), presence_penalty=np.array([2.0, 0.0, -1.0])
    ),
    "all": dict(
        temperature=jnp.array([1.5, 0.0, 2.0]),
        top_k=np.array([6, 5, 8]),
        top_p=np.array([0.9, 0.8, 0.95]),
        min_p=np.array([0.05, 0.0, 0.1]),
        repetition_penalty=np.array([1.1, 1.0, 2.0]),
        presence_penalty=np.array([0.0, 1.5, 0.5]),
    ),
    "one for all": dict(temperature=1.5, min_p=0.1, repetition_penalty=1.5, presence_penalty=1),
}


@pytest.mark.parametrize("options", EACH.values(), ids=EACH.keys())
def test_each_row_is_drawn_by_its_own_numbers(model, options):
    rows, _ = told(begun(model, **options), 1, 19)

    assert rows == naive(model, 20, **options)
    assert len({token for row in rows for token in row}) > 4


def test_a_row_of_temperature_0_takes_the_lowest_of_equal_tokens():
    temperature = np.arange(40, dtype=np.float32) % 2
    keys = jax.random.split(jax.random.key(0), 40)

    tokens = np.asarray(jax.jit(sample)(np.full((40, 9), 2.0, np.float32), keys, temperature=temperature))

    assert not tokens[::2].any()
    assert len(set(tokens[1::2].tolist())) > 3


def test_the_tokens_of_a_turn_are_penalised_as_repeated_but_not_as_present(model):
    options = dict(repetition_penalty=np.full(3, 1e9), presence_penalty=np.full(3, 1e9))
    first, state = told(begun(model, **options), 2)
    turn = np.array([[2, 6, 7, 8], [1, 3, 4, 10], [2, 3, 7, 9]])

    rows, state = told(extend(state, turn), 3)

    for row, (new, more) in enumerate(zip(first, rows, strict=True)):
        text = PROMPTS[row, : LENGTHS[row]].tolist() + new + turn[row].tolist()
        for token in more:
            logits, fresh = logits_after(model, text), [x for x in range(VOCAB) if x not in text]
            found = [x for x in fresh if logits[x] > 0] or [x for x in turn[row].tolist() if logits[x] > 0]
            assert token == max(found, key=lambda x: logits[x])
            text.append(token)


def test_numbers_and_arrays_are_taken_with_their_rows(model):
    options = EACH["all"]
    _, state = told(begun(model, **options), 4)

    rows, _ = told(gather(state, np.array([2, 2, 0])), 6)

    expected = [row[4:] for row in naive(model, 10, **options)]
    assert rows == [expected[2], expected[2], expected[0]]


def ends_of(rows, stop=(), eos=()):
    """The rows up to where the first sequence or token ends them, and why."""
    cut = []
    for row in rows:
        for end in range(1, len(row) + 1):
            if row[end - 1] in eos:
                cut.append((row[:end], Ended.END_TOKEN))
                break
            if any(row[:end][-len(tokens) :] == tokens for tokens in stop if len(tokens) <= end):
                cut.append((row[:end], Ended.STOP))
                break
        else:
            cut.append((row, Ended.NO))
    return cut


@pytest.mark.parametrize("steps", [(20,), (1, 2, 1, 16)], ids=len)
def test_rows_end_at_stop_sequences(model, steps):
    """Also where calls divide one; not where its head is in the prompt."""
    free = naive(model, 20, **HOT)
    stop = [free[0][2:6], free[1][4:7], [int(PROMPTS[0, 4]), free[0][0]], [13]]
    expected = ends_of(free, stop)
    assert {why for _, why in expected} == {Ended.STOP, Ended.NO}
    assert len(expected[0][0]) > 1

    rows, state = told(begun(model, **HOT | NEVER | dict(stop=stop)), *steps)

    assert list(zip(rows, state.ended.tolist(), strict=True)) == expected


def test_a_stop_sequence_begins_anew_in_a_turn(model):
    """Its head from before the turn does not count; nor do the tokens of the turn."""
    free = naive(model, 4, **HOT)
    turn = np.array([[3], [8], [2]])
    after, _ = told(extend(told(begun(model, **HOT, **NEVER), 4)[1], turn), 4)
    stop = [[free[0][3], after[0][0]], [3, after[0][0]], after[0][:3]]
    assert ends_of(free, stop) == [(row, Ended.NO) for row in free]

    rows, state = told(extend(told(begun(model, **HOT | NEVER | dict(stop=stop)), 4)[1], turn), 4)

    assert list(zip(rows, state.ended.tolist(), strict=True)) == ends_of(after, stop)
    assert len(rows[0]) == 3


def test_any_of_several_end_tokens_ends_a_row(model):
    free = naive(model, 10, **HOT)
    eos = [free[0][5], free[1][2], VOCAB + 1]
    expected = ends_of(free, eos=eos)

    stop = [eos[:1], *NEVER["stop"]]
    rows, state = told(begun(model, eos_id=eos, stop=stop, **HOT), 3, 7)
    text = generate(model, PROMPTS, lengths=LENGTHS, max_new_tokens=10, eos_id=eos, key=KEY, **HOT)

    assert list(zip(rows, state.ended.tolist(), strict=True)) == expected
    assert text.lengths.tolist() == [len(row) for row, _ in expected]


def test_log_probabilities_are_those_of_the_model(model):
    """Whatever the sampling does with them; of rows that end, and across calls."""
    count, options = 3, dict(temperature=2.0, top_k=4, presence_penalty=1.0)
    free = naive(model, 9, **options)
    state, new = advance(begun(model, logprobs=count, eos_id=free[1][4], **options), 2)
    _, more = advance(state, 7)
    found = jax.tree.map(lambda x, y: np.concatenate([x, y], axis=1), new.logprobs, more.logprobs)

    for row, (tokens, _) in enumerate(ends_of(free, eos=[free[1][4]])):
        text = PROMPTS[row, : LENGTHS[row]].tolist()
        for place, token in enumerate(tokens):
            logits = logits_after(model, text + tokens[:place]).astype(np.float64)
            expected = logits - np.log(np.exp(logits).sum())
            ranked = np.argsort(-expected, kind="stable")[:count]
            assert found.chosen[row, place] == pytest.approx(expected[token], abs=1e-5)
            assert found.top_tokens[row, place].tolist() == ranked.tolist()
            np.testing.assert_allclose(found.top[row, place], expected[ranked], atol=1e-5)
        assert not any(x[row, len(tokens) :].any() for x in found)
    assert [x.shape for x in found] == [(3, 9), (3, 9, count), (3, 9, count)]


def even(logits, newest, drawn):
    """After the third token only even ones, and each only one more than the last or 0."""
    token = jnp.arange(VOCAB)
    allowed = (token % 2 == 0) | (drawn < 3)[:, None]
    return jnp.where(allowed & (token != newest[:, None]), logits, -jnp.inf)


def constrained(model, prompt, count):
    """The new tokens of one row with the hook `even`."""
    text = list(prompt)
    for number in range(count):
        logits = logits_after(model, text)
        allowed = [x for x in range(VOCAB) if (x % 2 == 0 or number < 3) and x != text[-1]]
        text.append(max(allowed, key=lambda x: logits[x]))
    return text[len(prompt) :]


def test_a_hook_constrains_what_is_written(model):
    rows, _ = told(begun(model, logits_hook=even), 2, 8)

    prompts = [prompt[:length].tolist() for prompt, length in zip(PROMPTS, LENGTHS, strict=True)]
    assert rows == [constrained(model, prompt, 10) for prompt in prompts]


def test_a_row_whose_hook_excludes_all_tokens_says_so(model):
    def nothing(logits, newest, drawn):
        return jnp.where((drawn < 2)[:, None] | (newest == newest[0])[:, None], logits, -jnp.inf)

    rows, state = told(begun(model, logits_hook=nothing), 5)

    free = naive(model, 5)
    ends = [free[row][1] != free[0][1] for row in range(3)]
    assert any(ends)
    assert rows == [row[:2] if end else row for row, end in zip(free, ends, strict=True)]
    assert state.ended.tolist() == [Ended.NOT_FINITE if end else Ended.NO for end in ends]


def test_values_of_options_share_programs():
    """Also numbers of stop sequences, and of their tokens, up to the same power of two.

    `_cache_size` would count arrays of NumPy and of JAX apart, though they share a program, too. The model is
    this test's own: other tests have compiled programs of theirs.
    """
    model = Stub()
    told(begun(model, **NOTHING), 3)
    told(begun(model, stop=[[1, 2, 3], [4], [5, 6]], eos_id=[3, 4, 7], **HOT), 3)
    programs = session._advance._cache_size()

    other = NOTHING | dict(temperature=np.array([0.5, 0.0, 3.0]), min_p=np.array([0.9, 0.0, 0.2]))
    told(begun(model, **other), 3)
    told(begun(model, stop=[[5, 6, 7, 8], [1, 2], [3], [9]], eos_id=[1, 2, 5], temperature=0.5), 3)

    assert session._advance._cache_size() == programs


BAD = {
    "stop": (dict(stop=[3]), TypeError, r"sequence of sequences of token ids, got \[3\]"),
    "text": (dict(stop=["ab"]), TypeError, r"sequence of sequences of token ids, got \['ab'\]"),
    "no stop": (dict(stop=[]), ValueError, r"stop must have no empty sequence, got \[\]"),
    "empty stop": (dict(stop=[[1], []]), ValueError, r"no empty sequence, got \[\[1\], \[\]\]"),
    "id": (dict(stop=[[1, -1]]), ValueError, "stop must be at least 0, got -1"),
    "no end": (dict(eos_id=[]), ValueError, r"a sequence of eos_id must have at least one id, got \[\]"),
    "rows": (
        dict(temperature=np.ones(2)),
        ValueError,
        r"temperature must be one number, or one per row, got",
    ),
    "cold": (
        dict(temperature=np.array([1.0, -1, 1])),
        ValueError,
        "temperature must be at least 0 and at most",
    ),
    "ints": (HOT | dict(top_k=np.ones(3)), TypeError, "top_k must hold ints, got float64"),
    "bools": (HOT | dict(top_p=np.ones(3, bool)), TypeError, "top_p must hold numbers, got bool"),
    "greedy": (dict(min_p=0.1), ValueError, "min_p must come with a temperature above 0, got temperature=0"),
    "hook": (dict(logits_hook=lambda x, *_: x[:, :3]), ValueError, r"of shape \(3, 11\), got \(3, 3\)"),
    "no array": (
        dict(logits_hook=lambda *_: None),
        TypeError,
        "logits_hook must return logits, got NoneType",
    ),
}


@pytest.mark.parametrize(("options", "error", "message"), BAD.values(), ids=BAD.keys())
def test_bad_options_are_refused(model, options, error, message):
    with refused(error, message):
        advance(begun(model, **options), 1)
