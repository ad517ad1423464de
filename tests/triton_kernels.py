"""Compiles a program's kernels for a GPU that this machine lacks: their memory, spills and registers.

Triton's own assembler turns their PTX into machine code and says what that needs.
"""

import concurrent.futures
import contextlib
import importlib
import itertools
import pathlib
import pkgutil
import re
import subprocess
from collections.abc import Collection
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton_compile
from jax_triton import triton_lib

from nsa_jax import kernels
from nsa_jax.kernels.triton import compile_ahead, launch

ASSEMBLERS = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
DEVICES = itertools.count(133)  # numbers of cores, of which no other test has a device
TARGETS = {80: "sm_80", 89: "sm_89", 90: "sm_90a", 100: "sm_100a", 120: "sm_120a"}


class Kernel(NamedTuple):
    """A compiled kernel, and the resources that it needs."""

    name: str
    ptx: str
    shared_bytes: int
    scratch_bytes: int
    registers: int
    spill_bytes: int


def compiled(program, *arguments, capability: int, but: Collection[str] = ()) -> list[Kernel]:
    """All kernels of a function, compiled to machine code, but those named in `but`."""
    found = []
    to_ptx, call = triton_lib.compile_ttir_to_ptx_inplace, jax_triton.triton_call

    def call_most(*operands, name, out_type, input_output_aliases, **settings):
        if name not in but:
            settings |= dict(name=name, out_type=out_type, input_output_aliases=input_output_aliases)
            return call(*operands, **settings)
        leaves, tree = jax.tree.flatten(out_type)
        results = [jnp.zeros(x.shape, x.dtype) for x in leaves]
        present = [x for x in operands if x is not None]  # aliases count these
        for operand, result in input_output_aliases.items():
            results[result] = present[operand]
        return jax.tree.unflatten(tree, results)

    def spy(*args, **kwargs):
        result = to_ptx(*args, **kwargs)
        found.append(pool.submit(assemble, result, TARGETS[capability]))  # during the next one's PTX
        return result

    with (
        kernels_forgotten(keep=True),  # compiles again what another test compiled
        concurrent.futures.ThreadPoolExecutor(2) as pool,
        mock.patch.object(triton_lib, "compile_ttir_to_ptx_inplace", spy),
        mock.patch.object(jax_triton, "triton_call", call_most),
    ):
        # JAX keeps what it traces for a device, and what is traced here may lack kernels.
        triton_compile.lower(program, *arguments, capability=capability, num_cores=next(DEVICES))
    return [kernel.result() for kernel in found]


@contextlib.contextmanager
def kernels_forgotten(*, keep: bool = False):
    """Context that knows no kernel that was compiled before it; with `keep`, its own are known after it."""
    functions = jit_functions()
    before = {function: dict(vars(function).get("_jT_kernel_cache", {})) for function in functions}
    for function in functions:
        vars(function).get("_jT_kernel_cache", {}).clear()
    compile_ahead._launches.clear()
    compile_ahead._kernels.clear()
    try:
        yield
    finally:
        for function, kernels in before.items():
            cache = vars(function).get("_jT_kernel_cache", {})
            if not keep:
                cache.clear()
            cache |= kernels


def jit_functions() -> dict[triton.JITFunction, str]:
    """The functions under `triton.jit` of the package, with the names of their files and their own."""
    functions = {}
    for file in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        for value in vars(importlib.import_module(file.name)).values():
            if isinstance(value, triton.JITFunction) and value.__module__.startswith(kernels.__name__):
                functions[value] = f"{value.__module__}.{value.__name__}"
    return functions


def assemble(result: triton_lib.CompilationResult, target: str) -> Kernel:
    (major, minor) = map(int, re.search(r"\.version (\d+)\.(\d+)", result.binary).groups())
    assert 10 * major + minor <= launch.NEWEST_PTX, f"{result.name}: CUDA 13.0 refuses PTX {major}.{minor}"
    blackwell = target in (TARGETS[100], TARGETS[120])
    command = [
        ASSEMBLERS / ("ptxas-blackwell" if blackwell else "ptxas"),
        "-v",
        f"--gpu-name={target}",
        "-o",
        "/dev/null",
        "/dev/stdin",
    ]
    done = subprocess.run(command, input=result.binary, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (spilled,) = re.findall(r"(\d+) bytes spill stores", done.stderr)
    (registers,) = re.findall(r"Used (\d+) registers", done.stderr)
    static = sum(map(int, re.findall(r"(\d+) bytes smem", done.stderr)))
    return Kernel(
        result.name,
        result.binary,
        result.shared_mem_bytes + static,
        result.global_scratch_size or 0,
        int(registers),
        int(spilled),
    )
