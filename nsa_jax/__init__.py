"""Native Sparse Attention (arXiv:2502.11089) for JAX.

This module has the operations on arrays, the block structure `NSAConfig`, and the choice of an
implementation. `import nsa_jax` also loads two submodules:

* `nsa_jax.debug`: checks of the values of index arrays;
* `nsa_jax.remat`: the names for a rematerialisation policy.

Import the others by name:

* `nsa_jax.nn`: Flax NNX layers;
* `nsa_jax.model`: a small language model and its checkpoints;
* `nsa_jax.generate`: text generation in one compiled program;
* `nsa_jax.evaluate`: whether a model finds what stands far back;
* `nsa_jax.cache`: the decoding state of a layer, and the steps that extend it.

`nsa_jax.attention` describes what all operations have in common.
"""

from nsa_jax import debug as debug
from nsa_jax import remat as remat
from nsa_jax.attention import (
    block_probabilities,
    block_scores,
    compressed_attention,
    gated_sum,
    importance_scores,
    native_sparse_attention,
    select_blocks,
    select_by_index,
    selected_attention,
    selected_probabilities,
    selection_loss,
    top_blocks,
    window_attention,
)
from nsa_jax.config import NSAConfig
from nsa_jax.convert import block_indices_from_ranges, segment_ids_from_cu_seqlens
from nsa_jax.dispatch import choose, unsupported_reason, use_implementation
from nsa_jax.layout import Run, Runs

# The build reads the version from here. The metadata of an editable install can be out of date.
__version__ = "0.3.0"

__all__ = [
    "NSAConfig",
    "Run",
    "Runs",
    "__version__",
    "block_indices_from_ranges",
    "block_probabilities",
    "block_scores",
    "choose",
    "compressed_attention",
    "gated_sum",
    "importance_scores",
    "native_sparse_attention",
    "segment_ids_from_cu_seqlens",
    "select_blocks",
    "select_by_index",
    "selected_attention",
    "selected_probabilities",
    "selection_loss",
    "top_blocks",
    "unsupported_reason",
    "use_implementation",
    "window_attention",
]
