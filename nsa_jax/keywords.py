"""Says where to look when a call has a keyword that does not exist, such as that of another library."""

import functools
import inspect
from collections.abc import Callable


def known[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """A function whose TypeError for an unknown keyword points to the list of what is not supported."""
    names = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if unknown := [name for name in kwargs if name not in names]:
            raise TypeError(
                f"a keyword of {function.__qualname__.removesuffix('.__init__')} must be one of its "
                f"parameters, got {unknown[0]!r}. Check the spelling; docs/faq.md has a table of what is not "
                "supported, and what instead."
            )
        return function(*args, **kwargs)

    return call
