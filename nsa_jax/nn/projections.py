"""Shared by the attention layers: input checks, projections, norm of heads, dropout, and sharding."""

import itertools
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nsa_jax import layout
from nsa_jax.array_typing import Array, DType, Float, Int, Int32
from nsa_jax.dispatch import IMPLEMENTATIONS
from nsa_jax.nn import products

# The dimensions that can be sharded: "model" is D, "heads" N, "kv_heads" K, "mlp" the inner width of SwiGLU,
# "vocab" the vocabulary. All others are replicated.
DIMENSIONS = ("model", "heads", "kv_heads", "mlp", "vocab")

NORM_EPSILON = 1e-6

Sharding = Mapping[str, str | None]


def check_sharding(sharding: Sharding | None, **sizes: int) -> None:
    """Raises ValueError if a parameter cannot be sharded as asked; `sizes` are those of its dimensions.

    `sharding` must know the dimensions, the mesh in context the axes, and these must divide the sizes.
    """
    unknown = sorted(set(sharding or ()) - set(DIMENSIONS))
    if unknown:
        raise ValueError(
            f"sharding must name only dimensions among {DIMENSIONS}, got {unknown}. Rename or drop them."
        )
    mesh = jax.sharding.get_abstract_mesh()
    for dimension, axis in ({} if mesh.empty or sharding is None else sharding).items():
        if axis is not None and axis not in mesh.axis_names:
            raise ValueError(
                f"sharding must name axes of the mesh in context, got {axis!r} for {dimension!r} and the "
                f"axes {mesh.axis_names}. Rename it, or set another mesh: jax.set_mesh(mesh)."
            )
        size = sizes.get(dimension, 0)
        if axis is not None and size % mesh.shape[axis]:
            raise ValueError(
                f"the devices of an axis must divide what is sharded over it, got {mesh.shape[axis]} devices "
                f"along {axis!r} and {size} for {dimension!r}. Use fewer devices, or leave it whole: None."
            )


def sharding_metadata(sharding: Sharding | None, *dimensions: str | None) -> dict[str, Any]:
    """The `nnx.Param` metadata of a parameter with these dimensions; empty without a sharding.

    Flax applies `out_sharding` when it creates the parameter, and then needs a mesh in context
    (`jax.set_mesh`).
    """
    if sharding is None:
        return {}
    return {"out_sharding": tuple(sharding.get(name) if name else None for name in dimensions)}


def projection(
    in_features: int | tuple[int, ...],
    out_features: int | tuple[int, ...],
    *,
    dimensions: tuple[str | None, ...],
    sharding: Sharding | None,
    **arguments: Any,
) -> nnx.LinearGeneral:
    """Makes a projection over all axes of `in_features`, with the sharding metadata of its `dimensions`."""
    by_rows = dimensions[-1] == "model"
    in_rank = len(in_features) if isinstance(in_features, tuple) else 1
    features = (x if isinstance(x, tuple) else (x,) for x in (in_features, out_features))
    sizes = zip(dimensions, itertools.chain(*features), strict=True)
    check_sharding(sharding, **{name: size for name, size in sizes if name is not None})
    return nnx.LinearGeneral(
        in_features,
        out_features,
        axis=tuple(range(-in_rank, 0)),
        kernel_metadata=sharding_metadata(sharding, *dimensions),
        bias_metadata=sharding_metadata(sharding, *dimensions[in_rank:]),
        promote_dtype=products.promote_rows if by_rows else products.promote_columns,
        dot_general=products.add_rows if by_rows else None,
        **arguments,
    )


def head_norm(
    normalize: bool, width: int, *, dtype: DType | None, param_dtype: DType, rngs: nnx.Rngs
) -> Callable[[Array], Array]:
    """Makes an RMSNorm (arXiv:1910.07467) of each head with one learned scale, or returns `unchanged`."""
    if not normalize:
        return unchanged
    return nnx.RMSNorm(width, epsilon=NORM_EPSILON, dtype=dtype, param_dtype=param_dtype, rngs=rngs)


def unchanged(heads: Array) -> Array:
    """Returns the heads."""
    return heads


def output_dropout(rate: float, rngs: nnx.Rngs) -> nnx.Dropout:
    """Makes the dropout for the output of a layer. At rate 0 it has no random state."""
    check_dropout_rate(rate)
    return nnx.Dropout(rate, rngs=rngs if rate else None)


def check_dropout_rate(rate: float) -> None:
    """Raises TypeError or ValueError unless `rate` is a number from 0 to below 1."""
    if isinstance(rate, bool) or not isinstance(rate, numbers.Real):
        raise TypeError(f"dropout_rate must be a number, got {type(rate).__name__}. Pass a float.")
    if not 0 <= rate < 1:
        raise ValueError(
            f"dropout_rate must be at least 0 and below 1, got {rate}. Pass the share of the outputs to drop."
        )


def head_width(num_heads: int, in_features: int, num_kv_heads: int, head_dim: int | None) -> int:
    """Returns `head_dim` or its default.

    Raises:
      TypeError: a number is not an int.
      ValueError: head counts or widths do not divide, or the width is not positive.
    """
    for name, count in dict(num_heads=num_heads, in_features=in_features, num_kv_heads=num_kv_heads).items():
        if isinstance(count, bool) or not isinstance(count, numbers.Integral):
            raise TypeError(f"{name} must be an int, got {type(count).__name__}. Pass a whole number.")
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"num_kv_heads must divide num_heads, got {num_kv_heads} and {num_heads}. "
            "Give each KV head the same number of query heads."
        )
    if head_dim is None and in_features % num_heads:
        raise ValueError(
            "num_heads must divide in_features unless head_dim is given, got "
            f"{num_heads} and {in_features}. Pass head_dim."
        )
    head_dim = in_features // num_heads if head_dim is None else head_dim
    check_width(head_dim=head_dim)
    return head_dim


def check_width(**widths: int) -> None:
    """Raises ValueError unless the widths are positive."""
    for name, width in widths.items():
        if width < 1:
            raise ValueError(f"{name} must be at least 1, got {width}. Pass a positive number.")


def check_implementation(implementation: str | None) -> None:
    """Raises ValueError unless there is such an implementation; whether it can run, each call finds out."""
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be None or one of {IMPLEMENTATIONS}, got {implementation!r}. Check the "
            "spelling."
        )


def check_array(name: str, x: Any) -> None:
    """Raises TypeError unless `x` is an array."""
    if not hasattr(x, "ndim"):
        raise TypeError(f"{name} must be an array, got {type(x).__name__}. Convert it with jnp.asarray.")


def check_inputs(
    x: Array, in_features: int, *, context_axis: str | None = None, **per_token: Array | None
) -> None:
    """Raises TypeError or ValueError unless `x` is `[B, T, in_features]`, the others are integers `[B, T]`.

    On explicit axes of a mesh, features of `x` must not be sharded, and tokens over the context axis only.
    """
    check_array("x", x)
    if x.ndim != 3 or x.shape[-1] != in_features:
        raise ValueError(
            f"x must be [batch, tokens, {in_features}], got shape {x.shape}. "
            "Add the missing axis, or create the layer with this width as in_features."
        )
    tokens, features = (*jax.typeof(x).sharding.spec, None, None)[1:3]
    if features is not None or tokens not in (None, context_axis):
        raise ValueError(
            "x must be sharded by batch rows only on explicit axes of a mesh, and by tokens over a "
            f"context_axis, got an input of type {jax.typeof(x)}. Use jax.reshard to replicate its tokens "
            "and features."
        )
    for name, value in per_token.items():
        if value is None:
            continue
        check_array(name, value)
        if not jnp.issubdtype(value.dtype, jnp.integer):
            raise ValueError(f"{name} must hold integers, got {value.dtype}. Cast it to int32.")
        if value.shape != x.shape[:2]:
            raise ValueError(
                f"{name} must hold one integer for each token, got shape {value.shape} for x of shape "
                f"{x.shape}. Broadcast it to [batch, tokens]."
            )


def token_positions(x: Float[Array, "B T D"], segment_ids: Int[Array, "B T"] | None) -> Int32[Array, "B T"]:
    """Index of each token in its own sequence."""
    if segment_ids is None:
        return jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32)[None], x.shape[:2])
    return layout.sequence_positions(segment_ids)
