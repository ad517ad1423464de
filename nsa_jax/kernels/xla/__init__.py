"""The `xla` implementation: plain JAX, for any platform, float dtype and shape."""

from nsa_jax.kernels.xla.decode import decode_step
from nsa_jax.kernels.xla.dense_decode import dense_decode_step
from nsa_jax.kernels.xla.operations import (
    block_scores,
    compressed_attention,
    gated_sum,
    native_sparse_attention,
    select_blocks,
    select_by_index,
    selected_attention,
    top_blocks,
    window_attention,
)
from nsa_jax.kernels.xla.probabilities import (
    block_probabilities,
    importance_scores,
    selected_probabilities,
)

__all__ = [
    "block_probabilities",
    "block_scores",
    "compressed_attention",
    "decode_step",
    "dense_decode_step",
    "gated_sum",
    "importance_scores",
    "native_sparse_attention",
    "select_blocks",
    "select_by_index",
    "selected_attention",
    "selected_probabilities",
    "top_blocks",
    "window_attention",
]
