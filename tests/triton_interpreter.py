"""Runs the Triton kernels on the CPU: `jax_triton.triton_call` is replaced by Triton's interpreter.

Import it before anything imports triton, in a process of its own: the interpreter is chosen by an environment
variable at import. Outputs are poisoned first, so what a kernel forgets to write is seen. Float32 only: the
interpreter's bfloat16 products are wrong.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import contextlib
import functools
import inspect
import threading
from unittest import mock

import jax
import jax_triton
import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from nsa_jax.kernels.triton import support

_ONE_AT_A_TIME = threading.Lock()  # the interpreter keeps the program's place in global variables


@functools.cache
def _builtins(place) -> list[str]:
    return [name for name, member in inspect.getmembers(place) if tl.core.is_builtin(member)]


def _patch_builtin(place, builder, scope) -> None:
    """Triton's own looks through all of `triton.language` at each call of a function: half the time."""
    for name in _builtins(place):
        member = getattr(place, name)
        if tl.core.is_builtin(member):
            interpreter._patch_attr(place, name, member, builder, scope)


def triton_call(*operands, kernel, out_type, grid, **constants):
    """Stands in for `jax_triton.triton_call`."""
    for option in ("name", "num_warps", "num_stages", "backend_options"):
        constants.pop(option, None)
    shapes, tree = jax.tree.flatten(out_type)
    present = [x for x in operands if x is not None]

    def run(*arrays):
        arrays = iter(arrays)
        inputs = [None if x is None else torch.from_numpy(np.array(next(arrays))) for x in operands]
        outputs = [_poisoned(shape) for shape in shapes]
        whole = (*grid, 1, 1)[:3]
        if all(whole):
            with _ONE_AT_A_TIME:
                kernel[whole](*inputs, *outputs, **constants)
        return [x.numpy() for x in outputs]

    structs = [jax.ShapeDtypeStruct(shape.shape, shape.dtype) for shape in shapes]
    return tree.unflatten(jax.pure_callback(run, structs, *present))


def _poisoned(shape: jax.ShapeDtypeStruct) -> torch.Tensor:
    dtype = np.dtype(shape.dtype)
    poison = np.nan if dtype.kind == "f" else np.iinfo(dtype).min
    return torch.from_numpy(np.full(shape.shape, poison, dtype))


@contextlib.contextmanager
def interpreted():
    """Context in which the kernels run in the interpreter, and dispatch lets them run on this machine."""
    with (
        mock.patch.object(jax_triton, "triton_call", triton_call),
        mock.patch.object(interpreter, "_patch_builtin", _patch_builtin),
        mock.patch.object(support, "unsupported_reason", return_value=None),
    ):
        yield
