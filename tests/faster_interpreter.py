"""Makes Triton's interpreter faster, with the same results.

The interpreter spends its time in Python, on the types of small arrays. Here they are made once, and operands
of one common type go straight to NumPy; all others take Triton's way. `triton_interpreter` imports this file.
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
_check_others = TritonSemantic.binary_op_type_checking_impl
_cast_others = TritonSemantic.cast
_choose, _convert = TritonSemantic.where, TritonSemantic.to_tensor
_patch_language = interpreter._patch_lang
_patched: list = []  # modules
_np_dtypes: dict = {}
_block_types: dict = {}  # attributes of a type, by name and shape
_blocks: dict = {}  # type, shape and size of a tensor, by name and shape
_seen: set = set()
_COMMON = {"int32": np.int32, "int64": np.int64, "fp32": np.float32}  # types of nearly all operands
# What may stand to the right of a type that the result then has, by Triton's rules as by NumPy's.
_TAKES = {"int32": ("int32",), "int64": ("int64", "int32"), "fp32": ("fp32",), "int1": ("int1",)}


def patch_language(function) -> object:
    """Triton's own patches all of its language at each call of a function, half the time; here once."""
    if function not in _seen:
        modules = [x for x in function.__globals__.values() if inspect.ismodule(x) and x in (tl, tl.core)]
        if any(x not in _patched for x in modules):
            _patch_language(function)
            if not _patched:  # Triton's own have replaced those of `tl.tensor` just now
                _install_operators()
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


_SCALAR = _shape()


def _init_tensor(self, handle, type) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shape(*type.shape) if type.is_block() else _SCALAR


def _equal(self, other) -> bool:
    """Of two dtypes that are no blocks and no pointers."""
    return self.name == other.name if isinstance(other, tl.dtype) else _dtypes_equal(self, other)


def _make(data: np.ndarray, dtype: tl.dtype, is_block: bool) -> tl.tensor:
    """The tensor of an array that has the right type and shape; a scalar's shape is (1,)."""
    handle, made = object.__new__(interpreter.TensorHandle), object.__new__(tl.tensor)
    handle.data, handle.dtype, handle.attr = data, dtype, {}
    made.handle, made.dtype = handle, dtype
    if is_block:
        key = dtype.name, data.shape
        known = _blocks.get(key)
        if known is None:
            known = _blocks[key] = tl.block_type(dtype, [*data.shape]), *_shape(*data.shape)
        made.type, made.shape, made.numel = known
    else:
        made.type, (made.shape, made.numel) = dtype, _SCALAR
    return made


def _is_block(x) -> bool:
    return type(x) is tl.tensor and x.shape is not _SCALAR[0]


def _fits(number, dtype: tl.dtype) -> bool:
    """Whether a number beside a tensor takes its type, by Triton's rules as by NumPy's."""
    if type(number) is int:
        return dtype.name in _COMMON and -(2**31) <= number < 2**31
    return type(number) is float and dtype.name == "fp32"


def _operator(name: str, function, dtypes: tuple[str, ...], result: tl.dtype | None = None) -> None:
    """Operands of common types go to NumPy, which broadcasts as Triton does; all others to Triton's own."""
    slow = getattr(tl.tensor, name)
    is_reversed = name.startswith("__r") and name != "__rshift__"

    def call(left, right):
        dtype = left.dtype
        if type(right) is tl.tensor:
            known, other = right.dtype.name in _TAKES.get(dtype.name, ()), right.handle.data
        else:
            other = right.value if type(right) is tl.constexpr else right
            known = _fits(other, dtype)
        if not known or dtype.name not in dtypes:
            return slow(left, right)
        data = left.handle.data
        data = function(other, data) if is_reversed else function(data, other)
        return _make(data, dtype if result is None else result, _is_block(left) or _is_block(right))

    setattr(tl.tensor, name, call)


def _divide(left, right):
    """Towards zero."""
    return (left - np.fmod(left, right)) // right


def _install_operators() -> None:
    numbers, integers = tuple(_COMMON), ("int32", "int64")
    for name, function in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
        _operator(f"__{name}__", function, numbers)
        _operator(f"__r{name}__", function, numbers)
    comparisons = ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal")
    for name, function in zip(("lt", "le", "gt", "ge", "eq", "ne"), comparisons, strict=True):
        _operator(f"__{name}__", getattr(np, function), numbers, tl.int1)
    for name in ("and", "or", "xor"):
        _operator(f"__{name}__", getattr(np, f"bitwise_{name}"), (*integers, "int1"))
    _operator("__lshift__", np.left_shift, integers)
    _operator("__rshift__", np.right_shift, integers)
    _operator("__floordiv__", _divide, integers)
    _operator("__mod__", np.fmod, integers)
    _operator("__truediv__", np.divide, ("fp32",))
    add, get_item = tl.tensor.__add__, tl.tensor.__getitem__

    def add_or_move(left, right):
        """A pointer moves by whole elements."""
        if not left.dtype.is_ptr():
            return add(left, right)
        if type(right) is tl.tensor and right.dtype.name in integers:
            steps = right.handle.data.astype(np.uint64)
        elif type(right) is int and right >= 0:
            steps = right
        else:
            return add(left, right)
        data = left.handle.data + max(1, left.dtype.element_ty.primitive_bitwidth // 8) * steps
        return _make(data, left.dtype, _is_block(left) or _is_block(right))

    def index(x, at):
        """New axes only, as in NumPy."""
        known = _is_block(x) and type(at) is tuple and all(each is None or each == slice(None) for each in at)
        return _make(x.handle.data[at], x.dtype, True) if known else get_item(x, at)

    tl.tensor.__add__, tl.tensor.__getitem__ = add_or_move, index


def _broadcast(self, left, right) -> tuple:
    """Arrays of one shape share it, as `_shape` is called once for it."""
    if left.shape is right.shape:
        return left, right
    shape = np.broadcast_shapes(*(x.handle.data.shape for x in (left, right) if _is_block(x)))
    return _spread(left, shape), _spread(right, shape)


def _spread(x, shape: tuple[int, ...]):
    if _is_block(x) and x.handle.data.shape == shape:
        return x
    return _make(np.broadcast_to(x.handle.data, shape), x.dtype, True)


def _check_operands(self, left, right, *rules) -> tuple:
    """Tensors of one common type keep it, and a number takes that of the tensor beside it."""
    if type(left) is tl.tensor and type(right) is not tl.tensor:
        right = _beside(left, right)
    elif type(right) is tl.tensor and type(left) is not tl.tensor:
        left = _beside(right, left)
    both = type(left) is type(right) is tl.tensor
    if both and left.dtype.name == right.dtype.name and left.dtype.name in _COMMON:
        return self.broadcast_impl_value(left, right)
    return _check_others(self, left, right, *rules)


def _beside(tensor, number):
    """The number as a tensor of the same type; as it is where Triton has more to check."""
    if not _fits(number, tensor.dtype):
        return number
    return _make(np.array([number], _COMMON[tensor.dtype.name]), tensor.dtype, False)


def _where(self, condition, x, y):
    """Operands of one type go to NumPy."""
    if type(x) is tl.tensor and type(y) is not tl.tensor:
        y = _beside(x, y)
    elif type(y) is tl.tensor and type(x) is not tl.tensor:
        x = _beside(y, x)
    both = type(x) is type(y) is tl.tensor and x.dtype.name == y.dtype.name
    if not both or condition.dtype.name != "int1":
        return _choose(self, condition, x, y)
    data = np.where(condition.handle.data, x.handle.data, y.handle.data)
    return _make(data, x.dtype, any(map(_is_block, (condition, x, y))))


def _cast(self, x, dtype: tl.dtype, rounding=None):
    """NumPy's casts to common types."""
    if x.dtype.name == dtype.scalar.name:
        return x
    if rounding is not None or x.dtype.name not in (*_COMMON, "int1") or dtype.scalar.name not in _COMMON:
        return _cast_others(self, x, dtype, rounding)
    return _make(x.handle.data.astype(_COMMON[dtype.scalar.name]), dtype.scalar, _is_block(x))


def _to_tensor(self, x, *rules):
    return x if type(x) is tl.tensor else _convert(self, x, *rules)


def _patch_attribute(owner, name, member, builder, scope) -> None:
    """Functions of the language get what interprets them, without two wrappers around each."""
    function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic
    scope.set_attr(owner, name, lambda *args, **kwargs: function(*args, **kwargs | {"_semantic": semantic}))


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
    TritonSemantic.cast = _cast
    TritonSemantic.where, TritonSemantic.to_tensor = _where, _to_tensor
    for name in ("arange", "scalar_constant"):  # the same each time; nothing writes into a tensor
        setattr(TritonSemantic, name, functools.cache(getattr(TritonSemantic, name)))
    interpreter._patch_attr = _patch_attribute
    interpreter.ScanOps.generic_scan = _scan
    # It computes each sum in 64 bits too, for an assertion that it leaves out unless it debugs.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
