"""The families of models that can be loaded: their `config.json` as a `TransformerConfig`, and back.

A field that is neither read nor known to change nothing is refused: a model that is computed in another way
than it was trained would be wrong in silence.
"""

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from nsa_jax.model import TransformerConfig
from nsa_jax.option_checks import check_int
from nsa_jax.pretrained import gemma
from nsa_jax.pretrained.rope import read_rope, write_rope

NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# Fields that all families have, with the values that a missing one stands for in `transformers`.
_COMMON = dict(
    head_dim=None, num_key_value_heads=None, rms_norm_eps=1e-6, tie_word_embeddings=False, hidden_act="silu"
)
_QWEN_WINDOWS = dict(use_sliding_window=False, sliding_window=4096, max_window_layers=28, layer_types=None)
# The same of each family, by its `model_type`.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": dict(attention_bias=False),
    "mistral": dict(num_key_value_heads=8, sliding_window=4096),
    "qwen2": dict(num_key_value_heads=32, **_QWEN_WINDOWS),
    "qwen3": dict(num_key_value_heads=32, head_dim=128, attention_bias=False, **_QWEN_WINDOWS),
    gemma.KIND: gemma.FIELDS,
}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    gemma.KIND: "Gemma3ForCausalLM",
}
_LAYER_TYPES = dict(full_attention="dense", sliding_attention="window")
_OF_GEMMA = ("scale", "activation", "post_norms", "embedding_scale")
_OF_FAMILIES = (
    "attention",
    "window_size",
    "qkv_bias",
    "out_bias",
    "normalize_qk",
    "rope_base",
    "rope_scaling",
)
_DEFAULTS = {x.name: x.default for x in dataclasses.fields(TransformerConfig)} | dict(attention="dense")
_ROPE = (
    *("rope_theta", "rope_scaling", "rope_parameters"),
    *("max_position_embeddings", "original_max_position_embeddings"),
)
# Fields of other models, with the value at which they change nothing.
_OFF = dict(
    attention_bias=False,
    mlp_bias=False,
    hidden_act="silu",
    is_encoder_decoder=False,
    partial_rotary_factor=1.0,
    rope_interleaved=False,
    use_bidirectional_attention=False,
    use_mrope=False,
    use_qk_norm=False,
    use_sliding_window=False,
)
# Fields that change nothing: what the file is, how it was trained, and how text is drawn.
_SILENT = re.compile(
    r"_.*|unsloth_.*|.*_token_id|architectures|model_type|torch_dtype|dtype|transformers_version"
    r"|transformers\.js_config|is_llama_config|pretraining_tp|initializer_range|attention_dropout|use_cache"
    r"|output_.*|(use_)?return_dict|torchscript|chunk_size_feed_forward|is_decoder|id2label|label2id"
    r"|cache_implementation|problem_type|task_specific_params"
    r"|tokenizer_class|do_sample|temperature|top_k|top_p|max_length"
    r"|repetition_penalty|max_new_tokens|(pad|bos|eos)_token|max_sequence_length|model_max_length"
)


def read_fields(
    fields: Mapping[str, Any], *, dtype: str, param_dtype: str, ignore: Collection[str] = ()
) -> TransformerConfig:
    """The configuration of a dense model.

    Args:
      fields: of `config.json`.
      dtype: dtype of the computation.
      param_dtype: dtype of the parameters.
      ignore: names of fields that change nothing.

    Raises:
      TypeError: a field is of the wrong kind.
      ValueError: the family is unknown, a field is missing, or one asks for something that we do not have.
    """
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        _refuse("model_type", kind, f"one of {tuple(FAMILIES)}")
    architectures = fields.get("architectures") or [_ARCHITECTURES[kind]]
    if architectures != [_ARCHITECTURES[kind]]:
        _refuse("architectures", architectures, f"[{_ARCHITECTURES[kind]!r}]")
    if missing := [name for name in NEEDED if fields.get(name) is None]:
        raise ValueError(
            f"config.json must have the sizes of the model, got no {', '.join(missing)}. Load a whole copy."
        )
    known = _COMMON | FAMILIES[kind]
    for name, value in fields.items():
        if name in (*known, *NEEDED, *_ROPE, *ignore) or value is None or _SILENT.fullmatch(name):
            continue
        if value != _OFF.get(name, ...):
            raise ValueError(
                f"a field of config.json must be one whose meaning is known for {kind!r}, got "
                f"{name}={value!r}. Pass ignore=({name!r},) if the model computes the same without it."
            )
    read = known | {name: fields[name] for name in known if name in fields}
    bias = read.get("attention_bias", False)
    attention, window_size = _windows(kind, read, fields["num_hidden_layers"])
    name, wanted = ("hidden_activation", gemma.ACTIVATION) if kind == gemma.KIND else ("hidden_act", "silu")
    if read[name] != wanted:
        _refuse(name, read[name], repr(wanted))
    if kind == gemma.KIND:
        own = gemma.read_gemma(fields, read, attention)
    else:
        base, scaling = read_rope(fields)
        own = dict(rope_base=base, rope_scaling=scaling, normalize_qk=kind == "qwen3")
    return TransformerConfig(
        vocab_size=fields["vocab_size"],
        num_layers=fields["num_hidden_layers"],
        model_dim=fields["hidden_size"],
        num_heads=fields["num_attention_heads"],
        num_kv_heads=read["num_key_value_heads"] or fields["num_attention_heads"],
        head_dim=read["head_dim"],
        mlp_dim=fields["intermediate_size"],
        attention=attention,
        window_size=window_size,
        qkv_bias=bias or kind == "qwen2",
        out_bias=bias,
        norm_epsilon=read["rms_norm_eps"],
        tie_embeddings=read["tie_word_embeddings"],
        dtype=dtype,
        param_dtype=param_dtype,
        **own,
    )


def _windows(kind: str, read: Mapping[str, Any], num_layers: int) -> tuple[Any, Any]:
    """`attention` and `window_size` of a configuration."""
    window = read.get("sliding_window")
    if kind == "mistral":
        return ("dense", None) if window is None else ("window", window)
    if kind == gemma.KIND:
        types = gemma.layer_types(read, num_layers)
    elif window is None or not read.get("use_sliding_window"):
        return "dense", None
    else:
        first = read["max_window_layers"]
        check_int(num_hidden_layers=num_layers, max_window_layers=first)
        types = read["layer_types"] or [
            "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
        ]
    if not isinstance(types, list) or not all(isinstance(x, str) and x in _LAYER_TYPES for x in types):
        _refuse("layer_types", types, f"a list of {tuple(_LAYER_TYPES)}")
    attention = tuple(_LAYER_TYPES[each] for each in types)
    if window is None and "window" in attention:
        _refuse("sliding_window", window, "a number of tokens")
    return attention, tuple(window if each == "window" else None for each in attention)


def write_fields(config: TransformerConfig) -> dict[str, Any]:
    """The fields of `config.json` of a dense model.

    Raises:
      ValueError: no family computes what the model does.
    """
    layers: Any = config.per_layer
    kinds, windows = zip(*((each.attention, _window(each)) for each in layers), strict=True)
    sizes = sorted({size for size in windows if size is not None})
    own = None if "nsa" in kinds else gemma.write_gemma(config)
    changed = {
        name: getattr(config, name)
        for name in ("rotary", *_OF_FAMILIES, *_OF_GEMMA)
        if getattr(config, name) != _DEFAULTS[name]
    }
    rotations = {(each.rope_base, each.rope_scaling) for each in layers}
    odd = "nsa" in kinds or "rotary" in changed
    odd = odd or (own is None and (len(rotations) > 1 or not changed.keys().isdisjoint(_OF_GEMMA)))
    kind: str | None
    if own is not None:
        kind = gemma.KIND
    elif config.normalize_qk:
        kind = "qwen3" if config.qkv_bias == config.out_bias else None
    elif config.qkv_bias and not config.out_bias:
        kind = "qwen2"
    elif sizes:
        plain = len(set(windows)) == 1 and not (config.qkv_bias or config.out_bias)
        kind = "mistral" if plain else None
    else:
        kind = "llama" if config.qkv_bias == config.out_bias else None
    if odd or kind is None or len(sizes) > 1:
        raise ValueError(
            f"a dense model must be one of {tuple(FAMILIES)} to be saved, got "
            f"{', '.join(f'{name}={value!r}' for name, value in changed.items())}. Save it by "
            "nsa_jax.model.save."
        )
    if own is None:
        own = dict(hidden_act="silu", **write_rope(layers[0].rope_base, layers[0].rope_scaling))
    fields: dict[str, Any] = dict(
        architectures=[_ARCHITECTURES[kind]],
        model_type=kind,
        vocab_size=config.vocab_size,
        hidden_size=config.model_dim,
        intermediate_size=config.mlp_width,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_width,
        rms_norm_eps=config.norm_epsilon,
        tie_word_embeddings=config.tie_embeddings,
        torch_dtype=config.param_dtype,
        **own,
    )
    if "attention_bias" in FAMILIES[kind]:
        fields["attention_bias"] = config.qkv_bias
    if kind == "mistral":
        fields["sliding_window"] = sizes[0]
    if "layer_types" in FAMILIES[kind]:
        names = {ours: theirs for theirs, ours in _LAYER_TYPES.items()}
        fields["layer_types"] = [names[each] for each in kinds]
        if sizes or kind != gemma.KIND:  # of Gemma it must be a number
            fields["sliding_window"] = sizes[0] if sizes else None
    if "use_sliding_window" in FAMILIES[kind]:
        first = kinds.index("window") if sizes else config.num_layers
        fields |= dict(use_sliding_window=bool(sizes), max_window_layers=first)
    return fields


def _window(layer: Any) -> int | None:
    """Tokens that a query of this layer sees; None for all."""
    if layer.attention != "window":
        return None
    return layer.nsa.window_size if layer.window_size is None else layer.window_size


def _refuse(field: str, value: Any, wanted: str) -> NoReturn:
    raise ValueError(
        f"{field} of config.json must be {wanted}, got {value!r}. Load a model of a family that is known."
    )
