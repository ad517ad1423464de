"""The compressed branch."""

from nsa_jax import arguments, dispatch, keywords
from nsa_jax.array_typing import Array, Attended, Float, Int
from nsa_jax.config import NSAConfig
from nsa_jax.dispatch import Implementation
from nsa_jax.layout import Runs


@keywords.known
def compressed_attention(
    query: Float[Array, "B T N H"],
    key_cmp: Float[Array, "B C K H"],
    value_cmp: Float[Array, "B C K V"],
    *,
    config: NSAConfig,
    query_positions: Int[Array, "B T"] | Runs | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> Attended:
    """Attends to the compressed blocks that end at or before the query.

    This is Eq. 4 with the compressed keys and values of Eq. 7. Block `i` covers tokens `[i d, i d + l)` of
    its sequence and is visible to the query at sequence index `t` iff `i d + l - 1 <= t`. In a packed row the
    blocks of all sequences follow one another without gaps, in sequence order; the unused slots at the end
    are visible to no query.

    Args:
      query: rotated queries.
      key_cmp: compressed keys, each rotated at the position of its block's first token. A row of `S` tokens
        has `C = (S - l)//d + 1` blocks, or 0 if `S < l`.
      value_cmp: compressed values.
      config: block structure.
      query_positions: key index of each query (-1 = padding), or `Runs`. By default the queries are the last
        `T` of the `S` tokens of `segment_ids`. Without `segment_ids` the default is that the row has `T`
        tokens and each is a query; pass positions if only some of the tokens are queries.
      segment_ids: sequence of each of the `S` tokens of the row: each non-zero id is one contiguous run,
        0 = padding. None if every row is one sequence.
      scale: factor of the logits, a finite Python number; `1/sqrt(H)` if None.
      implementation: one of `nsa_jax.dispatch.IMPLEMENTATIONS`, or None for the best that can run the call,
        see `nsa_jax.choose`.

    Returns:
      `Attended(out, lse)`. `out` has the query's dtype; `lse` is the natural-log-sum-exp in float32 (float64
      for float64 inputs). A query that sees no block has `out` 0 and `lse` `-inf`.

    Raises:
      TypeError: an argument is of the wrong kind, or an array of the wrong kind of dtype.
      ValueError: shapes or dtypes disagree, or `scale` is not finite.
      NotImplementedError: the implementation asked for cannot run the call.

    Gradients:
      With respect to `query`, `key_cmp` and `value_cmp`. The cotangent of `lse` counts, too.
    """
    arrays = dict(query=query, key_cmp=key_cmp, value_cmp=value_cmp)
    call = arguments.check(
        compressed_attention,
        arrays,
        config=config,
        query_positions=query_positions,
        segment_ids=segment_ids,
        scale=scale,
    )
    operands = dict(**arrays, **call._asdict())
    return dispatch.run("compressed_attention", implementation, arrays.values(), operands, config=config)
