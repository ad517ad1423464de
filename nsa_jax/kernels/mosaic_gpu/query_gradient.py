"""Gradient of the queries of a branch: one warpgroup loads keys, two compute.

Source: the gradients of Eq. 4 and 12. grid = (multiprocessors,): `pipeline` says which tiles a program takes.
A tile is 128 rows: query tokens times the heads of a KV head (8 tokens x 16 heads), half of them for each of
two consumers, which loop over the blocks that their tokens chose, or over a range of keys, as the forward
does. So the gradient stays in registers. `pipeline` has the producer. The probabilities are computed again
from the stored log-sum-exp; a row that did not choose a block subtracts +inf instead, which makes them 0
without a mask. `previous`, the gradient from another branch, is added before rounding.

A visit has three products: logits and, right behind them, `d_out v^T`; then `ds k`, which waits for both. The
other consumer computes while one waits. Queries and `d_out` are left operands from registers: then products
read only keys and values from shared memory, whose bandwidth is the limit. So their buffers are free early.
Through that of the queries comes the output, whose products with `d_out` the deltas need, and then the next
tile's queries; through that of `d_out` comes `previous`, and the gradient leaves. Consumers start these
copies themselves, so the producer never waits for the end of a tile. Where registers do not suffice (192/128,
and 128/128 where blocks begin anywhere), queries stay in shared memory; then the output shares the buffer of
`d_out`, and `previous` and the gradient share that of the queries.

Shared memory: `(256 + 2 box stages) (H + V)` bytes (224 KB for 128/128 at 5 stages of 64 keys: one program
per multiprocessor). Registers of a consumer: gradient and both products, `H / 2 + box` floats a thread (128
for 128/128), queries and `d_out`, `(H + V) / 4` (64); 240 are allowed. Floor at 64k, 16 blocks of 64, 64
heads, 128/128: 3.3 TFLOP if neighbours choose the same blocks, 4.1 ms at 800 TFLOP/s.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from nsa_jax.array_typing import Array, Float, Int32
from nsa_jax.kernels.mosaic_gpu import sizes as table
from nsa_jax.kernels.mosaic_gpu.pipeline import PLACE, Pipeline, Tiles
from nsa_jax.kernels.mosaic_gpu.range_visits import RangeVisits
from nsa_jax.kernels.mosaic_gpu.rows import Rows
from nsa_jax.kernels.mosaic_gpu.tiles import (
    LOG2_E,
    across,
    chosen,
    f32,
    i32,
    matrices,
    seen,
    whole_tiles,
)
from nsa_jax.kernels.mosaic_gpu.unstable import BY_ROW, WGMMA, Form, kernel
from nsa_jax.kernels.mosaic_gpu.visits import VisitLists
from nsa_jax.kernels.triton.backward import Backward


class RowNumbers(NamedTuple):
    """What the gradient reads of each row, or references to it; None where it is 1 (gate) or 0 (d_lse)."""

    lse: Float[Array, "B K rows"]
    gate: Float[Array, "B K rows"] | None
    d_lse: Float[Array, "B K rows"] | None


def query_gradient(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    lists: VisitLists | RangeVisits,
    last_keys: Int32[Array, "B T"],
    given: Backward,
    *,
    branch: str,
    scale: float,
    block_size: int,
    form: Form,
    first_keys: Int32[Array, "B T"] | None = None,
    aligned: bool = True,
    one_block: bool = False,
    interpret: Any = None,
    processors: int | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"], Float[Array, "B T N"]]:
    """Gradient of the queries plus `previous`, and two numbers of each row that other gradients need.

    Args:
      query, key, value, scale: see `nsa_jax.selected_attention`; 16-bit numbers.
      lists: the blocks of each tile of `sizes.tile_tokens(N // K)` tokens, in steps of the keys of
        `sizes.gradient_sizes`; the longest gap is less than twice its stages. Or the ranges of keys.
      last_keys: row index of the last key that each query sees, -1 where it sees nothing.
      given: what the forward returned, and the cotangents, all of them in the queries' dtype.
      branch: its name, for that of the kernel.
      block_size: tokens of a selection block; of a range, the keys of a step.
      form: by which means the kernel waits, see `unstable`.
      first_keys: row index of the first key that each query sees, in aligned blocks; None for any.
      aligned: whether every block begins at a multiple of 8 keys.
      one_block: whether the queries of every tile are known to lie in one block.
      interpret: parameters of the interpreter; None on a GPU.
      processors: programs to start; None for as many as the GPU has multiprocessors.

    Returns:
      `(d_query, products, delta)`: the gradient in the queries' dtype, where a query sees nothing `previous`;
      then `out . d_out` and `gate (out . d_out) - d_lse` of each row, float32.
    """
    out, lse, d_out, d_lse, gate, previous = given
    num_kv_heads, value_dim = value.shape[2:]
    key_dim = query.shape[3]
    sizes = table.gradient_sizes(key_dim, value_dim, block_size, aligned=aligned)
    rows = Rows.of(query, num_kv_heads)
    tiles = Tiles.of(rows, processors)
    assert isinstance(lists, RangeVisits) or lists.fills.shape[2] == rows.tiles, "lists of other tiles"
    computed = lists if isinstance(lists, RangeVisits) else None
    single = one_block and block_size == sizes.keys
    keys, dtype = sizes.box, query.dtype
    for name, array in dict(key=key, value=value, out=out, d_out=d_out, previous=previous).items():
        assert array is None or array.dtype == dtype, f"{name} is {array.dtype}, the queries are {dtype}"
    factor = float(scale) * LOG2_E

    def body(
        q_ref, k_ref, v_ref, last_ref, first_ref, listed, out_ref, d_out_ref, previous_ref, of_rows,
        d_query_ref, products_ref, delta_ref,
        *, q_s, d_out_s, q_copy, d_out_copy, ds_s, q_full, d_out_full, **in_pipeline,
    ):  # fmt: skip
        warpgroup = lax.axis_index("warpgroup")
        program = lax.axis_index("program")
        lists = listed if computed is None else computed
        pipeline = Pipeline(warpgroup, program, tiles, sizes, form, lists, **in_pipeline)
        q_of_all, q_s, d_out_s = q_s, q_s.at[warpgroup], d_out_s.at[warpgroup]
        q_full, d_out_full = q_full.at[warpgroup], d_out_full.at[warpgroup]
        # Source of what a buffer holds first, buffer, and barrier. `early` is free after the first visit.
        of_query, of_d_out = (q_ref, q_s, q_full), (d_out_ref, d_out_s, d_out_full)
        early, late = (of_query, of_d_out) if sizes.query_in_registers else (of_d_out, of_query)

        def load(source, x, buffer):
            b, head, tile = tiles.at(x)
            _, to, full = buffer
            rows.load(source, b, head, (tile * table.CONSUMERS + warpgroup) * table.ROWS, to, full)

        def load_next(x, buffer):
            @pl.when(x + tiles.programs < tiles.total)
            def _():
                load(buffer[0], x + tiles.programs, buffer)

        def held(buffer):
            _, to, full = buffer
            plgpu.barrier_wait(full)
            return plgpu.load(to, layout=WGMMA)

        def consume(x, turn, fill, _, x_next):
            b, head, tile = tiles.at(x)
            visits, masked, this, then = pipeline.consumer_reads(x)  # in time: needed after the first product
            first_row = (tile * table.CONSUMERS + warpgroup) * table.ROWS
            token = plgpu.broadcasted_iota(i32, (table.ROWS,), 0, layout=BY_ROW) // rows.of_token

            def numbers(source):  # of each row
                source = source.at[b, head, pl.ds(first_row, table.ROWS)]
                return plgpu.load(source, layout=BY_ROW, optimized=False)

            lse = numbers(of_rows.lse)
            gate = None if of_rows.gate is None else numbers(of_rows.gate)
            d_lse = None if of_rows.d_lse is None else numbers(of_rows.d_lse)
            lse = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2_E)

            def probabilities(logits, visit, masks):
                mine = jnp.where(chosen(visit, token), lse, jnp.inf)
                p = jnp.exp2(logits * factor - across(mine, keys))
                if masks or not aligned:
                    start = pipeline.start_of(b, head, tile, visit & PLACE)
                    rows_of = (b, pl.ds(first_row, table.ROWS))
                    last = last_ref.at[rows_of] if masks else None
                    first = first_ref.at[rows_of] if masks and first_ref is not None else None
                    p = jnp.where(seen(start, last, first, sizes, aligned), p, 0.0)
                return p

            def gradient(p, dp, delta):
                if gate is not None:
                    dp = dp * across(gate, keys)
                return (p * (dp - across(delta, keys))).astype(dtype)

            def logits_product(acc, fill, slot):
                if sizes.query_in_registers:
                    form.multiply(acc, q, pipeline.k_s.at[slot].T, q_copy and q_copy.at[warpgroup])
                else:
                    # It depends on the visit, so the compiler does not keep 12 addresses of 64 bits for all.
                    zero = lax.shift_right_logical(fill, 30)
                    plgpu.wgmma(acc, q_of_all.at[warpgroup + zero], pipeline.k_s.at[slot].T)

            def d_out_product(acc, d_out, slot):
                form.multiply(acc, d_out, pipeline.v_s.at[slot].T, d_out_copy and d_out_copy.at[warpgroup])

            def add_keys(dq, ds, slot):
                def product(acc):
                    form.accumulator(acc, dq)
                    form.multiply(acc, ds, pipeline.k_s.at[slot], ds_s and ds_s.at[warpgroup])
                    return form.accumulated(acc[...], dq)

                return pl.run_scoped(product, plgpu.ACC((table.ROWS, key_dim), f32))

            two_products = plgpu.ACC((table.ROWS, keys), f32), plgpu.ACC((table.ROWS, keys), f32)

            # The first visit, which forms the deltas.
            first = held(early)
            plgpu.commit_smem()
            load(out_ref, x, early)
            slot = pipeline.slot(fill)
            if sizes.query_in_registers:
                q = first
            else:
                plgpu.barrier_wait(q_full)
            pipeline.wait_keys(fill)

            def first_products(logits_acc, dp_acc):
                logits_product(logits_acc, fill, slot)
                d_out = held(late) if sizes.query_in_registers else first
                pipeline.wait_values(fill)
                d_out_product(dp_acc, d_out, slot)
                p = probabilities(plgpu.wgmma_accumulator_load(logits_acc, wait_n=1), this, True)
                products = (held(early).astype(f32) * d_out.astype(f32)).sum(axis=1)
                delta = products if gate is None else gate * products
                delta = delta if d_lse is None else delta - d_lse
                ds = gradient(p, plgpu.wgmma_accumulator_load(dp_acc, wait_n=0), delta)
                return ds, d_out, products, delta

            ds, d_out, products, delta = pl.run_scoped(first_products, *two_products)
            pipeline.free_values(slot)
            plgpu.commit_smem()
            load_next(x, early)
            if previous_ref is not None and sizes.query_in_registers:
                load(previous_ref, x, late)
            products_ref[b, head, pl.ds(first_row, table.ROWS)] = products
            if delta_ref is not None:
                delta_ref[b, head, pl.ds(first_row, table.ROWS)] = delta
            dq = plgpu.layout_cast(jnp.zeros((table.ROWS, key_dim), f32), WGMMA)
            dq = add_keys(dq, ds, slot)
            pipeline.free_keys(slot)

            def visit(i, carry, masks):
                dq, this, before = carry
                then = lists.visit((b, head, tile), warpgroup, jnp.minimum(i + 1, visits - 1))
                place = this & PLACE
                pipeline.pass_over(fill, before + 1, place)
                slot = pipeline.slot(fill + place)
                pipeline.wait_keys(fill + place)

                def both_products(logits_acc, dp_acc):
                    logits_product(logits_acc, fill + place, slot)
                    pipeline.wait_values(fill + place)
                    d_out_product(dp_acc, d_out, slot)
                    p = probabilities(plgpu.wgmma_accumulator_load(logits_acc, wait_n=1), this, masks)
                    return gradient(p, plgpu.wgmma_accumulator_load(dp_acc, wait_n=0), delta)

                ds = pl.run_scoped(both_products, *two_products)
                pipeline.free_values(slot)
                dq = add_keys(dq, ds, slot)
                pipeline.free_keys(slot)
                return dq, then, place

            carry = (dq, then, i32(0))
            if not single:
                carry = lax.fori_loop(1, masked, lambda i, c: visit(i, c, True), carry)
            carry = lax.fori_loop(1 if single else masked, visits, lambda i, c: visit(i, c, False), carry)
            dq, _, before = carry
            fills = lists.num_fills((b, head, tile))
            pipeline.pass_over(fill, before + 1, fills)

            # A row whose log-sum-exp is NaN sees something.
            dq = jnp.where(across(lse != jnp.inf, key_dim), dq * float(scale), 0.0)
            if previous_ref is not None:
                if not sizes.query_in_registers:
                    plgpu.commit_smem()
                    load(previous_ref, x, late)
                dq = dq + held(late).astype(f32)
            _, to, _ = late
            to[...] = dq.astype(dtype)
            plgpu.commit_smem()
            rows.store(to, d_query_ref, b, head, first_row)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            load_next(x, late)
            return fills, None

        def produce(x, turn, fill, ahead, x_next):
            read, ahead = ahead, pipeline.producer_reads(x_next)
            return pipeline.fill(k_ref, v_ref, x, fill, read), ahead

        def begin():
            load(early[0], program, early)
            load(late[0], program, late)

        pipeline.run(consume, produce, begin)

    def matrix(columns, needed=True):  # of each consumer
        return matrices(dtype, table.CONSUMERS, table.ROWS, columns) if needed else None

    interpreted = form is Form.INTERPRETED
    full = plgpu.Barrier(num_arrivals=rows.copies, num_barriers=table.CONSUMERS)
    scratch = dict(
        q_s=matrices(dtype, table.CONSUMERS, table.ROWS, key_dim, summed=keys),  # swizzled like the keys
        d_out_s=matrix(value_dim),
        q_copy=matrix(key_dim, interpreted and sizes.query_in_registers),
        d_out_copy=matrix(value_dim, interpreted),
        ds_s=matrix(keys, interpreted),
        q_full=full,
        d_out_full=full,
        **Pipeline.scratch(sizes, dtype, form, k=(key_dim, keys), v=(value_dim, value_dim)),
    )
    numbers = jax.ShapeDtypeStruct((rows.batch, num_kv_heads, rows.padded), f32)
    own_delta = gate is not None or d_lse is not None

    def numbers_of(array, beyond=0.0):
        return None if array is None else rows.arrange_numbers(array.astype(f32), beyond)

    d_query, products, delta = kernel(
        body, f"nsa_{branch}_query_gradient_mosaic", interpret,
        out_type=(jax.ShapeDtypeStruct(rows.shape(key_dim), dtype), numbers, numbers if own_delta else None),
        grid=(tiles.programs,), grid_names=("program",), num_threads=table.CONSUMERS + 1,
        thread_name="warpgroup", scratch_types=scratch,
    )(
        rows.arrange(query), whole_tiles(key), whole_tiles(value), rows.repeat(last_keys),
        None if first_keys is None else rows.repeat(first_keys), lists if computed is None else None,
        rows.arrange(out), rows.arrange(d_out), None if previous is None else rows.arrange(previous),
        RowNumbers(numbers_of(lse, -jnp.inf), numbers_of(gate), numbers_of(d_lse)),
    )  # fmt: skip
    products = rows.restore_numbers(products)
    delta = rows.restore_numbers(delta) if own_delta else products
    return rows.restore(d_query), products, delta
