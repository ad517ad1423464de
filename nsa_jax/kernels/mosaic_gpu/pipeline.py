"""The loop of a program over tiles of queries, and its pipeline of keys and values in shared memory.

Program `i` of `n` takes the tiles `i`, `i + n`, `i + 2 n`, ..., KV head by KV head, so that the keys of a
head stay in L2. One warpgroup, the producer, fills the pipeline with the steps that `visits` lists, through
the tensor memory accelerator (TMA), as far ahead as consumers free its places; it runs on into the next tile.
A consumer visits the places that its tokens chose. Fills are numbered from the first tile of a program on.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from nsa_jax.array_typing import Array
from nsa_jax.kernels.chip import num_processors
from nsa_jax.kernels.mosaic_gpu.range_visits import RangeVisits
from nsa_jax.kernels.mosaic_gpu.rows import Rows
from nsa_jax.kernels.mosaic_gpu.sizes import CONSUMERS, REGISTERS, StepSizes
from nsa_jax.kernels.mosaic_gpu.tiles import i32, matrices
from nsa_jax.kernels.mosaic_gpu.unstable import Form, Ref
from nsa_jax.kernels.mosaic_gpu.visits import MEMBER_BITS, VisitLists

PLACE = (1 << MEMBER_BITS) - 1


@dataclasses.dataclass(frozen=True)
class Tiles:
    """All tiles, numbered, and the programs that share them.

    Attributes:
      kv_heads: K.
      of_head: tiles of a KV head.
      total: tiles of all KV heads and rows of the batch.
      programs: programs that run.
    """

    kv_heads: int
    of_head: int
    total: int
    programs: int

    @classmethod
    def of(cls, rows: Rows, processors: int | None) -> "Tiles":
        """The tiles of these rows, for as many programs as the GPU has multiprocessors if None."""
        total = rows.batch * rows.kv_heads * rows.tiles
        return cls(rows.kv_heads, rows.tiles, total, min(processors or num_processors(), total))

    def at(self, x: Array) -> tuple[Array, Array, Array]:
        """Row of the batch, KV head, and place among the tiles of that head."""
        return (
            lax.div(x, self.kv_heads * self.of_head),
            lax.rem(lax.div(x, self.of_head), self.kv_heads),
            lax.rem(x, self.of_head),
        )

    def run(self, program: Array, role: Callable, begin: Callable) -> tuple[Array, Array]:
        """Calls `role` for each tile of a program.

        Args:
          program: which one.
          role: takes number of the tile, how many came before, its first fill, what the call before returned,
            and number of the next tile; returns how many fills it has, and what the next call is to get.
          begin: returns what the first call gets.

        Returns:
          Numbers of tiles and of fills.
        """
        turns = lax.div(self.total - program + self.programs - 1, self.programs)

        def turn(i, carry):
            fill, read = carry
            x = program + i * self.programs
            filled, read = role(x, i, fill, read, jnp.minimum(x + self.programs, self.total - 1))
            return fill + filled, read

        return turns, lax.fori_loop(0, turns, turn, (i32(0), begin()))[0]


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The pipeline in the body of a kernel.

    Attributes:
      warpgroup: which one runs.
      program: which one runs.
      tiles, sizes, form: of the kernel.
      lists: references to lists, or what computes their entries.
      k_s, v_s: keys and values of each place.
      k_full, v_full: barriers that a fill completes.
      k_free, v_free: barriers that the consumers of a place complete.
    """

    warpgroup: Array
    program: Array
    tiles: Tiles
    sizes: StepSizes
    form: Form
    lists: VisitLists | RangeVisits
    k_s: Ref
    v_s: Ref
    k_full: Ref
    v_full: Ref
    k_free: Ref
    v_free: Ref

    @staticmethod
    def scratch(
        sizes: StepSizes, dtype: Any, form: Form, *, k: tuple[int, int], v: tuple[int, int]
    ) -> dict[str, Any]:
        """Shared memory and barriers of the pipeline, by the names of the attributes.

        Args:
          sizes, dtype, form: of the kernel.
          k, v: dim of keys and of values, and what a product sums over, see `swizzled`.
        """
        fulls = plgpu.Barrier(num_barriers=form.fill_barriers(sizes.stages))
        frees = plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=sizes.stages)
        return dict(
            k_s=matrices(dtype, sizes.stages, sizes.box, k[0], summed=k[1]),
            v_s=matrices(dtype, sizes.stages, sizes.box, v[0], summed=v[1]),
            k_full=fulls, k_free=frees, v_full=fulls, v_free=frees,
        )  # fmt: skip

    def slot(self, fill: Array) -> Array:
        """Place of a fill in shared memory."""
        return lax.rem(fill, self.sizes.stages)

    def wait_keys(self, fill: Array) -> None:
        """Waits for the keys of a fill."""
        self.form.wait_fill(self.k_full, fill, self.sizes.stages)

    def wait_values(self, fill: Array) -> None:
        """Waits for the values of a fill."""
        self.form.wait_fill(self.v_full, fill, self.sizes.stages)

    def free_keys(self, slot: Array) -> None:
        """Says that a consumer has read the keys of a place."""
        self.form.arrive(self.k_free.at[slot])

    def free_values(self, slot: Array) -> None:
        """Says that a consumer has read the values of a place."""
        self.form.arrive(self.v_free.at[slot])

    def pass_over(self, fill: Array, first: Array, last: Array) -> None:
        """Leaves out the places `first .. last - 1` of the tile whose first fill is `fill`."""

        def skip(place):
            slot = self.slot(fill + place)
            self.wait_keys(fill + place)
            self.free_keys(slot)
            self.wait_values(fill + place)
            self.free_values(slot)

        self.form.pass_over(first, last, skip)

    def start_of(self, b: Array, head: Array, tile: Array, place: Array) -> Array:
        """Row index of the first key of a place."""
        return lax.shift_right_logical(self.lists.fill((b, head, tile), place), CONSUMERS)

    def consumer_reads(self, x: Array) -> tuple[Array, Array, Array, Array]:
        """Number of visits to a tile, how many are masked, and the first two."""
        at = self.tiles.at(x)
        visits, masked = self.lists.num_visits(at, self.warpgroup)
        this, then = (self.lists.visit(at, self.warpgroup, i) for i in (i32(0), jnp.minimum(1, visits - 1)))
        return visits, masked, this, then

    def producer_reads(self, x: Array) -> tuple[Array, Array, Array]:
        """Number of fills of a tile, and the first two."""
        at = self.tiles.at(x)
        count = self.lists.num_fills(at)
        return count, self.lists.fill(at, i32(0)), self.lists.fill(at, jnp.minimum(1, count - 1))

    def fill(self, key: Ref, value: Ref, x: Array, fill: Array, read: tuple[Array, Array, Array]) -> Array:
        """Copies the steps of a tile into the pipeline, from its first fill on. Returns their number."""
        at = b, head, _ = self.tiles.at(x)
        count, this, then = read
        stages, form = self.sizes.stages, self.form

        def step(i, carry):
            this, then = carry
            later = self.lists.fill(at, jnp.minimum(i + 2, count - 1))
            start = lax.shift_right_logical(this, CONSUMERS)
            box = pl.ds(pl.multiple_of(start // 8 * 8, 8), self.sizes.box)
            slot = self.slot(fill + i)
            for source, pipeline, full, free in (
                (key, self.k_s, self.k_full, self.k_free),
                (value, self.v_s, self.v_full, self.v_free),
            ):

                @pl.when(fill + i >= stages)
                def _(free=free):
                    plgpu.barrier_wait(free.at[slot])

                for w in range(CONSUMERS):
                    form.arrive_for(free.at[slot], ((this >> w) & 1) == 0)
                plgpu.copy_gmem_to_smem(
                    source.at[b, box, head], pipeline.at[slot], form.fill_barrier(full, fill + i, stages)
                )
            return then, later

        lax.fori_loop(0, count, step, (this, then))
        return count

    def run(
        self,
        consume: Callable,
        produce: Callable,
        begin: Callable,
    ) -> None:
        """Runs the roles.

        Args:
          consume, produce: what consumers and the producer do for a tile, see `Tiles.run`.
          begin: what consumers do before their first tile.
        """

        @pl.when(self.warpgroup < CONSUMERS)
        def _():
            plgpu.set_max_registers(REGISTERS[0], action="increase")
            self.tiles.run(self.program, consume, begin)

        @pl.when(self.warpgroup == CONSUMERS)
        def _():
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
            _, fills = self.tiles.run(self.program, produce, lambda: self.producer_reads(self.program))
            if self.form is Form.INTERPRETED:

                def drain(fill, _):  # the interpreter wants every phase observed that completes
                    plgpu.barrier_wait(self.k_free.at[self.slot(fill)])
                    plgpu.barrier_wait(self.v_free.at[self.slot(fill)])

                lax.fori_loop(jnp.maximum(fills - self.sizes.stages, 0), fills, drain, None)
