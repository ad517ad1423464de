"""A `TransformerConfig` as plain data for files, and back."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from nsa_jax.config import NSAConfig
from nsa_jax.model.config import TransformerConfig
from nsa_jax.nn import IndexerConfig
from nsa_jax.nn.rope_scaling import as_plain, from_plain


def config_as_plain(config: TransformerConfig) -> dict[str, Any]:
    """The configuration as what JSON can hold, unless it holds functions."""
    return dataclasses.asdict(config) | {"rope_scaling": _converted(as_plain, config.rope_scaling)}


def config_from_plain(values: Mapping[str, Any]) -> TransformerConfig:
    """The configuration that `config_as_plain` wrote, also in an earlier version."""
    values = dict(values)
    scaling = values.get("rope_scaling")  # checkpoints of version 0.1.0 do not have it
    values["rope_scaling"] = _converted(from_plain, scaling)
    if isinstance(values.get("selector"), dict):
        values["selector"] = IndexerConfig(**values["selector"])
    return TransformerConfig(**(values | {"nsa": NSAConfig(**values["nsa"])}))


def _converted(convert: Callable[[Any], Any], scaling: Any) -> Any:
    """A scaling, or one for each layer, as `convert` makes it."""
    if isinstance(scaling, list | tuple):
        return [_converted(convert, each) for each in scaling]
    return None if scaling is None else convert(scaling)
