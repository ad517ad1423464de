"""Inputs of the decode benchmarks: caches that hold random tokens, new tokens, compressors."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import layers
from benchmarks.inputs import Shape, normal
from nsa_jax import cache
from nsa_jax.array_typing import Array
from nsa_jax.config import BRANCHES, Branch
from nsa_jax.dispatch import Implementation
from nsa_jax.layout.quantised import fields, is_quantised, quantised
from nsa_jax.nn import Compressor
from nsa_jax.nn.rotary import DEFAULT_BASE, Rotary

NUM_STEPS = 64  # of one loop; the cache has room for their tokens beyond `S`
TOKEN_NAMES = cache.TokenKeysValues._fields
rounded = jax.jit(quantised, static_argnums=1)

type Compression = Literal["mean", "mlp"]


@dataclasses.dataclass(frozen=True)
class Setting:
    """Sizes of one measurement; `shape.length` tokens a row are in the cache before the first step.

    `cache_dtype` is that of the keys and values of NSA, if not that of the inputs.
    """

    shape: Shape
    implementation: Implementation
    new_tokens: int = 1
    compression: Compression = "mean"
    cache_dtype: str | None = None

    @property
    def max_length(self) -> int:
        """Tokens of a row after the last step."""
        return self.shape.length + NUM_STEPS * self.new_tokens

    @property
    def new(self) -> Shape:
        """That of the tokens of a step."""
        return dataclasses.replace(self.shape, length=self.new_tokens)


def compression(setting: Setting, number: int) -> cache.Compression:
    """The mean without rotation (angles change no time), or the MLP with rotation."""
    if setting.compression == "mean":
        return cache.Compression()
    shape, rngs = setting.shape, nnx.Rngs(number)
    dtype = jnp.dtype(shape.dtype)
    dims = (shape.key_dim, shape.value_dim)
    both = [Compressor(dim, shape.config, param_dtype=dtype, rngs=rngs).weights(dtype) for dim in dims]
    # The last layer starts at zero.
    for_keys, for_values = jax.tree.map(
        lambda x: x + layers.NOISE * jax.random.normal(rngs(), x.shape, x.dtype), both
    )
    return cache.Compression(for_keys, for_values, Rotary(DEFAULT_BASE, None).rotation(shape.key_dim))


def nsa_cache(number: int, setting: Setting, branches: tuple[Branch, ...] = BRANCHES) -> cache.NSACache:
    """The cache of one layer, with `S` random tokens a row and room for the new ones."""
    shape = setting.shape
    settings: dict[str, Any] = {"config": shape.config, "step_capacity": max(8, setting.new_tokens)}
    settings |= {"branches": branches, "dtype": setting.cache_dtype or shape.dtype, "raw_dtype": shape.dtype}
    return _filled(cache.init_cache, number, setting, settings)


def dense_cache(number: int, setting: Setting) -> cache.DenseCache:
    """The same for dense attention."""
    return _filled(cache.init_dense_cache, number, setting, {"dtype": setting.shape.dtype})


def pair(name: str, length: int, number: int, setting: Setting) -> tuple[Array, Array]:
    """Keys and values of `length` tokens or blocks of a layer."""
    shape = setting.shape
    size, dims = (shape.batch, length, shape.kv_heads), {"key": shape.key_dim, "value": shape.value_dim}
    key, value = (normal(f"{kind}_{name} {number}", (*size, dim), shape.dtype) for kind, dim in dims.items())
    return key, value


def first_lengths(setting: Setting) -> Array:
    """Tokens of each row before the first step."""
    return jnp.full(setting.shape.batch, setting.shape.length, jnp.int32)


def _filled(make: Any, number: int, setting: Setting, settings: dict[str, Any]) -> Any:
    """A cache of random keys and values; allocates nothing else."""
    shape = setting.shape
    settings |= dict(num_kv_heads=shape.kv_heads, key_dim=shape.key_dim, value_dim=shape.value_dim)
    empty = jax.eval_shape(lambda: make(shape.batch, setting.max_length, **settings))

    def fill(name: str, x: jax.ShapeDtypeStruct) -> Any:
        if is_quantised(x.dtype):
            return rounded(normal(f"{name} {number}", x.shape, shape.dtype), x.dtype.name)
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        return normal(f"{name} {number}", x.shape, x.dtype.name) if floating else jnp.zeros(x.shape, x.dtype)

    found = empty._asdict().items()
    arrays = {name: fill(name, x) for name, x in found if x is not None and not name.endswith("_scale")}
    return empty._replace(**fields(arrays) | {"lengths": first_lengths(setting)})
