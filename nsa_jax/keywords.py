"""Says where to look for a keyword that does not exist, such as one of another library, or an old name."""

import functools
import inspect
from collections.abc import Callable
from typing import NoReturn


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


def gone(module: str, **instead: str) -> Callable[[str], NoReturn]:
    """`__getattr__` of a module that had other public names: the import of one says what to use instead."""

    def find(name: str) -> NoReturn:
        if name in instead:
            raise ImportError(
                f"a name of {module} must be one that it has, got {name}, of an earlier version. Use "
                f"{instead[name]}."
            )
        raise AttributeError(f"a name of {module} must be one that it has, got {name}. Check the spelling.")

    return find
