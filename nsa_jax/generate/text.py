"""Text in pieces, from tokens that come one by one and may end in the middle of a character."""

from collections.abc import Sequence
from typing import Any, Protocol

# What decoders write for bytes that are no character, or not yet one. A character has at most four bytes.
REPLACEMENT, MOST_MISSING = "\ufffd", 3


class Tokenizer(Protocol):
    """What `stream` needs of a tokenizer, such as `tokenizers.Tokenizer` or one of `transformers`."""

    def decode(self, ids: list[int], /) -> str:
        """The text of these tokens."""


def check_tokenizer(tokenizer: Any) -> None:
    """Raises TypeError unless it is None or has the method of a `Tokenizer`."""
    if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        raise TypeError(
            f"tokenizer must have a method decode(ids), got {type(tokenizer).__name__}. Pass a "
            "tokenizers.Tokenizer, or leave it out."
        )


def lone_surrogate(text: str) -> str | None:
    """The first lone surrogate of a text, as a message shows it, or None. No tokenizer takes one.

    JSON can escape one, and Python makes them of bytes that are not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"{text[error.start]!a} ({error.reason})"
    return None


class TextPieces:
    """The text of a row, piece by piece; together they are what the tokenizer makes of all its tokens.

    Tokens are decoded behind some that came before, because their text may depend on these: the first word of
    a text, for example, often loses its space. The tokens before are those between the last two places where
    the text ended in a whole character.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._whole = 0  # the text of so many of them ended in a whole character
        self._shown = 0  # number of characters of their text that were given

    def add(self, tokens: Sequence[int], *, last: bool) -> str:
        """The characters that are complete with these tokens; all that is left if they are the `last`."""
        pieces = [self._add(token) for token in tokens]
        if last and self._ids:
            text = self._tokenizer.decode(self._ids)
            pieces.append(text[self._shown :])
            self._shown = len(text)
        return "".join(pieces)

    def _add(self, token: int) -> str:
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        missing = len(text) - len(text.rstrip(REPLACEMENT))
        # Some decoders replace all bytes in a row while the last of them are no character yet. Each token has
        # a byte at least, so after more tokens than that it will be none.
        if len(self._ids) - self._whole > MOST_MISSING:
            missing = min(missing, MOST_MISSING)
        end = len(text) - missing
        piece, self._shown = text[self._shown : end], max(self._shown, end)
        if piece and not missing:
            self._ids = self._ids[self._whole :]
            self._whole, self._shown = len(self._ids), len(self._tokenizer.decode(self._ids))
        return piece
