"""Many requests on one compiled step: they enter and leave the slots of a session between chunks of steps.

The device does, in this order: a round of prompts, each put into a free slot, with its first token; then a
chunk of steps of all slots. While all slots are taken, the next round is given to the device before the last
one is read, so that it never waits. Otherwise it is read first: a request that comes then enters behind one
chunk at most.
"""

import asyncio
import collections
import threading
from collections.abc import Sequence
from queue import Full
from typing import Any, NamedTuple

import jax
import numpy as np

from nsa_jax.array_typing import Array, DType, Int, PRNGKeyArray
from nsa_jax.config import LONGEST
from nsa_jax.generate import buckets, checks, copies, interrupts
from nsa_jax.generate.decoder import Decoder
from nsa_jax.generate.drafts import DraftModel, LookUp
from nsa_jax.generate.ends import Ended
from nsa_jax.generate.logprobs import Logprobs
from nsa_jax.generate.options import LogitsHook, Sampling
from nsa_jax.generate.parameters import NEUTRAL, as_row
from nsa_jax.generate.requests import Asked, Prefix, Request
from nsa_jax.generate.rows import Rows
from nsa_jax.generate.session import Continuation, Session, appended, dispatch_chunk, empty, start
from nsa_jax.generate.text import TextPieces, Tokenizer, check_tokenizer
from nsa_jax.option_checks import check_choice, check_int


class _Told(NamedTuple):
    """Tokens that are on their way: whose they are, by slot, and the round that they belong to."""

    new: Continuation
    owners: list[tuple[int, Request]]
    round: int


class Batcher:
    """Writes for many requests at once, each in a slot of its own, as `generate` would write for it alone.

    Args:
      model: see `generate`. The batcher holds it as `prepare` makes it, see `start`.
      slots: number of requests that are written at the same time. Their caches are allocated at once,
        `row_bytes` for each, and once more while a prompt is read.
      max_length: capacity of a slot in tokens: prompt and new tokens together.
      max_waiting: number of requests that may wait for a slot.
      sampling: parameters that requests may have, of "temperature", "top_k", "top_p", "min_p",
        "repetition_penalty" and "presence_penalty". All slots compute them in every step, so leave out what
        you do not need: with none of them, each step takes the most likely tokens. "top_k", "top_p" and
        "min_p" need "temperature" beside them.
      logits_hook: see `start`; one for all slots, in every step. It gets their logits, newest tokens and
        numbers of tokens drawn, and nothing that tells one request from another. The logits of a slot must
        depend on that slot alone; what it makes of one that nobody holds counts for nothing.
      logprobs: asks for log-probabilities, see `start`.
      tokenizer: object with a method `decode(ids) -> str`, for text; see `stream`.
      drafts: lets a decode step verify several tokens, see `start`.
      chunk_size: number of steps between two times at which requests enter and leave, and tokens are read.
      prefill_chunk: largest number of prompt tokens that are read at once. Prompts are read in parts, whose
        sizes are powers of two up to this number, and 64 at least if it allows. A program for each size is
        compiled when the first such part comes.
      cache_dtype: see `generate`.

    Raises:
      TypeError: an argument has the wrong type, or `logits_hook` is not a function to logits.
      ValueError: a number is out of range, `sampling` has an unknown name or lacks the temperature, or the
        model's cache has an array without an axis of rows.

    Examples:
      >>> batcher = Batcher(model, 16, max_length=32768, tokenizer=tokenizer)
      >>> requests = [batcher.submit(prompt, max_new_tokens=256) for prompt in prompts]
      >>> for piece in requests[0]:  # writes for the others, too
      ...     print(piece.text, end="", flush=True)
    """

    def __init__(
        self,
        model: Decoder,
        slots: int,
        *,
        max_length: int,
        max_waiting: int = 64,
        sampling: Sequence[str] = ("temperature", "top_k", "top_p"),
        logits_hook: LogitsHook | None = None,
        logprobs: int | None = None,
        tokenizer: Tokenizer | None = None,
        drafts: LookUp | DraftModel | None = None,
        chunk_size: int = 8,
        prefill_chunk: int = buckets.PREFILL_TOKENS,
        cache_dtype: DType | None = None,
    ) -> None:
        checks.check_counts(slots=slots, chunk_size=chunk_size)
        check_int(low=0, max_waiting=max_waiting)
        check_int(high=LONGEST // 2, chunk_size=chunk_size)
        check_int(low=2, prefill_chunk=prefill_chunk)
        check_tokenizer(tokenizer)
        self._names = _names(sampling)
        # The slots begin as copies of a row that nobody has asked for anything.
        settings: dict[str, Any] = dict(
            max_length=max_length, logits_hook=logits_hook, logprobs=logprobs, drafts=drafts,
            cache_dtype=cache_dtype,
        )  # fmt: skip
        row = start(model, np.zeros((1, 1), np.int32), **settings, **_neutral(self._names))
        self._session = copies.gather(row, np.zeros(slots, np.int32))
        self._chunk_size, self._prefill_chunk = int(chunk_size), int(prefill_chunk)
        self._cache_dtype = checks.check_cache_dtype(model, cache_dtype)
        self._max_waiting, self._tokenizer = int(max_waiting), tokenizer
        self._slots: list[Request | None] = [None] * int(slots)
        self._until = np.zeros(slots, np.int32)  # number of tokens after which a slot stops
        self._asked = np.zeros(slots, int)  # number of tokens that the device was asked for
        self._waiting: collections.deque[Request] = collections.deque()
        self._in_flight: collections.deque[_Told] = collections.deque()
        self._round = 0
        # One thread at a time takes a step. The lock is held for moments, in which none waits for the device.
        self._stepping, self._lock = False, threading.Condition()
        self._shared_step: asyncio.Future[bool] | None = None

    @property
    def row_bytes(self) -> int:
        """Number of bytes that a slot takes."""
        return self._session.row_bytes

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a slot."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Number of slots that requests hold."""
        return len(self._slots) - self._free

    @property
    def _free(self) -> int:
        return sum(request is None or request.ended != Ended.NO for request in self._slots)

    def submit(
        self,
        prompt: Sequence[int] | Int[Array | np.ndarray, " P"],
        *,
        max_new_tokens: int,
        prefix: Prefix | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        presence_penalty: float | None = None,
        eos_id: int | Sequence[int] | None = None,
        stop: Sequence[Sequence[int] | str] | None = None,
        key: int | PRNGKeyArray = 0,
    ) -> Request:
        """Adds a request. Requests get slots in the order in which they came. Does not wait for the device.

        Args:
          prompt: token ids.
          max_new_tokens: largest number of tokens to write.
          prefix: tokens before the prompt that were read already, from `read_prefix`. They are copied.
          temperature: see `start`, and so for the five parameters after it, each a number.
          top_k: of the parameters, those that the `sampling` of the batcher names.
          top_p: see `start`.
          min_p: see `start`.
          repetition_penalty: see `start`.
          presence_penalty: see `start`.
          eos_id: token that ends the text and is its last one, or several such tokens.
          stop: sequences of tokens that end the text, and are in it; and strings, which are looked for in the
            text, wherever they begin and end in its tokens. The text ends before a string, and the tokens
            with the one that completed it. Of any number and length.
          key: a seed or a typed key. A text depends on nothing but its prompt, options and key, and equals
            that of `generate` with a batch of this one prompt.

        Returns:
          The request: an iterator of `Written(tokens, text, logprobs)`.

        Raises:
          TypeError: an argument has the wrong type.
          ValueError: the prompt is empty or does not fit with its new tokens, it has an id that is not in the
            vocabulary, a number is out of range, or there is a stop string and no tokenizer.
          queue.Full: `max_waiting` requests wait already.
        """
        tokens = checks.check_prompt(self._session.vocab_size, prompt=prompt)
        checks.check_counts(max_new_tokens=max_new_tokens)
        length = len(tokens) + (0 if prefix is None else self._checked(prefix).length)
        checks.check_room(np.array([length]), max_new_tokens, self._session.max_length)
        numbers = Sampling.of_request(
            self._names, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            repetition_penalty=repetition_penalty, presence_penalty=presence_penalty,
        )  # fmt: skip
        ends = checks.check_tokens(eos_id, 0)
        sequences, strings = checks.check_stop_of_request(stop, self._tokenizer)
        end_tokens = set() if ends is None else set(np.atleast_1d(ends).tolist())
        keys = checks.check_key(key, 1)
        asked = Asked(tokens, prefix, int(max_new_tokens), end_tokens, sequences, strings, numbers, keys)
        text = None if self._tokenizer is None else TextPieces(self._tokenizer)
        request = Request(asked, text, self._take_turn, self._share_step, self._cancel)
        with interrupts.held(), self._lock:
            waiting = len(self._waiting) - self._free
            if waiting >= self._max_waiting:
                raise Full(
                    f"the queue must have room, got {waiting} requests that wait for a slot and "
                    f"max_waiting={self._max_waiting}. Try again later, or build the Batcher with more."
                )
            self._waiting.append(request)
        return request

    def _checked(self, prefix: Prefix) -> Prefix:
        if not isinstance(prefix, Prefix):
            raise TypeError(f"prefix must be a Prefix, got {type(prefix).__name__}. Call read_prefix.")
        if prefix.session.parameters is not self._session.parameters:
            raise ValueError("prefix must be of this Batcher, got one of another. Call its read_prefix.")
        return prefix

    def read_prefix(self, tokens: Sequence[int] | Int[Array | np.ndarray, " P"]) -> Prefix:
        """Reads what several prompts begin with, once. It stays in memory as long as you keep it.

        Args:
          tokens: token ids.

        Returns:
          The prefix, for `submit` of this batcher.

        Raises:
          TypeError: `tokens` are not ids.
          ValueError: they are none, do not fit the cache, or one is not in the vocabulary.
        """
        ids = checks.check_prompt(self._session.vocab_size, tokens=tokens)
        checks.check_room(np.array([len(ids)]), 1, self._session.max_length)
        return Prefix(self._read_on(self._empty(), ids), len(ids))

    def step(self) -> bool:
        """Gives the device its next work and reads what comes first: first tokens of a prompt, or a chunk.

        Waits for that. Several threads may call it, one at a time has its turn. Ctrl-C takes effect when it
        ends, and the batcher can still be used.

        Returns:
          Whether there is more to do: `while batcher.step(): pass` ends when nothing waits and all is
          written.
        """
        return self._take_turn(None)

    def _take_turn(self, request: Request | None) -> bool:
        """Takes a step, unless those of other threads bring something for this request in the meantime."""
        with interrupts.held():
            with self._lock:
                while True:
                    if request is not None and request.has_news:
                        return True
                    if not self._stepping:
                        break
                    self._lock.wait()
                self._stepping = True
            try:
                return self._step()
            finally:
                with self._lock:
                    self._stepping = False
                    self._lock.notify_all()

    async def _share_step(self) -> None:
        """Waits for a step in another thread, which all tasks of an event loop share."""
        shared = self._shared_step
        if shared is None or shared.done() or shared.get_loop() is not asyncio.get_running_loop():
            shared = self._shared_step = asyncio.ensure_future(asyncio.to_thread(self.step))
        await asyncio.shield(shared)

    def _cancel(self, request: Request) -> None:
        with interrupts.held(), self._lock:
            if request.ended == Ended.NO:
                request.ended = Ended.CANCELLED
            if request in self._waiting:
                self._waiting.remove(request)
            self._lock.notify_all()

    def _step(self) -> bool:
        # While a slot stays free, the device waits for a moment, so that nobody has to wait for two chunks.
        ahead = int(self.waiting >= self._free)
        rounds = self._in_flight[-1].round - self._in_flight[0].round + 1 if self._in_flight else 0
        try:
            if rounds <= ahead:
                self._round += 1
                self._release_cancelled()
                self._admit()
                self._ask_for_chunk()
            if self._in_flight:
                self._read()
        except Exception as error:  # of the device: what it was to write is lost
            self._fail_all(error)
            raise
        return bool(self._in_flight or self._waiting or self.running)

    def _fail_all(self, error: Exception) -> None:
        """Ends all requests but those that wait."""
        running = {request for told in self._in_flight for _, request in told.owners}
        running |= {request for request in self._slots if request is not None}
        self._in_flight.clear()
        with self._lock:
            for request in running:
                if not request.ended:
                    request.fail(error)
            for slot in range(len(self._slots)):
                self._release(slot)

    def _release_cancelled(self) -> None:
        for slot, request in enumerate(self._slots):
            if request is not None and request.ended:
                self._release(slot)

    def _release(self, slot: int) -> None:
        self._slots[slot], self._until[slot] = None, 0

    def _admit(self) -> None:
        """Puts requests that wait into free slots: some short prompts, or one long one.

        Those that are written get a chunk of steps before the next prompts are read.
        """
        room, any_admitted = buckets.PREFILL_TOKENS, False
        for slot, holder in enumerate(self._slots):
            if holder is not None:
                continue
            with self._lock:
                if not self._waiting:
                    return
                room -= len(self._waiting[0].asked.prompt)
                if room < 0 and any_admitted:
                    return
                request = self._slots[slot] = self._waiting.popleft()
            any_admitted = True
            self._enter(request, slot)

    def _enter(self, request: Request, slot: int) -> None:
        """Reads the prompt of a request into its slot, and asks for its first token."""
        asked = request.asked
        try:
            row = self._read_prompt(asked)
        except Exception as error:
            request.fail(error)
            self._release(slot)
            return
        self._session = copies.replaced(self._session, slot, row, asked.sampling)
        self._until[slot], self._asked[slot] = asked.max_new_tokens, 0
        self._ask(0, [(slot, request)])

    def _read_prompt(self, asked: Asked) -> Rows:
        prefix = asked.prefix
        begun = self._empty() if prefix is None else copies.gather(prefix.session, np.zeros(1, np.int32))
        return self._read_on(begun, asked.prompt).rows._replace(keys=asked.key)

    def _empty(self) -> Session:
        return empty(self._session, Sampling(**_neutral(self._names)), self._cache_dtype)

    def _read_on(self, session: Session, tokens: np.ndarray) -> Session:
        """That session of one row, which has read these tokens, too.

        The host knows how many parts there are, so each is a call, and the device waits for nothing.
        """
        first = 0
        for size in buckets.parts(len(tokens), min(self._prefill_chunk, session.max_length)):
            part = tokens[first : first + size]
            wide, count = np.pad(part, (0, size - len(part)))[None], np.array([len(part)], np.int32)
            session = appended(session, wide, count, size, any_pending=False)
            first += size
        return session

    def _ask_for_chunk(self) -> None:
        owners = [(slot, request) for slot, request in enumerate(self._slots) if request is not None]
        if owners:
            self._ask(self._chunk_size, owners)

    def _ask(self, steps: int, owners: list[tuple[int, Request]]) -> None:
        """Starts so many steps, without waiting for those that run. None are enough for a first token.

        A slot that will have all its tokens then is free for the next request, behind these steps.
        """
        until = self._until.copy()  # the program may read the array later
        self._session, new = dispatch_chunk(self._session, until, steps)
        self._in_flight.append(_Told(new, owners, self._round))
        for slot, request in owners:
            self._asked[slot] += max(steps, 1)
            if self._asked[slot] >= request.asked.max_new_tokens:
                self._release(slot)

    def _read(self) -> None:
        """Waits for the oldest tokens that are on their way, and gives them to their requests."""
        told = self._in_flight[0]
        tokens, lengths, ended, logprobs, _ = jax.device_get(told.new)
        self._in_flight.popleft()
        with self._lock:
            for slot, request in told.owners:
                new, *found = (x[slot, : lengths[slot]] for x in (tokens, *(logprobs or ())))
                reports = Logprobs(*found) if found else None
                try:
                    request.take(new.tolist(), reports, Ended(int(ended[slot])))
                except Exception as error:  # of the tokenizer
                    request.fail(error)
                if request.ended and self._slots[slot] is request:
                    self._release(slot)


def _neutral(names: Sequence[str]) -> dict[str, Any]:
    """Parameters of one row that change nothing."""
    return {name: as_row(name, NEUTRAL[name]) for name in names}


def _names(sampling: Any) -> tuple[str, ...]:
    """The parameters that requests may have. Raises TypeError or ValueError unless all are known."""
    if isinstance(sampling, str) or not isinstance(sampling, Sequence):
        raise TypeError(
            f"sampling must be a sequence of names, got {type(sampling).__name__}. Pass a tuple of them."
        )
    for name in sampling:
        check_choice(Sampling._fields, sampling=name)
    if "temperature" not in sampling and {"top_k", "top_p", "min_p"}.intersection(sampling):
        raise ValueError(
            f"sampling must have 'temperature' beside top_k, top_p or min_p, got {tuple(sampling)}. Add it, "
            "or leave them out."
        )
    return tuple(sampling)
