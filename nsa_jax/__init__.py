"""Native Sparse Attention (arXiv:2502.11089) for JAX."""

from nsa_jax.attention import (
    compressed_attention,
    gated_sum,
    native_sparse_attention,
    select_blocks,
    selected_attention,
    window_attention,
)
from nsa_jax.config import NSAConfig
from nsa_jax.convert import block_indices_from_ranges, segment_ids_from_cu_seqlens
from nsa_jax.dispatch import choose, unsupported_reason, use_implementation
from nsa_jax.layout import Run, Runs

# The build reads it from here: the metadata of an editable install would be those of the day it was made.
__version__ = "0.2.0"

__all__ = [
    "NSAConfig",
    "Run",
    "Runs",
    "__version__",
    "block_indices_from_ranges",
    "choose",
    "compressed_attention",
    "gated_sum",
    "native_sparse_attention",
    "segment_ids_from_cu_seqlens",
    "select_blocks",
    "selected_attention",
    "unsupported_reason",
    "use_implementation",
    "window_attention",
]
