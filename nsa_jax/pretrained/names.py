"""The parameters of a dense `Transformer` under the names and in the shapes of Hugging Face."""

import math
from typing import NamedTuple

import numpy as np

from nsa_jax.model import TransformerConfig


class Place(NamedTuple):
    """Where a parameter is stored.

    Attributes:
      name: its name there.
      shape: its shape there. That of a kernel is `[out, in]`.
      own_shape: its shape here. That of a kernel is `[*in, *out]`.
      transposed: whether it is a kernel.
    """

    name: str
    shape: tuple[int, ...]
    own_shape: tuple[int, ...]
    transposed: bool = False

    def own(self, stored: np.ndarray) -> np.ndarray:
        """The parameter, of the stored tensor."""
        return (stored.T if self.transposed else stored).reshape(self.own_shape)

    def stored(self, own: np.ndarray) -> np.ndarray:
        """The tensor to store, of the parameter."""
        return own.reshape(self.shape[::-1]).T if self.transposed else own.reshape(self.shape)


def places(config: TransformerConfig) -> dict[str, Place]:
    """The place of each parameter of a dense model, by its name here."""
    width, inner = config.model_dim, config.mlp_width
    found = {"embed.embedding": _plain("model.embed_tokens.weight", config.vocab_size, width)}
    for number in range(config.num_layers):
        layer = _attention(config) | {
            "attention_norm.scale": _plain("input_layernorm.weight", width),
            "mlp_norm.scale": _plain("post_attention_layernorm.weight", width),
            "mlp.gate_proj.kernel": _kernel("mlp.gate_proj.weight", (width,), (inner,)),
            "mlp.up_proj.kernel": _kernel("mlp.up_proj.weight", (width,), (inner,)),
            "mlp.down_proj.kernel": _kernel("mlp.down_proj.weight", (inner,), (width,)),
        }
        for own, place in layer.items():
            found[f"layers.{number}.{own}"] = place._replace(name=f"model.layers.{number}.{place.name}")
    found["final_norm.scale"] = _plain("model.norm.weight", width)
    if not config.tie_embeddings:
        found["lm_head.kernel"] = _kernel("lm_head.weight", (width,), (config.vocab_size,))
    return found


def _attention(config: TransformerConfig) -> dict[str, Place]:
    width, dim = config.model_dim, config.head_dim or config.model_dim // config.num_heads
    heads = dict(query=config.num_heads, key=config.num_kv_heads, value=config.num_kv_heads)
    found = {}
    for name, number in heads.items():
        of, out = f"self_attn.{name[0]}_proj", (number, dim)
        found[f"attention.{name}_proj.kernel"] = _kernel(f"{of}.weight", (width,), out)
        if config.qkv_bias:
            found[f"attention.{name}_proj.bias"] = Place(f"{of}.bias", (math.prod(out),), out)
        if config.normalize_qk and name != "value":
            found[f"attention.{name}_norm.scale"] = _plain(f"self_attn.{name[0]}_norm.weight", dim)
    found["attention.out_proj.kernel"] = _kernel("self_attn.o_proj.weight", (config.num_heads, dim), (width,))
    if config.out_bias:
        found["attention.out_proj.bias"] = _plain("self_attn.o_proj.bias", width)
    return found


def _plain(name: str, *shape: int) -> Place:
    return Place(name, shape, shape)


def _kernel(name: str, into: tuple[int, ...], out: tuple[int, ...]) -> Place:
    return Place(name, (math.prod(out), math.prod(into)), (*into, *out), transposed=True)
