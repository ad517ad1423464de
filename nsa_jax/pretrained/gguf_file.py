"""Reads a GGUF file as if it were a folder of Hugging Face. Tensors are dequantised a few rows at a time."""

import functools
import pathlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from nsa_jax.nn import Llama3Scaling
from nsa_jax.pretrained.extra import package
from nsa_jax.pretrained.gguf_tokenizer import read_tokenizer
from nsa_jax.pretrained.source import Source, Stored

ARCHITECTURES = ("llama", "qwen2", "qwen3")
# The fields of `config.json` by their names behind the name of the architecture.
_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}
_SCALING = ("rope_type", "factor", "original_max_position_embeddings")
# What else may stand there, with what it must be.
_CHECKED = ("vocab_size", "attention.value_length", "rope.dimension_count")
_OFF = {
    "expert_count": 0,
    "expert_used_count": 0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.finetuned": ...,
}
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FACTORS = "rope_freqs.weight"

AT_ONCE = 2**18  # values: the package needs a second array of a result, and is fastest within a cache


def read_gguf(file: pathlib.Path, ignore: Collection[str] = ()) -> Source:
    """Opens a GGUF file. Raises ValueError if it is broken, or its architecture or a setting is unknown."""
    gguf = package("gguf")
    metadata, stored, shapes = _opened(file)
    fields = _fields(metadata, shapes, ignore)
    if _FACTORS in stored:
        factors = gguf.quants.dequantize(stored[_FACTORS].data, stored[_FACTORS].tensor_type)
        fields["rope_scaling"] = _llama3(factors.ravel(), fields)
    of_heads = dict(q=fields["num_attention_heads"], k=fields["num_key_value_heads"])
    tensors = {}
    for name, tensor in stored.items():
        if name != _FACTORS:
            heads = of_heads.get(name.split(".")[-2:][0].removeprefix("attn_"))
            heads = heads if fields["model_type"] == "llama" else None
            tensors[_name(name)] = Stored(shapes[name], functools.partial(_parts, tensor, heads))
    return Source(fields, tensors, read_tokenizer(metadata))


def read_metadata(file: pathlib.Path) -> dict[str, Any]:
    """The settings of a GGUF file. Raises ValueError if it is broken."""
    return _opened(file)[0]


def _opened(file: pathlib.Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, tuple[int, ...]]]:
    """Settings, tensors and their shapes."""
    try:
        reader = package("gguf").GGUFReader(file)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        shapes = {tensor.name: tuple(int(size) for size in tensor.shape[::-1]) for tensor in reader.tensors}
    except ImportError:
        raise
    except Exception as error:  # the package checks little: what fails depends on the byte that is wrong
        told = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(
            f"a GGUF file must be whole, got {told!r} at {str(file)!r}. Load another copy of the model."
        ) from None
    return metadata, {tensor.name: tensor for tensor in reader.tensors}, shapes


def _fields(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], ignore: Collection[str]
) -> dict[str, Any]:
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"general.architecture must be one of {ARCHITECTURES}, got {architecture!r}. Load a model of a "
            "family that is known."
        )
    prefix = f"{architecture}."
    given = {name.removeprefix(prefix): value for name, value in metadata.items() if name.startswith(prefix)}
    fields: dict[str, Any] = dict(
        model_type=architecture,
        tie_word_embeddings="output.weight" not in shapes,
        vocab_size=shapes.get("token_embd.weight", (None,))[0],
    )
    if architecture != "qwen2":  # which always has some
        fields["attention_bias"] = "blk.0.attn_q.bias" in shapes
    fields |= {_FIELDS[name]: value for name, value in given.items() if name in _FIELDS}
    fields.setdefault("num_key_value_heads", fields.get("num_attention_heads"))
    numbers: Any = [
        fields.get(name) for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    ]
    if not all(isinstance(number, int) and number > 0 for number in numbers):
        raise ValueError(
            f"a model must have one width, and as many heads in all layers, got {numbers}. Load another one."
        )
    fields.setdefault("head_dim", None)  # the default of `config.json` may be another one
    sizes = fields["vocab_size"], *[_head_dim(fields)] * 2
    allowed = dict(zip(_CHECKED, sizes, strict=True)) | _OFF
    for name, value in given.items():
        if name in _FIELDS or name in ignore or prefix + name in ignore:
            continue
        if name not in allowed or allowed[name] not in (value, ...):
            raise ValueError(
                f"a setting of a GGUF file must be one whose meaning is known, got {prefix}{name}={value!r}. "
                f"Pass ignore=({prefix + name!r},) if the model computes the same without it."
            )
    scaling = {name: fields.pop(name) for name in _SCALING if name in fields}
    if scaling.get("rope_type", "none") != "none":
        fields["rope_scaling"] = scaling
    return fields


def _llama3(factors: np.ndarray, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The scaling of Llama 3 that divides the frequencies by these numbers."""
    scaling = Llama3Scaling(factor=float(factors.max()))
    base, half = float(fields.get("rope_theta", 10000.0)), len(factors)
    plain = np.array([base ** (-i / half) for i in range(half)])
    if half != _head_dim(fields) // 2 or not np.allclose(plain / scaling.scaled(plain, base), factors, 1e-4):
        raise ValueError(
            f"{_FACTORS} must be those of Llama 3.1 or later, got {factors}. Load the model as safetensors."
        )
    return dict(
        rope_type="llama3",
        factor=scaling.factor,
        low_freq_factor=scaling.low_frequency_factor,
        high_freq_factor=scaling.high_frequency_factor,
        original_max_position_embeddings=scaling.original_length,
    )


def _head_dim(fields: Mapping[str, Any]) -> int:
    return fields["head_dim"] or fields["hidden_size"] // fields["num_attention_heads"]


def _parts(tensor: Any, heads: int | None) -> Iterator[np.ndarray]:
    """Some rows of a tensor after the others, in float32.

    GGUF has the rows of these heads of Llama interleaved, the pairs of a rotation side by side. They come in
    halves.
    """
    dequantize = package("gguf").quants.dequantize
    rows: Any = np.arange(int(tensor.shape[-1]))
    if heads:
        rows = rows.reshape(heads, -1, 2).swapaxes(1, 2).ravel()
    if len(tensor.shape) == 1:
        yield dequantize(tensor.data, tensor.tensor_type)[rows]
        return
    some = max(1, AT_ONCE // int(tensor.shape[0]))
    for first in range(0, len(rows), some):
        yield dequantize(tensor.data[rows[first : first + some]], tensor.tensor_type)


def _name(name: str) -> str:
    """The name of a tensor in Hugging Face; itself if there is none."""
    *layer, part, kind = name.split(".")
    if part not in _NAMES:
        return name
    return ".".join([*(["model", "layers", layer[1]] if layer else []), _NAMES[part], kind])
