"""Compiles kernels side by side, from the moment when their launches are traced.

JAX lowers a program when all of it is traced, and jax-triton compiles a kernel where JAX lowers its launch:
one behind the other, for most of the time of a first call. So threads lower each launch by itself, as soon
as it is traced. The first kernel that the program asks for waits for them; then jax-triton knows them all.
"""

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Any

import jax

MOST_THREADS = 8  # one at a time runs Python, for a tenth of the work

_launches: set[str] = set()  # that were handed to a thread
_jobs: set[Future[None]] = set()  # that are not done
_kernels: dict[Any, Any] = {}  # what was compiled since there last was no job
_thread = threading.local()


def begin(call: functools.partial[Any], operands: tuple[Any, ...]) -> None:
    """Has a thread compile the kernel of `call(*operands)`, if that is traced and JAX runs on a GPU."""
    threads = _threads()
    if threads is None or not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(operands)):
        return
    arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands)
    launch = repr((call.keywords, arrays))
    if launch in _launches:
        return
    _launches.add(launch)
    if not _jobs:
        _kernels.clear()
    job = threads.submit(_lower, jax.jit(call).trace(*arrays))
    _jobs.add(job)
    job.add_done_callback(_jobs.discard)


def _lower(launch: jax.stages.Traced) -> None:
    """Compiles the kernel. Nobody asks for an error: it comes again where the program is lowered."""
    launch.lower(lowering_platforms=("cuda",))


@functools.cache
def _threads() -> Executor | None:
    """The threads; None where there is no GPU, or no second core."""
    if jax.default_backend() != "gpu":
        return None
    cores = len(os.sched_getaffinity(0))
    return threads(min(cores, MOST_THREADS)) if cores > 1 else None


def threads(number: int) -> Executor:
    """Threads whose kernels others find."""
    return ThreadPoolExecutor(number, "nsa_jax_compile", lambda: setattr(_thread, "is_ours", True))


def sharing(compile_kernel: Callable[..., Any]) -> Callable[..., Any]:
    """jax-triton's compiler, with which a program finds what threads compiled."""

    @functools.wraps(compile_kernel)
    def shared(ttir: Any, cuda_backend: Any, cuda_options: Any, compute_capability: Any) -> Any:
        key = str(ttir), cuda_options.hash(), compute_capability
        if hasattr(_thread, "is_ours"):
            _kernels[key] = compile_kernel(ttir, cuda_backend, cuda_options, compute_capability)
            return _kernels[key]
        try:
            wait(list(_jobs))
        except BaseException:  # Ctrl-C: Python ends after the jobs that were begun
            for job in list(_jobs):
                job.cancel()
            raise
        found = _kernels.get(key)
        return found or compile_kernel(ttir, cuda_backend, cuda_options, compute_capability)

    return shared
