"""Stop strings are found wherever they begin and end in the tokens, and nothing of them is shown."""

import itertools

import numpy as np
import pytest
from messages import refused
from test_generate import VOCAB
from test_generate_batcher import PROMPTS, ROOM, alone, finished, made, one_stub, told
from test_generate_stream import Bytes

from nsa_jax.generate import Ended, start
from nsa_jax.generate.requests import Asked, Request
from nsa_jax.generate.stop_strings import StopStrings
from nsa_jax.generate.text import TextPieces


class Syllables:
    """A tokenizer with tokens of several characters, which share beginnings and ends."""

    TEXTS = ("ab", "a", "b", "ba", "c", "abc", " ", "bb", "", "ca", "c b")

    def decode(self, ids):
        return "".join(self.TEXTS[token] for token in ids)


def first_stop(text, strings):
    """Where the text ends before the string that is complete first, by trying all ends; None without one."""
    for end in range(1, len(text) + 1):
        if found := [len(each) for each in strings if text[:end].endswith(each)]:
            return end - max(found), end
    return None


@pytest.fixture
def stub():
    return one_stub()


@pytest.mark.parametrize("seed", range(30))
def test_what_is_passed_on_does_not_depend_on_how_the_text_is_cut(seed):
    """Against a search from scratch at each place; with strings that hold or overlap one another."""
    rng = np.random.default_rng(seed)
    text = "".join(rng.choice(list("ab"), 40))
    strings = ["".join(rng.choice(list("ab"), rng.integers(1, 8))) for _ in range(rng.integers(1, 4))]
    cuts = [0, *sorted(rng.integers(0, 41, rng.integers(0, 20))), 40]
    found, stop = [], StopStrings(strings)

    for begin, end in itertools.pairwise(cuts):
        found.append(stop.add(text[begin:end], last=end == 40))
        if not stop.found and end < 40:
            held = max(n for each in strings for n in range(len(each)) if text[:end].endswith(each[:n]))
            assert "".join(found) == text[: end - held]

    expected = first_stop(text, strings)
    assert "".join(found) == (text if expected is None else text[: expected[0]])
    assert stop.found == (expected is not None)


def test_a_request_ends_at_a_stop_string_across_and_within_tokens(stub):
    tokenizer, ends = Syllables(), []
    batcher = made(stub, tokenizer=tokenizer)
    for prompt, strings in itertools.product(
        PROMPTS[:4], (["bca", "c b"], ["b", "zz"], ["a b", "cca"], ["zz"])
    ):
        free = alone(stub, prompt, 36)
        expected = first_stop(tokenizer.decode(free), strings)

        request = batcher.submit(prompt, max_new_tokens=36, stop=strings)
        pieces = list(request)

        if expected is None:
            assert (request.tokens, request.ended) == (free, Ended.ENOUGH)
            assert "".join(piece.text for piece in pieces) == tokenizer.decode(free)
            continue
        begin, end = expected
        count = next(n for n in range(37) if len(tokenizer.decode(free[:n])) >= end)
        assert "".join(piece.text for piece in pieces) == tokenizer.decode(free)[:begin]
        assert (request.tokens, request.ended) == (free[:count], Ended.STOP)
        assert [token for piece in pieces for token in piece.tokens] == request.tokens
        borders = {len(tokenizer.decode(free[:n])) for n in range(37)}
        ends.append((begin in borders, end in borders, len(borders & set(range(begin + 1, end)))))

    assert {True, False} == {x for x, _, _ in ends} == {y for _, y, _ in ends}
    assert max(inner for _, _, inner in ends) > 0
    assert finished(batcher)


def test_text_that_could_still_become_a_stop_string_is_held_back_and_comes_at_the_end(stub):
    tokenizer, free = Syllables(), alone(stub, PROMPTS[0], 30)
    text = tokenizer.decode(free)
    batcher = made(stub, tokenizer=tokenizer)

    request = batcher.submit(PROMPTS[0], max_new_tokens=30, stop=[text[-7:] + "z", text[:9] + "z"])
    pieces = [piece.text for piece in request]

    assert "".join(pieces) == text
    assert pieces[0] == ""  # the first token alone could begin the second string
    assert len(pieces[-1]) >= 7
    assert request.ended == Ended.ENOUGH


def test_a_row_that_a_string_stopped_runs_no_further(stub):
    """Its slot is free for the next request, and others go on as if nothing had been."""
    tokenizer = Syllables()
    batcher = made(stub, tokenizer=tokenizer)
    stopped = batcher.submit(PROMPTS[0], max_new_tokens=50, stop=["a"])
    others = [batcher.submit(prompt, max_new_tokens=30) for prompt in PROMPTS[1:5]]
    while not stopped.ended:
        batcher.step()
    held = int(batcher._session.rows.drawn[0])

    assert held < 50
    assert [told(x) for x in others] == [alone(stub, prompt, 30) for prompt in PROMPTS[1:5]]
    assert "".join(piece.text for piece in stopped) == tokenizer.decode(stopped.tokens).split("a")[0]
    assert finished(batcher)


@pytest.mark.parametrize("cut", [1, 2, 3, 50])
def test_characters_of_several_tokens_are_part_of_stop_strings(cut):
    text = "na\u00efve \u4f60\u597d \U0001f642 end"
    ids = list(text.encode())
    asked = Asked(
        np.ones(1, int),
        None,
        len(ids),
        (),
        [],
        ["\u597d \U0001f643", "\u597d \U0001f642", "\u00ef\u00ef"],
        None,
        None,
    )
    request = Request(asked, TextPieces(Bytes()), None, None, None)

    for at in range(0, len(ids), cut):
        request.take(ids[at : at + cut], None, Ended.NO)

    assert "".join(piece.text for piece in request) == "na\u00efve \u4f60"
    assert (bytes(request.tokens), request.ended) == (text.removesuffix(" end").encode(), Ended.STOP)


def test_end_tokens_and_sequences_of_tokens_still_end_a_text(stub):
    tokenizer, free = Syllables(), alone(stub, PROMPTS[0], 30)
    batcher = made(stub, tokenizer=tokenizer)
    both = batcher.submit(PROMPTS[0], max_new_tokens=30, stop=[free[3:6], "zz"])
    end = batcher.submit(PROMPTS[0], max_new_tokens=30, stop=["zz"], eos_id=free[4])

    assert "".join(piece.text for piece in both) == tokenizer.decode(free[:6])
    assert (both.tokens, both.ended) == (free[:6], Ended.STOP)
    list(end)
    assert (end.tokens, end.ended) == (free[: free.index(free[4]) + 1], Ended.END_TOKEN)


def test_stop_strings_that_cannot_be_are_refused(stub):
    batcher = made(stub, tokenizer=Syllables())
    with refused(ValueError, r"stop strings must come with a tokenizer, got \['ab'\] and tokenizer=None"):
        made(stub).submit([1], max_new_tokens=3, stop=[[1], "ab"])
    with refused(ValueError, r"stop must have no empty string, got \['a', ''\]"):
        batcher.submit([1], max_new_tokens=3, stop=["a", ""])
    with refused(TypeError, "stop must be a sequence of strings or token ids, got 'ab'"):
        batcher.submit([1], max_new_tokens=3, stop="ab")
    with refused(TypeError, "stop must be a sequence of sequences of token ids, got .3."):
        batcher.submit([1], max_new_tokens=3, stop=["ab", 3])
    with refused(TypeError, "got .'ab'.* strings are for the submit of a Batcher"):
        start(stub, np.ones((1, 2), int), max_length=ROOM, stop=["ab"])
    assert not batcher.step()
    assert len(Syllables.TEXTS) == VOCAB
