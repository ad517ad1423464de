"""Attention of queries that see all keys up to a last one: one warpgroup loads keys, two compute.

Source: Eq. 4. grid = (multiprocessors,): `pipeline` says which tiles a program takes, and has the producer. A
tile is 128 rows: query tokens times the heads of a KV head (8 tokens x 16 heads), half of them for each of
two consumers. Each loops over the steps of 128 keys that a query of the tile sees, as `RangeVisits` has them:
first those that need a mask, then those that all queries see whole.

Each turn starts the logits of its step, and right behind them the product of the probabilities of the step
before with its values; so the tensor cores multiply these while the consumer turns logits into probabilities.
Queries and probabilities are left operands from registers, so products read only keys and values from shared
memory, and the buffer of the queries is free for the next tile from the start. The output leaves through a
buffer of its own while the next tile begins.

Shared memory: `256 (stages + 1) (H + V)` bytes (192 KB for 128/128 at two stages: one program per
multiprocessor). Registers of a consumer, a thread: logits and output, `(128 + V) / 2` (128 for 128/128),
queries and probabilities, `(H + 128) / 4` (64); 240 are allowed. Floor at 64k, 64 heads, 128/128: compressed
4.4 TFLOP, 5.5 ms at 800 TFLOP/s; L2 reads 34 GB.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from nsa_jax.array_typing import Array, Float, Int32
from nsa_jax.kernels.mosaic_gpu import sizes as table
from nsa_jax.kernels.mosaic_gpu.pipeline import Pipeline, Tiles
from nsa_jax.kernels.mosaic_gpu.range_visits import RangeVisits
from nsa_jax.kernels.mosaic_gpu.rows import Rows
from nsa_jax.kernels.mosaic_gpu.tiles import (
    LN_2,
    LOG2_E,
    LOWEST,
    across,
    f32,
    i32,
    matrices,
    seen,
    whole_tiles,
)
from nsa_jax.kernels.mosaic_gpu.unstable import BY_ROW, WGMMA, Form, kernel
from nsa_jax.kernels.triton.ranges.edges import Edges


def range_forward(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    edges: Edges,
    last_keys: Int32[Array, "B T"],
    *,
    scale: float,
    form: Form,
    interpret: Any = None,
    processors: int | None = None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """`(out, lse)` of each query over the keys up to its last one.

    Args:
      query, key, value: of 16-bit numbers.
      edges: what is known of the ranges, which begin at key 0; queries are the tokens of whole rows.
      last_keys: row index of the last key that each query sees, -1 where it sees nothing.
      scale: factor of the logits, above 0.
      form: by which means the kernel waits, see `unstable`.
      interpret: parameters of the interpreter; None on a GPU.
      processors: programs to start; None for as many as the GPU has multiprocessors.

    Returns:
      Output in the queries' dtype and log-sum-exps in float32; 0 and -inf where a query sees nothing.
    """
    assert edges.window is None, "ranges begin at key 0"
    assert edges.first_position == 0, "a query stands at its number"
    num_queries, num_keys = query.shape[1], key.shape[1]
    num_kv_heads, value_dim = value.shape[2:]
    key_dim, dtype = query.shape[3], query.dtype
    sizes = table.forward_sizes(key_dim, value_dim)
    keys = sizes.keys
    rows = Rows.of(query, num_kv_heads)
    tiles = Tiles.of(rows, processors)
    lists = RangeVisits(edges, num_queries, num_keys, table.tile_tokens(rows.heads), keys)
    factor = float(scale) * LOG2_E

    def body(
        q_ref, k_ref, v_ref, last_ref, out_ref, lse_ref,
        *, q_s, out_s, q_copy, p_s, q_full, **in_pipeline,
    ):  # fmt: skip
        warpgroup = lax.axis_index("warpgroup")
        program = lax.axis_index("program")
        pipeline = Pipeline(warpgroup, program, tiles, sizes, form, lists, **in_pipeline)
        q_s, out_s, q_full = q_s.at[warpgroup], out_s.at[warpgroup], q_full.at[warpgroup]

        def load(x):
            b, head, tile = tiles.at(x)
            rows.load(q_ref, b, head, (tile * table.CONSUMERS + warpgroup) * table.ROWS, q_s, q_full)

        def consume(x, turn, fill, read, x_next):
            b, head, tile = tiles.at(x)
            visits, masked = lists.num_visits((b, head, tile), warpgroup)
            first_row = (tile * table.CONSUMERS + warpgroup) * table.ROWS
            mine = pl.ds(first_row, table.ROWS)
            plgpu.barrier_wait(q_full)
            q = plgpu.load(q_s, layout=WGMMA)
            plgpu.commit_smem()

            @pl.when(x + tiles.programs < tiles.total)
            def _():
                load(x + tiles.programs)

            def logits_product(acc, slot):
                form.multiply(acc, q, pipeline.k_s.at[slot].T, q_copy and q_copy.at[warpgroup])

            def values_product(acc, p, fill):
                slot = pipeline.slot(fill)
                pipeline.wait_values(fill)
                form.multiply(acc, p, pipeline.v_s.at[slot], p_s and p_s.at[warpgroup])

            def softmax(logits, i, largest, total, masks):
                """`(p, largest, total, decay)` after step `i`; `decay` is the factor of what was before."""
                if masks:
                    start = pipeline.start_of(b, head, tile, i)
                    visible = seen(start, last_ref.at[b, mine], None, sizes, True)
                    logits = jnp.where(visible, logits, -jnp.inf)
                top = jnp.maximum(largest, logits.max(axis=1) * factor)
                p = jnp.exp2(logits * factor - across(top, keys))
                decay = jnp.exp2(largest - top)
                return p, top, total * decay + p.sum(axis=1), decay

            # The first step, with no values yet.
            pipeline.wait_keys(fill)

            def first_product(acc):
                logits_product(acc, pipeline.slot(fill))
                return acc[...]

            logits = pl.run_scoped(first_product, plgpu.ACC((table.ROWS, keys), f32))
            pipeline.free_keys(pipeline.slot(fill))
            zeros = plgpu.layout_cast(jnp.zeros((table.ROWS,), f32), BY_ROW)
            p, largest, total, _ = softmax(logits, i32(0), zeros + LOWEST, zeros, True)
            out = plgpu.layout_cast(jnp.zeros((table.ROWS, value_dim), f32), WGMMA)

            def visit(i, carry, masks):
                out, largest, total, p = carry
                slot = pipeline.slot(fill + i)
                pipeline.wait_keys(fill + i)

                def products(logits_acc, out_acc):
                    form.accumulator(out_acc, out)
                    weights = form.kept(p)
                    logits_product(logits_acc, slot)
                    values_product(out_acc, weights, fill + i - 1)
                    logits = plgpu.wgmma_accumulator_load(logits_acc, wait_n=1)
                    pipeline.free_keys(slot)
                    found = softmax(logits, i, largest, total, masks)
                    return form.accumulated(plgpu.wgmma_accumulator_load(out_acc, wait_n=0), out), found

                two = plgpu.ACC((table.ROWS, keys), f32), plgpu.ACC((table.ROWS, value_dim), f32)
                new, (p, largest, total, decay) = pl.run_scoped(products, *two)
                pipeline.free_values(pipeline.slot(fill + i - 1))
                return new * across(decay, value_dim), largest, total, p.astype(dtype)

            carry = (out, largest, total, p.astype(dtype))
            carry = lax.fori_loop(1, masked, lambda i, c: visit(i, c, True), carry)
            carry = lax.fori_loop(masked, visits, lambda i, c: visit(i, c, False), carry)
            out, largest, total, p = carry

            def last_product(acc):
                form.accumulator(acc, out)
                values_product(acc, p, fill + visits - 1)
                return form.accumulated(acc[...], out)

            out = pl.run_scoped(last_product, plgpu.ACC((table.ROWS, value_dim), f32))
            pipeline.free_values(pipeline.slot(fill + visits - 1))
            sees = plgpu.load(last_ref.at[b, mine], layout=BY_ROW, optimized=False) >= 0
            out = jnp.where(across(sees, value_dim), out * across(1 / total, value_dim), 0.0)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the output of the tile before has left
            out_s[...] = out.astype(dtype)
            lse_ref[b, head, mine] = jnp.where(sees, largest * LN_2 + jnp.log(total), -jnp.inf)
            plgpu.commit_smem()
            rows.store(out_s, out_ref, b, head, first_row)
            return visits, None

        def produce(x, turn, fill, ahead, x_next):
            read, ahead = ahead, pipeline.producer_reads(x_next)
            return pipeline.fill(k_ref, v_ref, x, fill, read), ahead

        pipeline.run(consume, produce, lambda: load(program))

        @pl.when(warpgroup < table.CONSUMERS)
        def _():
            plgpu.wait_smem_to_gmem(0)

    def matrix(columns, needed=True):  # of each consumer
        return matrices(dtype, table.CONSUMERS, table.ROWS, columns) if needed else None

    interpreted = form is Form.INTERPRETED
    scratch = dict(
        q_s=matrix(key_dim),
        out_s=matrix(value_dim),
        q_copy=matrix(key_dim, interpreted),
        p_s=matrix(keys, interpreted),
        q_full=plgpu.Barrier(num_arrivals=rows.copies, num_barriers=table.CONSUMERS),
        **Pipeline.scratch(sizes, dtype, form, k=(key_dim, key_dim), v=(value_dim, keys)),
    )
    out, lse = kernel(
        body, f"nsa_{edges.branch}_forward_mosaic", interpret,
        out_type=(
            jax.ShapeDtypeStruct(rows.shape(value_dim), dtype),
            jax.ShapeDtypeStruct((rows.batch, num_kv_heads, rows.padded), f32),
        ),
        grid=(tiles.programs,), grid_names=("program",), num_threads=table.CONSUMERS + 1,
        thread_name="warpgroup", scratch_types=scratch,
    )(rows.arrange(query), whole_tiles(key), whole_tiles(value), rows.repeat(last_keys))  # fmt: skip
    return rows.restore(out), rows.restore_numbers(lse)
