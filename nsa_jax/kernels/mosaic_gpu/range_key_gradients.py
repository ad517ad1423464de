"""Gradients of keys and values of a range: 128 keys stay, half with each consumer, their queries pass by.

Source: the gradients of Eq. 4. grid = (segments x tiles of 128 keys x B K,), the last segment first: a
program takes the queries of one segment that see a key of its tile, as `triton.ranges.backward_key` does. Of
its three warpgroups one loads steps of 64 rows, query tokens times the heads of a KV head, with their output
gradients, log-sum-exps, deltas and gates, through the tensor memory accelerator (TMA) into a pipeline. Two
compute; each reads every step, for 64 keys of its own. So L2 is read half as often as if they took turns.

Products of a step, with keys as rows: logits `K Q^T` and `V dO^T`, then `dV += P^T dO` and `dK += dS^T Q`
with their left operands in registers. The last two are waited for in the next step, behind its logits, so the
tensor cores have work while a consumer turns to it. Steps at the ends of the ranges, which need a mask, come
first; the ranges are computed from the number of the query. With one segment the gradients leave in the dtype
of the keys, else in float32 for `sum_segments`.

Shared memory: `256 (H + V) + stages (128 (H + V) + 4 numbers tokens)` bytes (196 KB for 128/128 at 4 stages:
one program per multiprocessor). Registers of a consumer: `(H + V + 128) / 2` floats a thread (192 for
128/128), and as many numbers as a step has rows in 16 bits; 240 are allowed. Floor at 64k, 64 heads, 128/128:
compressed 8.8 TFLOP, 11 ms at 800 TFLOP/s, from L2 34 GB; window 2.2 TFLOP, 2.75 ms.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from nsa_jax.array_typing import Array, Float, Int32
from nsa_jax.kernels.mosaic_gpu import sizes as table
from nsa_jax.kernels.mosaic_gpu.key_arrays import KeyArrays
from nsa_jax.kernels.mosaic_gpu.tiles import LOG2_E, f32, i32, matrices
from nsa_jax.kernels.mosaic_gpu.unstable import BY_COLUMN, WGMMA, Form, kernel
from nsa_jax.kernels.triton.ranges.edges import Edges

CONSUMER_KEYS = table.ROWS  # the height of a wgmma
KEYS = table.CONSUMERS * CONSUMER_KEYS  # of a program


def range_key_gradients(
    arrays: KeyArrays,
    edges: Edges,
    *,
    segments: int,
    scale: float,
    form: Form,
    interpret: Any = None,
    stages: int | None = None,
) -> tuple[
    Float[Array, "segments B S K H"], Float[Array, "segments B S K V"], Int32[Array, "segments BK tiles"]
]:
    """What each segment of the queries adds to the gradients.

    Args:
      arrays: of 16-bit numbers.
      edges: what is known of the ranges; queries are the tokens of whole rows.
      segments: equal parts of the queries; with one the gradients are in the dtype of the keys.
      scale: factor of the logits.
      form: by which means the kernel waits, see `unstable`.
      interpret: parameters of the interpreter; None on a GPU.
      stages: steps that the pipeline holds; None for as many as fit.

    Returns:
      `(part_key, part_value, steps)`: the parts have as many keys as `arrays.key`, and of several segments
      are undefined where the number of steps of a tile is 0.
    """
    batch, num_queries, _, key_dim = arrays.query.shape
    padded_keys, num_kv_heads, value_dim = arrays.value.shape[1:]
    num_keys, dtype, gated = arrays.num_keys, arrays.query.dtype, arrays.gated
    of_token = table.gathered_rows(arrays.heads)
    rows, tokens = table.ROWS, table.ROWS // of_token
    numbers = arrays.numbers.shape[3]
    held_bytes = 2 * KEYS * (key_dim + value_dim)
    step_bytes = 2 * rows * (key_dim + value_dim) + 4 * numbers * tokens
    stages = stages or min(
        (table.SHARED_BYTES - table.BARRIER_BYTES - held_bytes) // step_bytes, table.MOST_STAGES
    )
    assert stages > 1, "a place is freed in the step after its own"
    assert edges.first_position == 0, "a query stands at its number"
    factor = float(scale) * LOG2_E
    tiles, query_tiles = -(-num_keys // KEYS), -(-num_queries // tokens)
    segment_tiles = -(-query_tiles // segments)
    of_part = dtype if segments == 1 else f32

    def limits(first_key, segment):
        """Tiles of tokens that a program takes: `low, full_low, full_high, high`; full ones need no mask."""
        past_key = jnp.minimum(first_key + KEYS, num_keys)
        begin = first_key * edges.stride + (edges.size - 1)  # the first query that sees the first key
        all_begin = (past_key - 1) * edges.stride + (edges.size - 1)
        low, full_low = lax.div(begin, tokens), lax.div(all_begin + (tokens - 1), tokens)
        full_high = high = jnp.full_like(low, query_tiles)
        if edges.window is not None:  # past the last query that sees the first key, and the last one
            reach = edges.window * edges.stride
            full_high = lax.div(begin + reach, tokens)
            high = lax.div(all_begin + reach + (tokens - 1), tokens)
        # The last tile of tokens may have fewer: those beyond have a normaliser of +inf, and need no mask.
        # Nor do keys beyond the last.
        from_, to = segment * segment_tiles, jnp.minimum((segment + 1) * segment_tiles, query_tiles)
        low = jnp.maximum(low, from_)
        high = jnp.maximum(jnp.minimum(high, to), low)
        full_low = jnp.clip(full_low, low, high)
        return low, full_low, jnp.clip(full_high, full_low, high), high

    def body(
        q_ref, k_ref, v_ref, do_ref, numbers_ref, part_key_ref, part_value_ref,
        *, shared, k_s, v_s, numbers_s, p_s, held, q_full, do_full, free, joined,
    ):  # fmt: skip
        (q_s, do_s), (dk_s, dv_s) = shared
        warpgroup = lax.axis_index("warpgroup")
        program = lax.axis_index("program")
        both, rest = lax.rem(program, batch * num_kv_heads), lax.div(program, batch * num_kv_heads)
        tile, segment = lax.rem(rest, tiles), segments - 1 - lax.div(rest, tiles)
        b, head = lax.div(both, num_kv_heads), lax.rem(both, num_kv_heads)
        start = tile * KEYS
        low, full_low, full_high, high = limits(start, segment)
        steps, head_steps = high - low, full_low - low
        masked = steps - (full_high - full_low)
        heads_of = pl.ds(head * of_token, of_token)

        def first_token(i):
            """Of step `i`: first the steps before the full ones, then those after them, and last these."""
            at = jnp.where(i < head_steps, low + i, full_high + i - head_steps)
            return jnp.where(i < masked, at, full_low + i - masked) * tokens

        def consume():
            plgpu.barrier_wait(held)

            def step(i, dk_acc, dv_acc, masks):
                place = lax.rem(i, stages)
                # The warpgroup. If the compiler knew, it would compute the descriptors of all operands before
                # the loop and spill them.
                mine = lax.rem(i * table.CONSUMERS + warpgroup, table.CONSUMERS)
                plgpu.barrier_wait(q_full.at[place])

                def across(field):  # one number a row, for all keys
                    columns = pl.ds(field * of_token, of_token)
                    each = [
                        plgpu.load(numbers_s.at[place, r, columns], layout=BY_COLUMN) for r in range(tokens)
                    ]
                    found = lax.concatenate(each, 0) if tokens > 1 else each[0]
                    return lax.broadcast_in_dim(found, (CONSUMER_KEYS, rows), [1])

                def products(logits_acc, dp_acc):
                    if not gated:  # a start value saves the subtraction
                        shift = across(1)
                        form.accumulator(dp_acc, shift)
                    plgpu.wgmma(logits_acc, k_s.at[mine], q_s.at[place].T)
                    logits = plgpu.wgmma_accumulator_load(logits_acc, wait_n=0)
                    plgpu.barrier_wait(do_full.at[place])
                    plgpu.wgmma(dp_acc, v_s.at[mine], do_s.at[place].T)

                    @pl.when(i > 0)
                    def _():  # the products of the step before are done, too
                        form.arrive(free.at[lax.rem(jnp.maximum(i - 1, 0), stages)])

                    p = jnp.exp2(logits * factor - across(0))
                    if masks:
                        token = (
                            first_token(i)
                            + plgpu.broadcasted_iota(i32, (rows,), 0, layout=BY_COLUMN) // of_token
                        )
                        end = jnp.maximum(token + (1 - edges.size + edges.stride), 0) // edges.stride
                        key = (
                            start
                            + mine * CONSUMER_KEYS
                            + plgpu.broadcasted_iota(i32, (CONSUMER_KEYS, rows), 0, layout=WGMMA)
                        )
                        seen = key < lax.broadcast_in_dim(end, (CONSUMER_KEYS, rows), [1])
                        if edges.window is not None:
                            seen = seen & (
                                key >= lax.broadcast_in_dim(end - edges.window, (CONSUMER_KEYS, rows), [1])
                            )
                        p = jnp.where(seen, p, 0.0)
                    weighted = p * across(2) if gated else p
                    form.multiply(dv_acc, weighted.astype(dtype), do_s.at[place], p_s and p_s.at[mine, 0])
                    dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
                    ds = p * (dp * across(2) + across(1)) if gated else p * form.accumulated(dp, shift)
                    form.multiply(dk_acc, ds.astype(dtype), q_s.at[place], p_s and p_s.at[mine, 1])

                pl.run_scoped(products, *[plgpu.ACC((CONSUMER_KEYS, rows), f32)] * 2)

            def all_steps(dk_acc, dv_acc):
                lax.fori_loop(0, masked, lambda i, _: step(i, dk_acc, dv_acc, True), None)
                lax.fori_loop(masked, steps, lambda i, _: step(i, dk_acc, dv_acc, False), None)
                found = (plgpu.wgmma_accumulator_load(acc, wait_n=0) for acc in (dk_acc, dv_acc))
                return tuple(found)

            dk, dv = pl.run_scoped(
                all_steps,
                plgpu.ACC((CONSUMER_KEYS, key_dim), f32),
                plgpu.ACC((CONSUMER_KEYS, value_dim), f32),
            )

            @pl.when(steps > 0)
            def _():
                form.arrive(free.at[lax.rem(jnp.maximum(steps - 1, 0), stages)])

            plgpu.barrier_arrive(joined)
            plgpu.barrier_wait(joined)  # both have read their last step: the pipeline is free
            mine = lax.rem(steps * table.CONSUMERS + warpgroup, table.CONSUMERS)
            dk_s[mine] = (dk * float(scale)).astype(of_part)
            dv_s[mine] = dv.astype(of_part)
            plgpu.commit_smem()
            to = (
                segment,
                b,
                pl.ds(pl.multiple_of(start + mine * CONSUMER_KEYS, CONSUMER_KEYS), CONSUMER_KEYS),
                head,
            )

            @pl.when(start + mine * CONSUMER_KEYS < num_keys)
            def _():
                plgpu.copy_smem_to_gmem(dk_s.at[mine], part_key_ref.at[to])
                plgpu.copy_smem_to_gmem(dv_s.at[mine], part_value_ref.at[to])
                plgpu.wait_smem_to_gmem(0)

        def produce():
            for w in range(table.CONSUMERS):
                # Where a consumer has no keys, those of the other.
                from_ = jnp.where(start + w * CONSUMER_KEYS < num_keys, start + w * CONSUMER_KEYS, start)
                box = pl.ds(pl.multiple_of(from_, 8), CONSUMER_KEYS)
                plgpu.copy_gmem_to_smem(k_ref.at[b, box, head], k_s.at[w], held)
                plgpu.copy_gmem_to_smem(v_ref.at[b, box, head], v_s.at[w], held)

            def step(i, carry):
                place, first = lax.rem(i, stages), first_token(i)

                @pl.when(i >= stages)
                def _():
                    plgpu.barrier_wait(free.at[place])

                for r in range(tokens):
                    token, mine = jnp.minimum(first + r, num_queries - 1), pl.ds(r * of_token, of_token)
                    plgpu.copy_gmem_to_smem(
                        q_ref.at[b, token, heads_of], q_s.at[place, mine], q_full.at[place]
                    )
                    plgpu.copy_gmem_to_smem(
                        numbers_ref.at[b, jnp.minimum(first + r, num_queries), head], numbers_s.at[place, r],
                        q_full.at[place],
                    )  # fmt: skip
                for r in range(tokens):
                    token, mine = jnp.minimum(first + r, num_queries - 1), pl.ds(r * of_token, of_token)
                    plgpu.copy_gmem_to_smem(
                        do_ref.at[b, token, heads_of], do_s.at[place, mine], do_full.at[place]
                    )

            lax.fori_loop(0, steps, step, None)
            if form is Form.INTERPRETED:  # it wants every phase observed that a barrier completes

                def drain(i, _):
                    plgpu.barrier_wait(free.at[lax.rem(i, stages)])

                lax.fori_loop(jnp.maximum(steps - stages, 0), steps, drain, None)

        @pl.when((steps > 0) | (segments == 1))
        def _():
            @pl.when(warpgroup < table.CONSUMERS)
            def _():
                plgpu.set_max_registers(table.REGISTERS[0], action="increase")
                consume()

            @pl.when(warpgroup == table.CONSUMERS)
            def _():
                plgpu.set_max_registers(table.REGISTERS[1], action="decrease")
                produce()

    def matrix(*shape, of=dtype):
        return matrices(of, *shape, summed=rows)

    scratch = dict(
        shared=plgpu.RefUnion(
            (matrix(stages, rows, key_dim), matrix(stages, rows, value_dim)),
            tuple(matrix(table.CONSUMERS, CONSUMER_KEYS, dim, of=of_part) for dim in (key_dim, value_dim)),
        ),
        k_s=matrix(table.CONSUMERS, CONSUMER_KEYS, key_dim),
        v_s=matrix(table.CONSUMERS, CONSUMER_KEYS, value_dim),
        numbers_s=plgpu.SMEM((stages, tokens, numbers), f32),
        p_s=matrix(table.CONSUMERS, 2, CONSUMER_KEYS, rows) if form is Form.INTERPRETED else None,
        held=plgpu.Barrier(num_arrivals=2 * table.CONSUMERS),
        q_full=plgpu.Barrier(num_arrivals=2 * tokens, num_barriers=stages),
        do_full=plgpu.Barrier(num_arrivals=tokens, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=table.CONSUMERS, num_barriers=stages),
        joined=plgpu.Barrier(num_arrivals=table.CONSUMERS),
    )
    parts = [
        jax.ShapeDtypeStruct((segments, batch, padded_keys, num_kv_heads, dim), of_part)
        for dim in (key_dim, value_dim)
    ]
    found = kernel(
        body, f"nsa_{edges.branch}_key_gradients_mosaic", interpret,
        out_type=tuple(parts),
        grid=(segments * tiles * batch * num_kv_heads,), grid_names=("program",),
        num_threads=table.CONSUMERS + 1, thread_name="warpgroup", scratch_types=scratch,
    )(arrays.query, arrays.key, arrays.value, arrays.d_out, arrays.numbers)  # fmt: skip
    low, _, _, high = limits(jnp.arange(tiles)[None, None] * KEYS, jnp.arange(segments)[:, None, None])
    return *found, jnp.broadcast_to(high - low, (segments, batch * num_kv_heads, tiles)).astype(i32)
