"""The form that every error of the house has: `<rule>, got <values>. <what to do>.`"""

import re

_FORM = re.compile(r".+, got .+\. [A-Z'`].*\.", re.DOTALL)


def has_form(message: str) -> bool:
    return _FORM.fullmatch(message) is not None
