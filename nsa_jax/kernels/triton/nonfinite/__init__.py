"""Recomputes results that are not finite, so that NaN and infinity reach only those who see them.

The kernels multiply whole tiles and give the weight 0 to what a query does not see; but 0 times NaN is NaN.
Masking the values inside their loops takes registers that they do not have. So they run as if all numbers
were finite. These kernels then look for results that are not, and compute those again: one query or one key
at a time, loading only what is seen, and writing in place. Where all is finite they read a part of the
results and end.
"""

from nsa_jax.kernels.triton.nonfinite.backward_key import recompute_key_gradients
from nsa_jax.kernels.triton.nonfinite.backward_query import recompute_query_gradient
from nsa_jax.kernels.triton.nonfinite.forward import recompute_forward
from nsa_jax.kernels.triton.nonfinite.visible_keys import VisibleKeys, visible_in_blocks

__all__ = [
    "VisibleKeys",
    "recompute_forward",
    "recompute_key_gradients",
    "recompute_query_gradient",
    "visible_in_blocks",
]
