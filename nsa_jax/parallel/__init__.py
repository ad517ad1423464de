"""Context parallelism: one row on many devices, each with a part of its tokens.

The tokens of a row are cut into chunks. In zigzag order there are `2 P` of them for `P` devices, and device
`i` holds chunks `i` and `2 P - 1 - i`, so all devices have the same work although later queries see more.
`to_zigzag` and `from_zigzag` reorder any array with a token axis. In contiguous order device `i` holds chunk
`i` of `P`.

`context_attention` and `context_selection` are for use inside `jax.shard_map`. `nsa_jax.nn.NSAAttention` with
a `context_axis` calls them in a `shard_map` of its own. `docs/parallel.md` says what moves between devices.
"""

from nsa_jax.parallel.attention import context_attention, context_selection
from nsa_jax.parallel.order import Order, from_zigzag, padded_length, to_zigzag, token_indices

__all__ = [
    "Order",
    "context_attention",
    "context_selection",
    "from_zigzag",
    "padded_length",
    "to_zigzag",
    "token_indices",
]
