"""The projections in and out of heads that the attention layers share."""

from typing import Any

from flax import nnx

from nsa_jax.nn import partitioning


def projection(
    in_features: int | tuple[int, ...],
    out_features: int | tuple[int, ...],
    *,
    dimensions: tuple[str | None, ...],
    sharding: partitioning.Sharding | None,
    **arguments: Any,
) -> nnx.LinearGeneral:
    """A projection over all axes of `in_features`, with the sharding metadata of its `dimensions`."""
    partitioning.check_sharding(sharding)
    in_rank = len(in_features) if isinstance(in_features, tuple) else 1
    return nnx.LinearGeneral(
        in_features,
        out_features,
        axis=tuple(range(-in_rank, 0)),
        kernel_metadata=partitioning.metadata(sharding, *dimensions),
        bias_metadata=partitioning.metadata(sharding, *dimensions[in_rank:]),
        **arguments,
    )


def head_width(num_heads: int, in_features: int, num_kv_heads: int, head_dim: int | None) -> int:
    """`head_dim` or its default, once the head counts divide."""
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"num_kv_heads must divide num_heads, got {num_kv_heads} and {num_heads}. "
            "Give each KV head the same number of query heads."
        )
    if head_dim is None and in_features % num_heads:
        raise ValueError(
            "num_heads must divide in_features where head_dim is not given, got "
            f"{num_heads} and {in_features}. Pass head_dim."
        )
    return in_features // num_heads if head_dim is None else head_dim
