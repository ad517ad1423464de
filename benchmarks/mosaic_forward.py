"""Selected attention with the forward pass in Mosaic GPU, too: what `mosaic_gpu` could be made of.

The implementation `mosaic_gpu` takes the forward pass of this branch from Triton, because that one is faster.
"""

from nsa_jax import layout
from nsa_jax.array_typing import Array, Attended, Float, Int
from nsa_jax.config import NSAConfig
from nsa_jax.kernels.mosaic_gpu.operations import FORWARD_TOO
from nsa_jax.kernels.triton import operations


def selected_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    block_indices: Int[Array, "B T K R"],
    *,
    config: NSAConfig,
    segment_ids: Int[Array, "B S"] | None = None,
) -> Attended:
    """`(out, lse)` as `nsa_jax.attention.selected_attention`, of the last `T` of `S` tokens."""
    batch, num_queries, _, dim = query.shape
    placement = layout.place(
        config, batch=batch, num_queries=num_queries, num_keys=key.shape[1], segment_ids=segment_ids
    )
    return operations.selected_attention(
        query, key, value, block_indices, placement, dim**-0.5, kernels=FORWARD_TOO
    )
