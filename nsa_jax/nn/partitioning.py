"""Sharding metadata of parameters: which mesh axis each named dimension of a kernel lies on."""

from collections.abc import Mapping
from typing import Any

# "model" D, "heads" N, "kv_heads" K, "mlp" the inner width of SwiGLU, "vocab" the tokens; other dims are
# replicated.
DIMENSIONS = ("model", "heads", "kv_heads", "mlp", "vocab")

Sharding = Mapping[str, str | None]


def check_sharding(sharding: Sharding | None) -> None:
    """Raises ValueError if `sharding` names a dimension that no kernel has."""
    unknown = sorted(set(sharding or ()) - set(DIMENSIONS))
    if unknown:
        raise ValueError(
            f"sharding maps some of {DIMENSIONS} to mesh axes, got {unknown}. Rename or drop them."
        )


def metadata(sharding: Sharding | None, *dimensions: str | None) -> dict[str, Any]:
    """The `nnx.Param` metadata of a parameter with these dimensions; none where no sharding was asked for.

    Flax applies `out_sharding` when the parameter is created, and then needs a mesh context (`jax.set_mesh`).
    """
    if sharding is None:
        return {}
    return {"out_sharding": tuple(sharding.get(name) if name else None for name in dimensions)}
