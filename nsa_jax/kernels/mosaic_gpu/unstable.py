"""What the kernels use of Pallas that is private, or that the interpreter lacks; each with a public fallback.

A pipeline of key tiles is filled by one warpgroup and read by others. Two things that the public API cannot
do make it fast:

* `barrier_wait` counts for itself which phase it waits for, so a reader has to wait for every fill, also for
  those that it does not need. With the phase as an argument, a reader skips fills.
* `barrier_arrive` is an arrival of 128 threads. One thread can arrive for all of them.

The functions here are used on a GPU as `Form.PRIVATE`. `Form.PUBLIC` is the same by public means; it is the
fallback where JAX does not have what the private form needs. `Form.INTERPRETED` is for the interpreter,
which knows neither of the two, no left operand of a product in registers and no accumulator with a start
value. The forms differ in the functions of this file and nowhere else.
"""

import enum
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from nsa_jax.array_typing import Array
from nsa_jax.sharding.manual import varying_axes

type Ref = Any  # of an array in shared or global memory, or of barriers


class Form(enum.Enum):
    """By which means the kernels wait, arrive and accumulate."""

    PRIVATE = "private"
    PUBLIC = "public"
    INTERPRETED = "interpreted"

    @property
    def skips(self) -> bool:
        """Whether readers may skip fills."""
        return self is Form.PRIVATE

    def fill_barriers(self, stages: int) -> int:
        """Barriers of a pipeline. Twice the stages, so that a skipped phase is not taken for the next one."""
        return 2 * stages if self.skips else stages

    def fill_barrier(self, barriers: Ref, fill: Array, stages: int) -> Ref:
        """The barrier of a fill, by its number since the kernel began."""
        return barriers.at[lax.rem(fill, self.fill_barriers(stages))]

    def wait_fill(self, barriers: Ref, fill: Array, stages: int) -> None:
        """Waits for a fill."""
        barrier = self.fill_barrier(barriers, fill, stages)
        if self.skips:
            odd = (lax.div(fill, jnp.int32(2 * stages)) & 1) != 0
            _private().wait_parity(barrier, odd)
        else:
            plgpu.barrier_wait(barrier)

    def arrive(self, barrier: Ref) -> None:
        """Arrival of a warpgroup."""
        if self is Form.PRIVATE:
            _private().arrive_once(barrier)
        else:
            plgpu.barrier_arrive(barrier)

    def arrive_for(self, barrier: Ref, others: Array) -> None:
        """Arrival in place of a reader that skips the fill, where `others` is true."""
        if self.skips:
            plgpu.barrier_arrive(barrier, predicate=others)

    def pass_over(self, first: Array, last: Array, wait_and_free: Callable[[Array], None]) -> None:
        """Reads the fills `first .. last - 1` for nothing, where readers may not skip."""
        if not self.skips:
            lax.fori_loop(first, last, lambda fill, _: wait_and_free(fill), None)

    def store_where(self, condition: Array, source: Ref, to: Ref) -> None:
        """Starts a copy to global memory where `condition` is true, as one of a group to be committed."""
        if self is Form.INTERPRETED:

            @pl.when(condition)
            def _():
                plgpu.copy_smem_to_gmem(source, to, commit_group=False)

        else:
            plgpu.copy_smem_to_gmem(source, to, predicate=condition, commit_group=False)

    def accumulator(self, ref: Ref, start: Array) -> None:
        """Gives an accumulator its start value; the interpreter adds it in `accumulated`."""
        if self is not Form.INTERPRETED:
            ref[...] = start

    def accumulated(self, value: Array, start: Array) -> Array:
        """What an accumulator of `accumulator` holds, as loaded."""
        return start + value if self is Form.INTERPRETED else value

    def kept(self, operand: Array) -> Array:
        """A left operand in registers; the compiler must not form it again behind another product."""
        return operand if self is Form.INTERPRETED else lax.optimization_barrier(operand)

    def multiply(self, ref: Ref, left: Array, right: Ref, scratch: Ref) -> None:
        """Adds `left @ right` to an accumulator; `left` is in registers, for the interpreter in `scratch`."""
        if self is Form.INTERPRETED:
            scratch[...] = left
            plgpu.commit_smem()
            left = scratch
        plgpu.wgmma(ref, left, right)


def best_form() -> Form:
    """`PRIVATE`, or `PUBLIC` where this JAX does not have what the private form needs."""
    if "predicate" not in inspect.signature(plgpu.barrier_arrive).parameters:
        return Form.PUBLIC  # JAX 0.11.1
    try:
        _private()
    except (AttributeError, ImportError, TypeError):
        return Form.PUBLIC
    return Form.PRIVATE


class _Private:
    """The two private primitives. Their lowering reads the barrier object that Pallas keeps."""

    def __init__(self):
        from jax._src import core, tree_util
        from jax._src.pallas.mosaic_gpu import core as gpu_core
        from jax._src.pallas.mosaic_gpu import lowering, primitives
        from jax._src.state import primitives as state
        from jax.experimental.mosaic import gpu as mgpu

        def primitive(name: str, lower: Callable) -> Callable:
            operation = core.Primitive(name)
            operation.multiple_results = True
            operation.def_effectful_abstract_eval(lambda *_, **__: ((), {gpu_core._memory_effect}))

            @lowering.register_lowering_rule(operation, mgpu.LoweringSemantics.Warpgroup)
            def _(ctx, barrier, *operands, tree, num):
                index = primitives._get_barrier_base_index(ctx.avals_in[0], tree.unflatten(operands[num:]))
                barrier = barrier if index is None else barrier[index]
                lower(ctx, barrier.barrier_ref, *operands[:num])
                return ()

            def bind(barrier, *operands):
                barrier, transforms = state.get_ref_and_transforms(barrier, None, name)
                leaves, tree = tree_util.tree_flatten(transforms)
                operation.bind(barrier, *operands, *leaves, tree=tree, num=len(operands))

            return bind

        def wait(_, barrier, odd):
            barrier.wait_parity(lowering._ensure_ir_value(odd, jnp.bool))

        def arrive(ctx, barrier):
            barrier.arrive(128, predicate=ctx.module_ctx.single_wg_lane_predicate)

        self.wait_parity = primitive("nsa_barrier_wait_parity", wait)
        self.arrive_once = primitive("nsa_barrier_arrive_once", arrive)
        # Read only when a kernel is lowered, so a name that is missing must show here.
        _ = primitives._get_barrier_base_index, lowering._ensure_ir_value


@functools.cache
def _private() -> _Private:
    return _Private()


def swizzled(dim: int, summed: int | None = None, dtype: Any = jnp.bfloat16) -> tuple:
    """Transforms of a tile in shared memory, as products want them.

    Args:
      dim: numbers of a row.
      summed: length of the axis of the tile that a product sums over; None for that of the row.
      dtype: of the numbers.
    """
    size, summed = jnp.dtype(dtype).itemsize, dim if summed is None else summed
    columns = (128 // size, 64 // size, 32 // size)
    columns = next(number for number in columns if dim % number == 0 and summed % number == 0)
    tiling: Any = plgpu.TilingTransform  # mypy takes both for abstract
    swizzle: Any = plgpu.SwizzleTransform
    return tiling((8, columns)), swizzle(size * columns)


def kernel(body: Callable, name: str, interpret: Any, **options: Any) -> Callable:
    """`plgpu.kernel` with the house's compiler parameters, and the name that profiles show.

    No automatic barriers: all waits are in the kernels. `approx_math` is what the hardware's `ex2` needs.
    """
    parameters = plgpu.CompilerParams(
        approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
    )
    body.__name__ = name
    more = {} if interpret is None else dict(interpret=interpret)
    return plgpu.kernel(body, compiler_params=parameters, **options, **more)


def loop_with_references(
    turns: int, body: Callable[..., Array], carry: Array, shapes: Iterable[Any]
) -> tuple[Array, ...]:
    """`lax.fori_loop` whose body may give kernels references to arrays that all turns write to.

    `jax.new_ref` would do, but `custom_partitioning` refuses a function with its effect.

    Args:
      turns: how often the body runs.
      body: takes the turn's number, the carry, and the references; returns the new carry.
      carry: the first one.
      shapes: `jax.ShapeDtypeStruct`s of the arrays, which begin undefined.

    Returns:
      The last carry, and the arrays.
    """

    def run(references):
        carried, *others = references
        carried[...] = lax.fori_loop(0, turns, lambda i, x: body(i, x, *others), carried[...])

    return pl.run_state(run)((carry, *(lax.empty(x.shape, x.dtype) for x in shapes)))


def drops_varying_axes[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function that may launch these kernels inside `jax.shard_map`.

    There JAX types every array by the axes of the mesh over which it varies. But Pallas takes no references
    that vary, and gives kernels' results no such type. So the function runs in a `shard_map` over no axis,
    which checks nothing; its results vary as all its operands together do.
    """

    @functools.wraps(function)
    def run(*operands: P.args, **named: P.kwargs) -> R:
        leaves, tree = jax.tree.flatten((operands, named))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
        arrays = [leaves[i] for i in places]
        axes = frozenset[str]().union(*map(varying_axes, arrays))
        if not axes:
            return function(*operands, **named)

        def plain(arrays: list[Array]) -> R:
            replaced = dict(zip(places, arrays, strict=True))
            operands, named = jax.tree.unflatten(tree, [replaced.get(i, x) for i, x in enumerate(leaves)])
            return function(*operands, **named)

        whole = jax.sharding.PartitionSpec()
        without_types = jax.shard_map(
            plain, in_specs=whole, out_specs=whole, axis_names=frozenset(), check_vma=False
        )
        return jax.tree.map(lambda x: lax.pcast(x, tuple(sorted(axes)), to="varying"), without_types(arrays))

    return run


WGMMA = plgpu.Layout.WGMMA  # of a tile that comes out of a product
BY_ROW = plgpu.Layout.WGMMA.reduce(1)  # of one number for each row of such a tile
BY_COLUMN = plgpu.Layout.WGMMA.reduce(0)  # of one number for each column
