"""Array types of the public signatures; the shape letters are those of the glossary in `docs/algorithm.md`.

B batch, T query tokens, S key tokens, N query heads, K KV heads, G = N / K query heads per KV head, H key
dim, V value dim, C compression blocks, M selection blocks, R selected blocks, D model width.
"""

import jax
from jaxtyping import Array, Bool, Float, Int, Int32, PRNGKeyArray

DType = jax.typing.DTypeLike

__all__ = ["Array", "Bool", "DType", "Float", "Int", "Int32", "PRNGKeyArray"]
