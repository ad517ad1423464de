"""Lets jax-triton 0.4.1 trace on JAX 0.12, which gives the rule for dead code one argument more.

JAX asks where a launch stands in a program of its own: a loop, a branch, `jax.checkpoint`. The answer of
jax-triton stays what it is: no launch is removed, because it may write to its operands.
"""

import inspect
from collections.abc import Callable
from typing import Any

from jax.interpreters import partial_eval
from jax_triton import triton_lib


def follow_jax() -> bool:
    """Wraps a rule of two parameters; returns whether there was one.

    JAX 0.11 calls it with `(used_outs, eqn)`, JAX 0.12 with `(used_outs, live_ins, eqn)`. A rule that takes
    anything else is of a jax-triton that follows JAX itself, and stays.
    """
    launch = triton_lib.triton_kernel_call_p
    rule: Callable[..., Any] | None = partial_eval.dce_rules.get(launch)
    if rule is None or len(inspect.signature(rule).parameters) != 2:
        return False
    partial_eval.dce_rules[launch] = lambda used_outs, *rest: rule(used_outs, rest[-1])
    return True
