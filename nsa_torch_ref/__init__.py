"""Native Sparse Attention in minimal PyTorch: an independent check of `nsa_jax`, which it never imports.

Index arithmetic is derived from the paper (`masks`), the branches are PyTorch's own
`scaled_dot_product_attention` under boolean masks (`attention`), the layer mirrors `nsa_jax.nn` (`module`).
"""

from nsa_torch_ref.attention import (
    compressed_attention,
    gated_sum,
    importance_scores,
    native_sparse_attention,
    select_blocks,
    selected_attention,
    window_attention,
)
from nsa_torch_ref.masks import NSAConfig
from nsa_torch_ref.module import Compressor, Gate, NSAAttention

__all__ = [
    "Compressor",
    "Gate",
    "NSAAttention",
    "NSAConfig",
    "compressed_attention",
    "gated_sum",
    "importance_scores",
    "native_sparse_attention",
    "select_blocks",
    "selected_attention",
    "window_attention",
]
