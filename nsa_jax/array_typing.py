"""Array types of the public signatures, and what the shape letters in them mean.

The letters are those of the glossary in `docs/algorithm.md`:

* `B` batch, `T` query tokens, `S` key tokens of a row;
* `W` keys of the window branch: `S`, unless the array holds only a part of the row;
* `N` query heads, `K` KV heads, `G = N / K` query heads per KV head;
* `H` key dim, `V` value dim, `D` model width;
* `J` index heads per KV head, `E` index dim;
* `C` compression blocks, `M` selection blocks, `R` selected blocks of a query;
* `branches` those that there are of cmp, slc and win, in this order.
"""

from typing import NamedTuple

import jax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, PRNGKeyArray

from nsa_jax.keywords import gone

DType = jax.typing.DTypeLike


class Attended(NamedTuple):
    """Result of one branch.

    Attributes:
      out: attention output in the query's dtype; 0 for a query that sees no key.
      lse: natural-log-sum-exp of the scaled logits, in float32 (float64 for float64 inputs); `-inf` for a
        query that sees no key.
    """

    out: Float[Array, "B T N V"]
    lse: Float[Array, "B T N"]


__all__ = [
    "Array",
    "Attended",
    "Bool",
    "DType",
    "Float",
    "Float32",
    "Int",
    "Int32",
    "PRNGKeyArray",
]

__getattr__ = gone(__name__, AttendedReads="nsa_jax.cache.count_reads")
