"""A conversation with a model: its text stays in a session, and each turn adds to it."""

from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np

from nsa_jax.generate import Decoder, Ended, Session, Stream, extend, start, stream
from nsa_jax.generate.text import lone_surrogate
from nsa_jax.pretrained import ChatFormat


class ConversationError(ValueError):
    """A conversation cannot go on. It is forgotten, and the next question begins another."""


class Conversation:
    """Asks a model one question after the other.

    Args:
      model: the model, see `nsa_jax.generate.Decoder`.
      tokenizer: its `tokenizers.Tokenizer`.
      chat: its chat format. Without a template, each question is text that the model continues.
      max_length: capacity in tokens: of all questions and answers together.
      system: system message, for a chat template.
      options: more arguments of `start`, such as `temperature`.

    Raises:
      ValueError: the template does not take a conversation, or such a system message.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Any,
        chat: ChatFormat,
        *,
        max_length: int,
        system: str | None = None,
        **options: Any,
    ) -> None:
        if system is not None and chat.template is None:
            raise ValueError(
                f"a system message must come with a chat template, got {system!r} for a model without one. "
                "Leave it out."
            )
        self._model, self._tokenizer, self._chat = model, tokenizer, chat
        self._max_length, self._options = max_length, options
        self._beginning = [] if system is None else [dict(role="system", content=system)]
        self._forget()
        if chat.template is not None:
            chat.prompt([*self._beginning, dict(role="user", content="?")])

    def _forget(self) -> None:
        self._messages = list(self._beginning)
        self._session: Session | None = None
        self._prompt = ""  # the text up to the last answer
        self._end_token: int | None = None  # that the last answer ended with
        self._pieces: Stream | None = None
        self._stopped = False

    def stop(self) -> None:
        """Ends the answer after the piece that is computed already. A signal handler may call it."""
        self._stopped = True
        if self._pieces is not None:
            self._pieces.stop()

    def ask(self, question: str) -> Iterator[str]:
        """The answer to a question, piece by piece.

        Raises:
          ConversationError: the question is no Unicode, has a token that the model does not have or does not
            fit, the answer filled the room, or the model gave NaN. It comes after the last piece.
        """
        self._stopped = False
        self._messages.append(dict(role="user", content=question))
        session = self._with_question()
        left = self._max_length - int(session.lengths[0])
        self._pieces = stream(session, left, tokenizer=self._tokenizer)
        if self._stopped:  # while the question was read
            self._pieces.stop()
        answer = []
        try:
            for piece in self._pieces:
                assert piece.text is not None
                answer.append(piece.text[0])
                yield piece.text[0]
        except GeneratorExit:  # nobody takes the rest, which the session already has
            self._forget()
            raise
        self._session = session = self._pieces.session
        self._messages.append(dict(role="assistant", content="".join(answer)))
        ended = session.ended[0]
        if ended == Ended.NOT_FINITE:
            self._forget()
            raise ConversationError("the logits must be finite, got NaN or infinity. Check the model.")
        self._end_token = int(session.rows.token[0]) if ended == Ended.END_TOKEN else None
        if session.lengths[0] == self._max_length:
            self._refuse(self._max_length)

    def _with_question(self) -> Session:
        """The session with the newest question in it."""
        ids = self._tokens_of_turn()
        if ids is None:
            self._session = self._pieces = None  # before another one takes its place in memory
            ids = self._encode(self._prompt)
        held = 0 if self._session is None else int(self._session.lengths[0])
        if not ids:
            self._forget()
            raise ConversationError("a question must have a token, got none. Begin again with more text.")
        self._check_ids(ids)
        if held + len(ids) >= self._max_length:
            self._refuse(held + len(ids))
        tokens = np.array([ids], np.int32)
        if self._session is not None:
            return extend(self._session, tokens)
        ends = self._chat.end_tokens or None
        return start(self._model, tokens, max_length=self._max_length, eos_id=ends, **self._options)

    def _tokens_of_turn(self) -> list[int] | None:
        """What stands between the last answer and the next. None if the template changed what came before."""
        question = self._messages[-1]["content"]
        if self._chat.template is None:
            return self._encode(question, add_special_tokens=self._session is None)
        before, self._prompt = self._prompt, self._chat.prompt(self._messages)
        if self._session is None:
            return self._encode(self._prompt)
        rest, answer = self._prompt.removeprefix(before), self._messages[-2]["content"]
        if rest == self._prompt:
            return None
        for written in (answer, answer.strip()):  # some templates trim
            begin = rest.find(written)
            if begin >= 0 and not rest[:begin].strip():
                ids = self._encode(rest[begin + len(written) :])
                return ids[1:] if ids[:1] == [self._end_token] else ids
        return None

    def _encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        if found := lone_surrogate(text):
            self._forget()
            raise ConversationError(f"a question must be Unicode, got {found}. Leave it out.")
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def _check_ids(self, ids: list[int]) -> None:
        """Refuses an added token of the tokenizer that the model does not have."""
        largest, vocab_size = max(ids), getattr(self._model, "vocab_size", None)
        if vocab_size is not None and largest >= vocab_size:
            self._forget()
            token = self._tokenizer.id_to_token(largest)
            raise ConversationError(
                f"a question must have tokens of the model alone, got {token!r} beyond its vocabulary of "
                f"{vocab_size}. Leave it out."
            )

    def _refuse(self, length: int) -> NoReturn:
        self._forget()
        raise ConversationError(
            f"a conversation must be shorter than --max-length, got {length} tokens and --max-length="
            f"{self._max_length}. Start again with more; here a new conversation begins."
        )
