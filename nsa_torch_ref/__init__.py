"""Native Sparse Attention (arXiv:2502.11089) in minimal PyTorch: an independent check of `nsa_jax`.

It never imports `nsa_jax` or JAX. `masks` derives the index arithmetic from the paper, `attention` computes
the branches by PyTorch's `scaled_dot_product_attention` under boolean masks, and `module` has a layer with
the same parameters as that of `nsa_jax.nn`.
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
