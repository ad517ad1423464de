"""Native Sparse Attention (arXiv:2502.11089) in minimal PyTorch: an independent check of `nsa_jax`.

It never imports `nsa_jax` or JAX. `masks` derives the index arithmetic from the paper, `attention` computes
the branches by PyTorch's `scaled_dot_product_attention` under boolean masks, `indexer` and `distillation`
score blocks and teach those scores, and `module` has a layer with the same parameters as that of
`nsa_jax.nn`.
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
from nsa_torch_ref.distillation import block_probabilities, selected_probabilities, selection_loss
from nsa_torch_ref.indexer import block_scores
from nsa_torch_ref.masks import NSAConfig
from nsa_torch_ref.module import Compressor, Gate, Indexer, IndexerConfig, NSAAttention

__all__ = [
    "Compressor",
    "Gate",
    "Indexer",
    "IndexerConfig",
    "NSAAttention",
    "NSAConfig",
    "block_probabilities",
    "block_scores",
    "compressed_attention",
    "gated_sum",
    "importance_scores",
    "native_sparse_attention",
    "select_blocks",
    "selected_attention",
    "selected_probabilities",
    "selection_loss",
    "window_attention",
]
