"""The rotary settings of a `config.json`, as ours and back."""

from collections.abc import Mapping
from typing import Any, NoReturn

from nsa_jax.nn import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from nsa_jax.nn.rotary import DEFAULT_BASE

# Our kind of a scaling, and our names of its settings.
_KINDS: dict[str, tuple[Any, dict[str, str]]] = {
    "linear": (LinearScaling, dict(factor="factor")),
    "llama3": (
        Llama3Scaling,
        dict(
            factor="factor",
            low_freq_factor="low_frequency_factor",
            high_freq_factor="high_frequency_factor",
            original_max_position_embeddings="original_length",
        ),
    ),
    "yarn": (
        YarnScaling,
        dict(
            factor="factor",
            original_max_position_embeddings="original_length",
            beta_fast="beta_fast",
            beta_slow="beta_slow",
            attention_factor="attention_factor",
        ),
    ),
}
# Settings that must have just these values, and those that say nothing.
_FIXED = dict(partial_rotary_factor=1.0, truncate=True)
_SILENT = ("rope_type", "type", "rope_theta", "finetuned")


def read_rope(fields: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the frequencies.

    Raises:
      TypeError: a setting is of the wrong kind.
      ValueError: the rotation is one that we do not have, or lacks a setting.
    """
    given = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        _refuse("rope_scaling", given)
    settings = {name: value for name, value in given.items() if value is not None}
    base = settings.get("rope_theta", fields.get("rope_theta"))
    base = DEFAULT_BASE if base is None else base
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in ("default", *_KINDS):
        _refuse("rope_type", kind)
    make, names = _KINDS.get(kind, (None, {}))
    if "original_max_position_embeddings" in names:
        if original := fields.get("original_max_position_embeddings"):
            settings["original_max_position_embeddings"] = original
        settings.setdefault("original_max_position_embeddings", fields.get("max_position_embeddings"))
    for name, value in settings.items():
        if name not in (*names, *_SILENT) and value != _FIXED.get(name, ...):
            _refuse(f"rope_scaling.{name}", value)
    if make is None:
        return base, None
    needed = [name for name in names if name not in ("beta_fast", "beta_slow", "attention_factor")]
    if missing := [name for name in needed if settings.get(name) is None]:
        raise ValueError(
            f"a rope_scaling of type {kind!r} must have all its settings, got none for {', '.join(missing)}. "
            "Add it to config.json."
        )
    return base, make(**{ours: settings[name] for name, ours in names.items() if name in settings})


def write_rope(base: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """The fields for base and scaling."""
    if scaling is None:
        return dict(rope_theta=base, rope_scaling=None)
    _, names = _KINDS[scaling.kind]
    values = {name: getattr(scaling, ours) for name, ours in names.items()}
    given = {name: value for name, value in values.items() if value is not None}
    return dict(rope_theta=base, rope_scaling=dict(rope_type=scaling.kind, **given))


def _refuse(field: str, value: Any) -> NoReturn:
    raise ValueError(
        f"the rotation must be plain or scaled as one of {tuple(_KINDS)}, got {field}={value!r}. Load a "
        "model without it."
    )
