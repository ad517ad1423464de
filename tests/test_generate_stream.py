"""Streams give the tokens of `generate`, a chunk behind the device, and text of whole characters."""

import asyncio
import threading

import jax
import numpy as np
import pytest
from messages import refused
from test_generate import LENGTHS, PROMPTS, Stub, spoilt_from

from nsa_jax.generate import Ended, advance, extend, generate, session, start, stream, streaming
from nsa_jax.generate.text import TextPieces

ROOM, PAD = 64, 99
HOT = dict(temperature=2.0, key=3)
OPTIONS = HOT | dict(eos_id=[97, 98, PAD], logprobs=2)  # which end no row: sessions share their programs


class Bytes:
    """A tokenizer whose tokens are single bytes."""

    def decode(self, ids):
        return bytes(ids).decode("utf-8", errors="replace")


class Letters:
    """A tokenizer with the first bytes of characters, with others, with pairs, and one that shows nothing."""

    BYTES = (b"a", b" b", b"\xc3", b"\xa9", b"\xe4\xbd", b"\xa0", b"", b"\xf0", b"\x9f", b"\x98", b"\x80z")

    def decode(self, ids):
        return (
            b"".join(self.BYTES[token] for token in ids).decode("utf-8", errors="replace").removeprefix(" ")
        )


@pytest.fixture(scope="module")
def model():
    return Stub()


def begun(model, **options):
    return start(model, PROMPTS, lengths=LENGTHS, max_length=ROOM, pad_id=PAD, **(OPTIONS | options))


def joined(pieces):
    rows = [[] for _ in LENGTHS]
    for piece in pieces:
        for row, tokens, length in zip(rows, piece.tokens.tolist(), piece.lengths, strict=True):
            assert set(tokens[length:]) <= {PAD}
            row += tokens[:length]
    return rows


@pytest.mark.parametrize(("count", "chunk_size"), [(1, 8), (21, 8), (17, 8), (20, 1), (6, 8)])
def test_a_stream_gives_the_tokens_of_generate(model, count, chunk_size):
    whole = generate(model, PROMPTS, lengths=LENGTHS, max_new_tokens=count, max_length=ROOM, **HOT)

    pieces = list(stream(begun(model), count, chunk_size=chunk_size))

    assert joined(pieces) == whole.tokens.tolist()
    assert pieces[0].tokens.shape == (3, 1)
    assert all(piece.tokens.shape[1] == chunk_size for piece in pieces[1:-1])


@pytest.mark.parametrize("place", [0, 2, 9])
def test_a_row_that_is_not_finite_is_refused_on_request(model, place):
    """Its piece has no token of it where it fails in the prompt (0), or as the first of a chunk (9)."""

    def pieces(model, rows=slice(None)):
        session = start(model, PROMPTS[rows], lengths=LENGTHS[rows], max_length=ROOM, pad_id=PAD)
        return list(stream(session, 20, chunk_size=8))

    expected, spoilt = joined(pieces(model)), spoilt_from(place, model)

    every, alike = pieces(spoilt), pieces(spoilt, [1, 1, 1])

    assert joined(every) == [expected[0], expected[1][:place], expected[2]]
    for found, row, told in ((every, 1, "1"), (alike, 0, "0, 1, 2")):
        good = [piece.check() is piece for piece in found if piece.ended[row] == Ended.NO]
        bad = [piece for piece in found if piece.ended[row] == Ended.NOT_FINITE]
        assert len(good) == len(found) - len(bad) == {0: 0, 2: 1, 9: 2}[place]
        for piece in bad:
            with refused(ValueError, rf"the logits of all rows must be finite, .* in rows \[{told}\]\."):
                piece.check()
    assert sum(piece.lengths[0] for piece in alike) == place
    assert alike[-1].lengths.tolist() == [0 if place in (0, 9) else 1] * 3


def test_rows_end_and_the_stream_with_the_last_of_them(model):
    """With log-probabilities beside their tokens."""
    free = joined(stream(begun(model), 20))
    options = dict(eos_id=[free[0][6], free[1][3], free[2][9]])
    _, whole = advance(begun(model, **options), 40)
    assert whole.lengths.max() < 20

    pieces = list(stream(begun(model, **options), 40))

    rows = zip(whole.tokens.tolist(), whole.lengths.tolist(), strict=True)
    assert joined(pieces) == [row[:length] for row, length in rows]
    assert pieces[-1].ended.tolist() == [Ended.END_TOKEN] * 3
    for name in whole.logprobs._fields:
        found = np.concatenate([getattr(piece.logprobs, name) for piece in pieces], axis=1)
        np.testing.assert_array_equal(found, getattr(whole.logprobs, name)[:, : found.shape[1]])


def test_an_event_loop_goes_on_while_a_piece_is_waited_for(model, monkeypatch):
    """And the tokens are the same. The second chunk ends when the loop has done something else."""
    expected, elsewhere, read, calls = joined(stream(begun(model), 17)), threading.Event(), jax.device_get, []

    def slow(x):
        calls.append(threading.current_thread())
        assert len(calls) != 2 or elsewhere.wait(30)
        return read(x)

    monkeypatch.setattr(jax, "device_get", slow)

    async def does_something():
        while len(calls) < 2:
            await asyncio.sleep(0.001)
        elsewhere.set()

    async def main():
        other = asyncio.create_task(does_something())
        pieces = [piece async for piece in stream(begun(model), 17)]
        await other
        return pieces

    assert joined(asyncio.run(main())) == expected
    assert threading.main_thread() not in calls


def test_a_cancelled_task_leaves_a_whole_session(model, monkeypatch):
    """The steps that run in the other thread are done when the task ends."""
    read, reading, go_on = jax.device_get, threading.Event(), threading.Event()

    def slow(x):
        reading.set()
        assert go_on.wait(30)
        return read(x)

    monkeypatch.setattr(jax, "device_get", slow)
    pieces = stream(begun(model), 17)

    async def takes():
        async for _ in pieces:
            pass

    async def main():
        task = asyncio.create_task(takes())
        await asyncio.to_thread(reading.wait)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=0.05)
        assert not done
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    pieces.stop()
    given = joined(pieces)
    expected = joined([advance(begun(model), 20)[1]])
    after, new = advance(pieces.session, 3)
    held = int(after.lengths[0] - LENGTHS[0]) - 3
    assert [row + more for row, more in zip(given, joined([new]), strict=True)] == [
        row[1 : held + 3] for row in expected
    ]  # the first token was the piece that the task waited for


def test_what_comes_after_a_stream_goes_on_with_its_session(model):
    expected = joined([advance(begun(model), 30)[1]])
    first = stream(begun(model), 11)
    rows = joined(first)
    assert first.session.lengths.tolist() == (LENGTHS + 11).tolist()

    second = stream(first.session, 7)
    rows = [[*row, *more] for row, more in zip(rows, joined(second), strict=True)]
    assert rows == [row[:18] for row in expected]

    third = stream(second.session, 20)
    next(third)
    third.stop()
    more = joined(third)
    assert [len(row) for row in more] == [8] * 3  # the chunk that was on its way; the first piece had 8, too
    assert third.session.lengths.tolist() == (LENGTHS + 34).tolist()


def test_a_turn_of_some_rows_is_streamed(model):
    """Rows with a turn have their first token at once, the others one step later, and all have seven."""
    turn, turned = np.array([[1, 2], [3, 4], [5, 6]]), np.array([2, 0, 1])
    expected = joined([advance(extend(advance(begun(model), 5)[0], turn, lengths=turned), 7)[1]])

    pieces = list(stream(extend(advance(begun(model), 5)[0], turn, lengths=turned), 7, chunk_size=4))

    assert joined(pieces) == expected
    assert [piece.lengths.tolist() for piece in pieces] == [[1, 0, 1], [4, 4, 4], [2, 3, 2]]


def test_a_chunk_is_on_its_way_before_the_one_before_is_read(model, monkeypatch):
    """And nothing is asked for when all tokens are on their way."""
    events = []
    ask, read = streaming.dispatch_chunk, jax.device_get
    monkeypatch.setattr(streaming, "dispatch_chunk", lambda *x: events.append("ask") or ask(*x))
    monkeypatch.setattr(jax, "device_get", lambda x: events.append("read") or read(x))
    model.log.steps.clear()

    pieces = stream(begun(model), 17)
    assert events == ["ask"]
    for _ in pieces:
        events.append("use")
    jax.effects_barrier()

    assert events == ["ask", *("ask", "read", "use") * 2, "read", "use"]
    assert len(model.log.steps) == 16


def test_steps_that_nobody_wants_are_not_asked_for(model, monkeypatch):
    asked, ask = [], streaming.dispatch_chunk
    monkeypatch.setattr(streaming, "dispatch_chunk", lambda *x: asked.append(x[2]) or ask(*x))
    pending = advance(begun(model), 1)[0]

    assert [len(list(stream(begun(model), count, chunk_size=4))) for count in (1, 5, 6)] == [1, 2, 3]
    assert asked == [0, *(0, 4), *(0, 4, 4)]
    asked.clear()
    assert [piece.lengths.tolist() for piece in stream(pending, 1, chunk_size=4)] == [[1, 1, 1]]
    assert asked == [0, 4]


def test_a_chunk_has_no_loop_that_ends_by_its_data(model, monkeypatch):
    """The host would have to wait for each test, and could not hand over the next chunk."""
    programs, run = [], session._advance

    def noted(*arguments, **sizes):
        programs.append(str(run.trace(*arguments, **sizes).jaxpr))
        return run(*arguments, **sizes)

    monkeypatch.setattr(session, "_advance", noted)

    list(stream(begun(model), 9, chunk_size=4))
    assert ["while[" in program for program in programs] == [False] * 3
    advance(begun(model), 9)
    assert "while[" in programs[-1]


def test_text_is_that_of_all_tokens(model):
    pieces = list(stream(begun(model), 40, tokenizer=Letters(), chunk_size=4))

    for row, tokens in enumerate(joined(pieces)):
        assert "".join(piece.text[row] for piece in pieces) == Letters().decode(tokens)


@pytest.mark.parametrize("cut", [1, 2, 3, 7])
def test_no_piece_splits_a_character(cut):
    text = "naïve 你好 🙂👩‍🚀 e\u0301 \ufffd!"
    ids, pieces = list(text.encode()), TextPieces(Bytes())

    found = [pieces.add(ids[at : at + cut], last=at + cut >= len(ids)) for at in range(0, len(ids), cut)]

    assert "".join(found) == text
    assert "\ufffd" not in "".join(found[: len(found) - 1 - 4 // cut])
    assert sum(map(bool, found)) > len(ids) // cut // 5  # nothing waits for the end


@pytest.mark.parametrize("seed", range(5))
def test_bytes_that_are_no_text_are_given_as_the_tokenizer_gives_them(seed):
    """Without waiting for a character that cannot come."""
    some = np.frombuffer("a é你🙂".encode(), np.uint8)
    ids, pieces = np.random.default_rng(seed).choice(some, 200).tolist(), TextPieces(Bytes())

    found = [pieces.add([token], last=place == 199) for place, token in enumerate(ids)]

    assert "".join(found) == Bytes().decode(ids)
    held = [len(Bytes().decode(ids[: place + 1])) - len("".join(found[: place + 1])) for place in range(200)]
    assert max(held) <= 3
    assert len(pieces._ids) < 30


def test_spaces_before_words_and_tokens_without_text_are_kept():
    """Decoders leave out the first space, and special tokens."""

    class Words:
        def decode(self, ids):
            words = {1: " one", 2: " two", 3: "", 4: "s"}
            return "".join(words[token] for token in ids).removeprefix(" ")

    pieces = TextPieces(Words())

    assert [pieces.add([token], last=False) for token in (1, 3, 2, 3, 3, 2, 4, 1)] == [
        *("one", "", " two", "", "", " two", "s", " one")
    ]


def test_bytes_of_sentencepiece_are_held_back():
    """Its decoder makes a whole run of bytes invalid while the last of them are missing."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra `pretrained`")
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256, "<unk>": 257}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], byte_fallback=True))
    decoders = tokenizers.decoders
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    ids = [256, *"你好🙂".encode(), 256, *"é".encode()]
    pieces = TextPieces(tokenizer)

    found = [pieces.add([token], last=False) for token in ids]

    assert [piece for piece in found if piece] == ["a", "你", "好", "🙂", " a", "é"]


def test_bad_calls_leave_the_session_as_it_was(model):
    session = begun(model)
    with refused(TypeError, r"tokenizer must have a method decode\(ids\), got str"):
        stream(session, 3, tokenizer="gpt2")
    with refused(ValueError, "max_new_tokens must be at least 1, got 0"):
        stream(session, 0)
    with refused(ValueError, "chunk_size must be at least 1, got 0"):
        stream(session, 3, chunk_size=0)

    assert joined(stream(session, 2)) == joined([advance(begun(model), 2)[1]])
    with refused(ValueError, "session must be the newest one, got one that extend, adv"):
        stream(session, 2)
