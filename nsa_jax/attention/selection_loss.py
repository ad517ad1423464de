"""The loss by which a selection learns from a target."""

import jax
import jax.numpy as jnp

from nsa_jax import keywords
from nsa_jax.arguments import check_not_empty
from nsa_jax.array_checks import check_arrays
from nsa_jax.array_typing import Array, Float


@keywords.known
def selection_loss(scores: Float[Array, "B T K M"], target: Float[Array, "B T K M"]) -> Float[Array, "B T K"]:
    """Computes the Kullback-Leibler divergence of the softmax of block scores from a target.

    `KL(p || q) = sum_j p_j (log p_j - log q_j)` for each query and KV head. The sum is over the blocks whose
    score is not `-inf`. `q` is the softmax of the scores over these blocks, and `p` is the target, divided by
    its sum over these blocks. What the target gives to other blocks is left out.

    Args:
      scores: scores of the blocks, such as `importance_scores`; `-inf` for those out of sight. Or the scores
        of the selected blocks alone, one for each slot, with `-inf` in unused slots.
      target: mass of each block, at least 0, such as `block_probabilities`; for slots
        `selected_probabilities`. It need not sum to 1, and may be of another dtype.

    Returns:
      The loss `[B, T, K]` in float32 (float64 if an argument is). It is 0 for a query without visible blocks
      and for one whose target is 0 in all of them.

    Raises:
      TypeError: an argument is not an array, or not of a floating dtype.
      ValueError: shapes disagree, or the arrays are empty.

    Numerics:
      Sums and logarithms are in the dtype of the result. The loss is finite for finite scores. NaN in a score
      or target stays in its query and KV head.

    Gradients:
      With respect to `scores`, `q - p` for each query; the target gets none.
    """
    check_not_empty(check_arrays(selection_loss, scores=scores, target=target), "BTKM")
    accumulate = jnp.promote_types(jnp.promote_types(scores.dtype, target.dtype), jnp.float32)
    scores, target = jnp.asarray(scores, accumulate), jnp.asarray(target, accumulate)
    seen = scores != -jnp.inf
    mass = jnp.where(seen, jax.lax.stop_gradient(target), 0)
    total = mass.sum(axis=-1, keepdims=True)
    share = mass / jnp.where(total == 0, 1, total)
    largest = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    shifted = jnp.where(seen, scores - jnp.where(largest == -jnp.inf, 0, largest), 0)
    normaliser = jnp.where(seen, jnp.exp(shifted), 0).sum(axis=-1, keepdims=True)
    log_softmax = shifted - jnp.log(jnp.where(normaliser == 0, 1, normaliser))
    has_mass = share != 0  # NaN has
    log_share = jnp.log(jnp.where(has_mass, share, 1))
    return jnp.where(has_mass, share * (log_share - log_softmax), 0).sum(axis=-1)
