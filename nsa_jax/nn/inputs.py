"""What the attention layers ask of their inputs."""

import jax.numpy as jnp

from nsa_jax import layout
from nsa_jax.array_typing import Array, Float, Int, Int32


def check_inputs(x: Array, in_features: int, **per_token: Array | None) -> None:
    """Raises ValueError unless `x` is [B, T, in_features] and the others are integers of [B, T]."""
    if x.ndim != 3 or x.shape[-1] != in_features:
        raise ValueError(
            f"x must be [batch, tokens, {in_features}], got shape {x.shape}. "
            "Add the missing axis, or create the layer with other in_features."
        )
    for name, value in per_token.items():
        if value is not None and (value.shape != x.shape[:2] or not jnp.issubdtype(value.dtype, jnp.integer)):
            raise ValueError(
                f"{name} must hold one integer for each token, got {value.dtype} of shape {value.shape} "
                f"for x of shape {x.shape}. Broadcast it to [batch, tokens]."
            )


def token_positions(x: Float[Array, "B T D"], segment_ids: Int[Array, "B T"] | None) -> Int32[Array, "B T"]:
    """Index of each token in its own sequence."""
    if segment_ids is None:
        return jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
    return layout.sequence_positions(segment_ids)
