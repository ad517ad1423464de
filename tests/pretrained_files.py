"""Small models of each family: their files as others write them, and what they compute, in NumPy.

Nothing here imports the library. `logits` follows `transformers`, to which
`test_pretrained_transformers.py` compares the same models.
"""

import json
import math
import pathlib
from typing import Any

import numpy as np

SIZES = dict(
    vocab_size=29, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, rms_norm_eps=1e-5, max_position_embeddings=64,
)  # fmt: skip
GEMMA = "gemma3_text"
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": dict(model_type="llama", tie_word_embeddings=True, rope_theta=500.0),
    "llama with biases and linear scaling": dict(
        model_type="llama", attention_bias=True, rope_scaling=dict(type="linear", factor=2.5)
    ),
    "llama 3": dict(model_type="llama", rope_theta=5e5, rope_scaling=LLAMA3, num_key_value_heads=4),
    "llama with yarn": dict(
        model_type="llama",
        num_key_value_heads=1,
        max_position_embeddings=64,
        rope_parameters=dict(
            rope_type="yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=3.0, beta_slow=0.2,
            rope_theta=100.0,
        ),
    ),
    "mistral": dict(model_type="mistral", sliding_window=5, head_dim=6),
    "mistral without window": dict(model_type="mistral", sliding_window=None),
    "qwen2": dict(model_type="qwen2", tie_word_embeddings=True),
    "qwen2 with windows": dict(
        model_type="qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1
    ),
    "qwen3": dict(model_type="qwen3", head_dim=10, tie_word_embeddings=True),
    "qwen3 with windows and biases": dict(
        model_type="qwen3", head_dim=8, use_sliding_window=True, sliding_window=6, attention_bias=True,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gemma 3": dict(
        model_type=GEMMA, num_hidden_layers=3, num_key_value_heads=1, head_dim=12, tie_word_embeddings=True,
        query_pre_attn_scalar=20, sliding_window=5, sliding_window_pattern=3, rope_theta=5000.0,
        rope_local_base_freq=50.0, rope_scaling=dict(rope_type="linear", factor=4.0),
        hidden_activation="gelu_pytorch_tanh", cache_implementation="hybrid",
    ),
    "gemma 3 by layer": dict(
        model_type=GEMMA, head_dim=8, tie_word_embeddings=True, query_pre_attn_scalar=8, sliding_window=4,
        layer_types=["full_attention", "sliding_attention"],
        rope_parameters=dict(
            full_attention=dict(rope_type="default", rope_theta=700.0),
            sliding_attention=dict(rope_type="default", rope_theta=90.0),
        ),
    ),
}  # fmt: skip
ARCHITECTURE = {kind: f"{kind.capitalize()}ForCausalLM" for kind in ("llama", "mistral", "qwen2", "qwen3")}
ARCHITECTURE[GEMMA] = "Gemma3ForCausalLM"


def fields_of(family: str, **changes: Any) -> dict[str, Any]:
    """What `config.json` of a small model of this family says."""
    fields = SIZES | dict(hidden_act="silu", torch_dtype="float32") | FAMILIES[family] | changes
    return fields | dict(architectures=[ARCHITECTURE.get(fields["model_type"], "Other")])


def tensors_of(fields: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors of such a model, by their names."""
    width, inner, dim = fields["hidden_size"], fields["intermediate_size"], head_dim(fields)
    heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    kind = fields["model_type"]
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (heads * dim, width),
        "self_attn.k_proj.weight": (kv_heads * dim, width),
        "self_attn.v_proj.weight": (kv_heads * dim, width),
        "self_attn.o_proj.weight": (width, heads * dim),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    if kind == "qwen2" or fields.get("attention_bias"):
        for name, size in (("q", heads * dim), ("k", kv_heads * dim), ("v", kv_heads * dim)):
            shapes[f"self_attn.{name}_proj.bias"] = (size,)
    if fields.get("attention_bias"):
        shapes["self_attn.o_proj.bias"] = (width,)
    if kind in ("qwen3", GEMMA):
        shapes |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    if kind == GEMMA:
        shapes |= {f"{side}_feedforward_layernorm.weight": (width,) for side in ("pre", "post")}
    named = {"model.embed_tokens.weight": (fields["vocab_size"], width), "model.norm.weight": (width,)}
    for layer in range(fields["num_hidden_layers"]):
        named |= {f"model.layers.{layer}.{name}": shape for name, shape in shapes.items()}
    if not fields.get("tie_word_embeddings"):
        named["lm_head.weight"] = (fields["vocab_size"], width)
    rng = np.random.default_rng(seed)
    found = {}
    for name, shape in named.items():
        drawn = rng.standard_normal(shape)
        if len(shape) == 2:
            drawn *= 1.0 if "embed" in name else 1.5 * shape[1] ** -0.5
        else:
            drawn = (kind != GEMMA) + 0.3 * drawn if "norm" in name else drawn
        found[name] = drawn.astype(np.float32)
    return found


def head_dim(fields: dict[str, Any]) -> int:
    return fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]


def write_folder(
    folder: pathlib.Path, fields: dict[str, Any], tensors: dict[str, np.ndarray], *, files: int = 1
) -> pathlib.Path:
    """Writes `config.json` and safetensors, in several files with an index if asked."""
    from safetensors.numpy import save_file

    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps(fields))
    if files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    index = {}
    for number, names in enumerate(np.array_split(list(tensors), files)):
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        save_file({str(name): tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
        index |= {str(name): file for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(dict(metadata={}, weight_map=index)))
    return folder


_GGUF = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(
    file: pathlib.Path,
    fields: dict[str, Any],
    tensors: dict[str, np.ndarray],
    *,
    quantised=(),
    more=(),
    bpe=None,
) -> pathlib.Path:
    """Writes a GGUF file as `convert_hf_to_gguf.py` of llama.cpp does: it reorders rows of Llama.

    Args:
      file: the file.
      fields: of `config.json`.
      tensors: of Hugging Face.
      quantised: names of tensors that become Q8_0.
      more: settings to add, by name: those of the architecture begin with a dot.
      bpe: tokens, merges, kinds of tokens and the cut (`pre`) of a byte-level BPE tokenizer.
    """
    import gguf

    kind = fields["model_type"]
    writer = gguf.GGUFWriter(file, kind)
    writer.add_block_count(fields["num_hidden_layers"])
    writer.add_context_length(fields["max_position_embeddings"])
    writer.add_embedding_length(fields["hidden_size"])
    writer.add_feed_forward_length(fields["intermediate_size"])
    writer.add_head_count(fields["num_attention_heads"])
    writer.add_head_count_kv(fields["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(fields["rms_norm_eps"])
    writer.add_rope_freq_base(fields.get("rope_theta", 10000.0))
    if "head_dim" in fields:
        writer.add_key_length(fields["head_dim"])
        writer.add_value_length(fields["head_dim"])
    if kind == "llama":
        writer.add_vocab_size(fields["vocab_size"])
        writer.add_rope_dimension_count(head_dim(fields))
    for name, value in dict(more).items():
        name = f"{kind}{name}" if name.startswith(".") else name
        {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)](name, value)
    if bpe is not None:
        tokens, merges, kinds, pre = bpe
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_merges(merges)
        writer.add_token_types(kinds)
    scaling = fields.get("rope_scaling") or {}
    if scaling.get("rope_type") == "llama3":
        plain, scaled = (inverse_frequencies(fields | dict(rope_scaling=each)) for each in (None, scaling))
        writer.add_tensor("rope_freqs.weight", (plain[0] / scaled[0]).astype(np.float32))
    elif scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling.get("rope_type", scaling.get("type"))))
        writer.add_rope_scaling_factor(scaling["factor"])
    for name, tensor in tensors.items():
        if "layers" in name:
            number, rest = name.removeprefix("model.layers.").split(".", 1)
            part, suffix = rest.rsplit(".", 1)
            own = f"blk.{number}.{_GGUF[part]}.{suffix}"
        else:
            part, suffix = name.rsplit(".", 1)
            own = f"{_GGUF[part]}.{suffix}"
        if kind == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
            count = fields["num_attention_heads" if part.endswith("q_proj") else "num_key_value_heads"]
            halves = tensor.reshape(count, 2, -1, *tensor.shape[1:])
            tensor = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(tensor.shape))
        if name in quantised:
            q8 = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(own, gguf.quants.quantize(tensor, q8), raw_dtype=q8)
        else:
            writer.add_tensor(own, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def inverse_frequencies(fields: dict[str, Any]) -> tuple[np.ndarray, float]:
    """Radians a token of each pair, and the factor of rotated heads."""
    rope = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    base, dim = rope.get("rope_theta", fields.get("rope_theta", 10000.0)), head_dim(fields)
    plain = np.array([base ** (-2 * i / dim) for i in range(dim // 2)])
    kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor")
    if kind == "linear":
        return plain / factor, 1.0
    if kind == "llama3":
        original = rope["original_max_position_embeddings"]
        slow, fast = (original / rope[f"{name}_freq_factor"] for name in ("low", "high"))
        scaled = []
        for frequency in plain:
            length = 2 * math.pi / frequency
            smooth = (original / length - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            between = (1 - smooth) * frequency / factor + smooth * frequency
            scaled.append(frequency / factor if length > slow else frequency if length < fast else between)
        return np.array(scaled), 1.0
    if kind == "yarn":
        original = rope["original_max_position_embeddings"]

        def at(turns: float) -> float:
            return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

        first, last = (
            max(math.floor(at(rope["beta_fast"])), 0),
            min(math.ceil(at(rope["beta_slow"])), dim - 1),
        )
        ramp = np.clip((np.arange(dim // 2) - first) / (last - first), 0, 1)
        return plain / factor * ramp + plain * (1 - ramp), 0.1 * math.log(factor) + 1
    return plain, 1.0


def logits(fields: dict[str, Any], tensors: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """The logits `[B, T, vocab]` of a model, in float64, query by query."""
    of = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    x = of["model.embed_tokens.weight"][ids]
    heads, kv_heads, dim = fields["num_attention_heads"], fields["num_key_value_heads"], head_dim(fields)
    gemma = fields["model_type"] == GEMMA
    x = x * fields["hidden_size"] ** 0.5 if gemma else x
    scale = (fields["query_pre_attn_scalar"] if gemma else dim) ** -0.5

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + fields["rms_norm_eps"]) * (gemma + of[name])

    def project(x: np.ndarray, name: str) -> np.ndarray:
        return x @ of[f"{name}.weight"].T + of.get(f"{name}.bias", 0)

    def turned(x: np.ndarray) -> np.ndarray:
        first, second = np.split(x, 2, axis=-1)
        return x * cos + np.concatenate([-second, first], axis=-1) * sin

    for layer in range(fields["num_hidden_layers"]):
        name, window = f"model.layers.{layer}.", _window(fields, layer)
        frequencies, magnitude = inverse_frequencies(_rotation(fields, layer))
        angle = np.arange(ids.shape[1])[:, None] * np.concatenate([frequencies, frequencies])
        cos, sin = magnitude * np.cos(angle)[:, None], magnitude * np.sin(angle)[:, None]
        y = norm(x, f"{name}input_layernorm.weight")
        query, key, value = (
            project(y, f"{name}self_attn.{part}_proj").reshape(*ids.shape, number, dim)
            for part, number in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        if fields["model_type"] in ("qwen3", GEMMA):
            query, key = (
                norm(each, f"{name}self_attn.{part}_norm.weight") for part, each in (("q", query), ("k", key))
            )
        query, key = turned(query), turned(key)
        out = np.zeros_like(query)
        for t in range(ids.shape[1]):
            for head in range(heads):
                seen, of_kv = slice(max(0, t + 1 - window), t + 1), head // (heads // kv_heads)
                scores = np.einsum("bh,bsh->bs", query[:, t, head], key[:, seen, of_kv]) * scale
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                weights /= weights.sum(-1, keepdims=True)
                out[:, t, head] = np.einsum("bs,bsh->bh", weights, value[:, seen, of_kv])
        out = project(out.reshape(*ids.shape, -1), f"{name}self_attn.o_proj")
        x = x + (norm(out, f"{name}post_attention_layernorm.weight") if gemma else out)
        before = "pre_feedforward" if gemma else "post_attention"
        y = norm(x, f"{name}{before}_layernorm.weight")
        gate = project(y, f"{name}mlp.gate_proj")
        tanh = np.tanh((2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3))
        gate = gate * (1 + tanh) / 2 if gemma else gate / (1 + np.exp(-gate))
        out = project(gate * project(y, f"{name}mlp.up_proj"), f"{name}mlp.down_proj")
        x = x + (norm(out, f"{name}post_feedforward_layernorm.weight") if gemma else out)
    x = norm(x, "model.norm.weight")
    return x @ of["model.embed_tokens.weight" if fields.get("tie_word_embeddings") else "lm_head.weight"].T


def _window(fields: dict[str, Any], layer: int) -> int:
    """How many tokens a query of this layer sees."""
    everything, kind = 10**9, fields["model_type"]
    if kind == GEMMA:
        return fields["sliding_window"] if _slides(fields, layer) else everything
    if kind == "mistral":
        return fields["sliding_window"] or everything
    if not fields.get("use_sliding_window"):
        return everything
    if "layer_types" in fields:
        slides = fields["layer_types"][layer] == "sliding_attention"
    else:
        slides = layer >= fields["max_window_layers"]
    return fields["sliding_window"] if slides else everything


def _slides(fields: dict[str, Any], layer: int) -> bool:
    """Whether a layer of Gemma sees a window."""
    if "layer_types" in fields:
        return fields["layer_types"][layer] == "sliding_attention"
    return (layer + 1) % fields["sliding_window_pattern"] != 0


def _rotation(fields: dict[str, Any], layer: int) -> dict[str, Any]:
    """The fields with the rotation of this layer alone."""
    if fields["model_type"] != GEMMA:
        return fields
    slides = _slides(fields, layer)
    if "rope_parameters" in fields:
        of_layer = fields["rope_parameters"]["sliding_attention" if slides else "full_attention"]
        return fields | dict(rope_parameters=of_layer)
    return fields | (dict(rope_theta=fields["rope_local_base_freq"], rope_scaling=None) if slides else {})
