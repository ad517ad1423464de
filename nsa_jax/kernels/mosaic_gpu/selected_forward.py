"""Selected attention forward in warpgroups with roles: one loads, two compute.

Source: Eq. 12. grid = (multiprocessors,): `ring` says which tiles a program takes. A tile is 128 rows: query
tokens times the heads of a KV head (8 tokens x 16 heads), half of them for each of two consumers.

The producer fills a ring of `stages` steps, `keys` keys and values each, see `ring`; the queries of the next
tile have a buffer of their own. Products of a visit: logits of this block, and at the same time outputs from
the block before; while the latter runs, the consumer computes the softmax. Rows of tokens that did not choose
the block get a bias of -inf. Blocks that may need the causal mask come first.

Shared memory: `256 H buffers + 2 keys (H + V) stages` bytes (224 KB for 128/128 at 5 stages of 64 keys: one
program per multiprocessor). Registers of a consumer: outputs and logits, `(V + keys) / 2` floats a thread (96
for 128/128), and as many numbers for probabilities in 16 bits; 240 are allowed. Floor at 64k, 16 blocks of
64, 64 heads, 128/128: 2.2 TFLOP if neighbours choose the same blocks, 2.7 ms at 800 TFLOP/s; from L2 18 GB
where 8 tokens share all 16 blocks, 110 GB where they share none.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from nsa_jax.array_typing import Array, Float, Int32
from nsa_jax.kernels.mosaic_gpu import sizes as table
from nsa_jax.kernels.mosaic_gpu.ring import PLACE, Ring, Tiles
from nsa_jax.kernels.mosaic_gpu.rows import Rows
from nsa_jax.kernels.mosaic_gpu.tiles import (
    LN_2,
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

LOWEST = -1e30  # where a softmax begins: below any logit, and finite, so that differences are not NaN


def selected_forward(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    lists: VisitLists,
    last_keys: Int32[Array, "B T"],
    *,
    scale: float,
    block_size: int,
    form: Form,
    aligned: bool = True,
    one_block: bool = False,
    interpret: Any = None,
    processors: int | None = None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Attention of each query over its blocks.

    Args:
      query, key, value, scale: see `nsa_jax.selected_attention`; 16-bit numbers.
      lists: the blocks of each tile of `sizes.tile_tokens(N // K)` tokens, in steps of the keys of
        `sizes.forward_sizes`, with a longest gap of its stages.
      last_keys: row index of the last key that each query sees, -1 where it sees nothing.
      block_size: tokens of a selection block.
      form: by which means the kernel waits, see `unstable`.
      aligned: whether every block begins at a multiple of 8 keys.
      one_block: whether the queries of every tile are known to lie in one block.
      interpret: parameters of the interpreter; None on a GPU.
      processors: programs to start; None for as many as the GPU has multiprocessors.

    Returns:
      `(out, lse)`: lse natural and float32; 0 and -inf where a query sees nothing.
    """
    batch, _, num_kv_heads, value_dim = value.shape
    key_dim = query.shape[3]
    sizes = table.forward_sizes(key_dim, value_dim, block_size, aligned=aligned)
    rows = Rows.of(query, num_kv_heads)
    tiles = Tiles.of(rows, processors)
    assert lists.fills.shape[2] == rows.tiles, (
        f"lists of {lists.fills.shape[2]} tiles, queries of {rows.tiles}"
    )
    single = one_block and block_size == sizes.keys
    keys, buffers, dtype = sizes.box, sizes.query_buffers, query.dtype
    factor = float(scale) * LOG2_E

    def body(
        q_ref, k_ref, v_ref, last_ref, lists, out_ref, lse_ref,
        *, q_s, out_s, lse_s, p_s, q_full, q_free, **in_ring,
    ):  # fmt: skip
        warpgroup = lax.axis_index("warpgroup")
        program = lax.axis_index("program")
        ring = Ring(warpgroup, program, tiles, sizes, form, lists, **in_ring)

        def consume(x, turn, fill, ahead, x_next):
            b, head, tile = tiles.at(x)
            visits, masked, this, then = ahead
            number = lax.rem(turn, buffers)
            buffer = number * table.CONSUMERS + warpgroup
            ahead = ring.consumer_reads(x_next)
            first_row = (tile * table.CONSUMERS + warpgroup) * table.ROWS
            token = plgpu.broadcasted_iota(i32, (table.ROWS,), 0, layout=BY_ROW) // rows.of_token
            plgpu.barrier_wait(q_full.at[buffer])
            q = q_s.at[buffer]

            def softmax(logits, visit, largest, sum_, masks):
                bias = jnp.where(chosen(visit, token), 0.0, -jnp.inf).astype(f32)
                if masks or not aligned:
                    start = ring.start_of(b, head, tile, visit & PLACE)
                    last = last_ref.at[b, pl.ds(first_row, table.ROWS)] if masks else None
                    logits = jnp.where(seen(start, last, sizes, aligned), logits * factor, -jnp.inf)
                    top = jnp.maximum(largest, logits.max(axis=1) + bias)
                    p = jnp.exp2(logits - across(top - bias, keys))
                else:
                    extreme = logits.max(axis=1) if factor >= 0 else -((-logits).max(axis=1))
                    top = jnp.maximum(largest, extreme * factor + bias)
                    p = jnp.exp2(logits * factor - across(top - bias, keys))
                old = jnp.exp2(largest - top)
                return p, top, sum_ * old + p.sum(axis=1), old

            # The first visit: logits alone.
            slot = ring.slot(fill)
            ring.wait_keys(fill)

            def first_product(logits_acc):
                plgpu.wgmma(logits_acc, q, ring.k_s.at[slot].T)
                return logits_acc[...]

            logits = pl.run_scoped(first_product, plgpu.ACC((table.ROWS, keys), f32))
            ring.free_keys(slot)
            zeros = plgpu.layout_cast(jnp.zeros((table.ROWS,), f32), BY_ROW)
            p, largest, sum_, _ = softmax(logits, this, zeros + LOWEST, zeros, True)
            out = plgpu.layout_cast(jnp.zeros((table.ROWS, value_dim), f32), WGMMA)

            def visit(i, carry, masks):
                out, largest, sum_, p, this, before = carry
                then = lists.visits[b, head, tile, warpgroup, jnp.minimum(i + 1, visits - 1)]
                place = this & PLACE
                ring.pass_over(fill, before + 1, place)
                slot, old_slot = ring.slot(fill + place), ring.slot(fill + before)
                ring.wait_keys(fill + place)

                def products(logits_acc, out_acc):
                    form.accumulator(out_acc, out)
                    weights = p if form is Form.INTERPRETED else lax.optimization_barrier(p)
                    plgpu.wgmma(logits_acc, q, ring.k_s.at[slot].T)
                    ring.wait_values(fill + before)
                    form.multiply(out_acc, weights, ring.v_s.at[old_slot], p_s and p_s.at[warpgroup])
                    logits = plgpu.wgmma_accumulator_load(logits_acc, wait_n=1)
                    ring.free_keys(slot)
                    found = softmax(logits, this, largest, sum_, masks)
                    return form.accumulated(plgpu.wgmma_accumulator_load(out_acc, wait_n=0), out), found

                new, (p, largest, sum_, old) = pl.run_scoped(
                    products, plgpu.ACC((table.ROWS, keys), f32), plgpu.ACC((table.ROWS, value_dim), f32)
                )
                ring.free_values(old_slot)
                new = new * across(old, value_dim)
                return new, largest, sum_, p.astype(dtype), then, place

            carry = (out, largest, sum_, p.astype(dtype), then, i32(0))
            if not single:
                carry = lax.fori_loop(1, masked, lambda i, c: visit(i, c, True), carry)
            carry = lax.fori_loop(1 if single else masked, visits, lambda i, c: visit(i, c, False), carry)
            out, largest, sum_, p, _, before = carry

            # The last visit's outputs.
            slot = ring.slot(fill + before)
            ring.wait_values(fill + before)

            def last_product(out_acc):
                form.accumulator(out_acc, out)
                form.multiply(out_acc, p, ring.v_s.at[slot], p_s and p_s.at[warpgroup])
                return form.accumulated(out_acc[...], out)

            out = pl.run_scoped(last_product, plgpu.ACC((table.ROWS, value_dim), f32))
            ring.free_values(slot)
            fills = lists.counts[b, head, tile, 0]
            ring.pass_over(fill, before + 1, fills)

            sees = sum_ != 0  # also true where the sum is NaN
            part = jnp.where(sees, 1 / jnp.where(sees, sum_, 1.0), 0.0)
            to = out_s.at[warpgroup] if sizes.own_output else q
            to[...] = (out * across(part, value_dim)).astype(dtype)
            lse_s[warpgroup] = jnp.where(sees, largest * LN_2 + jnp.log(sum_), -jnp.inf)
            plgpu.commit_smem()
            rows.store(to, out_ref, b, head, first_row)
            plgpu.copy_smem_to_gmem(lse_s.at[warpgroup], lse_ref.at[b, head, pl.ds(first_row, table.ROWS)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(q_free.at[number])
            return fills, ahead

        def produce(x, turn, fill, ahead, x_next):
            b, head, tile = tiles.at(x)
            read, ahead = ahead, ring.producer_reads(x_next)
            number = lax.rem(turn, buffers)

            @pl.when(turn >= buffers)
            def _():
                plgpu.barrier_wait(q_free.at[number])

            for w in range(table.CONSUMERS):
                buffer = number * table.CONSUMERS + w
                first_row = (tile * table.CONSUMERS + w) * table.ROWS
                rows.load(q_ref, b, head, first_row, q_s.at[buffer], q_full.at[buffer])

            return ring.fill(k_ref, v_ref, x, fill, read), ahead

        def drain(turns):
            def drain_queries(i, _):
                plgpu.barrier_wait(q_free.at[lax.rem(i, buffers)])

            lax.fori_loop(jnp.maximum(turns - buffers, 0), turns, drain_queries, None)

        ring.run(consume, produce, lambda: ring.consumer_reads(program), drain)

    scratch = dict(
        q_s=matrices(dtype, table.CONSUMERS * buffers, table.ROWS, key_dim),
        out_s=matrices(dtype, table.CONSUMERS, table.ROWS, value_dim) if sizes.own_output else None,
        lse_s=plgpu.SMEM((table.CONSUMERS, table.ROWS), f32),
        p_s=matrices(dtype, table.CONSUMERS, table.ROWS, keys) if form is Form.INTERPRETED else None,
        q_full=plgpu.Barrier(num_arrivals=rows.copies, num_barriers=table.CONSUMERS * buffers),
        q_free=plgpu.Barrier(num_arrivals=table.CONSUMERS, num_barriers=buffers),
        **Ring.scratch(sizes, dtype, form, k=(key_dim, key_dim), v=(value_dim, keys)),
    )
    out, lse = kernel(
        body, "nsa_selected_forward_mosaic", interpret,
        out_type=(jax.ShapeDtypeStruct(rows.shape(value_dim), dtype),
                  jax.ShapeDtypeStruct((batch, num_kv_heads, rows.padded), f32)),
        grid=(tiles.programs,), grid_names=("program",), num_threads=table.CONSUMERS + 1,
        thread_name="warpgroup", scratch_types=scratch,
    )(rows.arrange(query), whole_tiles(key), whole_tiles(value), rows.repeat(last_keys), lists)  # fmt: skip
    return rows.restore(out), rows.restore_numbers(lse)
