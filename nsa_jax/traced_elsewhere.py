"""Warns where plain JAX that was chosen without a GPU is compiled for one.

The implementation is chosen while a function is traced, for the devices at hand. `jax.export` can lower what
was traced so for a GPU, and the program then has no kernels. Only its lowering knows. So an array of each
such call passes through a primitive that is the identity, lowers to nothing, and speaks when it is lowered
for CUDA.
"""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from nsa_jax.array_typing import Array
from nsa_jax.call_log import warn_of_fallback

REASON = (
    "the kernels need a GPU while the function is traced, got a machine without one. Name the GPU, as in the "
    "guide Profiling and export."
)

_marked = Primitive("nsa_jax_traced_elsewhere")


def mark(operation: str, operands: dict[str, Any]) -> dict[str, Any]:
    """The operands of a call for which nobody asked for plain JAX, one of them marked."""
    for name, x in operands.items():
        if isinstance(x, jax.Array):
            return operands | {name: _marked.bind(x, operation=operation)}
    return operands


def _lowered_for_cuda(_: Any, x: Any, *, operation: str) -> list[Any]:
    warn_of_fallback(operation, REASON)
    return [x]


def _transposed(cotangent: Array, _: Any, *, operation: str) -> list[Array]:
    return [cotangent]


_marked.def_impl(lambda x, *, operation: x)
_marked.def_abstract_eval(lambda x, *, operation: x)
ad.deflinear2(_marked, _transposed)
batching.defvectorized(_marked)
mlir.register_lowering(_marked, lambda _, x, *, operation: [x])
mlir.register_lowering(_marked, _lowered_for_cuda, platform="cuda")
