"""One request of a `Batcher`: what it asks for, and what was written for it so far."""

import collections
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int32

from nsa_jax.array_typing import PRNGKeyArray
from nsa_jax.generate.ends import Ended, end_of
from nsa_jax.generate.logprobs import Logprobs
from nsa_jax.generate.options import Sampling
from nsa_jax.generate.session import Session
from nsa_jax.generate.stop_strings import StopStrings
from nsa_jax.generate.text import TextPieces


class Written(NamedTuple):
    """What a request gives at a time, on the host.

    Attributes:
      tokens: new tokens.
      text: their text; None without a tokenizer. What could still become a stop string comes later, or never.
      logprobs: their log-probabilities, without an axis of rows, if the `Batcher` was asked for them.
    """

    tokens: list[int]
    text: str | None
    logprobs: Logprobs | None


class Prefix(NamedTuple):
    """What prompts begin with, read once by `Batcher.read_prefix`. It holds `row_bytes` of the batcher.

    Attributes:
      session: a session of one row, the prefix.
      length: number of its tokens.
    """

    session: Session
    length: int


class Asked(NamedTuple):
    """What a request asks for, checked."""

    prompt: Int32[np.ndarray, " P"]
    prefix: Prefix | None
    max_new_tokens: int
    end_tokens: Collection[int]
    stop: Sequence[list[int]]
    stop_strings: Sequence[str]
    sampling: Sampling
    key: PRNGKeyArray


class Request(Iterator[Written]):
    """What `Batcher.submit` returns: an iterator of what is written for a request, as it is written.

    Whoever waits for a piece, with `for` or with `async for`, runs the steps of all requests meanwhile.

    Attributes:
      tokens: all tokens so far, those of pieces that were not taken yet, too.
      ended: why it has ended, of `Ended`; `Ended.NO` while it waits or is written.
      error: what went wrong if its prompt could not be read, for lack of memory for example, or its tokens
        not be decoded. The iterator raises it, and other requests go on. If the device fails in a step, all
        requests that have a slot end with that error.
    """

    tokens: list[int]
    ended: Ended
    error: Exception | None

    def __init__(
        self,
        asked: Asked,
        text: TextPieces | None,
        step: Callable[["Request"], object],
        share_step: Callable[[], Awaitable[None]],
        cancel: Callable[["Request"], None],
    ) -> None:
        self.tokens, self.ended, self.error = [], Ended.NO, None
        self.asked, self._text, self._stop = asked, text, StopStrings(asked.stop_strings)
        self._step, self._share_step, self._cancel = step, share_step, cancel
        self._pieces: collections.deque[Written] = collections.deque()

    def cancel(self) -> None:
        """Ends it, wherever it is; its place is free for another. Does not wait for the device."""
        self._cancel(self)

    def __next__(self) -> Written:
        while not self.has_news:
            self._step(self)
        return self._given()

    async def __aiter__(self) -> AsyncIterator[Written]:
        """The same without blocking the event loop. Leaving the loop early cancels the request."""
        try:
            while True:
                while not self.has_news:
                    await self._share_step()
                try:
                    piece = self._given()
                except StopIteration:
                    return
                yield piece
        finally:
            self.cancel()

    def _given(self) -> Written:
        if self._pieces:
            return self._pieces.popleft()
        if self.error is not None:
            raise self.error
        raise StopIteration

    @property
    def has_news(self) -> bool:
        """Whether the iterator has something to say at once.

        An end is set after the last piece, so that a thread that sees it sees that piece, too.
        """
        return self.ended != Ended.NO or bool(self._pieces)

    def fail(self, error: Exception) -> None:
        """Ends it with an error."""
        self.error = error
        self.ended = Ended.CANCELLED

    def take(self, tokens: list[int], logprobs: Logprobs | None, ended: Ended) -> None:
        """Adds tokens that the device wrote, up to one that ends the request. It ignores those behind it."""
        if self.ended:
            return
        before, texts = len(self.tokens), []
        for token in tokens:
            self.tokens.append(token)
            texts.append(self._shown([token], last=False))
            if found := self._end():
                ended = found
                break
        if ended:
            texts.append(self._shown([], last=True))
            if self._stop.found and ended != Ended.END_TOKEN:
                ended = Ended.STOP
        new = self.tokens[before:]
        text = None if self._text is None else "".join(texts)
        if new or text:
            logprobs = jax.tree.map(lambda x: x[: len(new)], logprobs)
            self._pieces.append(Written(new, text, logprobs))
        self.ended = ended

    def _shown(self, tokens: list[int], *, last: bool) -> str:
        """The text that can be shown with these tokens."""
        return "" if self._text is None else self._stop.add(self._text.add(tokens, last=last), last=last)

    def _end(self) -> Ended:
        """Why the newest token ends the request, if it does."""
        asked = self.asked
        if found := end_of(self.tokens, asked.end_tokens, asked.stop):
            return found
        if self._stop.found:
            return Ended.STOP
        return Ended.ENOUGH if len(self.tokens) == asked.max_new_tokens else Ended.NO
