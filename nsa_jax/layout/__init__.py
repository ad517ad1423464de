"""Index arithmetic of the three branches: which keys each query sees, in plain and in packed rows.

Every implementation and the reference take their indices from here. So a packed row, a chunk of a prompt, a
decode step and a shard of a sequence differ only in their `Placement`. `nsa_torch_ref` derives the same maps
independently.
"""

from nsa_jax.layout.blocks import (
    blocks_of_step,
    distinct_blocks,
    is_forced,
    longest_length,
    max_selection_blocks,
    num_compression_blocks,
    num_selection_blocks,
    of_slots,
    overlap_weights,
)
from nsa_jax.layout.cache import DenseCache, NSACache, TokenKeysValues
from nsa_jax.layout.placement import (
    FirstKeys,
    Index,
    Placement,
    Run,
    Runs,
    default_runs,
    place,
    positions_of,
)
from nsa_jax.layout.quantised import Quantised
from nsa_jax.layout.sequences import (
    blocks_ended,
    compression_block_starts,
    returning_ids,
    sequence_positions,
    sequence_starts,
)
from nsa_jax.layout.windows import first_tokens, token_strides, token_windows, windows_at

__all__ = [
    "DenseCache",
    "FirstKeys",
    "Index",
    "NSACache",
    "Placement",
    "Quantised",
    "Run",
    "Runs",
    "TokenKeysValues",
    "blocks_ended",
    "blocks_of_step",
    "compression_block_starts",
    "default_runs",
    "distinct_blocks",
    "first_tokens",
    "is_forced",
    "longest_length",
    "max_selection_blocks",
    "num_compression_blocks",
    "num_selection_blocks",
    "of_slots",
    "overlap_weights",
    "place",
    "positions_of",
    "returning_ids",
    "sequence_positions",
    "sequence_starts",
    "token_strides",
    "token_windows",
    "windows_at",
]
