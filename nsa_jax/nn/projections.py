"""Shared by the attention layers: projections, norm of heads, dropout, and sharding."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nsa_jax import layout
from nsa_jax.array_typing import Array, DType, Float, Int, Int32
from nsa_jax.nn import products
from nsa_jax.nn.checks import check_dropout_rate

# The dimensions that can be sharded: "model" is D, "heads" N, "kv_heads" K, "mlp" the inner width of the MLP,
# "vocab" the vocabulary. All others are replicated.
DIMENSIONS = ("model", "heads", "kv_heads", "mlp", "vocab")

NORM_EPSILON = 1e-6

Sharding = Mapping[str, str | None]


def check_sharding(sharding: Sharding | None, **sizes: int) -> None:
    """Raises if a parameter cannot be sharded as asked; `sizes` are those of its dimensions.

    Raises:
      TypeError: `sharding` does not map names to names.
      ValueError: it has a dimension that there is not, or an axis that the mesh in context does not have, or
        that does not divide a size.
    """
    if sharding is not None and not isinstance(sharding, Mapping):
        raise TypeError(
            f"sharding must map dimensions to mesh axes, got {type(sharding).__name__}. Pass a dict."
        )
    unknown = sorted(map(str, set(sharding or ()) - set(DIMENSIONS)))
    if unknown:
        raise ValueError(
            f"sharding must name only dimensions among {DIMENSIONS}, got {unknown}. Rename or drop them."
        )
    for axis in (sharding or {}).values():
        if axis is not None and not isinstance(axis, str):
            raise TypeError(
                f"sharding must map dimensions to names of mesh axes, got {axis!r}. Pass a string, or None."
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
    normalize: bool,
    width: int,
    *,
    epsilon: float = NORM_EPSILON,
    dtype: DType | None,
    param_dtype: DType,
    rngs: nnx.Rngs,
) -> Callable[[Array], Array]:
    """Makes an RMSNorm (arXiv:1910.07467) of each head with one learned scale, or returns `unchanged`."""
    if not normalize:
        return unchanged
    return nnx.RMSNorm(width, epsilon=epsilon, dtype=dtype, param_dtype=param_dtype, rngs=rngs)


def unchanged(heads: Array) -> Array:
    """Returns the heads."""
    return heads


def output_dropout(rate: float, rngs: nnx.Rngs) -> nnx.Dropout:
    """Makes the dropout for the output of a layer. At rate 0 it has no random state.

    Raises TypeError or ValueError for a rate that is none, or if `rngs` has no stream for it.
    """
    check_dropout_rate(rate)
    if rate and not {"dropout", "default"} & {*rngs}:
        raise ValueError(
            f"rngs must have a stream for dropout, got {sorted(rngs)}. Pass nnx.Rngs(..., dropout=seed)."
        )
    return nnx.Dropout(rate, rngs=rngs if rate else None)


def token_positions(x: Float[Array, "B T D"], segment_ids: Int[Array, "B T"] | None) -> Int32[Array, "B T"]:
    """Index of each token in its own sequence."""
    if segment_ids is None:
        return jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32)[None], x.shape[:2])
    return layout.sequence_positions(segment_ids)
