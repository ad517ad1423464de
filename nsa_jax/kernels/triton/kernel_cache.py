"""Keeps compiled kernels on disk, in a folder inside JAX's compilation cache.

JAX looks up a program by its text, in which kernels already stand as PTX. So in every process jax-triton
compiles them before JAX can find anything. They are kept wherever JAX keeps programs: in
`jax_compilation_cache_dir` if that is a folder of this machine and `jax_enable_compilation_cache` is set.

A kernel is looked up by what its PTX depends on: its text in Triton's first form (TTIR), with types, sizes
and alignment; the compiler's version, options and environment variables; the GPU's compute capability. A file
appears in one step, so processes may share the folder. One whose checksum is wrong is written anew.
"""

import dataclasses
import functools
import hashlib
import json
import pathlib
import uuid
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax_triton
import triton
from jax_triton import triton_lib
from triton._C import libtriton

FOLDER = "nsa_jax_kernels"
_OURS = " @nsa_"  # before the name of a kernel in TTIR; others' kernels are none of our business
_NOT_KEPT = {"ttgir": "", "llir": ""}  # forms in between, which jax-triton only writes to its folder of dumps


def keeping(compile_kernel: Callable[..., Any]) -> Callable[..., Any]:
    """jax-triton's compiler, whose kernels are kept and found."""

    @functools.wraps(compile_kernel)
    def kept(ttir: Any, cuda_backend: Any, cuda_options: Any, compute_capability: Any) -> Any:
        def compiled() -> Any:
            return compile_kernel(ttir, cuda_backend, cuda_options, compute_capability)

        folder = _folder()
        text = "" if folder is None else str(ttir)
        if folder is None or _OURS not in text:
            return compiled()
        # Other builds of the same version mostly differ in size.
        compiler = triton.__version__, pathlib.Path(libtriton.__file__).stat().st_size, jax_triton.__version__
        environment = sorted(libtriton.get_cache_invalidating_env_vars().items())
        key = repr((text, compiler, environment, cuda_backend.hash(), cuda_options.hash()))
        file = folder / hashlib.sha256(key.encode()).hexdigest()
        found = _read(file)
        if found is None:
            found = compiled()
            _write(file, found)
        return found

    return kept


def _folder() -> pathlib.Path | None:
    """Where kernels are kept now, if at all; not while someone wants to see what the compiler does."""
    folder = jax.config.jax_compilation_cache_dir
    watched = triton.knobs.compilation.always_compile or getattr(triton_lib, "_JAX_TRITON_DUMP_DIR", None)
    if not folder or "://" in folder or not jax.config.jax_enable_compilation_cache or watched:
        return None
    return pathlib.Path(folder) / FOLDER


def _read(file: pathlib.Path) -> Any:
    """The kernel in a file; None if there is none, or it is damaged."""
    try:
        checksum, _, data = file.read_bytes().partition(b"\n")
        if checksum.decode() != hashlib.sha256(data).hexdigest():
            return None
        return triton_lib.CompilationResult(**json.loads(data), **_NOT_KEPT)
    except (OSError, ValueError, TypeError):
        return None


def _write(file: pathlib.Path, result: Any) -> None:
    """Keeps a kernel; where that fails it only warns, as JAX does."""
    whole = file.with_name(f"{file.name}.{uuid.uuid4()}")
    try:
        fields = {k: v for k, v in dataclasses.asdict(result).items() if k not in _NOT_KEPT}
        data = json.dumps(fields).encode()
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            whole.write_bytes(hashlib.sha256(data).hexdigest().encode() + b"\n" + data)
            whole.replace(file)
        finally:
            whole.unlink(missing_ok=True)
    except (OSError, TypeError) as error:
        why = getattr(error, "strerror", None) or error  # without the file, so Python shows the warning once
        warnings.warn(
            f"compiled kernels must have a folder that can be written, got {file.parent}: {why}. Set "
            "jax_compilation_cache_dir to another one; until then they are compiled in each process.",
            stacklevel=2,
        )
