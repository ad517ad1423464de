"""The compressed branch."""

from typing import Literal, overload

from nsa_jax import arguments, dispatch
from nsa_jax.array_typing import Array, Attended, AttendedReads, Float, Int
from nsa_jax.config import NSAConfig
from nsa_jax.dispatch import Implementation
from nsa_jax.layout import Runs


@overload
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
    return_reads: Literal[False] = False,
) -> Attended: ...


@overload
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
    return_reads: Literal[True],
) -> AttendedReads: ...


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
    return_reads: bool = False,
) -> Attended | AttendedReads:
    """Attention over the compressed blocks that end at or before the query (Eq. 7).

    Block `i` covers tokens `[i d, i d + l)` of its sequence and is visible to the query at sequence index
    `t` iff `i d + l - 1 <= t`. The blocks of a packed row lie compactly in sequence order.

    Args:
      query: rotated queries.
      key_cmp, value_cmp: compressed keys, rotated at the position of their block's first token, and values.
      config: block structure.
      query_positions: key index of each query, -1 = padding, or `Runs`. Needed where the `T` queries are not
        all tokens behind the `C` blocks.
      segment_ids: sequence of each of the row's `S` tokens, 0 = padding.
      scale: factor of the logits, `1/sqrt(H)` if None.
      implementation: see `nsa_jax.dispatch`.
      return_reads: also return the number of keys that each query and KV head gathered; on `xla` only.

    Returns:
      `Attended(out, lse)`, or `AttendedReads(out, lse, reads)` if asked for.

    Raises:
      TypeError, ValueError, NotImplementedError: see `nsa_jax.attention`, Errors.

    Gradients:
      To query, key_cmp and value_cmp; the cotangent of `lse` is honoured.
    """
    call = arguments.check(
        compressed_attention,
        dict(query=query, key_cmp=key_cmp, value_cmp=value_cmp),
        config=config,
        query_positions=query_positions,
        segment_ids=segment_ids,
        scale=scale,
    )
    arrays = query, key_cmp, value_cmp
    chosen = dispatch.running(
        "compressed_attention", implementation, *arrays, config=config, return_reads=return_reads
    )
    with chosen as kernels:
        return kernels.compressed_attention(*arrays, *call, count_reads=return_reads)
