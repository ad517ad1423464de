"""Strings that end a text, wherever they begin and end in its tokens."""

from collections.abc import Sequence


class StopStrings:
    """Passes a text on, piece by piece, up to the first of some strings.

    The text that could still become one of them is held back. The first is the one that is complete first, of
    several with the same end the longest, so what is passed on does not depend on how the text is cut.

    Attributes:
      found: whether one was found. The rest of the text is then dropped.
    """

    found: bool

    def __init__(self, strings: Sequence[str]):
        self.found = False
        self._strings, self._held = strings, ""

    def add(self, piece: str, *, last: bool = False) -> str:
        """What can be passed on with this piece; with the `last` one all but a string that was found."""
        if self.found:
            return ""
        text = self._held + piece
        places = [(start + len(each), start) for each in self._strings if (start := text.find(each)) >= 0]
        if places:
            self.found = True
            return text[: min(places)[1]]
        end = len(text) if last else min((_head(text, each) for each in self._strings), default=len(text))
        self._held = text[end:]
        return text[:end]


def _head(text: str, string: str) -> int:
    """Where the longest end of the text begins that the string begins with."""
    first = max(len(text) - len(string) + 1, 0)
    return next(start for start in range(first, len(text) + 1) if string.startswith(text[start:]))
