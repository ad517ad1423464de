"""The sliding window branch."""

from nsa_jax import arguments, dispatch, keywords
from nsa_jax.array_typing import Array, Attended, Float, Int
from nsa_jax.config import NSAConfig
from nsa_jax.dispatch import Implementation
from nsa_jax.layout import Runs


@keywords.known
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
) -> Attended:
    """Attends to the last `window_size` tokens, the query's own included (section 3.3.3).

    The query at index `t` of its sequence sees tokens `max(0, t - w + 1) .. t`. The other arguments are
    those of `compressed_attention`; by default the queries are the last `T` tokens of the row.

    Args:
      query: rotated queries.
      key_win: keys of this branch, each rotated at its own position.
      value_win: values of this branch.
      config: block structure; only `window_size` matters here.
      first_key: row index of the first key of the array: an int, a scalar, or one for each row. It differs
        from 0 if the array holds only a part of the row, such as a shard with its halo or the ordered content
        of a decode ring; it may be negative at the start of a row. Keys of the window that the array does not
        hold are not seen.

    Returns:
      `Attended(out, lse)`, as in `compressed_attention`. A padding query has `out` 0 and `lse` `-inf`.

    Raises:
      TypeError, ValueError, NotImplementedError: as in `compressed_attention`.

    Gradients:
      With respect to `query`, `key_win` and `value_win`. The cotangent of `lse` counts, too.
    """
    arrays = dict(query=query, key_win=key_win, value_win=value_win)
    call = arguments.check(
        window_attention,
        arrays,
        config=config,
        query_positions=query_positions,
        segment_ids=segment_ids,
        scale=scale,
        first_key_win=first_key,
    )
    operands = dict(**arrays, **call._asdict())
    return dispatch.run("window_attention", implementation, arrays.values(), operands, config=config)
