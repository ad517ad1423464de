"""Plain JAX runs everything everywhere."""

from typing import Any


def unsupported_reason(operation: str, *arrays: Any, **call: Any) -> None:
    """None: there is no call that it cannot run; see `nsa_jax.dispatch.Support`."""


def slower_reason(operation: str, *arrays: Any) -> None:
    """None: nothing comes after it."""
