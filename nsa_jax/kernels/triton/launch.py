"""The one door to the GPU: starts a Triton kernel on JAX arrays."""

from typing import Any

import jax
import jax_triton

from nsa_jax.array_typing import Array

MOST_PROGRAMS_Y = 65535


def launch(
    kernel: Any,
    *operands: Array | None,
    out: Any,
    grid: tuple[int, ...],
    num_warps: int = 4,
    num_stages: int = 2,
    registers: int | None = None,
    **constants: Any,
) -> Any:
    """Runs `kernel` on the grid and returns the arrays that it wrote.

    Args:
      kernel: a function under `triton.jit`: pointers to the operands, then to the results,
        then integers and `tl.constexpr`s.
      *operands: arrays, contiguous, or descriptors of them; None for one that the kernel does without.
      out: `jax.ShapeDtypeStruct` of the result, or a pytree of them.
      grid: programs along x, y and z; x may be long.
      num_warps: warps of a program.
      num_stages: tiles that a loop loads ahead.
      registers: most registers of a thread; None leaves it to the compiler.
      **constants: the kernel's other parameters by name.

    Raises:
      NotImplementedError: the grid is too long along y, where batch rows times KV heads stand.
    """
    if max(grid[1:], default=0) > MOST_PROGRAMS_Y:
        raise NotImplementedError(
            f"the Triton kernels run at most {MOST_PROGRAMS_Y} batch rows times KV heads, got "
            f"{max(grid[1:])}. Split the batch (jax.lax.map), or use implementation='xla'."
        )
    if registers is not None:
        constants["backend_options"] = dict(maxnreg=registers)
    results = jax_triton.triton_call(
        *operands,
        kernel=kernel,
        out_type=out,
        grid=grid,
        name=kernel.__name__,
        num_warps=num_warps,
        num_stages=num_stages,
        **constants,
    )
    # Under shard_map results vary over the mesh axes that some operand varies over; the call does not say so.
    axes = frozenset[str]().union(*(_varying_axes(x) for x in jax.tree.leaves(operands)))
    return jax.tree.map(lambda x: _vary(x, axes - _varying_axes(x)), results)


def _varying_axes(array: Array) -> frozenset[str]:
    return getattr(getattr(jax.typeof(array), "manual_axis_type", None), "varying", frozenset())


def _vary(array: Array, axes: frozenset[str]) -> Array:
    return jax.lax.pcast(array, tuple(sorted(axes)), to="varying") if axes else array


def like(array: Array, shape: tuple[int, ...] | None = None, dtype: Any = None) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a result, by default those of `array`."""
    return jax.ShapeDtypeStruct(
        array.shape if shape is None else shape, array.dtype if dtype is None else dtype
    )
