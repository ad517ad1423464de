"""Useful arithmetic of one token, to predict how long a run takes and to say how fast it was."""

import numpy as np

from nsa_jax.model import TransformerConfig


def flops_per_trained_token(config: TransformerConfig, length: int) -> float:
    """Floating-point operations of forward and backward (twice the forward) for one token of a sequence.

    Only products count, and of the keys only those a query sees: tiles that masks empty out are not useful.
    """
    width, heads, kv_heads = config.model_dim, config.num_heads, config.num_kv_heads
    head_dim = width // heads if config.head_dim is None else config.head_dim
    mlp = -(-8 * width // 24) * 8 if config.mlp_dim is None else config.mlp_dim
    position = np.arange(length)
    multiplied: float = 2 * width * heads * head_dim + 3 * width * mlp
    if config.attention == "dense":
        multiplied += 2 * width * kv_heads * head_dim
        attended = (position + 1).mean()
        scored = 0.0
    else:
        nsa = config.nsa
        block, stride, selected = nsa.compression_block_size, nsa.compression_stride, nsa.selection_block_size
        gate, hidden = max(width // 4, 8), 2 * head_dim
        multiplied += 6 * width * kv_heads * head_dim + width * gate + gate * heads * 3
        multiplied += 2 * kv_heads * (block * head_dim * hidden + hidden * head_dim) / stride
        compressed = np.maximum((position + 1 - block) // stride + 1, 0)
        # The last of the chosen blocks is the query's own, of which it sees the tokens up to itself.
        whole = np.minimum(position // selected, nsa.num_selected_blocks - 1) * selected
        read = compressed + whole + position % selected + 1 + np.minimum(position + 1, nsa.window_size)
        attended, scored = read.mean(), compressed.mean()
    attention = heads * head_dim * (2 * attended + scored)
    return 3 * 2 * (config.num_layers * (multiplied + attention) + width * config.vocab_size)
