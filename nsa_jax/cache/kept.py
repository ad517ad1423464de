"""What the selector of a layer keeps of each token, beside keys and values."""

from typing import Any

import jax
import jax.numpy as jnp

from nsa_jax.array_typing import Array, Int
from nsa_jax.cache import checks
from nsa_jax.layout import NSACache, Quantised, slots
from nsa_jax.layout.quantised import check_quantised
from nsa_jax.sharding.explicit import Sharing, per_shard

_KEEP = Sharing(results=("kept",), alike=False)


def keep(cache: NSACache, new: Any, *, num_tokens: Int[Array, " B"] | None = None) -> NSACache:
    """Writes what a selector keeps of new tokens, so that it can choose before the step that appends them.

    The tokens are those of the `prefill` or `decode_step` that comes next: token `s` of a row goes to slot
    `s`, and a row without room for all of them keeps what it held. Lengths stay as they are.

    Args:
      cache: a cache whose `kept` is a tree of arrays `[B, S, ...]`.
      new: a tree like `cache.kept`, of arrays `[B, T, ...]`; cast or rounded to its dtypes.
      num_tokens: how many of the `T` tokens of each row are real; all by default.

    Returns:
      The cache with the tokens in `kept`.

    Raises:
      TypeError: `cache` is not an `NSACache`, or `num_tokens` not an array of integers.
      ValueError: `new` is not a tree like `cache.kept`, of arrays with the same axes but that of tokens;
        arrays of the cache do not fit together; or lengths or `num_tokens` are out of range, as in
        `decode_step`.
    """
    checks.check_kind(cache)
    checks.check_arrays(keep, dict(cache=cache), num_tokens=num_tokens)
    for name, tree in (("cache.kept", cache.kept), ("new", new)):
        for x in jax.tree.leaves(tree, is_leaf=_is_quantised):
            check_quantised(**{name: x})
    held, given = (jax.tree.map(_beside_tokens, tree, is_leaf=_is_quantised) for tree in (cache.kept, new))
    if held != given:
        raise ValueError(
            "new must have the form of cache.kept, [B, ...] without the axis of tokens, got "
            f"{given} for {held}. Call init_cache of this layer."
        )
    if not jax.tree.leaves(new):
        return cache
    checks.check_lengths(cache.lengths, cache.max_length, jax.tree.leaves(new)[0].shape[1], num_tokens)
    operands = dict(kept=cache.kept, new=new, lengths=cache.lengths, num_tokens=num_tokens)
    operands = jax.tree.map(jnp.asarray, operands)
    return cache._replace(kept=per_shard(_keep, _KEEP, **operands, max_length=cache.max_length))


def _is_quantised(x: Any) -> bool:
    return isinstance(x, Quantised)


def _beside_tokens(x: Any) -> tuple[int, ...]:
    shape = x.shape if isinstance(x, Quantised) else jnp.shape(x)
    return (*shape[:1], *shape[2:])


def _keep(kept: Any, new: Any, lengths: Array, num_tokens: Array | None, max_length: int) -> Any:
    num_new = jax.tree.leaves(new)[0].shape[1]
    admitted = slots.admit(lengths, max_length, num_new, num_tokens)
    offset = jnp.arange(num_new, dtype=jnp.int32)[None]
    where = admitted.start[:, None] + offset, offset < admitted.num_tokens[:, None]

    def write(array: Any, x: Array) -> Any:
        return slots.write(array, x if isinstance(array, Quantised) else x.astype(array.dtype), *where)

    return jax.tree.map(write, kept, new, is_leaf=_is_quantised)
