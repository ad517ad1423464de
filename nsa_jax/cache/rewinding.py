"""The way back: the newest tokens of a row are taken out of a cache again.

What a cache holds of a row follows from its length: a token beyond it is never read, and the next one is
written over it. Only the rings forget, as a token takes the place of the one `size` before it. They hold
`step_capacity - 1` tokens more than a step reads, so that many can be taken back.
"""

from typing import Any

import jax
import jax.numpy as jnp

from nsa_jax.array_checks import check_values, on_host
from nsa_jax.array_typing import Array, Int
from nsa_jax.cache import checks
from nsa_jax.layout import DenseCache, NSACache
from nsa_jax.layout.cache import ENDLESS
from nsa_jax.sharding.explicit import alike

type Cache = NSACache | DenseCache

LONGEST_STEP = 8  # the `step_capacity` that `init_cache` gives by default
LONGEST_WAY_BACK = LONGEST_STEP - 1

# What a token leaves behind for ever in an `NSACache`, in a place of its own; the rest is rings and counts.
_ARRAYS = ("key_slc", "value_slc", "key_cmp", "value_cmp")
LASTING = (*_ARRAYS, *(f"{name}_scale" for name in _ARRAYS), "kept")


def rewind(cache: Cache, num_tokens: Int[Array, " B"]) -> Cache:
    """Takes back the newest tokens of each row, such as drafts that were refused.

    The steps after it give what they would give had these tokens never been appended.

    Args:
      cache: the cache that an earlier step returned.
      num_tokens: how many tokens to take back of each row: no more than it has, and 0 .. `step_capacity - 1`
        in all since it was longest. If more were taken back, the window and compression branches would read
        other tokens.

    Returns:
      The cache with shorter rows. All arrays but `lengths` are those that were passed.

    Raises:
      TypeError: `cache` is neither an `NSACache` nor a `DenseCache`, or `num_tokens` no array of integers.
      ValueError: arrays do not fit together; or, where the host has the values, a number is negative or
        larger than the length of its row.
    """
    if not is_cache(cache):
        raise TypeError(
            f"cache must be an NSACache or a DenseCache, got {type(cache).__name__}. Pass what "
            "init_cache or a step gave."
        )
    checks.check_arrays(rewind, dict(cache=cache), num_tokens=num_tokens)
    check_values(0, cache.max_length if isinstance(cache, NSACache) else ENDLESS, lengths=cache.lengths)
    counts, lengths = on_host(num_tokens), on_host(cache.lengths)
    if counts is not None and lengths is not None and ((counts < 0) | (counts > lengths)).any():
        raise ValueError(
            f"num_tokens must be at least 0 and at most what the row has, got {counts.tolist()} for rows of "
            f"{lengths.tolist()} tokens. Pass fewer."
        )
    lengths, num_tokens = alike(lengths=cache.lengths, num_tokens=jnp.asarray(num_tokens, jnp.int32))
    return cache._replace(lengths=lengths - num_tokens)


def is_cache(x: Any) -> bool:
    """Whether it is a cache of one layer."""
    return isinstance(x, NSACache | DenseCache)


def forgetful(cache: Cache, max_length: int) -> Cache:
    """The arrays of a cache that later tokens change for good; the others are None.

    Those are the rings and the counts. A ring that is not shorter than the longest row never forgets.
    """
    lasting: dict[str, Any] = dict.fromkeys(LASTING)
    if isinstance(cache, DenseCache):
        is_ring = cache.key.shape[1] < max_length
        lasting = {} if is_ring else dict.fromkeys(("key", "value", "key_scale", "value_scale"))
    return cache._replace(**lasting)


def recalled(cache: Cache, past: Cache) -> Cache:
    """The cache as it was when `past` was made of it by `forgetful`."""
    return type(cache)(*(now if then is None else then for now, then in zip(cache, past, strict=True)))


def each_cache(function: Any, caches: Any, *others: Any) -> Any:
    """Maps the caches of layers, wherever they are in a tree. Raises TypeError if there is anything else."""

    def apply(cache: Any, *rest: Any) -> Any:
        if not is_cache(cache):
            raise TypeError(
                "caches of a model must be made of NSACache and DenseCache to go back in them, got "
                f"{type(cache).__name__}. Build the model of layers of nsa_jax.nn, or start anew."
            )
        return function(cache, *rest)

    return jax.tree.map(apply, caches, *others, is_leaf=is_cache)


def rewind_each(caches: Any, num_tokens: Int[Array, " B"]) -> Any:
    """`rewind` of the caches of all layers of a model."""
    return each_cache(lambda cache: rewind(cache, num_tokens), caches)
