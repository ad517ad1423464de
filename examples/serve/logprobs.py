"""Log-probabilities in the forms that OpenAI's clients know."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from nsa_jax.generate import Written
from nsa_jax.generate.text import TextPieces


class Told(NamedTuple):
    """A token and its log-probability, as a client is told of them.

    Attributes:
      text: of this token; U+FFFD for bytes that are no whole character.
      logprob: its log-probability.
      start: where in the text it begins, or the character that it is a part of.
      likeliest: the likeliest tokens in its place, the likeliest first.
    """

    text: str
    logprob: float
    start: int = 0
    likeliest: Sequence["Told"] = ()


class Teller:
    """Tells of the new tokens of a request, piece by piece, with `count` of the likeliest in each place."""

    def __init__(self, tokenizer: Any, count: int):
        self._tokenizer, self._count = tokenizer, count
        self._pieces, self._start = TextPieces(tokenizer), 0

    def tell(self, piece: Written) -> list[Told]:
        """The tokens of a piece."""
        assert piece.logprobs is not None
        found = []
        for token, chosen, tokens, top in zip(piece.tokens, *piece.logprobs, strict=True):
            pairs = zip(tokens[: self._count], top[: self._count], strict=True)
            likeliest = [Told(self._text(other), float(logprob)) for other, logprob in pairs]
            found.append(Told(self._text(token), float(chosen), self._start, likeliest))
            self._start += len(self._pieces.add([token], last=False))
        return found

    def _text(self, token: int) -> str:
        # Behind itself, because a decoder may drop the space before the first token.
        once, twice = (self._tokenizer.decode([token] * n, skip_special_tokens=False) for n in (1, 2))
        return twice[len(once) :]


def in_text(tokens: Sequence[Told]) -> dict[str, Any]:
    """As `/v1/completions` has them."""
    likeliest: list[dict[str, float]] = [{} for _ in tokens]
    for token, found in zip(tokens, likeliest, strict=True):
        for each in token.likeliest:
            found.setdefault(each.text, each.logprob)  # of several that look alike, the likeliest
    return dict(
        tokens=[token.text for token in tokens], token_logprobs=[token.logprob for token in tokens],
        top_logprobs=likeliest, text_offset=[token.start for token in tokens],
    )  # fmt: skip


def in_chat(tokens: Sequence[Told]) -> dict[str, Any]:
    """As `/v1/chat/completions` has them."""

    def entry(token: Told) -> dict[str, Any]:
        whole = "\N{REPLACEMENT CHARACTER}" not in token.text  # else its bytes are a part of a character
        written = list(token.text.encode()) if whole else None
        return dict(token=token.text, logprob=token.logprob, bytes=written)

    return dict(
        content=[entry(x) | dict(top_logprobs=list(map(entry, x.likeliest))) for x in tokens], refusal=None
    )
