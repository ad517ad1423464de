"""An indexer that begins as the queries and keys of a dense model."""

from collections.abc import Iterable, Mapping

import numpy as np

from nsa_jax.array_typing import Array
from nsa_jax.model import TransformerConfig
from nsa_jax.nn import IndexerConfig


def options_of(config: TransformerConfig) -> IndexerConfig:
    """An index head for each query head, and an index key for each KV head.

    Of each head the pairs that turn slowly, half of them, are kept.

    Raises:
      ValueError: the pairs of a head cannot be halved.
    """
    dim = config.head_width
    if dim % 4:
        raise ValueError(
            f'selector="indexer" needs heads whose width is a multiple of 4, got {dim}. Pass an '
            "IndexerConfig."
        )
    heads = config.num_heads // config.num_kv_heads
    return IndexerConfig(num_heads=heads, dim=dim // 2, shared_key=False, slow_pairs=True)


def copied(old: Mapping[str, Array], names: Iterable[str], config: TransformerConfig) -> dict[str, Array]:
    """Parameters of the indexers among `names`, from those of the dense model.

    A product of an index query and an index key is that of the slower half of a query head and the key of its
    KV head, with the same scale.
    """
    return {
        name: _query(old, name, config) if name.endswith("query_proj.kernel") else _slow(old, name, config)
        for name in names
        if ".attention.selector." in name
    }


def _query(old: Mapping[str, Array], name: str, config: TransformerConfig) -> Array:
    kernel = _slow(old, name, config)
    width, _, dim = kernel.shape
    scale = config.head_width**-0.5 if config.scale is None else config.scale
    return (kernel * (scale * dim**0.5)).reshape(width, config.num_kv_heads, -1, dim)


def _slow(old: Mapping[str, Array], name: str, config: TransformerConfig) -> Array:
    """Kernel `[D, heads, H / 2]` of the pairs of each head that turn slowly, times the scale of its norm."""
    quarter = config.head_width // 4
    name = name.replace(".selector", "")
    kernel, norm = old[name], name.replace("_proj.kernel", "_norm.scale")
    if norm in old:
        kernel = kernel * old[norm]
    return kernel[..., np.r_[quarter : 2 * quarter, 3 * quarter : 4 * quarter]]
