"""Runs the Triton kernels on the CPU: `jax_triton.triton_call` is replaced by Triton's interpreter.

Import it before anything imports triton, in a process of its own: the interpreter is chosen by an environment
variable at import. Outputs are poisoned first, so what a kernel forgets to write is seen. Float32 only: the
interpreter's bfloat16 products are wrong.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import contextlib
import inspect
import itertools
import random
import threading
from collections.abc import Callable
from unittest import mock

import faster_interpreter
import fewer_collections  # noqa: F401
import jax
import jax_triton
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from nsa_jax.kernels.triton import support
from nsa_jax.kernels.triton.decode import second

faster_interpreter.install()
PROGRAMS_AT_ONCE = 16  # as many as the largest team of programs that wait for each other
_ONE_AT_A_TIME = threading.Lock()  # the interpreter keeps the program's place in global variables


def _sort(x: tl.tensor) -> tl.tensor:
    """Triton's own is a network of hundreds of steps."""
    return tl.tensor(interpreter.TensorHandle(np.sort(x.handle.data), x.dtype), x.type)


class _Program(threading.Thread):
    """One program of a launch in a thread of its own; of all threads only one runs at a time."""

    def __init__(self, run: Callable[[], object], place: tuple[int, int, int]):
        super().__init__(daemon=True)
        self.body, self.place = run, place
        self.turn, self.back = threading.Semaphore(0), threading.Semaphore(0)
        self.ready: Callable[[], bool] = lambda: True  # what it waits for
        self.ended, self.error = False, None
        self.start()

    def run(self) -> None:
        self.turn.acquire()
        try:
            interpreter.interpreter_builder.set_grid_idx(*self.place)
            self.body()
        except BaseException as error:
            self.error = error
        self.ended = True
        self.back.release()

    def go_on(self) -> None:
        """Runs until it ends, arrives somewhere or waits for others."""
        self.turn.release()
        self.back.acquire()
        if self.error is not None:
            raise self.error

    def pause(self, ready: Callable[[], bool]) -> None:
        """Lets others run; afterwards this one, but not before it is ready."""
        self.ready = ready
        self.back.release()
        self.turn.acquire()
        interpreter.interpreter_builder.set_grid_idx(*self.place)


def _arrive(counter) -> None:
    """Stands in for `arrivals.arrive`: others may run on at once, so what is stored later is missed."""
    tl.atomic_add(counter, 1)
    threading.current_thread().pause(lambda: True)


def _wait_for(counter, number) -> None:
    """Stands in for `arrivals.wait_for`: the program stops here until others have arrived."""
    threading.current_thread().pause(lambda: int(tl.load(counter).handle.data[0]) >= number)


def _run_together(run: Callable[[], object], places: list[tuple[int, int, int]]) -> None:
    """Starts programs in order, a few at once; which of them runs next is drawn."""
    draw = random.Random(len(places))
    pending, running, idle = iter(places), [], 0
    while True:
        new = itertools.islice(pending, PROGRAMS_AT_ONCE - len(running))
        running += [_Program(run, place) for place in new]
        if not running:
            return
        program = draw.choice(running)
        if program.ready():
            program.go_on()
            idle = 0
        else:
            idle += 1
        assert idle < 100 * PROGRAMS_AT_ONCE, f"programs {[each.place for each in running]} wait for ever"
        running = [each for each in running if not each.ended]


class _Memory:
    """An array as an operand of a kernel, which Triton takes from PyTorch only."""

    def __init__(self, array: np.ndarray):
        self.array, self.dtype = array, array.dtype

    def data_ptr(self) -> int:
        return self.array.ctypes.data


class _GridExecutor(interpreter.GridExecutor):
    """Triton's own runs each program to its end, also one that waits for another, and wants PyTorch."""

    def __call__(self, *args, **constants):
        args = inspect.getcallargs(self.fn, *args, **constants)
        args = {k: x if k in self.constexprs else interpreter._implicit_cvt(x) for k, x in args.items()}
        interpreter._patch_lang(self.fn)
        interpreter.interpreter_builder.set_grid_dim(*self.grid)
        places = list(itertools.product(*map(range, self.grid)))
        if "wait_for" in self.fn.__globals__:
            return _run_together(lambda: self.fn(**args), places)
        random.Random(len(places)).shuffle(places)  # in order, a program could mend what another wrote over
        for place in places:
            interpreter.interpreter_builder.set_grid_idx(*place)
            self.fn(**args)


def triton_call(*operands, kernel, out_type, grid, input_output_aliases, **constants):
    """Stands in for `jax_triton.triton_call`."""
    for option in ("name", "num_warps", "num_stages", "backend_options"):
        constants.pop(option, None)
    shapes, tree = jax.tree.flatten(out_type)
    present = [x for x in operands if x is not None]

    def run(*arrays):
        arrays = iter(arrays)
        inputs = [None if x is None else np.array(next(arrays)) for x in operands]
        given = [x for x in inputs if x is not None]  # aliases count these
        changed = {result: given[i] for i, result in input_output_aliases.items()}
        assert sorted(changed) == list(range(len(shapes) - len(changed), len(shapes))), "in place is last"
        outputs = [_poisoned(shape) for shape in shapes[: len(shapes) - len(changed)]]
        whole = (*grid, 1, 1)[:3]
        if all(whole):
            with _ONE_AT_A_TIME:
                memory = [None if x is None else _Memory(x) for x in (*inputs, *outputs)]
                kernel[whole](*memory, **constants)
        return [*outputs, *(changed[i] for i in sorted(changed))]

    structs = [jax.ShapeDtypeStruct(shape.shape, shape.dtype) for shape in shapes]
    return tree.unflatten(jax.pure_callback(run, structs, *present))


def _poisoned(shape: jax.ShapeDtypeStruct) -> np.ndarray:
    dtype = np.dtype(shape.dtype)
    poison = np.nan if dtype.kind == "f" else np.iinfo(dtype).min + 85  # low bits, which may be flags, too
    return np.full(shape.shape, poison, dtype)


@contextlib.contextmanager
def interpreted():
    """Context in which calls of kernels are traced for the interpreter, and dispatch allows them here.

    JAX may run them after the context has ended.
    """
    with (
        mock.patch.object(jax_triton, "triton_call", triton_call),
        mock.patch.object(support, "unsupported_reason", return_value=None),
        mock.patch.object(interpreter.InterpretedFunction, "repr", create=True),
    ):
        yield


# Not in the context, because kernels may run after it.
interpreter.GridExecutor = _GridExecutor
second.arrive, second.wait_for = _arrive, _wait_for
tl.sort = _sort
