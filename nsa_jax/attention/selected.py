"""The selected branch."""

from typing import Literal, overload

from nsa_jax import arguments, dispatch, layout
from nsa_jax.array_typing import Array, Attended, AttendedReads, Float, Int
from nsa_jax.config import NSAConfig
from nsa_jax.dispatch import Implementation
from nsa_jax.layout import Runs


@overload
def selected_attention(
    query: Float[Array, "B T N H"],
    key_slc: Float[Array, "B S K H"],
    value_slc: Float[Array, "B S K V"],
    block_indices: Int[Array, "B T K R"],
    *,
    config: NSAConfig,
    query_positions: Int[Array, "B T"] | Runs | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
    return_reads: Literal[False] = False,
) -> Attended: ...


@overload
def selected_attention(
    query: Float[Array, "B T N H"],
    key_slc: Float[Array, "B S K H"],
    value_slc: Float[Array, "B S K V"],
    block_indices: Int[Array, "B T K R"],
    *,
    config: NSAConfig,
    query_positions: Int[Array, "B T"] | Runs | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
    return_reads: Literal[True],
) -> AttendedReads: ...


def selected_attention(
    query: Float[Array, "B T N H"],
    key_slc: Float[Array, "B S K H"],
    value_slc: Float[Array, "B S K V"],
    block_indices: Int[Array, "B T K R"],
    *,
    config: NSAConfig,
    query_positions: Int[Array, "B T"] | Runs | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
    return_reads: bool = False,
) -> Attended | AttendedReads:
    """Attention over the tokens of the selected blocks at or before the query (Eq. 12).

    Args:
      query, config, query_positions, segment_ids, scale, implementation, return_reads: see
        `compressed_attention`.
      key_slc, value_slc: keys, rotated at their own position, and values of this branch.
      block_indices: sequence-local block numbers, ascending and without repetition, -1 = unused slot at the
        end; from `select_blocks` or `block_indices_from_ranges`. A block named twice counts once.

    Returns:
      `Attended(out, lse)`, or `AttendedReads(out, lse, reads)` if asked for.

    Raises:
      TypeError, ValueError, NotImplementedError: see `nsa_jax.attention`, Errors.

    Gradients:
      To query, key_slc and value_slc; the cotangent of `lse` is honoured.
    """
    call = arguments.check(
        selected_attention,
        dict(query=query, key_slc=key_slc, value_slc=value_slc, block_indices=block_indices),
        config=config,
        query_positions=query_positions,
        segment_ids=segment_ids,
        scale=scale,
    )
    arrays = query, key_slc, value_slc, layout.distinct_blocks(block_indices)
    chosen = dispatch.running(
        "selected_attention", implementation, *arrays, config=config, return_reads=return_reads
    )
    with chosen as kernels:
        return kernels.selected_attention(*arrays, *call, count_reads=return_reads)
