"""Runs the Triton kernels on the CPU: `jax_triton.triton_call` is replaced by Triton's interpreter.

Import it before anything imports triton, in a process of its own: the interpreter is chosen by an environment
variable at import. Outputs are poisoned first, so what a kernel forgets to write is seen. Float32 only: the
interpreter's bfloat16 products are wrong.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import contextlib
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
_patch_language = interpreter._patch_lang
_patched: list = []  # modules


def _patch_language_once(function) -> object:
    """Triton's own patches all of its language at each call of a function, half the time; here once."""
    modules = [x for x in function.__globals__.values() if inspect.ismodule(x) and x in (tl, tl.core)]
    if any(x not in _patched for x in modules):
        _patch_language(function)
        _patched.extend(modules)
    return interpreter._LangPatchScope()


def _sort(x: tl.tensor) -> tl.tensor:
    """Triton's own is a network of hundreds of steps."""
    return tl.tensor(interpreter.TensorHandle(np.sort(x.handle.data), x.dtype), x.type)


def triton_call(*operands, kernel, out_type, grid, input_output_aliases, **constants):
    """Stands in for `jax_triton.triton_call`."""
    for option in ("name", "num_warps", "num_stages", "backend_options"):
        constants.pop(option, None)
    shapes, tree = jax.tree.flatten(out_type)
    present = [x for x in operands if x is not None]

    def run(*arrays):
        arrays = iter(arrays)
        inputs = [None if x is None else torch.from_numpy(np.array(next(arrays))) for x in operands]
        changed = {result: inputs[i] for i, result in input_output_aliases.items()}
        assert sorted(changed) == list(range(len(shapes) - len(changed), len(shapes))), "in place is last"
        outputs = [_poisoned(shape) for shape in shapes[: len(shapes) - len(changed)]]
        whole = (*grid, 1, 1)[:3]
        if all(whole):
            with _ONE_AT_A_TIME:
                kernel[whole](*inputs, *outputs, **constants)
        return [x.numpy() for x in (*outputs, *(changed[i] for i in sorted(changed)))]

    structs = [jax.ShapeDtypeStruct(shape.shape, shape.dtype) for shape in shapes]
    return tree.unflatten(jax.pure_callback(run, structs, *present))


def _poisoned(shape: jax.ShapeDtypeStruct) -> torch.Tensor:
    dtype = np.dtype(shape.dtype)
    poison = np.nan if dtype.kind == "f" else np.iinfo(dtype).min + 85  # low bits, which may be flags, too
    return torch.from_numpy(np.full(shape.shape, poison, dtype))


@contextlib.contextmanager
def interpreted():
    """Context in which the kernels run in the interpreter, and dispatch lets them run on this machine."""
    with (
        mock.patch.object(jax_triton, "triton_call", triton_call),
        mock.patch.object(interpreter, "_patch_lang", _patch_language_once),
        mock.patch.object(tl, "sort", _sort),
        mock.patch.object(support, "unsupported_reason", return_value=None),
        mock.patch.object(interpreter.InterpretedFunction, "repr", create=True),
    ):
        yield
