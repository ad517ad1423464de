"""The operations of Native Sparse Attention (arXiv:2502.11089).

Arrays are laid out as `[B, T, N, H]`: batch, query tokens, query heads, key dim. Keys and values have `K` KV
heads; query heads `k G .. (k+1) G - 1` share KV head `k`, where `G = N / K`. Each branch takes its own keys
and values (section 3.3.3); to share them, pass the same array twice.

These rules hold for every operation:

* **Positions.** Key `s` of a row has index `s`. `query_positions` holds the key index of each query, either
  as an array `[B, T]` or as `Runs` of consecutive tokens, which the GPU kernels run faster. By default the
  queries are the last `T` of the `S` tokens. In an array, -1 marks padding, and so does any index at or
  beyond the end of the row. A query sees the keys at or before its own index.
* **Packed rows.** With `segment_ids [B, S]` a row holds several sequences: each non-zero id is one contiguous
  run of tokens, and 0 is padding. A query belongs to the sequence of the key at its index. Blocks are counted
  from the first token of that sequence.
* **A query that sees no key** (a padding query, or one with no complete compressed block or no selected
  block) gets output 0, log-sum-exp `-inf` and zero gradients from each branch. The gated sum of these is 0
  unless a gate is not finite.
* **NaN and infinity** do not spread: what another row, KV head, sequence, padding token or future token holds
  never reaches a result.
* **Precision.** Logits, softmax, sums and log-sum-exps are float32 (float64 for float64 inputs); outputs have
  the query's dtype. Log-sum-exps are natural logarithms.
* **Errors.** Wrong shapes, dtypes and options raise `ValueError` or `TypeError` at trace time. Of the values
  of index arrays it is only checked that they fit into 32 bits, where the host has them: in NumPy arrays, and
  in JAX arrays on a CPU. `nsa_jax.debug` checks the rest. `NotImplementedError` means that the implementation
  asked for by name cannot run the call.
* **Transformations.** `jit`, `grad`, `vmap`, `scan`, `remat` and `jax.export` work (to export Triton kernels,
  disable a safety check, see the README). Reverse-mode gradients are deterministic. There is no `jax.jvp` of
  an operation, but on `xla` the `jvp` of a gradient gives a Hessian-vector product:
  `jax.jvp(jax.grad(f), (x,), (v,))[1]`.
"""

from nsa_jax.attention.block_scores import block_scores
from nsa_jax.attention.compressed import compressed_attention
from nsa_jax.attention.gates import gated_sum
from nsa_jax.attention.importance import importance_scores
from nsa_jax.attention.probabilities import block_probabilities, selected_probabilities
from nsa_jax.attention.selected import selected_attention
from nsa_jax.attention.selection import select_blocks, select_by_index, top_blocks
from nsa_jax.attention.selection_loss import selection_loss
from nsa_jax.attention.whole import native_sparse_attention
from nsa_jax.attention.window import window_attention

__all__ = [
    "block_probabilities",
    "block_scores",
    "compressed_attention",
    "gated_sum",
    "importance_scores",
    "native_sparse_attention",
    "select_blocks",
    "select_by_index",
    "selected_attention",
    "selected_probabilities",
    "selection_loss",
    "top_blocks",
    "window_attention",
]
