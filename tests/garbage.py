"""What `gc.collect` looks at."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def of_this_test() -> Iterator[None]:
    """Here `gc.collect` looks at what is made here: the tests before have left millions of objects."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
