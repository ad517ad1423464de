"""Array types of the public signatures; the shape letters are those of the glossary in `docs/algorithm.md`.

B batch, T query tokens, S key tokens, W keys of the window branch (S, unless the array holds a part of the
row), N query heads, K KV heads, G = N / K query heads per KV head, H key dim, V value dim, C compression
blocks, M selection blocks, R selected blocks, D model width.
"""

from typing import NamedTuple

import jax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, PRNGKeyArray

DType = jax.typing.DTypeLike


class Attended(NamedTuple):
    """Result of one branch: `out` in the query's dtype, `lse` natural-log, float32; 0 and -inf for no key."""

    out: Float[Array, "B T N V"]
    lse: Float[Array, "B T N"]


class AttendedReads(NamedTuple):
    """`Attended`, and how many keys each query and KV head gathered."""

    out: Float[Array, "B T N V"]
    lse: Float[Array, "B T N"]
    reads: Int32[Array, "B T K"]


__all__ = [
    "Array",
    "Attended",
    "AttendedReads",
    "Bool",
    "DType",
    "Float",
    "Float32",
    "Int",
    "Int32",
    "PRNGKeyArray",
]
