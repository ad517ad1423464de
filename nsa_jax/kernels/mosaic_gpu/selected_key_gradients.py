"""Selected attention backward, gradients of keys and values: a block's keys stay, its queries pass by.

Source: the gradients of Eq. 12. grid = (items x block / 64,): an item is a part of the queries that chose
one block (`lists.items`), and a program takes one item and 64 keys of the block. Of its three
warpgroups one gathers query tokens, with their output gradients, log-sum-exps and deltas, through the tensor
memory accelerator (TMA) into a pipeline; two compute, each with every other step of the pipeline.

Products of a step, all of them transposed, with keys as rows: logits `K Q^T` and `V dO^T`, then `dV += P^T
dO` and `dK += dS^T Q` with their left operands in registers. So nothing that a consumer computes goes through
shared memory. At the end the two exchange halves through the pipeline's memory: one adds up the gradients of
keys, the other those of values, always in the same order. A block with one item is written at once; items of
others store float32 partial sums, which are added in order elsewhere. No atomics, so every run gives the same
bits. Queries that do not see the whole block come first; only their loop is masked.

With `parts` the kernel also stores `dS K`, the part of a query's gradient that comes from this block: that
product runs beside `dK`, and its store is waited for in the shadow of the next step's products.

Why this order: both sums stay in registers, and no product is masked away. Tokens ascend in an item, and the
longest items start first, so few multiprocessors wait for others at the end.

Shared memory: `128 (H + V) + stages (2 rows (H + V) + 4 numbers tokens)` bytes (162 KB for 128/128 at 4
stages of 64 rows: one program per multiprocessor), with `parts` `256 (64 + H)` more (48 KB). Registers
of a consumer: `(H + V + 2 rows) / 2` floats a thread (192 for 128/128, also for 192/128 in steps of 32 rows),
and as many numbers as a step has rows in 16 bits; 240 are allowed. Floor at 64k, 16 blocks of 64, 64 heads,
128/128: 4.4 TFLOP, 5.5 ms at 800 TFLOP/s; from L2 34 GB. With `parts` 5.5 TFLOP, 6.9 ms, and 17 GB to
write.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from nsa_jax.array_typing import Array, Int32
from nsa_jax.kernels.mosaic_gpu import sizes as table
from nsa_jax.kernels.mosaic_gpu.key_arrays import KeyArrays, KeySums, QueryParts
from nsa_jax.kernels.mosaic_gpu.tiles import LOG2_E, f32, i32, matrices
from nsa_jax.kernels.mosaic_gpu.unstable import BY_COLUMN, WGMMA, Form, kernel
from nsa_jax.kernels.triton.selected.items import BlockItems

KEYS = table.ROWS  # of a program: the height of a wgmma
PIECE = 64  # columns of the part of a query's gradient that are computed at once, for want of registers


def selected_key_gradients(
    arrays: KeyArrays,
    items: BlockItems,
    last_keys: Int32[Array, "B T"],
    *,
    scale: float,
    block_size: int,
    form: Form,
    aligned: bool = True,
    parts: QueryParts | None = None,
    interpret: Any = None,
) -> tuple[Array, ...]:
    """Gradients of the keys and values of every item.

    Args:
      arrays: of 16-bit numbers.
      items: the queries of each block.
      last_keys: row index of the last key that each query sees, -1 where it sees nothing.
      scale: factor of the logits.
      block_size: tokens of a selection block.
      form: by which means the kernel waits, see `unstable`.
      aligned: whether every block begins at a multiple of 8 keys.
      parts: which parts of the queries' gradients are stored; None for none.
      interpret: parameters of the interpreter; None on a GPU.

    Returns:
      `KeySums`. With `parts`, which has references to these, instead the parts of the queries' gradients
      alone, `[heads, queries R, rows, H]` in the queries' dtype: by query and slot, for all `rows` that the
      kernel gives to a query. What belongs to no pair of the items is undefined.
    """
    num_queries, _, key_dim = arrays.query.shape[1:]
    num_kv_heads, value_dim = arrays.value.shape[2:]
    dtype = arrays.query.dtype
    gated_rows, with_query = arrays.gated, parts is not None
    assert block_size in (32, 64, 128), f"blocks of 32, 64 or 128 keys, got {block_size}"
    assert (key_dim, value_dim) in table.DIMS, f"dims {table.DIMS}, got {(key_dim, value_dim)}"
    assert not with_query or block_size == KEYS, "parts of the queries' gradients need blocks of 64"
    sizes = table.key_sizes(key_dim, value_dim, arrays.heads, gated=gated_rows, query_parts=with_query)
    of_token, tokens, stages, rows = sizes.of_token, sizes.tokens, sizes.stages, sizes.rows
    cuts, pieces = -(-block_size // KEYS), key_dim // PIECE
    assert not (with_query and rows < table.ROWS), (
        f"parts of the queries' gradients for dims {table.DIMS[:2]}"
    )
    height = min(block_size, KEYS)  # keys that a program writes
    factor = float(scale) * LOG2_E
    sums = arrays.sums(items, block_size=block_size, aligned=aligned)

    def body(
        q_ref, k_ref, v_ref, do_ref, numbers_ref, last_ref, tokens_ref, items_ref, parts_from_ref,
        part_key_ref, part_value_ref, d_key_ref, d_value_ref, *d_query_ref,
        shared, k_s, v_s, numbers_s, p_s, ds_s, dq_s, held, q_full, do_full, free, joined,
    ):  # fmt: skip
        (q_s, do_s), (dk_s, dv_s, *rows_s) = shared
        dk_rows_s, dv_rows_s = rows_s or (None, None)
        warpgroup = lax.axis_index("warpgroup")
        program = lax.axis_index("program")
        fields = items_ref.at[lax.div(program, cuts)]
        both, limit, slot = fields[0], fields[2], fields[6]
        first, masked, end = fields[3], fields[4], fields[5]
        within = lax.rem(program, cuts) * KEYS
        start = fields[1] + within
        b, head = lax.div(both, num_kv_heads), lax.rem(both, num_kv_heads)
        heads_of = pl.ds(head * of_token, of_token)
        steps = lax.div(end - first + tokens - 1, tokens)
        if parts is not None:
            part_head, first_code = both - parts_from_ref[0], parts_from_ref[1] * parts.slots

        def pair(step, r):
            """The pair of a step's token `r`, and its code; in place of pairs beyond the last, the last."""
            at = first + step * tokens + r
            return at, tokens_ref[jnp.maximum(jnp.minimum(at, end - 1), 0)]

        def token_of(code):
            return code if parts is None else lax.div(code, parts.slots)

        def rows_of(numbers):
            """The numbers of a step's tokens, one after the other."""
            return lax.concatenate(numbers, 0) if len(numbers) > 1 else numbers[0]

        def consume():
            if not aligned:
                for w, (source, to) in enumerate(((k_ref, k_s.at[0]), (v_ref, v_s.at[0]))):

                    @pl.when(warpgroup == w)
                    def _(source=source, to=to):
                        mine = source.at[b, pl.ds(start, KEYS), head]
                        to[...] = plgpu.load(mine, layout=WGMMA, optimized=False)
                        plgpu.commit_smem()

                plgpu.barrier_arrive(held)
            plgpu.barrier_wait(held)

            def step(i, carry, masks):
                dk, dv = carry
                number = table.CONSUMERS * i + warpgroup
                place = lax.rem(number, stages)
                # The warpgroup and 0. If the compiler knew, it would compute the descriptors of all operands
                # before the loop and spill them.
                mine = lax.rem(number, table.CONSUMERS)
                zero = mine - warpgroup
                if masks or with_query:
                    pairs = [pair(number, r) for r in range(tokens)]
                if masks:
                    last = [lax.broadcast(last_ref[b, token_of(code)], (of_token,)) for _, code in pairs]
                    seen = rows_of([plgpu.layout_cast(x, BY_COLUMN) for x in last])
                plgpu.barrier_wait(q_full.at[place])

                def across(field):  # one number a row, for all keys
                    columns = pl.ds(field * of_token, of_token)
                    found = [
                        plgpu.load(numbers_s.at[place, r, columns], layout=BY_COLUMN) for r in range(tokens)
                    ]
                    return lax.broadcast_in_dim(rows_of(found), (KEYS, rows), [1])

                def products(logits_acc, dp_acc, dk_acc, dv_acc):
                    form.accumulator(dv_acc, dv)
                    form.accumulator(dk_acc, dk)
                    if not gated_rows:  # a start value saves the subtraction
                        shift = across(1)
                        form.accumulator(dp_acc, shift)
                    plgpu.wgmma(logits_acc, k_s.at[zero], q_s.at[place].T)
                    plgpu.barrier_wait(do_full.at[place])
                    plgpu.wgmma(dp_acc, v_s.at[zero], do_s.at[place].T)
                    logits = plgpu.wgmma_accumulator_load(logits_acc, wait_n=1)
                    p = jnp.exp2(logits * factor - across(0))
                    if masks:
                        key_row = start + plgpu.broadcasted_iota(i32, (KEYS, rows), 0, layout=WGMMA)
                        p = jnp.where(key_row <= lax.broadcast_in_dim(seen, (KEYS, rows), [1]), p, 0.0)
                    weighted = p if not gated_rows else p * across(2)
                    form.multiply(dv_acc, weighted.astype(dtype), do_s.at[place], p_s and p_s.at[mine, 0])
                    dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
                    if not gated_rows:
                        ds = (p * form.accumulated(dp, shift)).astype(dtype)
                    else:
                        ds = (p * (dp * across(2) + across(1))).astype(dtype)
                    form.multiply(dk_acc, ds, q_s.at[place], p_s and p_s.at[mine, 1])
                    if not with_query:
                        new_dk = form.accumulated(plgpu.wgmma_accumulator_load(dk_acc, wait_n=0), dk)
                        return new_dk, form.accumulated(plgpu.wgmma_accumulator_load(dv_acc, wait_n=0), dv)
                    dv_sum = form.accumulated(plgpu.wgmma_accumulator_load(dv_acc, wait_n=1), dv)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # for the store of the step before
                    ds_s[mine] = ds
                    plgpu.commit_smem()

                    def query_products(*dq_accs):
                        for piece, acc in enumerate(dq_accs):
                            columns = pl.ds(piece * PIECE, PIECE)
                            plgpu.wgmma(acc, ds_s.at[mine].T, k_s.at[zero, :, columns])
                        dk_sum = form.accumulated(plgpu.wgmma_accumulator_load(dk_acc, wait_n=pieces), dk)
                        form.arrive(free.at[place])
                        for piece, acc in enumerate(dq_accs):
                            dq = plgpu.wgmma_accumulator_load(acc, wait_n=pieces - 1 - piece)
                            dq_s.at[mine, :, pl.ds(piece * PIECE, PIECE)][...] = (dq * float(scale)).astype(
                                dtype
                            )
                        return dk_sum

                    dk_sum = pl.run_scoped(query_products, *[plgpu.ACC((rows, PIECE), f32)] * pieces)
                    plgpu.commit_smem()
                    for r, (at, code) in enumerate(pairs):
                        part = dq_s.at[mine, pl.ds(r * of_token, of_token)]
                        form.store_where(at < end, part, d_query_ref[0].at[part_head, code - first_code])
                    plgpu.commit_smem_to_gmem_group()
                    return dk_sum, dv_sum

                accumulators = [plgpu.ACC((KEYS, n), f32) for n in (rows, rows, key_dim, value_dim)]
                dk, dv = pl.run_scoped(products, *accumulators)
                if not with_query:
                    form.arrive(free.at[place])
                return dk, dv

            def steps_of(number):  # those of a consumer, of the first `number`
                return lax.div(number - warpgroup + table.CONSUMERS - 1, table.CONSUMERS)

            zeros = [plgpu.layout_cast(jnp.zeros((KEYS, n), f32), WGMMA) for n in (key_dim, value_dim)]
            with_mask = steps_of(lax.div(masked - first + tokens - 1, tokens))
            carry = lax.fori_loop(0, with_mask, lambda i, c: step(i, c, True), tuple(zeros))
            dk, dv = lax.fori_loop(with_mask, steps_of(steps), lambda i, c: step(i, c, False), carry)

            if with_query:
                plgpu.wait_smem_to_gmem(0)

            def meet():
                plgpu.barrier_arrive(joined)
                plgpu.barrier_wait(joined)

            def add_up(mine, theirs_s, factor, narrow_s, rows_s, part_ref, to_ref):
                total = (mine + plgpu.load(theirs_s, layout=WGMMA)) * factor

                @pl.when(slot >= 0)
                def _():
                    theirs_s[...] = total
                    plgpu.commit_smem()
                    to = part_ref.at[slot, pl.ds(pl.multiple_of(within, height), height)]
                    plgpu.copy_smem_to_gmem(theirs_s.at[pl.ds(0, height)], to)

                @pl.when(slot < 0)
                def _():
                    if aligned:
                        narrow_s[...] = total.astype(dtype)
                        plgpu.commit_smem()
                        to = to_ref.at[b, pl.ds(pl.multiple_of(start, 8), height), head]
                        plgpu.copy_smem_to_gmem(narrow_s.at[pl.ds(0, height)], to)
                    else:
                        rows_s[...] = total.astype(dtype)
                        plgpu.commit_smem()

                        def copy(n, _):
                            mine = rows_s.at[pl.ds(n, 1)]
                            plgpu.copy_smem_to_gmem(mine, to_ref.at[b, pl.ds(start + n, 1), head])

                        lax.fori_loop(0, jnp.clip(limit - start, 0, height), copy, None)

                plgpu.wait_smem_to_gmem(0)

            meet()  # both have read their last step: the pipeline is free

            @pl.when(warpgroup == 0)
            def _():
                dv_s[...] = dv
                meet()
                add_up(dk, dk_s, float(scale), k_s.at[0], dk_rows_s, part_key_ref, d_key_ref)

            @pl.when(warpgroup == 1)
            def _():
                dk_s[...] = dk
                meet()
                add_up(dv, dv_s, 1.0, v_s.at[0], dv_rows_s, part_value_ref, d_value_ref)

        def produce():
            if aligned:
                box = pl.ds(pl.multiple_of(start, 8), KEYS)
                plgpu.copy_gmem_to_smem(k_ref.at[b, box, head], k_s.at[0], held)
                plgpu.copy_gmem_to_smem(v_ref.at[b, box, head], v_s.at[0], held)

            def step(i, codes):
                place = lax.rem(i, stages)

                @pl.when(i >= stages)
                def _():
                    plgpu.barrier_wait(free.at[place])

                for r in range(tokens):
                    token = token_of(codes[r])
                    exists = first + i * tokens + r < end
                    mine = pl.ds(r * of_token, of_token)
                    plgpu.copy_gmem_to_smem(
                        q_ref.at[b, token, heads_of], q_s.at[place, mine], q_full.at[place]
                    )
                    plgpu.copy_gmem_to_smem(
                        numbers_ref.at[b, jnp.where(exists, token, num_queries), head],
                        numbers_s.at[place, r], q_full.at[place],
                    )  # fmt: skip
                for r in range(tokens):
                    mine = pl.ds(r * of_token, of_token)
                    plgpu.copy_gmem_to_smem(
                        do_ref.at[b, token_of(codes[r]), heads_of], do_s.at[place, mine], do_full.at[place]
                    )
                return tuple(pair(i + 1, r)[1] for r in range(tokens))

            lax.fori_loop(0, steps, step, tuple(pair(0, r)[1] for r in range(tokens)))
            if form is Form.INTERPRETED:  # it wants every phase observed that a barrier completes

                def drain(i, _):
                    plgpu.barrier_wait(free.at[lax.rem(i, stages)])

                lax.fori_loop(jnp.maximum(steps - stages, 0), steps, drain, None)

        @pl.when(both >= 0)
        def _():
            @pl.when(warpgroup < table.CONSUMERS)
            def _():
                plgpu.set_max_registers(table.REGISTERS[0], action="increase")
                consume()

            @pl.when(warpgroup == table.CONSUMERS)
            def _():
                plgpu.set_max_registers(table.REGISTERS[1], action="decrease")
                produce()

    def tile(*shape, of=dtype):
        return matrices(of, *shape, summed=rows)

    unaligned = () if aligned else (plgpu.SMEM((KEYS, key_dim), dtype), plgpu.SMEM((KEYS, value_dim), dtype))
    scratch = dict(
        shared=plgpu.RefUnion(
            (tile(stages, rows, key_dim), tile(stages, rows, value_dim)),
            (tile(KEYS, key_dim, of=f32), tile(KEYS, value_dim, of=f32), *unaligned),
        ),
        k_s=tile(1, KEYS, key_dim),
        v_s=tile(1, KEYS, value_dim),
        numbers_s=plgpu.SMEM((stages, tokens, sizes.numbers), f32),
        p_s=tile(table.CONSUMERS, 2, KEYS, rows) if form is Form.INTERPRETED else None,
        ds_s=tile(table.CONSUMERS, KEYS, rows) if with_query else None,
        dq_s=tile(table.CONSUMERS, rows, key_dim) if with_query else None,
        held=plgpu.Barrier(num_arrivals=2),
        q_full=plgpu.Barrier(num_arrivals=2 * tokens, num_barriers=stages),
        do_full=plgpu.Barrier(num_arrivals=tokens, num_barriers=stages),
        free=plgpu.Barrier(num_barriers=stages),
        joined=plgpu.Barrier(num_arrivals=table.CONSUMERS),
    )
    of_parts = parts and jax.ShapeDtypeStruct(
        (parts.heads, parts.queries * parts.slots, of_token, key_dim), dtype
    )
    found = kernel(
        body, "nsa_selected_key_gradients_mosaic", interpret,
        out_type=tuple(sums) if parts is None else (of_parts,),
        grid=(items.items.shape[0] * cuts,), grid_names=("program",),
        num_threads=table.CONSUMERS + 1, thread_name="warpgroup", scratch_types=scratch,
    )(
        arrays.query, arrays.key, arrays.value, arrays.d_out, arrays.numbers, last_keys,
        items.tokens, items.items,
        *((None,) if parts is None else (parts.first, *parts.into)),
    )  # fmt: skip
    if parts is not None:
        return found
    part_key, part_value, d_key, d_value = found
    return KeySums(part_key, part_value, d_key[:, : arrays.num_keys], d_value[:, : arrays.num_keys])
