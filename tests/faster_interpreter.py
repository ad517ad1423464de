"""Makes Triton's interpreter faster, with the same results: it does once what it does at each operation.

`triton_interpreter` imports it. The interpreter spends its time in Python, on the types of small arrays.
"""

import dataclasses
import functools
import inspect

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_np_dtype = interpreter._get_np_dtype
_make_block_type, _dtypes_equal = tl.block_type.__init__, tl.dtype.__eq__
_broadcast_others = TritonSemantic.broadcast_impl_value
_check_others = TritonSemantic.binary_op_type_checking_impl
_patch_language = interpreter._patch_lang
_patched: list = []  # modules
_np_dtypes: dict = {}
_block_types: dict = {}
_seen: set = set()
_COMMON = {"int32": np.int32, "int64": np.int64, "fp32": np.float32}  # types of nearly all operands


def patch_language(function) -> object:
    """Triton's own patches all of its language at each call of a function, half the time; here once."""
    if function not in _seen:
        modules = [x for x in function.__globals__.values() if inspect.ismodule(x) and x in (tl, tl.core)]
        if any(x not in _patched for x in modules):
            _patch_language(function)
            _patched.extend(modules)
        _seen.add(function)
    return interpreter._LangPatchScope()


def get_np_dtype(dtype):
    """Triton's own makes a table of all dtypes at each call."""
    scalar = dtype.scalar
    found = _np_dtypes.get(scalar.name)
    if found is None:
        found = _np_dtypes[scalar.name] = _np_dtype(scalar)
    return found


def _init_block_type(self, element_ty, shape) -> None:
    """Checks a shape and names the type once."""
    key = element_ty.name, *[x.value if type(x) is tl.constexpr else x for x in shape]
    known = _block_types.get(key)
    if known is None:
        _make_block_type(self, element_ty, shape)
        _block_types[key] = dict(vars(self))
    else:
        vars(self).update(known, element_ty=element_ty)


@functools.cache
def _shape(*sizes: int) -> tuple:
    """The two attributes of a tensor that say its shape."""
    numel = 1
    for size in sizes:
        numel *= size
    return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(numel)


def _init_tensor(self, handle, type) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shape(*type.shape) if type.is_block() else _shape()


def _equal(self, other) -> bool:
    """Of two dtypes that are no blocks and no pointers."""
    return self.name == other.name if isinstance(other, tl.dtype) else _dtypes_equal(self, other)


def _broadcast(self, left, right) -> tuple:
    """Arrays of one shape share it, as `_shape` is called once for it."""
    return (left, right) if left.shape is right.shape else _broadcast_others(self, left, right)


def _check_operands(self, left, right, *rules) -> tuple:
    """Tensors of one common type keep it, and a number takes that of the tensor beside it."""
    if type(left) is tl.tensor and type(right) is not tl.tensor:
        right = _beside(self, left, right)
    elif type(right) is tl.tensor and type(left) is not tl.tensor:
        left = _beside(self, right, left)
    both = type(left) is type(right) is tl.tensor
    if both and left.dtype.name == right.dtype.name and left.dtype.name in _COMMON:
        return self.broadcast_impl_value(left, right)
    return _check_others(self, left, right, *rules)


def _beside(self, tensor, number):
    """The number as a tensor of the same type; as it is where Triton has more to check."""
    dtype = _COMMON.get(tensor.dtype.name)
    is_integer = type(number) is int and abs(number) < 2**31
    is_float = type(number) is float and dtype is np.float32
    if dtype is None or not (is_integer or is_float):
        return number
    data = np.full(tensor.handle.data.shape, number, dtype)
    return self.tensor(interpreter.TensorHandle(data, tensor.dtype), tensor.type)


def _scan(self, inputs) -> list:
    """In steps of 1, 2, 4, ... elements at once, as on a GPU; Triton's own goes element by element."""
    arrays = [x.handle.data for x in inputs]
    length = arrays[0].shape[self.axis]
    place = np.arange(length).reshape([-1 if i == self.axis else 1 for i in range(arrays[0].ndim)])
    step = 1
    while step < length:
        before = [np.roll(y, step, self.axis) for y in arrays]
        pairs = zip(before + arrays, 2 * [*inputs], strict=True)
        found = self.combine_fn.fn(*[self.to_tensor(y, x.dtype) for y, x in pairs])
        found = found if isinstance(found, tuple) else (found,)
        arrays = [np.where(place >= step, x.handle.data, y) for x, y in zip(found, arrays, strict=True)]
        step *= 2
    return [self.to_tensor(y, x.dtype) for y, x in zip(arrays, inputs, strict=True)]


def install() -> None:
    """For the whole process: a kernel may run after the context that it was called in."""
    interpreter._patch_lang, interpreter._get_np_dtype = patch_language, get_np_dtype
    tl.block_type.__init__ = _init_block_type
    tl.tensor.__init__ = _init_tensor
    tl.dtype.__eq__ = _equal
    TritonSemantic.broadcast_impl_value = _broadcast
    TritonSemantic.binary_op_type_checking_impl = _check_operands
    interpreter.ScanOps.generic_scan = _scan
    # It computes each sum in 64 bits too, for an assertion that it leaves out unless it debugs.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
