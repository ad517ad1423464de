"""New tokens and their text while they are written, one chunk behind the device, so that it never waits."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int32

from nsa_jax.config import LONGEST
from nsa_jax.generate import checks
from nsa_jax.generate.ends import Ended, check_chosen
from nsa_jax.generate.logprobs import Logprobs
from nsa_jax.generate.session import Continuation, Session, check_session, dispatch_chunk
from nsa_jax.generate.text import TextPieces, Tokenizer, check_tokenizer
from nsa_jax.option_checks import check_int


class Piece(NamedTuple):
    """What a stream gives at a time, on the host.

    Attributes:
      tokens: new tokens of each row, then `pad_id`.
      lengths: number of new tokens of each row.
      ended: why the row has ended, as a number of `Ended`; 0 for a row that has not.
      logprobs: log-probabilities of the new tokens, where `start` was asked for them.
      text: new text of each row; None without a tokenizer.
    """

    tokens: Int32[np.ndarray, "B new"]
    lengths: Int32[np.ndarray, " B"]
    ended: Int32[np.ndarray, " B"]
    logprobs: Logprobs | None
    text: tuple[str, ...] | None

    def check(self) -> "Piece":
        """Refuses rows that have ended because no token could be chosen, in this piece or before.

        Returns:
          The same piece, where all rows are fine.

        Raises:
          ValueError: rows have ended with `Ended.NOT_FINITE`; the message has their numbers.
        """
        check_chosen(self.ended)
        return self


class Stream(Iterator[Piece]):
    """The iterator that `stream` returns.

    Attributes:
      session: the session after all that the device was asked for. When the iterator has ended, that is what
        it has given; before, the session is a chunk ahead.
    """

    session: Session

    def __init__(
        self, session: Session, max_new_tokens: int, chunk_size: int, tokenizer: Tokenizer | None
    ) -> None:
        self.session = session
        self._until = session.rows.drawn + max_new_tokens
        self._left = np.full(len(session.rows.token), max_new_tokens)
        self._chunk_size = chunk_size
        self._texts = None if tokenizer is None else [TextPieces(tokenizer) for _ in self._left]
        self._stopped = False
        # The first tokens need no step if they follow a prompt or a turn, and are given alone.
        self._in_flight: tuple[Continuation, int] | None = self._ask(0)

    def stop(self) -> None:
        """Asks the device for no more. What it was asked for already is still given."""
        self._stopped = True

    def __next__(self) -> Piece:
        while self._in_flight is not None:
            now, coming = self._in_flight
            self._in_flight = self._ask_for_more(coming)
            piece = self._read(now)
            if self._in_flight is None:
                self._in_flight = self._ask_for_more(0)  # rows that had a token pending still want their last
            elif not self._left.any():
                self._in_flight = None  # nothing is left to do in that chunk
            if piece is not None:
                return piece
        raise StopIteration

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """The same without blocking the event loop: asks and waits in another thread.

        A task that is cancelled meanwhile ends when that thread is done, so that the session is whole.
        """
        while True:
            coming = asyncio.ensure_future(asyncio.to_thread(next, self, None))
            try:
                piece = await asyncio.shield(coming)
            except asyncio.CancelledError:
                while not coming.done():  # also if it is cancelled once more
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([coming])
                coming.exception()  # nobody asks for it any more
                raise
            if piece is None:
                return
            yield piece

    def _ask_for_more(self, coming: int) -> tuple[Continuation, int] | None:
        """Asks for a chunk if a row wants more than the tokens that are on their way."""
        wanted = not self._stopped and (self._left > coming).any()
        return self._ask(self._chunk_size) if wanted else None

    def _ask(self, steps: int) -> tuple[Continuation, int]:
        """Starts so many steps without waiting for those that run.

        Returns what will hold their tokens, and how many they bring each row that wants them.
        """
        self.session, new = dispatch_chunk(self.session, self._until, steps)
        return new, max(steps, 1)

    def _read(self, new: Continuation) -> Piece | None:
        """Waits for a chunk; None if it brings neither tokens nor a row for which none could be chosen."""
        tokens, lengths, ended, reports, _ = jax.device_get(new)
        is_news = lengths.any() or (self._left[ended == Ended.NOT_FINITE] > 0).any()
        self._left = np.where(ended == Ended.NO, self._left - lengths, 0)
        if not is_news:
            return None
        most = int(lengths.max())
        tokens, reports = jax.tree.map(lambda x: x[:, :most], (tokens, reports))
        text = None
        if self._texts is not None:
            text = tuple(
                pieces.add(row[:length].tolist(), last=left == 0)
                for pieces, row, length, left in zip(self._texts, tokens, lengths, self._left, strict=True)
            )
        return Piece(tokens, lengths, ended, reports, text)


def stream(
    session: Session, max_new_tokens: int, *, chunk_size: int = 8, tokenizer: Tokenizer | None = None
) -> Stream:
    """Writes up to `max_new_tokens` tokens a row and gives them while the next ones are computed.

    The tokens are those of `generate` and `advance`. The first piece has one token of each row, as soon as it
    is drawn, and each other one those of a chunk of steps. A piece without tokens says that none could be
    chosen for a row. While you use a piece, the device is at work on the next. The session that is passed is
    used up; go on with that of the stream.

    Args:
      session: the newest session, of `start`, `extend`, `advance`, or of a stream that has ended.
      max_new_tokens: largest number of tokens to add to a row, at most 2^29.
      chunk_size: number of steps of a chunk. Fewer give tokens sooner; more cost less between chunks.
      tokenizer: object with a method `decode(ids) -> str`, for pieces of text. No piece ends within a
        character: its bytes are held back until they are complete, or the row ends.

    Returns:
      An iterator of `Piece(tokens, lengths, ended, logprobs, text)`, for `for` and `async for`. It ends when
      all rows have ended or have `max_new_tokens`. It has a `session`, to go on with, and a method `stop()`,
      which ends it early: after the piece that is computed already.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: a number is out of range, or the session is used up.

    Examples:
      >>> for piece in stream(start(model, prompt, max_length=4096), 200, tokenizer=tokenizer):
      ...     print(piece.text[0], end="", flush=True)
    """
    check_session(session)
    checks.check_counts(max_new_tokens=max_new_tokens, chunk_size=chunk_size)
    check_int(high=LONGEST // 2, max_new_tokens=max_new_tokens, chunk_size=chunk_size)
    check_tokenizer(tokenizer)
    return Stream(session, int(max_new_tokens), int(chunk_size), tokenizer)
