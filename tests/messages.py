"""The form of every error message: `<rule>, got <values>. <what to do>.`"""

import contextlib
import re

import pytest

# The verbs that a remedy begins with.
VERBS = (
    "Add|Align|Begin|Broadcast|Build|Call|Cast|Check|Choose|Compress|Convert|Declare|Drop|End"
    "|Enlarge|Extend|Fold|Give|Install|Leave|Lengthen|Load|Make|Mark|Measure|Merge|Multiply|Name|Pad|Pass"
    "|Raise|Rename|Renumber|Report|Reshape|Restore|Run|Save|Say|Select|Set|Shorten|Skip|Sort|Split|Start|Try|Use"
)
_FORM = re.compile(rf".+, got .+\. ({VERBS})\b.*\.", re.DOTALL)  # a printed array has several lines


def has_form(message: str) -> bool:
    return _FORM.fullmatch(message) is not None


@contextlib.contextmanager
def refused(error: type[Exception], told: str):
    """The block raises an `error` that has the form and says `told`, a regular expression."""
    with pytest.raises(error, match=told) as raised:
        yield raised
    assert has_form(str(raised.value)), str(raised.value)
