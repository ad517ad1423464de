"""What `nsa_jax.choose` picks on this machine, for a few shapes that stand for many."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import nsa_jax
from nsa_jax import layout
from nsa_jax.dispatch import OPERATIONS

DTYPES = ("bfloat16", "float16", "float32")
TOKENS = 4096
CONFIG = nsa_jax.NSAConfig()


class Sizes(NamedTuple):
    """Heads and dims of a layer."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads} heads of {self.key_dim}/{self.value_dim}"


# The layer of the paper with two key dims, and a small layer.
SIZES = (Sizes(64, 4, 128, 128), Sizes(64, 4, 192, 128), Sizes(16, 2, 64, 64))


class Outcome(NamedTuple):
    """The calls for which the choice is the same: all combinations of the operations, sizes and dtypes.

    Attributes:
      operations, sizes, dtypes: of the calls.
      implementation: what `choose` picks.
      reason: why, in one sentence.
      refused: `(names, rule)` of the others: the rule that a call does not keep, in short.
    """

    operations: tuple[str, ...]
    sizes: tuple[str, ...]
    dtypes: tuple[str, ...]
    implementation: str
    reason: str
    refused: tuple[tuple[str, str], ...]


def choices() -> list[Outcome]:
    """The choice for each operation, size and dtype; calls with the same outcome stand together."""
    rows: list[Any] = [
        _outcome(operation, sizes, dtype) for operation in OPERATIONS for sizes in SIZES for dtype in DTYPES
    ]
    for axis in ("dtypes", "sizes", "operations"):
        groups = dict[Any, tuple[str, ...]]()
        for row in rows:
            rest = row._replace(**{axis: ()})
            groups[rest] = groups.get(rest, ()) + getattr(row, axis)
        rows = [rest._replace(**{axis: values}) for rest, values in groups.items()]
    return rows


def _outcome(operation: str, sizes: Sizes, dtype: str) -> Outcome:
    choice = nsa_jax.choose(operation, *arrays(operation, sizes, dtype), config=CONFIG)
    # The values behind "got" say what the call is; without them, calls that break the same rule agree.
    refused = tuple((name, reason.partition(", got ")[0]) for name, reason in choice.refused)
    return Outcome((operation,), (str(sizes),), (dtype,), choice.implementation, choice.reason, refused)


def arrays(operation: str, sizes: Sizes, dtype: str) -> list[jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the arrays of an operation, as `nsa_jax.choose` takes them."""

    def array(tokens: int, heads: int, dim: int, of: Any = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, tokens, heads, dim), jnp.dtype(of))

    num_blocks = layout.num_compression_blocks(TOKENS, CONFIG)
    heads, kv_heads, key_dim, value_dim = sizes
    query, gates = array(TOKENS, heads, key_dim), array(TOKENS, heads, 3)
    key, value = array(TOKENS, kv_heads, key_dim), array(TOKENS, kv_heads, value_dim)
    compressed = [array(num_blocks, kv_heads, key_dim), array(num_blocks, kv_heads, value_dim)]
    index_query = jax.ShapeDtypeStruct((1, TOKENS, kv_heads, 1, key_dim), jnp.dtype(dtype))
    indexed = [index_query, array(TOKENS, 1, key_dim)]
    blocks = array(TOKENS, kv_heads, CONFIG.num_selected_blocks, "int32")
    return {
        "compressed_attention": [query, *compressed],
        "select_blocks": [query, compressed[0]],
        "block_scores": indexed,
        "select_by_index": indexed,
        "top_blocks": [array(TOKENS, kv_heads, layout.num_selection_blocks(TOKENS, CONFIG))],
        "selected_attention": [query, key, value, blocks],
        "window_attention": [query, key, value],
        "block_probabilities": [query, key],
        "selected_probabilities": [query, key, blocks],
        "importance_scores": [query, compressed[0]],
        "gated_sum": [array(TOKENS, heads, value_dim)] * 3 + [gates],
        "native_sparse_attention": [query, *compressed, key, value, key, value, gates],
        "decode_step": [array(1, heads, key_dim), *compressed],
        "dense_decode_step": [array(1, heads, key_dim), key, value],
    }[operation]
