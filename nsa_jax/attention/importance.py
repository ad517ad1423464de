"""The scores by which `select_blocks` ranks, with a gradient."""

from nsa_jax import arguments, dispatch, keywords
from nsa_jax.array_typing import Array, Float, Int
from nsa_jax.config import NSAConfig
from nsa_jax.dispatch import Implementation
from nsa_jax.layout import Runs


@keywords.known
def importance_scores(
    query: Float[Array, "B T N H"],
    key_cmp: Float[Array, "B C K H"],
    *,
    config: NSAConfig,
    lse_cmp: Float[Array, "B T N"] | None = None,
    query_positions: Int[Array, "B T"] | Runs | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T K M"]:
    """Computes the logarithm of each selection block's importance, with a gradient (Eq. 8-10).

    This is what `select_blocks` ranks by, before it forces initial and local blocks. There no gradient flows;
    here one does, so that a loss (`selection_loss`) can teach the compressed keys and the queries. The
    softmax of the scores over the visible blocks is the share of each block in the importance. The other
    arguments are those of `compressed_attention`.

    Args:
      query: rotated queries.
      key_cmp: compressed keys, see `compressed_attention`.
      config: block structure.
      lse_cmp: the `lse` that `compressed_attention` returned for the same arguments; computed anew if None.

    Returns:
      Scores `[B, T, K, M]` in float32 (float64 for float64 inputs). `M` is the number of selection blocks of
      the longest row that has `C` compressed keys. That may be one block more than the row has, which no
      query sees, so it may be cut off: `scores[..., : target.shape[-1]]`. A block whose first token comes
      after the query has `-inf`, and so have all blocks of a padding query. A block that the query sees has
      at least the logarithm of the smallest normal float32, -87.3 (float64: -708.4): it has that if no
      compressed block that the query sees overlaps it, or if all their probabilities vanish.

    Raises:
      TypeError, ValueError, NotImplementedError: as in `compressed_attention`.

    Numerics:
      As in `compressed_attention`. There are no GPU kernels: `xla` runs everywhere.

    Gradients:
      With respect to `query`, `key_cmp` and `lse_cmp`, whose part is needed: pass `lse_cmp` as it was
      returned, without `stop_gradient`. Blocks at the lower bound, and those out of sight, send none.
    """
    arrays = dict(query=query, key_cmp=key_cmp, lse_cmp=lse_cmp)
    call = arguments.check(
        importance_scores,
        arrays,
        config=config,
        query_positions=query_positions,
        segment_ids=segment_ids,
        scale=scale,
    )
    operands = dict(**arrays, **call._asdict())
    return dispatch.run("importance_scores", implementation, (query, key_cmp), operands, config=config)
