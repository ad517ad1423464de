"""Results that are not finite, formed again key by key: NaN and infinity stay with those who see them.

The kernels multiply whole tiles, and give what a query does not see the weight 0; but 0 times NaN is NaN. To
keep such numbers apart in their loops costs registers that they do not have. So they work as if all numbers
were finite, and these kernels look once more at what is not finite in their results: one query or one key at
a time, loading nothing that is not seen, and writing in place. Where all is finite, as it always should be,
they read a part of the results and end.
"""

from nsa_jax.kernels.triton.mending.backward_key import mend_key_gradients
from nsa_jax.kernels.triton.mending.backward_query import mend_query_gradient
from nsa_jax.kernels.triton.mending.forward import mend_forward
from nsa_jax.kernels.triton.mending.sight import Sight, sight_of_blocks

__all__ = ["Sight", "mend_forward", "mend_key_gradients", "mend_query_gradient", "sight_of_blocks"]
