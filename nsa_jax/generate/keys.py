"""Random keys, of which each row of a batch has its own."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from nsa_jax.array_typing import Array, PRNGKeyArray

THREEFRY = "threefry2x32"  # JAX's default kind of keys


def is_keys(keys: Any) -> bool:
    """Whether `keys` are typed keys of `jax.random.key`."""
    return isinstance(keys, jax.Array) and jnp.issubdtype(keys.dtype, jax.dtypes.prng_key)


def mappable(keys: PRNGKeyArray) -> PRNGKeyArray:
    """Makes threefry keys of keys of another kind.

    Under `vmap`, JAX's "rbg" and "unsafe_rbg" draw for all rows from the first key.
    """
    if str(jax.random.key_impl(keys)) == THREEFRY:
        return keys

    def absorb(words: Array) -> PRNGKeyArray:
        return functools.reduce(jax.random.fold_in, words, jax.random.key(0, impl=THREEFRY))

    for _ in keys.shape:
        absorb = jax.vmap(absorb)
    return absorb(jax.random.key_data(keys))
