"""Gemma 3 for text: the fields of `config.json` that no other family has, as ours and back.

Most of its layers see a window. Those have a rotation of their own. Norms multiply by 1 plus what is stored
(`names`).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from nsa_jax.arguments import resolve_scale
from nsa_jax.model import TransformerConfig
from nsa_jax.option_checks import check_int, check_positive
from nsa_jax.pretrained.rope import read_rope, write_rope

KIND, ACTIVATION = "gemma3_text", "gelu_pytorch_tanh"
# Its fields, with the values that a missing one stands for in `transformers`.
FIELDS: dict[str, Any] = dict(
    num_key_value_heads=4, head_dim=256, attention_bias=False, tie_word_embeddings=True,
    hidden_activation=ACTIVATION, query_pre_attn_scalar=256, sliding_window=4096, sliding_window_pattern=6,
    layer_types=None, rope_local_base_freq=None,
)  # fmt: skip
_BASES = dict(full_attention=1e6, sliding_attention=1e4)


def layer_types(read: Mapping[str, Any], num_layers: int) -> Any:
    """The kind of each layer: given, or every sixth sees all tokens."""
    if read["layer_types"]:
        return read["layer_types"]
    check_int(low=1, num_hidden_layers=num_layers, sliding_window_pattern=read["sliding_window_pattern"])
    pattern = read["sliding_window_pattern"]
    return ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)]


def read_gemma(
    fields: Mapping[str, Any], read: Mapping[str, Any], attention: Sequence[str]
) -> dict[str, Any]:
    """The options of a `TransformerConfig` that no other family has.

    Args:
      fields: of `config.json`.
      read: the same, with defaults.
      attention: our kind of each layer.

    Raises:
      TypeError: a field is of the wrong kind.
      ValueError: a number is out of range, or the rotations are in no form that is known.
    """
    check_positive(query_pre_attn_scalar=read["query_pre_attn_scalar"], hidden_size=fields["hidden_size"])
    nested, more = fields.get("rope_parameters") or {}, fields.get("rope_scaling") or {}
    held = nested.values() if isinstance(nested, Mapping) else ()
    if not all(isinstance(x, Mapping | None) for x in (nested, more, *held)) or nested.keys() - _BASES.keys():
        raise ValueError(
            f"rope_parameters of config.json must be mappings of {tuple(_BASES)}, got {nested!r} and "
            f"rope_scaling={more!r}. Load a copy that says so."
        )
    given = {kind: nested.get(kind) or {} for kind in _BASES}
    given["full_attention"] = {**given["full_attention"], **more}
    bases = dict(full_attention=fields.get("rope_theta"), sliding_attention=read["rope_local_base_freq"])
    lengths = {name: value for name, value in fields.items() if name.endswith("max_position_embeddings")}
    rotations = {
        kind: read_rope(
            lengths
            | dict(rope_theta=base if bases[kind] is None else bases[kind], rope_parameters=given[kind])
        )
        for kind, base in _BASES.items()
    }
    of_layers = [
        rotations["sliding_attention" if kind == "window" else "full_attention"] for kind in attention
    ]
    return dict(
        activation="gelu_tanh",
        normalize_qk=True,
        post_norms=True,
        scale=read["query_pre_attn_scalar"] ** -0.5,
        embedding_scale=fields["hidden_size"] ** 0.5,
        rope_base=tuple(base for base, _ in of_layers),
        rope_scaling=tuple(scaling for _, scaling in of_layers),
    )


def write_gemma(config: TransformerConfig) -> dict[str, Any] | None:
    """Its own fields of `config.json`, but for the windows; None if the model is of no such family."""
    rotations: dict[Any, set[Any]] = dict(dense=set(), window=set())
    for layer in config.per_layer:
        rotations[layer.attention].add((layer.rope_base, layer.rope_scaling))
    scale = resolve_scale(config.scale, config.head_width, config.dtype)
    scalar = round(scale**-2) if scale > 0 else 0  # theirs is an int
    same = config.post_norms and config.activation == "gelu_tanh" and config.normalize_qk
    same = same and config.embedding_scale == config.model_dim**0.5 and config.qkv_bias == config.out_bias
    same = same and all(len(each) < 2 for each in rotations.values())
    base, scaling = next(iter(rotations["dense"]), (_BASES["full_attention"], None))
    local, local_scaling = next(iter(rotations["window"]), (_BASES["sliding_attention"], None))
    same = same and scalar > 0 and math.isclose(scalar**-0.5, scale, rel_tol=1e-9)
    if not same or local_scaling is not None:
        return None
    return dict(
        hidden_activation=ACTIVATION,
        query_pre_attn_scalar=scalar,
        rope_local_base_freq=local,
        **write_rope(base, scaling),
    )
