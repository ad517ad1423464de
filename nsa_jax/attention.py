"""The operations of Native Sparse Attention (arXiv:2502.11089): shapes, meaning and dispatch in one place.

Arrays are `[B, T, N, H]`: batch, query tokens, query heads, key dim. Keys have `K` KV heads; query heads
`k G .. (k+1) G - 1` belong to KV head `k`, `G = N / K`. Each branch may get keys and values of its own
(section 3.3.3) or share them by passing the same array.

What all operations share:

* **Positions.** Key `s` of a row has index `s`. `query_positions [B, T]` are the key indices of the queries,
  by default the last `T` of the `S` keys; -1 marks padding. A query sees keys at or before its own index.
* **Packed rows.** `segment_ids [B, S]` give several sequences a row: each non-zero id is one contiguous run,
  0 is padding. A query belongs to the sequence of the key at its index; blocks are counted from that
  sequence's first token.
* **A query that sees no key** (padding, no compressed block yet, no block selected) gets output 0,
  log-sum-exp `-inf` and zero gradients.
* **Precision.** Logits, softmax and sums are float32 (float64 for float64 inputs); outputs have the query's
  dtype and log-sum-exps are natural-log, float32.
* **Errors.** `ValueError` and `TypeError` for shapes and dtypes, at trace time; values of index arrays are
  not checked here but by `nsa_jax.debug`. `NotImplementedError` if the named implementation cannot run the
  call.
* **Transformations.** jit, grad, vmap, scan, remat and export (of Triton kernels with a safety check
  disabled, see the README); reverse-mode gradients, deterministic.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from nsa_jax import arguments
from nsa_jax.array_typing import Array, Float, Int, Int32
from nsa_jax.config import NSAConfig, Tiles
from nsa_jax.dispatch import Implementation, resolve


def compressed_attention(
    query: Float[Array, "B T N H"],
    key_cmp: Float[Array, "B C K H"],
    value_cmp: Float[Array, "B C K V"],
    *,
    config: NSAConfig,
    query_positions: Int[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
    tiles: Tiles | None = None,
    return_reads: bool = False,
) -> Any:
    """Attention over the compressed blocks that end at or before the query (Eq. 7).

    Block `i` covers tokens `[i d, i d + l)` of its sequence and is visible to the query at sequence index
    `t` iff `i d + l - 1 <= t`. The blocks of a packed row lie compactly in sequence order.

    Args:
      query: rotated queries.
      key_cmp, value_cmp: compressed keys, rotated at the position of their block's first token, and values.
      config: block structure.
      query_positions: key index of each query, -1 = padding. Needed where the `T` queries are not all tokens
        behind the `C` blocks.
      segment_ids: sequence of each of the row's `S` tokens, 0 = padding.
      scale: factor of the logits, `1/sqrt(H)` if None.
      implementation: see `nsa_jax.dispatch`.
      tiles: sizes of the pieces of work; never changes the result beyond rounding.
      return_reads: also return the number of keys that each query and KV head gathered.

    Returns:
      `(out [B, T, N, V], lse [B, T, N])`, and `reads [B, T, K]` (int32) if asked for.

    Gradients:
      To query, key_cmp and value_cmp; the cotangent of `lse` is honoured.
    """
    sizes = arguments.bind_shapes(
        query=(query, "B T N H"), key_cmp=(key_cmp, "B C K H"), value_cmp=(value_cmp, "B C K V"),
        segment_ids=(segment_ids, "B S or None"), query_positions=(query_positions, "B T or None"),
    )  # fmt: skip
    _check(sizes, config, query_positions, segment_ids, query=query, key_cmp=key_cmp, value_cmp=value_cmp)
    length = arguments.resolve_compressed_length(sizes, query_positions, config)
    run = resolve("compressed_attention", implementation, query, key_cmp, value_cmp, config=config)
    out, lse, reads = run(
        query, key_cmp, value_cmp,
        **_resolved(sizes, config, query_positions, segment_ids, scale, tiles, length),
    )  # fmt: skip
    return (out, lse, reads) if return_reads else (out, lse)


def select_blocks(
    query: Float[Array, "B T N H"],
    key_cmp: Float[Array, "B C K H"],
    *,
    config: NSAConfig,
    lse_cmp: Float[Array, "B T N"] | None = None,
    query_positions: Int[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
    tiles: Tiles | None = None,
) -> Int32[Array, "B T K R"]:
    """The selection blocks that each query attends, the same for all query heads of a KV head (Eq. 8-11).

    The compressed attention's probabilities are summed over the heads of a KV head and over the compressed
    blocks that overlap a selection block, weighted by the shared tokens in strides (for 32/16/64: 1, 2, 2,
    2, 1). Candidates are the blocks whose first token the query sees. The initial blocks and the
    `num_local_blocks` that end with the query's own are always in and count inside `num_selected_blocks`;
    ties go to the lower block index.

    Args:
      query, key_cmp, config, query_positions, segment_ids, scale, implementation, tiles: see
        `compressed_attention`.
      lse_cmp: what `compressed_attention` returned for the same arguments; recomputed when None.

    Returns:
      `block_indices [B, T, K, R]`, `R = num_selected_blocks`: sequence-local block numbers, ascending, -1 in
      unused slots at the end.

    Gradients:
      None: no gradient flows through the selection, which is the paper's choice. The compressed branch
      learns the scores.
    """
    sizes = arguments.bind_shapes(
        query=(query, "B T N H"), key_cmp=(key_cmp, "B C K H"), lse_cmp=(lse_cmp, "B T N or None"),
        segment_ids=(segment_ids, "B S or None"), query_positions=(query_positions, "B T or None"),
    )  # fmt: skip
    _check(sizes, config, query_positions, segment_ids, query=query, key_cmp=key_cmp)
    length = arguments.resolve_compressed_length(sizes, query_positions, config)
    query, key_cmp = lax.stop_gradient((query, key_cmp))
    run = resolve("select_blocks", implementation, query, key_cmp, config=config)
    return run(
        query, key_cmp, lse_cmp=None if lse_cmp is None else lax.stop_gradient(lse_cmp),
        **_resolved(sizes, config, query_positions, segment_ids, scale, tiles, length),
    )  # fmt: skip


def selected_attention(
    query: Float[Array, "B T N H"],
    key_slc: Float[Array, "B S K H"],
    value_slc: Float[Array, "B S K V"],
    block_indices: Int[Array, "B T K R"],
    *,
    config: NSAConfig,
    query_positions: Int[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
    tiles: Tiles | None = None,
    return_reads: bool = False,
) -> Any:
    """Attention over the tokens of the selected blocks at or before the query (Eq. 12).

    Args:
      query, config, query_positions, segment_ids, scale, implementation, tiles, return_reads: see
        `compressed_attention`.
      key_slc, value_slc: keys, rotated at their own position, and values of this branch.
      block_indices: sequence-local block numbers, ascending and without repetition, -1 = unused slot at the
        end; from `select_blocks` or `block_indices_from_ranges`.

    Returns:
      `(out [B, T, N, V], lse [B, T, N])`, and `reads [B, T, K]` (int32) if asked for.

    Gradients:
      To query, key_slc and value_slc; the cotangent of `lse` is honoured.
    """
    sizes = arguments.bind_shapes(
        query=(query, "B T N H"), key_slc=(key_slc, "B S K H"), value_slc=(value_slc, "B S K V"),
        block_indices=(block_indices, "B T K R"), segment_ids=(segment_ids, "B S or None"),
        query_positions=(query_positions, "B T or None"),
    )  # fmt: skip
    _check(sizes, config, query_positions, segment_ids, query=query, key_slc=key_slc, value_slc=value_slc)
    arguments.check_integers(block_indices=block_indices)
    run = resolve(
        "selected_attention", implementation, query, key_slc, value_slc, block_indices, config=config
    )
    out, lse, reads = run(
        query, key_slc, value_slc, jnp.asarray(block_indices, jnp.int32),
        **_resolved(sizes, config, query_positions, segment_ids, scale, tiles, sizes["S"]),
    )  # fmt: skip
    return (out, lse, reads) if return_reads else (out, lse)


def window_attention(
    query: Float[Array, "B T N H"],
    key_win: Float[Array, "B S K H"],
    value_win: Float[Array, "B S K V"],
    *,
    config: NSAConfig,
    query_positions: Int[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
    tiles: Tiles | None = None,
    return_reads: bool = False,
) -> Any:
    """Attention over the last `window_size` tokens, the query's own included (section 3.3.3).

    Args:
      query, config, query_positions, segment_ids, scale, implementation, tiles, return_reads: see
        `compressed_attention`.
      key_win, value_win: keys, rotated at their own position, and values of this branch.

    Returns:
      `(out [B, T, N, V], lse [B, T, N])`, and `reads [B, T, K]` (int32) if asked for.

    Gradients:
      To query, key_win and value_win; the cotangent of `lse` is honoured.
    """
    sizes = arguments.bind_shapes(
        query=(query, "B T N H"), key_win=(key_win, "B S K H"), value_win=(value_win, "B S K V"),
        segment_ids=(segment_ids, "B S or None"), query_positions=(query_positions, "B T or None"),
    )  # fmt: skip
    _check(sizes, config, query_positions, segment_ids, query=query, key_win=key_win, value_win=value_win)
    run = resolve("window_attention", implementation, query, key_win, value_win, config=config)
    out, lse, reads = run(
        query, key_win, value_win,
        **_resolved(sizes, config, query_positions, segment_ids, scale, tiles, sizes["S"]),
    )  # fmt: skip
    return (out, lse, reads) if return_reads else (out, lse)


def gated_sum(
    out_cmp: Float[Array, "B T N V"],
    out_slc: Float[Array, "B T N V"],
    out_win: Float[Array, "B T N V"],
    gates: Float[Array, "B T N 3"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"]:
    """`g_cmp * o_cmp + g_slc * o_slc + g_win * o_win` (Eq. 5).

    Args:
      out_cmp, out_slc, out_win: outputs of the three branches.
      gates: one gate per token, query head and branch, in the order cmp, slc, win; any float dtype.
      implementation: see `nsa_jax.dispatch`.

    Returns:
      The sum, in the branches' dtype.
    """
    arguments.bind_shapes(
        out_cmp=(out_cmp, "B T N V"), out_slc=(out_slc, "B T N V"), out_win=(out_win, "B T N V"),
        gates=(gates, "B T N 3"),
    )  # fmt: skip
    arguments.check_floats(out_cmp=out_cmp, out_slc=out_slc, out_win=out_win)
    arguments.check_floats(gates=gates)
    return resolve("gated_sum", implementation, out_cmp, out_slc, out_win, gates)(
        out_cmp, out_slc, out_win, gates
    )


def native_sparse_attention(
    query: Float[Array, "B T N H"],
    key_cmp: Float[Array, "B C K H"],
    value_cmp: Float[Array, "B C K V"],
    key_slc: Float[Array, "B S K H"],
    value_slc: Float[Array, "B S K V"],
    key_win: Float[Array, "B S K H"],
    value_win: Float[Array, "B S K V"],
    gates: Float[Array, "B T N 3"],
    *,
    config: NSAConfig,
    block_indices: Int[Array, "B T K R"] | None = None,
    query_positions: Int[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
    tiles: Tiles | None = None,
) -> Float[Array, "B T N V"]:
    """Native Sparse Attention: compressed, selected and window attention, summed by gates (Eq. 5).

    Args:
      query: rotated queries, the same for all branches.
      key_cmp, value_cmp: see `compressed_attention`; `C = (S - l)//d + 1` blocks, 0 if `S < l`.
      key_slc, value_slc: see `selected_attention`.
      key_win, value_win: see `window_attention`.
      gates: see `gated_sum`.
      config, query_positions, segment_ids, scale, implementation, tiles: see `compressed_attention`.
      block_indices: a selection to use instead of `select_blocks`, for example of another implementation.

    Returns:
      The output, in the query's dtype; 0 for a padding query.

    Gradients:
      To all arrays but the index arrays; none through the selection (see `select_blocks`).

    Example:
      out = native_sparse_attention(q, k_cmp, v_cmp, k, v, k, v, gates, config=NSAConfig())
    """
    sizes = arguments.bind_shapes(
        query=(query, "B T N H"), key_cmp=(key_cmp, "B C K H"), value_cmp=(value_cmp, "B C K V"),
        key_slc=(key_slc, "B S K H"), value_slc=(value_slc, "B S K V"), key_win=(key_win, "B S K H"),
        value_win=(value_win, "B S K V"), gates=(gates, "B T N 3"),
        block_indices=(block_indices, "B T K R or None"), segment_ids=(segment_ids, "B S or None"),
        query_positions=(query_positions, "B T or None"),
    )  # fmt: skip
    arrays = dict(
        query=query, key_cmp=key_cmp, value_cmp=value_cmp, key_slc=key_slc, value_slc=value_slc,
        key_win=key_win, value_win=value_win,
    )  # fmt: skip
    _check(sizes, config, query_positions, segment_ids, **arrays)
    arguments.check_floats(gates=gates)
    arguments.check_integers(block_indices=block_indices)
    arguments.check_blocks(sizes, config)
    run = resolve("native_sparse_attention", implementation, *arrays.values(), gates, config=config)
    return run(
        *arrays.values(), gates,
        block_indices=None if block_indices is None else jnp.asarray(block_indices, jnp.int32),
        **_resolved(sizes, config, query_positions, segment_ids, scale, tiles, sizes["S"]),
    )  # fmt: skip


def _check(sizes, config, query_positions, segment_ids, **floats) -> None:
    arguments.check_config(config)
    arguments.check_not_empty(sizes)
    arguments.check_heads(sizes)
    arguments.check_selection(sizes, config)
    arguments.check_floats(**floats)
    arguments.check_integers(query_positions=query_positions, segment_ids=segment_ids)


def _resolved(sizes, config, query_positions, segment_ids, scale, tiles, length) -> dict[str, Any]:
    return dict(
        config=config,
        query_positions=arguments.resolve_positions(sizes, query_positions, length),
        segment_ids=segment_ids,
        scale=arguments.resolve_scale(scale, sizes["H"]),
        tiles=arguments.resolve_tiles(tiles),
        # Where the first query stands, if the queries are known to be consecutive tokens of one sequence.
        first_position=length - sizes["T"] if query_positions is None and segment_ids is None else None,
    )
