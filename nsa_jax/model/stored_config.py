"""A `TransformerConfig` as plain data for files, and back."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from nsa_jax.config import NSAConfig
from nsa_jax.model.config import TransformerConfig
from nsa_jax.nn import IndexerConfig
from nsa_jax.nn.rope_scaling import as_plain, from_plain


def config_as_plain(config: TransformerConfig) -> dict[str, Any]:
    """The configuration as what JSON can hold, unless it holds functions."""
    scaling = config.rope_scaling
    return dataclasses.asdict(config) | {"rope_scaling": None if scaling is None else as_plain(scaling)}


def config_from_plain(values: Mapping[str, Any]) -> TransformerConfig:
    """The configuration that `config_as_plain` wrote, also in an earlier version."""
    values = dict(values)
    scaling = values.get("rope_scaling")  # checkpoints of version 0.1.0 do not have it
    values["rope_scaling"] = None if scaling is None else from_plain(scaling)
    if isinstance(values.get("selector"), dict):
        values["selector"] = IndexerConfig(**values["selector"])
    return TransformerConfig(**(values | {"nsa": NSAConfig(**values["nsa"])}))
