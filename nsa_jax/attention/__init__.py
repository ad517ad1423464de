"""The operations of Native Sparse Attention (arXiv:2502.11089): shapes, meaning and dispatch in one place.

Arrays are `[B, T, N, H]`: batch, query tokens, query heads, key dim. Keys have `K` KV heads; query heads
`k G .. (k+1) G - 1` belong to KV head `k`, `G = N / K`. Each branch may get keys and values of its own
(section 3.3.3) or share them by passing the same array.

What all operations share:

* **Positions.** Key `s` of a row has index `s`. `query_positions` are the key indices of the queries, by
  default the last `T` of the `S` keys: an array [B, T] in which -1 marks padding (so does any index that the
  row does not have), or `Runs` of consecutive tokens, which kernels run faster. A query sees keys at or
  before its own index.
* **Packed rows.** `segment_ids [B, S]` give several sequences a row: each non-zero id is one contiguous run,
  0 is padding. A query belongs to the sequence of the key at its index; blocks are counted from that
  sequence's first token.
* **A query that sees no key** (padding, no compressed block yet, no block selected) gets output 0,
  log-sum-exp `-inf` and zero gradients.
* **NaN and infinity** stay where they belong: what another row, KV head, sequence, padding token or future
  token holds never reaches a result.
* **Precision.** Logits, softmax and sums are float32 (float64 for float64 inputs); outputs have the query's
  dtype and log-sum-exps are natural-log, float32.
* **Errors.** `ValueError` and `TypeError` for shapes and dtypes, at trace time; values of index arrays are
  not checked here but by `nsa_jax.debug`. `NotImplementedError` if the named implementation cannot run the
  call.
* **Transformations.** jit, grad, vmap, scan, remat and export (of Triton kernels with a safety check
  disabled, see the README); reverse-mode gradients, deterministic. `jax.jvp` of an operation is missing. A
  Hessian-vector product works as the `jvp` of a gradient on `xla`: `jax.jvp(jax.grad(f), (x,), (v,))[1]`.
"""

from nsa_jax.attention.compressed import compressed_attention
from nsa_jax.attention.gates import gated_sum
from nsa_jax.attention.selected import selected_attention
from nsa_jax.attention.selection import select_blocks
from nsa_jax.attention.whole import native_sparse_attention
from nsa_jax.attention.window import window_attention

__all__ = [
    "compressed_attention",
    "gated_sum",
    "native_sparse_attention",
    "select_blocks",
    "selected_attention",
    "window_attention",
]
