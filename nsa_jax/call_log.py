"""Logs which implementation a call takes, under the name `nsa_jax`, once for each place that calls.

What was chosen is logged at level INFO, what was refused, and why, at level DEBUG. Under `jax.jit` that
happens while a function is traced, and so it may with operands on explicit axes of a mesh, which are computed
under a `jit` of ours. A place that is called again with the same outcome logs nothing.

A call that takes `xla` on a GPU because the kernels refuse it is a warning, once for each reason.
"""

import inspect
import logging
from collections.abc import Iterable

_LOGGER = logging.getLogger("nsa_jax")
# Packages whose frames lie between the line that calls and this module.
_BETWEEN = {"nsa_jax", "jax", "flax", "contextlib", "functools"}
_logged: set[tuple[object, ...]] = set()
_warned: set[str] = set()  # rules that the kernels refuse a call for


def log_choice(operation: str, implementation: str, reason: str, refused: Iterable[tuple[str, str]]) -> None:
    """Logs one choice of `nsa_jax.choose`, unless the same was logged for the calling line before."""
    if not _LOGGER.isEnabledFor(logging.INFO):
        return
    site, refused = _calling_line(), tuple(refused)
    logged = (_LOGGER.getEffectiveLevel(), site, operation, implementation, reason, refused)
    if logged in _logged:
        return
    _logged.add(logged)
    _LOGGER.info("%s: %s runs as %s. %s", site, operation, implementation, reason)
    for name, why in refused:
        _LOGGER.debug("%s: %s does not run as %s: %s", site, operation, name, why)


def warn_of_fallback(operation: str, reason: str) -> None:
    """Warns that `operation` runs as `xla` on a GPU, unless that was said for the same reason before.

    Without logging set up, Python prints a warning to stderr.
    """
    rule = reason.partition(", got ")[0]
    if rule not in _warned:
        _warned.add(rule)
        _LOGGER.warning(
            "%s: %s runs as xla, many times as slow as the GPU kernels: %s",
            *(_calling_line(), operation, reason),
        )


def _calling_line() -> str:
    """File and line of the innermost frame that is neither ours, nor JAX's or Flax's."""
    frame = inspect.currentframe()
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "a call without a Python frame"
