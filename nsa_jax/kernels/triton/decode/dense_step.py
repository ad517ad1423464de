"""A decode step of a dense or window layer in two kernels: one appends and attends, one adds up the parts."""

from typing import Any

import jax
import jax.numpy as jnp
import triton

from nsa_jax.array_typing import Array, Float, Int
from nsa_jax.kernels.triton.decode.dense import DenseDims, dense_kernel, dense_merge_kernel
from nsa_jax.kernels.triton.decode.sizes import DenseStepShape, DenseStepSizes, dense_step_sizes
from nsa_jax.kernels.triton.dims import split_dim
from nsa_jax.kernels.triton.gpu import target
from nsa_jax.kernels.triton.launch import launch, like
from nsa_jax.kernels.triton.pieces import LOG2_E, Dim, precision
from nsa_jax.layout import DenseCache
from nsa_jax.sharding.manual import alike_in_shards


def dense_decode_step(
    cache: DenseCache,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    num_tokens: Int[Array, " B"] | None,
    window_size: int | None,
    scale: float,
    *,
    sizes: DenseStepSizes | None = None,
) -> tuple[Float[Array, "B T N V"], DenseCache]:
    """Appends the tokens and attends from each of them.

    Args:
      cache, query, key, value, num_tokens, window_size: as in `nsa_jax.cache.dense_decode_step`.
      scale: as there, but without a default.
      sizes: used instead of those that `dense_step_sizes` would take.
    """
    batch, num_new, num_heads, _ = query.shape
    slots, kv_heads, key_dim = cache.key.shape[1:]
    value_dim, rows = cache.value.shape[3], num_new * num_heads // kv_heads
    num_tokens = None if num_tokens is None else num_tokens.astype(jnp.int32)
    sizes = sizes or sizes_of_dense_step(cache, query)
    h, v = split_dim(key_dim), split_dim(value_dim)
    max_length, parts = cache.max_length(window_size), sizes.parts + 1
    common: dict[str, Any] = dict(T=num_new, G=num_heads // kv_heads, KV_HEADS=kv_heads, V0=v[0], V1=v[1])

    def floats(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, kv_heads, *shape), jnp.float32)

    held, found = launch(
        dense_kernel, cache.lengths, num_tokens, key, value, query,
        out=(jax.ShapeDtypeStruct((batch, 3), jnp.int32), floats(parts, rows, value_dim),
             floats(parts, 2, rows)),
        in_place=dict(
            key=cache.key, value=cache.value, key_scale=cache.key_scale, value_scale=cache.value_scale
        ),
        grid=(parts * batch * kv_heads * sizes.groups,),
        num_warps=sizes.num_warps, num_stages=sizes.num_stages, scale=float(scale * LOG2_E.value),
        batch=batch, max_length=max_length, GROUPS=sizes.groups, PRECISION=precision(query.dtype),
        D=DenseDims(
            T=num_new, G=num_heads // kv_heads, KV_HEADS=kv_heads, SIZE=slots,
            WINDOW=cache.ring_window(window_size) or 0, PARTS=sizes.parts, TILE=sizes.keys, ROWS=sizes.rows,
            STAGES=sizes.num_stages, KEY=Dim(*h), VALUE=Dim(*v),
        ),
    )  # fmt: skip
    padded = triton.next_power_of_2(parts)
    floats_of_row = padded * triton.next_power_of_2(value_dim)
    ended, out = launch(
        dense_merge_kernel, *found, out=like(query, (batch, num_new, num_heads, value_dim)),
        in_place=dict(lengths=cache.lengths, overflowed=cache.overflowed),
        grid=(batch * num_new * num_heads,), num_warps=min(max(floats_of_row // 4096, 1), 8),
        num_stages=1, PARTS=parts, PADDED=padded, **common,
    )  # fmt: skip
    updated = DenseCache(**held, **ended)
    return out, alike_in_shards(updated, cache, num_tokens, num_new, max_length)


def sizes_of_dense_step(cache: DenseCache, query: Array) -> DenseStepSizes:
    """The sizes for the shapes of a step."""
    batch, slots, kv_heads, key_dim = cache.key.shape
    return dense_step_sizes(
        DenseStepShape(
            gpu=target(),
            float_bytes=query.dtype.itemsize,
            kv_heads=batch * kv_heads,
            num_new=query.shape[1],
            heads=query.shape[2] // kv_heads,
            dims=key_dim + cache.value.shape[3],
            slots=slots,
        )
    )
