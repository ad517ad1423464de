"""Recomputes results that are not finite, so that NaN and infinity reach only queries and keys that see them.

The main kernels multiply whole tiles, with weight 0 where a query does not see a key; but 0 times NaN is NaN.
To mask the values inside their loops would take registers that they do not have. So they run as if all
numbers were finite. The kernels here then read a part of the results and compute again what is not finite:
one query or one key at a time, loading only the keys that it sees or the queries that see it, in place.
"""

from nsa_jax.kernels.triton.nonfinite.backward_key import recompute_key_gradients
from nsa_jax.kernels.triton.nonfinite.backward_query import recompute_query_gradient
from nsa_jax.kernels.triton.nonfinite.branches import (
    Branch,
    Saved,
    VisibleKeys,
    visible_in_blocks,
)
from nsa_jax.kernels.triton.nonfinite.forward import Outputs, recompute_forward
from nsa_jax.kernels.triton.nonfinite.probabilities import recompute_probabilities

__all__ = [
    "Branch",
    "Outputs",
    "Saved",
    "VisibleKeys",
    "recompute_forward",
    "recompute_key_gradients",
    "recompute_probabilities",
    "recompute_query_gradient",
    "visible_in_blocks",
]
