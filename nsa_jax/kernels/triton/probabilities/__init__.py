"""What attention gives to selection blocks, to all or to the selected ones: targets of a selection."""

from nsa_jax import layout
from nsa_jax.array_typing import Array, Float
from nsa_jax.kernels.triton.gpu import shape_of
from nsa_jax.kernels.triton.probabilities.blocks import weigh_blocks
from nsa_jax.kernels.triton.probabilities.log_sum_exp import dense_log_sum_exp
from nsa_jax.kernels.triton.probabilities.slots import selected_probabilities
from nsa_jax.kernels.triton.probabilities.steps import query_places
from nsa_jax.kernels.triton.sizes import choose_sizes
from nsa_jax.kernels.triton.sizes.probabilities import BLOCK_PROBABILITIES, ProbabilitySizes
from nsa_jax.layout import Placement

__all__ = ["block_probabilities", "selected_probabilities"]


def block_probabilities(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    lse: Float[Array, "B T N"] | None,
    placement: Placement,
    *,
    scale: float,
    reduce: str,
    sizes: ProbabilitySizes | None = None,
) -> Float[Array, "B T K M"]:
    """The probability of each block, as `nsa_jax.block_probabilities` returns it.

    Without `lse` a kernel computes it first. `sizes` are chosen by shape if None.
    """
    if sizes is None:
        sizes = choose_sizes(BLOCK_PROBABILITIES, shape_of(query, key))
    if scale <= 0:  # the kernels take the largest product for the largest logit
        query, scale = (-query, -scale) if scale < 0 else (query * 0, 1.0)
    places = query_places(placement)
    if lse is None:
        lse = dense_log_sum_exp(query, key, places, scale, sizes)
    block_size = placement.config.selection_block_size
    num_blocks = layout.num_selection_blocks(key.shape[1], placement.config)
    return weigh_blocks(query, key, lse, places, scale, sizes, block_size, num_blocks, reduce == "max")
