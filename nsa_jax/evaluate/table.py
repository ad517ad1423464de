"""Tables in Markdown."""

from collections.abc import Iterable, Sequence


def markdown(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table with these heads of its columns."""
    head, *lines = ("| " + " | ".join(map(str, row)) + " |" for row in (heads, *rows))
    return "\n".join([head, "|---" * len(heads) + "|", *lines])
