"""Starts Triton kernels on JAX arrays, which no other module does."""

import functools
import warnings
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import jax
import jax_triton
from jax_triton import triton_lib

from nsa_jax.array_typing import Array
from nsa_jax.kernels.chip import capability
from nsa_jax.kernels.triton.compile_ahead import begin, sharing
from nsa_jax.kernels.triton.dead_launches import follow_jax
from nsa_jax.kernels.triton.kernel_cache import keeping
from nsa_jax.sharding.manual import vary, varying_axes

follow_jax()
_compile_kernel = getattr(triton_lib, "compile_ttir_to_ptx_inplace", None)
# Of another jax-triton, which has its compiler elsewhere, kernels are neither kept nor shared.
if _compile_kernel is not None:
    triton_lib.compile_ttir_to_ptx_inplace = sharing(keeping(_compile_kernel))

MOST_PROGRAMS_Y = 65535  # CUDA's limit of a grid along y and z
# The newest PTX that CUDA 13.0 takes. Triton 3.8 writes 8.8 for GPUs up to Hopper, and 9.3 for Blackwell.
NEWEST_PTX = 90


def named(name: str) -> Callable[[Any], str]:
    """The name of a kernel in profiles, for `triton.jit(repr=...)`; its constants fill the braces."""
    return lambda specialization: name.format(**specialization.constants)


def launch(
    kernel: Any,
    *operands: Array | None,
    out: Any,
    grid: tuple[int, ...],
    num_warps: int = 4,
    num_stages: int = 2,
    registers: int | None = None,
    in_place: Mapping[str, Array | None] | None = None,
    **constants: Any,
) -> Any:
    """Runs `kernel` on the grid and returns the arrays that it wrote.

    With `in_place` it returns a pair: the updated operands by name, and the new arrays.

    Args:
      kernel: a function under `triton.jit`: pointers to the operands in place, to the others and to the
        results, then integers and `tl.constexpr`s, of which one may be a NamedTuple of numbers.
      *operands: contiguous arrays or descriptors of them; None where the kernel does without.
      out: `jax.ShapeDtypeStruct` of the new result, or a pytree of them; () for none.
      grid: programs along x, y and z; x may be long.
      num_warps: warps of a program.
      num_stages: steps of a loop whose loads are in flight.
      registers: most registers of a thread; None leaves it to the compiler.
      in_place: operands that are also results, by the names of the kernel's first parameters; the kernel
        gets one pointer for both.
      **constants: the kernel's other parameters by name.

    Raises:
      NotImplementedError: the grid is too long along y, which counts KV heads of all rows, or their ranges.
    """
    if max(grid[1:], default=0) > MOST_PROGRAMS_Y:
        raise NotImplementedError(
            f"the Triton kernels run at most {MOST_PROGRAMS_Y} batch rows times KV heads, got "
            f"{max(grid[1:])}. Split the batch (jax.lax.map), or use implementation='xla'."
        )
    compiler = {} if registers is None else dict(maxnreg=registers)
    if (capability() or (0, 0)) >= (10, 0):
        compiler["ptx_version"] = NEWEST_PTX
    held = dict(in_place or {})
    assert kernel.arg_names[: len(held)] == list(held), "in place are the kernel's first parameters"
    names = [name for name, x in held.items() if x is not None]
    updated = tuple(like(x) for x in held.values() if x is not None)
    # Aliases of jax-triton 0.4.1 count arrays, so not what is None, and of results new ones first.
    aliases = {n: len(jax.tree.leaves(out)) + n for n in range(len(names))}
    if held:
        # XLA fuses a slice with the call that reads it. It then forgets that the call writes to its operand.
        operands = (*jax.lax.optimization_barrier(tuple(held.values())), *operands)
    call = functools.partial(
        jax_triton.triton_call,
        kernel=kernel,
        out_type=(out, updated) if held else out,
        grid=grid,
        name=kernel.repr(SimpleNamespace(constants=constants)),
        num_warps=num_warps,
        num_stages=num_stages,
        input_output_aliases=aliases,
        backend_options=compiler,
        **constants,
    )
    with warnings.catch_warnings():
        # jax-triton recommends `jax.Ref`s. We keep the option: a Ref is state that one must make and freeze.
        warnings.filterwarnings("ignore", "input_output_aliases is deprecated", DeprecationWarning)
        begin(call, operands)
        results = call(*operands)
    if held:
        # XLA lets a call write straight into a slice of the array in which a scan stacks its outputs. But a
        # call in place writes to its operand, so that slice would never be written. The barrier prevents it.
        out, updated = jax.lax.optimization_barrier(results)
        results = held | dict(zip(names, updated, strict=True)), out
    # Under shard_map, results vary over each mesh axis that an operand varies over. The call does not say so.
    axes = frozenset[str]().union(*(varying_axes(x) for x in jax.tree.leaves(operands)))
    return jax.tree.map(lambda x: vary(x, axes), results)


def like(array: Array, shape: tuple[int, ...] | None = None, dtype: Any = None) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a result, by default those of `array`."""
    return jax.ShapeDtypeStruct(
        array.shape if shape is None else shape, array.dtype if dtype is None else dtype
    )
