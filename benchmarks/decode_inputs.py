"""Inputs of the decode benchmarks: caches that hold random tokens, new tokens, compressors."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import layers
from benchmarks.inputs import Shape, key
from nsa_jax import cache
from nsa_jax.array_typing import Array
from nsa_jax.config import NSAConfig
from nsa_jax.dispatch import Implementation
from nsa_jax.nn import Compressor
from nsa_jax.nn.rotary import DEFAULT_BASE, Rotary

NUM_STEPS = 64  # of one loop; the cache has room for their tokens beyond `S`
TOKEN_NAMES = cache.TokenKeysValues._fields

type Compression = Literal["mean", "mlp"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Sizes of one measurement; `shape.length` tokens a row are in the cache before the first step."""

    shape: Shape
    config: NSAConfig
    implementation: Implementation
    new_tokens: int = 1
    compression: Compression = "mean"

    @property
    def max_length(self) -> int:
        """Tokens of a row after the last step."""
        return self.shape.length + NUM_STEPS * self.new_tokens

    @property
    def new(self) -> Shape:
        """That of the tokens of a step."""
        return dataclasses.replace(self.shape, length=self.new_tokens)

    @property
    def cache_sizes(self) -> dict[str, Any]:
        """Arguments of the caches' constructors."""
        shape = self.shape
        dims = {"key_dim": shape.key_dim, "value_dim": shape.value_dim, "dtype": shape.dtype}
        return dims | {"num_kv_heads": shape.kv_heads}


def compression(setting: Setting, number: int) -> cache.Compression:
    """The mean without rotation (angles change no time), or the MLP with rotation."""
    if setting.compression == "mean":
        return cache.Compression()
    shape, rngs = setting.shape, nnx.Rngs(number)
    dtype = jnp.dtype(shape.dtype)
    dims = (shape.key_dim, shape.value_dim)
    both = [Compressor(dim, setting.config, param_dtype=dtype, rngs=rngs).weights(dtype) for dim in dims]
    # The last layer starts at zero.
    for_keys, for_values = jax.tree.map(
        lambda x: x + layers.NOISE * jax.random.normal(rngs(), x.shape, x.dtype), both
    )
    return cache.Compression(for_keys, for_values, Rotary(DEFAULT_BASE, None).rotation(shape.key_dim))


def nsa_cache(number: int, setting: Setting) -> cache.NSACache:
    """The cache of one layer, with `S` random tokens a row and room for the new ones."""
    make = functools.partial(
        cache.init_cache, setting.shape.batch, setting.max_length, config=setting.config,
        step_capacity=max(8, setting.new_tokens), **setting.cache_sizes,
    )  # fmt: skip
    return _filled(jax.eval_shape(make), number, setting)


def dense_cache(number: int, setting: Setting) -> cache.DenseCache:
    """The same for dense attention."""
    make = functools.partial(
        cache.init_dense_cache, setting.shape.batch, setting.max_length, **setting.cache_sizes
    )
    return _filled(jax.eval_shape(make), number, setting)


def token(name: str, number: int, setting: Setting) -> Array:
    """Keys or values of the new tokens of a layer."""
    dim = setting.shape.key_dim if name.startswith("key") else setting.shape.value_dim
    size = (setting.shape.batch, setting.new_tokens, setting.shape.kv_heads, dim)
    return _normal(f"new {name} {number}", size, setting.shape.dtype)


def pair(name: str, length: int, number: int, setting: Setting) -> tuple[Array, Array]:
    """Keys and values of `length` tokens or blocks of a layer."""
    shape = setting.shape
    dims = {f"key_{name}": shape.key_dim, f"value_{name}": shape.value_dim}
    sizes = {kind: (shape.batch, length, shape.kv_heads, dim) for kind, dim in dims.items()}
    key, value = (_normal(f"{kind} {number}", size, shape.dtype) for kind, size in sizes.items())
    return key, value


def first_lengths(setting: Setting) -> Array:
    """Tokens of each row before the first step."""
    return jnp.full(setting.shape.batch, setting.shape.length, jnp.int32)


def _filled(empty: Any, number: int, setting: Setting) -> Any:
    """A cache of random keys and values; allocates nothing else."""

    def fill(name: str, x: jax.ShapeDtypeStruct) -> Array:
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        return _normal(f"{name} {number}", x.shape, x.dtype.name) if floating else jnp.zeros(x.shape, x.dtype)

    arrays = {name: fill(name, x) for name, x in empty._asdict().items()}
    return empty._replace(**arrays | {"lengths": first_lengths(setting)})


def _normal(name: str, shape: tuple[int, ...], dtype: str) -> Array:
    return _draw(key(name), shape, dtype)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _draw(key: Array, shape: tuple[int, ...], dtype: str) -> Array:
    """Compiled, so that a large 16-bit array needs no float32 array beside it."""
    return jax.random.normal(key, shape).astype(dtype)
