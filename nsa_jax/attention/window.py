"""The sliding window branch."""

from typing import Literal, overload

from nsa_jax import arguments, dispatch
from nsa_jax.array_typing import Array, Attended, AttendedReads, Float, Int
from nsa_jax.config import NSAConfig
from nsa_jax.dispatch import Implementation
from nsa_jax.layout import Runs


@overload
def window_attention(
    query: Float[Array, "B T N H"],
    key_win: Float[Array, "B W K H"],
    value_win: Float[Array, "B W K V"],
    *,
    config: NSAConfig,
    query_positions: Int[Array, "B T"] | Runs | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    first_key: int | Int[Array, ""] | Int[Array, " B"] = 0,
    scale: float | None = None,
    implementation: Implementation | None = None,
    return_reads: Literal[False] = False,
) -> Attended: ...


@overload
def window_attention(
    query: Float[Array, "B T N H"],
    key_win: Float[Array, "B W K H"],
    value_win: Float[Array, "B W K V"],
    *,
    config: NSAConfig,
    query_positions: Int[Array, "B T"] | Runs | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    first_key: int | Int[Array, ""] | Int[Array, " B"] = 0,
    scale: float | None = None,
    implementation: Implementation | None = None,
    return_reads: Literal[True],
) -> AttendedReads: ...


def window_attention(
    query: Float[Array, "B T N H"],
    key_win: Float[Array, "B W K H"],
    value_win: Float[Array, "B W K V"],
    *,
    config: NSAConfig,
    query_positions: Int[Array, "B T"] | Runs | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    first_key: int | Int[Array, ""] | Int[Array, " B"] = 0,
    scale: float | None = None,
    implementation: Implementation | None = None,
    return_reads: bool = False,
) -> Attended | AttendedReads:
    """Attention over the last `window_size` tokens, the query's own included (section 3.3.3).

    Args:
      query, config, query_positions, segment_ids, scale, implementation, return_reads: see
        `compressed_attention`.
      key_win, value_win: keys, rotated at their own position, and values of this branch.
      first_key: index in the row of the first of these keys: an int, a scalar, or one a row. Not 0 where the
        array holds a part of the row (a shard with its halo, a decode ring in order); it may be negative at
        the start of a row. Window keys that the array does not hold are not seen.

    Returns:
      `Attended(out, lse)`, or `AttendedReads(out, lse, reads)` if asked for.

    Raises:
      TypeError, ValueError, NotImplementedError: see `nsa_jax.attention`, Errors.

    Gradients:
      To query, key_win and value_win; the cotangent of `lse` is honoured.
    """
    call = arguments.check(
        window_attention,
        dict(query=query, key_win=key_win, value_win=value_win),
        config=config,
        query_positions=query_positions,
        segment_ids=segment_ids,
        scale=scale,
        first_key_win=first_key,
    )
    arrays = query, key_win, value_win
    chosen = dispatch.running(
        "window_attention", implementation, *arrays, config=config, return_reads=return_reads
    )
    with chosen as kernels:
        return kernels.window_attention(*arrays, *call, count_reads=return_reads)
