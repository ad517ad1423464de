"""What a user can do when the memory of a device is not enough."""

import contextlib
from collections.abc import Iterator

import jax

from nsa_jax.adopt.command_line import InputError
from nsa_jax.adopt.run_folder import RunFolder


@contextlib.contextmanager
def needed(what: str, remedy: str, folder: RunFolder) -> Iterator[None]:
    """Says what to use instead where there is no memory for what the block does.

    Raises:
      InputError: a device had no memory.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise InputError(
            f"the device must have memory for {what}, got {str(error).splitlines()[0]!r}; {folder.saved}. "
            f"Use {remedy}."
        ) from error
